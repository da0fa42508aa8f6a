"""The cache as the transfer agent sees it: buffers of neighbouring blocks, staging memory, sums over both.

    scattered runs ──gather──▶ slot of staging memory ══ one message over the link ══▶ slot ──check, scatter──▶ runs

Owned by the worker loop. What blocks here is called in the agent's threads, and waits for the device once a call.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from cohort.common.engine.cache.kv_tensors import KvTensors
from cohort.common.engine.device.streams import stream_for
from cohort.common.engine.transfer import run_checksum

SLOT_BYTES = 16 << 20
SLOTS = 4
STAGING_BYTES = 2 * SLOTS * SLOT_BYTES
"""Bytes of a worker that moves KV, on its device; `model_runner` leaves them free there."""


@dataclass(frozen=True, slots=True)
class Span:
    """Neighbouring blocks, of the device or of the host pool."""

    first_block: int
    num_blocks: int
    host: bool = False


@dataclass(frozen=True, slots=True)
class Message:
    """Unit of the link's work: one span as it lies, or several in a slot. `ranks`: of the worker at the other end."""

    spans: tuple[Span, ...]
    slot: int | None = None
    ranks: int = 1

    @property
    def num_blocks(self) -> int:
        return sum(span.num_blocks for span in self.spans)


class RunMemory(Protocol):
    """Memory of runs. `on_device`: blocks and slots are not the processor's to read. `ranks`: of this worker."""

    on_device: bool
    ranks: int
    block_bytes: int

    def ranks_at(self, address: bytes) -> int:
        """Return the number of ranks of the worker at this address; 1 for no address, which the link refuses."""

    def in_parts(self, message: Message) -> bool:
        """Return whether it always goes by way of `outgoing` and `scatter`, and `sums` does not take it."""

    def buffer(self, message: Message) -> object:
        """Return the buffer that the link reads or writes. Never blocks."""

    def outgoing(self, messages: Sequence[Message], *, summed: bool) -> list[int]:
        """Gather the messages that have a slot. Return a sum of every message's bytes, never 0, or [] unless `summed`.
        Blocks, with one wait for the device; on any thread."""

    def sums(self, messages: Sequence[Message], likes: Sequence[int]) -> list[int]:
        """Return sums of filled buffers, in the forms that `likes` have. Blocks likewise."""

    def scatter(self, message: Message, checksum: int) -> bool:
        """Copy a message from slot to spans; return False instead if its sum is not `checksum` (0: unknown). Blocks."""

    def release(self, message: Message) -> None:
        """Release a message's buffer, which nothing reads or writes any more."""


class CacheMemory:
    """Cache tensors as transfer buffers: of a worker of one rank to another such, or of one rank of a group."""

    def __init__(self, kv: KvTensors, *, staged: bool = True) -> None:
        """`staged`: whether there are slots; a worker that moves no KV needs none. On the device they take their memory
        here; on the host a page costs nothing until it is used."""
        self._kv = kv
        self._stream = stream_for(kv.device)  # copies and sums must not wait for a step
        self.on_device = kv.device.type != "cpu"
        self.block_bytes = kv.block_bytes
        slots = 2 * SLOTS if staged else 0
        self._slots = torch.empty((slots, SLOT_BYTES), dtype=torch.uint8, device=kv.device)

    def buffer(self, message: Message) -> object:
        view = self._view(message)
        return view if view.is_cuda else view.numpy()

    def outgoing(self, messages: Sequence[Message], *, summed: bool) -> list[int]:
        with torch.inference_mode(), self._stream.use():
            for message in messages:
                if message.slot is not None:
                    self._copy(message, into_slot=True)
            if not summed:
                self._stream.mark().wait()
                return []
            views = [self._view(message) for message in messages]
            if self.on_device:
                return run_checksum.weighted_all(views)
            return [run_checksum.crc32(view) for view in views]

    def sums(self, messages: Sequence[Message], likes: Sequence[int]) -> list[int]:
        with torch.inference_mode(), self._stream.use():
            return run_checksum.alike_all([self._view(message) for message in messages], likes)

    def scatter(self, message: Message, checksum: int) -> bool:
        if checksum and self.sums([message], [checksum]) != [checksum]:
            return False
        with torch.inference_mode(), self._stream.use():
            self._copy(message, into_slot=False)
            self._stream.mark().wait()
        return True

    def _view(self, message: Message) -> Tensor:
        """Return the message's bytes, uint8."""
        if message.slot is not None:
            return self._slots[message.slot, : message.num_blocks * self.block_bytes]
        (span,) = message.spans
        return self._kv.run_view(span.first_block, span.num_blocks, host=span.host)

    def _copy(self, message: Message, *, into_slot: bool) -> None:
        """Copy between a message's slot and its spans, on the calling thread's stream."""
        views = [self._kv.run_view(span.first_block, span.num_blocks, host=span.host) for span in message.spans]
        slot = self._view(message)
        if self.on_device and not any(span.host for span in message.spans):
            self._copy_on_device(message, slot, into_slot=into_slot)
            return
        offset = 0
        for view in views:
            part = slot[offset : offset + len(view)]
            source, target = (view, part) if into_slot else (part, view)
            if self.on_device:
                target.copy_(source, non_blocking=True)
            else:  # NumPy copies in this thread alone: torch would wake a pool of threads beside the engine's
                target.numpy()[:] = source.numpy()
            offset += len(view)

    def _copy_on_device(self, message: Message, slot: Tensor, *, into_slot: bool) -> None:
        blocks = [
            block for span in message.spans for block in range(span.first_block, span.first_block + span.num_blocks)
        ]
        pool = self._kv.blocks.view(len(self._kv.blocks), -1)
        rows = slot.view(pool.dtype).view(len(blocks), -1)
        index = torch.tensor(blocks).to(pool.device, non_blocking=True)
        if into_slot:
            torch.index_select(pool, 0, index, out=rows)
        else:
            pool.index_copy_(0, index, rows)


class Slots:
    """Free slots of one direction. On the event loop only. A sender takes what is free and never waits, and says that
    it gathered only once it holds the slot. So a receiver that waits for one waits for transfers whose bytes are on
    their way, and no circle of workers waits for itself."""

    def __init__(self, slots: Sequence[int]) -> None:
        self._free = list(slots)
        self._waiting: deque[asyncio.Future[int]] = deque()

    @property
    def free(self) -> int:
        return len(self._free)

    def take_now(self) -> int | None:
        return self._free.pop() if self._free else None

    async def take(self) -> int:
        if self._free:
            return self._free.pop()
        waiting: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiting)
        try:
            return await waiting
        except asyncio.CancelledError:
            if waiting.done() and not waiting.cancelled():
                self.give_back(waiting.result())
            raise

    def give_back(self, slot: int) -> None:
        while self._waiting:
            waiting = self._waiting.popleft()
            if not waiting.done():
                waiting.set_result(slot)
                return
        self._free.append(slot)
