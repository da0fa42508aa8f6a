"""Cohort's iterations: decodes, then prompts one after another within the strictest promise; and who gives way."""

from __future__ import annotations

from random import Random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from cohort.common.policies.baselines.batch_builder import IterationLimits
from cohort.common.policies.cohort.cohort_batching import CohortBatching
from cohort.common.policies.interface import IterationPlan
from cohort.common.policies.kv_interface import KvAllocator
from cohort.common.policies.settings import CohortSettings
from cohort.common.policies.step_times.learned_times import plan_shape
from cohort.common.policies.step_times.step_cost import step_seconds
from cohort.common.sequence import Phase, Row, Sequence
from cohort.common.types import Slo, StepTimes, TrafficClass
from tests.common.policies.baselines.drive import BLOCK, cache, decide, leave, names, ran, rows, run, step
from tests.common.policies.cohort.one_by_one import table
from tests.common.policies.cohort.promised import promised
from tests.common.policies.step_times.test_step_times import random_batch

TIMES = StepTimes(0.001, 0.0002, 0.0001, 0.001, 0.0, 1e-6)
"""A prompt token is 0.1 ms, a decode row 0.2 ms and its context a microsecond a position."""
SETTINGS = CohortSettings()


def scheduler(
    *,
    learned: bool = True,
    longest_s: float = 0.04,
    rows_: int = 8,
    tokens: int = 600,
    how: str = "recompute",
    settings: CohortSettings = SETTINGS,
) -> CohortBatching:
    options = structs.replace(settings, longest_step_s=longest_s)
    limits = IterationLimits(rows_, tokens, tokens, "swap" if how == "swap" else "recompute")
    policy = CohortBatching(options, limits, cold_chunk=24, headroom=0.0, least_prefill=2)
    if learned:
        random = Random(5)
        for _ in range(400):
            shape = random_batch(random)
            policy.table.record(shape, step_seconds(TIMES, shape))
    return policy


def decoding(policy: CohortBatching, kv: KvAllocator, made: Sequence) -> Sequence:
    """It has its first token."""
    prompt = made.known
    kv.admit(made)
    kv.extend(made, prompt + 1)
    made.phase, made.computed = Phase.RUNNING, prompt
    made.tokens.append(1)
    policy.add(0.0, made)
    return made


def test_prompts_are_computed_one_after_another_the_shortest_first() -> None:
    policy, kv = scheduler(tokens=200), cache(400)
    for name, tokens in (("long", 300), ("middle", 250), ("short", 40)):
        policy.add(0.0, promised(name, tokens, ttft_s=9.0))
    assert rows(step(policy, kv)) == [("short", 0, 40), ("middle", 0, 160)]
    assert rows(step(policy, kv))[:2] == [("middle", 160, 90), ("long", 0, 109)]


def test_a_shorter_prompt_overtakes_one_that_has_begun() -> None:
    policy, kv = scheduler(tokens=100), cache(400)
    policy.add(0.0, promised("long", 300, ttft_s=9.0))
    step(policy, kv)
    policy.add(0.0, promised("short", 60, ttft_s=9.0))
    assert rows(step(policy, kv)) == [("short", 0, 60), ("long", 100, 40)]


def test_the_strictest_promise_among_the_decodes_bounds_the_iteration() -> None:
    policy, kv = scheduler(), cache(400)
    decoding(policy, kv, promised("relaxed", 40, tpot_s=0.03))
    decoding(policy, kv, promised("strict", 40, tpot_s=0.01))
    decoding(policy, kv, promised("none", 40, ttft_s=0.0, tpot_s=0.002, traffic_class="be"))
    policy.add(0.0, promised("p", 500, ttft_s=9.0))
    plan = decide(policy, kv, 0.0)
    assert names(plan) == ["p", "strict", "relaxed", "none"]
    assert 0.009 <= step_seconds(TIMES, plan_shape(plan)) <= 0.0105
    assert policy.metrics()["iteration_aim_ms"] == pytest.approx(10.0)


def test_streams_that_lost_their_worker_go_on_in_as_few_iterations_as_may_be() -> None:
    policy, kv = scheduler(), cache(400)
    decoding(policy, kv, promised("strict", 40, tpot_s=0.01))
    for index in range(4):
        policy.add(0.0, promised(f"p{index}", 100, known=20))
    plan = decide(policy, kv, 0.0)
    assert rows(plan)[:3] == [("p0", 0, 120), ("p1", 0, 120), ("p2", 0, 120)]
    assert 0.035 <= step_seconds(TIMES, plan_shape(plan)) <= 0.041


