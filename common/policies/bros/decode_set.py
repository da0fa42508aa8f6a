"""The real-time sequences that decode: how many, how long, and the strictest TPOT that one of them could keep.

Kept by the queues as sequences change, because every decision asks and thousands may decode in turns. Decides nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

from cohort.common.policies.bros.batch import NO_DEADLINE_S, DecodeRows, is_decode
from cohort.common.policies.bros.iteration_cost import IterationCost
from cohort.common.policies.bros.token_groups import TokenGroups
from cohort.common.sequence import Sequence
from cohort.common.types import Attempt


class DecodeSet:
    """`rows` sequences; `context`: positions computed of all together."""

    def __init__(self, groups: TokenGroups) -> None:
        self._groups = groups
        self._noted: dict[Attempt, tuple[float, int]] = {}
        """TPOT target and computed positions of each."""
        self._by_tpot: dict[float, dict[Attempt, int]] = {}
        self.context = 0

    @property
    def rows(self) -> int:
        return len(self._noted)

    def note(self, sequence: Sequence) -> None:
        """It is new, or something of it has changed."""
        key, noted = sequence.key, self._noted.get(sequence.key)
        if noted is not None and is_decode(sequence) and noted[0] == self._groups.tpot_s(sequence):  # nearly always
            tpot_s, before = noted
            self._noted[key] = tpot_s, sequence.computed
            self._by_tpot[tpot_s][key] = sequence.computed
            self.context += sequence.computed - before
            return
        self.forget(key)
        if is_decode(sequence):
            tpot_s, computed = self._groups.tpot_s(sequence), sequence.computed
            self._noted[key] = tpot_s, computed
            self._by_tpot.setdefault(tpot_s, {})[key] = computed
            self.context += computed

    def forget(self, key: Attempt) -> None:
        tpot_s, computed = self._noted.pop(key, (0.0, -1))
        if computed >= 0:
            self.context -= computed
            alike = self._by_tpot[tpot_s]
            del alike[key]
            if not alike:
                del self._by_tpot[tpot_s]

    def without(self, keys: Iterable[Attempt]) -> tuple[int, int]:
        """Rows and context of the others."""
        taken = [self._noted[key][1] for key in keys if key in self._noted]
        return self.rows - len(taken), self.context - sum(taken)

    def all_rows(self, cost: IterationCost, most_rows: int) -> DecodeRows:
        """An iteration of all of them, as far as it can hold them."""
        rows, context = min(self.rows, most_rows), self.context
        least_s = max(cost.least_s, cost.exec_of(0, rows, context + rows))
        return DecodeRows(rows, context + rows, least_s, self._strictest_s(cost))

    def _strictest_s(self, cost: IterationCost) -> float:
        """The strictest TPOT target that one of them could keep alone; infinite: there is none."""
        for tpot_s in sorted(self._by_tpot):
            if any(tpot_s >= cost.exec_of(0, 1, computed + 1) for computed in self._by_tpot[tpot_s].values()):
                return tpot_s
        return NO_DEADLINE_S
