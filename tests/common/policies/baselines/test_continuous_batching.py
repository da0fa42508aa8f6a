"""Continuous batching: whole plans on small cases, then fairness and bounds under random loads."""

from __future__ import annotations

from cohort.common.policies.baselines.continuous_batching import ContinuousBatching
from cohort.common.policies.baselines.paged_allocation import PagedAllocator
from cohort.common.sequence import Phase, Sequence
from cohort.common.types import Attempt, KvGeometry, Request, SamplingParams
from tests.common.policies.baselines.drive import decide, rows, run

GEOMETRY = KvGeometry(1, 1, 1, 1, 4)


def sequence(name: str, prompt: int, *, arrived_s: float = 0.0, priority: int = 0, max_tokens: int = 8) -> Sequence:
    tokens = list(range(prompt))
    request = Request(
        Attempt(name, 1), "gateway", tokens, prompt, SamplingParams(max_tokens=max_tokens), 0.0, priority=priority
    )
    return Sequence(request, list(tokens), None, 0, arrived_s)


def scheduler(**changes: object) -> ContinuousBatching:
    options = {"max_rows": 4, "max_step_tokens": 16, "prefill_chunk": 8, "preemption": "recompute"} | changes
    return ContinuousBatching(**options)  # type: ignore[arg-type]


def test_prompts_one_after_another_within_what_decode_rows_leave() -> None:
    policy, kv = scheduler(), PagedAllocator(GEOMETRY, 32, 0, prefix_caching=False)
    first, second = sequence("a", 12), sequence("b", 20, arrived_s=1.0)
    policy.add(0.0, first)
    policy.add(0.0, second)
    plan = decide(policy, kv, 0.0)
    assert rows(plan) == [("a", 0, 12), ("b", 0, 4)]  # no token is waited for: the whole step
    run(plan, kv)
    plan = decide(policy, kv, 0.1)
    assert rows(plan) == [("b", 4, 7), ("a", 12, 1)]  # prefill rows first, decode rows behind (R14)
    run(plan, kv)
    plan = decide(policy, kv, 0.2)
    assert rows(plan) == [("b", 11, 7), ("a", 13, 1)]


def test_every_decode_row_has_its_place_and_prompts_half_of_a_chunk() -> None:
    policy, kv = scheduler(max_rows=16, prefill_chunk=6), PagedAllocator(GEOMETRY, 64, 0, prefix_caching=False)
    for index in range(8):
        policy.add(0.0, sequence(f"d{index}", 2))
    run(decide(policy, kv, 0.0), kv)
    policy.add(0.1, sequence("long", 40, arrived_s=1.0))
    policy.add(0.1, sequence("behind", 4, arrived_s=2.0))
    for step in range(3):
        plan = decide(policy, kv, 0.1 + step)
        assert rows(plan)[0] == ("long", 3 * step, 3)
        assert [row.count for row in plan.rows[1:]] == [1] * 8
        run(plan, kv)


def test_a_newcomer_takes_the_last_block_where_no_headroom_is_asked_for() -> None:
    for headroom, running in ((True, ["old"]), (False, ["new", "old"])):
        policy = scheduler(headroom=headroom, max_step_tokens=400, prefill_chunk=400)
        kv = PagedAllocator(GEOMETRY, 100, 0, prefix_caching=False)
        policy.add(0.0, sequence("old", 390))
        run(decide(policy, kv, 0.0), kv)  # 98 of the blocks
        policy.add(1.0, sequence("new", 8, arrived_s=1.0))
        plan = decide(policy, kv, 1.0)
        assert [row.sequence.request_id for row in plan.rows] == running
        assert policy.continues(plan, kv, 0, 0)  # nobody waits, or nobody has room


def test_equal_prompts_at_once_end_one_after_another() -> None:
    """Their ends lie a prompt apart; side by side all would end with the last."""
    policy, kv = scheduler(prefill_chunk=16), PagedAllocator(GEOMETRY, 64, 0, prefix_caching=False)
    prompts = [sequence(f"s{index}", 32, arrived_s=index, max_tokens=1) for index in range(4)]
    for one in prompts:
        policy.add(0.0, one)
    ended: list[int] = []
    for step in range(1, 9):
        plan = decide(policy, kv, float(step))
        assert plan.tokens == 16  # not one token less in an iteration
        run(plan, kv)
        for one in [s for s in prompts if s.output_tokens]:
            ended.append(step)
            prompts.remove(one)
            policy.remove(float(step), one)
            kv.release(one.key)
    assert ended == [2, 4, 6, 8]