def test_a_deadline_bounds_the_iteration_by_what_is_left_of_it() -> None:
    policy, kv = scheduler(), cache(400)
    whole = decoding(policy, kv, promised("whole", 40))
    whole.request = msgspec.structs.replace(whole.request, slo=Slo(deadline_s=1.2))
    whole.predicted = 101.0
    whole.prefill_done_s = 0.2  # a second for a hundred tokens
    policy.add(0.2, promised("p", 900, ttft_s=9.0, arrived_s=0.2))
    assert 0.009 <= step_seconds(TIMES, plan_shape(decide(policy, kv, 0.2))) <= 0.0105


def test_best_effort_decodes_bound_nothing() -> None:
    policy, kv = scheduler(longest_s=0.03), cache(400)
    decoding(policy, kv, promised("b", 40, ttft_s=0.0, tpot_s=0.001, traffic_class="be"))
    policy.add(0.0, promised("p", 550, ttft_s=9.0))
    assert 0.028 <= step_seconds(TIMES, plan_shape(decide(policy, kv, 0.0))) <= 0.031


def test_a_prompt_is_cut_to_the_room_there_is_and_never_to_nothing() -> None:
    policy, kv = scheduler(), cache(400)
    for index in range(6):
        decoding(policy, kv, promised(f"d{index}", 40, tpot_s=0.001))
    policy.add(0.0, promised("p", 500, ttft_s=9.0))
    assert rows(decide(policy, kv, 0.0))[0] == ("p", 0, 2), "least_prefill: the decodes alone take too long"


@pytest.mark.parametrize(("waited_s", "beside"), [(0.0, 290), (0.015, 140), (0.03, 0), (0.05, 0), (0.07, 290)], ids=str)
def test_a_newcomer_pays_for_others_what_is_left_of_a_step(waited_s: float, beside: int) -> None:
    """It has waited for the iteration before; its own holds so much more of a long prompt as makes one step in sum.
    One that queued for more than two steps is served soonest by full ones."""
    policy, kv = scheduler(longest_s=0.03), cache(400)
    policy.add(0.0, promised("long", 900, ttft_s=9.0))
    step(policy, kv)
    policy.add(0.1, promised("new", 8, ttft_s=9.0, arrived_s=0.1))
    plan = decide(policy, kv, 0.1 + waited_s)
    counts = {name: count for name, _, count in rows(plan)}
    assert counts.pop("new") == 8
    assert counts.pop("long", 0) == pytest.approx(beside, rel=0.1)


def test_newcomers_do_not_hold_each_other_up() -> None:
    """All that fit a whole step get their first token in it, however long they waited."""
    policy, kv = scheduler(longest_s=0.03), cache(400)
    for index in range(5):
        policy.add(0.0, promised(f"n{index}", 40, ttft_s=9.0))
    assert [count for _, _, count in rows(decide(policy, kv, 0.03))] == [40] * 5


def test_on_an_unknown_machine_the_share_of_prompts_is_found_by_trying() -> None:
    """It doubles while iterations are short, halves when one is too long, and never passes its limit."""
    policy, kv = scheduler(learned=False, longest_s=0.04, tokens=2000), cache(4000)
    policy._longest_cold_chunk, policy._cold_chunk = 512, 128
    policy.add(0.0, promised("p", 9000, ttft_s=90.0))
    taken = [rows(step(policy, kv, latency_s=latency_s))[0][2] for latency_s in (0.001, 0.019, 0.03, 0.05, 0.03, 0.0)]
    assert taken == [128, 256, 512, 512, 256, 256]
    assert policy.table.step_times is None


def test_victims_best_effort_then_broken_promises_then_most_slack() -> None:
    now_s = 10.0
    tight, slack = promised("tight", 9, arrived_s=9.5), promised("slack", 9, arrived_s=9.5, ttft_s=5.0)
    broken = promised("broken", 9, arrived_s=5.0)
    effort = promised("effort", 9, arrived_s=0.0, ttft_s=0.0, traffic_class="be")
    running = table([effort, broken, slack, tight], now_s)
    assert running.at(running.ranked()) == [tight, slack, broken, effort]


