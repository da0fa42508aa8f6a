"""Attention over the paged KV cache, and the write that precedes it: the one entry for engine and tests.

Dispatches to the C++ kernel or, on a GPU, to Triton's where they serve the device and dtype, else to the torch
reference. Decides nothing about which blocks a request owns.
"""

from __future__ import annotations

from torch import Tensor

from cohort.kernels import reference
from cohort.kernels.attention_meta import AttentionMeta
from cohort.kernels.cpu import native
from cohort.kernels.gpu import available as gpu

__all__ = ["AttentionMeta", "latent_attention", "paged_attention", "write_kv"]


def paged_attention(
    query: Tensor,
    kv: Tensor,
    layer: int,
    meta: AttentionMeta,
    scale: float,
    out: Tensor,
    *,
    sliding_window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> None:
    """Compute out[t] = attention of query[t] over its row's KV up to its own position; query and out are [T, Hq, D].

    The step's own keys and values must be in the cache already (`write_kv`). `sliding_window` w > 0 keeps only the last
    w positions, the query's own included. `softcap` c > 0 bounds the scaled scores: c · tanh(score / c). `sinks`
    float32 [Hq]: a score of each head in addition to the keys', which takes its share of the weight and gives no value
    (gpt-oss). `kv` may be in FP8 (`fp8_cache`): in rows on a processor, in planes on a GPU.
    """
    if (ops := native.ops_for(query)) is not None:
        tables, directions = meta.separate()
        rows = (meta.query_start, meta.context_lens, tables, directions)
        ops.paged_attention(query, kv, layer, *rows, scale, out, sliding_window, softcap, sinks)
    else:
        (gpu.ops_for(kv) or reference).paged_attention(
            query, kv, layer, meta, scale, out, sliding_window=sliding_window, softcap=softcap, sinks=sinks
        )


def write_kv(key: Tensor, value: Tensor, kv: Tensor, layer: int, slot_mapping: Tensor) -> None:
    """Store key and value [T, Hkv, D] (views of a fused projection are fine) of one layer; slot_mapping int64 [T]."""
    (native.ops_for(key) or gpu.ops_for(kv) or reference).write_kv(key, value, kv, layer, slot_mapping)


def latent_attention(
    query: Tensor, kv: Tensor, layer: int, meta: AttentionMeta, scale: float, out: Tensor, rank: int
) -> None:
    """Compute out[t, h, :rank] = the latents' first `rank` numbers, averaged by query[t, h]'s scores with whole latents
    of its row up to its own position. The rest of `out` is not to be read.

    `query`, `out` [T, heads, width]; `kv` [blocks, layers, 1, 1, block size, width]. Triton alone has kernels for
    latents; elsewhere they are keys whose values are themselves.
    """
    if native.ops_for(query) is None and (ops := gpu.ops_for(kv)) is not None:
        ops.latent_attention(query, kv, layer, meta, scale, out, rank)
    else:
        paged_attention(query, kv, layer, meta, scale, out)
