"""The sequence that gives way in an iteration: the longest; during a switch, the longest of the older batch."""

from __future__ import annotations

from cohort.common.policies.alignedserve.aligned_batching import AlignedBatching
from cohort.common.policies.alignedserve.batch_numbers import FIRST_BATCH
from cohort.common.policies.kv_interface import KvAllocator
from cohort.common.sequence import Phase, Sequence
from tests.common.policies.baselines.drive import cache, decide, leave, ran, rows, sequence, step


def scheduler(*, sets_aside: bool = True) -> AlignedBatching:
    return AlignedBatching(max_rows=16, max_step_tokens=256, prefill_chunk=64, preemption="swap", sets_aside=sets_aside)


def decoding(policy: AlignedBatching, kv: KvAllocator, name: str, context: int, batch: int) -> Sequence:
    """Handed over with so many positions, as a decode worker gets it."""
    found = sequence(name, context, max_tokens=100, arrived_s=float(context))
    found.batch_id = FIRST_BATCH + batch
    kv.reserve(found.key, found.tokens, context)
    found.computed = context
    found.tokens.append(1)
    found.phase = Phase.RUNNING
    policy.add(0.0, found)
    return found


def test_with_capacity_every_sequence_decodes() -> None:
    policy, kv = scheduler(), cache(100)
    for name, context in (("a", 8), ("b", 30)):
        decoding(policy, kv, name, context, 1)
    plan = decide(policy, kv, 0.0)
    assert rows(plan) == [("a", 8, 1), ("b", 30, 1)]
    assert plan.evicted == []


def test_the_longest_is_evicted_before_memory_is_out() -> None:
    policy, kv = scheduler(), cache(22)
    decoding(policy, kv, "a", 30, 1)
    longest = decoding(policy, kv, "longest", 40, 1)
    decoding(policy, kv, "c", 10, 1)
    plan = decide(policy, kv, 0.0)
    assert plan.evicted == [longest]
    assert sorted(name for name, _, _ in rows(plan)) == ["a", "c"]
    assert plan.preempted == []
    # Its blocks are still held; no other sequence is evicted for them.
    assert decide(policy, kv, 0.1).evicted == []


def test_during_a_switch_the_longest_of_the_older_batch() -> None:
    policy, kv = scheduler(), cache(23)
    decoding(policy, kv, "new", 41, 2)
    decoding(policy, kv, "old", 9, 1)
    older = decoding(policy, kv, "older", 30, 1)
    assert decide(policy, kv, 0.0).evicted == [older]
    assert policy.metrics()["mixed_iterations_total"] == 1


def test_iterations_that_were_repeated_without_asking_count_as_well() -> None:
    policy, kv = scheduler(), cache(100)
    both = [decoding(policy, kv, "old", 8, 1), decoding(policy, kv, "new", 30, 2)]
    plan = decide(policy, kv, 0.0)
    assert policy.steady_for(plan, kv) >= 7
    ran(policy, plan, 0.8, *[0.1] * 8)
    for each in both:  # the iteration, and seven like it
        each.computed += 8
        each.tokens += [1] * 8
    decide(policy, kv, 0.8)
    stats = policy.metrics()
    assert (stats["decode_iterations_total"], stats["mixed_iterations_total"]) == (9, 9)


def test_alone_it_preempts_the_longest_instead() -> None:
    policy, kv = scheduler(sets_aside=False), cache(20, 20)
    decoding(policy, kv, "a", 40, 1)
    longest = decoding(policy, kv, "longest", 39, 1)
    longest.computed = 39
    preempted = []
    for _ in range(6):
        plan = step(policy, kv)
        preempted += [(each.sequence.request_id, each.how) for each in plan.preempted]
        assert plan.evicted == []
    assert preempted[:1] == [("a", "swap")]


def test_a_sequence_in_this_workers_pool_is_brought_back() -> None:
    policy, kv = scheduler(), cache(20, 20)
    parked = decoding(policy, kv, "a", 12, 1)
    policy.remove(0.0, parked)
    assert kv.swap_out(parked)
    kv.take_copies()
    parked.phase = Phase.SWAPPED
    policy.add(0.0, parked)
    plan = decide(policy, kv, 0.0)
    assert rows(plan) == [("a", 12, 1)]
    assert [copy.direction for copy in plan.copies] == ["in"]
    leave(policy, kv, parked)


def test_foresight_ends_where_a_sequence_would_be_evicted() -> None:
    policy, kv = scheduler(), cache(40)
    decoding(policy, kv, "a", 48, 1)
    decoding(policy, kv, "b", 48, 1)
    plan = decide(policy, kv, 0.0)
    foreseen = policy.steady_for(plan, kv)
    evicted_at = next(step_ for step_ in range(1000) if step(policy, kv).evicted)
    assert 0 < foreseen <= evicted_at
