"""Rounds of one measurement: without garbage collection within, and as one figure."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import msgspec


@contextmanager
def no_collection() -> Iterator[None]:
    """Collect first, then nothing within: a collection would hit one call in hundreds."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class Spread(msgspec.Struct, frozen=True):
    """Median, smallest and largest of some rounds."""

    median: float
    min: float
    max: float
    values: list[float]


def spread(values: Sequence[float]) -> Spread:
    return Spread(statistics.median(values), min(values), max(values), list(values))
