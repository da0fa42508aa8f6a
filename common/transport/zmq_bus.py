"""The control bus between processes: one ROUTER inbox, one DEALER per dialled peer, msgpack inside.

Called by `service.py`, which owns one bus per process. Tunes sockets, never takes over a live Unix socket, counts and
skips malformed messages. Never retries, reorders or inspects messages: repair belongs to the protocols above.

    peer ──DEALER──▶ ROUTER ┐                       ready ring: sockets that have something;
    peer ──DEALER──▶   "    ├─▶ ready ring ─▶ receive()   each gives `TURN_BYTES` per turn
    us   ──DEALER──▶ peer ──┘ (answers)

Messages wait inside libzmq until `receive` takes them; its high-water marks are the only queue. They count messages, so
the bound in bytes is this, for each peer:

    to it      HIGH_WATER_MESSAGES of less than LARGE_BYTES, and LARGE_QUEUE_BYTES of larger ones    384 MiB
    from it    what the peer's own bounds let out; at worst, from a member of the cluster that means harm,
               RECEIVED_MESSAGES of MAX_MESSAGE_BYTES, since libzmq offers no bound in bytes

A libzmq descriptor signals *changes* only; so a socket stays on the ring until it is empty, and is checked again after
every send (which may have swallowed the signal).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import socket as plain_socket
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog
import zmq

from cohort.common.codec import decode, encode
from cohort.common.errors import ConfigError, PeerUnreachable, WireError
from cohort.common.messages import Message
from cohort.common.transport.lost_peers import PROBE, ConnectionEnds, LostPeers
from cohort.common.transport.repeated_warning import RepeatedWarning
from cohort.common.transport.security import Authenticator, CurveKeys, protect_client, protect_server
from cohort.common.types import InstanceId

log = structlog.get_logger(__name__)

HIGH_WATER_MESSAGES = 8192  # to one peer; beyond it the peer counts as unreachable
LARGE_BYTES = 32 * 1024  # a prompt of some ten thousand tokens; from here on bytes are counted, not messages
LARGE_QUEUE_BYTES = 128 * 1024 * 1024  # of large messages to one peer; beyond it the peer counts as unreachable
# From one peer; then it is read no further, and its messages wait in its own queue. Not less: a process that is busy
# for longer than PING_TIMEOUT_MS with a full queue sees no pings either, and loses the connection.
RECEIVED_MESSAGES = 2048
MAX_MESSAGE_BYTES = 64 * 1024 * 1024  # prompts of millions of tokens fit; a peer that sends more loses the connection
LINGER_MS = 300  # last words to a connected peer need a few; one that is away is not waited for longer
# The first: well within `lost_peers.RETURN_S`, or a broken connection counts as a death. The second: the most that a
# peer's restart costs beyond its start.
RECONNECT_MS, RECONNECT_MAX_MS = 10, 200
PING_MS, PING_TIMEOUT_MS = 1000, 3000  # over TCP
YIELD_EVERY_MESSAGES = 32
TURN_BYTES = 4096
"""Bytes read from one socket before the next one's turn. Counted in messages it would be no fair share: a manager's
message about 400 requests would come between as many messages of a hundred tokens each."""

_IPC = "ipc://"
_TCP = "tcp://"


@dataclass(slots=True)
class BusCounters:
    """Counts of messages since a bus was opened; exported by `service.py`."""

    sent: int = 0
    received: int = 0
    malformed: int = 0
    unreachable: int = 0
    forged: int = 0
    """Messages skipped because their sender's name is that of a process that never dials this one."""


@dataclass(slots=True, eq=False)
class _Source:
    """Socket that is read. `peer` is None for the inbox, where each message names its sender."""

    socket: zmq.Socket[bytes]
    peer: InstanceId | None
    endpoint: str
    ends: ConnectionEnds | None = None
    """Watch over the connection to a peer, where its end is reported."""
    fd: int = field(init=False)
    on_ring: bool = False
    turn_bytes: int = 0
    """Bytes read in its present turn."""

    def __post_init__(self) -> None:
        self.fd = self.socket.FD


