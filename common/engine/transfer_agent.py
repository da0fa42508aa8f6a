"""Moves the runs a `WorkerMachine` asks for over its KV links, checks them, and reports every one back exactly once.

Owned by the worker loop, on its event loop. A run that is not reported keeps its blocks forever, so every path ends in
`on_sent` or `on_received`; where a link cannot promise silence yet, only once it can. Decides nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Protocol

import structlog
import torch

from cohort.common.clock import Clock
from cohort.common.engine import run_checksum
from cohort.common.engine.kv_tensors import KvTensors
from cohort.common.engine.streams import stream_for
from cohort.common.errors import BufferStranded, ChecksumMismatch, TransferError, TransferTimeout
from cohort.common.machines.effects import ReceiveRuns, Run, SendRuns
from cohort.common.messages import KvChunk, KvRun
from cohort.common.metrics import TransferMetrics
from cohort.common.transport.kv_link import KvLink

_INLINE_CHECKSUM_BYTES = 256 * 1024  # larger buffers are summed in a thread, so that the loop never stalls


class RunMemory(Protocol):
    """The cache as this agent sees it: buffers of neighbouring blocks, on the device or of the host pool."""

    def buffer(self, first_block: int, num_blocks: int, *, host: bool = False) -> object: ...

    def checksum(self, first_block: int, num_blocks: int, *, host: bool = False, like: int = 0) -> int:
        """A sum of the run's bytes, not 0, in the form that `like` has where given. May block; on any thread."""


class CacheMemory:
    """The cache tensors as transfer buffers."""

    def __init__(self, kv: KvTensors) -> None:
        self._kv = kv
        self._stream = stream_for(kv.device)  # sums must not wait for a step

    def buffer(self, first_block: int, num_blocks: int, *, host: bool = False) -> object:
        view = self._kv.run_view(first_block, num_blocks, host=host)
        return view if view.is_cuda else view.numpy()

    def checksum(self, first_block: int, num_blocks: int, *, host: bool = False, like: int = 0) -> int:
        view = self._kv.run_view(first_block, num_blocks, host=host)
        if self._kv.device.type == "cpu":
            return run_checksum.alike(view, like) if like else run_checksum.crc32(view)
        with torch.inference_mode(), self._stream.use():
            return run_checksum.alike(view, like) if like else run_checksum.weighted(view)


