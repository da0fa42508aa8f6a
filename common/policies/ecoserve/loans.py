"""E7, E8 · KVC pipelining: which waiting decode borrows the second half of a running one's allocation, and until when.

    lender     computed ▏first half of what is left          ▏second half: lent          ▏end
    borrower                                                 ▏its tokens … done, gone    ▏
    borrower 2          ▏…           ▏second half of the first half, and so on

Owned by `TimeSynced`. Finds borrowers for the lenders of a batch, and reports in time which borrower is in a block that
its lender is about to write. Evicts no sequence itself.
"""

from __future__ import annotations

import heapq
import itertools
import math
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import NamedTuple

from cohort.common.policies.ecoserve.batch import SyncedBatch
from cohort.common.policies.kv_interface import BlockSharing, KvAllocator
from cohort.common.sequence import Sequence
from cohort.common.types import Attempt


class Candidate(NamedTuple):
    """A decode that waits: tokens that it is predicted to need, its deadline, blocks that it lacks for them."""

    length: int
    deadline_s: float
    key: Attempt
    blocks: int
    sequence: Sequence


class Place(NamedTuple):
    """Blocks [first_block, end_block) of a lender's table; the lender writes there after `iterations`."""

    first_block: int
    end_block: int
    iterations: int

    @property
    def blocks(self) -> int:
        return self.end_block - self.first_block

    def rest_after(self, blocks: int, block_size: int) -> Place:
        """Return the rest of the place behind its first `blocks`, which the lender reaches later."""
        return Place(self.first_block + blocks, self.end_block, self.iterations + blocks * block_size)


def second_half(computed: int, end: int, block_size: int) -> Place | None:
    """E7 · EcoServe §3.4: Return the part of [computed, end) behind the middle, in whole blocks; None if there is none.

    Differs from the paper: allocation is in blocks, so the lent part starts at the first block boundary at or behind
    the middle; the borrower has up to a block less.
    """
    middle = computed + (end - computed + 1) // 2
    first_block = -(-middle // block_size)
    end_block = -(-end // block_size)
    if first_block >= end_block or first_block * block_size <= computed:
        return None
    return Place(first_block, end_block, first_block * block_size - computed)


def longest_borrower(place: Place, buffer: float) -> int:
    """E7 · Return the longest predicted length that is done before the lender comes, with the buffer b: L + b ≤ l/2.

    b is `buffer` of the borrower's own length L, which bounds the relative error of the prediction: the paper gives
    10 to 15 % "of the predicted RL", not whose.
    """
    return math.floor(place.iterations / (1.0 + buffer))


def closest(candidates: Seq[Candidate], place: Place, buffer: float) -> int | None:
    """E7 · Return the index of the longest candidate that fits the place in time and blocks; of equally long ones that
    with the latest deadline ("GTs with loose SLOs"). `candidates` are sorted; the search starts by bisection."""
    limit = longest_borrower(place, buffer)
    last = bisect_right(candidates, limit, key=lambda candidate: candidate.length) - 1
    fitting = (index for index in range(last, -1, -1) if 1 <= candidates[index].blocks <= place.blocks)
    return next(fitting, None)


class LendingRule:
    def __init__(self, batch: SyncedBatch, buffer: float) -> None:
        """`buffer`: E7's b as a share of the borrower's length."""
        self._batch, self._buffer = batch, buffer
        self._due: list[tuple[int, int, Sequence, int]] = []
        self._count = itertools.count()

    def arrange(
        self, candidates: list[Candidate], kv: KvAllocator, sharing: BlockSharing, places: int
    ) -> list[Candidate]:
        """E7 · Give the second halves of all members to borrowers, recursively, and return these, at most `places`.
        They join the batch and may lend in turn; `candidates` loses them."""
        if not candidates or places < 1:
            return []
        candidates.sort()
        batch, size = self._batch, kv.geometry.block_size
        found: list[Candidate] = []
        lenders = deque(sorted(batch.sequences, key=lambda s: (-batch.remaining(s), s.key)))
        while lenders and candidates and len(found) < places:
            lender = lenders.popleft()
            if (1.0 + self._buffer) * candidates[0].length > batch.remaining(lender) / 2 + size:
                continue  # the shortest would not be done before this one's middle
            end = self._unlent_end(lender, lender.computed + batch.remaining(lender), kv, sharing)
            while (place := second_half(lender.computed, end, size)) is not None:
                end = place.first_block * size
                for chosen in self._fill(lender, place, candidates, size, sharing, places - len(found)):
                    found.append(chosen)
                    batch.join(chosen.sequence, chosen.length)
                    lenders.append(chosen.sequence)
                    self._note(lender, place.first_block, size)
                if not candidates or candidates[0].length > longest_borrower(place, self._buffer):
                    break
        return found

    def _fill(
        self, lender: Sequence, place: Place, candidates: list[Candidate], size: int, sharing: BlockSharing, most: int
    ) -> list[Candidate]:
        """Lend this place to the longest that fits, and what it leaves of the place to others."""
        found: list[Candidate] = []
        while len(found) < most and place.blocks > 0:
            index = closest(candidates, place, self._buffer)
            if index is None:
                break
            chosen = candidates[index]
            positions = chosen.sequence.computed + chosen.length
            if not sharing.lend(lender, chosen.sequence, place.first_block, positions):
                break
            found.append(candidates.pop(index))
            place = place.rest_after(chosen.blocks, size)
        return found

    def resume(self, lender: Sequence, kv: KvAllocator, sharing: BlockSharing) -> None:
        """Record when a sequence that joined needs the first of the blocks it has lent."""
        size = kv.geometry.block_size
        index = sharing.first_lent(lender, -(-lender.computed // size), len(kv.blocks(lender.key)))
        if index is not None:
            self._note(lender, index, size)

    def due(self, kv: KvAllocator, sharing: BlockSharing) -> Iterable[tuple[Sequence, int]]:
        """E8 · Yield running lenders that write now into a block they have lent, with its index in their table. The
        caller removes all borrowers from the block before it takes the next."""
        size = kv.geometry.block_size
        while self._due and self._due[0][0] <= self._batch.clock:
            _, _, lender, index = heapq.heappop(self._due)
            if lender not in self._batch:
                continue  # `resume` comes back to it
            if index * size > lender.computed:
                self._note(lender, index, size)
            elif sharing.borrowers(lender, index):
                yield lender, index
            if index * size <= lender.computed:
                self.resume(lender, kv, sharing)  # its next one

    @property
    def next_due(self) -> int | None:
        return self._due[0][0] if self._due else None

    def _note(self, lender: Sequence, index: int, size: int) -> None:
        due = self._batch.clock + index * size - lender.computed
        heapq.heappush(self._due, (due, next(self._count), lender, index))

    def _unlent_end(self, lender: Sequence, end: int, kv: KvAllocator, sharing: BlockSharing) -> int:
        """Return the end of the positions in [computed, end) before the first block that is lent already."""
        size = kv.geometry.block_size
        index = sharing.first_lent(lender, -(-lender.computed // size), -(-end // size))
        return end if index is None else index * size
