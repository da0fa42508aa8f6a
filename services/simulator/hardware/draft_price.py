"""What a draft model takes of an iteration in simulated time: its own steps, by a cost model of its own or as measured.

Asked by the engine with the drafts of each row. Like the live one it computes all rows at once, one step for each draft
of the deepest row, behind what it lacks of a row's tokens (`common/engine/drafts/batch_drafts.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import NamedTuple

from cohort.common.policies.cost_model import CostModel, StepWork, prefill_pairs
from cohort.common.sequence import Sequence

_REMEMBERED = 512
"""Number of sequences beyond which those that have ended are forgotten."""
_FILLED_AT_ONCE, _SHORT = 512, 16
"""Tokens of a chunk, and how many are no chunk yet, as in `common/engine/drafts/batch_drafts.py`, which needs torch."""


Holds = Callable[[Sequence], bool]


class DraftingTime(NamedTuple):
    """`drafts_s`: what the worker's policy is told; `filling_s`: before it, for what was lacking."""

    drafts_s: float = 0.0
    filling_s: float = 0.0


class MeasuredPrice:
    """Fixed time for one draft of each row, however many rows there are."""

    def __init__(self, draft_s: float) -> None:
        self._draft_s = draft_s

    def take(self, drafted: Seq[tuple[Sequence, int]]) -> DraftingTime:
        """Return the time of one iteration; `drafted`: its rows with their number of drafts."""
        return DraftingTime(max([drafts for _, drafts in drafted], default=0) * self._draft_s)


class ModelledPrice:
    """Time of one worker's drafts, by the draft model's shape. Remembers what was computed of each sequence."""

    def __init__(self, cost: CostModel, holds: Holds) -> None:
        """`holds`: whether the worker still holds a sequence; the positions of others are forgotten."""
        self._cost, self._holds = cost, holds
        self._computed: dict[Sequence, int] = {}

    def take(self, drafted: Seq[tuple[Sequence, int]]) -> DraftingTime:
        if len(self._computed) > _REMEMBERED:
            self._computed = {each: known for each, known in self._computed.items() if self._holds(each)}
        filling_s, drafts_s, before = 0.0, 0.0, self._computed
        ends: list[tuple[int, int]] = []
        """Number of drafts and position of the first, by row."""
        for sequence, drafts in drafted:
            known = len(sequence.tokens)
            computed = min(before.get(sequence, 0), known - 1)
            while known - computed > _SHORT:
                count = min(_FILLED_AT_ONCE, known - computed - 1)
                filling_s += self._cost.step_s(StepWork(count, 1, 0, prefill_pairs(computed, count), computed + count))
                computed += count
            before[sequence] = known
            ends.append((drafts, known))
        for number in range(max([drafts for drafts, _ in ends], default=0)):
            contexts = [known + number for drafts, known in ends if drafts > number]
            rows = len(contexts)
            drafts_s += self._cost.step_s(StepWork(rows, rows, rows, 0, 0, rows, sum(contexts), max(contexts)))
        return DraftingTime(drafts_s, filling_s)


DraftPrice = MeasuredPrice | ModelledPrice
