"""Byte streams between rank 0 of a worker and its ranks on other hosts: one CURVE connection for each of these ranks.

    rank 0's process                                          a process on another host
    socket pair ═ thread ═ ROUTER ◀══ CURVE over TCP ══ DEALER ═ thread ═ socket pair
                            │  ◀── join ──  │
                            │  ── "" or why not ──▶

Each end's code reads and writes plain sockets, as it does with a rank of the same machine; a thread moves the bytes. A
connection counts only once `admit` has accepted its first message, and without the cluster's key none gets so far. The
end of a connection is the end of its streams, both ways, and is reported at once; a host that vanishes is noticed by
heartbeats after `SILENCE_MS`. Nothing is dialled again: a rank that was away has missed what the others did.

Used by `rank_hosts` (engine). Decides nothing: who is admitted is its caller's business.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from cohort.common.errors import CohortError, ConfigError
from cohort.common.transport.security import Authenticator, CurveKeys, protect_client, protect_server

STREAMS = 3
Streams = tuple[socket.socket, socket.socket, socket.socket]
PING_MS = 1000
SILENCE_MS = 5000
"""Longest silence of a peer to heartbeats, which libzmq's own thread answers, however busy the process."""
REFUSED_HANDSHAKES = 3
"""Number of failed handshakes that means different keys; a single one may be a rank 0 that is just ending."""
LINGER_MS = 1000
_CHUNK = 1 << 20
_BUFFER = 4 << 20
_JOIN = b"join"
_STREAM_NAMES = tuple(b"%d" % index for index in range(STREAMS))
_ENDED = zmq.EVENT_DISCONNECTED
_HANDSHAKE_FAILED = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
_UNSHAKEN = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | _HANDSHAKE_FAILED


class WireLost(CohortError):
    """The connection has ended, or never was."""


@dataclass
class _Peer:
    """A rank as the listener knows it. `inner`: the thread's ends of its streams; `identity` once it has joined."""

    inner: Streams
    identity: bytes = b""
    connection: int = -1
    lost: str = ""
    open: set[int] = field(default_factory=lambda: set(range(STREAMS)))


