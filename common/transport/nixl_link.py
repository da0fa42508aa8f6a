"""The KV link over NIXL: its agents read one another's registered memory, by its UCX plugin.

Called by the worker's transfer agent, like `ucx_link`, with the same guarantees. Decides how NIXL makes progress and
how a transfer that does not end is ended.

    sender                                                receiver
      │ OFFER tag, transfer, place, bytes (notification)     │
      ├─────────────────────────────────────────────────────▶│ kept until `receive(tag)`
      │                                       READ ◀═════════│ one-sided, into the buffer that it names itself
      │               DONE (the READ's own notification)     │
      │◀─────────────────────────────────────────────────────┤
      │ WITHDRAW (a deadline) ──────────────────────────────▶│ not read, or no longer: LET_GO

The receiver reads, so no late byte of a stranger's can reach a buffer: whatever writes here was begun here. The address
of a link has its NIXL agent's connection metadata; the metadata of its memory goes with the first offer to a peer.

Memory. NIXL moves registered memory: the KV cache and its staging are registered once (`register`). Any other source is
copied first into memory of the link, which stays registered: a peer that knows a place must find the same memory there.
Any other target is registered while it is read into.

Progress. NIXL's notifications can only be polled for, and its own progress thread takes half a core while nothing
happens. So the link polls: in every turn of the loop while something moves, at intervals while something is awaited,
seldom otherwise.

How a transfer ends. Releasing a READ under way makes NIXL forget it, not stop it: its state then reads "done". If one
does not end within SETTLE_S, the whole agent is closed and replaced, so that nothing writes through it. Over TCP, where
UCX answers a READ by messages, it aborts a sender that was stopped amid an answer and goes on after that. A sender asks
(WITHDRAW) whether its memory is still read; a copy then stays with the link, any other buffer is stranded until the
peer answers, dies or is forgotten. The kernel reports a dead peer on this host (`peer_process`); for others deadlines
do.

NIXL encrypts nothing, and whoever knows an address may read what is registered (`links.py`).
"""

from __future__ import annotations

import asyncio
import ctypes
import enum
import os
import struct
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

import structlog

from cohort.common.errors import BufferStranded, TransferError, TransferTimeout
from cohort.common.transport.buffers import HostStaging, Region, region_of
from cohort.common.transport.nixl_agent import PLUGIN, NixlAgent, Place, Read, name_in, place_of
from cohort.common.transport.peer_process import ProcessIdentity, ProcessWatch
from cohort.common.transport.ucx_devices import UcxChoice
from cohort.common.transport.uninterrupted import in_thread, outlast

log = structlog.get_logger(__name__)

SETTLE_S = 1.0
SPIN_S = 0.002
TICK_S = 0.0005
IDLE_TICK_S = 0.05
MAX_OFFERS = 65536  # of transfers not asked for yet; the oldest go first
_LEAST_BYTES = 64 * 1024
_INLINE_BYTES = 256 * 1024  # more than that is copied in a thread

_MESSAGE = struct.Struct("<BQQQQB")  # kind, tag, transfer, place, bytes, device + 1 (0: host)


class _Kind(enum.IntEnum):
    OFFER = 1
    DONE = 2
    REFUSED = 3
    WITHDRAW = 4
    LET_GO = 5


@dataclass(slots=True, eq=False)
class _Peer:
    """Process that this link sends to, at `address`, or only reads from. `regions_sent`: number of registered regions
    of this link that it knows; -1: it cannot even answer."""

    name: str
    identity: ProcessIdentity
    address: bytes = b""
    regions_sent: int = -1
    watch: ProcessWatch = field(init=False)
    closed: bool = False


@dataclass(slots=True, eq=False)
class _Sending:
    """Send under way. `over`: "" once it was read, else why not; either way nothing reads the memory any more."""

    tag: int
    transfer: int
    peer: _Peer
    over: asyncio.Future[str]


