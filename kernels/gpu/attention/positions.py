"""Attention on a GPU that gives a position the same bits in every step (ADR 14): one kernel for all rows.

Called by `attention` where the workspace says so (`engine.batch_invariant`). Nothing that is launched follows what the
rows hold, so a recorded step may launch it.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from cohort.kernels.attention_meta import AttentionMeta
from cohort.kernels.fp8_cache import is_fp8
from cohort.kernels.gpu.attention.position_kernels import join_parts, position_rows
from cohort.kernels.gpu.plan import position_plan, power_of_two_from
from cohort.kernels.gpu.workspace import POSITION_ROOM, multiprocessors

_ROWS_AT_ONCE = 128
_UNROLLED = 4
_HEAD_ELEMENTS = 1024  # of a program that joins
_planned = lru_cache(position_plan)
_multiprocessors = lru_cache(multiprocessors)


def attend(
    query: Tensor,
    kv: Tensor,
    layer: int,
    meta: AttentionMeta,
    scaling: tuple[float, float],
    out: Tensor,
    sliding_window: int,
    sinks: Tensor | None,
    *,
    pad_dim: int,
    widen: bool,
    room: int = POSITION_ROOM,
) -> None:
    """All rows of the step, checked by the caller. `scaling`: as `attention.scaling` makes it. `room`: parts of queries
    in memory, without a workspace."""
    cache = kv[:, layer]
    _, _, kv_heads, block_size, _ = cache.shape
    heads, head_dim, rows = query.shape[1], query.shape[2], len(meta.context_lens)
    group = heads // kv_heads
    plan = _planned(group=group, head_dim=head_dim, element_bytes=query.element_size())
    if (workspace := meta.workspace) is not None:
        partial, levels = workspace.partial, workspace.lse
        room = len(levels) // (2 * heads)
    else:
        partial = torch.empty(room * heads * head_dim, dtype=torch.float32, device=kv.device)
        levels = torch.empty(2 * room * heads, dtype=torch.float32, device=kv.device)
    rows_shape = {"PAD_DIM": pad_dim, "TILE_TOKENS": plan.tile_tokens, "PART_KEYS": plan.part_keys}
    shared = {**rows_shape, "AT_ONCE": _ROWS_AT_ONCE, "WINDOWED": sliding_window > 0, "SINKS": sinks is not None}
    numbers = meta.query_start if sinks is None else sinks  # read with SINKS only
    position_rows[(plan.programs * _multiprocessors(kv.device),)](
        query,
        cache,
        meta.query_start,
        meta.context_lens,
        meta.block_tables,
        out,
        partial,
        levels,
        numbers,
        rows,
        room,
        *scaling,
        sliding_window,
        query.stride(0),
        query.stride(1),
        out.stride(0),
        out.stride(1),
        meta.block_tables.stride(0),
        cache.stride(0),
        cache.stride(1),
        cache.stride(2),
        GROUP=group,
        KV_HEADS=kv_heads,
        BLOCK_SIZE=block_size,
        HEAD_DIM=head_dim,
        TILE_ROWS=plan.tile_rows,
        TILE_KEYS=plan.tile_keys,
        CAPPED=scaling[1] > 0,
        FP8=is_fp8(kv),
        WIDE=widen,
        num_warps=plan.warps,
        num_stages=plan.stages,
        **shared,
    )
    longest = meta.max_context_len or meta.block_tables.shape[1] * meta.block_size
    if longest <= plan.part_keys:
        return
    tile_heads = min(power_of_two_from(heads), max(1, _HEAD_ELEMENTS // pad_dim))
    join_parts[(rows, min(plan.tile_tokens, meta.max_query_len), -(-heads // tile_heads))](
        meta.query_start,
        meta.context_lens,
        out,
        partial,
        levels,
        numbers,
        rows,
        room,
        sliding_window,
        out.stride(0),
        out.stride(1),
        HEADS=heads,
        HEAD_DIM=head_dim,
        TILE_HEADS=tile_heads,
        UNROLLED=_UNROLLED,
        num_warps=4,
        **shared,
    )
