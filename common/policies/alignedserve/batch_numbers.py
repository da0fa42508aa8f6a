"""Numbers of aligned batches: apart from those of the manager's dispatches, so that a worker can tell them apart."""

from __future__ import annotations

from collections.abc import Iterable

from cohort.common.sequence import Row, Sequence

FIRST_BATCH = 1 << 32


def batch_of(sequence: Sequence) -> int:
    """Return the batch that the sequence was bound in; 0, the oldest, if none."""
    return sequence.batch_id if sequence.batch_id >= FIRST_BATCH else 0


def batches_of(rows: Iterable[Row]) -> int:
    """Return how many batches decode in an iteration; more than one while a switch lasts."""
    return len({batch_of(row.sequence) for row in rows if row.sequence.output_tokens})
