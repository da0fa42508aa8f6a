"""The caches of all ranks of a worker as the transfer agent sees them: whole blocks, by way of rank 0's host memory.

    ranks' caches ──gather──▶ whole blocks ══ message over the link ══▶ whole blocks ──check, scatter──▶ ranks' caches

Takes the place of `CacheMemory` where a worker has several ranks. A message is what a worker of one device would send,
so workers of any degrees exchange KV. Every message has host memory of its own while it is under way, and is copied
once more than the cache of one device.

What blocks here is called in the agent's threads. Decides how memory is copied and summed, never what is sent.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cohort.common.engine import run_checksum
from cohort.common.engine.followers import Followers
from cohort.common.engine.kv_tensors import KvTensors
from cohort.common.engine.rank_blocks import RankBlocks
from cohort.common.engine.rank_messages import RankLost
from cohort.common.engine.rank_shares import RankShare
from cohort.common.engine.transfer_memory import Message, Span
from cohort.common.errors import TransferError
from cohort.common.types import KvGeometry


class GroupMemory:
    """See `RunMemory`; `kv` is rank 0's."""

    on_device = True  # the blocks are not this process's to read, and what does is never done on the event loop
    staged = True

    def __init__(self, kv: KvTensors, followers: Followers, share: RankShare, whole: KvGeometry) -> None:
        """`whole`: of a block over all ranks."""
        self.block_bytes = whole.block_bytes
        self._own = RankBlocks(kv)
        self._followers = followers
        self._shares = [RankShare(share.geometry, rank, share.degree) for rank in range(share.degree)]
        self._shape = (whole.num_layers, 2, whole.num_kv_heads, self._own.block_shape[-1])
        self._buffers: dict[int, Tensor] = {}

    def buffer(self, message: Message) -> object:
        return self._whole(message).view(-1).numpy()

    def outgoing(self, messages: Sequence[Message], *, summed: bool) -> list[int]:
        """Raises `TransferError`."""
        for message in messages:
            self.gather(message.spans, self._whole(message))
        return [run_checksum.crc32(self._whole(message).view(-1)) for message in messages] if summed else []

    def sums(self, messages: Sequence[Message], likes: Sequence[int]) -> list[int]:
        return run_checksum.alike_all([self._whole(message).view(-1) for message in messages], likes)

    def scatter(self, message: Message, checksum: int) -> bool:
        """Raises `TransferError`."""
        if checksum and self.sums([message], [checksum]) != [checksum]:
            return False
        self.spread(message.spans, self._whole(message))
        return True

    def release(self, message: Message) -> None:
        self._buffers.pop(id(message), None)

    def gather(self, spans: Sequence[Span], whole: Tensor) -> None:
        """whole [blocks, layers, 2, all KV heads, bytes] = the blocks of these spans. Heads that several ranks have are
        read once. Raises `TransferError`."""
        self._own.read(spans, self._heads(whole, 0))
        parts = [self._own.empty(spans) if share.kv_is_first_copy else None for share in self._shares[1:]]
        try:
            self._followers.read_blocks(spans, parts)
        except RankLost as error:
            raise TransferError(str(error)) from error
        for rank, part in enumerate(parts, start=1):
            if part is not None:
                self._heads(whole, rank).numpy()[:] = part.numpy()

    def spread(self, spans: Sequence[Span], whole: Tensor) -> None:
        """The way back of `gather`."""
        self._own.write(spans, self._heads(whole, 0))
        parts = []
        for rank in range(1, len(self._shares)):
            part = self._own.empty(spans)
            part.numpy()[:] = self._heads(whole, rank).numpy()
            parts.append(part)
        try:
            self._followers.write_blocks(spans, parts)
        except RankLost as error:
            raise TransferError(str(error)) from error

    def _heads(self, whole: Tensor, rank: int) -> Tensor:
        first, end = self._shares[rank].kv_heads
        return whole[:, :, :, first:end]

    def _whole(self, message: Message) -> Tensor:
        """The message's memory, from its first mention until `release`."""
        found = self._buffers.get(id(message))
        if found is None:
            found = self._buffers[id(message)] = torch.empty((message.num_blocks, *self._shape), dtype=torch.uint8)
        return found