def test_a_sequence_near_its_end_is_safer_than_one_that_has_time_to_make_up_for_a_pause() -> None:
    old, young = promised("old", 9, arrived_s=0.0), promised("young", 9, arrived_s=9.3)
    for each, output in ((old, 95), (young, 1)):
        each.tokens += [1] * output
        each.predicted = 100.0
    running = table([young, old], 10.0)
    assert running.at(running.ranked()) == [old, young], "though it has won more so far"
    assert running.at(running.ranked(by_slack=False)) == [old, young], "the youngest gives way"


def test_the_one_with_most_slack_gives_way_and_comes_back() -> None:
    policy, kv = scheduler(), cache(8)
    hurried = decoding(policy, kv, promised("hurried", 4 * BLOCK - 1, ttft_s=1.0))
    relaxed = decoding(policy, kv, promised("relaxed", 4 * BLOCK - 1, ttft_s=50.0))
    step(policy, kv)
    plan = decide(policy, kv, 0.1)
    assert names(plan) == ["hurried"]
    assert [preempt.sequence.request_id for preempt in plan.preempted] == ["relaxed"]
    assert (hurried.phase, relaxed.phase, relaxed.computed) == (Phase.RUNNING, Phase.WAITING, 0)
    leave(policy, kv, hurried)
    assert names(decide(policy, kv, 0.2)) == ["relaxed"]


def effort(policy: CohortBatching, kv: KvAllocator, name: str, blocks: int, arrived_s: float = 0.0) -> Sequence:
    made = promised(name, blocks * BLOCK - 1, ttft_s=0.0, traffic_class="be", arrived_s=arrived_s)
    return decoding(policy, kv, made)


def test_best_effort_gives_up_its_row_as_well() -> None:
    policy, kv = scheduler(rows_=3), cache(400)
    for index in range(3):
        effort(policy, kv, f"b{index}", 2, arrived_s=float(index))
    policy.add(3.0, promised("p", 20, ttft_s=9.0, arrived_s=3.0))
    plan = decide(policy, kv, 3.0)
    assert [preempt.sequence.request_id for preempt in plan.preempted] == ["b2"]
    assert names(plan) == ["p", "b0", "b1"]


@pytest.mark.parametrize(
    ("real_time", "blocks", "waited_s", "goes"),
    [(4, 400, 0.0, True), (5, 400, 0.0, False), (5, 400, 60.0, True), (2, 16, 0.0, False), (2, 30, 0.0, True)],
    ids=["some rows", "most rows", "patience", "most blocks", "some blocks"],
)
def test_best_effort_prompts_wait_while_real_time_sequences_hold_most(
    real_time: int, blocks: int, waited_s: float, goes: bool
) -> None:
    """Of eight rows; a real-time sequence holds five blocks."""
    policy, kv = scheduler(), cache(blocks)
    for index in range(real_time):
        decoding(policy, kv, promised(f"rt{index}", 5 * BLOCK - 4, max_tokens=2))
    policy.add(waited_s, promised("effort", 8, ttft_s=0.0, traffic_class="be", arrived_s=0.0, max_tokens=2))
    assert ("effort" in names(decide(policy, kv, waited_s))) is goes
    policy, kv = scheduler(settings=CohortSettings(yielding=False)), cache(400)
    for index in range(5):
        decoding(policy, kv, promised(f"rt{index}", 5 * BLOCK - 4, max_tokens=2))
    policy.add(0.0, promised("effort", 8, ttft_s=0.0, traffic_class="be", max_tokens=2))
    assert "effort" in names(decide(policy, kv, 0.0))


def choices(policy: CohortBatching, kv: KvAllocator, count: int) -> list[Sequence]:
    return [decoding(policy, kv, promised(f"c{index:02}", 20, choices=count)) for index in range(count)]


def test_the_rows_of_many_choices_leave_a_newcomer_what_is_left_of_the_longest_iteration() -> None:
    """An iteration of 32 takes 8 ms. The newcomer has waited 3 of 6, and takes 2 itself."""
    policy, kv = scheduler(longest_s=0.006, rows_=64), cache(400)
    choices(policy, kv, 32)
    beside = decide(policy, kv, 0.0)
    assert 12 <= len(beside.rows) < 32 and step_seconds(TIMES, plan_shape(beside)) <= 0.0065
    policy.add(0.0, promised("newcomer", 20, arrived_s=-0.003))
    plan = decide(policy, kv, 0.0)
    assert names(plan)[0] == "newcomer" and 4 <= len(plan.rows) - 1 <= 10
    assert step_seconds(TIMES, plan_shape(plan)) <= 0.0055


