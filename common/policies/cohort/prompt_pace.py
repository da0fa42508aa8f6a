"""What a prompt token takes on a worker while prompts wait: time of iterations over prompt tokens computed in them.

Decode rows, weights and iterations that lacked blocks for the next prompt are in it, so that it says when the prompts
in front will be done, whatever they wait for. Kept by the worker's scheduler, which tells it of the iterations behind
which a prompt waited and of no others.
"""

from __future__ import annotations

from cohort.common.policies.interface import Ran

_KEPT = 0.9
"""What an iteration counts for after the next one."""
_ROW_KEPT = 0.98
"""The same for rows: in most iterations none comes free."""
_KNOWN_ROWS = 5
"""So many are seen before their pace is known."""


class PromptPace:
    def __init__(self) -> None:
        self._seconds = self._tokens = 0.0

    def ran(self, ran: Ran) -> None:
        self._seconds = _KEPT * self._seconds + ran.latency_s
        self._tokens = _KEPT * self._tokens + sum(row.count for row in ran.plan.rows if row.count > 1)

    @property
    def token_s(self) -> float:
        """0 = not known yet."""
        return self._seconds / max(1.0, self._tokens)


class RowPace:
    """The time between two rows that come free, of iterations in which a prompt waited for one."""

    def __init__(self) -> None:
        self._seconds = self._rows = 0.0

    def ran(self, seconds: float, ended: int) -> None:
        """`ended`: sequences that gave their row back."""
        self._seconds = _ROW_KEPT * self._seconds + seconds
        self._rows = _ROW_KEPT * self._rows + ended

    @property
    def row_s(self) -> float:
        """0 = not known yet."""
        return self._seconds / self._rows if self._rows >= _KNOWN_ROWS else 0.0
