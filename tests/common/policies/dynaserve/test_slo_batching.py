"""Alg. 2: decodes always, prefill within what the table allows beside them, in arrival order, never starved."""

from __future__ import annotations

from random import Random

import msgspec
import pytest

from cohort.common.policies.baselines.batch_builder import IterationLimits
from cohort.common.policies.dynaserve.slo_batching import SloBatching
from cohort.common.policies.settings import DynaServeSettings
from cohort.common.policies.step_times.learned_times import plan_shape
from cohort.common.policies.step_times.step_cost import step_seconds
from cohort.common.sequence import Phase, Sequence
from cohort.common.types import Slo, StepTimes
from tests.common.policies.baselines.drive import BLOCK, cache, decide, leave, names, ran, rows, run, sequence, step
from tests.common.policies.step_times.test_step_times import random_batch

TIMES = StepTimes(0.001, 0.0002, 0.0001, 0.001, 0.0, 1e-6)
"""A prompt token is 0.1 ms, a decode row 0.2 ms and its context a microsecond a position."""


def scheduler(slo_s: float = 0.02, *, learned: bool = True, least: int = 2, rows_: int = 8) -> SloBatching:
    options = DynaServeSettings(tbt_slo_s=slo_s, headroom=0.0, least_prefill=least)
    policy = SloBatching(options, IterationLimits(rows_, 400, 400, "recompute"), cold_chunk=24)
    if learned:
        random = Random(5)
        for _ in range(400):
            shape = random_batch(random)
            policy.table.record(shape, step_seconds(TIMES, shape))
    return policy


def running(policy: SloBatching, kv, name: str, prompt: int, slo_s: float = 0.0) -> Sequence:  # type: ignore[no-untyped-def]
    """A request that decodes."""
    found = sequence(name, prompt, max_tokens=100)
    if slo_s:
        found.request = msgspec.structs.replace(found.request, slo=Slo(tpot_s=slo_s))
    kv.admit(found)
    kv.extend(found, prompt + 1)
    found.phase, found.computed = Phase.RUNNING, prompt
    found.tokens.append(1)
    policy.add(0.0, found)
    return found


def test_decodes_come_first_and_prompts_share_the_rest_of_the_bound() -> None:
    policy, kv = scheduler(), cache(200)
    running(policy, kv, "d0", 40)
    running(policy, kv, "d1", 40)
    policy.add(0.0, sequence("p0", 100, arrived_s=1.0))
    policy.add(0.0, sequence("p1", 300, arrived_s=2.0))
    plan = decide(policy, kv, 0.0)
    chunk = plan.rows[1].count
    assert rows(plan) == [("p0", 0, 100), ("p1", 0, chunk), ("d0", 40, 1), ("d1", 40, 1)]
    # 20 ms: 1 for the step, 0.8 for four rows, 0.2 for two, 0.08 for their context: some 180 tokens in all.
    assert 100 + chunk == pytest.approx(181, rel=0.08)
    assert step_seconds(TIMES, plan_shape(plan)) <= 0.02 * 1.05
    run(plan, kv)
    assert rows(decide(policy, kv, 0.1))[0][:2] == ("p1", chunk)


def test_the_strictest_slo_in_the_iteration_rules() -> None:
    policy, kv = scheduler(slo_s=0.02), cache(200)
    running(policy, kv, "patient", 40)
    running(policy, kv, "strict", 40, slo_s=0.008)
    policy.add(0.0, sequence("p", 300, arrived_s=1.0))
    plan = decide(policy, kv, 0.0)
    assert names(plan) == ["p", "patient", "strict"]
    assert step_seconds(TIMES, plan_shape(plan)) <= 0.008 * 1.05
    assert policy.metrics()["tbt_bound_ms"] == pytest.approx(8.0)


