"""Agent that moves a `WorkerMachine`'s runs over its KV links, checks them, and reports each one exactly once.

Owned by the worker loop, on its event loop. A run that is not reported holds its blocks forever, so every path ends in
`on_sent` or `on_received`; if a link cannot promise silence yet, only once it can.

A transfer's runs go concurrently, at most `runs_at_once` of them and as many as the link to that peer carries in time
(`LinkRates`); after a failure none begins any more. Scattered runs are gathered into staging memory and go as one
message under the first one's tag, as the announcement says (`run_checksum.JOINED`): the sender alone decides it. Sums
and copies are made in threads.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeVar

import structlog

from cohort.common.clock import Clock
from cohort.common.engine.transfer.run_checksum import JOINED, of_ranks, ranks_of, sum_of
from cohort.common.engine.transfer.transfer_memory import SLOT_BYTES, SLOTS, Message, RunMemory, Slots, Span
from cohort.common.errors import BufferStranded, ChecksumMismatch, TransferError, TransferTimeout
from cohort.common.machines.effects import ReceiveRuns, Run, SendRuns
from cohort.common.messages import KvChunk, KvRun
from cohort.common.process.metrics import TransferMetrics
from cohort.common.transport.kv_link import KvLink
from cohort.common.transport.uninterrupted import in_thread

_INLINE_BYTES = 256 * 1024  # more than that of host memory is summed and copied in a thread, the device's always
_SCATTERED_BLOCKS = 4  # runs shorter than that on average are gathered
# … and in host memory if they are smaller than that, on average: there both copies take processor time. Measured for 32
# runs: at 64 KiB gathering takes half the time that single messages take, at 256 KiB as much, at 2 MiB a third more.
_SCATTERED_BYTES = 256 * 1024
_THREADS = 2
RUNS_AT_ONCE = 16
"""Maximum runs of one transfer on the link, at either end."""
_RECEIVE_TIMEOUTS = 10.0
"""Multiple of a run's deadline that the slowest may take while others of its peer arrive."""
FIRST_WINDOW_BYTES = 8 << 20
WINDOW_SHARE = 0.25
"""Share of `run_timeout_s` that the bytes under way may take."""
MEMORY_BYTES = 64 << 20
"""Bytes after which earlier measurements count a half."""
LEAST_S = 0.05
"""Minimum time of a link in use, or a quarter of the window, before a rate is published."""
PUBLISH_CHANGE = 0.1
"""Share by which a rate must differ from the published one."""
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class _Sending:
    runs: tuple[Run, ...]
    message: Message


@dataclass(frozen=True, slots=True)
class TransferOptions:
    """Bounds of an agent's runs; a test turns the sums off or makes them many."""

    run_timeout_s: float
    checksums: bool = True
    runs_at_once: int = RUNS_AT_ONCE


