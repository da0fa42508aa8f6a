"""Rows over a shuffled cache, for sections that call attention itself.

The one place here that knows how directions travel to the kernels. Called by `attention`, and by the tests of served
shapes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cohort.kernels.fp8_cache import PLANE_SCALE_BYTES, SCALE_BYTES, planes
from cohort.kernels.gpu.workspace import Workspace
from cohort.kernels.ops.paged_attention import AttentionMeta

BLOCK_SIZE = 16
_SCALE_OF_A_64TH = 114  # of a row: 2^(byte - 120)


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
    fp8: bool = False,
) -> Case:
    """Rows of these contexts, of which the last `queries` tokens are computed, over random keys in shuffled blocks;
    `fp8`: kept so, as this device does."""
    blocks = [-(-context // BLOCK_SIZE) for context in contexts]
    shape = (sum(blocks) + 1, layers, 2, heads.kv, BLOCK_SIZE)
    kv = random_fp8(shape, heads.dim, device) if fp8 else torch.empty((*shape, heads.dim), device=device, dtype=dtype)
    if not fp8:
        kv.normal_()
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
    read = 2 * sum(contexts) * heads.kv * kv.shape[5] * kv.element_size()
    return Case(query, kv, meta, heads.dim**-0.5, read)


def random_fp8(shape: Sequence[int], head_dim: int, device: torch.device) -> Tensor:
    """A cache [*shape, row] in FP8 of numbers up to 4 of either sign: in planes on a GPU, in rows on a processor."""
    apart = device.type == "cuda"
    kv = torch.empty(
        (*shape, head_dim + (PLANE_SCALE_BYTES if apart else SCALE_BYTES)), device=device, dtype=torch.uint8
    )
    codes, scales = planes(kv) if apart else (kv[..., :head_dim], kv[..., head_dim])
    codes.random_(0, 256).bitwise_and_(0xF7).bitwise_or_(0x40)  # neither zero nor NaN
    scales.fill_(2.0**-6 if apart else _SCALE_OF_A_64TH)
    return kv