def test_half_the_bound_while_a_decoding_request_is_on_the_way() -> None:
    policy, kv = scheduler(), cache(200)
    policy.add(0.0, sequence("p", 380, arrived_s=1.0))
    plan = decide(policy, kv, 0.0, arriving=1)
    assert 0.008 <= step_seconds(TIMES, plan_shape(plan)) <= 0.0105
    run(plan, kv)
    assert 0.017 <= step_seconds(TIMES, plan_shape(decide(policy, kv, 0.1))) <= 0.021


def test_a_quarter_of_the_bound_stays_for_prompts_when_decodes_take_half_of_it() -> None:
    policy, kv = scheduler(slo_s=0.004), cache(200)
    for index in range(5):  # 1 + 1 ms and a little: half the bound
        running(policy, kv, f"d{index}", 40)
    policy.add(0.0, sequence("p", 200, arrived_s=1.0))
    plan = decide(policy, kv, 0.0, arriving=1)
    assert plan.rows[0].sequence.request_id == "p"
    assert plan.rows[0].count >= 5
    assert step_seconds(TIMES, plan_shape(plan)) <= 0.004


def test_decodes_beyond_the_bound_are_counted_and_prompts_still_advance() -> None:
    policy, kv = scheduler(slo_s=0.002), cache(200)
    for index in range(6):  # 1 + 1.2 + 0.24 ms … more than 2
        running(policy, kv, f"d{index}", 40)
    policy.add(0.0, sequence("p", 30, arrived_s=1.0))
    plan = step(policy, kv)
    assert rows(plan)[0] == ("p", 0, 2)
    assert len(plan.rows) == 7
    assert policy.metrics()["decodes_over_slo_total"] == 1


def test_before_anything_is_known_prompts_come_in_plain_chunks() -> None:
    policy, kv = scheduler(learned=False), cache(200)
    policy.add(0.0, sequence("p0", 60))
    policy.add(0.0, sequence("p1", 60, arrived_s=1.0))
    assert rows(decide(policy, kv, 0.0)) == [("p0", 0, 24)]


def test_iterations_that_repeat_themselves_are_recorded_once() -> None:
    policy, kv = scheduler(learned=False), cache(200)
    first = running(policy, kv, "d0", 8)
    for index in range(5):
        step(policy, kv, float(index), 0.5)
    assert policy.metrics()["profile_cells"] == 1
    plan = decide(policy, kv, 9.0)
    assert policy.steady_for(plan, kv)
    assert not policy.steady_for(decide(policy, kv, 9.0, arriving=1), kv)
    plan = decide(policy, kv, 9.0)
    assert policy.steady_for(plan, kv)
    policy.add(9.0, sequence("p", 6, arrived_s=9.0))
    assert not policy.steady_for(plan, kv)
    leave(policy, kv, first)
    assert names(decide(policy, kv, 10.0)) == ["p"]


def test_late_iterations_are_counted() -> None:
    policy, kv = scheduler(slo_s=0.02), cache(200)
    running(policy, kv, "d0", 40)
    step(policy, kv, 0.0, 0.5)
    step(policy, kv, 1.0, 0.0)
    assert policy.metrics()["late_iterations_total"] == 1


