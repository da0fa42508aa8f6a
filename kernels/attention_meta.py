"""Where the rows of one step begin and where their KV lies: the tables every attention kernel reads.

Built by the engine once per step and used by all layers. Holds tensors, decides nothing.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from cohort.kernels.gpu.workspace import Workspace


@dataclass(slots=True)
class AttentionMeta:
    """The rows of one step; tensors on the cache's device.

    R14 · Prefill rows come first, then decode rows; `query_start` is the length table between them. A row's queries are
    the last `query_start[r+1] - query_start[r]` positions of its context.
    """

    query_start: Tensor  # int32 [R+1], prefix sums of tokens per row
    context_lens: Tensor  # int32 [R], KV length after this step
    block_tables: Tensor  # int32 [R, M]; entries past a row's context are never read; with signs, if `signed`
    directions: Tensor | None  # uint8 [R, M], 1 = block filled right to left (R7, R13); None = all left to right
    block_size: int
    max_query_len: int
    num_prefill_rows: int

    # For kernels on a GPU, which must not ask the device; others ignore them.
    max_context_len: int = 0  # no row's context is longer; 0 = as long as the tables are wide
    prefill_context: int = 0  # sum of the prefill rows' context_lens; 0 = unknown, they are read where they lie
    pad_rows: int = 0  # kernels that keep something per row are compiled for this many at least
    workspace: Workspace | None = None  # None = every call makes its own: never inside a CUDA graph

    signed: bool = False
    """R7, R13 · Directions are in the tables: `~block` (below zero) is a block filled right to left. Kernels on a GPU
    read these, and know a direction by the entry that they load anyway; the compiled kernels for processors read
    `directions`. Tables without directions are both."""

    def tensors(self, query: Tensor, cache: Tensor, out: Tensor) -> tuple[Tensor, ...]:
        """Return a launch's tensors over one layer's cache, as the kernels on a GPU have them in common."""
        return query, cache, self.query_start, self.context_lens, self.block_tables, out

    def strides(self, query: Tensor, cache: Tensor, out: Tensor) -> tuple[int, ...]:
        """Return the strides that go with `tensors`; the cache's last two are of keys to values and of heads."""
        return (*query.stride()[:2], *out.stride()[:2], self.block_tables.stride(0), *cache.stride()[:3])

    def as_signed(self) -> AttentionMeta:
        """Return the same rows with directions in the tables' signs."""
        if self.signed:
            return self
        tables = self.block_tables
        if self.directions is not None:
            tables = torch.where(self.directions.bool(), ~tables, tables)
        return dataclasses.replace(self, block_tables=tables, directions=None, signed=True)

    def separate(self) -> tuple[Tensor, Tensor | None]:
        """Return the tables without signs, and the directions apart."""
        if not self.signed:
            return self.block_tables, self.directions
        return self.block_tables ^ (self.block_tables >> 31), (self.block_tables < 0).to(torch.uint8)