class WireListener:
    """Rank 0's end. `admit` gets a process's first message and returns its rank, or raises `ConfigError`, whose text is
    the answer. It and `lost` (rank, reason) are called on the listener's thread."""

    def __init__(
        self, bind: str, keys: CurveKeys | None, ranks: Sequence[int], admit: Callable[[bytes], int], *, join_s: float
    ) -> None:
        """Listen for `ranks`, which have `join_s` to join. Raises `ConfigError` where nothing can listen there."""
        self.lost: Callable[[int, str], None] = lambda rank, reason: None
        self.refused = ""
        """Reason why the last refused process was refused."""
        pairs = {rank: _pairs() for rank in ranks}
        self.streams = {rank: ours for rank, (ours, _) in pairs.items()}
        """Sockets to each rank, usable from now on: what is written before it has joined waits for it."""
        self._peers = {rank: _Peer(theirs) for rank, (_, theirs) in pairs.items()}
        self._admit = admit
        self._join_s, self._deadline_s = join_s, time.monotonic() + join_s
        self._context: zmq.Context[Any] = zmq.Context()
        self._authenticator = Authenticator(self._context, keys) if keys is not None else None
        self._router = self._context.socket(zmq.ROUTER)
        _prepare(self._router)
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        if keys is not None:
            protect_server(self._router, keys)
        try:
            self._router.bind(bind)
        except zmq.ZMQError as error:
            self._free()
            raise ConfigError(f"endpoints.ranks: {bind}: nothing can listen there: {error}") from error
        self.endpoint = self._router.getsockopt_string(zmq.LAST_ENDPOINT)
        self._monitor = self._router.get_monitor_socket(_ENDED | _UNSHAKEN)
        self._wake, self._woken = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="ranks-elsewhere", daemon=True)
        self._thread.start()

    def why_lost(self, rank: int) -> str:
        """Return why a rank's connection ended; "" while it is connected or awaited."""
        return self._peers[rank].lost if rank in self._peers else ""

    def wait_disconnected(self, timeout_s: float) -> None:
        """Wait until every rank's connection has ended."""
        deadline_s = time.monotonic() + timeout_s
        while any(peer.identity and not peer.lost for peer in self._peers.values()) and time.monotonic() < deadline_s:
            self._thread.join(0.02)

    def close(self) -> None:
        """Close all connections. What was written before is sent, if the peer takes it within `LINGER_MS`."""
        with contextlib.suppress(OSError):
            self._wake.send(b".")
        self._thread.join()
        for each in (self._wake, self._woken):
            each.close()
        for rank, peer in self._peers.items():
            for stream in (*self.streams[rank], *peer.inner):
                stream.close()

    def _run(self) -> None:
        try:
            while self._turn():
                pass
        finally:
            self._monitor.close(linger=0)
            self._free()

    def _free(self) -> None:
        self._router.close(linger=LINGER_MS)
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.term()

    def _turn(self) -> bool:
        poller = zmq.Poller()
        for source in (self._router, self._monitor, self._woken):
            poller.register(source, zmq.POLLIN)
        joined = {rank: peer for rank, peer in self._peers.items() if peer.identity and not peer.lost}
        sources = {}
        for rank, peer in joined.items():
            for index in peer.open:
                poller.register(peer.inner[index], zmq.POLLIN)
                sources[peer.inner[index].fileno()] = (rank, index)
        awaited = [peer for peer in self._peers.values() if not peer.identity and not peer.lost]
        remaining_s = max(0.0, self._deadline_s - time.monotonic()) if awaited else 60.0
        ready = dict(poller.poll(int(1000 * remaining_s) + 1))
        for descriptor, (rank, index) in sources.items():
            if descriptor in ready:
                self._send_on(rank, index)
        self._on_disconnects()
        for _ in range(64):
            try:
                frames = self._router.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                break
            self._on_frames(frames)
        if awaited and time.monotonic() >= self._deadline_s:
            for rank, peer in self._peers.items():
                if not peer.identity:
                    why = f"did not come to {self.endpoint} within {self._join_s:g} s"
                    self._lose(rank, why + (f"; the last that was turned away: {self.refused}" if self.refused else ""))
        return self._woken.fileno() not in ready

    def _send_on(self, rank: int, index: int) -> None:
        peer = self._peers[rank]
        data = _received(peer.inner[index])
        if not data:
            peer.open.discard(index)
            return
        try:
            self._router.send_multipart([peer.identity, _STREAM_NAMES[index], data])
        except zmq.ZMQError as error:
            self._lose(rank, f"its connection has ended: {error}")

    def _on_frames(self, frames: list[zmq.Frame]) -> None:
        identity, name = frames[0].bytes, frames[1].bytes if len(frames) == 3 else b""
        if name == _JOIN:
            self._on_disconnects()  # of who had this descriptor before
            self._join(identity, int(frames[2].get(zmq.SRCFD)), frames[2].bytes)
            return
        for peer in self._peers.values():
            if peer.identity == identity and not peer.lost and name in _STREAM_NAMES:
                _deliver(peer.inner[_STREAM_NAMES.index(name)], frames[2].buffer)

    def _join(self, identity: bytes, connection: int, payload: bytes) -> None:
        answer = b""
        try:
            rank = self._admit(payload)
            peer = self._peers.get(rank)
            if peer is None or peer.identity:
                raise ConfigError(f"rank {rank} is there already" if peer else f"no rank {rank} is awaited here")
            peer.identity, peer.connection = identity, connection
        except ConfigError as error:
            self.refused = str(error)
            answer = self.refused.encode()
        with contextlib.suppress(zmq.ZMQError):
            self._router.send_multipart([identity, _JOIN, answer])

    def _on_disconnects(self) -> None:
        while self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)
            if event["event"] != _ENDED:
                self.refused = self.refused or "its handshake failed: another key, or none"
                continue
            for rank, peer in self._peers.items():
                if peer.identity and peer.connection == event["value"]:
                    self._lose(rank, "its connection has ended")

    def _lose(self, rank: int, reason: str) -> None:
        peer = self._peers[rank]
        if peer.lost:
            return
        peer.lost = reason
        self.lost(rank, reason)  # before its streams end, as at the other end
        for stream in peer.inner:
            with contextlib.suppress(OSError):
                stream.shutdown(socket.SHUT_RDWR)


