"""Algorithm 1 by hand: order, early return, replacement, late requests, drops; then that no request waits for ever."""

from __future__ import annotations

import json
from itertools import combinations
from random import Random

import pytest

from cohort.common.config import load_config
from cohort.common.errors import ConfigError
from cohort.common.policies import compose
from cohort.common.policies.baselines.batch_builder import IterationLimits
from cohort.common.policies.baselines.paged_allocation import PagedAllocator
from cohort.common.policies.bros.batch import AdaptiveBatchSize, Batch
from cohort.common.policies.bros.bidirectional_allocation import BidirectionalAllocator
from cohort.common.policies.bros.iteration_cost import IterationCost
from cohort.common.policies.bros.slack_packing import SlackPacking, Unserved
from cohort.common.policies.bros.token_groups import TokenGroups
from cohort.common.policies.interface import IterationPlan
from cohort.common.policies.kv_interface import KvAllocator
from cohort.common.policies.settings import BrosSettings
from cohort.common.sequence import Phase, Sequence
from cohort.common.types import Attempt
from tests.common.policies.baselines.drive import decide, ran
from tests.common.policies.bros.kv_world import GEOMETRY, request


def packing(
    *,
    first: int = 8,
    cut: bool = False,
    preemption: str = "recompute",
    chunk: int = 512,
    starve_s: float = 100.0,
    every: int = 1,
    share: float = 0.0,
    drops: bool = True,
) -> SlackPacking:
    """10 ms an iteration, 1 ms a prompt token, 1 ms a row; TTFT 0.4 s, TPOT 0.2 s."""
    options = BrosSettings(
        first_batch=first,
        batch_step=2,
        rt_starvation_s=starve_s,
        be_starvation_s=starve_s,
        best_effort_share=share,
        cut_prompts=cut,
        drops=drops,
    )
    limits = IterationLimits(16, 512, chunk, preemption)  # type: ignore[arg-type]
    groups = TokenGroups(group_tokens=1, default_ttft_s=0.4, default_tpot_s=0.2)
    cost = IterationCost()
    points = [
        {"shape": {"rows": 1, "tokens_per_row": n, "context": n}, "median_s": 0.01 + 0.001 * n} for n in (10, 100, 900)
    ] + [
        {"shape": {"rows": n, "tokens_per_row": 1, "context": c}, "median_s": 0.01 + 0.001 * n}
        for n in (1, 10, 100)
        for c in (10, 100)
    ]
    cost.import_state(json.dumps({"points": points}).encode())
    policy = SlackPacking(options, limits, groups, cost)
    policy._unserved = Unserved({"rt": starve_s, "be": starve_s}, every=every)
    return policy


def names(plan: IterationPlan) -> list[str]:
    return [row.sequence.request_id for row in plan.rows]


def step(policy: SlackPacking, kv: KvAllocator, now_s: float) -> IterationPlan:
    plan = decide(policy, kv, now_s)
    kv.check()
    ran(policy, plan, now_s, plan.estimated_s)
    for row in plan.rows:
        row.sequence.computed = row.start + row.count
        if row.sequence.computed == row.sequence.known:
            row.sequence.tokens.append(1)
            row.sequence.last_token_s = now_s
        kv.committed(row.sequence)
    return plan


def running(policy: SlackPacking, kv: KvAllocator, name: str, prompt: int, kind: str, last_s: float) -> Sequence:
    """Already decoding; its last token left at `last_s`."""
    sequence = request(name, prompt, "rt" if kind == "rt" else "be")
    assert kv.admit(sequence) is not None
    sequence.phase, sequence.computed, sequence.last_token_s = Phase.RUNNING, prompt, last_s
    sequence.tokens.append(1)
    kv.committed(sequence)
    kv.take_copies()
    policy.add(0.0, sequence)
    return sequence


def roomy() -> BidirectionalAllocator:
    return BidirectionalAllocator(GEOMETRY, 400, 100)