class ZmqBus:
    """See `bus.Bus`. Made and used on one running event loop. `bind` is where the inbox listens ("" = none).
    `advertise` is where others dial it, when that differs (a container that binds 0.0.0.0 and is known by name); port 0
    in either becomes the port the system chose. `never_dial`: names of peers that are dialled, if at all, and answer
    over that connection: in the inbox such a name is an impostor's."""

    def __init__(
        self,
        identity: InstanceId,
        bind: str = "",
        curve: CurveKeys | None = None,
        *,
        advertise: str = "",
        never_dial: Collection[InstanceId] = (),
    ) -> None:
        if not 0 < len(identity.encode()) < 256:
            raise ConfigError(f"instance name {identity!r} must have 1 to 255 bytes")
        self.identity = identity
        self.endpoint = ""
        self.counters = BusCounters()
        self._warn_malformed = RepeatedWarning(log, "malformed message skipped")
        self._warn_forged = RepeatedWarning(log, "message skipped: its sender never dials this process")
        self._curve = curve
        self._never_dial = frozenset(never_dial)
        self._large: dict[InstanceId, list[tuple[zmq.MessageTracker, int]]] = {}
        """Large messages that libzmq still holds, and their bytes, by peer."""
        self._loop = asyncio.get_running_loop()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.setsockopt(zmq.MAX_SOCKETS, 16384)
        self._authenticator: Authenticator | None = None
        self._ipc_lock: _IpcLock | None = None
        self._inbox: _Source | None = None
        self._lost_peers: LostPeers | None = None
        self._peers: dict[InstanceId, _Source] = {}
        self._watched: Collection[InstanceId] = ()
        self._on_end: Callable[[InstanceId], None] = lambda _: None
        self._ring: deque[_Source] = deque()
        self._readable = asyncio.Event()
        self._in_a_row = 0
        self._closed = False
        if bind:
            try:
                self._open_inbox(bind, advertise)
            except BaseException:
                self._closed = True
                self._end_context()
                raise

    def connect(self, peer: InstanceId, endpoint: str, *, high_water_messages: int = HIGH_WATER_MESSAGES) -> None:
        """See `Bus.connect`. A small `high_water_messages` suits news that is worthless when late."""
        known = self._peers.get(peer)
        if known is not None:
            if known.endpoint == endpoint:
                return
            self._drop(self._peers.pop(peer))
        socket = self._new_socket(zmq.DEALER, high_water_messages, endpoint)
        socket.setsockopt(zmq.IDENTITY, self.identity.encode())
        socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS)
        if self._curve is not None:
            protect_client(socket, self._curve)
        try:
            socket.connect(endpoint)
        except zmq.ZMQError as error:
            socket.close(linger=0)
            raise PeerUnreachable(f"{peer}: {endpoint!r} cannot be dialled: {error}") from error
        source = _Source(socket, peer, endpoint)
        self._peers[peer] = source
        self._watch(source)
        if peer in self._watched:
            source.ends = ConnectionEnds(socket, self._loop, lambda: self._on_end(peer))

    def redial(self, peer: InstanceId, endpoint: str) -> None:
        """Dial a peer that has moved to this endpoint. Does nothing if it was not dialled, or is known to be there."""
        known = self._peers.get(peer)
        if known is not None and known.endpoint != endpoint:
            log.info("peer has moved", peer=peer, endpoint=endpoint)
            try:
                self.connect(peer, endpoint, high_water_messages=int(known.socket.getsockopt(zmq.SNDHWM)))
                self._on_end(peer)
            except PeerUnreachable as error:
                log.error("moved peer cannot be dialled", peer=peer, error=str(error))

    def disconnect(self, peer: InstanceId) -> None:
        source = self._peers.pop(peer, None)
        if source is not None:
            self._drop(source)

    def watch(self, lost: Callable[[InstanceId], None]) -> None:
        if self._inbox is not None and self._lost_peers is None and not self._closed:
            self._lost_peers = LostPeers(self._inbox.socket, self._loop, self._has_route, lost)

    def watch_dialled(self, peers: Collection[InstanceId], ended: Callable[[InstanceId], None]) -> None:
        """Call `ended` whenever the connection to one of these peers ends, which are dialled from now on. libzmq dials
        again by itself."""
        self._watched, self._on_end = peers, ended

    def send(self, peer: InstanceId, message: Message) -> None:
        if self._closed:
            raise PeerUnreachable(f"{self.identity}: the bus is closed")
        source = self._peers.get(peer) or self._inbox
        if source is None:
            self.counters.unreachable += 1
            raise PeerUnreachable(f"{peer}: was not dialled, and this process has no inbox")
        data = encode(message)
        try:
            if len(data) >= LARGE_BYTES:
                self._send_large(source, peer, data)
            elif source.peer is not None:
                source.socket.send(data, zmq.NOBLOCK)
            else:
                source.socket.send_multipart((peer.encode(), data), zmq.NOBLOCK)
        except PeerUnreachable:
            self.counters.unreachable += 1
            raise
        except zmq.ZMQError as error:
            self.counters.unreachable += 1
            known: dict[int, str] = {zmq.EAGAIN: "its queue is full", zmq.EHOSTUNREACH: "is not connected"}
            raise PeerUnreachable(f"{peer}: {known.get(error.errno or 0, str(error))}") from error
        finally:
            self._poll_source(source)
        self.counters.sent += 1

    def _send_large(self, source: _Source, peer: InstanceId, data: bytes) -> None:
        """Send without a copy, so that libzmq reports when it has released the bytes. Raises `PeerUnreachable` if the
        peer's queue is full; one message always fits into an empty queue."""
        held = [(tracker, size) for tracker, size in self._large.get(peer, ()) if not tracker.done]
        self._large[peer] = held
        queued = sum(size for _, size in held)
        if held and queued + len(data) > LARGE_QUEUE_BYTES:
            raise PeerUnreachable(f"{peer}: its queue is full: {queued} of {LARGE_QUEUE_BYTES} bytes in large messages")
        if source.peer is None:
            source.socket.send(peer.encode(), zmq.SNDMORE | zmq.NOBLOCK)
        tracker = source.socket.send(data, zmq.NOBLOCK, copy=False, track=True)
        if tracker is not None:
            held.append((tracker, len(data)))

    async def receive(self) -> tuple[InstanceId, Message]:
        while True:
            if self._in_a_row >= YIELD_EVERY_MESSAGES:
                # A flood must not starve the other tasks of the process: give each of them one turn.
                self._in_a_row = 0
                await asyncio.sleep(0)
            arrived = self._take()
            if arrived is not None:
                self._in_a_row += 1
                return arrived
            self._in_a_row = 0
            if self._closed:
                raise PeerUnreachable(f"{self.identity}: the bus is closed")
            self._readable.clear()
            await self._readable.wait()

    def take(self) -> tuple[InstanceId, Message] | None:
        if self._closed or self._in_a_row >= YIELD_EVERY_MESSAGES:
            return None
        arrived = self._take()
        self._in_a_row += arrived is not None
        return arrived

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._readable.set()
        self._ring.clear()
        if self._lost_peers is not None:
            self._lost_peers.close()
        for source in (*self._peers.values(), *([self._inbox] if self._inbox else [])):
            self._unwatch(source)
            source.socket.close(linger=LINGER_MS)
        self._peers.clear()
        # Ending a context waits for its sockets' last messages (at most LINGER_MS): not on the event loop.
        await self._loop.run_in_executor(None, self._end_context)

    def _take(self) -> tuple[InstanceId, Message] | None:
        """Return sender and message of the next ready socket, or None when all are empty."""
        ring = self._ring
        while ring:
            source = ring[0]
            try:
                frames = source.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                source.on_ring, source.turn_bytes = False, 0
                ring.popleft()
                continue
            source.turn_bytes += len(frames[-1])
            if source.turn_bytes >= TURN_BYTES:
                source.turn_bytes = 0
                ring.rotate(-1)
            try:
                if source.peer is not None:
                    (payload,) = frames
                    sender = source.peer
                    if payload == PROBE:
                        continue
                else:
                    name, payload = frames
                    sender = name.decode()
                    if sender in self._never_dial:
                        self.counters.forged += 1
                        self._warn_forged(sender=sender)
                        continue
                    if self._lost_peers is not None:
                        self._lost_peers.note_message(sender)
                message = decode(payload)
            # A nesting bomb ends in RecursionError; a wrong number of frames or a binary name in ValueError.
            except (WireError, ValueError, RecursionError) as error:
                self.counters.malformed += 1
                self._warn_malformed(sender=source.peer or repr(frames[0][:64]), error=str(error))
                continue
            self.counters.received += 1
            return sender, message
        return None

    def _has_route(self, caller: InstanceId) -> bool:
        """Return whether a peer that dialled the inbox is connected. If so it gets an empty message, and skips it."""
        assert self._inbox is not None
        try:
            self._inbox.socket.send_multipart((caller.encode(), PROBE), zmq.NOBLOCK)
        except zmq.ZMQError as error:  # a full queue has a connection
            return error.errno != zmq.EHOSTUNREACH
        finally:
            self._poll_source(self._inbox)
        return True

    def _open_inbox(self, bind: str, advertise: str) -> None:
        if bind.startswith(_IPC):
            self._ipc_lock = _IpcLock(Path(bind.removeprefix(_IPC)))
        socket = self._new_socket(zmq.ROUTER, HIGH_WATER_MESSAGES, bind)
        socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a restarted peer takes its name over from its dead self
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # an unknown receiver is an error, not a silent loss
        socket.setsockopt(zmq.BACKLOG, 1024)
        if self._curve is not None:
            self._authenticator = Authenticator(self._context, self._curve)
            protect_server(socket, self._curve)
        try:
            socket.bind(bind)
        except zmq.ZMQError as error:
            socket.close(linger=0)
            raise ConfigError(f"cannot listen on {bind}: {error}") from error
        bound = socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.endpoint = with_port_of(advertise or bound, bound)
        self._inbox = _Source(socket, None, bound)
        self._watch(self._inbox)

    def _new_socket(self, kind: int, high_water_messages: int, endpoint: str) -> zmq.Socket[bytes]:
        if self._closed:
            raise PeerUnreachable(f"{self.identity}: the bus is closed")
        socket = self._context.socket(kind)
        tune(socket, pings=not endpoint.startswith(_IPC))
        socket.setsockopt(zmq.SNDHWM, high_water_messages)
        socket.setsockopt(zmq.RCVHWM, RECEIVED_MESSAGES)
        socket.copy_threshold = LARGE_BYTES  # pyzmq copies smaller ones whatever is asked, and says so at once
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        return socket

    def _watch(self, source: _Source) -> None:
        self._loop.add_reader(source.fd, self._poll_source, source)
        self._poll_source(source)

    def _unwatch(self, source: _Source) -> None:
        self._loop.remove_reader(source.fd)
        if source.ends is not None:
            source.ends.close()

    def _poll_source(self, source: _Source) -> None:
        if source.on_ring or source.socket.closed:
            if not source.socket.closed:
                source.socket.getsockopt(zmq.EVENTS)  # acknowledges the signal, else the descriptor stays readable
            return
        if int(source.socket.getsockopt(zmq.EVENTS)) & int(zmq.POLLIN):  # enumerations are slow
            source.on_ring = True
            self._ring.append(source)
            self._readable.set()

    def _drop(self, source: _Source) -> None:
        self._unwatch(source)
        if source.on_ring:
            self._ring.remove(source)
        source.socket.close(linger=0)

    def _end_context(self) -> None:
        if self._authenticator is not None:
            self._authenticator.stop()  # it speaks to its thread by a socket of this context
        self._context.destroy(linger=0)
        # Only now: until the context has ended, libzmq may still be listening on the file.
        if self._ipc_lock is not None:
            self._ipc_lock.release()