class WireDialer:
    """A rank's end, on another host. `streams` are its own ends."""

    def __init__(
        self, endpoint: str, keys: CurveKeys | None, join: bytes, *, join_s: float, lost: Callable[[str], None]
    ) -> None:
        """Connect, and return once rank 0 has accepted `join`. `lost` is called on a thread of its own. Raises
        `ConfigError` if rank 0 refuses or has another key, `WireLost` if it does not answer within `join_s`."""
        self._context: zmq.Context[Any] = zmq.Context()
        self._dealer = self._context.socket(zmq.DEALER)
        _prepare(self._dealer)
        self._dealer.setsockopt(zmq.RECONNECT_IVL, 200)
        if keys is not None:
            protect_client(self._dealer, keys)
        self._monitor = self._dealer.get_monitor_socket(_ENDED | _UNSHAKEN)
        try:
            self._request_join(endpoint, join, time.monotonic() + join_s, join_s)
        except BaseException:
            self._monitor.close(linger=0)
            self._context.destroy(linger=0)
            raise
        self.streams, self._inner = _pairs()
        self._lost = lost
        threading.Thread(target=self._run, name="rank-0-elsewhere", daemon=True).start()

    def _request_join(self, endpoint: str, join: bytes, deadline_s: float, join_s: float) -> None:
        try:
            self._dealer.connect(endpoint)
        except zmq.ZMQError as error:
            raise ConfigError(f"endpoints.ranks: {endpoint}: no such address: {error}") from error
        self._dealer.send_multipart([_JOIN, join])
        poller = zmq.Poller()
        poller.register(self._dealer, zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)
        failed = 0
        while failed < REFUSED_HANDSHAKES:
            remaining_s = deadline_s - time.monotonic()
            ready = dict(poller.poll(max(0, int(1000 * remaining_s))))
            if not ready:
                raise WireLost(f"no rank 0 answers at {endpoint} within {join_s:g} s")
            if self._monitor in ready:
                final = recv_monitor_message(self._monitor)["event"] & _HANDSHAKE_FAILED  # libzmq does not dial again
                failed = REFUSED_HANDSHAKES if final else failed + 1
            elif self._dealer in ready:
                _, answer = self._dealer.recv_multipart()
                if answer:
                    raise ConfigError(f"rank 0 at {endpoint} refuses this rank: {answer.decode(errors='replace')}")
                return
        raise ConfigError(
            f"{endpoint}: connections end before rank 0 has answered: security.curve_secret_key_file names "
            "another key there, or none, or it is no rank 0 that listens"
        )

    def _run(self) -> None:
        """Move bytes until the connection ends."""
        poller = zmq.Poller()
        poller.register(self._dealer, zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)
        numbers = {stream.fileno(): index for index, stream in enumerate(self._inner)}
        for stream in self._inner:
            poller.register(stream, zmq.POLLIN)
        ended = False
        while not ended:
            ready = dict(poller.poll())
            for descriptor, index in numbers.items():
                if descriptor in ready:
                    data = _received(self._inner[index])
                    if data:
                        self._dealer.send_multipart([_STREAM_NAMES[index], data])
                    else:
                        poller.unregister(self._inner[index])
            ended = self._monitor in ready
            while self._dealer.poll(0):  # also what came before the end
                name, message = self._dealer.recv_multipart(copy=False)
                if name.bytes in _STREAM_NAMES:
                    _deliver(self._inner[_STREAM_NAMES.index(name.bytes)], message.buffer)
        self._lost("the connection to rank 0 has ended")  # first: who reads a stream's end does not know why
        for stream in self._inner:
            with contextlib.suppress(OSError):
                stream.shutdown(socket.SHUT_RDWR)


def _prepare(each: zmq.Socket[Any]) -> None:
    for option, value in (
        (zmq.SNDHWM, 0),  # nothing may be dropped; both ends are asked for little before they answer
        (zmq.RCVHWM, 0),
        (zmq.MAXMSGSIZE, 2 * _CHUNK),
        (zmq.HEARTBEAT_IVL, PING_MS),
        (zmq.HEARTBEAT_TIMEOUT, SILENCE_MS),
        (zmq.HEARTBEAT_TTL, SILENCE_MS),
        (zmq.LINGER, LINGER_MS),
    ):
        each.setsockopt(option, value)


def _pairs() -> tuple[Streams, Streams]:
    """Make one socket pair for each stream. Return the first and the second ends."""
    first, second, third = (socket.socketpair() for _ in range(STREAMS))
    for pair in (first, second, third):
        for end in pair:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
    return (first[0], second[0], third[0]), (first[1], second[1], third[1])


def _received(stream: socket.socket) -> bytes:
    """Return what can be read now; b"" once the other end is closed."""
    try:
        return stream.recv(_CHUNK)
    except OSError:
        return b""


def _deliver(stream: socket.socket, data: Any) -> None:
    with contextlib.suppress(OSError):  # its reader has ended: so does the process
        stream.sendall(data)
