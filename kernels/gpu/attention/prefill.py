"""Prefill rows through flash attention over gathered keys and values.

Called by `attention` for the prefill rows of a step. A prompt's chunk attends to its cached prefix and to itself; both
lie in paged blocks, some filled right to left, which flash attention cannot read. One kernel copies a layer's keys and
values of those rows together, in order; that costs a few bytes per key where attention costs thousands of products.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cohort.kernels.attention_meta import AttentionMeta
from cohort.kernels.fp8_cache import is_fp8
from cohort.kernels.gpu.attention.attention_kernels import stage_rows
from cohort.kernels.gpu.attention.flash import flash_function
from cohort.kernels.gpu.plan import padded_rows, power_of_two_from

_TILE_BYTES = 32768  # of keys: a program holds as many values beside them, in registers


def flash_prefill(
    query: Tensor, kv: Tensor, layer: int, meta: AttentionMeta, scale: float, out: Tensor, sliding_window: int
) -> bool:
    """Return whether flash attention took the step's prefill rows: on a GPU, in 16 bits, their context known to the
    host and with room in the workspace. Rows that are not prefill rows are left with no meaning in `out`."""
    workspace, rows = meta.workspace, meta.num_prefill_rows
    if workspace is None or not flash_serves(query) or rows >= len(workspace.starts):
        return False
    if meta.prefill_context == 0:
        return False
    if meta.prefill_context > workspace.staging.shape[1]:
        workspace.count_unstaged(rows, meta.context_lens)
        return False
    keys, values = stage(kv, layer, meta, workspace.staging, workspace.starts)
    longest = meta.max_context_len or meta.block_tables.shape[1] * meta.block_size
    out.copy_(
        flash_function()(
            query,
            keys,
            values,
            meta.query_start[: rows + 1],
            workspace.starts[: rows + 1],
            meta.max_query_len,
            longest,
            scale,
            sliding_window,
        )
    )
    return True


def flash_serves(query: Tensor) -> bool:
    """Return whether flash attention takes the query: on a GPU, in 16 bits, heads of a multiple of 8 up to 256."""
    head_dim = query.shape[2]
    return query.is_cuda and query.dtype != torch.float32 and head_dim % 8 == 0 and head_dim <= 256


def stage(kv: Tensor, layer: int, meta: AttentionMeta, staging: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
    """Return one layer's keys and values of the prefill rows, in order, one row after the other: [positions, Hkv, D]
    each, of a cache in FP8 the numbers that it stands for.

    Writes into `staging` [2, room, Hkv, D] and into `starts` [rows + 1] where each row begins. Needs
    `meta.prefill_context`.
    """
    cache_layer = kv[:, layer]
    _, _, kv_heads, block_size, _ = cache_layer.shape
    head_dim = staging.shape[3]
    rows, total = meta.num_prefill_rows, meta.prefill_context
    keys, values = staging[0, :total], staging[1, :total]
    tile_keys = min(64, _TILE_BYTES // (power_of_two_from(head_dim) * staging.element_size()))
    longest = min(total, meta.max_context_len or meta.block_tables.shape[1] * meta.block_size)
    stage_rows[(kv_heads, rows, -(-longest // tile_keys))](
        cache_layer,
        meta.context_lens,
        meta.block_tables,
        keys,
        values,
        starts,
        meta.block_tables.stride(0),
        *cache_layer.stride()[:3],
        KV_HEADS=kv_heads,
        BLOCK_SIZE=block_size,
        HEAD_DIM=head_dim,
        PAD_DIM=power_of_two_from(head_dim),
        PAD_ROWS=padded_rows(rows, meta.pad_rows),
        TILE_KEYS=tile_keys,
        FP8=is_fp8(kv),
        num_warps=4,
    )
    return keys, values
