"""Which request of a class has waited longest for a row, and whether its turn has come whatever it costs (R4).

Owned by `slack_packing.py`, told of every iteration and asked once a decision. Decides nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from cohort.common.sequence import Sequence
from cohort.common.types import Attempt, TrafficClass


class Unserved:
    def __init__(self, limits_s: Mapping[TrafficClass, float], *, every: int) -> None:
        """`limits_s`: the longest that a request of a class waits; `every`: iterations between two turns of a class, at
        least."""
        self._limits_s = limits_s
        self._every = every
        # Insertion order = the longest unserved first, per class.
        self._since: dict[TrafficClass, dict[Attempt, tuple[float, Sequence]]] = {each: {} for each in limits_s}
        self._iterations: dict[TrafficClass, int] = dict.fromkeys(limits_s, 0)

    def add(self, now_s: float, sequence: Sequence) -> None:
        self._since[sequence.request.traffic_class][sequence.key] = (now_s, sequence)

    def remove(self, sequence: Sequence) -> None:
        self._since[sequence.request.traffic_class].pop(sequence.key, None)

    def served(self, now_s: float, sequences: Iterable[Sequence]) -> None:
        """These have rows in the iteration that begins now."""
        for sequence in sequences:
            since = self._since[sequence.request.traffic_class]
            if since.pop(sequence.key, None) is not None:
                since[sequence.key] = (now_s, sequence)

    def repeated(self, iterations: int) -> None:
        """So many iterations ran without a decision."""
        for traffic_class in self._iterations:
            self._iterations[traffic_class] += iterations

    def turns(self, now_s: float) -> Iterator[Sequence]:
        """The longest unserved of each class, if that is too long; once a decision."""
        for traffic_class, after_s in self._limits_s.items():
            since = self._since[traffic_class]
            key = next(iter(since), None)
            self._iterations[traffic_class] += 1
            if self._iterations[traffic_class] < self._every:
                continue
            if key is not None and now_s - since[key][0] > after_s:
                self._iterations[traffic_class] = 0
                yield since[key][1]
