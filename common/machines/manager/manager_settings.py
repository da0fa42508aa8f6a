"""The parts of the configuration that the manager's machine needs."""

from __future__ import annotations

from dataclasses import dataclass

from cohort.common.config import Config

_SETTLE_S = 2.0
"""After a restart, until requests that no worker holds are rescheduled: workers and gateways report several times.
New requests are placed sooner."""
_MAX_WAITING_REQUESTS = 100_000
"""Of all gateways together. Each bounds what it lets in; this only keeps a mistake there from filling memory."""


@dataclass(frozen=True, slots=True)
class ManagerSettings:
    report_timeout_s: float
    settle_s: float
    load_interval_s: float
    max_waiting_requests: int
    rank: int = 0
    managers: int = 1
    """Its place in the order of all managers, and how many there are."""

    @classmethod
    def of(cls, config: Config, rank: int = 0, managers: int = 1) -> ManagerSettings:
        manager = config.manager
        return cls(manager.report_timeout_s, _SETTLE_S, manager.load_interval_s, _MAX_WAITING_REQUESTS, rank, managers)
