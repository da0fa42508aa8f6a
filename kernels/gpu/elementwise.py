# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc, no-any-return"
"""The elementwise steps of a Llama-shaped layer on a GPU, each in one launch and one pass over memory.

Called by `ops.fused` and `ops.paged_attention`. Roundings are the reference's. A decode step of a small batch
has nothing else to hide these steps behind, so rotation and the store of new keys and values are one launch.
"""

from typing import Any

import torch
import triton  # reads annotations: they are not to be postponed here
import triton.language as tl
from torch import Tensor

from cohort.kernels.fp8_cache import PLANE_SCALE_BYTES, is_fp8
from cohort.kernels.gpu.plan import power_of_two_from

_SILU_TILE = 1024


@triton.jit
def _rms_norm(
    x, weight, out, eps, x_stride, x_head_stride, out_stride, out_head_stride, WIDTH: tl.constexpr, PAD: tl.constexpr
):
    """Compute `rms_norm`, rounded before the weight unless that is in float32. Grid (tokens, heads)."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    dim = tl.arange(0, PAD)
    valid = dim < WIDTH
    wide = tl.load(x + token * x_stride + head * x_head_stride + dim, mask=valid, other=0.0).to(tl.float32)
    normed = wide * tl.rsqrt(tl.sum(wide * wide, 0) / WIDTH + eps)
    kind = out.dtype.element_ty
    factor = tl.load(weight + dim, mask=valid, other=0.0).to(tl.float32)
    scaled = (normed if weight.dtype.element_ty == tl.float32 else normed.to(kind).to(tl.float32)) * factor
    tl.store(out + token * out_stride + head * out_head_stride + dim, scaled.to(kind), mask=valid)


@triton.jit
def _silu_mul(gate_up, out, in_stride, out_stride, WIDTH: tl.constexpr, TILE: tl.constexpr):
    """Compute silu(gate) · up. Grid (tokens, tiles of the width)."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    valid = column < WIDTH
    kind = out.dtype.element_ty
    gate = tl.load(gate_up + token * in_stride + column, mask=valid, other=0.0).to(tl.float32)
    up = tl.load(gate_up + token * in_stride + WIDTH + column, mask=valid, other=0.0).to(tl.float32)
    active = (gate / (1.0 + tl.exp(-gate))).to(kind).to(tl.float32)
    tl.store(out + token * out_stride + column, (active * up).to(kind), mask=valid)


@triton.jit
def _gelu_mul(gate_up, out, in_stride, out_stride, WIDTH: tl.constexpr, TILE: tl.constexpr):
    """Compute gelu(gate) · up: x · (1 + tanh(y)) / 2 is x / (1 + e^-2y). Grid (tokens, tiles of the width)."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    valid = column < WIDTH
    kind = out.dtype.element_ty
    gate = tl.load(gate_up + token * in_stride + column, mask=valid, other=0.0).to(tl.float32)
    up = tl.load(gate_up + token * in_stride + WIDTH + column, mask=valid, other=0.0).to(tl.float32)
    bent = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)  # 2 · sqrt(2 / pi)
    active = (gate / (1.0 + tl.exp(-bent))).to(kind).to(tl.float32)
    tl.store(out + token * out_stride + column, (active * up).to(kind), mask=valid)


@triton.jit
def _soft_cap(x, cap, stride, WIDTH: tl.constexpr, TILE: tl.constexpr):
    """Compute x = cap · tanh(x / cap) in float32. Grid (rows, tiles of the width)."""
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    cell = x + tl.program_id(0).to(tl.int64) * stride + column
    wide = tl.load(cell, mask=column < WIDTH, other=0.0)
    rest = tl.exp(-2.0 * tl.abs(wide) / cap)
    bound = cap * (1.0 - rest) / (1.0 + rest)
    tl.store(cell, tl.where(wide < 0, -bound, bound), mask=column < WIDTH)


@triton.jit
def _clamped_swiglu(
    gate_up, out, alpha, limit, in_stride, out_stride, WIDTH: tl.constexpr, TILE: tl.constexpr, IN_TURN: tl.constexpr
):
    """Compute `reference.clamped_swiglu`, rounded after every operation, as in transformers. IN_TURN: each gate stands
    before its up. Grid (tokens, tiles of the width)."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    valid = column < WIDTH
    kind = out.dtype.element_ty
    first = gate_up + token * in_stride + (2 * column if IN_TURN else column)
    gate = tl.load(first, mask=valid, other=0.0).to(tl.float32)
    up = tl.load(first + (1 if IN_TURN else WIDTH), mask=valid, other=0.0).to(tl.float32)
    gate = tl.minimum(gate, limit)
    up = tl.maximum(tl.minimum(up, limit), -limit)
    steep = (gate * alpha).to(kind).to(tl.float32)
    weight = (1.0 / (1.0 + tl.exp(-steep))).to(kind).to(tl.float32)
    active = (gate * weight).to(kind).to(tl.float32)
    tl.store(out + token * out_stride + column, (active * (up + 1.0).to(kind).to(tl.float32)).to(kind), mask=valid)