def test_late_iterations_make_the_next_ones_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every mixed iteration takes half as long again as the table says: after a while it is aimed at two thirds."""
    policy, kv = scheduler(), cache(400)
    monkeypatch.setattr(policy.table, "record", lambda shape, seconds: None)  # what it estimates stays what it was
    running(policy, kv, "d", 40)
    sizes = []
    for index in range(60):
        policy.add(0.0, sequence(f"p{index}", 180, arrived_s=1.0 + index))
        plan = decide(policy, kv, 0.1 * index)
        sizes.append(step_seconds(TIMES, plan_shape(plan)))
        ran(policy, plan, 0.1 * index, 1.5 * plan.estimated_s)
        for row in plan.rows:
            if row.count > 1:
                leave(policy, kv, row.sequence)
    assert sizes[0] == pytest.approx(0.019, rel=0.1)
    assert sizes[-1] == pytest.approx(0.02 / 1.5, rel=0.1)
    assert policy.metrics()["lateness_ratio"] == pytest.approx(1.5, rel=0.05)


def test_table_and_lateness_are_kept_over_a_restart() -> None:
    policy, kv = scheduler(), cache(400)
    running(policy, kv, "d", 40)
    policy.add(0.0, sequence("p", 180, arrived_s=1.0))
    for _ in range(20):
        plan = decide(policy, kv, 0.0)
        ran(policy, plan, 0.0, 1.5 * plan.estimated_s)
    decide(policy, kv, 0.0)
    after = scheduler(learned=False)
    assert after.learned.export_state() == b""  # nothing worth keeping yet
    after.learned.import_state(policy.learned.export_state())
    late = policy.metrics()["lateness_ratio"]
    assert late > 1.1
    assert after.metrics()["lateness_ratio"] == pytest.approx(late)
    assert after.metrics()["profile_cells"] == policy.metrics()["profile_cells"]
    assert after.table.estimate(plan_shape(plan)) == pytest.approx(policy.table.estimate(plan_shape(plan)), rel=0.05)


def test_a_table_alone_is_a_state_as_well_and_a_broken_one_changes_nothing() -> None:
    policy, after = scheduler(), scheduler(learned=False)
    with pytest.raises(ValueError, match="not JSON"):
        after.learned.import_state(b"{")
    broken = msgspec.json.decode(policy.learned.export_state())
    broken["lateness"] = [9.0, 3]
    with pytest.raises(ValueError, match="no lateness"):
        after.learned.import_state(msgspec.json.encode(broken))
    assert after.learned.step_times() is None
    after.learned.import_state(policy.table.export())
    assert after.learned.step_times() is not None
    assert after.metrics()["lateness_ratio"] == 1.0


@pytest.mark.parametrize(("predicted", "comes_in"), [(9.0, True), (12.0, False)])
def test_a_prompt_waits_where_expected_decodes_would_outgrow_the_cache(predicted: float, comes_in: bool) -> None:
    """128 positions, 24 for each of three requests and for the newcomer: 32 are left. When the three end after 7 more
    tokens each, four have drawn 28; after 10 more, 40."""
    policy, kv = scheduler(), cache(128 // BLOCK)
    for index in range(3):
        found = running(policy, kv, f"d{index}", 23)
        found.predicted = predicted
    policy.add(0.0, sequence("p", 24, max_tokens=100, arrived_s=1.0, predicted=60.0))
    assert ("p" in names(decide(policy, kv, 0.0))) is comes_in


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_every_request_ends_and_no_iteration_exceeds_bound_rows_or_tokens(seed: int, preemption: str) -> None:
    random = Random(seed)
    policy = scheduler(slo_s=random.choice([0.004, 0.02]))
    policy._limits = IterationLimits(8, 400, 400, preemption)  # type: ignore[arg-type]
    kv = cache(40, 40)
    waiting = [
        sequence(f"r{i}", random.randint(1, 90), arrived_s=float(i), max_tokens=random.randint(1, 12))
        for i in range(20)
    ]
    live: list[Sequence] = []
    for turn in range(3000):
        if waiting and random.random() < 0.3:
            live.append(waiting.pop(0))
            policy.add(float(turn), live[-1])
        plan = decide(policy, kv, float(turn))
        assert len(plan.rows) <= 8
        assert plan.tokens <= 400
        decodes = [row for row in plan.rows if row.count == 1]
        beyond = step_seconds(TIMES, plan_shape(plan)) > policy._bound_s * 1.1
        assert not beyond or plan.tokens - len(decodes) <= 2 or not policy.table.step_times
        ran(policy, plan, float(turn), step_seconds(TIMES, plan_shape(plan)))
        run(plan, kv)
        for gone in [s for s in live if s.output_tokens >= s.request.sampling.max_tokens]:
            leave(policy, kv, gone)
            live.remove(gone)
        kv.check()
        if not waiting and not live:
            break
    assert not waiting and not live
    assert kv.owners() == {}