def tune(socket: zmq.Socket[Any], *, pings: bool = True) -> None:
    """Give a socket a short linger and settings that find dead TCP peers within seconds. `pings`: not on a Unix socket,
    where the kernel ends a dead peer's connection."""
    socket.setsockopt(zmq.LINGER, LINGER_MS)
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 5)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, 2)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, 3)
    if not pings:
        return
    socket.setsockopt(zmq.HEARTBEAT_IVL, PING_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, PING_TIMEOUT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TTL, PING_TIMEOUT_MS)


def with_port_of(endpoint: str, bound: str) -> str:
    """Return `endpoint`, tcp://host:0 with the port that was really bound."""
    if endpoint.startswith(_TCP) and endpoint.endswith(":0"):
        return endpoint[:-1] + bound.rpartition(":")[2]
    return endpoint


class _IpcLock:
    """Ownership of one Unix socket path, for as long as the process lives. libzmq unlinks the path before it binds, a
    live socket of another process too. So an advisory lock beside it guards the path, which the kernel releases however
    the process dies; a socket that any other program answers on is left alone as well."""

    def __init__(self, path: Path) -> None:
        if len(os.fsencode(path)) > 107:
            raise ConfigError(f"{path}: a Unix socket's path may have 107 bytes; choose a shorter --run-dir")
        self._path = path
        self._lock_path = Path(f"{path}.lock")
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._fd = self._take()
        except BlockingIOError as error:
            raise ConfigError(f"{path}: another process listens there; end it or choose another --run-dir") from error
        except OSError as error:
            raise ConfigError(f"{path}: cannot listen there: {error.strerror}") from error
        path.unlink(missing_ok=True)  # left behind by a process that was killed

    def _take(self) -> int:
        while True:
            fd = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _answers(self._path):
                    raise BlockingIOError(errno.EADDRINUSE, "a socket answers there")
                # A predecessor unlinks the lock file when it ends: the locked file must still lie at the path.
                with contextlib.suppress(FileNotFoundError):
                    if os.path.samestat(os.fstat(fd), os.stat(self._lock_path)):
                        return fd
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)

    def release(self) -> None:
        self._path.unlink(missing_ok=True)
        self._lock_path.unlink(missing_ok=True)
        os.close(self._fd)


def _answers(path: Path) -> bool:
    with plain_socket.socket(plain_socket.AF_UNIX) as probe:
        probe.settimeout(0.5)
        try:
            probe.connect(os.fspath(path))
        except OSError:
            return False
        return True
