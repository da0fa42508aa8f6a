"""BROS where host memory is short or none: what cannot be put aside gives way, and everything ends all the same."""

from __future__ import annotations

from itertools import count
from typing import Literal

from hypothesis import example, given, settings
from hypothesis import strategies as st

from cohort.common.policies import compose
from cohort.common.policies.bros.bidirectional_allocation import BidirectionalAllocator
from cohort.common.sequence import Phase, Sequence
from cohort.common.types import TrafficClass
from tests.common.machines.clusters import small
from tests.common.policies.baselines.drive import decide, leave, ran, run, sequence
from tests.common.policies.baselines.test_properties import ended
from tests.common.policies.bros.kv_world import GEOMETRY, request
from tests.examples import examples

BLOCKS = 30
Load = tuple[int, int, int, TrafficClass]
"""Iteration in which it comes, prompt, output, class: together they fit the cache."""

LOADS: st.SearchStrategy[list[Load]] = st.lists(
    st.tuples(st.integers(0, 60), st.integers(1, 60), st.integers(1, 52), st.sampled_from(["rt", "be"])),
    min_size=3,
    max_size=14,
)
RING: list[Load] = [(0, 68, 1, "rt"), (0, 8, 49, "rt"), (0, 24, 50, "rt"), (0, 57, 2, "rt"), (0, 13, 5, "be")]
RING += [(0, 4, 10, "be"), (0, 9, 10, "be"), (0, 20, 24, "rt"), (0, 8, 33, "be")]
LONG: list[Load] = [(0, 10, 9, "be"), (0, 30, 42, "rt"), (0, 20, 80, "rt"), (58, 40, 1, "rt"), (0, 34, 16, "rt")]
LONG += [(0, 39, 1, "rt"), (44, 74, 13, "rt"), (0, 18, 16, "be")]
SWAPS: list[Load] = [(0, 28, 5, "rt"), (0, 34, 1, "be"), (0, 36, 4, "rt"), (0, 64, 1, "rt"), (0, 1, 15, "be")]
SWAPS += [(0, 5, 5, "rt")]


@settings(max_examples=examples(0.5))
@given(
    loads=LOADS,
    host=st.integers(0, 3),
    chunk=st.sampled_from([3, 8, 32]),
    preemption=st.sampled_from(["swap", "recompute"]),
    step_s=st.sampled_from([0.005, 0.02, 0.1]),
)
@example(loads=RING, host=0, chunk=32, preemption="recompute", step_s=0.1)
@example(loads=LONG, host=0, chunk=8, preemption="recompute", step_s=0.02)
@example(loads=SWAPS, host=0, chunk=3, preemption="swap", step_s=0.005)
def test_everything_ends(
    loads: list[Load], host: int, chunk: int, preemption: Literal["swap", "recompute"], step_s: float
) -> None:
    """No sequence is dropped and computed anew for ever, and no two wait for each other's slots."""
    config = small("bros", {"engine": {"prefill_chunk": chunk, "preemption": preemption}})
    policy, kv = compose.iteration(config), compose.allocation(config, GEOMETRY, BLOCKS, host)
    coming = [
        (at, sequence(f"s{index}", prompt, arrived_s=at * step_s, max_tokens=output, traffic_class=traffic_class))
        for index, (at, prompt, output, traffic_class) in enumerate(loads)
    ]
    alive: list[Sequence] = []
    for iteration in count():
        now_s = iteration * step_s
        for arrived in [it for at, it in coming if at == iteration]:
            policy.add(now_s, arrived)
            alive.append(arrived)
        if not alive and iteration > 60:
            break
        assert iteration < 4000, f"{[it.request_id for it in alive]} never end"
        plan = decide(policy, kv, now_s)
        ran(policy, plan, now_s, step_s)
        run(plan, kv)
        kv.check()
        for finished in ended(alive):
            leave(policy, kv, finished)
            alive.remove(finished)
    assert kv.owners() == {}


def _running(kv: BidirectionalAllocator, sequence: Sequence) -> Sequence:
    assert kv.admit(sequence) == 0
    sequence.phase = Phase.RUNNING
    sequence.computed = sequence.target
    kv.committed(sequence)
    kv.take_copies()
    return sequence


def _shared(host: int) -> tuple[BidirectionalAllocator, Sequence, Sequence, Sequence]:
    """A real-time request that has its second block in common with a best-effort one, their fronts together; and one
    that has a block of its own."""
    kv = BidirectionalAllocator(GEOMETRY, 4, host)
    other = _running(kv, request("o", 1))
    best_effort, real_time = _running(kv, request("b", 6, "be")), _running(kv, request("r", 4))
    for _ in range(2):
        real_time.tokens.append(1)
        assert kv.extend(real_time, real_time.target)
        real_time.computed = real_time.target
        kv.committed(real_time)
        kv.take_copies()
    assert set(kv.blocks(real_time.key)) & set(kv.blocks(best_effort.key))
    real_time.tokens.append(1)
    return kv, real_time, best_effort, other


def test_kv_without_a_host_block_crowds_the_real_time_request_out() -> None:
    kv, real_time, best_effort, _ = _shared(host=0)
    assert not kv.extend(real_time, real_time.target)
    assert kv.crowding(real_time) == {best_effort.key}
    assert kv.crowding(best_effort) == frozenset()
    kv.release(best_effort.key)
    assert kv.extend(real_time, real_time.target)
    assert kv.crowding(real_time) == frozenset()


def test_with_a_host_block_nothing_is_in_the_way() -> None:
    kv, real_time, _, _ = _shared(host=1)
    assert kv.crowding(real_time) == frozenset()
    assert kv.extend(real_time, real_time.target)


def test_it_gives_way_though_others_run_and_it_drew_no_token() -> None:
    """Neither could go on before the other ends; that a third one runs must not keep them waiting."""
    kv, real_time, best_effort, other = _shared(host=0)
    policy = compose.iteration(small("bros"))
    other.tokens.append(1)
    best_effort.tokens += [1, 1]
    for each in (other, best_effort, real_time):
        policy.add(0.0, each)
    plan = decide(policy, kv, 0.1)
    assert {row.sequence.request_id for row in plan.rows} == {"o", "r"}
    assert [preempted.sequence.request_id for preempted in plan.preempted] == ["b"]
