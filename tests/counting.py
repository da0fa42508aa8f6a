"""Cost by counting, for promises like "does not grow with": no clock, so a busy machine says the same."""

from __future__ import annotations

import sys
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
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


class Looks:
    """Count of characters that strings of `text` were looked at for, or copied."""

    def __init__(self) -> None:
        self.characters = 0

    def text(self, value: str) -> str:
        """Return the text as one that counts, as do all that are made from it, except by `"".join`."""
        return _CountedText(value, self)


class _CountedText(str):
    looks: Looks

    def __new__(cls, value: str, looks: Looks) -> _CountedText:
        made = super().__new__(cls, value)
        made.looks = looks
        return made

    def _counted(self, found: Any) -> Any:
        if isinstance(found, str):
            return _CountedText(found, self.looks)
        return type(found)(map(self._counted, found)) if isinstance(found, list | tuple) else found

    def __iter__(self) -> Iterator[str]:
        return map(self._counted, super().__iter__())

    def __getitem__(self, index: Any) -> str:
        found = self._counted(super().__getitem__(index))
        self.looks.characters += len(found)
        return found  # type: ignore[no-any-return]

    def __radd__(self, other: str) -> str:
        self.looks.characters += len(other) + len(self)
        return _CountedText(str.__add__(other, self), self.looks)


def _counting(name: str) -> Any:
    method = getattr(str, name)

    def call(self: _CountedText, *args: Any, **more: Any) -> Any:
        self.looks.characters += len(self) + sum(len(each) for each in args if isinstance(each, str))
        return self._counted(method(self, *args, **more))

    return call


for _name in (
    *(name for name in dir(str) if not name.startswith("_") and name != "maketrans"),
    *("__add__", "__eq__", "__ne__", "__contains__", "__mul__", "__mod__"),
):
    setattr(_CountedText, _name, _counting(_name))
_CountedText.__hash__ = str.__hash__  # type: ignore[method-assign]


def bytes_allocated(work: Callable[[], object]) -> int:
    """Bytes that were in use at most during `work`, beyond those before: what it copied at once, whatever it kept."""
    before, _ = tracemalloc.get_traced_memory()
    tracemalloc.reset_peak()
    work()
    return tracemalloc.get_traced_memory()[1] - before