@dataclass(frozen=True, slots=True)
class _Offer:
    peer: _Peer
    transfer: int
    source: Place


@dataclass(slots=True, eq=False)
class _Receiving:
    """Receive under way. `owner` keeps the target alive."""

    tag: int
    target: Place
    owner: object
    over: asyncio.Future[str]
    offer: _Offer | None = None
    read: Read | None = None


class NixlLink:
    """See `kv_link.KvLink`. Made on a running event loop; raises as `NixlAgent` does."""

    name = "nixl"

    def __init__(self, choice: UcxChoice | None = None, *, loopback_only: bool = False) -> None:
        """Take the arguments of `UcxLink`, for the UCX that NIXL brings along."""
        self._loop = asyncio.get_running_loop()
        self._agent = NixlAgent(choice or UcxChoice(), loopback_only=loopback_only)
        self._pool = RegisteredPool(self.register)
        self._peers: dict[str, _Peer] = {}
        self._sending: dict[int, _Sending] = {}
        self._receiving: dict[int, _Receiving] = {}
        self._offers: OrderedDict[int, tuple[int, _Offer]] = OrderedDict()
        self._transfers = int.from_bytes(os.urandom(7), "little")
        self._tick: asyncio.Handle | None = None
        self._moved_s = 0.0
        self._closed = False
        self.rebuilt = 0
        self.stranded = 0
        self._arm(IDLE_TICK_S)

    # ---- KvLink ---------------------------------------------------------------------------------------------

    def address(self) -> bytes:
        """Return the address. It changes when the agent is replaced: ask again for every grant."""
        return self._agent.address

    def register(self, memory: object) -> None:
        region = region_of(memory, writable=True)
        if region.nbytes:
            self._check_open()
            self._agent.register(place_of(region, memory), memory)

    async def send(self, peer: bytes, tag: int, buffer: object, *, timeout_s: float) -> None:
        region = region_of(buffer, writable=False)
        target = self._peer_at(peer)
        slot: Region | None = None
        source = place_of(region, buffer)
        if not self._agent.knows(source):
            slot = await self._pool.filled((await HostStaging.of(buffer, writable=False)).region)
            source = Place(slot.pointer, slot.nbytes, -1)
        self._transfers += 1
        sending = _Sending(tag, self._transfers, target, self._loop.create_future())
        self._sending[sending.transfer] = sending
        try:
            self._send_control(target, _Kind.OFFER, tag, sending.transfer, source)
            self._poll_now()
            await asyncio.wait((sending.over,), timeout=timeout_s)
            if not sending.over.done():
                raise TransferTimeout(f"nixl: {source.nbytes} bytes not taken within {timeout_s} s")
        except (TransferError, asyncio.CancelledError):
            await self._withdraw(sending, slot)
            raise
        finally:
            if sending.over.done():
                self._end_send(sending, slot)
        if why := sending.over.result():
            raise TransferError(f"nixl: {why}")

    async def receive(self, tag: int, buffer: object, *, timeout_s: float) -> None:
        region = region_of(buffer, writable=True)
        self._check_open()
        if tag in self._receiving:
            raise TransferError(f"nixl: tag {tag:#x} is being received already")
        receiving = _Receiving(tag, place_of(region, buffer), buffer, self._loop.create_future())
        self._receiving[tag] = receiving
        try:
            for transfer, (offered, offer) in self._offers.items():
                if offered == tag:
                    del self._offers[transfer]
                    self._begin(receiving, offer)
                    break
            self._poll_now()
            await asyncio.wait((receiving.over,), timeout=timeout_s)
        finally:
            late = not receiving.over.done()
            await self._silence(receiving)
        if late and (not receiving.over.done() or receiving.over.result()):
            raise TransferTimeout(f"nixl: {region.nbytes} bytes did not arrive within {timeout_s} s")
        if why := receiving.over.result():
            raise TransferError(f"nixl: {why}")

    def path(self, peer: bytes) -> str:
        """Return the plugin's name: NIXL does not report which of its transports it took."""
        return f"nixl/{PLUGIN}" if name_in(peer) in self._peers else ""

    def forget(self, peer: bytes) -> None:
        known = self._peers.pop(name_in(peer), None)
        if known is not None:
            self._close_peer(known, "the peer is gone")

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._close_agent("the link is closed")
        for sending in list(self._sending.values()):
            _end(sending.over, "the link is closed")
        for peer in self._peers.values():
            peer.watch.stop()
        self._peers.clear()

    # ---- sender ---------------------------------------------------------------------------------------------

    async def _withdraw(self, sending: _Sending, slot: Region | None) -> None:
        """Take an offer back. Return when the receiver no longer reads the memory, or after SETTLE_S if that is a slot
        of the link; else raise `BufferStranded`."""
        if sending.peer.closed or self._closed:
            _end(sending.over, "the other process has died")  # and reads nothing
        if not sending.over.done():
            with suppress(TransferError):
                self._send_control(sending.peer, _Kind.WITHDRAW, sending.tag, sending.transfer)
            self._poll_now()
        await outlast(sending.over, SETTLE_S)
        if sending.over.done():
            return
        settled: asyncio.Future[None] = self._loop.create_future()
        sending.over.add_done_callback(lambda _: self._let_go(sending, slot, settled))
        if slot is None:
            self.stranded += 1
            raise BufferStranded("nixl: the receiver neither takes the bytes nor lets them go", settled)

    def _let_go(self, sending: _Sending, slot: Region | None, settled: asyncio.Future[None]) -> None:
        self._end_send(sending, slot)
        if slot is None:
            self.stranded -= 1
            if not settled.done():
                settled.set_result(None)

    def _end_send(self, sending: _Sending, slot: Region | None) -> None:
        self._sending.pop(sending.transfer, None)
        if slot is not None:
            self._pool.give_back(slot)

    # ---- receiver -------------------------------------------------------------------------------------------

    def _on_offer(self, tag: int, offer: _Offer) -> None:
        receiving = self._receiving.get(tag)
        if receiving is not None and receiving.offer is None and not receiving.over.done():
            self._begin(receiving, offer)
            return
        self._offers[offer.transfer] = (tag, offer)
        if len(self._offers) > MAX_OFFERS:
            self._offers.popitem(last=False)

    def _begin(self, receiving: _Receiving, offer: _Offer) -> None:
        receiving.offer = offer
        offered, expected = offer.source.nbytes, receiving.target.nbytes
        if offered != expected:
            self._refuse(receiving, f"{offered} bytes were offered, {expected} were expected")
            return
        done = _MESSAGE.pack(_Kind.DONE, receiving.tag, offer.transfer, 0, offered, 0)
        try:
            receiving.read = self._agent.read(receiving.target, offer.peer.name, offer.source, done)
        except TransferError as error:
            self._refuse(receiving, str(error))

    def _refuse(self, receiving: _Receiving, why: str) -> None:
        offer = receiving.offer
        self._drop_read(receiving)
        if offer is not None and not offer.peer.closed:
            with suppress(TransferError):
                self._send_control(offer.peer, _Kind.REFUSED, receiving.tag, offer.transfer)
        _end(receiving.over, why)

    def _poll_read(self, receiving: _Receiving, read: Read) -> bool:
        """Return whether its READ has ended."""
        match self._agent.state(read):
            case "PROC":
                return False
            case "DONE":
                self._drop_read(receiving)
                _end(receiving.over, "")
            case _:
                self._refuse(receiving, "the read failed: the sender is gone, or does not offer this memory")
        return True

    def _drop_read(self, receiving: _Receiving) -> None:
        read, receiving.read = receiving.read, None
        if read is not None:
            self._agent.drop(read)

    async def _silence(self, receiving: _Receiving) -> None:
        """Return only when nothing writes into the buffer any more, also when cancelled meanwhile."""
        if not receiving.over.done() and receiving.read is not None:
            await outlast(receiving.over, SETTLE_S)
        if receiving.read is not None:
            log.warning("nixl agent made anew: a read did not end", tag=receiving.tag)
            self._rebuild("the link was made anew to silence another transfer")
        elif receiving.offer is not None and not receiving.over.done():
            self._refuse(receiving, "given up")
        if self._receiving.get(receiving.tag) is receiving:
            del self._receiving[receiving.tag]

    # ---- messages -------------------------------------------------------------------------------------------

    def _send_control(self, peer: _Peer, kind: _Kind, tag: int, transfer: int, source: Place | None = None) -> None:
        self._check_open()
        if peer.closed:
            raise TransferError("nixl: the other process has died")
        place, nbytes, device = (source.pointer, source.nbytes, source.device) if source is not None else (0, 0, -1)
        message = _MESSAGE.pack(kind, tag, transfer, place, nbytes, device + 1)
        if peer.regions_sent < self._agent.regions:
            message += self._agent.local_metadata()
            peer.regions_sent = self._agent.regions
        if peer.name == self._agent.name:
            self._loop.call_soon(self._on_message, peer.name, message)
        else:
            self._agent.send(peer.name, message)

    def _peer_with(self, name: str, identity: ProcessIdentity) -> _Peer:
        known = self._peers.get(name)
        if known is None:
            known = self._peers[name] = peer = _Peer(name, identity)
            peer.watch = ProcessWatch(
                identity, self._loop, lambda: self._close_peer(peer, "the other process has died")
            )
        return known

    def _on_message(self, name: str, message: bytes) -> None:
        if not self._agent.open:
            return
        try:
            kind, tag, transfer, place, nbytes, device = _MESSAGE.unpack_from(message)
            if len(message) > _MESSAGE.size and name != self._agent.name:
                self._peer_with(*self._agent.meet(message[_MESSAGE.size :]))
            peer = self._peers[name]
        except (struct.error, KeyError, TransferError) as error:
            log.warning("message of an unknown NIXL agent skipped", error=str(error))
            return
        match kind:
            case _Kind.OFFER:
                self._on_offer(tag, _Offer(peer, transfer, Place(place, nbytes, device - 1)))
            case _Kind.DONE | _Kind.REFUSED | _Kind.LET_GO:
                whys = {_Kind.DONE: "", _Kind.REFUSED: "the receiver gave it up", _Kind.LET_GO: "withdrawn"}
                if (sending := self._sending.get(transfer)) is not None:
                    _end(sending.over, whys[_Kind(kind)])
            case _Kind.WITHDRAW:
                self._offers.pop(transfer, None)
                if not any(r.offer and r.offer.transfer == transfer and r.read for r in self._receiving.values()):
                    with suppress(TransferError):
                        self._send_control(peer, _Kind.LET_GO, tag, transfer)
            case other:
                log.warning("unknown NIXL message skipped", kind=other)

    # ---- progress -------------------------------------------------------------------------------------------

    def _poll_now(self) -> None:
        """Poll in the loop's next turn, and from then on as often as it pays."""
        self._moved_s = time.monotonic()
        self._arm(0.0)

    def _arm(self, delay_s: float) -> None:
        if self._tick is not None:
            self._tick.cancel()
        self._tick = self._loop.call_later(delay_s, self._poll) if delay_s else self._loop.call_soon(self._poll)

    def _poll(self) -> None:
        if not self._agent.open:
            return
        moved = False
        try:
            for name, message in self._agent.received():
                moved = True
                self._on_message(name, message)
        except TransferError as error:
            log.warning("NIXL does not tell what it heard", error=str(error))
        for receiving in list(self._receiving.values()):
            if receiving.read is not None:
                moved = self._poll_read(receiving, receiving.read) or moved
        now_s = time.monotonic()
        if moved:
            self._moved_s = now_s
        waiting = self._receiving or self._sending
        self._arm(IDLE_TICK_S if not waiting else 0.0 if now_s - self._moved_s < SPIN_S else TICK_S)

    # ---- agent and peers ------------------------------------------------------------------------------------

    def _close_agent(self, reason: str) -> None:
        if self._tick is not None:
            self._tick.cancel()
            self._tick = None
        for receiving in list(self._receiving.values()):
            self._drop_read(receiving)
            _end(receiving.over, reason)
        self._offers.clear()
        self._agent.close()

    def _rebuild(self, reason: str) -> None:
        """Replace the agent. Memory that peers know stays registered, but their answers go to the closed agent: sends
        under way are withdrawn."""
        self.rebuilt += 1
        self._close_agent(reason)
        self._agent.reopen()
        for peer in list(self._peers.values()):
            peer.regions_sent = -1
            if peer.address:
                with suppress(TransferError):
                    self._agent.reach(peer.address)
            else:
                peer.watch.stop()
                del self._peers[peer.name]
        for sending in self._sending.values():
            with suppress(TransferError):
                self._send_control(sending.peer, _Kind.WITHDRAW, sending.tag, sending.transfer)
        self._arm(IDLE_TICK_S)

    def _peer_at(self, address: bytes) -> _Peer:
        self._check_open()
        name = name_in(address)
        peer = self._peers.get(name) or self._peer_with(name, self._agent.reach(address))
        peer.address = address
        return peer

    def _close_peer(self, peer: _Peer, reason: str) -> None:
        """End the sends to a peer that is gone: it reads nothing any more."""
        if peer.closed:
            return
        peer.closed = True
        peer.watch.stop()
        pending = [sending for sending in self._sending.values() if sending.peer is peer]
        for sending in pending:
            _end(sending.over, reason)
        for transfer in [t for t, (_, offer) in self._offers.items() if offer.peer is peer]:
            del self._offers[transfer]
        if pending:
            log.info("transfers ended", reason=reason, count=len(pending))
        if self._peers.get(peer.name) is peer:
            del self._peers[peer.name]
        if not any(r.offer and r.offer.peer is peer and r.read for r in self._receiving.values()):
            self._agent.forget(peer.name)

    def _check_open(self) -> None:
        if self._closed or not self._agent.open:
            raise TransferError("nixl: the link is closed")


