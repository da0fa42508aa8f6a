"""Which peers that dialled this process are gone, within some fifty milliseconds of their death.

    peer dies ─▶ its kernel closes its sockets ─▶ DISCONNECTED at our inbox ──RETURN_S──▶ each caller is probed
    peer lives, connection broke ──────────────▶ DISCONNECTED ─▶ it dials again at once      │
                                                                  its route is back ◀── no ──┴── yes ─▶ lost

The kernel closes a process's sockets however it ends, so on one host, between containers and between hosts the end of
a connection is the first sign of a death. A peer that lives dials again, first after `zmq_bus.RECONNECT_MS`: only one
that is still away after `RETURN_S` counts as lost. A host that vanishes closes nothing: its peers are found by the
bus's own heartbeats, seconds later, and by the protocols' deadlines.

libzmq does not say whose connection ended. So each caller gets an empty message, which every bus skips: sending one to
a peer without a connection fails at once (ROUTER_MANDATORY). Connections end seldom.

Used by `zmq_bus`. Reports that a peer is gone, never why, and can be wrong (a peer that needs longer to come back):
what follows must be harmless for a peer that lives.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import zmq

from cohort.common.types import InstanceId

RETURN_S = 0.05
"""Time for a peer whose connection broke to dial again."""
_CHECK_DELAYS_S = (0.005, 0.02, 0.1, 1.0)
"""Delays of the probes after the end of a connection. libzmq reports the end first and drops the route next, in a
thread that may have to wait. One probe of each delay is pending at a time, however many strangers come and go."""

PROBE = b""


class ConnectionEnds:
    """Calls `ended` on the running event loop when connections of a socket have ended, once for all since the last
    call."""

    def __init__(self, socket: zmq.Socket[Any], loop: asyncio.AbstractEventLoop, ended: Callable[[], None]) -> None:
        self._socket, self._loop, self._ended = socket, loop, ended
        self._monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._fd: int = self._monitor.FD
        loop.add_reader(self._fd, self._read)
        self._read()

    def close(self) -> None:
        """Stop watching. Called before the socket is closed."""
        self._loop.remove_reader(self._fd)
        self._socket.disable_monitor()
        self._monitor.close(linger=0)

    def _read(self) -> None:
        ended = False
        with contextlib.suppress(zmq.Again):
            while True:  # the descriptor signals changes only
                self._monitor.recv_multipart(zmq.NOBLOCK)
                ended = True
        if ended:
            self._ended()


class LostPeers:
    """Watches an inbox (a ROUTER with ROUTER_MANDATORY) on the running event loop."""

    def __init__(
        self,
        inbox: zmq.Socket[Any],
        loop: asyncio.AbstractEventLoop,
        has_route: Callable[[InstanceId], bool],
        lost: Callable[[InstanceId], None],
    ) -> None:
        """`has_route` sends a peer a `PROBE`; False where it has no connection."""
        self._loop = loop
        self._has_route = has_route
        self._lost = lost
        self._callers: set[InstanceId] = set()
        self._checks: dict[float, asyncio.TimerHandle] = {}
        """Pending probes, by their delay."""
        self._judgements: dict[InstanceId, asyncio.TimerHandle] = {}
        """Timers of callers that have no connection and may still come back."""
        self._ends = ConnectionEnds(inbox, loop, self._connections_ended)

    def note_message(self, peer: InstanceId) -> None:
        """Record that a peer sent something to the inbox, so that it has a connection."""
        self._callers.add(peer)

    def close(self) -> None:
        """Stop watching. Called before the inbox is closed."""
        self._ends.close()
        for timer in (*self._checks.values(), *self._judgements.values()):
            timer.cancel()

    def _connections_ended(self) -> None:
        for delay_s in _CHECK_DELAYS_S:
            if delay_s not in self._checks:
                self._checks[delay_s] = self._loop.call_later(delay_s, self._check, delay_s)

    def _check(self, delay_s: float) -> None:
        del self._checks[delay_s]
        for peer in sorted(self._callers - self._judgements.keys()):
            if not self._has_route(peer):
                self._judgements[peer] = self._loop.call_later(RETURN_S, self._judge, peer)

    def _judge(self, peer: InstanceId) -> None:
        del self._judgements[peer]
        if not self._has_route(peer):
            self._callers.discard(peer)
            self._lost(peer)
