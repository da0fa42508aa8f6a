"""How far each row of a padded plan is filled up, for schedulers that count the waste and for the engine."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from cohort.common.policies.kv_interface import KvAllocator
from cohort.common.sequence import Row


def row_padding(rows: Seq[Row], padded_to: int, kv: KvAllocator) -> list[int]:
    """B2 · Return the padding behind each row's own tokens, S_max − S_i of Eq. 2 for prefill rows, 0 for decode rows.
    Not beyond the row's blocks (padding writes KV there, which the row's later tokens overwrite), and not beyond the
    last real position of the batch (positions past the context's end do not exist)."""
    size = kv.geometry.block_size
    end = max((row.start + row.count for row in rows if row.count > 1), default=0)
    padding = []
    for row in rows:
        headroom = 0
        if row.count > 1:
            reach = min(end, len(kv.blocks(row.sequence.key)) * size) - row.start - row.count
            headroom = max(0, min(padded_to - row.count, reach))
        padding.append(headroom)
    return padding
