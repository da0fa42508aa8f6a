"""The KV link over ZeroMQ: the fallback where UCX is not installed or has failed.

Called by the worker's transfer agent, like `ucx_link`, with the same guarantees. Plain sockets, so it also crosses
hosts and containers; device memory is staged through the host. Each process has one ROUTER where data arrives and one
DEALER per peer it sends to.

    sender                                       receiver
      │ OFFER tag, bytes                            │
      ├────────────────────────────────────────────▶│ kept until `receive(tag)`
      │                            PULL tag, up to  │
      │◀────────────────────────────────────────────┤ a window ahead of what has arrived
      │ CHUNK tag, offset ══ bytes ════════════════▶│ copied into place                (repeated)
      │                                  DONE tag   │
      │◀────────────────────────────────────────────┤

    ABORT, from either side, ends it.

The receiver pulls, so memory is bounded: at most WINDOW_BYTES of a transfer are in any queue, and nothing is sent
unasked. Bytes are written into the buffer only by this loop, so a receive that gave up is silent at once. The sender
hands its memory to libzmq without copying; it waits until libzmq has let go, if need be by dropping the connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import os
import struct
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import structlog
import zmq

from cohort.common.errors import ConfigError, TransferError, TransferTimeout
from cohort.common.transport.buffers import HostStaging
from cohort.common.transport.repeated_warning import RepeatedWarning
from cohort.common.transport.security import Authenticator, CurveKeys, protect_client, protect_server
from cohort.common.transport.uninterrupted import outlast
from cohort.common.transport.zmq_bus import LINGER_MS, tune, with_port_of

log = structlog.get_logger(__name__)

CHUNK_BYTES = 1024 * 1024
WINDOW_BYTES = 4 * CHUNK_BYTES
RELEASE_S = 1.0  # the longest to wait until libzmq has let go of a buffer
MAX_OFFERS = 65536  # of transfers not asked for yet; the oldest go first
READS_PER_TURN = 16
HIGH_WATER_MESSAGES = 4096

_HEADER = struct.Struct("<BQQQ")  # kind, tag, transfer, value


class _Kind(enum.IntEnum):
    """Kinds of messages; the comments give the meaning of `value`."""

    OFFER = 1  # bytes in all
    PULL = 2  # offset up to which may be sent
    CHUNK = 3  # offset of these bytes
    DONE = 4  # bytes received
    ABORT = 5  # nothing


@dataclass(slots=True, eq=False)
class _Sending:
    tag: int
    transfer: int
    staging: HostStaging
    done: asyncio.Future[None]
    sent: int = 0
    trackers: list[zmq.MessageTracker] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Receiving:
    tag: int
    staging: HostStaging
    done: asyncio.Future[None]
    source: tuple[bytes, int] | None = None  # routing id and transfer, once an offer was accepted
    received: int = 0
    allowed: int = 0


@dataclass(slots=True, eq=False)
class _Peer:
    socket: zmq.Socket[bytes]
    sending: dict[int, _Sending] = field(default_factory=dict)


class ZmqLink:
    """See `kv_link.KvLink`. `bind` is where data arrives; `advertise` what senders dial, if that differs."""

    name = "zmq"

    def __init__(self, bind: str, curve: CurveKeys | None = None, *, advertise: str = "") -> None:
        self._loop = asyncio.get_running_loop()
        self._curve = curve
        self._warn_malformed = RepeatedWarning(log, "malformed transfer message skipped")
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._authenticator: Authenticator | None = None
        self._peers: dict[bytes, _Peer] = {}
        self._receiving: dict[int, _Receiving] = {}
        self._offers: OrderedDict[tuple[int, bytes], tuple[int, int]] = OrderedDict()
        self._transfers = int.from_bytes(os.urandom(6), "little")
        self._closed = False
        self._inbox = self._new_socket(zmq.ROUTER)
        try:
            self._inbox.setsockopt(zmq.ROUTER_MANDATORY, 1)
            if curve is not None:
                self._authenticator = Authenticator(self._context, curve)
                protect_server(self._inbox, curve)
            self._inbox.bind(bind)
        except zmq.ZMQError as error:
            self._inbox.close(linger=0)
            self._end_context()
            raise ConfigError(f"cannot listen on {bind}: {error}") from error
        bound = self._inbox.getsockopt_string(zmq.LAST_ENDPOINT)
        self._address = with_port_of(advertise or bound, bound).encode()
        self._listen(self._inbox, None)

    # ---- KvLink ---------------------------------------------------------------------------------------------

    def address(self) -> bytes:
        return self._address

    async def send(self, peer: bytes, tag: int, buffer: object, *, timeout_s: float) -> None:
        staging = await HostStaging.of(buffer, writable=False)
        target = self._peer(peer)
        self._transfers += 1
        sending = _Sending(tag, self._transfers, staging, self._loop.create_future())
        target.sending[sending.transfer] = sending
        ended = False
        try:
            self._send_control(target, _Kind.OFFER, tag, sending.transfer, staging.region.nbytes)
            await asyncio.wait((sending.done,), timeout=timeout_s)
            if not sending.done.done():
                raise TransferTimeout(f"zmq: {staging.region.nbytes} bytes not taken within {timeout_s} s")
            ended = True
            sending.done.result()
        finally:
            target.sending.pop(sending.transfer, None)
            if not ended:
                with contextlib.suppress(TransferError):
                    self._send_control(target, _Kind.ABORT, tag, sending.transfer, 0)
            await self._released(peer, target, sending)

    async def receive(self, tag: int, buffer: object, *, timeout_s: float) -> None:
        staging = await HostStaging.of(buffer, writable=True)
        if self._closed:
            raise TransferError("zmq: the link is closed")
        if tag in self._receiving:
            raise TransferError(f"zmq: a receive for tag {tag} is posted already")
        receiving = self._receiving[tag] = _Receiving(tag, staging, self._loop.create_future())
        ended = False
        try:
            self._accept_waiting_offer(receiving)
            await asyncio.wait((receiving.done,), timeout=timeout_s)
            if not receiving.done.done():
                raise TransferTimeout(f"zmq: {staging.region.nbytes} bytes did not arrive within {timeout_s} s")
            ended = True
            receiving.done.result()
        finally:
            del self._receiving[tag]  # from here on nothing that arrives finds the buffer
            if not ended and receiving.source is not None:
                self._answer(receiving.source, _Kind.ABORT, tag, 0)
        await staging.finish_receive()

    def path(self, peer: bytes) -> str:
        if peer not in self._peers:
            return ""
        return peer.decode().partition("://")[0] + ("/curve" if self._curve is not None else "/plain")

    def forget(self, peer: bytes) -> None:
        known = self._peers.pop(peer, None)
        if known is not None:
            self._drop(known, "the peer is gone")

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for peer in self._peers.values():
            self._drop(peer, "the link is closed")
        self._peers.clear()
        for receiving in self._receiving.values():
            _fail(receiving.done, "the link is closed")
        self._loop.remove_reader(self._inbox.FD)
        self._inbox.close(linger=LINGER_MS)
        await self._loop.run_in_executor(None, self._end_context)

    # ---- reading --------------------------------------------------------------------------------------------

    def _listen(self, socket: zmq.Socket[bytes], peer: _Peer | None) -> None:
        self._loop.add_reader(socket.FD, self._read, socket, peer)
        self._read_soon(socket, peer)

    def _read_soon(self, socket: zmq.Socket[bytes], peer: _Peer | None) -> None:
        """Read in the loop's next turn. Called after every send, which may have swallowed the descriptor's signal."""
        self._loop.call_soon(self._read, socket, peer)

    def _read(self, socket: zmq.Socket[bytes], peer: _Peer | None) -> None:
        """Read for one bounded turn. A libzmq descriptor signals changes only, so the rest is read in another turn."""
        for _ in range(READS_PER_TURN):
            if socket.closed:
                return
            try:
                frames: Sequence[Any] = socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            try:
                self._dispatch(frames, peer)
            except (ValueError, struct.error) as error:
                self._warn_malformed(error=str(error))
        self._read_soon(socket, peer)

    def _dispatch(self, frames: Sequence[zmq.Frame], peer: _Peer | None) -> None:
        if peer is None:
            routing, header, *payload = frames
            source = bytes(routing.buffer)
        else:
            header, *payload = frames
            source = b""
        kind, tag, transfer, value = _HEADER.unpack(header.buffer)
        match _Kind(kind):
            case _Kind.OFFER if peer is None:
                self._on_offer(source, tag, transfer, value)
            case _Kind.CHUNK if peer is None and len(payload) == 1:
                self._on_chunk(source, tag, transfer, value, memoryview(payload[0].buffer).cast("B"))
            case _Kind.PULL if peer is not None:
                self._on_pull(peer, transfer, value)
            case _Kind.DONE if peer is not None:
                self._on_done(peer, transfer, value)
            case _Kind.ABORT if peer is not None:
                if transfer in peer.sending:
                    _fail(peer.sending[transfer].done, "the receiver gave the transfer up")
            case _Kind.ABORT:
                self._offers.pop((tag, source), None)
                receiving = self._receiving.get(tag)
                if receiving is not None and receiving.source == (source, transfer):
                    _fail(receiving.done, "the sender gave the transfer up")
            case other:
                raise ValueError(f"{other.name} from the wrong side")

    # ---- receiver -------------------------------------------------------------------------------------------

    def _on_offer(self, source: bytes, tag: int, transfer: int, nbytes: int) -> None:
        receiving = self._receiving.get(tag)
        if receiving is not None and receiving.source is None:
            self._accept(receiving, (source, transfer), nbytes)
            return
        self._offers[tag, source] = (transfer, nbytes)
        if len(self._offers) > MAX_OFFERS:
            self._offers.popitem(last=False)

    def _accept_waiting_offer(self, receiving: _Receiving) -> None:
        for key in self._offers:
            if key[0] == receiving.tag:
                transfer, nbytes = self._offers.pop(key)
                self._accept(receiving, (key[1], transfer), nbytes)
                return

    def _accept(self, receiving: _Receiving, source: tuple[bytes, int], nbytes: int) -> None:
        expected = receiving.staging.region.nbytes
        if nbytes != expected:
            self._answer(source, _Kind.ABORT, receiving.tag, 0)
            _fail(receiving.done, f"{nbytes} bytes were offered, {expected} were expected")
            return
        receiving.source = source
        self._advance(receiving)

    def _on_chunk(self, source: bytes, tag: int, transfer: int, offset: int, payload: memoryview) -> None:
        receiving = self._receiving.get(tag)
        if receiving is None or receiving.source != (source, transfer) or receiving.done.done():
            return  # of a receive that has given up
        end = offset + payload.nbytes
        if offset != receiving.received or end > receiving.staging.region.nbytes:
            _fail(receiving.done, f"bytes [{offset}, {end}) arrived, {receiving.received} was next")
            return
        receiving.staging.view[offset:end] = payload
        receiving.received = end
        self._advance(receiving)

    def _advance(self, receiving: _Receiving) -> None:
        """Let the sender send more, or report to it that all bytes are here."""
        assert receiving.source is not None
        nbytes = receiving.staging.region.nbytes
        if receiving.received == nbytes:
            self._answer(receiving.source, _Kind.DONE, receiving.tag, nbytes)
            if not receiving.done.done():
                receiving.done.set_result(None)
        elif receiving.allowed - receiving.received <= WINDOW_BYTES // 2:
            receiving.allowed = min(nbytes, receiving.received + WINDOW_BYTES)
            self._answer(receiving.source, _Kind.PULL, receiving.tag, receiving.allowed)

    def _answer(self, source: tuple[bytes, int], kind: _Kind, tag: int, value: int) -> None:
        routing, transfer = source
        header = _HEADER.pack(kind, tag, transfer, value)
        with contextlib.suppress(zmq.ZMQError):  # the sender is gone: our deadline ends the transfer
            self._inbox.send_multipart((routing, header), zmq.NOBLOCK)
        self._read_soon(self._inbox, None)

    # ---- sender ---------------------------------------------------------------------------------------------

    def _on_pull(self, peer: _Peer, transfer: int, allowed: int) -> None:
        sending = peer.sending.get(transfer)
        if sending is None:
            return
        nbytes, view = sending.staging.region.nbytes, sending.staging.view
        sending.trackers = [tracker for tracker in sending.trackers if not tracker.done]
        while sending.sent < min(allowed, nbytes):
            end = min(sending.sent + CHUNK_BYTES, nbytes)
            header = _HEADER.pack(_Kind.CHUNK, sending.tag, transfer, sending.sent)
            try:
                peer.socket.send(header, zmq.SNDMORE | zmq.NOBLOCK)
                tracker = peer.socket.send(view[sending.sent : end], zmq.NOBLOCK, copy=False, track=True)
            except zmq.ZMQError as error:
                _fail(sending.done, f"cannot send: {error}")
                return
            if tracker is not None:
                sending.trackers.append(tracker)
            sending.sent = end
        self._read_soon(peer.socket, peer)

    def _on_done(self, peer: _Peer, transfer: int, received: int) -> None:
        sending = peer.sending.get(transfer)
        if sending is not None and not sending.done.done():
            if received == sending.staging.region.nbytes:
                sending.done.set_result(None)
            else:
                _fail(sending.done, f"the receiver counts {received} bytes")

    async def _released(self, address: bytes, peer: _Peer, sending: _Sending) -> None:
        """Wait until libzmq reads the buffer no more, also when cancelled meanwhile."""
        if await self._wait_released(sending.trackers, RELEASE_S):
            return
        if self._peers.get(address) is peer:
            self.forget(address)  # the peer takes nothing any more: without a connection libzmq drops what it holds
        if not await self._wait_released(sending.trackers, RELEASE_S):
            raise TransferError("zmq: a buffer is still held by libzmq")

    async def _wait_released(self, trackers: list[zmq.MessageTracker], timeout_s: float) -> bool:
        if all(tracker.done for tracker in trackers):
            return True

        def wait() -> bool:
            until_s = time.monotonic() + timeout_s
            try:
                for tracker in trackers:
                    tracker.wait(max(0.0, until_s - time.monotonic()))
            except zmq.NotDone:
                return False
            return True

        waiting = self._loop.run_in_executor(None, wait)
        await outlast(waiting)
        return waiting.result()

    def _send_control(self, peer: _Peer, kind: _Kind, tag: int, transfer: int, value: int) -> None:
        try:
            peer.socket.send(_HEADER.pack(kind, tag, transfer, value), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            raise TransferError(f"zmq: cannot send: {error}") from error
        self._read_soon(peer.socket, peer)

    # ---- sockets --------------------------------------------------------------------------------------------

    def _peer(self, address: bytes) -> _Peer:
        if self._closed:
            raise TransferError("zmq: the link is closed")
        known = self._peers.get(address)
        if known is not None:
            return known
        socket = self._new_socket(zmq.DEALER)
        try:
            if self._curve is not None:
                protect_client(socket, self._curve)
            socket.connect(address.decode())
        except (zmq.ZMQError, UnicodeDecodeError) as error:
            socket.close(linger=0)
            raise TransferError(f"zmq: {address!r} cannot be dialled: {error}") from error
        peer = self._peers[address] = _Peer(socket)
        self._listen(socket, peer)
        return peer

    def _new_socket(self, kind: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        tune(socket)
        socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MESSAGES)
        socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MESSAGES)
        socket.setsockopt(zmq.MAXMSGSIZE, 2 * CHUNK_BYTES)
        return socket

    def _drop(self, peer: _Peer, reason: str) -> None:
        for sending in peer.sending.values():
            _fail(sending.done, reason)
        self._loop.remove_reader(peer.socket.FD)
        peer.socket.close(linger=0)

    def _end_context(self) -> None:
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.term()


def _fail(done: asyncio.Future[None], reason: str) -> None:
    if not done.done():
        done.set_exception(TransferError(f"zmq: {reason}"))
