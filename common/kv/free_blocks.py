"""Free blocks as extents: maximal runs of neighbouring ids, so that blocks allocated together lie together.

KV moves between instances in runs of blocks that are neighbours at both ends, and a run costs its two ends a message
whatever its length; a free list in the order of release would hand out strangers after a while. Best fit: the smallest
extent that holds all, so that large ones stay whole for long prompts and sequences that grow block by block use up the
crumbs. Pure bookkeeping for a pool of blocks, which alone calls it; O(log n) per extent touched.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from itertools import chain


class FreeBlocks:
    """Free blocks of a pool; at first all of 0 … num_blocks-1."""

    def __init__(self, num_blocks: int) -> None:
        self.count = 0
        """Number of free blocks."""
        self._end_of: dict[int, int] = {}
        """First block of an extent → the block after its last."""
        self._start_of: dict[int, int] = {}
        self._starts: dict[int, dict[int, None]] = {}
        """Length → first blocks of the extents that long, the one freed first in front."""
        self._lengths: list[int] = []
        """Lengths that some extent has, ascending."""
        if num_blocks:
            self._insert(0, num_blocks)

    def __iter__(self) -> Iterator[int]:
        return chain.from_iterable(map(range, self._end_of, self._end_of.values()))

    @property
    def extents(self) -> int:
        return len(self._end_of)

    def take(self, count: int) -> list[int]:
        """Take `count` free blocks, ascending, from one extent if one is long enough, else from the longest ones."""
        assert 0 <= count <= self.count, f"{count} blocks are taken of {self.count} free ones"
        if count == 1:
            return [self._take_one()]
        blocks: list[int] = []
        while count > 0:
            at = bisect_left(self._lengths, count)
            length = self._lengths[min(at, len(self._lengths) - 1)]
            start = next(iter(self._starts[length]))
            taken = min(count, length)
            self._remove(start, start + length)
            if taken < length:
                self._insert(start + taken, start + length)
            blocks.extend(range(start, start + taken))
            count -= taken
        blocks.sort()
        return blocks

    def _take_one(self) -> int:
        """Take the first block of the smallest extent: most calls are of sequences that grow by one block."""
        lengths, length = self._lengths, self._lengths[0]
        starts = self._starts[length]
        start = next(iter(starts))
        end = self._end_of.pop(start)
        del starts[start]
        if not starts:
            del self._starts[length]
            del lengths[0]
        if length > 1:  # what is left is smaller than any other extent
            self._end_of[start + 1] = end
            self._start_of[end] = start + 1
            self._starts[length - 1] = {start + 1: None}
            lengths.insert(0, length - 1)
        else:
            del self._start_of[end]
        self.count -= 1
        return start

    def add(self, blocks: Sequence[int]) -> None:
        """Add blocks to the free ones. None of them may be free already."""
        ordered = sorted(blocks)
        first = 0
        for index in range(1, len(ordered) + 1):
            assert index == len(ordered) or ordered[index] > ordered[index - 1], (
                f"block {ordered[index]} is freed twice"
            )
            if index == len(ordered) or ordered[index] != ordered[index - 1] + 1:
                self._join(ordered[first], ordered[index - 1] + 1)
                first = index

    def _join(self, start: int, end: int) -> None:
        """Insert an extent, merged with the neighbours it touches."""
        # One that is free is free with all of its extent: that its ends lie in none is seen where they are its ends.
        assert start not in self._end_of and end not in self._start_of, f"[{start}, {end}) is freed and was free"
        before, after = self._start_of.get(start), self._end_of.get(end)
        if before is not None:
            self._remove(before, start)
            start = before
        if after is not None:
            self._remove(end, after)
            end = after
        self._insert(start, end)

    def _insert(self, start: int, end: int) -> None:
        assert start < end and start not in self._end_of, f"extent [{start}, {end}) is empty or there already"
        self._end_of[start] = end
        self._start_of[end] = start
        self.count += end - start
        starts = self._starts.get(end - start)
        if starts is None:
            self._starts[end - start] = {start: None}
            insort(self._lengths, end - start)
        else:
            starts[start] = None

    def _remove(self, start: int, end: int) -> None:
        assert self._end_of[start] == end and self._start_of[end] == start, f"[{start}, {end}) is no free extent"
        del self._end_of[start], self._start_of[end]
        self.count -= end - start
        assert self.count >= 0
        starts = self._starts[end - start]
        del starts[start]
        if not starts:
            del self._starts[end - start]
            del self._lengths[bisect_left(self._lengths, end - start)]
