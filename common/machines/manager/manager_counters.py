"""Counters of the manager's machine, and their names as metrics."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class ManagerCounters:
    """`refused`: by cause, as in `Refused`. `demoted`: placed as best-effort, as their TTFT could not be kept."""

    submitted: int = 0
    dispatched: int = 0
    finished: int = 0
    attempts_lost: int = 0
    refused: dict[str, int] = field(default_factory=dict)
    demoted: int = 0
    workers_lost: int = 0
    takeovers: int = 0
    """Times that it began to lead in place of another manager."""
    misnamed: int = 0
    """Messages dropped because another peer than their sender would have to say them."""

    def metrics(self) -> dict[str, float]:
        return {
            "dispatched_total": float(self.dispatched),
            "finished_total": float(self.finished),
            "attempts_lost_total": float(self.attempts_lost),
            "refused_total": float(sum(self.refused.values())),
            **{f"refused_{cause}_total": float(count) for cause, count in sorted(self.refused.items())},
            "demoted_total": float(self.demoted),
            "workers_lost_total": float(self.workers_lost),
            "takeovers_total": float(self.takeovers),
            "misnamed_total": float(self.misnamed),
        }
