"""One rank's cache as buffers for KV transfers: its heads of blocks, all of them or some.

    all its heads     the blocks as they lie, or gathered in a slot of staging memory: `CacheMemory`, as for a worker of
                      one rank
    some of them      cut out of every block into host memory that lasts as long as the message, or cut in from there

Only the end whose ranks hold more heads cuts, so between equal degrees nothing is copied that a worker of one rank
would not copy. Called by `rank_transfers` on every rank; what blocks here is called in threads.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from cohort.common.engine.cache.kv_tensors import KvTensors
from cohort.common.engine.device.streams import stream_for
from cohort.common.engine.ranks.kv_parts import Heads
from cohort.common.engine.ranks.rank_orders import Gather, Keyed, Place, Sum
from cohort.common.engine.transfer import run_checksum
from cohort.common.engine.transfer.transfer_memory import CacheMemory


class RankMemory:
    def __init__(self, kv: KvTensors, heads: Heads, *, staged: bool = True) -> None:
        """`kv` has the heads [first, end) of the whole model. `staged` as in `CacheMemory`."""
        self.heads, self.device = heads, kv.device
        self.cache = CacheMemory(kv, staged=staged)
        self._kv = kv
        self._stream = stream_for(kv.device)
        self._cut: dict[tuple[int, Heads], Tensor] = {}

    def buffer(self, keyed: Keyed, heads: Heads) -> object:
        """Return the buffer that a link reads or writes. Never blocks."""
        if heads == self.heads:
            return self.cache.buffer(keyed.message)
        return self._part(keyed, heads).view(-1).numpy()

    def gather(self, order: Gather) -> tuple[tuple[int, ...], ...]:
        """Fill the buffers. Return sums by message and heads, () unless they are requested."""
        messages = [keyed.message for keyed in order.messages]
        sums: dict[Heads, list[int]] = {}
        for heads in order.heads:
            if heads == self.heads:
                sums[heads] = self.cache.outgoing(messages, summed=order.summed)
                continue
            for keyed in order.messages:
                self._copy(keyed, heads, out=True)
            if order.summed:
                parts = [self._part(keyed, heads).view(-1) for keyed in order.messages]
                form = run_checksum.WEIGHTED if self.cache.on_device else 0
                sums[heads] = run_checksum.alike_all(parts, [form] * len(parts))
        if not order.summed:
            return ()
        return tuple(tuple(sums[heads][index] for heads in order.heads) for index in range(len(messages)))

    def sums(self, order: Sum) -> tuple[int, ...]:
        found = list[int]()
        for heads in order.heads:
            if heads == self.heads:
                found += self.cache.sums([order.keyed.message], [order.like])
            else:
                found += run_checksum.alike_all([self._part(order.keyed, heads).view(-1)], [order.like])
        return tuple(found)

    def place(self, order: Place) -> None:
        for heads in order.heads:
            if heads != self.heads:
                self._copy(order.keyed, heads, out=False)
            elif order.keyed.message.slot is not None:
                self.cache.scatter(order.keyed.message, 0)

    def drop(self, key: int) -> None:
        """Drop the buffers of this message, which nothing reads or writes any more."""
        for known in [known for known in self._cut if known[0] == key]:
            self._cut.pop(known, None)

    def _part(self, keyed: Keyed, heads: Heads) -> Tensor:
        """Return uint8 [blocks, layers, planes, heads, bytes of a block's head], the same until `drop`."""
        found = self._cut.get((keyed.key, heads))
        if found is None:
            _, layers, planes, _, *head = self._kv.blocks.shape
            size = head[0] * head[1] * self._kv.blocks.element_size()
            shape = (keyed.message.num_blocks, layers, planes, heads[1] - heads[0], size)
            found = self._cut[keyed.key, heads] = torch.empty(shape, dtype=torch.uint8)
        return found

    def _copy(self, keyed: Keyed, heads: Heads, *, out: bool) -> None:
        part = self._part(keyed, heads)
        with torch.inference_mode(), self._stream.use():
            for blocks, rows in self._pairs(keyed, heads, part):
                source, target = (blocks, rows) if out else (rows, blocks)
                if blocks.is_cuda:
                    target.copy_(source)
                else:  # NumPy copies in this thread alone: torch would wake a pool of threads beside the engine's
                    target.numpy()[:] = source.numpy()
            self._stream.mark().wait()

    def _pairs(self, keyed: Keyed, heads: Heads, part: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        first, own = 0, self.heads[0]
        _, layers, planes, of_rank, size = (*part.shape[:3], self.heads[1] - self.heads[0], part.shape[4])
        for span in keyed.message.spans:
            blocks = self._kv.run_view(span.first_block, span.num_blocks, host=span.host)
            view = blocks.view(span.num_blocks, layers, planes, of_rank, size)
            yield view[:, :, :, heads[0] - own : heads[1] - own], part[first : first + span.num_blocks]
            first += span.num_blocks


def filled(order: Gather | Sum | Place, memory: RankMemory) -> tuple[tuple[int, ...], ...]:
    """Follow an order about memory. Blocks; on any thread."""
    match order:
        case Gather():
            return memory.gather(order)
        case Sum():
            return (memory.sums(order),)
        case Place():
            memory.place(order)
            return ()