def test_urgent_requests_first_until_the_most_urgent_deadline_then_best_effort() -> None:
    policy, kv = packing(), roomy()
    running(policy, kv, "decode", 8, "rt", last_s=0.9)  # due 1.1: 100 ms left
    policy.add(0.95, request("short", 40, arrived_s=0.95))
    policy.add(0.96, request("long", 60, arrived_s=0.96))  # 10 + 40 + 60 + 1 ms would be beyond 100
    running(policy, kv, "batch", 8, "be", last_s=0.0)
    plan = step(policy, kv, 1.0)
    assert names(plan) == ["short", "decode", "batch"]
    assert plan.estimated_s == pytest.approx(0.052, rel=0.15)
    assert policy.metrics()["batch_backoffs_total"] == 1


def test_in_a_full_batch_best_effort_takes_the_row_of_a_request_with_slack() -> None:
    policy, kv = packing(first=2), roomy()
    running(policy, kv, "urgent", 8, "rt", last_s=0.85)
    running(policy, kv, "can-wait", 8, "rt", last_s=0.99)
    running(policy, kv, "batch", 8, "be", last_s=0.0)
    assert names(step(policy, kv, 1.0)) == ["urgent", "batch"]
    assert policy.metrics()["replaced_total"] == 1


def test_a_request_without_slack_is_not_replaced() -> None:
    policy, kv = packing(first=2), roomy()
    running(policy, kv, "urgent", 8, "rt", last_s=0.82)
    running(policy, kv, "too", 8, "rt", last_s=0.821)  # 21 ms left: no second iteration of 11
    running(policy, kv, "batch", 8, "be", last_s=0.0)
    assert names(step(policy, kv, 1.0)) == ["urgent", "too"]


def test_a_late_request_does_not_poison_the_budget_and_is_served_behind_the_others() -> None:
    policy, kv = packing(), roomy()
    policy.add(0.0, request("late", 50, arrived_s=0.0))  # due 0.4, and it is 1.0
    policy.add(0.9, request("in-time", 100, arrived_s=0.9))
    plan = step(policy, kv, 1.0)
    assert names(plan) == ["in-time", "late"]
    assert plan.estimated_s < 0.3


def test_a_late_prompt_that_does_not_fit_is_cut_where_that_is_asked_for() -> None:
    for cut, expected in ((False, [("in-time", 200)]), (True, [("in-time", 200), ("late", 73)])):
        policy, kv = packing(cut=cut), roomy()
        policy.add(0.0, request("late", 150, arrived_s=0.0))
        policy.add(0.9, request("in-time", 200, arrived_s=0.9))  # 300 ms left, of which 285 are filled
        rows = [(row.sequence.request_id, row.count) for row in step(policy, kv, 1.0).rows]
        assert [name for name, _ in rows] == [name for name, _ in expected]
        assert [count for _, count in rows] == pytest.approx([count for _, count in expected], abs=3)


def test_a_prompt_on_time_is_cut_to_the_time_that_decode_rows_leave() -> None:
    for cut, expected in ((False, [("decode", 1)]), (True, [("prompt", 78), ("decode", 1)])):
        policy, kv = packing(cut=cut), roomy()
        running(policy, kv, "decode", 8, "rt", last_s=0.9)  # due 1.1: 100 ms, of which 95 are filled
        policy.add(0.95, request("prompt", 150, arrived_s=0.95))  # alone 160 ms: due in 350
        rows = [(row.sequence.request_id, row.count) for row in step(policy, kv, 1.0).rows]
        assert [name for name, _ in rows] == [name for name, _ in expected]
        assert [count for _, count in rows] == pytest.approx([count for _, count in expected], abs=3)


def test_a_prompt_that_would_be_late_as_a_whole_does_not_go_before_one_that_would_not() -> None:
    policy, kv = packing(cut=True), roomy()
    policy.add(0.7, request("late", 200, arrived_s=0.7))  # 100 ms left, 210 needed: a part would fit
    policy.add(0.9, request("in-time", 200, arrived_s=0.9))
    assert names(step(policy, kv, 1.0))[0] == "in-time"


def test_a_cut_prompt_leaves_late_decode_rows_their_place() -> None:
    policy, kv = packing(cut=True), roomy()
    running(policy, kv, "decode", 8, "rt", last_s=0.9)
    for index in range(8):
        running(policy, kv, f"late{index}", 8, "rt", last_s=0.5)
    policy.add(0.95, request("prompt", 150, arrived_s=0.95))
    plan = step(policy, kv, 1.0)
    assert [row.sequence.request_id for row in plan.rows if row.count > 1] == ["prompt"]
    assert len(plan.rows) == 10


