"""Which of several managers leads, as each of them sees it: epochs instead of a lease.

    stands by ──a gateway finds no leader and asks──▶ leads, with an epoch above all it heard of
        ▲                                                │
        └──────────── hears of a higher epoch ───────────┘

Every leadership has an epoch of its own. Gateways and workers follow the highest they heard of and tell it with every
greeting, registration and report; a worker takes no command of a lower one. So a leader that was stopped or cut off
does no harm, and learns from the first peer that it hears again that it was replaced (ADR 13).

A manager without others leads from its start, with epoch 0. One that has begun to lead first listens (`Settling`).
Called by `ManagerMachine`; sends nothing.
"""

from __future__ import annotations

from collections.abc import Collection

from cohort.common.machines.manager.roster import Roster
from cohort.common.types import Attempt, InstanceId

MOST_MANAGERS = 8
"""Of one pipeline. An epoch modulo this number is the rank of the manager that leads with it: no two have the same."""
_REST_S = 2.0
"""A manager that was replaced does not lead again so soon: gateways that reach different managers only would have the
leadership go to and fro with every silence."""
LISTEN_S = 0.5
"""The longest a new manager waits with placements for workers to register; they try several times a second."""


class Leadership:
    def __init__(self, incarnation: int, rank: int, managers: int) -> None:
        """`rank`: this manager's place in the configured order, from 0, of `managers`."""
        self._incarnation = incarnation
        self._rank = rank
        self._alone = managers == 1
        self._rests_until_s = float("-inf")
        self.leads = self._alone
        self.epoch = 0
        """Its own while it leads, else the highest it heard of."""

    def outranked(self, now_s: float, epoch: int, *, asked: bool = False) -> bool:
        """A peer has heard of this epoch. True: this manager led until now, and another one replaced it. `asked`: it is
        told so by a gateway that wants it to lead again."""
        if epoch <= self.epoch:
            return False
        self.epoch = epoch
        if self._alone:  # of a configuration with others, which are gone
            self.epoch = self._next()
            return False
        assert not self._alone
        led, self.leads = self.leads, False
        if led and not asked:
            self._rests_until_s = now_s + _REST_S
        return led

    def take(self, now_s: float) -> bool:
        """Lead from now on, as a gateway asked for. False: it does already, or rests."""
        if self.leads or now_s < self._rests_until_s:
            return False
        before, self.leads, self.epoch = self.epoch, True, self._next()
        assert self.epoch > before and self.epoch % MOST_MANAGERS == self._rank, f"epoch {self.epoch} after {before}"
        return True

    def _next(self) -> int:
        """Above all that were heard of. Incarnations grow over restarts: also above a predecessor's of this name, which
        a manager that was just started may not have heard of."""
        term = max(self.epoch // MOST_MANAGERS + 1, self._incarnation)
        return term * MOST_MANAGERS + self._rank


class Settling:
    """What a manager that has begun to lead waits for: its workers to register, and to say what they hold.

        begins ── listens ──▶ places ─────────────────▶ settled: what no worker holds is lost
                 until every worker that a gateway     `settle_s` later, or once all have spoken
                 named is there, `LISTEN_S` at most     but those that died meanwhile

    Begun anew where the manager takes over. Remembers what gateways said meanwhile, and who died of late.
    """

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
        self._named.clear()

    def _all_are_there(self) -> bool:
        return self._roster.expected <= self._roster.workers.keys()