def test_a_chunk_behind_a_cached_prefix_costs_what_its_place_costs() -> None:
    policy, kv = scheduler(learned=False, tokens=4000, longest_s=0.05), cache(900, caching=True)
    times = structs.replace(TIMES, pair_s=1e-6)
    random = Random(5)
    for _ in range(400):
        shape = random_batch(random)
        policy.table.record(shape, step_seconds(times, shape))
    first = promised("first", 2000, ttft_s=9.0)
    policy.add(0.0, first)
    for _ in range(60):
        if first.output_tokens:
            break
        step(policy, kv)
    leave(policy, kv, first)
    second = promised("second", 2400, ttft_s=9.0)
    second.tokens[:2000] = first.tokens[:2000]
    policy.add(0.0, second)
    plan = decide(policy, kv, 0.0)
    assert plan.rows[0].start > 1500
    assert step_seconds(times, plan_shape(plan)) <= 0.06


def test_each_part_can_be_taken_away() -> None:
    def prompts_of(settings: CohortSettings) -> list[tuple[str, int, int]]:
        policy, kv = scheduler(settings=settings), cache(400)
        decoding(policy, kv, promised("d", 40, tpot_s=0.01))
        policy.add(0.0, promised("long", 500, ttft_s=9.0, arrived_s=-1.0))
        policy.add(0.0, promised("short", 20, ttft_s=9.0))
        return [row for row in rows(decide(policy, kv, 0.0)) if row[0] != "d"]

    assert [name for name, *_ in prompts_of(SETTINGS)] == ["short", "long"]
    assert [name for name, *_ in prompts_of(CohortSettings(ordered=False))] == ["long"]
    assert prompts_of(CohortSettings(bounded=False)) == [("short", 0, 20), ("long", 0, 4)], "24 tokens: the cold chunk"
    policy, kv = scheduler(settings=CohortSettings(victims="youngest")), cache(8)
    decoding(policy, kv, promised("relaxed", 4 * BLOCK - 1, ttft_s=50.0, arrived_s=-1.0))
    decoding(policy, kv, promised("hurried", 4 * BLOCK - 1, ttft_s=1.0))
    step(policy, kv)
    assert [preempt.sequence.request_id for preempt in decide(policy, kv, 0.1).preempted] == ["hurried"]


def holding_blocks(
    settings: CohortSettings = SETTINGS, *, wanted: int = 3, ttft_s: float = 9.0, output: int = 1
) -> list[str]:
    """Of eight blocks best-effort sequences hold three each and a real-time one a block: who is preempted for a prompt
    of so many blocks."""
    policy, kv = scheduler(settings=settings), cache(8)
    decoding(policy, kv, promised("rt", BLOCK - 2, max_tokens=2))
    for name, arrived_s in (("older", -2.0), ("younger", -1.0)):
        effort = promised(name, 3 * BLOCK - 2, ttft_s=0.0, traffic_class="be", arrived_s=arrived_s, max_tokens=2)
        decoding(policy, kv, effort)
    new = promised("new", wanted * BLOCK - 2, ttft_s=ttft_s, max_tokens=output)
    new.predicted = float(output)
    policy.add(0.0, new)
    plan = decide(policy, kv, 0.01)
    preempted = [preempt.sequence.request_id for preempt in plan.preempted]
    assert ("new" in names(plan)) == bool(preempted)
    return preempted


def test_best_effort_sequences_give_their_blocks_to_a_prompt_on_time() -> None:
    assert holding_blocks() == ["younger"], "the last that came, and no more than has to"
    assert holding_blocks(wanted=6) == ["younger", "older"]


def test_they_keep_their_blocks_where_that_would_not_help() -> None:
    assert holding_blocks(wanted=8) == [], "it would not fit without them either"
    assert holding_blocks(output=6 * BLOCK) == [], "nor would its response"
    assert holding_blocks(ttft_s=0.005) == [], "it is late"
    assert holding_blocks(CohortSettings(yielding=False)) == []