class TransferAgent:
    def __init__(
        self,
        links: Mapping[str, KvLink],
        memory: RunMemory,
        options: TransferOptions,
        *,
        clock: Clock,
        metrics: TransferMetrics,
        announce: Callable[[str, KvChunk], None],
        on_sent: Callable[[int, str | None], object],
        on_received: Callable[[int, int, str | None], object],
        on_measured: Callable[[str, float], object] = lambda peer, bytes_per_s: None,
    ) -> None:
        """`memory` has 2 · `SLOTS` slots: the first half is for sending, the second for receiving."""
        self._links = links
        self._memory = memory
        self._checksums = options.checksums
        self._run_timeout_s = options.run_timeout_s
        self._runs_at_once = options.runs_at_once
        self._clock = clock
        self._metrics = metrics
        self._announce = announce
        self._on_sent = on_sent
        self._on_received = on_received
        self._rates = LinkRates(options.run_timeout_s, clock.now_s, self._measured)
        self._on_measured = on_measured
        self._arriving: dict[str, set[asyncio.Timeout]] = {}
        """Deadlines of runs that are waited for, by the peer that sends them."""
        self._paths: dict[tuple[str, str], str] = {}
        self._tasks: dict[int, set[asyncio.Task[None]]] = {}
        self._announcing: dict[int, asyncio.Lock] = {}
        """Locks by lease. The receiver takes a tag below the last announced one for a repetition, so sends are
        announced in their order, also when the sums of the first take a thread and those of the second do not."""
        self._peer_addresses: dict[tuple[str, str], bytes] = {}
        self._send_slots, self._receive_slots = Slots(range(SLOTS)), Slots(range(SLOTS, 2 * SLOTS))
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="kv-transfers")
        self._sums = _Sums(memory, self._threads)
        self.quarantined_blocks = 0

    @property
    def addresses(self) -> dict[str, bytes]:
        return {name: link.address() for name, link in self._links.items()}

    def send(self, effect: SendRuns) -> None:
        known = self._peer_addresses.get((effect.peer, effect.link))
        if known is not None and known != effect.address:
            self._links[effect.link].forget(known)  # the peer is another process now, or moved
            self._rates.forget(effect.peer)
        self._peer_addresses[effect.peer, effect.link] = effect.address
        self._spawn(effect.lease_id, self._send(effect), f"send {effect.attempt}")

    def receive(self, effect: ReceiveRuns) -> None:
        # In order, as they are sent: what a sender has under way is always among what is posted here.
        at_once = asyncio.Semaphore(self._runs_at_once)
        for runs in _joined(effect.runs):
            self._spawn(effect.lease_id, self._receive(effect, runs, at_once), f"receive {effect.lease_id}")

    def cancel(self, lease_id: int) -> None:
        """Stop what is in flight for a lease; each run still reports."""
        for task in list(self._tasks.get(lease_id, ())):
            # Not at once: a task that is cancelled before its first turn never runs, and would report nothing.
            asyncio.get_running_loop().call_soon(task.cancel)

    async def close(self) -> None:
        """Cancel everything and wait until nothing reads or writes the cache any more."""
        await asyncio.sleep(0)  # see `cancel`
        tasks = [task for group in self._tasks.values() for task in group]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=5.0)
        for link in self._links.values():
            await link.close()
        self._threads.shutdown(wait=False)

    def _spawn(self, lease_id: int, work: Awaitable[None], name: str) -> None:
        async def run() -> None:
            await work

        task = asyncio.get_running_loop().create_task(run(), name=name)
        group = self._tasks.setdefault(lease_id, set())
        group.add(task)

        def done(finished: asyncio.Task[None]) -> None:
            group.discard(finished)
            if not group and self._tasks.get(lease_id) is group:
                del self._tasks[lease_id]
                self._announcing.pop(lease_id, None)
            if not finished.cancelled() and (error := finished.exception()) is not None:
                structlog.get_logger(__name__).critical("transfer task failed", task=name, exc_info=error)

        task.add_done_callback(done)

    # -- sending -----------------------------------------------------------------------------------------------

    async def _send(self, effect: SendRuns) -> None:
        """Announce the messages, then push them concurrently. Reports each run, also when cancelled in between."""
        unreported = self._messages_of(effect)
        sendings = list(unreported)
        failures: list[str] = []

        def ended(sending: _Sending, error: str | None) -> None:
            unreported.remove(sending)
            for _ in sending.runs:
                self._on_sent(effect.lease_id, error)

        async def send(sending: _Sending) -> None:
            stranded: BufferStranded | None = None
            async with at_once:
                error = failures[0] if failures else None
                if error is None:
                    try:
                        await self._push(effect, sending)
                    except BufferStranded as failure:
                        error, stranded = self._failed(effect.link, failure), failure
                    except TransferError as failure:
                        error = self._failed(effect.link, failure)
                    if error is not None:
                        failures.append(error)
            if stranded is not None and sending.message.slot is None:
                await self._quarantine(sending.message.num_blocks, stranded)
                self._free(sending.message, self._send_slots)
            elif stranded is not None:  # the link still reads the slot, not the blocks
                stranded.settled.add_done_callback(lambda _: self._free(sending.message, self._send_slots))
            else:
                self._free(sending.message, self._send_slots)
            ended(sending, error)

        at_once, outcome = asyncio.Semaphore(self._runs_at_once), "aborted"
        try:
            async with self._announcing.setdefault(effect.lease_id, asyncio.Lock()):
                sums = await self._prepare([sending.message for sending in sendings])
                sums = sums or [of_ranks(self._memory.ranks)] * len(sendings)
                self._announce(effect.peer, _announcement(effect, sendings, sums))
            async with asyncio.TaskGroup() as tasks:
                for sending in sendings:
                    tasks.create_task(send(sending))
        except asyncio.CancelledError:
            self._metrics.failures(effect.link, "aborted").inc()
        except TransferError as failure:  # before anything was announced
            outcome = self._failed(effect.link, failure)
        finally:
            for sending in list(unreported):
                self._free(sending.message, self._send_slots)
                ended(sending, outcome)

    async def _push(self, effect: SendRuns, sending: _Sending) -> None:
        """Send a message, once the bytes under way to this peer leave room for it."""
        nbytes = sending.message.num_blocks * self._memory.block_bytes
        await self._rates.begin(effect.peer, effect.link, nbytes)
        started_s, arrived = self._clock.now_s(), False
        link, tag = self._links[effect.link], sending.runs[0].tag
        try:
            buffer = self._memory.buffer(sending.message)
            await link.send(effect.address, tag, buffer, timeout_s=self._run_timeout_s)
            arrived = True
        finally:
            self._rates.end(effect.peer, effect.link, nbytes, arrived=arrived)
        self._moved(effect.link, "sent", sending.message, started_s)
        self._note_path(effect.peer, effect.link, link.path(effect.address))

    def _messages_of(self, effect: SendRuns) -> list[_Sending]:
        """Return the runs as they lie, or gathered as far as slots are free."""
        found: list[_Sending] = []
        host, ranks = effect.from_host, self._memory.ranks_at(effect.address)
        together: list[Run] = []
        for run in (*effect.runs, None):
            if run is not None and self._fits(together, run, effect):
                together.append(run)
                continue
            slot = self._send_slots.take_now() if len(together) > 1 else None
            if slot is None:
                for each in together:
                    found.append(_Sending((each,), Message((Span(each.source, each.num_blocks, host),), None, ranks)))
            else:
                spans = tuple(Span(each.source, each.num_blocks, host) for each in together)
                found.append(_Sending(tuple(together), Message(spans, slot, ranks)))
            together = [] if run is None else [run]
        return found

    def _fits(self, together: Sequence[Run], run: Run, effect: SendRuns) -> bool:
        if not together:
            return True
        blocks = sum(each.num_blocks for each in together) + run.num_blocks
        return self._gathers(effect) and blocks * self._memory.block_bytes <= SLOT_BYTES

    def _gathers(self, effect: SendRuns) -> bool:
        """Return whether copying these runs twice costs less than as many messages."""
        if self._memory.on_device and effect.from_host:
            return False  # not by way of the device
        blocks, runs = sum(run.num_blocks for run in effect.runs), len(effect.runs)
        small = self._memory.on_device or blocks * self._memory.block_bytes < _SCATTERED_BYTES * runs
        return small and blocks < _SCATTERED_BLOCKS * runs

    async def _prepare(self, messages: Sequence[Message]) -> list[int]:
        """Gather everything, then sum it, with one wait."""
        gathered = any(message.slot is not None or self._memory.in_parts(message) for message in messages)
        if not self._checksums and not gathered:
            return []
        return await self._blocking(
            sum(message.num_blocks for message in messages),
            lambda: self._memory.outgoing(messages, summed=self._checksums),
        )

    # -- receiving ---------------------------------------------------------------------------------------------

    async def _receive(self, effect: ReceiveRuns, runs: tuple[Run, ...], at_once: asyncio.Semaphore) -> None:
        error: str | None = "aborted"
        spans = tuple(Span(run.target, run.num_blocks) for run in runs)
        ranks = ranks_of(runs[0].checksum)
        message = Message(spans, None, ranks)
        try:
            async with at_once:
                link = self._links.get(effect.link)
                if link is None:
                    raise TransferError(f"no {effect.link} link here")
                if len(runs) > 1:
                    message = Message(spans, await self._slot_for(message), ranks)
                started_s = self._clock.now_s()
                await self._take(link, effect.peer, runs[0].tag, self._memory.buffer(message))
            await self._arrived(message, sum_of(runs[0].checksum) if self._checksums else 0)
            self._moved(effect.link, "received", message, started_s)
            error = None
        except BufferStranded as failure:
            error = self._failed(effect.link, failure)
            await self._quarantine(message.num_blocks, failure)
        except TransferError as failure:
            error = self._failed(effect.link, failure)
        except asyncio.CancelledError:
            self._metrics.failures(effect.link, "aborted").inc()
        finally:
            self._free(message, self._receive_slots)
            for _ in runs:
                self._on_received(effect.lease_id, effect.round, error)

    async def _take(self, link: KvLink, peer: str, tag: int, buffer: object) -> None:
        """Receive a message, within `run_timeout_s` of its start or of anything else that arrives from that peer: what
        is sent concurrently over a slow link arrives in turn."""
        waits = self._arriving.setdefault(peer, set())
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._run_timeout_s) as timeout:
                waits.add(timeout)
                try:
                    await link.receive(tag, buffer, timeout_s=_RECEIVE_TIMEOUTS * self._run_timeout_s)
                finally:
                    waits.discard(timeout)
        except TimeoutError:
            raise TransferTimeout(f"{link.name}: nothing arrived for {self._run_timeout_s} s") from None
        finally:
            if not waits:
                self._arriving.pop(peer, None)
        if peer:
            for other in waits:
                if not other.expired():
                    other.reschedule(loop.time() + self._run_timeout_s)

    async def _slot_for(self, message: Message) -> int:
        if message.num_blocks * self._memory.block_bytes > SLOT_BYTES:
            raise TransferError(f"{message.num_blocks} gathered blocks are more than staging memory takes")
        try:
            async with asyncio.timeout(self._run_timeout_s):
                return await self._receive_slots.take()
        except TimeoutError:
            raise TransferTimeout(f"no staging memory within {self._run_timeout_s} s") from None

    async def _arrived(self, message: Message, checksum: int) -> None:
        """Check a message, and bring to its place what was gathered."""
        if message.slot is not None or self._memory.in_parts(message):
            right = await self._blocking(message.num_blocks, lambda: self._memory.scatter(message, checksum))
        else:
            right = not checksum or await self._sums.of(message, checksum) == checksum
        if not right:
            raise ChecksumMismatch(
                f"{message.num_blocks} blocks from {message.spans[0].first_block} differ from what was sent"
            )

    async def _blocking(self, num_blocks: int, work: Callable[[], _T]) -> _T:
        """Run `work` in a thread, unless it takes no time."""
        if not self._memory.on_device and num_blocks * self._memory.block_bytes <= _INLINE_BYTES:
            return work()
        return await in_thread(work, self._threads)

    def _free(self, message: Message, slots: Slots) -> None:
        self._memory.release(message)
        if message.slot is not None:
            slots.give_back(message.slot)

    def _moved(self, link: str, direction: str, message: Message, started_s: float) -> None:
        self._metrics.seconds(link, direction).observe(self._clock.now_s() - started_s)
        self._metrics.bytes(link, direction).inc(message.num_blocks * self._memory.block_bytes)

    def _measured(self, peer: str, link: str, bytes_per_s: float) -> None:
        self._metrics.bytes_per_s(link, peer).set(bytes_per_s)
        self._on_measured(peer, bytes_per_s)

    def _note_path(self, peer: str, link: str, path: str) -> None:
        """Report once by what path bytes reach a peer."""
        before = self._paths.get((peer, link))
        if path == before or not path:
            return
        self._paths[peer, link] = path
        if before is not None:
            self._metrics.paths(link, peer, before).set(0)
        self._metrics.paths(link, peer, path).set(1)
        structlog.get_logger(__name__).info("KV link in use", peer=peer, link=link, path=path)

    def _failed(self, link: str, failure: TransferError) -> str:
        reason = {TransferTimeout: "timeout", ChecksumMismatch: "checksum"}.get(type(failure), "error")
        self._metrics.failures(link, reason).inc()
        structlog.get_logger(__name__).warning("KV run failed", link=link, reason=reason, error=str(failure))
        return str(failure)

    async def _quarantine(self, blocks: int, failure: BufferStranded) -> None:
        """Wait for the link to release the run's blocks, which stay out of use until then and are reported later."""
        self.quarantined_blocks += blocks
        self._metrics.quarantined_blocks().set(self.quarantined_blocks)
        structlog.get_logger(__name__).error(
            "KV blocks kept out of use until the link lets go of them", reason=str(failure), blocks=blocks
        )
        while not failure.settled.done():
            # Even a cancelled transfer has to wait here: this is what the cancellation waits for.
            with suppress(asyncio.CancelledError):
                await asyncio.shield(failure.settled)
        self.quarantined_blocks -= blocks
        self._metrics.quarantined_blocks().set(self.quarantined_blocks)


