"""What a prompt token takes on a worker while prompts wait: time of iterations over prompt tokens computed in them.

Decode rows, weights and iterations that lacked blocks for the next prompt are in it, so that it says when the prompts
in front will be done, whatever they wait for. Kept by the worker's scheduler, which tells it of the iterations behind
which a prompt waited and of no others.
"""

from __future__ import annotations

from cohort.common.policies.interface import Ran

_KEPT = 0.9
"""What an iteration counts for after the next one."""


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
