"""ORCA and SRTF by hand: sequences that run, wait, give way."""

from __future__ import annotations

from typing import Literal

from cohort.common.policies.baselines.batch_builder import IterationLimits
from cohort.common.policies.baselines.ranked_batching import ArrivalRanking, RankedBatching
from cohort.common.policies.baselines.reserved_allocation import all_positions, known_positions
from cohort.common.policies.baselines.shortest_remaining import ShortestRemaining
from cohort.common.sequence import Phase
from tests.common.policies.baselines.drive import cache, leave, names, rows, sequence, step


def limits(rows: int = 2, tokens: int = 32, how: Literal["swap", "recompute"] = "recompute") -> IterationLimits:
    return IterationLimits(rows, tokens, tokens, how)


def orca(rows: int = 2) -> RankedBatching:
    return RankedBatching(ArrivalRanking(), limits(rows), reservation=all_positions, evicting=False)


def srtf(rows: int = 2, how: Literal["swap", "recompute"] = "swap") -> RankedBatching:
    return RankedBatching(ShortestRemaining(), limits(rows, how=how), reservation=known_positions, evicting=True)


def test_orca_runs_a_fixed_batch_and_lets_the_next_in_at_the_next_iteration() -> None:
    policy, kv = orca(), cache(40, reservation=all_positions)
    a, b, c = (sequence(name, 5, arrived_s=at) for at, name in enumerate("abc"))
    for one in (c, a, b):
        policy.add(0.0, one)
    assert rows(step(policy, kv)) == [("a", 0, 5), ("b", 0, 5)]
    assert rows(step(policy, kv)) == [("a", 5, 1), ("b", 5, 1)]
    leave(policy, kv, a)
    assert rows(step(policy, kv)) == [("c", 0, 5), ("b", 6, 1)]  # prefill rows first (R14)


def test_orca_admits_by_a_requests_greatest_need_and_in_order() -> None:
    policy, kv = orca(rows=4), cache(5, reservation=all_positions)
    policy.add(0.0, sequence("a", 4, max_tokens=9))  # 12 positions: 3 blocks
    policy.add(0.0, sequence("b", 4, max_tokens=9, arrived_s=1.0))
    policy.add(0.0, sequence("c", 2, max_tokens=2, arrived_s=2.0))  # one block, which is free
    for _ in range(3):
        assert names(step(policy, kv)) == ["a"]


def test_a_long_prompt_takes_several_iterations() -> None:
    policy, kv = orca(), cache(40, reservation=all_positions)
    policy.add(0.0, sequence("a", 50))
    assert [rows(step(policy, kv)) for _ in range(3)] == [[("a", 0, 32)], [("a", 32, 18)], [("a", 50, 1)]]


def test_srtf_runs_the_shortest_predicted_remainder() -> None:
    policy, kv = srtf(rows=1), cache(40)
    long, short = sequence("long", 4, predicted=20), sequence("short", 4, predicted=5, arrived_s=1.0)
    policy.add(0.0, long)
    assert names(step(policy, kv)) == ["long"]
    policy.add(0.0, short)
    assert names(step(policy, kv)) == ["short"]
    assert long.phase is Phase.RUNNING  # it keeps its KV
    short.tokens += [1] * 30  # far beyond its prediction: one token is thought to be left
    short.computed = short.known - 1
    kv.extend(short, short.known)
    assert names(step(policy, kv)) == ["short"]


def test_srtf_takes_the_place_of_longer_ones_when_the_cache_is_full() -> None:
    policy, kv = srtf(), cache(3, 4)
    long = sequence("long", 8, predicted=20)
    policy.add(0.0, long)
    step(policy, kv)  # two of three blocks, its prompt is computed
    policy.add(0.0, sequence("short", 6, predicted=2, arrived_s=1.0))
    plan = step(policy, kv)
    assert (names(plan), long.phase) == (["short"], Phase.SWAPPED)
    assert [(copy.direction, len(copy.device)) for copy in plan.copies] == [("out", 2)]
    assert names(step(policy, kv)) == ["short"]


def test_no_sequence_gives_way_in_the_middle_of_its_prompt_or_while_it_is_read() -> None:
    policy, kv = srtf(), cache(10, 10)
    long = sequence("long", 40, predicted=20)
    policy.add(0.0, long)
    assert rows(step(policy, kv)) == [("long", 0, 32)]
    short = sequence("short", 6, predicted=2, arrived_s=1.0)
    policy.add(0.0, short)
    assert rows(step(policy, kv)) == [("long", 32, 8)]  # ten blocks are taken
    long.pinned = True
    assert names(step(policy, kv)) == []  # no block for its token, and it must not move
    long.pinned = False
    assert (names(step(policy, kv)), long.phase) == (["short"], Phase.SWAPPED)


def test_no_sequence_is_preempted_in_vain() -> None:
    policy, kv = srtf(), cache(4, 8)
    running = sequence("running", 6, predicted=20)
    held = sequence("held elsewhere", 8)
    kv.reserve(held.key, held.tokens, 8)  # KV that is on its way here
    policy.add(0.0, running)
    step(policy, kv)
    policy.add(0.0, sequence("large", 12, predicted=1, arrived_s=1.0))  # three blocks; two could be had
    plan = step(policy, kv)
    assert plan.preempted == []
    assert running.phase is Phase.RUNNING
