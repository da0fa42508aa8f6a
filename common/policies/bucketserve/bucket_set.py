"""Which lengths share a bucket: Alg. 1 of BucketServe over cells of equal width.

Holds bounds and two counters per bucket. The requests stay in the `LengthIndex`, which counts those in a range of
cells: a lookup is a bisection, a merge resets two lists, a split costs one range count. Owned by `prefill_order.py`.

Chosen where Alg. 1 is silent: empty buckets and those of one cell are not split; a midpoint is rounded down to a cell;
S ≥ L_max belongs to the last bucket; at most `max_buckets` exist, which bounds the cost of an adjustment.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cohort.common.errors import InvariantViolated

_SPLIT_SHARE = 0.5
"""θ of Alg. 1: a bucket is split if a larger share of its requests lies below the midpoint."""


@dataclass(slots=True)
class Bucket:
    """Cells [low, high); `count` requests, `below` of them below the midpoint."""

    low: int
    high: int
    count: int = 0
    below: int = 0

    @property
    def middle(self) -> int:
        return (self.low + self.high) // 2


class BucketSet:
    def __init__(
        self, max_tokens: int, *, max_cells: int = 4096, max_buckets: int = 64, count_between: Callable[[int, int], int]
    ) -> None:
        """`max_tokens` is L_max; `count_between(low, high)` counts waiting requests by cells."""
        self.max_tokens = max(1, max_tokens)
        self.cell_tokens = -(-self.max_tokens // max_cells)
        self.cells = -(-self.max_tokens // self.cell_tokens)
        self.total = self.merges = self.splits = 0
        self._max_buckets = max_buckets
        self._count_between = count_between
        self._buckets = [Bucket(0, self.cells)]
        self._lows = [0]

    def __len__(self) -> int:
        return len(self._buckets)

    @property
    def buckets(self) -> Sequence[Bucket]:
        """Buckets in ascending order; they meet exactly and cover all cells."""
        return self._buckets

    @property
    def upper_bounds(self) -> list[int]:
        """Exclusive bounds in tokens, ascending."""
        return [min(bucket.high * self.cell_tokens, self.max_tokens) for bucket in self._buckets]

    def cell_of(self, tokens: int) -> int:
        return min(tokens // self.cell_tokens, self.cells - 1)

    def bucket_of(self, cell: int) -> Bucket:
        """B5 · Return the bucket of a cell (Alg. 1 lines 4-11) by bisection, O(log k); the paper walks over all k."""
        return self._buckets[bisect_right(self._lows, cell) - 1]

    def added(self, cell: int) -> None:
        bucket = self.bucket_of(cell)
        bucket.count += 1
        bucket.below += cell < bucket.middle
        self.total += 1

    def removed(self, cell: int) -> None:
        bucket = self.bucket_of(cell)
        bucket.count -= 1
        bucket.below -= cell < bucket.middle
        self.total -= 1

    def adjust(self, safe_batch: int, rectangle_tokens: int = 0, mean_tokens: float = 1.0) -> None:
        """B5 · BucketServe Alg. 1, AdjustBuckets: merge all below N_max waiting requests, else split what is uneven.

        `safe_batch` is N_max (Eq. 6), also the minimum split size m. Differs from the paper: repeats until nothing
        splits (the text says so, the listing makes one pass). Where batches are padded, `rectangle_tokens` (rows times
        the longest prompt of one forward; 0 = not padded) bounds m by the rows of the bucket's upper bound, and N_max
        for the merge by the rows of `mean_tokens`: by memory alone, only a queue larger than any batch would be split.
        """
        whole = min(safe_batch, int(rectangle_tokens / max(1.0, mean_tokens))) if rectangle_tokens else safe_batch
        if self.total < whole:  # lines 15-16
            if len(self._buckets) > 1:
                self.merges += 1
                self.rebound([0])
            return
        index = 0
        while index < len(self._buckets) and len(self._buckets) < self._max_buckets:
            bucket = self._buckets[index]
            rows = safe_batch
            if rectangle_tokens:
                rows = min(safe_batch, max(1, rectangle_tokens // (bucket.high * self.cell_tokens)))
            # Lines 20-22; more than m ≥ 1 requests also means the bucket is not empty.
            wide = bucket.high - bucket.low >= 2
            if bucket.count > rows and bucket.below > _SPLIT_SHARE * bucket.count and wide:
                self._split(index)  # lines 27-31; the left half is looked at again
            else:
                index += 1

    def rebound(self, lows: Sequence[int]) -> None:
        """Set the buckets' lower bounds (cells, ascending, the first 0)."""
        highs = [*lows[1:], self.cells]
        self._lows = list(lows)
        self._buckets = [self._counted(low, high) for low, high in zip(lows, highs, strict=True)]

    def check(self, waiting: int) -> None:
        """Raise `InvariantViolated` unless the buckets meet exactly and their counters are right."""
        if self.total != waiting or sum(bucket.count for bucket in self._buckets) != waiting:
            raise InvariantViolated(f"{waiting} requests wait, buckets count {self.total}")
        if self._lows != [bucket.low for bucket in self._buckets] or self._lows[0] != 0:
            raise InvariantViolated("lower bounds differ from the buckets")
        if [bucket.high for bucket in self._buckets] != [*self._lows[1:], self.cells]:
            raise InvariantViolated("buckets do not meet")
        for bucket in self._buckets:
            found = self._counted(bucket.low, bucket.high)
            if (bucket.count, bucket.below) != (found.count, found.below):
                raise InvariantViolated(f"bucket [{bucket.low}, {bucket.high}) counts {bucket.count}, {bucket.below}")

    def _split(self, index: int) -> None:
        bucket = self._buckets[index]
        left = Bucket(bucket.low, bucket.middle, bucket.below)
        left.below = self._count_between(left.low, left.middle)
        right = Bucket(bucket.middle, bucket.high, bucket.count - bucket.below)
        right.below = self._count_between(right.low, right.middle)
        self._buckets[index : index + 1] = [left, right]
        self._lows.insert(index + 1, right.low)
        self.splits += 1

    def _counted(self, low: int, high: int) -> Bucket:
        bucket = Bucket(low, high, self._count_between(low, high))
        bucket.below = self._count_between(low, bucket.middle)
        return bucket
