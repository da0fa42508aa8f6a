"""When functions that know nothing of it begin and end, on whatever thread: the parts of a step, and the ways between.

Where a function is not there (the engine changes), its part is left out and named. Called by `gaps` and `mixed`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Place:
    """The attribute `name` of `owner` (a module or class), whose calls are spans of `part`."""

    owner: Any
    name: str
    part: str


@dataclass(slots=True)
class Spans:
    """(begin, end) by part, in seconds of one clock; `missing`: parts whose function is not there."""

    found: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)

    def lengths(self, part: str) -> list[float]:
        return [end - begin for begin, end in self.found.get(part, [])]

    def after(self, first: str, then: str) -> list[float]:
        """From each end of `first` to the next begin of `then`; the shortest way, so nothing lies between."""
        begins = sorted(begin for begin, _ in self.found.get(then, []))
        ways = []
        at = 0
        for _, end in sorted(self.found.get(first, [])):
            while at < len(begins) and begins[at] < end:
                at += 1
            if at < len(begins):
                ways.append(begins[at] - end)
        return ways

    def between(self, first_s: float, last_s: float) -> Spans:
        """Only what began between the two moments."""
        kept = {part: [span for span in spans if first_s <= span[0] < last_s] for part, spans in self.found.items()}
        return Spans(kept, self.missing)


@contextmanager
def spanned(places: Sequence[Place]) -> Iterator[Spans]:
    """Within, calls at these places are noted."""
    spans = Spans()
    with ExitStack() as restoring:
        for place in places:
            function = getattr(place.owner, place.name, None)
            if function is None:
                spans.missing.append(place.part)
                continue
            restoring.callback(setattr, place.owner, place.name, function)
            setattr(place.owner, place.name, _noted(function, spans.found.setdefault(place.part, [])))
        yield spans


def _noted(function: Callable[..., Any], into: list[tuple[float, float]]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        begin = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            into.append((begin, time.perf_counter()))

    return call
