"""Rows over a shuffled cache, for sections that call attention itself.

The one place here that knows how directions travel to the kernels. Called by `kernels`, `attention` and `smoke`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cohort.kernels.gpu.workspace import Workspace
from cohort.kernels.paged_attention import AttentionMeta

BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Heads:
    """A model as attention sees it."""

    query: int
    kv: int
    dim: int

    def __str__(self) -> str:
        return f"{self.query}/{self.kv} heads of {self.dim}"


@dataclass(slots=True)
class Case:
    """One call of attention; `kv` [blocks, layers, 2, kv heads, block size, dim]."""

    query: Tensor
    kv: Tensor
    meta: AttentionMeta
    scale: float
    read_bytes: int
    """Keys and values that one layer reads."""


def make_case(
    device: torch.device,
    dtype: torch.dtype,
    heads: Heads,
    contexts: Sequence[int],
    queries: Sequence[int],
    *,
    layers: int = 2,
    directed: bool = True,
) -> Case:
    """Rows of these contexts, of which the last `queries` tokens are computed, over random keys in shuffled blocks."""
    blocks = [-(-context // BLOCK_SIZE) for context in contexts]
    shape = (sum(blocks) + 1, layers, 2, heads.kv, BLOCK_SIZE, heads.dim)
    kv = torch.empty(shape, device=device, dtype=dtype).normal_()
    order = torch.randperm(sum(blocks), dtype=torch.int32)
    tables = torch.zeros(len(blocks), max(blocks), dtype=torch.int32)
    for row, part in enumerate(torch.split(order, blocks)):
        tables[row, : len(part)] = part
    directions = torch.randint(0, 2, tables.shape, dtype=torch.uint8)
    prefill = sum(count > 1 for count in queries)
    workspace = None
    if device.type == "cuda":
        workspace = Workspace(
            max_rows=len(contexts),
            query_heads=heads.query,
            kv_heads=heads.kv,
            head_dim=heads.dim,
            dtype=dtype,
            device=device,
            staging_tokens=max(1, sum(contexts[:prefill])),
        )
    meta = AttentionMeta(
        query_start=torch.tensor([0, *queries]).cumsum(0).to(torch.int32).to(device),
        context_lens=torch.tensor(list(contexts), dtype=torch.int32, device=device),
        block_tables=tables.to(device),
        directions=directions.to(device) if directed else None,
        block_size=BLOCK_SIZE,
        max_query_len=max(queries),
        num_prefill_rows=prefill,
        max_context_len=max(contexts),
        prefill_context=sum(contexts[:prefill]),
        workspace=workspace,
    ).as_signed()
    query = torch.randn(sum(queries), heads.query, heads.dim, device=device).to(dtype)
    read = 2 * sum(contexts) * heads.kv * heads.dim * dtype.itemsize
    return Case(query, kv, meta, heads.dim**-0.5, read)
