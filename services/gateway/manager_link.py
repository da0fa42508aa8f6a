"""The gateway's side of its conversation with the bucketing manager: greeting, liveness, readiness.

    lost ──GatewayHello every second──▶ ManagerHello ──▶ known ──silence──▶ lost
                                            │ new incarnation: it knows nothing, so all that is outstanding is named

Decides when to greet, when the manager counts as lost and what `/ready` says. Called by `service.py` with every message
of the manager and once a second. Never touches requests: the ledger does.
"""

from __future__ import annotations

from cohort.common.messages import ClusterLoad, GatewayHello, ManagerHello


class ManagerLink:
    def __init__(self, hello: GatewayHello, *, silence_s: float) -> None:
        self._hello = hello
        self._silence_s = silence_s
        self._incarnation: int | None = None
        self._heard_s = float("-inf")
        self.load: ClusterLoad | None = None

    def greeting(self, now_s: float) -> GatewayHello | None:
        """What to say now: a greeting while the manager is not known to be there."""
        return None if self.known(now_s) else self._hello

    def known(self, now_s: float) -> bool:
        return self._incarnation is not None and now_s - self._heard_s < self._silence_s

    def heard(self, now_s: float) -> None:
        """Any message of the manager shows that it lives."""
        self._heard_s = now_s

    def on_hello(self, now_s: float, message: ManagerHello) -> bool:
        """True when this manager does not know us: a new incarnation, or the first one."""
        self.heard(now_s)
        changed = message.incarnation != self._incarnation
        if changed:
            self._incarnation = message.incarnation
            self.load = None  # the predecessor's view
        return changed

    def on_load(self, now_s: float, message: ClusterLoad) -> None:
        self.heard(now_s)
        self.load = message

    def not_ready_because(self, now_s: float) -> str | None:
        """Why no request could be served now; None when one could."""
        if self._incarnation is None:
            return "the bucketing manager has not answered yet"
        if not self.known(now_s):
            return f"the bucketing manager has been silent for {now_s - self._heard_s:.1f} s"
        if self.load is None:
            return "the bucketing manager has not reported its workers yet"
        if not self.load.ready:
            return "no worker could take a request now"
        return None