def test_they_give_their_blocks_also_where_no_real_time_sequence_runs() -> None:
    policy, kv = scheduler(), cache(8)
    for name, arrived_s in (("older", -2.0), ("younger", -1.0)):
        decoding(policy, kv, promised(name, 4 * BLOCK - 2, ttft_s=0.0, traffic_class="be", arrived_s=arrived_s))
    policy.add(0.0, promised("new", 3 * BLOCK, ttft_s=9.0, max_tokens=1))
    plan = decide(policy, kv, 0.01)
    assert [preempt.sequence.request_id for preempt in plan.preempted] == ["younger"]
    assert "new" in names(plan)


def test_a_prompt_that_holds_blocks_goes_on_behind_one_that_finds_none() -> None:
    policy, kv = scheduler(tokens=40), cache(8)
    policy.add(0.0, promised("long", 6 * BLOCK, ttft_s=9.0, max_tokens=1))
    step(policy, kv)
    policy.add(0.0, promised("lacks", 4 * BLOCK, ttft_s=9.0, max_tokens=1))
    policy.add(0.0, promised("lacks too", 4 * BLOCK + 1, ttft_s=9.0, max_tokens=1))
    assert names(step(policy, kv)) == ["long"]


def full(*, tpot_s: float, ttft_s: float = 9.0) -> list[str]:
    """All eight rows decode, with so strict a TPOT, and a prompt comes: the names in the next iteration."""
    policy, kv = scheduler(), cache(400)
    for index in range(8):
        decoding(policy, kv, promised(f"d{index}", 40, tpot_s=tpot_s)).last_token_s = 0.001 * index
    policy.add(0.0, promised("new", 20, ttft_s=ttft_s))
    return names(decide(policy, kv, 0.01))


def test_a_prompt_on_time_starts_where_sequences_can_take_turns() -> None:
    assert full(tpot_s=0.1) == ["new", *(f"d{index}" for index in range(7))], "the last token of d7 is the newest"


def test_it_waits_for_a_row_where_they_cannot_or_where_it_is_late() -> None:
    everything = sorted(f"d{index}" for index in range(8))
    assert sorted(full(tpot_s=0.0)) == everything, "without a TPOT each has its row"
    assert sorted(full(tpot_s=0.004)) == everything, "an iteration takes that long"
    assert sorted(full(tpot_s=0.1, ttft_s=0.005)) == everything


@pytest.mark.parametrize(("tpot_s", "goes_on"), [(0.0, True), (0.1, False)])
def test_full_rows_are_no_promise_of_the_next_plan_where_sequences_can_take_turns(tpot_s: float, goes_on: bool) -> None:
    policy, kv = scheduler(), cache(400)
    for index in range(8):
        decoding(policy, kv, promised(f"d{index}", 40, tpot_s=tpot_s))
    plan = step(policy, kv)
    policy.add(0.0, promised("new", 20, ttft_s=9.0))
    assert policy.continues(plan, kv, 0, 0) == goes_on
    assert (sorted(names(step(policy, kv))) == sorted(names(plan))) == goes_on


def test_sequences_that_take_turns_all_keep_their_tpot() -> None:
    policy, kv = scheduler(), cache(400)
    running = [promised(f"p{index}", 20, tpot_s=0.02, max_tokens=60) for index in range(24)]
    for each in running:
        policy.add(0.0, each)
    now_s = 0.0
    for _ in range(100):
        plan = decide(policy, kv, now_s)
        assert len(plan.rows) <= 8
        step_s = step_seconds(TIMES, plan_shape(plan))
        now_s += step_s
        ran(policy, plan, now_s, step_s)
        run(plan, kv)
        for row in plan.rows:
            if row.sequence.output_tokens:
                row.sequence.last_token_s = now_s
                row.sequence.prefill_done_s = row.sequence.prefill_done_s or now_s
    started = [each for each in running if each.prefill_done_s is not None]
    assert len(started) > 8, "more than rows"
    for each in started:
        assert each.prefill_done_s is not None
        assert (now_s - each.prefill_done_s) / max(1, each.output_tokens - 1) <= 0.022


