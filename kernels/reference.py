"""The truth: every kernel in plain torch, clear before fast, on any device and dtype.

Called by the dispatching modules where no other kernel serves the device or dtype, and by the tests that hold the
compiled kernels against it. Never loads the extension.

Cache layout everywhere: kv [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim], K at index 0, V at 1.
With 1 in place of 2 keys are their own values: latents, of which attention takes the weighted sum as it stands.
A cache of bytes is in FP8 (`fp8_cache`): a row has head_dim + 1 of them, or head_dim + 4 in planes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from cohort.kernels.code_dtypes import E2M1, as_bytes
from cohort.kernels.fp8_cache import decoded, decoded_apart, encoded, encoded_apart, in_planes, is_fp8, planes

if TYPE_CHECKING:
    from cohort.kernels.attention_meta import AttentionMeta
    from cohort.kernels.types import ClampedSwiglu, ExpertCodes

_E2M1_NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_E8M0_BIAS = 127


def row_slots(meta: AttentionMeta, row: int, context_len: int) -> tuple[Tensor, Tensor]:
    """Return block id and slot inside the block of each of the row's first `context_len` tokens.

    R7, R13 · In a block whose direction is 1, or that stands as ~block in signed tables, the j-th token lies in slot
    block_size - 1 - j.
    """
    position = torch.arange(context_len, device=meta.block_tables.device)
    index = position // meta.block_size
    offset = position % meta.block_size
    block = meta.block_tables[row, index].long()
    if meta.signed:
        offset = torch.where(block < 0, meta.block_size - 1 - offset, offset)
        block = block ^ (block >> 63)
    elif meta.directions is not None:
        reverse = meta.directions[row, index].bool()
        offset = torch.where(reverse, meta.block_size - 1 - offset, offset)
    return block, offset


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
    """Compute causal attention of each row's last tokens over its context, row after row, in float32."""
    starts = meta.query_start.tolist()
    keys, values = kv[:, layer, 0], kv[:, layer, -1]  # [num_blocks, Hkv, block_size, D]
    group = query.shape[1] // kv.shape[3]
    for row, context_len in enumerate(meta.context_lens.tolist()):
        begin, end = starts[row], starts[row + 1]
        if begin == end:
            continue
        block, offset = row_slots(meta, row, context_len)
        if in_planes(kv, query.shape[2]):
            codes, scales = planes(kv[:, layer])
            key, value = (decoded_apart(codes[block, i, :, offset], scales[block, i, :, offset]) for i in (0, 1))
        else:
            key, value = keys[block, :, offset], values[block, :, offset]  # [context, Hkv, D]
            if is_fp8(kv):
                key, value = decoded(key), decoded(value)
        key = key.float().repeat_interleave(group, dim=1)  # [context, Hq, D]
        value = value.float().repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", query[begin:end].float(), key) * scale
        if softcap > 0:
            scores = softcap * torch.tanh(scores / softcap)
        query_position = torch.arange(context_len - (end - begin), context_len, device=kv.device)[:, None]
        key_position = torch.arange(context_len, device=kv.device)[None, :]
        visible = key_position <= query_position
        if sliding_window > 0:
            visible &= key_position > query_position - sliding_window
        scores = scores.masked_fill(~visible, float("-inf"))
        if sinks is not None:  # a key more, whose value is zero
            scores = torch.cat([scores, sinks[:, None, None].expand(-1, end - begin, 1)], dim=-1)
        weights = scores.softmax(dim=-1)[..., :context_len]
        out[begin:end] = torch.einsum("hqk,khd->qhd", weights, value).to(out.dtype)


def write_kv(key: Tensor, value: Tensor, kv: Tensor, layer: int, slot_mapping: Tensor) -> None:
    """Store one layer's new keys and values in their slots (slot = block · block_size + offset)."""
    block_size = kv.shape[4]
    block, offset = slot_mapping // block_size, slot_mapping % block_size
    if in_planes(kv, key.shape[2]):
        codes, scales = planes(kv[:, layer])
        for i, numbers in enumerate((key, value)):
            codes[block, i, :, offset], scales[block, i, :, offset] = encoded_apart(numbers)
        return
    if is_fp8(kv):
        key, value = encoded(key), encoded(value)
    kv[:, layer, 0][block, :, offset] = key
    kv[:, layer, -1][block, :, offset] = value