def _end(over: asyncio.Future[str], why: str) -> None:
    if not over.done():
        over.set_result(why)


class RegisteredPool:
    """Host memory that the link has registered once and lends for copies of buffers that are not registered. Nothing is
    given back to the system before the link closes: peers that know a place must find registered memory there. Sizes
    are powers of two, so as many buffers exist as messages were under way at once."""

    def __init__(self, register: Callable[[object], None]) -> None:
        self._register = register
        self._free: dict[int, list[bytearray]] = {}

    async def filled(self, source: Region) -> Region:
        """Return a copy of these bytes of the host. On return or raise nothing reads them any more."""
        size = max(_LEAST_BYTES, 1 << max(0, source.nbytes - 1).bit_length())
        free = self._free.setdefault(size, [])
        if free:
            memory = free.pop()
        else:
            memory = bytearray(size)
            self._register(memory)
        slot = Region(region_of(memory, writable=True).pointer, source.nbytes, False, memory)

        def copy() -> None:
            ctypes.memmove(slot.pointer, source.pointer, source.nbytes)

        try:
            if source.nbytes <= _INLINE_BYTES:
                copy()
            else:
                await in_thread(copy)
        except BaseException:
            self.give_back(slot)
            raise
        return slot

    def give_back(self, slot: Region) -> None:
        assert isinstance(slot.owner, bytearray)
        self._free[len(slot.owner)].append(slot.owner)
