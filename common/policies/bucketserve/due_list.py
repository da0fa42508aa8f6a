"""The waiting requests of one cell, in the order in which they are due.

Ascending runs of bounded length: the last to arrive is nearly always the last due, so adding appends and the first is
at the front. Taking the first of a heap compares two entries on every level instead, and where many wait none of them
is in the processor's caches. Owned by `length_index.py`; decides nothing.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator

Entry = int
"""When a request is due and, below that, its serial number, in one number: see `ageing.entry_of`."""

_RUN = 128
"""Entries of a run at most; inserting and deleting move no more than that."""


class DueList:
    """Never empty: made with its first entry, thrown away with its last. O(log entries + `_RUN`) per change."""

    __slots__ = ("_runs",)

    def __init__(self, entry: Entry) -> None:
        self._runs = [[entry]]

    @property
    def first(self) -> Entry:
        return self._runs[0][0]

    def __iter__(self) -> Iterator[Entry]:
        return (entry for run in self._runs for entry in run)

    def add(self, entry: Entry) -> bool:
        """Whether it is the first now."""
        runs = self._runs
        index = len(runs) - 1
        run = runs[index]
        first = False
        if entry > run[-1]:
            run.append(entry)
        else:
            if entry < run[0] and index:
                index = max(0, bisect_right(runs, entry, key=_first) - 1)
                run = runs[index]
            insort(run, entry)
            first = index == 0 and run[0] == entry
        if len(run) > _RUN:
            half = len(run) // 2
            runs.insert(index + 1, run[half:])
            del run[half:]
        return first

    def remove(self, entry: Entry) -> bool:
        """`entry` must be in it. Whether the list is not empty afterwards."""
        runs = self._runs
        index = 0
        run = runs[0]
        if run[0] == entry:  # the usual case
            del run[0]
        else:
            index = bisect_right(runs, entry, key=_first) - 1
            run = runs[index]
            del run[bisect_left(run, entry)]
        if not run:
            del runs[index]
        return bool(runs)


def _first(run: list[Entry]) -> Entry:
    return run[0]