def gather_slots(kv: Tensor, slots: Tensor, out: Tensor, *, apart: bool = False) -> None:
    """Copy whole tokens (all layers, K and V) out of scattered slots into rows of `out`. `apart`: of a cache in planes,
    whose tokens become codes and behind them the scale's bytes."""
    block_size = kv.shape[4]
    block, offset = slots // block_size, slots % block_size
    # the advanced indices stand apart, so their dimension comes first: [n, L, 2, Hkv, D]
    if apart:
        codes, scales = planes(kv)
        out[..., : codes.shape[5]] = codes[block, :, :, :, offset]
        out[..., codes.shape[5] :] = scales[block, :, :, :, offset][..., None].view(torch.uint8)
    else:
        out.copy_(kv[block, :, :, :, offset])


def scatter_slots(src: Tensor, kv: Tensor, slots: Tensor, *, apart: bool = False) -> None:
    """Copy rows back to slots, the reverse of `gather_slots`; the slots must differ from each other."""
    block_size = kv.shape[4]
    block, offset = slots // block_size, slots % block_size
    src = src.to(device=kv.device, dtype=kv.dtype)
    if apart:
        codes, scales = planes(kv)
        codes[block, :, :, :, offset] = src[..., : codes.shape[5]]
        scales[block, :, :, :, offset] = src[..., codes.shape[5] :].contiguous().view(torch.float32)[..., 0]
    else:
        kv[block, :, :, :, offset] = src


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    """Compute x / sqrt(mean(x²) + eps) · weight in float32, rounded before the weight, as transformers does."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(dim=-1, keepdim=True) + eps)
    out.copy_(weight * normed.to(x.dtype))


def wide_rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    """Compute `rms_norm` with a weight in float32, rounded once at the end (Gemma, gpt-oss)."""
    wide = x.float()
    out.copy_(wide * torch.rsqrt(wide.pow(2).mean(dim=-1, keepdim=True) + eps) * weight)


def rope_inplace(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> None:
    """Rotate the first 2 · cos.shape[1] elements of every head, rotate-half convention; the others stay."""
    half = cos.shape[1]
    row_cos, row_sin = cos[positions][:, None], sin[positions][:, None]  # [T, 1, half], over all heads
    for x in (q, k):
        first, second = x[..., :half].float(), x[..., half : 2 * half].float()
        # both before either is stored: in float32 `first` and `second` are views of x
        rotated = torch.cat((first * row_cos - second * row_sin, second * row_cos + first * row_sin), dim=-1)
        x[..., : 2 * half] = rotated.to(x.dtype)


def silu_mul(gate_up: Tensor, out: Tensor) -> None:
    """Compute silu(gate) · up, where gate is the first half of the last dimension."""
    gate, up = gate_up.chunk(2, dim=-1)
    torch.mul(F.silu(gate), up, out=out)


def clamped_swiglu(gate_up: Tensor, alpha: float, limit: float, out: Tensor, *, in_turn: bool = False) -> None:
    """Compute gpt-oss's (up + 1) · gate · sigmoid(alpha · gate), gate at most `limit`, up within ±`limit`; gates before
    ups, or `in_turn` each gate before its up."""
    gate, up = (gate_up[..., ::2], gate_up[..., 1::2]) if in_turn else gate_up.chunk(2, dim=-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    torch.mul(up + 1, gate * torch.sigmoid(gate * alpha), out=out)


def expert_outputs(
    x: Tensor,
    chosen: Tensor,
    gate_up: Tensor,
    down: Tensor,
    biases: tuple[Tensor, Tensor] | None = None,
    clamped: ClampedSwiglu | None = None,
) -> Tensor:
    """Return [T · k, hidden] of x [T, hidden] and chosen [T, k]: expert by expert, over its rows."""
    tokens, per_token = chosen.shape
    flat = chosen.reshape(-1)
    out = x.new_empty((tokens * per_token, x.shape[1]))
    for expert in range(len(gate_up)):
        rows = (flat == expert).nonzero()[:, 0]
        if len(rows):
            into, out_of = (None, None) if biases is None else (biases[0][expert], biases[1][expert])
            both = F.linear(x[rows // per_token], gate_up[expert], into)
            active = both.new_empty((len(rows), both.shape[1] // 2))
            if clamped is None:
                silu_mul(both, active)
            else:
                clamped_swiglu(both, clamped.alpha, clamped.limit, active, in_turn=True)
            out[rows] = F.linear(active, down[expert], out_of)
    return out


def coded_product(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    offsets: Tensor | None,
    group: int,
    bias: Tensor | None,
    out: Tensor,
    *,
    add: bool = False,
    fixed: bool = False,
) -> None:
    """Compute out [T, out] = x · weightᵀ + bias, in float32 and rounded once; with `add` out is added to. `fixed` asks
    for a row's bits to be the same with any others, which torch's product does not promise.

    weight[o, i] = scales[o, i // group] · codes[o, i] + offsets[o, i // group]; codes as `code_dtypes` has them.
    """
    total = x.float() @ coded_numbers(codes, scales, offsets, group).t()
    if bias is not None:
        total += bias.float()
    if add:
        total += out.float()
    out.copy_(total)


def coded_numbers(codes: Tensor, scales: Tensor, offsets: Tensor | None, group: int) -> Tensor:
    """Return float32 [out, in]: what codes stand for."""
    if codes.dtype == E2M1:
        return _mx_numbers(as_bytes(codes), as_bytes(scales))
    values = codes.float()
    if codes.dtype == torch.uint8:
        values = _nibbles(codes).float()
    groups = torch.arange(values.shape[1], device=codes.device) // group
    values *= scales[:, groups]
    return values if offsets is None else values + offsets[:, groups]


def _nibbles(codes: Tensor) -> Tensor:
    return torch.stack((codes & 15, codes >> 4), dim=-1).view(len(codes), -1)


def _mx_numbers(codes: Tensor, exponents: Tensor) -> Tensor:
    """Return numbers of MXFP4 [out, in / 2] and exponents [out, groups], as bytes; exact but for those below 2^-126."""
    numbers = torch.tensor(_E2M1_NUMBERS, device=codes.device)[_nibbles(codes).int()]
    numbers = numbers.view(*exponents.shape, -1)
    torch.ldexp(numbers, (exponents.int() - _E8M0_BIAS).unsqueeze(-1), out=numbers)
    return numbers.view(len(codes), -1)


def expert_numbers(weight: ExpertCodes) -> Tensor:
    """Return float32 [experts, out, in]: what all experts' codes stand for."""
    parts = (weight.codes, weight.scales, weight.offsets)
    codes, scales, offsets = (None if part is None else part.flatten(0, 1) for part in parts)
    assert codes is not None and scales is not None
    return coded_numbers(codes, scales, offsets, weight.group).view(*weight.codes.shape[:2], -1)


def choose_experts(scores: Tensor, per_token: int, over_chosen: bool, rounded: bool) -> tuple[Tensor, Tensor]:
    if over_chosen:
        chosen, experts = torch.topk(scores.float(), per_token, dim=-1)
        weights = torch.softmax(chosen, dim=-1)
    else:
        weights, experts = torch.topk(torch.softmax(scores, dim=-1, dtype=torch.float32), per_token, dim=-1)
    experts, places = torch.sort(experts, dim=-1)
    weights = torch.gather(weights, 1, places)
    return experts, weights.to(scores.dtype) if rounded else weights


def add_weighted(parts: Tensor, weights: Tensor, shared: Tensor | None, residual: Tensor) -> None:
    """Add Σ weights · parts in ascending order of places, and shared, to residual; every operation rounds."""
    weighted = (parts.view(*weights.shape, -1).float() * weights.float().unsqueeze(2)).to(residual.dtype)
    total = weighted[:, 0]
    for place in range(1, weights.shape[1]):
        total = total + weighted[:, place]
    residual.add_(total if shared is None else total + shared)
