"""Does the compiled extension compute what the reference computes, on this processor?

Called by `native` once, right after loading: a few milliseconds. The kernels take different paths on different
processors (AVX2, AVX-512, bfloat16 dot products, others), and a wrong answer must not be served because a compiler or
a processor is one that was never tried. The tests are far more thorough; this is the part that runs everywhere.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cohort.kernels import reference
from cohort.kernels.attention_meta import AttentionMeta

_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}  # of the largest value
_BLOCK_SIZE = 16


def _differs(ours: Tensor, truth: Tensor) -> bool:
    """Return whether two results differ beyond the tolerance, or one is NaN."""
    error = (ours.float() - truth.float()).abs().max()
    return not bool(error <= _TOLERANCE[truth.dtype] * truth.float().abs().max())


def _rows(contexts: list[int], tables: list[list[int]], directions: Tensor | None = None) -> AttentionMeta:
    """Return a prefill row of 20 tokens and a decode row."""
    starts, lens, blocks = (torch.tensor(each, dtype=torch.int32) for each in ([0, 20, 21], contexts, tables))
    return AttentionMeta(starts, lens, blocks, directions, _BLOCK_SIZE, max_query_len=20, num_prefill_rows=1)


def _attention_differs(ops: Any, dtype: torch.dtype, random: torch.Generator) -> bool:
    """Check attention over blocks of both directions: plain, within a window under a soft cap, and with sinks."""
    kv_heads, group, head_dim = 2, 5, 64
    kv = torch.randn(8, 1, 2, kv_heads, _BLOCK_SIZE, head_dim, generator=random).to(dtype)
    both_ways = torch.tensor([[0, 1, 1, 0], [1, 0, 0, 1]], dtype=torch.uint8)
    meta = _rows([37, 60], [[3, 1, 6, 0], [2, 7, 4, 5]], both_ways)
    query = torch.randn(21, kv_heads * group, head_dim, generator=random).to(dtype)
    scale = head_dim**-0.5
    # through the signs, which tables on a GPU carry, and back
    tables, directions = meta.as_signed().separate()
    rows = (meta.query_start, meta.context_lens, tables, directions)
    sinks = torch.linspace(-2, 3, kv_heads * group)
    for window, softcap, sink in ((0, 0.0, None), (25, 1.5, None), (25, 0.0, sinks)):
        ours, truth = torch.empty_like(query), torch.empty_like(query)
        ops.paged_attention(query, kv, 0, *rows, scale, ours, window, softcap, sink)
        reference.paged_attention(query, kv, 0, meta, scale, truth, sliding_window=window, softcap=softcap, sinks=sink)
        if _differs(ours, truth):
            return True
    return False


def _mixture_differs(ops: Any, x: Tensor) -> bool:
    """Check routing over 24 experts by three tokens' scores, and the weighted sum of one token's three outputs."""
    experts, weights = torch.empty((3, 3), dtype=torch.int64), torch.empty((3, 3))
    ops.choose_experts(x[:, :24].contiguous(), False, False, experts, weights)
    chosen, likely = reference.choose_experts(x[:, :24], 3, False, False)
    ours, truth = x[:1].clone(), x[:1].clone()
    ops.add_weighted(x, weights[:1].contiguous(), None, ours)
    reference.add_weighted(x, weights[:1], None, truth)
    return not torch.equal(experts, chosen) or _differs(weights, likely) or _differs(ours, truth)


def _elementwise_differs(ops: Any, dtype: torch.dtype, random: torch.Generator) -> bool:
    x = torch.randn(3, 72, generator=random).to(dtype)
    weight = torch.randn(72, generator=random).to(dtype)
    for name, width, more in (
        ("rms_norm", 72, (weight, 1e-5)),
        ("silu_mul", 36, ()),
        ("clamped_swiglu", 36, (1.702, 1.5)),
    ):
        ours, truth = x.new_empty(3, width), x.new_empty(3, width)
        getattr(ops, name)(x, *more, ours)
        getattr(reference, name)(x, *more, truth)
        if _differs(ours, truth):
            return True
    if _mixture_differs(ops, x):
        return True
    ours, truth = x.view(3, 2, 36).clone(), x.view(3, 2, 36).clone()
    angle, positions = torch.rand(7, 18, generator=random), torch.tensor([4, 0, 6])
    ops.rope_inplace(ours[:, :1], ours[:, 1:], angle.cos(), angle.sin(), positions)
    reference.rope_inplace(truth[:, :1], truth[:, 1:], angle.cos(), angle.sin(), positions)
    return _differs(ours, truth)


def _fp8_cache_differs(ops: Any, dtype: torch.dtype, random: torch.Generator) -> bool:
    """Check that the same bytes are written, and read as the same numbers by a decode row and a prefill row."""
    tokens, kv_heads, head_dim = 21, 2, 72
    ours = torch.zeros(4, 1, 2, kv_heads, _BLOCK_SIZE, head_dim + 1, dtype=torch.uint8)
    truth = ours.clone()
    key, value = torch.randn(2, tokens, kv_heads, head_dim, generator=random).mul(3).to(dtype)
    slots = torch.randperm(4 * _BLOCK_SIZE, generator=random)[:tokens]
    ops.write_kv(key, value, ours, 0, slots)
    reference.write_kv(key, value, truth, 0, slots)
    if not torch.equal(ours, truth):
        return True
    meta = _rows([31, 60], [[3, 1, 0, 0], [2, 0, 1, 3]])
    query = torch.randn(21, 2 * kv_heads, head_dim, generator=random).to(dtype)
    found, expected = torch.empty_like(query), torch.empty_like(query)
    rows = (meta.query_start, meta.context_lens, meta.block_tables, None)
    ops.paged_attention(query, ours, 0, *rows, head_dim**-0.5, found, 0, 0.0, None)
    reference.paged_attention(query, truth, 0, meta, head_dim**-0.5, expected)
    return _differs(found, expected)


def _e4m3_differs(ops: Any, dtype: torch.dtype, random: torch.Generator) -> bool:
    """Check products over all numbers of E4M3 but NaN, subnormals too, in two groups."""
    codes = (torch.arange(40 * 64) * 37 % 254).view(40, 64)
    codes = (codes + (codes >= 0x7F).int()).to(torch.uint8).view(torch.float8_e4m3fn)
    scales, x = torch.rand(40, 2, generator=random), torch.randn(3, 64, generator=random).to(dtype)
    packed = torch.zeros(ops.quantized_bytes(8, 48, False, False, 40, 64, True), dtype=torch.uint8)
    ops.pack_e4m3(codes, scales, 48, False, packed)
    weight, ours = codes.float() * scales.repeat_interleave(48, dim=1)[:, :64], torch.empty(3, 40)
    ops.panel_product(x, packed, None, ours)
    return _differs(ours, x.float() @ weight.T)


def _codes_differ(ops: Any, random: torch.Generator) -> bool:
    """Check products over weights of 8 and of 4 bits, with offsets; the difference is the rounding of x to 8 bits."""
    x = torch.randn(3, 64, generator=random)
    scales = torch.rand(40, 2, generator=random).half()
    offsets = torch.rand(40, 2, generator=random).half()
    for bits in (8, 4):
        codes = torch.randint(-128, 128, (40, 64), generator=random, dtype=torch.int8)
        stored, values = codes, codes.float()
        if bits == 4:
            stored = codes[:, :32].contiguous().view(torch.uint8)
            values = torch.stack((stored & 15, stored >> 4), dim=-1).flatten(1).float()
        packed = torch.zeros(ops.quantized_bytes(bits, 32, True, False, 40, 64), dtype=torch.uint8)
        ops.pack_quantized(stored, torch.ones(40), scales, offsets, 32, 0, 32, False, packed)
        weight = values * scales.float().repeat_interleave(32, dim=1) + offsets.float().repeat_interleave(32, dim=1)
        truth, ours = x @ weight.T, torch.empty(3, 40)
        ops.panel_product(x, packed, None, ours)
        if _differs(ours.bfloat16(), truth.bfloat16()):
            return True
    return False


def _sampling_differs(ops: Any, random: torch.Generator) -> bool:
    """Check that the largest logit comes where top_k is 1, and one of the largest two where it is 2."""
    logits = torch.randn(2, 133, generator=random)
    rules = torch.tensor([[0.7, 1, 1.0, 0.0], [1.3, 2, 0.99, 0.0]], dtype=torch.float64)
    tokens = torch.empty(2, dtype=torch.int64)
    ops.sample_tokens(list(logits), rules, torch.tensor([3, -4]), tokens)
    return int(tokens[0]) != int(logits[0].argmax()) or tokens[1] not in logits[1].topk(2).indices


def first_difference(ops: Any) -> str | None:
    """Return the name of what the extension computes wrongly; None when it agrees with the reference."""
    random = torch.Generator().manual_seed(0)
    with torch.inference_mode():
        for dtype in _TOLERANCE:
            if _attention_differs(ops, dtype, random):
                return f"attention in {dtype}"
            if _elementwise_differs(ops, dtype, random):
                return f"elementwise steps in {dtype}"
            if _fp8_cache_differs(ops, dtype, random):
                return f"attention in {dtype} over FP8"
            if _e4m3_differs(ops, dtype, random):
                return f"products over E4M3 in {dtype}"
        if _codes_differ(ops, random):
            return "products over weights in few bits"
        if _sampling_differs(ops, random):
            return "sampling"
    return None