@triton.jit
def _rotate_in_place(
    x,
    cos,
    sin,
    position,
    token,
    token_stride,
    head_stride,
    HEADS: tl.constexpr,
    PAD_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    PAD_HALF: tl.constexpr,
):
    """Rotate the first 2 · HALF elements of every head of one token; a thread reads both halves before it stores."""
    head = tl.arange(0, PAD_HEADS)
    dim = tl.arange(0, PAD_HALF)
    valid = (head < HEADS)[:, None] & (dim < HALF)[None, :]
    turn_cos = tl.load(cos + position * HALF + dim, mask=dim < HALF, other=0.0)[None, :]
    turn_sin = tl.load(sin + position * HALF + dim, mask=dim < HALF, other=0.0)[None, :]
    cell = x + token * token_stride + head[:, None] * head_stride + dim[None, :]
    first = tl.load(cell, mask=valid, other=0.0).to(tl.float32)
    second = tl.load(cell + HALF, mask=valid, other=0.0).to(tl.float32)
    kind = x.dtype.element_ty
    tl.store(cell, (first * turn_cos - second * turn_sin).to(kind), mask=valid)
    tl.store(cell + HALF, (second * turn_cos + first * turn_sin).to(kind), mask=valid)


@triton.jit(do_not_specialize=["positions"])
def _rope(
    q,
    k,
    cos,
    sin,
    positions,
    q_stride,
    q_head_stride,
    k_stride,
    k_head_stride,
    Q_HEADS: tl.constexpr,
    PAD_Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr,
    PAD_K_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    PAD_HALF: tl.constexpr,
):
    """Rotate queries and keys. Grid (tokens, 2): queries, keys."""
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + token)
    if tl.program_id(1) == 0:
        _rotate_in_place(q, cos, sin, position, token, q_stride, q_head_stride, Q_HEADS, PAD_Q_HEADS, HALF, PAD_HALF)
    else:
        _rotate_in_place(k, cos, sin, position, token, k_stride, k_head_stride, K_HEADS, PAD_K_HEADS, HALF, PAD_HALF)