class _Sums:
    """Sums of runs that arrive together, computed together: one call, one wait for the device."""

    def __init__(self, memory: RunMemory, threads: ThreadPoolExecutor) -> None:
        self._memory = memory
        self._threads = threads
        self._wanted: list[tuple[Message, int, asyncio.Future[int]]] = []
        self._computing: asyncio.Task[None] | None = None

    async def of(self, message: Message, like: int) -> int:
        """Return the sum in the form of `like`. Nothing reads the message's blocks afterwards, also when cancelled."""
        if not self._memory.on_device and message.num_blocks * self._memory.block_bytes <= _INLINE_BYTES:
            return self._memory.sums([message], [like])[0]
        loop = asyncio.get_running_loop()
        wanted = (message, like, loop.create_future())
        self._wanted.append(wanted)
        if self._computing is None:
            self._computing = loop.create_task(self._compute(), name="sums of KV runs")
        try:
            return await asyncio.shield(wanted[2])
        except asyncio.CancelledError:
            if wanted in self._wanted:
                self._wanted.remove(wanted)
            else:
                while not wanted[2].done():
                    with suppress(asyncio.CancelledError):
                        await asyncio.wait((wanted[2],))
            raise

    async def _compute(self) -> None:
        while self._wanted:
            together, self._wanted = self._wanted, []
            messages, likes = [message for message, _, _ in together], [like for _, like, _ in together]
            try:
                found = await in_thread(lambda m=messages, k=likes: self._memory.sums(m, k), self._threads)  # type: ignore[misc]
            except Exception as error:  # a device that fails: every one of these runs fails
                for _, _, future in together:
                    future.set_exception(TransferError(f"the runs' sums cannot be computed: {error}"))
            else:
                for (_, _, future), value in zip(together, found, strict=True):
                    future.set_result(value)
        self._computing = None


