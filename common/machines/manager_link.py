"""The gateway's side of its conversation with the bucketing manager: greeting, liveness, readiness.

    lost ──GatewayHello, several a second──▶ ManagerHello ──▶ known ──a few loads overdue──▶ lost
                                                 │ new incarnation: its predecessor's queue is submitted anew and all
                                                 │ that runs is named

Decides when to greet, whether requests may be submitted, when the manager counts as silent and what `/ready` says.
Called by `gateway.py` with every message of the manager and on every tick. Never touches requests: the ledger does.
"""

from __future__ import annotations

import msgspec

from cohort.common.messages import ClusterLoad, GatewayHello, ManagerHello
from cohort.common.types import InstanceId

# Of manager.load_interval_s. Without a message for so many of them the manager is greeted anew, and new requests wait
# until it says something: a manager that was started again takes nothing from a gateway that has not greeted it.
OVERDUE_LOADS = 3
LEAST_OVERDUE_S = 0.5
GREETING_INTERVAL_S = 0.2
# For so many of them: the gateway counts as not ready.
MISSED_LOADS = 10
LEAST_SILENCE_S = 2.0


class ManagerLink:
    def __init__(self, hello: GatewayHello, *, load_interval_s: float) -> None:
        self._hello = hello
        self._overdue_s = max(LEAST_OVERDUE_S, OVERDUE_LOADS * load_interval_s)
        self._silence_s = max(LEAST_SILENCE_S, MISSED_LOADS * load_interval_s)
        self._incarnation: int | None = None
        self._heard_s = float("-inf")
        self._greeted_s = float("-inf")
        self.load: ClusterLoad | None = None
        self._workers: list[InstanceId] = []
        """As the last load of any incarnation named them: a new manager waits for their registrations."""

    def known(self, now_s: float) -> bool:
        """It has answered, and spoke not long ago."""
        return self._incarnation is not None and now_s - self._heard_s < self._overdue_s

    def due_s(self) -> float:
        """When there may be something to say: a greeting."""
        spoken_s = self._heard_s + self._overdue_s if self._incarnation is not None else float("-inf")
        return max(spoken_s, self._greeted_s + GREETING_INTERVAL_S)

    def greeting(self, now_s: float) -> GatewayHello | None:
        """The greeting that is due while the manager is not known to be there."""
        if now_s < self.due_s():
            return None
        return self.hello(now_s)

    def hello(self, now_s: float) -> GatewayHello:
        """A greeting, whether it is due or not."""
        self._greeted_s = now_s
        return msgspec.structs.replace(self._hello, workers=self._workers)

    def heard(self, now_s: float) -> None:
        """Any message of the manager shows that it lives."""
        self._heard_s = now_s

    def on_hello(self, message: ManagerHello) -> bool:
        """True when this manager does not know us: a new incarnation, or the first one."""
        changed = message.incarnation != self._incarnation
        if changed:
            self._incarnation = message.incarnation
            self.load = None  # the predecessor's view
        return changed

    def on_load(self, message: ClusterLoad) -> None:
        self.load = message
        self._workers = message.instances

    def not_ready_because(self, now_s: float) -> str | None:
        """Why no request could be served now; None when one could."""
        if self._incarnation is None:
            return "the bucketing manager has not answered yet"
        if now_s - self._heard_s >= self._silence_s:
            return f"the bucketing manager has been silent for {now_s - self._heard_s:.1f} s"
        if self.load is None:
            return "the bucketing manager has not reported its workers yet"
        if not self.load.ready:
            return "no worker could take a request now"
        return None
