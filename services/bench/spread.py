"""Several rounds of one measurement as one: their median, smallest and largest. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import msgspec


class Spread(msgspec.Struct, frozen=True):
    """Median, smallest and largest of some rounds."""

    median: float
    min: float
    max: float
    values: list[float]


def spread(values: Sequence[float]) -> Spread:
    return Spread(statistics.median(values), min(values), max(values), list(values))