def _joined(runs: Sequence[Run]) -> list[tuple[Run, ...]]:
    found: list[list[Run]] = []
    for run in runs:
        if found and run.checksum & JOINED:
            found[-1].append(run)
        else:
            found.append([run])
    return [tuple(group) for group in found]


def _announcement(effect: SendRuns, sendings: Sequence[_Sending], sums: Sequence[int]) -> KvChunk:
    """Return the announcement. `sums`: of every message, as `run_checksum` has them."""
    runs = []
    for sending, checksum in zip(sendings, sums, strict=True):
        first, *others = sending.runs
        runs.append(KvRun(first.tag, first.target, first.num_blocks, checksum))
        runs += [KvRun(run.tag, run.target, run.num_blocks, JOINED) for run in others]
    return KvChunk(effect.attempt, effect.lease_id, effect.round, effect.link, runs)


@dataclass(slots=True)
class _Peer:
    under_way: int = 0
    since_s: float = 0.0
    """Time of the last measurement while bytes were under way."""
    bytes: float = 0.0
    seconds: float = 0.0
    published: float = 0.0
    waiting: deque[tuple[int, asyncio.Future[None]]] = field(default_factory=deque)

    @property
    def rate(self) -> float:
        """Bytes per second; 0 until known."""
        return self.bytes / self.seconds if self.seconds >= LEAST_S or self.bytes >= FIRST_WINDOW_BYTES else 0.0


