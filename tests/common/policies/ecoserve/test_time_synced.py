"""The scheduler by hand: one iteration after the other over a small cache, decisions compared whole."""

from __future__ import annotations

from typing import Any

from cohort.common.policies.ecoserve.time_synced import TimeSynced
from cohort.common.policies.interface import IterationPlan
from cohort.common.policies.kv_interface import KvAllocator
from cohort.common.sequence import Phase, Row, Sequence
from cohort.common.types import Attempt
from tests.common.policies.baselines.drive import cache, leave, rows, sequence, step
from tests.common.policies.ecoserve.drive import nested, scheduler


def offer(policy: TimeSynced, *sequences: Sequence) -> None:
    for each in sequences:
        policy.add(0.0, each)


def sequence_of(name: str, prompt: int, predicted: float, **more: Any) -> Sequence:
    return sequence(name, prompt, predicted=predicted, max_tokens=100, **more)


def test_prompts_up_to_the_forward_size_then_groups_of_equal_length() -> None:
    """E1, E2, E3, E10: 16 tokens an iteration; decodes of 5 tokens (one drawn with the prompt, four to go)."""
    policy, kv = scheduler(target_tokens=16), nested(40)
    offer(
        policy,
        sequence_of("a", 8, 5, arrived_s=1),
        sequence_of("b", 8, 5, arrived_s=2),
        sequence_of("c", 8, 9, arrived_s=3),
    )
    assert rows(step(policy, kv)) == [("a", 0, 8), ("b", 0, 8)]
    # The decodes of 4 more tokens form one group; beside their two tokens the third prompt has room.
    assert rows(step(policy, kv)) == [("c", 0, 8), ("a", 8, 1), ("b", 8, 1)]
    assert policy.metrics()["groups"] == 1
    assert kv.owners() == {Attempt("a", 1): 3, Attempt("b", 1): 3, Attempt("c", 1): 2}  # 8 + 4 positions in blocks of 4
    assert rows(step(policy, kv)) == [("a", 9, 1), ("b", 9, 1), ("c", 8, 1)]
    assert policy.metrics()["groups"] == 2


def test_between_ends_of_groups_nothing_is_decided() -> None:
    policy, kv = scheduler(), nested(40)
    offer(policy, sequence_of("a", 8, 9))
    for _ in range(6):
        step(policy, kv)
    stats = policy.metrics()
    assert (stats["formations_total"], stats["iterations_total"]) == (1.0, 6.0)
    assert stats["iterations_undecided_total"] == 4.0  # all but the prompt's and the formation's


def test_right_drafts_end_a_group_where_its_blocks_end() -> None:
    policy, kv = scheduler(), nested(40)
    offer(policy, sequence_of("a", 8, 9), sequence_of("b", 8, 9))
    step(policy, kv)
    for _ in range(20):
        plan = step(policy, kv)
        for row in plan.rows:
            assert row.start + row.count <= len(kv.blocks(row.sequence.key)) * kv.geometry.block_size
        first = plan.rows[0].sequence
        if kv.extend_ahead([Row(first, first.computed, 2)]) is None:
            plan.drafted, first.computed = 2, first.computed + 2
            first.tokens += [1, 1]
    assert policy.metrics()["underpredictions_continued_total"] > 2


def test_a_group_that_does_not_fit_is_split_and_the_rest_follows_at_its_end() -> None:
    policy, kv = scheduler(pipelined=False, ordered=False), nested(10)
    a, b, c = (sequence_of(name, 8, 9, arrived_s=index) for index, name in enumerate("abc"))
    offer(policy, a, b, c)
    step(policy, kv)  # 24 tokens of prompts: 6 blocks
    assert [name for name, _, _ in rows(step(policy, kv))] == ["a", "b"]  # 2 blocks each; 8 more tokens
    for _ in range(7):
        step(policy, kv)
    leave(policy, kv, a)
    leave(policy, kv, b)
    assert [name for name, _, _ in rows(step(policy, kv))] == ["c"]


def test_the_best_fit_takes_the_room_that_the_first_leaves() -> None:
    """E6: the first in order does not fit, a shorter one does."""
    policy, kv = scheduler(pipelined=False), nested(8)
    offer(policy, sequence_of("long", 8, 25), sequence_of("short", 8, 5))
    step(policy, kv)
    assert [name for name, _, _ in rows(step(policy, kv))] == ["short"]


def test_an_underprediction_uses_the_reserve() -> None:
    policy, kv = scheduler(padding=0.5), nested(20)
    offer(policy, sequence_of("a", 8, 2))  # padded to 3: two more tokens
    for _ in range(8):
        assert len(step(policy, kv).rows) == 1
    assert policy.metrics()["underpredictions_continued_total"] >= 2
    assert policy.metrics()["underpredictions_stopped_total"] == 0


def test_without_reserve_it_stops_keeps_its_kv_and_goes_on_later() -> None:
    """E5, offload-free: no copy, no recomputation."""
    policy, kv = scheduler(pipelined=False), nested(6)
    a, b = sequence_of("a", 4, 5, arrived_s=0), sequence_of("b", 4, 13, arrived_s=1)
    offer(policy, a, b)
    step(policy, kv)
    for _ in range(4):  # a's group of 4 ends with its block full; b's 12 need 3 blocks, all there are
        assert len(step(policy, kv).rows) == 2
    assert rows(step(policy, kv)) == [("b", 8, 1)]
    assert policy.metrics()["underpredictions_stopped_total"] == 1
    assert (a.phase, a.computed, a.preemptions) == (Phase.RUNNING, 8, 0)
    leave(policy, kv, b)
    assert rows(step(policy, kv)) == [("a", 8, 1)]