def test_late_decode_rows_bound_prompts_where_none_is_on_time() -> None:
    for cut, longest_s in ((False, 0.3), (True, 0.2)):
        policy, kv = packing(cut=cut), roomy()
        running(policy, kv, "late", 8, "rt", last_s=0.5)
        policy.add(0.95, request("prompt", 250, arrived_s=0.95))  # due in 350 ms, alone 260
        plan = step(policy, kv, 1.0)
        assert sorted(names(plan)) == ["late", "prompt"]
        assert longest_s - 0.1 < plan.estimated_s <= longest_s


def test_a_starving_prompt_takes_only_the_time_that_decode_rows_leave() -> None:
    policy, kv = packing(cut=True, starve_s=5.0), roomy()
    policy.add(0.0, request("starving", 300))
    running(policy, kv, "decode", 8, "rt", last_s=6.0)
    plan = step(policy, kv, 6.0)
    assert names(plan) == ["starving", "decode"]
    assert plan.estimated_s <= 0.2


def test_the_starving_go_first_whatever_that_costs() -> None:
    policy, kv = packing(starve_s=5.0), roomy()
    policy.add(0.0, request("starving", 300, "be"))
    running(policy, kv, "decode", 8, "rt", last_s=5.95)
    assert "starving" in names(step(policy, kv, 6.0))


def test_the_starving_do_not_go_first_in_every_iteration() -> None:
    for every, expected in ((1, ["a", "b", "c"]), (3, ["a", "b"])):
        policy, kv = packing(starve_s=5.0, every=every), roomy()
        for name in ("a", "b", "c"):
            policy.add(0.0, request(name, 300))
        served: list[str] = []
        for index in range(6):
            decode = running(policy, kv, f"d{index}", 8, "rt", last_s=5.95 + index)  # leaves no time for a prompt
            served += [name for name in names(step(policy, kv, 6.0 + index)) if not name.startswith("d")]
            policy.remove(6.0 + index, decode)
            kv.release(decode.key)
        assert list(dict.fromkeys(served)) == expected


def test_the_oldest_best_effort_requests_keep_their_share_of_the_cache() -> None:
    for share, away, then in ((0.0, ["old"], ["rt"]), (0.6, [], ["old"])):
        policy, kv = packing(share=share), BidirectionalAllocator(GEOMETRY, 10, 20)
        old = running(policy, kv, "old", 19, "be", last_s=0.0)  # with its next token five blocks of ten
        policy.add(0.9, request("rt", 32, arrived_s=0.9))
        plan = step(policy, kv, 1.0)
        assert names(plan) == then
        assert (["old"] if kv.checkpointed(old.key) else []) == away


def test_guaranteed_blocks_not_held_yet_are_reserved() -> None:
    for share, then in ((0.0, ["rt"]), (0.6, ["be"])):
        policy, kv = packing(share=share), BidirectionalAllocator(GEOMETRY, 10, 20)
        policy.add(0.1, request("be", 19, "be", arrived_s=0.1))
        policy.add(0.9, request("rt", 32, arrived_s=0.9))
        assert names(step(policy, kv, 1.0)) == then


def test_late_prompts_wait_for_best_effort_that_keeps_its_share() -> None:
    for share, order in ((0.0, ["late", "be"]), (0.6, ["be", "late"])):
        policy, kv = packing(share=share), roomy()
        running(policy, kv, "decode", 8, "rt", last_s=0.88)  # 80 ms left: one of the two prompts
        policy.add(0.0, request("late", 40))
        policy.add(0.5, request("be", 40, "be", arrived_s=0.5))
        first = [name for name in names(step(policy, kv, 1.0)) if name != "decode"]
        second = [name for name in names(step(policy, kv, 1.05)) if name != "decode"]
        assert first == order[:1]
        assert order[1] in second


def test_late_decodes_go_before_best_effort_that_keeps_its_share() -> None:
    policy, kv = packing(first=1, share=0.6), roomy()
    running(policy, kv, "late", 8, "rt", last_s=0.5)  # due 0.7
    running(policy, kv, "be", 8, "be", last_s=0.0)
    assert names(step(policy, kv, 1.0))[0] == "late"


