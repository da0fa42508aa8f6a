# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc, no-any-return"
"""R12 · Gather and scatter of whole tokens on a GPU: a list of any length is one launch.

Called by `ops.slots`. A slot number counts slots from the left of the pool, whatever the direction of its block, so
the direction is already in it. A cache of bytes is in FP8, in planes (`fp8_cache`): a token's row is then its codes and
behind them its scale's bytes.
"""

import torch
import triton  # reads annotations: they are not to be postponed here
import triton.language as tl
from torch import Tensor

from cohort.kernels.fp8_cache import PLANE_SCALE_BYTES, is_fp8
from cohort.kernels.gpu.plan import power_of_two_from

_PIECES = 32  # a piece: K or V of one layer and head, HEAD_DIM elements side by side


@triton.jit(do_not_specialize=["slots"])
def _copy_tokens(
    kv,
    slots,
    tokens,
    block_stride,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SCALE: tl.constexpr,
    PAD_DIM: tl.constexpr,
    TOKEN_PIECES: tl.constexpr,
    PIECES: tl.constexpr,
    INTO_CACHE: tl.constexpr,
):
    """Copy tokens. The last SCALE elements of a row lie after all rows' others. Grid (tokens, parts of a token)."""
    item = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + item)
    piece = tl.program_id(1) * PIECES + tl.arange(0, PIECES)
    dim = tl.arange(0, PAD_DIM)
    valid = (piece < TOKEN_PIECES)[:, None] & (dim < HEAD_DIM)[None, :]
    own = slot % BLOCK_SIZE
    in_row = own * (HEAD_DIM - SCALE) + dim
    if SCALE:
        in_row += tl.where(dim >= HEAD_DIM - SCALE, (BLOCK_SIZE - 1 - own) * (HEAD_DIM - SCALE) + own * SCALE, 0)
    in_block = piece * (BLOCK_SIZE * HEAD_DIM)
    cell = kv + (slot // BLOCK_SIZE) * block_stride + in_block[:, None] + in_row[None, :]
    dense = tokens + item * (TOKEN_PIECES * HEAD_DIM) + (piece * HEAD_DIM)[:, None] + dim[None, :]
    if INTO_CACHE:
        tl.store(cell, tl.load(dense, mask=valid), mask=valid)
    else:
        tl.store(dense, tl.load(cell, mask=valid), mask=valid)


def gather_slots(kv: Tensor, slots: Tensor, out: Tensor) -> None:
    """Copy out[i] = the token in slots[i]; `out` on the cache's device."""
    _launch(kv, slots, out, into_cache=False)


def scatter_slots(src: Tensor, kv: Tensor, slots: Tensor) -> None:
    """Copy src[i] to slots[i]; the slots must differ from each other; `src` on the cache's device."""
    _launch(kv, slots, src, into_cache=True)


def _launch(kv: Tensor, slots: Tensor, tokens: Tensor, *, into_cache: bool) -> None:
    _, layers, two, kv_heads, block_size, head_dim = kv.shape
    if tokens.shape != (len(slots), layers, two, kv_heads, head_dim):
        raise ValueError(f"{list(tokens.shape)} does not hold {len(slots)} slots of a cache {list(kv.shape)}")
    if tokens.dtype != kv.dtype or slots.dtype != torch.int64:
        raise TypeError(f"tokens {tokens.dtype} of a cache {kv.dtype}, slots {slots.dtype}; slots must be int64")
    if not (tokens.is_contiguous() and kv.is_contiguous()):
        raise ValueError("tokens and the cache must be contiguous")
    if len(slots) == 0:
        return
    pieces = layers * two * kv_heads
    at_once = min(_PIECES, power_of_two_from(pieces))
    _copy_tokens[(len(slots), -(-pieces // at_once))](
        kv,
        slots,
        tokens,
        kv.stride(0),
        BLOCK_SIZE=block_size,
        HEAD_DIM=head_dim,
        SCALE=PLANE_SCALE_BYTES if is_fp8(kv) else 0,
        PAD_DIM=power_of_two_from(head_dim),
        TOKEN_PIECES=pieces,
        PIECES=at_once,
        INTO_CACHE=into_cache,
        num_warps=4,
    )
