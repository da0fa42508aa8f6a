"""E7 · KVC pipelining: which waiting decode fits into the second half of a running one's allocation. Pure functions.

    lender     computed ▏first half of what is left          ▏second half: lent          ▏end
    borrower                                                 ▏its tokens … done, gone    ▏
    borrower 2          ▏…           ▏second half of the first half, and so on

Called by `TimeSynced`, which does the lending.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence as Seq
from typing import NamedTuple

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

    def behind(self, blocks: int, block_size: int) -> Place:
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

    b is `buffer` of the borrower's own length L: the paper gives it as 10 to 15 % "of the predicted RL", not whose. Of
    the borrower's, it bounds the relative error of the prediction at every depth alike.
    """
    return math.floor(place.iterations / (1.0 + buffer))


def closest(candidates: Seq[Candidate], place: Place, buffer: float) -> int | None:
    """E7 · Return the index of the longest candidate that fits the place in time and blocks; of equally long ones that
    with the latest deadline ("GTs with loose SLOs"). `candidates` are sorted; the search starts by bisection."""
    limit = longest_borrower(place, buffer)
    last = bisect_right(candidates, limit, key=lambda candidate: candidate.length) - 1
    fitting = (index for index in range(last, -1, -1) if 1 <= candidates[index].blocks <= place.blocks)
    return next(fitting, None)