class LinkRates:
    """Rates of the links to each peer, learned from every message sent there, and the window that follows for the next
    ones.

        begun ──▶ bytes under way ──▶ ended      rate = bytes that arrived / time in which any were under way

    A rate is of a peer and a link: messages side by side share it. What was measured last weighs most, by bytes, so
    that a link whose rate changes is known again after a few messages. At most a window of bytes is under way to a
    peer: what the link carries in a part of a run's deadline, so that something arrives well before any of them is
    given up. Without a rate the window is small. One message may always go.
    """

    def __init__(
        self, run_timeout_s: float, now_s: Callable[[], float], publish: Callable[[str, str, float], None]
    ) -> None:
        """`publish(peer, link, bytes_per_s)`: a rate is known, or differs from the last one reported."""
        self._window_s = WINDOW_SHARE * run_timeout_s
        self._now_s, self._publish = now_s, publish
        self._peers: dict[tuple[str, str], _Peer] = {}

    def rate(self, peer: str, link: str) -> float:
        known = self._peers.get((peer, link))
        return 0.0 if known is None else known.rate

    async def begin(self, peer: str, link: str, nbytes: int) -> None:
        """Wait until these bytes may go, in the order of the calls. Every call that returns needs an `end`."""
        known = self._peers.setdefault((peer, link), _Peer())
        if known.waiting or not self._may_go(known, nbytes):
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            entry = (nbytes, turn)
            known.waiting.append(entry)
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self.end(peer, link, nbytes, arrived=False)
                elif entry in known.waiting:
                    known.waiting.remove(entry)
                    self._let_go(known)
                raise
        else:
            self._go(known, nbytes)

    def end(self, peer: str, link: str, nbytes: int, *, arrived: bool) -> None:
        known = self._peers[peer, link]
        now_s = self._now_s()
        known.seconds += now_s - known.since_s
        known.since_s = now_s
        known.under_way -= nbytes
        if arrived:
            known.bytes += nbytes
            decay = 0.5 ** (nbytes / MEMORY_BYTES)
            known.bytes, known.seconds = known.bytes * decay, known.seconds * decay
        elif known.under_way == 0 and known.bytes == 0.0:
            known.seconds = 0.0  # nothing has ever arrived: a dead peer is not a slow link
        rate = known.rate
        if rate and abs(rate - known.published) > PUBLISH_CHANGE * known.published:
            known.published = rate
            self._publish(peer, link, rate)
        self._let_go(known)

    def forget(self, peer: str) -> None:
        """Forget the peer's rates: it is another process now, or elsewhere."""
        for key in [key for key, known in self._peers.items() if key[0] == peer and not known.under_way]:
            if not self._peers[key].waiting:
                del self._peers[key]

    def _may_go(self, known: _Peer, nbytes: int) -> bool:
        window = max(self._window_s * known.rate, FIRST_WINDOW_BYTES if not known.rate else 0)
        return known.under_way == 0 or known.under_way + nbytes <= window

    def _go(self, known: _Peer, nbytes: int) -> None:
        now_s = self._now_s()
        if known.under_way:
            known.seconds += now_s - known.since_s
        known.since_s = now_s
        known.under_way += nbytes

    def _let_go(self, known: _Peer) -> None:
        while known.waiting and self._may_go(known, known.waiting[0][0]):
            nbytes, turn = known.waiting.popleft()
            if not turn.done():
                self._go(known, nbytes)
                turn.set_result(None)
