"""Record of a placed request: what the placement knows of it and no report has."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from cohort.common.types import Attempt


@dataclass(slots=True)
class RequestRecord:
    """Record of a placed request. `cached`: prompt tokens expected in its worker's cache, until that says. `tpot_s`:
    promised to its decode row, 0 = nothing. `variance`: of its predicted length."""

    attempt: Attempt
    best_effort: bool
    priority: int
    arrived_s: float
    due_s: float
    tpot_s: float
    tokens: int
    cached: int
    variance: float
    placed_at_s: float
    predicted_s: float | None = None
    """TTFT to be compared with the real one; None if it was, or cannot be."""
    sent_to: tuple[str, ...] = ()
    """Workers that were given a part of it."""

    def demote(self) -> None:
        """Make the request best-effort, without SLO."""
        self.best_effort, self.due_s, self.tpot_s = True, inf, 0.0