@given(st.lists(st.sampled_from([0.1, 0.5, 1.0, 3.0, 10.0]), min_size=24, max_size=24), st.integers(30, 200))
def test_taking_turns_ends_all_of_them_whatever_was_predicted_and_however_little_memory_there_is(
    wrong_by: list[float], blocks: int
) -> None:
    """And none that holds its KV is passed over: its next token comes within its TPOT and two iterations, also when
    more were let in than the rows can bear."""
    policy, kv = scheduler(), cache(blocks)
    live = [promised(f"p{index}", 20, tpot_s=0.03, max_tokens=40) for index in range(len(wrong_by))]
    for each, factor in zip(live, wrong_by, strict=True):
        each.predicted = 40 * factor
        policy.add(0.0, each)
    now_s, longest_gap_s, longest_step_s = 0.0, 0.0, 0.0
    paused: set[str] = set()
    for _ in range(3000):
        plan = decide(policy, kv, now_s)
        step_s = step_seconds(TIMES, plan_shape(plan))
        now_s, longest_step_s = now_s + step_s, max(longest_step_s, step_s)
        ran(policy, plan, now_s, step_s)
        run(plan, kv)
        paused |= {victim.sequence.request_id for victim in plan.preempted}
        for each in (row.sequence for row in plan.rows if row.sequence.output_tokens):
            if each.last_token_s is not None and each.request_id not in paused:
                longest_gap_s = max(longest_gap_s, now_s - each.last_token_s)
            paused.discard(each.request_id)
            each.last_token_s = now_s
            each.prefill_done_s = each.prefill_done_s or now_s
        for ended in [each for each in live if each.output_tokens >= 40]:
            live.remove(ended)
            leave(policy, kv, ended)
    assert not live and kv.free_blocks == blocks
    assert longest_gap_s <= 0.03 + 2 * longest_step_s


def test_an_iteration_lasts_longer_while_its_sequences_are_ahead() -> None:
    def aim_ms(settings: CohortSettings = SETTINGS) -> float:
        policy, kv = scheduler(settings=settings), cache(400)
        decoding(policy, kv, promised("d", 40, tpot_s=0.01)).prefill_done_s = 0.3
        policy.add(0.29, promised("p", 500, ttft_s=9.0))
        decide(policy, kv, 0.295)
        return policy.metrics()["iteration_aim_ms"]

    assert aim_ms() == pytest.approx(11.0)
    assert aim_ms(CohortSettings(stretched=False)) == pytest.approx(10.0)


def test_where_a_prompt_waits_for_blocks_iterations_stay_even_and_the_shortest_goes_first() -> None:
    """More prompt tokens would not help: blocks come back as responses end, and short prompts want few of them."""
    policy, kv = scheduler(), cache(12)
    held = decoding(policy, kv, promised("d", 7 * BLOCK, tpot_s=0.01))
    held.prefill_done_s = 0.3
    policy.add(0.29, promised("due", 9 * BLOCK, ttft_s=0.012, arrived_s=0.29))
    policy.add(0.29, promised("short", 8 * BLOCK, ttft_s=9.0))
    for crowded in (False, True):
        assert names(decide(policy, kv, 0.295)) == ["d"]
        assert policy.metrics()["iteration_aim_ms"] == pytest.approx(10.0 if crowded else 11.0)
    policy.remove(0.295, held)
    kv.release(held.key)
    assert names(decide(policy, kv, 0.295)) == ["short"]


def test_the_pace_of_prompts_is_told_by_iterations_behind_which_one_waited() -> None:
    policy, kv = scheduler(tokens=100), cache(400)
    policy.add(0.0, promised("alone", 60, ttft_s=9.0))
    step(policy, kv, latency_s=0.5)
    decide(policy, kv, 0.0)
    assert policy._token_pace.each_s == 0.0
    policy.add(0.0, promised("p", 300, ttft_s=9.0))
    step(policy, kv, latency_s=0.05)
    step(policy, kv, latency_s=0.1)
    decide(policy, kv, 0.0)
    assert policy._token_pace.each_s == pytest.approx((0.9 * 0.05 + 0.1) / (0.9 * 99 + 99), rel=0.05)