def test_priority_overtakes_arrival() -> None:
    policy, kv = scheduler(max_rows=1), PagedAllocator(GEOMETRY, 32, 0)
    policy.add(0.0, sequence("late but urgent", 4, arrived_s=5.0, priority=-1))
    policy.add(0.0, sequence("early", 4, arrived_s=0.0))
    assert rows(decide(policy, kv, 6.0)) == [("late but urgent", 0, 4)]


def test_the_youngest_gives_way_when_the_cache_is_full() -> None:
    policy, kv = scheduler(), PagedAllocator(GEOMETRY, 4, 0, prefix_caching=False)
    old, young = sequence("old", 8), sequence("young", 8, arrived_s=1.0)
    policy.add(0.0, old)
    policy.add(0.0, young)
    run(decide(policy, kv, 0.0), kv)
    plan = decide(policy, kv, 0.1)  # both want their ninth position, no block is left
    assert [(p.sequence.request_id, p.how) for p in plan.preempted] == [("young", "recompute")]
    assert rows(plan) == [("old", 8, 1)]
    assert (young.phase, young.computed) == (Phase.WAITING, 0)
    kv.check()


def test_a_pinned_sequence_is_not_preempted() -> None:
    policy, kv = scheduler(), PagedAllocator(GEOMETRY, 4, 0, prefix_caching=False)
    old, young = sequence("old", 8), sequence("young", 8, arrived_s=1.0)
    policy.add(0.0, old)
    policy.add(0.0, young)
    run(decide(policy, kv, 0.0), kv)
    young.pinned = True
    plan = decide(policy, kv, 0.1)
    assert (plan.rows, plan.preempted) == ([], [])
    young.pinned = False
    assert [p.sequence for p in decide(policy, kv, 0.2).preempted] == [young]


def test_swapped_sequences_come_back_before_anybody_new_is_let_in() -> None:
    policy, kv = scheduler(preemption="swap"), PagedAllocator(GEOMETRY, 4, 8, prefix_caching=False)
    old, young = sequence("old", 8, max_tokens=2), sequence("young", 8, arrived_s=1.0)
    policy.add(0.0, old)
    policy.add(0.0, young)
    run(decide(policy, kv, 0.0), kv)
    plan = decide(policy, kv, 0.1)
    assert [(copy.direction, len(copy.device)) for copy in plan.copies] == [("out", 2)]
    run(plan, kv)
    policy.add(0.2, sequence("new", 4, arrived_s=2.0))
    policy.remove(0.2, old)
    kv.release(old.key)
    plan = decide(policy, kv, 0.3)
    assert [(copy.direction, len(copy.device)) for copy in plan.copies] == [("in", 2)]
    assert rows(plan)[-1] == ("young", 8, 1)
    assert young.phase is Phase.RUNNING


def test_a_sequence_that_comes_swapped_is_brought_back_before_waiting_ones_start() -> None:
    """Parked in this worker's host memory, and bound to this worker."""
    policy, kv = scheduler(), PagedAllocator(GEOMETRY, 8, 8, prefix_caching=False)
    parked = sequence("parked", 8, arrived_s=2.0)
    assert kv.admit(parked) is not None and kv.extend(parked, 8)
    parked.computed = 8
    parked.tokens.append(1)
    assert kv.swap_out(parked)
    kv.take_copies()
    parked.phase = Phase.SWAPPED
    policy.add(0.0, sequence("a", 4))
    policy.add(0.0, parked)
    assert policy.metrics() == {"swapped": 1.0}
    plan = decide(policy, kv, 0.0)
    assert rows(plan) == [("a", 0, 4), ("parked", 8, 1)]
    assert [(copy.direction, len(copy.device)) for copy in plan.copies] == [("in", 2)]
    assert parked.phase is Phase.RUNNING
