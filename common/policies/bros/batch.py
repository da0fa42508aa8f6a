"""The iteration that the packing of BROS forms (R4): rows so far, their load, what may not be dropped; and how many
requests it may have (R6).

Filled by `slack_packing.py`, read by `drops.py`; decides nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from cohort.common.policies.bros.iteration_cost import BatchLoad
from cohort.common.policies.interface import IterationPlan
from cohort.common.sequence import Phase, Row, Sequence
from cohort.common.types import Attempt

NO_DEADLINE_S = float("inf")


class DecodeRows(NamedTuple):
    """All real-time decode rows: number, context, the seconds of an iteration of them, and the strictest TPOT target
    that one of them could keep alone (infinite: there is none)."""

    rows: int
    context: int
    least_s: float
    tpot_s: float


def is_decode(sequence: Sequence) -> bool:
    return sequence.phase is Phase.RUNNING and sequence.uncomputed == 1


@dataclass(slots=True)
class Batch:
    """Rows within `most_rows` and `tokens_left`. `limit_s`: seconds from now by which it must end (t_min)."""

    most_rows: int
    tokens_left: int
    plan: IterationPlan = field(default_factory=IterationPlan)
    rows: dict[Attempt, Row] = field(default_factory=dict)
    prefill_tokens: int = 0
    decode_rows: int = 0
    context: int = 0
    slots: int = 0
    limit_s: float = NO_DEADLINE_S
    safe: set[Attempt] = field(default_factory=set)
    """Attempts in the batch or being restored, which may not be dropped now."""
    guaranteed: list[Sequence] = field(default_factory=list)
    """Best-effort requests whose share of the cache is protected."""
    reserved: int = 0
    """Blocks that `guaranteed` still needs."""
    chosen: list[tuple[float, Sequence]] = field(default_factory=list)
    """Real-time requests with their residual time, most urgent first; the last ones may make way."""
    dropped: int = 0
    late: int = 0
    """Rows of requests that cannot be on time any more."""

    @property
    def full(self) -> bool:
        return len(self.rows) >= self.most_rows or self.tokens_left <= 0

    @property
    def load(self) -> BatchLoad:
        return BatchLoad(self.prefill_tokens, self.decode_rows, self.context)

    def add(self, sequence: Sequence, count: int) -> None:
        key, first = sequence.key, sequence.computed
        self.rows[key] = Row(sequence, first, count)
        self.safe.add(key)
        self.tokens_left -= count
        if count == 1:
            self.decode_rows += 1
            self.context += first + 1
        else:
            self.prefill_tokens += count
            self.context += first

    def take_away(self, sequence: Sequence) -> None:
        row = self.rows.pop(sequence.key)
        self.tokens_left += row.count
        if row.count == 1:
            self.decode_rows -= 1
            self.context -= row.start + 1
        else:
            self.prefill_tokens -= row.count
            self.context -= row.start


class AdaptiveBatchSize:
    """R6 · Requests that an iteration may have, found as TCP finds its window: starts at `first`, grows by `step` after
    every iteration that no real-time deadline cut short, up to `most`, and returns to `first` when one did."""

    def __init__(self, *, first: int, step: int, most: int) -> None:
        self._first = min(first, most)
        self._step = step
        self._most = most
        self.value = self._first
        self.backoffs = 0

    def repeated(self, iterations: int) -> None:
        """Grow for `iterations` that ran without a decision: none left a request out."""
        self.value = min(self._most, self.value + iterations * self._step)

    def decided(self, *, cut_short: bool) -> None:
        """Update after a decision; `cut_short`: a deadline left a request out."""
        if cut_short:
            self.value = self._first
            self.backoffs += 1
        else:
            self.value = min(self._most, self.value + self._step)