def test_steps_with_grammars_have_no_pace() -> None:
    policy, kv = scheduler(tokens=100, rows_=1), cache(400)
    policy.add(0.0, promised("p", 300, ttft_s=9.0))
    policy.add(0.0, promised("rowless", 300, ttft_s=9.0))
    for latency_s in (0.05, 30.0, 0.05):
        step(policy, kv, latency_s=latency_s).has_grammars = latency_s > 1.0
    decide(policy, kv, 0.0)
    assert policy._token_pace.each_s == pytest.approx(0.0005)
    assert policy._row_pace._seconds <= 0.1


REQUESTS = st.lists(
    st.tuples(
        st.integers(1, 40),
        st.integers(1, 12),
        st.sampled_from([0.0, 0.05, 1.0, 60.0]),
        st.sampled_from([0.0, 0.004, 0.1]),
        st.sampled_from(["rt", "be"]),
        st.floats(0.0, 0.3),
    ),
    min_size=1,
    max_size=14,
)


@given(REQUESTS, st.integers(14, 40), st.integers(1, 5), st.sampled_from(["swap", "recompute"]), st.booleans())
def test_every_request_ends_in_any_cache_that_holds_the_largest(
    requests: list[tuple[int, int, float, float, TrafficClass, float]],
    blocks: int,
    max_rows: int,
    how: str,
    learned: bool,
) -> None:
    policy = scheduler(learned=learned, rows_=max_rows, tokens=50, how=how)
    kv = cache(blocks, 10 if how == "swap" else 0)
    coming = sorted(
        (
            promised(
                f"r{index}", prompt, ttft_s=ttft, tpot_s=tpot, traffic_class=group, arrived_s=at, max_tokens=output
            )
            for index, (prompt, output, ttft, tpot, group, at) in enumerate(requests)
        ),
        key=lambda s: s.arrived_s,
    )
    live: list[Sequence] = []
    now_s, idle = 0.0, 0
    for _ in range(6000):
        while coming and coming[0].arrived_s <= now_s:
            live.append(coming.pop(0))
            policy.add(now_s, live[-1])
        if not live and not coming:
            break
        plan = step(policy, kv, now_s, 0.01)
        assert len(plan.rows) <= max_rows and plan.tokens <= 50
        assert len({row.sequence.key for row in plan.rows}) == len(plan.rows)
        idle = 0 if plan.rows or coming else idle + 1
        assert idle < 3, f"nothing runs although {[s.request_id for s in live]} wait"
        now_s += 0.01
        for ended in [s for s in live if s.output_tokens >= s.request.sampling.max_tokens]:
            live.remove(ended)
            leave(policy, kv, ended)
    assert not live and not coming
    assert kv.free_blocks == blocks
    assert len(policy._prompts) == 0 and not len(policy._running) and not policy._swapped


@pytest.mark.parametrize(("traffic_class", "priority"), [("rt", 0), ("rt", 5), ("be", 0)])
def test_what_has_waited_too_long_gets_its_share_of_the_time_and_no_more(
    traffic_class: TrafficClass, priority: int
) -> None:
    """Beside prompts on time that would take everything; of any class and priority, the longest wait first."""
    policy, kv, now_s = scheduler(), cache(40_000), 100.0
    for number in range(40):
        effort = {"traffic_class": traffic_class, "priority": priority, "ttft_s": float(traffic_class == "rt")}
        policy.add(now_s, promised(f"old{number}", 300, arrived_s=number / 10, max_tokens=1, **effort))
    computed, started = {"old": 0, "new": 0}, list[str]()
    for number in range(400):
        while policy._prompts.tokens(3000) < 3000:
            now = promised(f"new{number}-{len(policy._prompts)}", 200, arrived_s=now_s, ttft_s=5.0, max_tokens=1)
            policy.add(now_s, now)
        plan = decide(policy, kv, now_s)
        seconds = step_seconds(TIMES, plan_shape(plan))
        now_s += seconds
        for row in plan.rows:
            computed[row.sequence.request_id[:3]] += row.count
            if row.start == 0 and row.sequence.request_id.startswith("old"):
                started.append(row.sequence.request_id)
        run(plan, kv)
        ran(policy, plan, now_s, seconds)
        for row in plan.rows:
            if row.sequence.output_tokens:
                leave(policy, kv, row.sequence)
    share = computed["old"] / sum(computed.values())
    assert 0.07 < share < 0.13 and started == [f"old{number}" for number in range(len(started))]


