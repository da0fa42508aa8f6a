"""Groups that run in step: the clock, ends, members that leave early."""

from __future__ import annotations

from cohort.common.policies.ecoserve.batch import SyncedBatch
from cohort.common.sequence import Sequence
from tests.common.policies.baselines.drive import sequence


def advance(batch: SyncedBatch, iterations: int = 1) -> None:
    batch.clock += iterations


def three() -> tuple[SyncedBatch, list[Sequence]]:
    batch, members = SyncedBatch(), [sequence(name, 4, arrived_s=i) for i, name in enumerate("abc")]
    batch.join(members[0], 3)
    batch.join(members[1], 3)
    batch.join(members[2], 5)
    return batch, members


def test_a_group_ends_together() -> None:
    batch, (a, b, c) = three()
    assert (batch.groups, batch.next_end) == (2, 3)
    advance(batch, 2)
    assert batch.ended() == [] and not batch.group_over
    advance(batch)
    assert batch.ended() == [a, b]
    assert batch.group_over and c in batch and a not in batch
    assert batch.remaining(c) == 2


def test_a_late_sequence_with_as_much_left_joins_the_group() -> None:
    batch, (a, b, c) = three()
    advance(batch, 2)
    late = sequence("late", 9, arrived_s=9.0)
    batch.join(late, 3)
    assert batch.groups == 2
    advance(batch, 3)
    assert batch.ended() == [a, b, c, late]
    assert len(batch) == 0 and batch.next_end is None


def test_whose_drafts_were_right_ends_with_an_earlier_group() -> None:
    batch, (a, b, c) = three()
    advance(batch)
    batch.advance(c, 2)
    assert (batch.groups, batch.remaining(c)) == (1, 2)
    batch.advance(a, 9)
    assert batch.ended() == [a], "at once, where it is further than its end"
    advance(batch, 2)
    assert batch.ended() == [b, c]
    assert len(batch) == 0 and batch.next_end is None


def test_a_group_is_over_when_its_last_member_has_left() -> None:
    batch, (a, b, _) = three()
    assert batch.leave(a) and not batch.group_over
    assert batch.leave(b) and batch.group_over
    assert not batch.leave(b)
    assert batch.next_end == 5
    assert batch.groups_ended == 1
