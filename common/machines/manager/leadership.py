"""Leadership among several managers, as each of them sees it: epochs instead of a lease.

    stands by ──a gateway finds no leader and asks──▶ leads, with an epoch above all it has received
        ▲                                                │
        └──────────── receives a higher epoch ───────────┘

Every leadership has an epoch of its own. Gateways and workers follow the highest they have received and send it with
every greeting, registration and report; a worker takes no command of a lower one. So a leader that was stopped or cut
off does no harm, and learns from the first peer that reaches it that it was replaced (ADR 13).

A manager without others leads from its start, with epoch 0. One that has begun to lead first listens (`StartupWait`).
Called by `ManagerMachine`; sends nothing.
"""

from __future__ import annotations

from collections.abc import Collection

from cohort.common.machines.manager.roster import Roster
from cohort.common.types import Attempt, InstanceId

MOST_MANAGERS = 8
"""Maximum number of managers. An epoch modulo it is its leader's rank: no two managers have the same."""
_COOLDOWN_S = 2.0
"""Cooldown of a manager that was replaced, lest gateways that reach different ones move the leadership to and fro."""
LISTEN_S = 0.5
"""Maximum time that a new manager holds placements back for workers to register; they try several times a second."""


_ABSENT_S = 1.0
"""Time after which a named worker that has not registered counts as dead, if another one has: each tries several times
a second."""


class Leadership:
    def __init__(self, incarnation: int, rank: int, managers: int) -> None:
        """`rank`: this manager's place in the configured order of `managers`, from 0."""
        self._incarnation = incarnation
        self._rank = rank
        self._is_only_manager = managers == 1
        self._cooldown_until_s = float("-inf")
        self.leads = self._is_only_manager
        self.epoch = 0
        """Own epoch while this manager leads, else the highest it has received."""

    def outranked(self, now_s: float, epoch: int, *, requested: bool = False) -> bool:
        """Record a peer's epoch. Return whether this manager led until now, and another one replaced it. `requested`:
        the epoch comes from a gateway that wants it to lead again."""
        if epoch <= self.epoch:
            return False
        self.epoch = epoch
        if self._is_only_manager:  # of a configuration with others, which are gone
            self.epoch = self._next()
            return False
        assert not self._is_only_manager
        led, self.leads = self.leads, False
        if led and not requested:
            self._cooldown_until_s = now_s + _COOLDOWN_S
        return led

    def take(self, now_s: float) -> bool:
        """Lead from now on, as a gateway requested. Return False if it does already, or is in its cooldown."""
        if self.leads or now_s < self._cooldown_until_s:
            return False
        before, self.leads, self.epoch = self.epoch, True, self._next()
        assert self.epoch > before and self.epoch % MOST_MANAGERS == self._rank, f"epoch {self.epoch} after {before}"
        return True

    def _next(self) -> int:
        """Return an epoch above all received ones. Incarnations grow over restarts, so it is also above that of a
        predecessor of this name, which a manager that was just started may not know."""
        term = max(self.epoch // MOST_MANAGERS + 1, self._incarnation)
        return term * MOST_MANAGERS + self._rank


class StartupWait:
    """Wait of a manager that has begun to lead: for its workers to register, and to report what they hold.

        begins ── listens ──▶ places ─────────────────▶ settled: what no worker holds is lost
                 until every worker that a gateway     `settle_s` later, or once all have reported
                 named is there, `LISTEN_S` at most     but those that died meanwhile or are absent

    Started anew when the manager takes over. Stores what gateways named meanwhile, and which workers were lost.
    """

    def __init__(self, roster: Roster, settle_s: float, now_s: float) -> None:
        self._roster = roster
        self._settle_s = settle_s
        self._lost_workers: set[InstanceId] = set()
        """Workers that were lost and have not come back."""
        self.begin(now_s)

    def begin(self, now_s: float) -> None:
        """Start to wait for the workers that are expected now."""
        self.listened_at_s = now_s + min(LISTEN_S, self._settle_s)
        self._settled_at_s = now_s + self._settle_s
        self._absent_at_s = now_s + min(_ABSENT_S, self._settle_s)
        self._any_lost = not self._lost_workers.isdisjoint(self._roster.expected_workers)
        self._roster.expected_workers -= self._lost_workers
        self._named: dict[InstanceId, list[Attempt]] = {}

    def on_worker_lost(self, now_s: float, worker: InstanceId) -> None:
        """Record a lost worker: a node may take it along with the former manager."""
        self._lost_workers.add(worker)
        if worker in self._roster.expected_workers and now_s < self._settled_at_s:
            self._roster.expected_workers.discard(worker)
            self._any_lost = True

    def on_registered(self, worker: InstanceId) -> None:
        self._lost_workers.discard(worker)

    def has_listened(self, now_s: float) -> bool:
        """Return whether placements may begin: a worker that registers later must not find all work at the first."""
        return now_s >= self.listened_at_s or (bool(self._roster.expected_workers) and self._all_registered())

    def has_settled(self, now_s: float) -> bool:
        expected = self._roster.expected_workers
        absent = expected - self._roster.workers.keys()
        if self._absent_at_s <= now_s < self._settled_at_s and 0 < len(absent) < len(expected):
            self._any_lost = True
            expected -= absent
        if self._any_lost and self._all_registered():
            self._settled_at_s = min(self._settled_at_s, now_s)
        return now_s >= self._settled_at_s

    def named(self, gateway: InstanceId, attempts: Collection[Attempt]) -> None:
        """Store what a gateway waits for until the wait is over, in place of what it named before."""
        self._named[gateway] = list(attempts)

    def take_named(self, now_s: float) -> dict[InstanceId, list[Attempt]]:
        """Return what gateways have named, once, when the wait is over."""
        if not self._named or not self.has_settled(now_s):
            return {}
        named, self._named = self._named, {}
        return named

    def forget(self) -> None:
        self._named.clear()

    def _all_registered(self) -> bool:
        return self._roster.expected_workers <= self._roster.workers.keys()