def test_a_prompt_counts_as_what_the_cache_lacks() -> None:
    policy, kv = scheduler(), cache(400, caching=True)
    first = promised("shared", 400, ttft_s=9.0, max_tokens=1)
    policy.add(0.0, first)
    while not first.output_tokens:
        step(policy, kv)
    again = promised("again", 1, ttft_s=0.035)
    again.tokens[:] = [*first.tokens[:400], *[7] * 20]
    again.request = structs.replace(again.request, tokens=list(again.tokens), prompt_tokens=420)
    for each in (promised("other", 60, ttft_s=9.0), again):
        policy.add(0.0, each)
    plan = decide(policy, kv, 0.0)
    assert rows(plan)[0] == ("again", 400, 20), "42 ms of work if all were computed, 2 ms as it is"


def test_a_prompt_is_asked_again_when_it_is_next() -> None:
    """Its prefix may have come, or gone, meanwhile."""
    policy, kv = scheduler(tokens=200), cache(400, caching=True)
    first, same = promised("shared", 400, ttft_s=9.0), promised("same", 400, ttft_s=9.0, arrived_s=0.001)
    same.tokens[:] = first.tokens
    same.request = structs.replace(same.request, tokens=list(same.tokens))
    for each in (first, same):
        policy.add(0.01, each)
    decide(policy, kv, 0.01)
    assert same.cached_ahead == 0
    while not first.output_tokens:
        step(policy, kv)
    assert same.to_compute == 400
    decide(policy, kv, 0.1)
    assert same.computed == 396


def test_the_next_chunk_is_promised_with_time_to_spare() -> None:
    policy, kv = scheduler(tokens=2000), cache(4000)
    decoding(policy, kv, promised("d", 40, tpot_s=0.03))
    long = promised("long", 900, ttft_s=9.0)
    policy.add(0.0, long)
    policy.add(0.0, promised("longer", 950, ttft_s=9.0))
    plan = decide(policy, kv, 0.0)
    (name, start, first), decode = rows(plan)
    assert (name, start, decode) == ("long", 0, ("d", 40, 1))
    following = [Row(long, first, 900 - first)]
    counts = policy.chunks_ahead(following, 1)
    assert counts is not None and 0.8 * first < counts[0] < first
    ahead = IterationPlan([Row(long, first, counts[0]), Row(plan.rows[1].sequence, 41, 1)])
    assert step_seconds(TIMES, plan_shape(ahead)) < 0.97 * policy.metrics()["iteration_aim_ms"] / 1e3
    assert policy.continues(ahead, kv, 0, 0)
    assert not policy.continues(ahead, kv, 0, 8), "a decision is due"
    whole = IterationPlan([Row(long, first, 900 - first), ahead.rows[1]])
    assert not policy.continues(whole, kv, 0, 0), "another prompt may have what is left of its iteration"
    policy.add(0.0, promised("short", 20, ttft_s=9.0))
    assert policy.chunks_ahead(following, 1) is None, "it goes first"


def test_a_prompt_that_ends_in_flight_bounds_the_chunk_behind_it() -> None:
    policy, kv = scheduler(tokens=2000), cache(4000)
    strict, long = promised("strict", 40, ttft_s=9.0, tpot_s=0.01), promised("long", 900, ttft_s=9.0)
    for each in (strict, long):
        policy.add(0.0, each)
    (_, _, ended), (_, _, begun) = rows(decide(policy, kv, 0.0))
    assert ended == 40 and begun > 200
    counts = policy.chunks_ahead([Row(long, begun, 900 - begun)], 1)
    assert counts is not None and 60 < counts[0] < 100


def test_steps_are_planned_ahead_while_prompts_wait_for_blocks() -> None:
    policy, kv = scheduler(), cache(24)
    decoding(policy, kv, promised("d", 60, max_tokens=30)).predicted = 30.0
    policy.add(0.0, promised("large", 60, max_tokens=30))
    plan = decide(policy, kv, 0.0)
    assert names(plan) == ["d"]
    ahead = IterationPlan([Row(plan.rows[0].sequence, 61, 1)])
    assert policy.continues(ahead, kv, 0, 0) and not policy.continues(ahead, kv, 0, 8)
    assert policy.steady_for(plan, kv) == 0, "the forecast may change from one iteration to the next"
    policy.add(0.0, promised("new", 8))
    assert not policy.continues(ahead, kv, 0, 0)
