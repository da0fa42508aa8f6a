"""An upper bound on how many requests fit: time windows, work, and resources that do so much of it a second.

A request is some jobs: work on a resource that has to be done within a window. If it is kept, all of them are. Then for
every interval [s, t] the work of kept jobs whose windows lie inside is at most capacity · (t − s), however it is
ordered, interrupted and spread. With a share x ≤ 1 of every request in place of yes or no, the most requests are a
linear programme. Its constraints, one for each interval, are added where they are violated most (cutting planes).

What is returned does not trust the solver: for any prices y ≥ 0 of the intervals, Σ y · capacity · (t − s) plus what
each request is worth beyond its price, Σ max(0, 1 − Σ y · work), is an upper bound (weak duality). The solver only
finds good prices; leaving intervals out, as the grid of times does, loosens the bound and never makes it wrong.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog

_TIMES = 300
"""Beginnings and ends of intervals at most: as many times of the jobs, evenly by rank."""
_CUTS, _ROUNDS = 24, 40
"""Intervals added at once at most, and how often."""
_TOLERANCE = 1e-6

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Resource:
    """`capacity`: work a second. Job `i` of request `owner[i]` needs `work[i]` between `begin[i]` and `end[i]`."""

    capacity: float
    owner: NDArray[np.intp]
    work: Floats
    begin: Floats
    end: Floats


@dataclass(frozen=True, slots=True)
class Fitting:
    """`most`: at most so many requests fit. `shares`: of each request in the relaxation's optimum."""

    most: float
    shares: Floats


class _Intervals:
    """Intervals of one resource, by number of their beginning and of their end."""

    def __init__(self, resource: Resource) -> None:
        self.resource = resource
        self._begins, self._ends = _spread(resource.begin), _spread(resource.end)
        # A window is inside an interval that begins at or before it and ends at or after it.
        self._from = np.searchsorted(self._begins, resource.begin, side="right") - 1
        self._to = np.searchsorted(self._ends, resource.end, side="left")
        lengths = self._ends[None, :] - self._begins[:, None]
        self._room = np.where(lengths > 0, resource.capacity * lengths, math.inf)

    def violated(self, shares: Floats) -> list[tuple[float, int, int]]:
        """Return for each beginning the interval with most work beyond its room, as a share of it."""
        table = np.zeros_like(self._room)
        np.add.at(table, (self._from, self._to), self.resource.work * shares[self.resource.owner])
        inside = table[::-1].cumsum(0)[::-1].cumsum(1)
        beyond = inside / self._room - 1.0
        worst = beyond.argmax(1)
        found = [(float(beyond[at, end]), at, int(end)) for at, end in enumerate(worst)]
        return [each for each in found if each[0] > _TOLERANCE]

    def constraint(self, begin: int, end: int, requests: int) -> Floats:
        """Return the share of the interval's room that each request takes."""
        inside = (self._from >= begin) & (self._to <= end)
        of = self.resource
        taken = np.bincount(of.owner[inside], of.work[inside], requests)
        return np.asarray(taken / self._room[begin, end], np.float64)


def most_fitting(requests: int, resources: Sequence[Resource]) -> Fitting:
    """Bound how many of `requests` requests fit. Those without jobs count as fitting."""
    intervals = [_Intervals(each) for each in resources if len(each.owner)]
    shares, most = np.ones(requests), float(requests)
    rows: list[Floats] = []
    for _ in range(_ROUNDS):
        found = [(each, number) for number, one in enumerate(intervals) for each in one.violated(shares)]
        if not found:
            break
        worst = sorted(found, reverse=True)[:_CUTS]
        rows += [intervals[number].constraint(begin, end, requests) for (_, begin, end), number in worst]
        solved = linprog(-np.ones(requests), np.array(rows), np.ones(len(rows)), bounds=(0.0, 1.0), method="highs")
        if solved.x is None:  # the bound so far holds
            break
        shares = np.clip(solved.x, 0.0, 1.0)
        prices = np.maximum(0.0, -solved.ineqlin.marginals)
        most = min(most, float(prices.sum() + np.maximum(0.0, 1.0 - prices @ np.array(rows)).sum()))
    return Fitting(most, shares)


def _spread(times: Floats) -> Floats:
    """Return some of the times, the first and the last among them."""
    known = np.unique(times)
    at = np.linspace(0, len(known) - 1, min(len(known), _TIMES)).round().astype(np.intp)
    return known[at]
