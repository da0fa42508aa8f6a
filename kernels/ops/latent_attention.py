"""Attention over a paged cache of latents, each key and value in one: the one entry for engine and tests.

Called by the lean DeepSeek form. A processor's kernel, and the torch reference, attend to a latent as to any key whose
value is itself; on a GPU Triton has kernels of its own. Decides nothing about which blocks a request owns.
"""

from __future__ import annotations

from torch import Tensor

from cohort.kernels.attention_meta import AttentionMeta
from cohort.kernels.cpu import native
from cohort.kernels.gpu import available as gpu
from cohort.kernels.ops.paged_attention import paged_attention


def latent_attention(
    query: Tensor, kv: Tensor, layer: int, meta: AttentionMeta, scale: float, out: Tensor, rank: int
) -> None:
    """out[t, h, :rank] = the latents' first `rank` numbers, averaged by query[t, h]'s scores with whole latents of its
    row up to its own position. What stands behind them in `out` is not to be read.

    `query`, `out` [T, heads, width]; `kv` [blocks, layers, 1, 1, block size, width].
    """
    if native.ops_for(query) is None and (ops := gpu.ops_for(kv)) is not None:
        ops.latent_attention(query, kv, layer, meta, scale, out, rank)
    else:
        paged_attention(query, kv, layer, meta, scale, out)