def test_no_sequence_comes_back_into_blocks_that_a_waiting_one_takes() -> None:
    for waits, returned in ((False, True), (True, False)):
        policy, kv = packing(), BidirectionalAllocator(GEOMETRY, 10, 20)
        be = running(policy, kv, "be", 30, "be", last_s=0.0)
        rt = request("rt", 12, arrived_s=0.9)
        policy.add(0.9, rt)
        step(policy, kv, 1.0)
        away = kv.checkpointed(be.key)
        policy.remove(1.1, rt)
        kv.release(rt.key)
        running(policy, kv, "decode", 1, "rt", last_s=1.1)
        if waits:
            policy.add(1.1, request("large", 150, arrived_s=1.1))  # in 200 ms there is no time for it
        step(policy, kv, 1.15)
        assert (kv.checkpointed(be.key) < away) == returned


def test_without_shared_blocks_best_effort_is_dropped_for_a_due_request() -> None:
    policy, kv = packing(), PagedAllocator(GEOMETRY, 10, 0, prefix_caching=False)
    running(policy, kv, "older", 14, "be", last_s=0.0)
    younger = running(policy, kv, "younger", 14, "be", last_s=0.0)
    younger.arrived_s = 0.5
    policy.add(0.9, request("rt", 12, arrived_s=0.9))
    plan = step(policy, kv, 1.0)
    assert [(p.sequence.request_id, p.how) for p in plan.preempted] == [("younger", "recompute")]
    assert names(plan) == ["rt", "older"]


def test_without_drops_a_request_that_finds_no_block_is_computed_again_itself() -> None:
    for drops, gone, left in ((True, "be", ["rt"]), (False, "rt", ["be"])):
        policy, kv = packing(drops=drops), PagedAllocator(GEOMETRY, 4, 0, prefix_caching=False)
        rt = running(policy, kv, "rt", 8, "rt", last_s=0.95)  # two full blocks of four
        running(policy, kv, "be", 6, "be", last_s=0.0)
        plan = step(policy, kv, 1.0)
        assert [(p.sequence.request_id, p.how) for p in plan.preempted] == [(gone, "recompute")]
        assert names(plan) == left
        assert (rt.phase is Phase.WAITING) != drops


def test_without_drops_a_due_request_waits_for_blocks() -> None:
    policy, kv = packing(drops=False), PagedAllocator(GEOMETRY, 10, 0, prefix_caching=False)
    for name in ("older", "younger"):
        running(policy, kv, name, 14, "be", last_s=0.0)
    policy.add(0.9, request("rt", 12, arrived_s=0.9))
    plan = step(policy, kv, 1.0)
    assert (names(plan), plan.preempted) == (["older", "younger"], [])


def test_with_shared_blocks_no_sequence_is_dropped_and_slots_come_back_beside_the_next_batch() -> None:
    policy, kv = packing(), BidirectionalAllocator(GEOMETRY, 10, 10)
    be = running(policy, kv, "be", 30, "be", last_s=0.0)
    rt = request("rt", 12, arrived_s=0.9)
    policy.add(0.9, rt)
    plan = step(policy, kv, 1.0)
    assert (names(plan), plan.preempted) == (["rt"], [])
    away = kv.checkpointed(be.key)
    assert away > 0
    policy.remove(1.1, rt)
    kv.release(rt.key)
    other = request("other", 1, arrived_s=1.1)
    policy.add(1.1, other)
    assert kv.checkpointed(be.key) == away
    for now_s in (1.2, 1.3):
        plan = step(policy, kv, now_s)
    assert kv.checkpointed(be.key) == 0
    assert "be" in names(plan)


@pytest.mark.parametrize("overrides", [{"kv": {"prefix_caching": True}}, {"baselines": {"padded": True}}])
def test_policies_that_write_into_shared_blocks_are_refused(overrides: dict[str, dict[str, bool]]) -> None:
    with pytest.raises(ConfigError, match="bidirectional"):
        compose.check_names(load_config(preset="bros", overrides=overrides))


