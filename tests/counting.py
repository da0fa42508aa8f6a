"""Cost by counting, for promises like "does not grow with": no clock, so a busy machine says the same."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, overload


def lines_run(work: Callable[[], object]) -> int:
    """Lines of Python executed by `work` and all it calls in this thread; what runs inside C counts nothing."""
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


class CountedReads(Sequence[int]):
    """A sequence that counts the items it gave out, one by one or in slices."""

    def __init__(self, items: Sequence[int]) -> None:
        self._items = items
        self.reads = 0

    def __len__(self) -> int:
        return len(self._items)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[int]: ...
    def __getitem__(self, index: int | slice) -> int | Sequence[int]:
        found = self._items[index]
        self.reads += len(found) if isinstance(found, Sequence) else 1
        return found
