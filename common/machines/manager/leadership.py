"""Which of several managers leads, as each of them sees it: epochs instead of a lease.

    stands by ──a gateway finds no leader and asks──▶ leads, with an epoch above all it heard of
        ▲                                                │
        └──────────── hears of a higher epoch ───────────┘

Every leadership has an epoch of its own. Gateways and workers follow the highest they heard of and tell it with every
greeting, registration and report; a worker takes no command of a lower one. So a leader that was stopped or cut off
does no harm, and learns from the first peer that it hears again that it was replaced (ADR 13).

A manager without others leads from its start, with epoch 0. Called by `ManagerMachine`; sends nothing.
"""

from __future__ import annotations

MOST_MANAGERS = 8
"""Of one pipeline. An epoch modulo this number is the rank of the manager that leads with it: no two have the same."""
_REST_S = 2.0
"""A manager that was replaced does not lead again so soon: gateways that reach different managers only would have the
leadership go to and fro with every silence."""


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