def test_a_short_decode_runs_inside_a_long_one() -> None:
    """E7: no block is free, and both run; the borrower is gone when the lender comes to the middle."""
    policy, kv = scheduler(buffer=0.0), nested(11)
    long, short = sequence_of("long", 4, 33), sequence_of("short", 4, 13)
    offer(policy, long)
    step(policy, kv)
    step(policy, kv)  # 1 + 8 blocks
    offer(policy, short)
    step(policy, kv)
    plan = step(policy, kv)
    assert [name for name, _, _ in rows(plan)] == ["long", "short"]
    assert kv.free_blocks == 1
    assert policy.metrics()["borrowers_total"] == 1
    lender, borrower = list(kv.blocks(long.key)), list(kv.blocks(short.key))
    assert set(borrower[1:]) <= set(lender[5:])  # positions 20 on: the second half of [4, 36)
    kv.check()


def run_until_late(policy: TimeSynced, kv: KvAllocator, limit: int = 60) -> tuple[IterationPlan, int]:
    for count in range(limit):
        plan = step(policy, kv)
        kv.check()
        if plan.preempted:
            return plan, count
    raise AssertionError("no borrower was late")


def test_a_late_borrower_is_moved_to_host_memory_and_returns() -> None:
    """E8: predicted 13, needs many more; the cache has nothing to extend it with."""
    policy, kv = scheduler(buffer=0.0), nested(10, 10)
    long, short = sequence_of("long", 4, 33), sequence_of("short", 4, 13)
    offer(policy, long)
    step(policy, kv)
    step(policy, kv)
    offer(policy, short)
    plan, _ = run_until_late(policy, kv)
    assert [(p.sequence, p.how) for p in plan.preempted] == [(short, "swap")]
    assert [name for name, _, _ in rows(plan)] == ["long"]
    assert policy.metrics()["borrowers_late_total"] == 1
    leave(policy, kv, long)
    back = step(policy, kv)
    assert [copy.direction for copy in back.copies] == ["in"]
    assert [name for name, _, _ in rows(back)] == ["short"]


def test_a_late_prediction_regroups_a_waiting_sequence() -> None:
    """E4: placed with the default of 30, grouped as 5 once the prediction is there."""
    policy, kv = scheduler(pipelined=False), nested(6)
    a = sequence_of("a", 8, 30)
    offer(policy, a)
    step(policy, kv)
    a.predicted = 5.0
    step(policy, kv, revised=[a])
    assert kv.owners() == {Attempt("a", 1): 3}  # 8 + 4 positions


def test_with_no_sequence_able_to_run_the_last_makes_room_for_the_first() -> None:
    policy, kv = scheduler(ordered=False, pipelined=False, preemption="recompute"), nested(6)
    a, b = sequence_of("a", 12, 13, arrived_s=0), sequence_of("b", 12, 13, arrived_s=1)
    offer(policy, a, b)
    step(policy, kv)
    plan = step(policy, kv)
    assert [p.sequence for p in plan.preempted] == [b]
    assert [name for name, _, _ in rows(plan)] == ["a"]
    assert policy.metrics()["forced_total"] == 1


def test_coupled_prompts_take_the_kv_of_their_decode() -> None:
    """E11, SyncCoupled: two of the three fit; the third comes when a group ends, although 30 tokens would be free."""
    policy, kv = scheduler(decoupled=False, ordered=False, pipelined=False), nested(8)
    offer(policy, *(sequence_of(name, 8, 9, arrived_s=index) for index, name in enumerate("abc")))
    assert [name for name, _, _ in rows(step(policy, kv))] == ["a", "b"]
    assert kv.owners() == {Attempt("a", 1): 4, Attempt("b", 1): 4}
    assert [name for name, _, _ in rows(step(policy, kv))] == ["a", "b"]


def test_with_another_allocator_nothing_is_lent() -> None:
    policy, kv = scheduler(), cache(20)
    offer(policy, sequence_of("a", 8, 9), sequence_of("b", 8, 5))
    for _ in range(5):
        step(policy, kv)
    assert policy.metrics()["borrowers_total"] == 0
    kv.check()


def test_repetitions_end_before_the_group_does() -> None:
    policy, kv = scheduler(), nested(20)
    offer(policy, sequence_of("a", 8, 11))
    step(policy, kv)
    plan = step(policy, kv)  # 10 more tokens; the first of them is in flight
    assert policy.steady_for(plan, kv) == 0  # its time is still to be learned
    plan = step(policy, kv)
    assert policy.steady_for(plan, kv) == 8


def test_ended_decodes_teach_the_padding_and_others_do_not() -> None:
    policy, kv = scheduler(), nested(20)
    a, b = sequence("a", 4, max_tokens=2, predicted=9.0), sequence_of("b", 4, 9)
    offer(policy, a, b)
    step(policy, kv)
    step(policy, kv)
    leave(policy, kv, a)
    leave(policy, kv, b)  # cancelled
    assert policy.metrics()["overpredicted_total"] == 1
