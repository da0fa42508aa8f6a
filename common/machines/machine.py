"""The verb that the three machines have in common.

    GatewayMachine   every request of one gateway, from its arrival to its last token
    ManagerMachine   which attempt runs where; the waiting requests
    WorkerMachine    what one worker holds, computes and transfers

A machine takes what happened, as events, and returns what is to be done, as effects. It knows no clock, socket or
tensor: time is an argument, chance is a seeded generator. A *host* performs the effects: a live service on real sockets
and a real engine, or the virtual cluster under virtual time. Because events and effects are data, any run of any
machine can be recorded and stepped through again (`recorder.py`, `replayer.py`).
"""

from __future__ import annotations

from typing import Protocol, TypeVar

Event = TypeVar("Event", contravariant=True)
Effect = TypeVar("Effect")


def own_stall_s(now_s: float, last_s: float, wake_s: float | None, usual_s: float) -> float:
    """Return for how long a host that was to call at `wake_s`, and called last at `last_s`, did not run: stopped, or
    without a core. 0.0 up to the `usual_s` of a busy one. A machine that measures its peers' silence leaves this time
    out, as it reads what they sent meanwhile only now."""
    late_s = 0.0 if wake_s is None else now_s - max(last_s, wake_s)
    return late_s if late_s > usual_s else 0.0


class Machine(Protocol[Event, Effect]):
    def handle(self, now_s: float, *events: Event) -> list[Effect]:
        """Take these events, which happened in this order by `now_s` (seconds of the host's clock, never less than
        before). Return what the host must do, in order. Events that arrived together are fed together: a decision that
        several of them require is made once, after the last."""

    def check(self) -> None:
        """Raise `InvariantViolated` if anything is held by no request, or twice."""