class TransferAgent:
    def __init__(
        self,
        links: Mapping[str, KvLink],
        memory: RunMemory,
        *,
        block_bytes: int,
        checksums: bool,
        run_timeout_s: float,
        clock: Clock,
        metrics: TransferMetrics,
        announce: Callable[[str, KvChunk], None],
        on_sent: Callable[[int, str | None], None],
        on_received: Callable[[int, int, str | None], None],
    ) -> None:
        self._links = links
        self._memory = memory
        self._block_bytes = block_bytes
        self._checksums = checksums
        self._run_timeout_s = run_timeout_s
        self._clock = clock
        self._metrics = metrics
        self._announce = announce
        self._on_sent = on_sent
        self._on_received = on_received
        self._tasks: dict[int, set[asyncio.Task[None]]] = {}
        self._peer_addresses: dict[tuple[str, str], bytes] = {}
        self.quarantined_blocks = 0

    @property
    def addresses(self) -> dict[str, bytes]:
        return {name: link.address() for name, link in self._links.items()}

    def send(self, effect: SendRuns) -> None:
        known = self._peer_addresses.get((effect.peer, effect.link))
        if known is not None and known != effect.address:
            self._links[effect.link].forget(known)  # the peer is another process now, or moved
        self._peer_addresses[effect.peer, effect.link] = effect.address
        self._spawn(effect.lease_id, self._send(effect), f"send {effect.attempt}")

    def receive(self, effect: ReceiveRuns) -> None:
        for run in effect.runs:
            self._spawn(effect.lease_id, self._receive(effect, run), f"receive {effect.lease_id}")

    def cancel(self, lease_id: int) -> None:
        """Stop what is in flight for a lease; each run still reports."""
        for task in list(self._tasks.get(lease_id, ())):
            task.cancel()

    async def close(self) -> None:
        """Cancel everything and wait until nothing reads or writes the cache any more."""
        tasks = [task for group in self._tasks.values() for task in group]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=5.0)
        for link in self._links.values():
            await link.close()

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
            if not finished.cancelled() and (error := finished.exception()) is not None:
                structlog.get_logger(__name__).critical("transfer task failed", task=name, exc_info=error)

        task.add_done_callback(done)

    async def _send(self, effect: SendRuns) -> None:
        """Announce, then push the runs side by side. Reports each run, also when cancelled in between."""
        reported = 0
        try:
            host = effect.from_host
            sums = [await self._checksum(run.source, run.num_blocks, host=host) for run in effect.runs]
            self._announce(
                effect.peer,
                KvChunk(
                    effect.attempt,
                    effect.lease_id,
                    effect.round,
                    effect.link,
                    [
                        KvRun(run.tag, run.target, run.num_blocks, checksum)
                        for run, checksum in zip(effect.runs, sums, strict=True)
                    ],
                ),
            )
            link = self._links[effect.link]
            for run in effect.runs:
                buffer = self._memory.buffer(run.source, run.num_blocks, host=host)
                error: str | None = None
                started_s = self._clock.now_s()
                try:
                    await link.send(effect.address, run.tag, buffer, timeout_s=self._run_timeout_s)
                    self._moved(effect.link, "sent", run, started_s)
                except BufferStranded as failure:
                    error = self._failed(effect.link, failure)
                    await self._quarantine(run, failure)
                except TransferError as failure:
                    error = self._failed(effect.link, failure)
                reported += 1
                self._on_sent(effect.lease_id, error)
        except asyncio.CancelledError:
            self._metrics.failures(effect.link, "aborted").inc()
        finally:
            for _ in effect.runs[reported:]:
                self._on_sent(effect.lease_id, "aborted")

    async def _receive(self, effect: ReceiveRuns, run: Run) -> None:
        error: str | None = "aborted"
        try:
            link = self._links.get(effect.link)
            if link is None:
                raise TransferError(f"no {effect.link} link here")
            started_s = self._clock.now_s()
            buffer = self._memory.buffer(run.target, run.num_blocks)
            await link.receive(run.tag, buffer, timeout_s=self._run_timeout_s)
            if run.checksum and await self._checksum(run.target, run.num_blocks, like=run.checksum) != run.checksum:
                raise ChecksumMismatch(f"{run.num_blocks} blocks from {run.target} differ from what was sent")
            self._moved(effect.link, "received", run, started_s)
            error = None
        except BufferStranded as failure:
            error = self._failed(effect.link, failure)
            await self._quarantine(run, failure)
        except TransferError as failure:
            error = self._failed(effect.link, failure)
        except asyncio.CancelledError:
            self._metrics.failures(effect.link, "aborted").inc()
        self._on_received(effect.lease_id, effect.round, error)

    async def _checksum(self, first_block: int, num_blocks: int, *, host: bool = False, like: int = 0) -> int:
        if not self._checksums:
            return 0
        summed = partial(self._memory.checksum, first_block, num_blocks, host=host, like=like)
        if num_blocks * self._block_bytes <= _INLINE_CHECKSUM_BYTES:
            return summed()
        # Shielded: a cancelled await must not leave a thread reading blocks that are freed next.
        summing = asyncio.ensure_future(asyncio.to_thread(summed))
        try:
            return await asyncio.shield(summing)
        except asyncio.CancelledError:
            with suppress(asyncio.CancelledError):
                await summing
            raise

    def _moved(self, link: str, direction: str, run: Run, started_s: float) -> None:
        self._metrics.seconds(link, direction).observe(self._clock.now_s() - started_s)
        self._metrics.bytes(link, direction).inc(run.num_blocks * self._block_bytes)

    def _failed(self, link: str, failure: TransferError) -> str:
        reason = {TransferTimeout: "timeout", ChecksumMismatch: "checksum"}.get(type(failure), "error")
        self._metrics.failures(link, reason).inc()
        structlog.get_logger(__name__).warning("KV run failed", link=link, reason=reason, error=str(failure))
        return str(failure)

    async def _quarantine(self, run: Run, failure: BufferStranded) -> None:
        """This run is reported once the link has released its blocks; until then they stay out of use."""
        self.quarantined_blocks += run.num_blocks
        self._metrics.quarantined_blocks().set(self.quarantined_blocks)
        structlog.get_logger(__name__).error(
            "KV blocks kept out of use until the link lets go of them", reason=str(failure), blocks=run.num_blocks
        )
        while not failure.settled.done():
            # Even a cancelled transfer has to wait here: this is what the cancellation waits for.
            with suppress(asyncio.CancelledError):
                await asyncio.shield(failure.settled)
        self.quarantined_blocks -= run.num_blocks
        self._metrics.quarantined_blocks().set(self.quarantined_blocks)
