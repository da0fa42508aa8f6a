"""The KV link over UCX: NVLink, RDMA, shared memory or TCP, as UCX chooses for each pair of processes.

Called by the worker's transfer agent, one link per process, on its event loop. Decides how UCX makes progress and how a
transfer that does not end is ended; never what is sent, where or whether again.

Progress. Peers connect by *worker address*, exchanged over the control plane, without endpoint error handling:
listeners, and error handling, each cost UCX its shared-memory path. The event loop sleeps on UCX's event descriptor;
when it wakes, UCX progresses for a bounded time per turn (a shared-memory transfer *is* a copy made while progressing),
then every pending operation is checked. While one on GPU memory is pending, UCX also progresses without being woken.

How a transfer ends. On a deadline or a cancelled task nothing may use the buffer when the call returns:

    receive, nothing matched yet   cancelled by UCX at once
    receive, bytes under way       awaited; if they do not end within SETTLE_S, the whole UCX worker is closed, through
                                   which nothing can write then, and replaced; its other transfers fail
    send, small                    was copied, has ended
    send, large                    the receiver pulls, so the receiver is asked (`_WITHDRAW_TAG`) to let go; if it does
                                   not within SETTLE_S: `BufferStranded`, with a future that is done once the peer has
                                   answered, died, or was forgotten

UCX itself does not notice a dead peer on these paths. For a peer on this host the kernel does (`peer_process`); for
others there are deadlines.

UCX encrypts nothing and trusts every peer that knows an address: `open_links` decides whether it may be used.

A receive that gave up leaves an empty receive behind for a while, the *void*: it discards data that still arrive under
the tag, so that their sender does not wait in vain.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import OrderedDict
from dataclasses import dataclass, field, replace
from typing import Any

import structlog

from cohort.common.errors import BufferStranded, TransferError, TransferTimeout
from cohort.common.transport.buffers import Region, region_of
from cohort.common.transport.peer_process import ProcessIdentity, ProcessWatch
from cohort.common.transport.ucp_api import ERR_CANCELED, ERR_TRUNCATED, IN_PROGRESS, OK, UcpApi, UcpError
from cohort.common.transport.ucx_devices import UcxChoice, check_choice, resources, ucxx_library
from cohort.common.transport.uninterrupted import outlast

log = structlog.get_logger(__name__)

SETTLE_S = 1.0
DRAIN_S = 5.0
PROGRESS_TURN_S = 0.0005
SAFETY_TICK_S = 0.1  # while transfers are pending: UCX documents that its descriptor may, rarely, stay silent
# UCX reports the end of a copy between GPUs' memories through its descriptor late or not at all (rapidsai/ucx-py#888,
# rapidsai/ucxx#15); while one is pending the link polls: in every turn of the loop at first, then at intervals.
DEVICE_SPIN_S = 0.002
DEVICE_TICK_S = 0.0005
VOID_S = 30.0
MAX_VOIDS = 1024

_WITHDRAW_TAG = (1 << 64) - 1  # outside what `tag_of` gives to any real lease: 2^40 - 1 leases are never reached
_WITHDRAW_BYTES = 8
_ERR_UNREACHABLE = -6

_ENVIRONMENT = {
    # The cache of memory types knows no GPU memory that was allocated before UCX started, as the KV pool is, and takes
    # it for the host's (openucx/ucx#2755): ask the driver for every buffer instead.
    "UCX_MEMTYPE_CACHE": "n"
}


@dataclass(slots=True, eq=False)
class _Peer:
    """Address that this link sends to."""

    address: bytes
    identity: ProcessIdentity
    endpoint: int | None
    watch: ProcessWatch = field(init=False)
    closed: bool = False


@dataclass(slots=True, eq=False)
class _Operation:
    """Request under way. `done` gets its final status. The region is held until UCX is finished with it."""

    request: int
    region: Region | None
    done: asyncio.Future[int]
    tag: int
    peer: _Peer | None = None
    received: int = 0
    posted_s: float = field(default_factory=time.monotonic)


class UcxLink:
    """See `kv_link.KvLink`. Made on a running event loop; raises `TransferError` where ucxx is not installed or
    cannot start."""

    name = "ucx"

    def __init__(self, choice: UcxChoice | None = None, *, loopback_only: bool = False) -> None:
        """`choice`: what UCX may use; `ConfigError` where UCX lacks it here. `loopback_only`: use no network interface
        but loopback, because every peer is on this host; shared memory and copies between GPUs are unaffected. A choice
        of devices, or UCX_NET_DEVICES in the environment, wins."""
        for key, value in _ENVIRONMENT.items():
            os.environ.setdefault(key, value)
        choice = choice or UcxChoice()
        self._ucxx: Any = ucxx_library()
        check_choice(choice, self._ucxx)
        if loopback_only and not choice.net_devices and not os.environ.get("UCX_NET_DEVICES"):
            choice = replace(choice, net_devices="lo")
        try:
            self._api = UcpApi(self._on_endpoint_failed)
            features = (self._ucxx.Feature.TAG, self._ucxx.Feature.WAKEUP)
            self._context: Any = self._ucxx.UCXContext(choice.options, feature_flags=features)
        except Exception as error:  # ucxx raises many types of its own, and none of them may end the worker
            raise TransferError(f"UCX cannot start: {error}") from error
        self.may_use = resources(self._context)
        """"transport/device" of all that UCX may use."""
        self._loop = asyncio.get_running_loop()
        self._identity = ProcessIdentity.own()
        self._worker: Any = None
        self._fd = -1
        self._operations: dict[int, _Operation] = {}
        self._peers: dict[bytes, _Peer] = {}
        self._voids: OrderedDict[int, _Operation] = OrderedDict()
        self._turn: asyncio.Handle | None = None
        self._tick: asyncio.TimerHandle | None = None
        self._device_tick: asyncio.TimerHandle | None = None
        self._address = b""
        self._closed = False
        self.rebuilt = 0
        self.stranded = 0
        self._open_worker()

    # ---- KvLink ---------------------------------------------------------------------------------------------

    def address(self) -> bytes:
        """Return the address. It changes when the UCX worker is replaced: ask again for every grant."""
        return self._address

    async def send(self, peer: bytes, tag: int, buffer: object, *, timeout_s: float) -> None:
        region = region_of(buffer, writable=False)
        target = self._peer(peer)
        operation = self._post_send(target, tag, region)
        try:
            await asyncio.wait((operation.done,), timeout=timeout_s)
        finally:
            late = not operation.done.done()
            await self._withdraw_send(operation)
        if late:
            raise TransferTimeout(f"ucx: {region.nbytes} bytes not taken within {timeout_s} s")
        status = operation.done.result()
        if status != OK:
            raise TransferError(f"ucx: send failed: {self._text(status)}")

    async def receive(self, tag: int, buffer: object, *, timeout_s: float) -> None:
        region = region_of(buffer, writable=True)
        operation = self._post_receive(tag, region)
        try:
            await asyncio.wait((operation.done,), timeout=timeout_s)
        finally:
            if late := not operation.done.done():
                await self._silence_receive(operation)
        status = operation.done.result()
        if late and status != OK:
            raise TransferTimeout(f"ucx: {region.nbytes} bytes did not arrive within {timeout_s} s")
        if status == ERR_TRUNCATED:
            raise TransferError(f"ucx: more than the expected {region.nbytes} bytes arrived")
        if status != OK:
            raise TransferError(f"ucx: receive failed: {self._text(status)}")
        if operation.received != region.nbytes:
            raise TransferError(f"ucx: {operation.received} bytes arrived, {region.nbytes} were expected")

    def path(self, peer: bytes) -> str:
        known = self._peers.get(peer)
        if known is None or known.closed or known.endpoint is None:
            return ""
        return "+".join(self._api.transports(known.endpoint))

    def forget(self, peer: bytes) -> None:
        known = self._peers.pop(peer, None)
        if known is not None:
            self._close_peer(known, "the peer is gone")
            self._close_endpoint(known)

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._close_worker("the link is closed")
        for peer in self._peers.values():
            peer.watch.stop()
        self._peers.clear()
        self._context = None

    # ---- posting --------------------------------------------------------------------------------------------

    def _post_send(self, peer: _Peer, tag: int, region: Region) -> _Operation:
        if peer.closed or peer.endpoint is None:
            raise TransferError("ucx: the receiving process has died")
        try:
            request = self._api.send(peer.endpoint, region.pointer, region.nbytes, tag)
        except UcpError as error:
            raise TransferError(f"ucx: send failed: {error}") from error
        return self._add(_Operation(request, region, self._loop.create_future(), tag, peer))

    def _post_receive(self, tag: int, region: Region | None) -> _Operation:
        if self._closed:
            raise TransferError("ucx: the link is closed")
        void = self._voids.pop(tag, None)
        if void is not None and not void.done.done():
            self._api.cancel(self._worker.handle, void.request)
        pointer, nbytes = (region.pointer, region.nbytes) if region is not None else (0, 0)
        try:
            request = self._api.receive(self._worker.handle, pointer, nbytes, tag)
        except UcpError as error:
            raise TransferError(f"ucx: receive failed: {error}") from error
        return self._add(_Operation(request, region, self._loop.create_future(), tag))

    def _add(self, operation: _Operation) -> _Operation:
        self._operations[id(operation)] = operation
        self._progress_soon()
        if self._tick is None:
            self._tick = self._loop.call_later(SAFETY_TICK_S, self._on_tick)
        return operation

    # ---- progress -------------------------------------------------------------------------------------------

    def _progress_soon(self) -> None:
        if self._turn is None:
            self._turn = self._loop.call_soon(self._progress)

    def _progress(self) -> None:
        """Make progress for one bounded turn. At its end UCX's descriptor is armed, or another turn is scheduled."""
        if self._turn is not None:
            self._turn.cancel()
            self._turn = None
        worker = self._worker
        if worker is None:
            return
        until_s = time.perf_counter() + PROGRESS_TURN_S
        while worker.progress_once():
            if time.perf_counter() >= until_s:
                self._poll()
                self._progress_soon()
                return
        self._poll()
        if not worker.arm():
            self._progress_soon()
        elif posted_s := [op.posted_s for op in self._operations.values() if op.region and op.region.on_device]:
            if time.monotonic() - max(posted_s) < DEVICE_SPIN_S:
                self._progress_soon()
            elif self._device_tick is None:
                self._device_tick = self._loop.call_later(DEVICE_TICK_S, self._on_device_tick)

    def _on_device_tick(self) -> None:
        self._device_tick = None
        self._progress()

    def _poll(self) -> None:
        """Settle the transfers that have ended."""
        api = self._api
        ended = [operation for operation in self._operations.values() if api.status(operation.request) != IN_PROGRESS]
        for operation in ended:
            del self._operations[id(operation)]
            status = api.status(operation.request)
            if operation.peer is None and status == OK:
                operation.received = api.received(operation.request)
            api.free(operation.request)
            self._settle(operation, status)

    def _settle(self, operation: _Operation, status: int) -> None:
        operation.region = None
        if not operation.done.done():
            operation.done.set_result(status)

    def _on_tick(self) -> None:
        self._tick = None
        now_s = time.monotonic()
        while self._voids:
            tag, void = next(iter(self._voids.items()))
            if now_s - void.posted_s < VOID_S and len(self._voids) <= MAX_VOIDS:
                break
            del self._voids[tag]
            if not void.done.done():
                self._api.cancel(self._worker.handle, void.request)
        self._progress()
        if len(self._operations) > 1 and not self._closed:  # more than the standing receive for withdrawals
            self._tick = self._loop.call_later(SAFETY_TICK_S, self._on_tick)

    # ---- ending stuck transfers -----------------------------------------------------------------------------

    async def _silence_receive(self, operation: _Operation) -> None:
        """Return only when nothing writes into the buffer any more, also when cancelled meanwhile."""
        self._api.cancel(self._worker.handle, operation.request)
        self._poll()
        await outlast(operation.done, SETTLE_S)
        if not operation.done.done():
            log.warning("ucx link rebuilt: a receive could be neither finished nor cancelled", tag=operation.tag)
            self._rebuild("the link was rebuilt to silence another transfer")
        elif operation.done.result() == ERR_CANCELED and not self._closed:
            self._discard(operation.tag)

    def _discard(self, tag: int) -> None:
        """Post the void of a tag."""
        self._voids[tag] = self._post_receive(tag, None)

    async def _withdraw_send(self, operation: _Operation) -> None:
        """Return when the receiver no longer reads the buffer, else raise `BufferStranded`."""
        if not operation.done.done() and operation.peer is not None and not operation.peer.closed:
            notice = bytearray(operation.tag.to_bytes(_WITHDRAW_BYTES, "little"))
            self._post_send(operation.peer, _WITHDRAW_TAG, region_of(notice, writable=False))
        await outlast(operation.done, SETTLE_S)
        if not operation.done.done():
            self.stranded += 1
            settled: asyncio.Future[None] = self._loop.create_future()
            operation.done.add_done_callback(lambda _: self._release_stranded(settled))
            raise BufferStranded("ucx: the receiver neither takes the bytes nor lets them go", settled)

    def _release_stranded(self, settled: asyncio.Future[None]) -> None:
        self.stranded -= 1
        if not settled.done():
            settled.set_result(None)

    def _await_withdrawals(self) -> None:
        """Keep one receive standing for senders that gave up."""
        notice = bytearray(_WITHDRAW_BYTES)
        standing = self._post_receive(_WITHDRAW_TAG, region_of(notice, writable=True))
        standing.done.add_done_callback(lambda done: self._on_withdrawal(done.result(), notice))

    def _on_withdrawal(self, status: int, notice: bytearray) -> None:
        if self._closed or self._worker is None or status == ERR_CANCELED:
            return
        tag = int.from_bytes(notice, "little")
        self._await_withdrawals()
        # A receive that is posted for the tag has matched it: it ends by itself. Otherwise let go of the offer.
        if status == OK and not any(op.tag == tag and op.peer is None for op in self._operations.values()):
            self._discard(tag)

    def _rebuild(self, reason: str) -> None:
        """Replace the UCX worker: nothing writes through one that no longer exists."""
        self.rebuilt += 1
        self._close_worker(reason)
        for peer in self._peers.values():
            peer.watch.stop()
        self._peers.clear()
        self._open_worker()

    # ---- worker and peers -----------------------------------------------------------------------------------

    def _open_worker(self) -> None:
        self._worker = self._ucxx.UCXWorker(self._context, enable_delayed_submission=False, enable_python_future=False)
        self._worker.init_blocking_progress_mode()
        self._address = self._identity.pack() + self._worker.address.tobytes()
        self._fd = self._worker.epoll_file_descriptor
        self._loop.add_reader(self._fd, self._progress)
        self._await_withdrawals()

    def _close_worker(self, reason: str) -> None:
        for handle in (self._turn, self._tick, self._device_tick):
            if handle is not None:
                handle.cancel()
        self._turn = self._tick = self._device_tick = None
        self._loop.remove_reader(self._fd)
        operations, self._operations = list(self._operations.values()), {}
        self._voids.clear()
        for operation in operations:
            self._api.cancel(self._worker.handle, operation.request)
        self._drain()
        self._worker = None  # the last reference: UCX tears endpoints and mappings down before this returns
        for operation in operations:
            self._settle(operation, ERR_CANCELED)
        if operations:
            log.debug("ucx worker closed", reason=reason, ended=len(operations))

    def _drain(self) -> None:
        """Finish the copies under way, and nothing else meanwhile: where this process reads a peer's memory (CMA), UCX
        aborts the process if the worker is closed before. No peer can delay that. The deadline is of processor time: a
        busy machine may need long for a short copy."""
        until_s = time.thread_time() + DRAIN_S
        while self._worker.progress_once() and time.thread_time() < until_s:
            pass

    def _peer(self, address: bytes) -> _Peer:
        if self._closed:
            raise TransferError("ucx: the link is closed")
        known = self._peers.get(address)
        if known is not None:
            return known
        identity = ProcessIdentity.unpack(address)
        for old in [peer for peer in self._peers.values() if peer.identity == identity]:
            self.forget(old.address)  # the same link, rebuilt: its old worker exists no more
        try:
            endpoint = self._api.endpoint(self._worker.handle, address[ProcessIdentity.SIZE :])
        except UcpError as error:
            raise TransferError(f"ucx: no path to the peer: {error}") from error
        peer = self._peers[address] = _Peer(address, identity, endpoint)
        peer.watch = ProcessWatch(
            identity, self._loop, lambda: self._close_peer(peer, "the receiving process has died")
        )
        return peer

    def _close_peer(self, peer: _Peer, reason: str) -> None:
        """End the sends to a peer that is gone: it reads nothing any more."""
        if peer.closed:
            return
        peer.closed = True
        peer.watch.stop()
        if self._worker is None:
            return
        self._progress()
        pending = [operation for operation in self._operations.values() if operation.peer is peer]
        for operation in pending:
            del self._operations[id(operation)]
            self._api.free(operation.request)
            self._settle(operation, _ERR_UNREACHABLE)
        if pending:
            log.info("transfers ended", reason=reason, count=len(pending))

    def _on_endpoint_failed(self, endpoint: int, status: int) -> None:
        """Schedule `_replace_endpoint`. Called inside `progress_once`, which must return before another call of UCX."""
        self._loop.call_soon(self._replace_endpoint, endpoint, status)

    def _replace_endpoint(self, endpoint: int, status: int) -> None:
        """Forget a peer whose endpoint failed: the next send dials it anew, if it still lives."""
        for peer in [peer for peer in self._peers.values() if peer.endpoint == endpoint]:
            log.info("ucx endpoint failed", error=self._api.text(status))
            peer.endpoint = None  # UCX has taken it down itself
            self.forget(peer.address)

    def _close_endpoint(self, peer: _Peer) -> None:
        if self._worker is None or peer.endpoint is None:
            return
        try:
            request = self._api.close_endpoint(peer.endpoint)
        except UcpError as error:
            log.debug("ucx endpoint could not be closed", error=str(error))
            return
        if request is not None:
            self._api.free(request)  # no caller waits for it; UCX releases it whenever it gets that far

    def _text(self, status: int) -> str:
        return "the peer is gone" if status == _ERR_UNREACHABLE else self._api.text(status)