@triton.jit
def _power_of_two(exponents):
    return ((exponents + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _store_fp8(numbers, cells, scales, held, valid):
    """Store numbers [heads, PAD_DIM], zeros where not `valid`, as `fp8_cache.encoded_apart` has them; `scales` [heads,
    1] are addresses of bytes, written where `held`."""
    wide = numbers.to(tl.float32)
    largest = tl.max(wide.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)[:, None]
    exponents = (largest >> 23) - 135 + tl.where((largest & 0x7FFFFF) > 0x600000, 1, 0)
    exponents = tl.minimum(tl.maximum(exponents, -120), 119)
    half = tl.where(exponents > 0, -(exponents // 2), (-exponents) // 2)  # one power of two may not be in float32
    bits = (wide * _power_of_two(half) * _power_of_two(-exponents - half)).to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    codes = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
    codes = tl.where(codes < 0, 0, tl.minimum(tl.maximum(codes, 8), 0x7E)) | ((bits >> 24) & 0x80)
    spoiled = largest >= 0x7F800000
    tl.store(cells, tl.where(spoiled, 0x7F, codes).to(tl.uint8), mask=valid)
    scale = tl.where(spoiled, float("nan"), _power_of_two(exponents))
    tl.store(scales.to(tl.pointer_type(tl.float32)), scale, mask=held)


@triton.jit(do_not_specialize=["positions", "slots"])
def _store_kv(
    query,
    key,
    value,
    cos,
    sin,
    positions,
    cache,
    slots,
    query_stride,
    query_head_stride,
    key_stride,
    key_head_stride,
    value_stride,
    value_head_stride,
    block_stride,
    value_offset,
    QUERY_HEADS: tl.constexpr,
    PAD_QUERY_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    PAD_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    PAD_HALF: tl.constexpr,
    ROTATED: tl.constexpr,
    FP8: tl.constexpr,
):
    """Store keys, rotated if ROTATED, and values in their slots, as codes and scales if FP8; if ROTATED also rotate
    queries. A slot below zero takes nothing. Grid (tokens, 3 if ROTATED else 2, of latents 1): keys, values,
    queries."""
    token = tl.program_id(0).to(tl.int64)
    what = tl.program_id(1)
    if what == 2:
        _rotate_in_place(
            query,
            cos,
            sin,
            tl.load(positions + token),
            token,
            query_stride,
            query_head_stride,
            QUERY_HEADS,
            PAD_QUERY_HEADS,
            HALF,
            PAD_HALF,
        )
        return
    slot = tl.load(slots + token)
    if slot < 0:
        return
    head = tl.arange(0, PAD_KV_HEADS)
    dim = tl.arange(0, PAD_DIM)
    valid = (head < KV_HEADS)[:, None] & (dim < HEAD_DIM)[None, :]
    own_slot = slot % BLOCK_SIZE
    block = cache + (slot // BLOCK_SIZE) * block_stride
    if FP8:
        block += head[:, None] * (BLOCK_SIZE * (HEAD_DIM + 4))
    else:
        block += head[:, None] * (BLOCK_SIZE * HEAD_DIM)
    cell = block + own_slot * HEAD_DIM + dim[None, :]
    scales = block + BLOCK_SIZE * HEAD_DIM + own_slot * 4
    if what == 1:
        value_cell = value + token * value_stride + head[:, None] * value_head_stride + dim[None, :]
        if FP8:
            numbers = tl.load(value_cell, mask=valid, other=0.0)
            _store_fp8(numbers, cell + value_offset, scales + value_offset, (head < KV_HEADS)[:, None], valid)
        else:
            tl.store(cell + value_offset, tl.load(value_cell, mask=valid), mask=valid)
    else:
        key_head = key + token * key_stride + head[:, None] * key_head_stride
        own = tl.load(key_head + dim[None, :], mask=valid, other=0.0)
        if ROTATED:
            # an element's partner is half a head away: the first half turns against it, the second with it
            position = tl.load(positions + token)
            turned = dim < 2 * HALF
            partner = tl.where(dim < HALF, dim + HALF, dim - HALF)
            other = tl.load(key_head + partner[None, :], mask=valid & turned[None, :], other=0.0).to(tl.float32)
            angle = position * HALF + tl.where(dim < HALF, dim, dim - HALF)
            turn_cos = tl.load(cos + angle, mask=turned, other=1.0)[None, :]
            turn_sin = tl.load(sin + angle, mask=turned, other=0.0)[None, :]
            turn_sin = tl.where((dim < HALF)[None, :], -turn_sin, turn_sin)
            own = (own.to(tl.float32) * turn_cos + other * turn_sin).to(own.dtype)
        if FP8:
            _store_fp8(own, cell, scales, (head < KV_HEADS)[:, None], valid)
        else:
            tl.store(cell, own, mask=valid)


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    """See `ops.fused.rms_norm`, for [T, W] or [T, H, W]; with a weight in float32 `wide_rms_norm`."""
    _unit_stride(x, out, weight)
    width = x.shape[-1]
    heads = x.shape[1] if x.dim() == 3 else 1
    pad = power_of_two_from(width)
    if x.dim() not in (2, 3) or out.shape != x.shape:
        raise ValueError(f"x {list(x.shape)} and out {list(out.shape)}: two or three dimensions, and the same")
    if len(x) == 0:
        return
    _rms_norm[(len(x), heads)](
        x,
        weight,
        out,
        eps,
        x.stride(0),
        x.stride(1) if heads > 1 else 0,
        out.stride(0),
        out.stride(1) if heads > 1 else 0,
        WIDTH=width,
        PAD=pad,
        num_warps=max(1, min(8, pad // 512)),
    )


def silu_mul(gate_up: Tensor, out: Tensor) -> None:
    _activate(_silu_mul, gate_up, out)


def gelu_mul(gate_up: Tensor, out: Tensor) -> None:
    _activate(_gelu_mul, gate_up, out)


def clamped_swiglu(gate_up: Tensor, alpha: float, limit: float, out: Tensor, *, in_turn: bool = False) -> None:
    _activate(_clamped_swiglu, gate_up, out, alpha, limit, IN_TURN=in_turn)


def _activate(kernel: Any, gate_up: Tensor, out: Tensor, *numbers: float, **constants: bool) -> None:
    _unit_stride(gate_up, out)
    tokens, width = out.shape
    if gate_up.shape != (tokens, 2 * width):
        raise ValueError(f"gate and up {list(gate_up.shape)} for {list(out.shape)}")
    tile = min(_SILU_TILE, power_of_two_from(width))
    if tokens:
        kernel[(tokens, -(-width // tile))](
            gate_up, out, *numbers, gate_up.stride(0), out.stride(0), WIDTH=width, TILE=tile, num_warps=4, **constants
        )


def soft_cap(x: Tensor, cap: float) -> None:
    _unit_stride(x)
    rows, width = x.shape
    tile = min(_SILU_TILE, power_of_two_from(width))
    if x.dtype != torch.float32:
        raise TypeError(f"scores {x.dtype} are not float32")
    if rows:
        _soft_cap[(rows, -(-width // tile))](x, cap, x.stride(0), WIDTH=width, TILE=tile, num_warps=4)


def rope_inplace(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> None:
    """See `ops.fused.rope_inplace`; positions are not checked."""
    _unit_stride(q, k)
    if len(q) == 0:
        return
    half = _half(cos, sin, positions, q.shape[2])
    _rope[(len(q), 2)](
        q,
        k,
        cos,
        sin,
        positions,
        *q.stride()[:2],
        *k.stride()[:2],
        Q_HEADS=q.shape[1],
        PAD_Q_HEADS=power_of_two_from(q.shape[1]),
        K_HEADS=k.shape[1],
        PAD_K_HEADS=power_of_two_from(k.shape[1]),
        HALF=half,
        PAD_HALF=power_of_two_from(half),
        num_warps=4,
    )


def write_kv(key: Tensor, value: Tensor, kv: Tensor, layer: int, slot_mapping: Tensor) -> None:
    """See `ops.paged_attention.write_kv`; slots are not checked, and one below zero takes nothing."""
    rope_and_write_kv(None, key, value, None, None, None, kv, layer, slot_mapping)


def rope_and_write_kv(
    query: Tensor | None,
    key: Tensor,
    value: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    positions: Tensor | None,
    kv: Tensor,
    layer: int,
    slots: Tensor,
) -> None:
    """See `ops.fused.rope_and_write_kv`: one launch, and `key` stays as it was; without a query `write_kv`."""
    cache = kv[:, layer]
    _, _, kv_heads, block_size, head_dim = cache.shape
    fp8 = is_fp8(kv)
    head_dim -= PLANE_SCALE_BYTES if fp8 else 0
    if key.shape != value.shape or key.shape != (len(slots), kv_heads, head_dim) or slots.dtype != torch.int64:
        raise ValueError(f"keys {list(key.shape)} and values {list(value.shape)} for {len(slots)} int64 slots")
    stored_dtype = key.dtype if fp8 else kv.dtype
    if key.dtype != stored_dtype or value.dtype != stored_dtype or not kv.is_contiguous():
        raise TypeError(f"keys {key.dtype}, values {value.dtype} for a contiguous cache of {kv.dtype}")
    _unit_stride(key, value)
    if len(key) == 0:
        return
    rotated, half, heads, planes = False, 1, 1, cache.shape[1]  # one where a latent is key and value
    if query is not None and cos is not None and sin is not None and positions is not None:
        _unit_stride(query)
        rotated, half, heads, planes = True, _half(cos, sin, positions, head_dim), query.shape[1], 3
    else:
        query, cos, sin, positions = key, key, key, slots  # pointers that are not read
    _store_kv[(len(key), planes)](
        query,
        key,
        value,
        cos,
        sin,
        positions,
        cache,
        slots,
        *query.stride()[:2],
        *key.stride()[:2],
        *value.stride()[:2],
        *cache.stride()[:2],
        QUERY_HEADS=heads,
        PAD_QUERY_HEADS=power_of_two_from(heads),
        KV_HEADS=kv_heads,
        PAD_KV_HEADS=power_of_two_from(kv_heads),
        BLOCK_SIZE=block_size,
        HEAD_DIM=head_dim,
        PAD_DIM=power_of_two_from(head_dim),
        HALF=half,
        PAD_HALF=power_of_two_from(half),
        ROTATED=rotated,
        FP8=fp8,
        num_warps=4,
    )


def _half(cos: Tensor, sin: Tensor, positions: Tensor, head_dim: int) -> int:
    if cos.dtype != torch.float32 or sin.dtype != torch.float32 or positions.dtype != torch.int64:
        raise TypeError("cos and sin must be float32, positions int64")
    if not (cos.is_contiguous() and sin.is_contiguous()) or cos.shape != sin.shape or 2 * cos.shape[1] > head_dim:
        raise ValueError(f"cos {list(cos.shape)} and sin {list(sin.shape)} for heads of {head_dim}")
    return cos.shape[1]


def _unit_stride(*tensors: Tensor) -> None:
    if any(tensor.stride(-1) != 1 for tensor in tensors):
        raise ValueError("the last dimension must lie side by side")