def test_guaranteed_requests_do_not_count_towards_the_size_of_the_batch() -> None:
    for share, then in ((0.0, ["be0", "late"]), (0.5, ["be0", "be1", "late"])):
        policy, kv = packing(first=2, share=share), roomy()
        for index in range(2):
            running(policy, kv, f"be{index}", 8, "be", last_s=0.0)
        policy.add(0.0, request("late", 40))
        assert sorted(names(step(policy, kv, 1.0))) == then


@pytest.mark.parametrize("seed", range(20))
def test_least_to_bring_back_first_brings_back_as_many_as_any_order(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """R4, line 17 · Against every subset of the requests that fits the time of the iteration."""
    random = Random(seed)
    policy, kv = packing(), roomy()
    running(policy, kv, "decode", 8, "rt", last_s=1.0)
    away = {running(policy, kv, f"be{n}", 8, "be", last_s=0.0).key: random.randint(1, 9) for n in range(7)}
    returned: list[int] = []

    def restore(sequence: Sequence) -> bool:
        returned.append(away.pop(sequence.key))
        return True

    monkeypatch.setattr(BidirectionalAllocator, "checkpointed", lambda _, key: away.get(key, 0))
    monkeypatch.setattr(BidirectionalAllocator, "restore", lambda _, sequence: restore(sequence))
    monkeypatch.setattr(policy._cost, "_slot_s", 0.001)
    slots = list(away.values())
    plan = step(policy, kv, 1.1)
    assert names(plan) == ["decode"]
    budget = plan.estimated_s if sum(returned) * 0.001 < plan.estimated_s else sum(returned) * 0.001
    most = max(
        count
        for count in range(len(slots) + 1)
        if any(sum(chosen) * 0.001 <= budget for chosen in combinations(slots, count))
    )
    assert 0 < most < len(slots)
    assert len(returned) == most
    assert returned == sorted(slots)[:most]


@pytest.mark.parametrize("best_effort", [True, False])
def test_drops_take_best_effort_first_then_the_most_time_left(best_effort: bool) -> None:
    """R11 · A running request needs a block and none is left: the youngest best-effort one gives way, and only where
    there is none the real-time request with most time left."""
    policy, kv = packing(), PagedAllocator(GEOMETRY, 11, 0, prefix_caching=False)
    running(policy, kv, "urgent", 8, "rt", last_s=0.85)  # its ninth token wants a third block
    for name, last_s in (("soon", 0.90), ("later", 0.99), ("middle", 0.95)):
        running(policy, kv, name, 8, "rt", last_s=last_s)
    if best_effort:
        running(policy, kv, "old", 4, "be", last_s=0.0)
        running(policy, kv, "young", 5, "be", last_s=0.0).arrived_s = 0.5
    else:
        running(policy, kv, "filler", 11, "rt", last_s=0.86)
    assert kv.free_blocks == 0
    plan = step(policy, kv, 1.0)
    assert "urgent" in names(plan)
    assert [dropped.sequence.request_id for dropped in plan.preempted][:1] == (["young"] if best_effort else ["later"])


def test_drop_candidates_are_ordered_whatever_they_came_in() -> None:
    """R11 · All candidates in order: best-effort ones, the latest first; then real-time ones, most time left first."""
    for seed in range(20):
        random = Random(seed)
        policy, kv = packing(), PagedAllocator(GEOMETRY, 30, 0, prefix_caching=False)
        urgent = running(policy, kv, "urgent", 12, "rt", last_s=0.0)
        best_effort, real_time = [], []
        for number in range(8):
            kind = random.choice(("rt", "be"))
            one = running(policy, kv, f"r{number}", 8, kind, last_s=random.random())
            one.arrived_s = random.random()
            (real_time if kind == "rt" else best_effort).append(one)
        while kv.free_blocks:
            assert kv.reserve(Attempt(f"filler{kv.free_blocks}", 1), [1], 1) is not None
        found = list(policy._droppable(kv, Batch(8, 512), urgent, real_time=True))
        wanted = sorted(best_effort, key=lambda s: -s.arrived_s) + sorted(real_time, key=lambda s: -s.last_token_s)
        assert [one.request_id for one in found] == [one.request_id for one in wanted]


def test_best_effort_keeps_its_share_of_the_time_before_prompts() -> None:
    """Where time is short and not memory, real-time prompts leave it a share of the iteration."""
    for share, shortest_s, longest_s in ((0.0, 0.18, 0.2), (0.5, 0.08, 0.1)):
        policy, kv = packing(cut=True, share=share), roomy()
        running(policy, kv, "decode", 8, "rt", last_s=1.0)  # 200 ms
        policy.add(0.9, request("prompt", 250, arrived_s=0.95))
        policy.add(0.0, request("be", 250, "be"))
        rows = {row.sequence.request_id: row.count for row in step(policy, kv, 1.0).rows}
        assert shortest_s <= (rows["prompt"] + 12) / 1000 <= longest_s
        assert ("be" in rows) == (share > 0.0)


def test_a_burst_after_a_pause_has_the_time_that_best_effort_had_before() -> None:
    """What best-effort requests had of a pause counts against their share, until a burst has used it up."""
    policy, kv = packing(cut=True, share=0.5), roomy()
    batch = running(policy, kv, "be", 8, "be", last_s=0.0)
    now_s = 0.0
    while now_s < 2.0:  # alone: all of the time is its, twice its share
        now_s += step(policy, kv, now_s).estimated_s
    shares = []
    for serial in range(24):
        decode = running(policy, kv, f"d{serial}", 8, "rt", last_s=now_s)  # leaves 200 ms
        prompt = request(f"p{serial}", 250, arrived_s=now_s - 0.05)
        policy.add(now_s, prompt)
        plan = step(policy, kv, now_s)
        shares.append({row.sequence.request_id: row.count for row in plan.rows}[f"p{serial}"] / 200)
        now_s += plan.estimated_s
        for gone in (decode, prompt):
            policy.remove(now_s, gone)
            kv.release(gone.key)
    assert min(shares[:3]) > 0.85 and max(shares[-3:]) < 0.5
    policy.remove(now_s, batch)


def _beside_bound_rows(policy: SlackPacking, kv: KvAllocator, now_s: float, real_time: list[Sequence]) -> set[str]:
    """Who runs at `now_s`, where six real-time rows have 21 ms left, seven take 17, and none of them can wait."""
    for one in real_time:
        one.last_token_s = now_s - 0.179
    return set(names(step(policy, kv, now_s)))


def test_rows_of_real_time_beyond_the_size_of_a_batch_do_not_hold_back_the_share_of_best_effort() -> None:
    """The size (R6) bounds no real-time row, so there is no place for a best-effort one that counted towards it."""
    for share, expected in ((0.0, set()), (0.1, {"be"})):
        policy, kv = packing(first=2, share=share), roomy()
        decodes = [running(policy, kv, f"d{index}", 8, "rt", last_s=0.821) for index in range(6)]
        running(policy, kv, "be", 8, "be", last_s=0.0)
        assert _beside_bound_rows(policy, kv, 1.0, decodes) == {one.request_id for one in decodes} | expected


def test_the_size_of_a_batch_holds_back_best_effort_that_has_had_its_share_of_the_time() -> None:
    policy, kv = packing(first=2, share=0.1), roomy()
    running(policy, kv, "be", 8, "be", last_s=0.0)
    now_s = 0.0
    while now_s < 0.2:  # alone: the share of a hundred iterations of 17 ms
        now_s += step(policy, kv, now_s).estimated_s
    decodes = [running(policy, kv, f"d{index}", 8, "rt", last_s=now_s - 0.179) for index in range(6)]
    policy._batch_size = AdaptiveBatchSize(first=2, step=0, most=16)
    runs = []
    while now_s < 3.0:
        runs.append("be" in _beside_bound_rows(policy, kv, now_s, decodes))
        now_s += 0.017
    assert not any(runs[:20]) and any(runs[-20:])


def test_a_best_effort_request_that_cannot_come_back_does_not_hold_back_the_share_of_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    policy, kv = packing(first=2, share=0.2), roomy()
    decodes = [running(policy, kv, f"d{index}", 8, "rt", last_s=0.821) for index in range(6)]
    away = running(policy, kv, "away", 8, "be", last_s=0.0)
    running(policy, kv, "whole", 8, "be", last_s=0.0)
    monkeypatch.setattr(kv, "checkpointed", lambda key: 5 * (key == away.key))
    monkeypatch.setattr(kv, "restore", lambda sequence: False)  # no block is free
    assert "whole" in _beside_bound_rows(policy, kv, 1.0, decodes)
