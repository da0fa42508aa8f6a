"""Allocation ahead: a request gets at admission what it will need in the end, by its bound or by its prediction.

- max-allocation (ORCA §4.2, FastServe, SRTF as in EcoServe §2.1): prompt and `max_tokens`. No sequence runs out of
  blocks while it runs, at the price of blocks that are never used.
- exact allocation by prediction (S³, MultiRes and EcoServe §2.1, UELLM): prompt and padded predicted response.
  A sequence that outgrows its prediction takes further blocks on demand, and may have to give way.

Differs from the papers: blocks instead of one contiguous piece, so there is no external fragmentation. A segment that
will be handed over, or came by KV transfer, gets its blocks on demand: reserved on two workers at once, two requests
could wait for each other's reservation forever.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from cohort.common.policies.baselines.paged_allocation import PagedAllocator
from cohort.common.sequence import Sequence
from cohort.common.types import KvGeometry

Reservation = Callable[[Sequence], int]
"""Positions that a sequence is given at admission; at least those it can compute now."""


def known_positions(sequence: Sequence) -> int:
    """Return the known length: block allocation on demand (vLLM)."""
    return sequence.target


def all_positions(sequence: Sequence) -> int:
    """Return everything the sequence can ever need: max-allocation."""
    return sequence.target if sequence.end is not None else max(sequence.target, sequence.max_positions)


def predicted_positions(padding: float) -> Reservation:
    """Return exact allocation's reservation: prompt and predicted response, `padding` longer (E4: 10, 15, 20 %)."""

    def positions(sequence: Sequence) -> int:
        if sequence.end is not None:
            return sequence.target
        # The last output token is never processed, so it needs no position.
        expected = sequence.request.prompt_tokens + math.ceil(sequence.predicted * (1.0 + padding)) - 1
        return max(sequence.target, min(expected, sequence.max_positions))

    return positions


class ReservedAllocator(PagedAllocator):
    """Paged allocation that takes all blocks of a `reservation` at admission and on the way back from host memory."""

    def __init__(
        self,
        geometry: KvGeometry,
        num_blocks: int,
        host_blocks: int,
        *,
        reservation: Reservation,
        prefix_caching: bool = True,
    ) -> None:
        super().__init__(geometry, num_blocks, host_blocks, prefix_caching=prefix_caching)
        self._reservation = reservation

    def positions_wanted(self, sequence: Sequence) -> int:
        return self._reservation(sequence)
