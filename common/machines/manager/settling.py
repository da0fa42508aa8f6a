"""What a manager that has begun to lead waits for: its workers to register, and to say what they hold.

    begins ── listens ──▶ places ─────────────────▶ settled: what no worker holds is lost
             until every worker that a gateway     `settle_s` later, or once all have spoken
             named is there, `LISTEN_S` at most     but those that died meanwhile

Called by `ManagerMachine`, which begins anew where it takes over. Remembers what gateways said meanwhile, and who died
of late; sends nothing.
"""

from __future__ import annotations

from collections.abc import Collection

from cohort.common.machines.manager.roster import Roster
from cohort.common.types import Attempt, InstanceId

LISTEN_S = 0.5
"""The longest a new manager waits with placements for workers to register; they try several times a second."""


class Settling:
    def __init__(self, roster: Roster, settle_s: float, now_s: float) -> None:
        self._roster = roster
        self._settle_s = settle_s
        self._gone: set[InstanceId] = set()
        """Workers that were lost and have not come back."""
        self.begin(now_s)

    def begin(self, now_s: float) -> None:
        """With the workers that are expected now."""
        self.listened_at_s = now_s + min(LISTEN_S, self._settle_s)
        self._settled_at_s = now_s + self._settle_s
        self._one_died = not self._gone.isdisjoint(self._roster.expected)
        self._roster.expected -= self._gone
        self._named: dict[InstanceId, list[Attempt]] = {}

    def died(self, now_s: float, worker: InstanceId) -> None:
        """A node takes it along with the manager before this one, or it ended since."""
        self._gone.add(worker)
        if worker in self._roster.expected and now_s < self._settled_at_s:
            self._roster.expected.discard(worker)
            self._one_died = True

    def came(self, worker: InstanceId) -> None:
        """It has registered."""
        self._gone.discard(worker)

    def has_listened(self, now_s: float) -> bool:
        """A worker that registers a moment later must not find all the work with the first one."""
        return now_s >= self.listened_at_s or (bool(self._roster.expected) and self._all_are_there())

    def has_settled(self, now_s: float) -> bool:
        if self._one_died and self._all_are_there():
            self._settled_at_s = min(self._settled_at_s, now_s)
        return now_s >= self._settled_at_s

    def named(self, gateway: InstanceId, attempts: Collection[Attempt]) -> None:
        """A gateway waits for these, and it is not settled yet; its word before this one is void."""
        self._named[gateway] = list(attempts)

    def take_named(self, now_s: float) -> dict[InstanceId, list[Attempt]]:
        """What gateways named meanwhile; once, when it is settled."""
        if not self._named or not self.has_settled(now_s):
            return {}
        named, self._named = self._named, {}
        return named

    def forget(self) -> None:
        """Another manager leads."""
        self._named.clear()

    def _all_are_there(self) -> bool:
        return self._roster.expected <= self._roster.workers.keys()
