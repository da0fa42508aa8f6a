"""KV blocks of all ranks as one: gathered at rank 0 into the form that a worker of one device has, and back.

    rank 0's cache ─┐                                ┌─▶ rank 0's cache
    rank 1's cache ─┼─▶ whole blocks ══ KV link ══▶ …┼─▶ rank 1's cache
    rank n's cache ─┘   (host memory)                └─▶ rank n's cache

What travels between workers is therefore the same whatever their degrees are. A follower serves its blocks on a thread
and a socket pair of its own (`serve`), so that transfers go on while steps compute. A request names spans of
neighbouring blocks; the bytes of the follower's heads follow in the direction of the copy, and one byte says that they
lie in their blocks.

Called by `group_memory` on rank 0 and by the follower's process. Decides nothing about who owns a block.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any, cast

import msgspec
import torch
from torch import Tensor

from cohort.common.engine.kv_tensors import KvTensors
from cohort.common.engine.rank_messages import receive_exactly
from cohort.common.engine.streams import stream_for
from cohort.common.engine.transfer_memory import Span

_HEAD_BYTES = 8
DONE = b"\x01"


class Wanted(msgspec.Struct, frozen=True):
    """Blocks of one rank: to be sent, or to be written from the bytes that follow."""

    write: bool
    spans: tuple[Span, ...]


_decoder = msgspec.msgpack.Decoder(Wanted)
_encoder = msgspec.msgpack.Encoder()


def host_bytes(memory: Tensor) -> memoryview:
    """Of contiguous host memory, uint8."""
    return memoryview(cast(Any, memory.view(-1).numpy()))


def request(write: bool, spans: Sequence[Span]) -> bytes:
    body = _encoder.encode(Wanted(write, tuple(spans)))
    return len(body).to_bytes(_HEAD_BYTES, "little") + body


class RankBlocks:
    """One rank's cache as host bytes of shape [blocks, layers, 2, its KV heads, block bytes of a head]."""

    def __init__(self, kv: KvTensors) -> None:
        self._kv = kv
        self._stream = stream_for(kv.device)
        geometry = kv.geometry
        self.block_shape = (
            geometry.num_layers,
            2,
            geometry.num_kv_heads,
            geometry.block_size * geometry.head_dim * geometry.dtype_bytes,
        )

    def empty(self, spans: Sequence[Span]) -> Tensor:
        """Host memory for the blocks of these spans, uint8."""
        return torch.empty((sum(span.num_blocks for span in spans), *self.block_shape), dtype=torch.uint8)

    def read(self, spans: Sequence[Span], target: Tensor) -> None:
        """target, as `empty` gives it or a view with gaps, = the blocks of these spans, one after the other."""
        with torch.inference_mode(), self._stream.use():
            for view, part in self._pairs(spans, target):
                if view.is_cuda:
                    part.copy_(view)
                else:  # NumPy copies in this thread alone: torch would wake a pool of threads beside the engine's
                    part.numpy()[:] = view.numpy()

    def write(self, spans: Sequence[Span], source: Tensor) -> None:
        """The way back of `read`. On return the bytes lie in their blocks."""
        with torch.inference_mode(), self._stream.use():
            for view, part in self._pairs(spans, source):
                if view.is_cuda:
                    view.copy_(part)
                else:
                    view.numpy()[:] = part.numpy()
            self._stream.mark().wait()

    def _pairs(self, spans: Sequence[Span], memory: Tensor) -> list[tuple[Tensor, Tensor]]:
        pairs, first = [], 0
        for span in spans:
            blocks = self._kv.run_view(span.first_block, span.num_blocks, host=span.host)
            view = blocks.view(span.num_blocks, *self.block_shape)
            pairs.append((view, memory[first : first + span.num_blocks]))
            first += span.num_blocks
        return pairs


def serve(blocks: RankBlocks, peer: socket.socket) -> None:
    """A follower's thread: until rank 0 has gone, which raises `RankLost`."""
    while True:
        head = bytearray(_HEAD_BYTES)
        receive_exactly(peer, memoryview(head))
        body = bytearray(int.from_bytes(head, "little"))
        receive_exactly(peer, memoryview(body))
        wanted = _decoder.decode(body)
        part = blocks.empty(wanted.spans)
        data = host_bytes(part)
        if wanted.write:
            receive_exactly(peer, data)
            blocks.write(wanted.spans, part)
            peer.sendall(DONE)
        else:
            blocks.read(wanted.spans, part)
            peer.sendall(data)
