"""E7, E8 · Loans of blocks: which sequence borrows from which, and when it must give back.

Owned by `TimeSynced`. Finds borrowers for the lenders of a batch (`nesting` says which fit), and reports in time which
borrower is in a block that its lender is about to write. Evicts no sequence itself.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Iterable

from cohort.common.policies.ecoserve.batch import SyncedBatch
from cohort.common.policies.ecoserve.nesting import Candidate, Place, closest, longest_borrower, second_half
from cohort.common.policies.kv_interface import BlockSharing, KvAllocator
from cohort.common.sequence import Sequence


class Loans:
    """`buffer`: E7's b as a share of the borrower's length."""

    def __init__(self, buffer: float) -> None:
        self._buffer = buffer
        self._due: list[tuple[int, int, Sequence, int]] = []
        self._count = itertools.count()

    def arrange(
        self, batch: SyncedBatch, candidates: list[Candidate], kv: KvAllocator, sharing: BlockSharing, places: int
    ) -> list[Candidate]:
        """E7 · Give the second halves of all members to borrowers, recursively, and return these, at most `places`.
        They join the batch and may lend in turn; `candidates` loses them."""
        if not candidates or places < 1:
            return []
        candidates.sort()
        size = kv.geometry.block_size
        found: list[Candidate] = []
        lenders = deque(sorted(batch.sequences, key=lambda s: (-batch.left(s), s.key)))
        while lenders and candidates and len(found) < places:
            lender = lenders.popleft()
            if (1.0 + self._buffer) * candidates[0].length > batch.left(lender) / 2 + size:
                continue  # the shortest would not be done before this one's middle
            end = self._unlent_end(lender, lender.computed + batch.left(lender), kv, sharing)
            while (place := second_half(lender.computed, end, size)) is not None:
                end = place.first_block * size
                for chosen in self._fill(lender, place, candidates, kv, sharing, places - len(found)):
                    found.append(chosen)
                    batch.join(chosen.sequence, chosen.length)
                    lenders.append(chosen.sequence)
                    self._note(batch, lender, place.first_block, size)
                if not candidates or candidates[0].length > longest_borrower(place, self._buffer):
                    break
        return found

    def _fill(
        self,
        lender: Sequence,
        place: Place,
        candidates: list[Candidate],
        kv: KvAllocator,
        sharing: BlockSharing,
        places: int,
    ) -> list[Candidate]:
        """Lend this place to the longest that fits, and what it leaves of the place to others."""
        found: list[Candidate] = []
        while len(found) < places and place.blocks > 0:
            index = closest(candidates, place, self._buffer)
            if index is None:
                break
            chosen = candidates[index]
            positions = chosen.sequence.computed + chosen.length
            if not sharing.lend(lender, chosen.sequence, place.first_block, positions):
                break
            found.append(candidates.pop(index))
            place = place.behind(chosen.blocks, kv.geometry.block_size)
        return found

    def resume(self, batch: SyncedBatch, lender: Sequence, kv: KvAllocator, sharing: BlockSharing) -> None:
        """Record when a sequence that joined needs the first of the blocks it has lent."""
        size = kv.geometry.block_size
        index = sharing.first_lent(lender, -(-lender.computed // size), len(kv.blocks(lender.key)))
        if index is not None:
            self._note(batch, lender, index, size)

    def due(self, batch: SyncedBatch, kv: KvAllocator, sharing: BlockSharing) -> Iterable[tuple[Sequence, int]]:
        """E8 · Yield running lenders that write now into a block they have lent, with its index in their table. The
        caller removes all borrowers from the block before it takes the next."""
        size = kv.geometry.block_size
        while self._due and self._due[0][0] <= batch.clock:
            _, _, lender, index = heapq.heappop(self._due)
            if lender not in batch:
                continue  # `resume` comes back to it
            if index * size > lender.computed:
                self._note(batch, lender, index, size)
            elif sharing.borrowers(lender, index):
                yield lender, index
            if index * size <= lender.computed:
                self.resume(batch, lender, kv, sharing)  # its next one

    @property
    def next_due(self) -> int | None:
        return self._due[0][0] if self._due else None

    def _note(self, batch: SyncedBatch, lender: Sequence, index: int, size: int) -> None:
        due = batch.clock + index * size - lender.computed
        heapq.heappush(self._due, (due, next(self._count), lender, index))

    def _unlent_end(self, lender: Sequence, end: int, kv: KvAllocator, sharing: BlockSharing) -> int:
        """Return the end of the positions in [computed, end) before the first block that is lent already."""
        size = kv.geometry.block_size
        index = sharing.first_lent(lender, -(-lender.computed // size), -(-end // size))
        return end if index is None else index * size
