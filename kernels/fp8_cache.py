"""Keys and values in FP8, in plain torch: what a row of such a cache holds, and back.

Called by `reference`; the compiled kernels do the same in registers (`csrc/fp8_cache.h`, which says what the bits are).
A row is the codes of one token's key or value of one head, in E4M3, and its own scale, a power of two that moves its
largest number into (224, 448]. So nothing is calibrated and a row is final when it is written. Where the scale lies
depends on the device:

    processors    [block size, head_dim + 1] bytes of a block's layer and head: codes, and behind each row its scale,
                  one byte
    GPUs, planes  [block size, head_dim] codes, then [block size] scales in float32: as many bytes as
                  [block size, head_dim + 4], but codes lie in whole words of 16 bytes, and a scale in one of 4, which
                  is what asynchronous copies move

Blocks of either kind weigh differently, so no worker takes one for the other. Decides nothing about which caches are
kept so.
"""

from __future__ import annotations

import torch
from torch import Tensor

SCALE_BYTES = 1
"""Scale of a row, after its codes."""

PLANE_SCALE_BYTES = 4
"""Scale of a row in planes."""

_BIAS = 120
_LARGEST_SCALE = 239
_SPOILED = 240


def is_fp8(kv: Tensor) -> bool:
    """Return whether a cache's rows are in FP8; others have the model's dtype."""
    return kv.dtype == torch.uint8


def encoded(values: Tensor) -> Tensor:
    """Encode numbers [..., D] as uint8 [..., D + 1]. A number moves by at most 2^-4 of itself, or 2^-14 of the row's
    largest; a row with an infinity or a NaN becomes NaN."""
    bits = values.float().contiguous().view(torch.int32)
    largest = (bits & 0x7FFFFFFF).amax(dim=-1, keepdim=True)
    exponents = (largest >> 23) - 127 - 8 + ((largest & 0x7FFFFF) > 0x600000).int()
    scales = (exponents + _BIAS).clamp(0, _LARGEST_SCALE)
    down = _BIAS - scales
    half = torch.div(down, 2, rounding_mode="trunc")  # one power of two may be more than float32 can say
    scaled = values.float() * _power_of_two(half) * _power_of_two(down - half)
    bits = scaled.view(torch.int32)
    size = bits & 0x7FFFFFFF
    codes = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (_BIAS << 3)
    codes = torch.where(codes < 0, 0, codes.clamp(8, 0x7E)) | ((bits >> 24) & 0x80)
    spoiled = largest >= 0x7F800000
    codes = torch.where(spoiled, 0x7F, codes)
    scales = torch.where(spoiled, _SPOILED, scales)
    return torch.cat((codes, scales), dim=-1).to(torch.uint8)


def _power_of_two(exponents: Tensor) -> Tensor:
    return ((exponents + 127) << 23).view(torch.float32)


def in_planes(kv: Tensor, head_dim: int) -> bool:
    """Return whether codes and scales of a cache [..., block size, width] for heads of `head_dim` lie apart."""
    return is_fp8(kv) and kv.shape[-1] == head_dim + PLANE_SCALE_BYTES


def planes(kv: Tensor) -> tuple[Tensor, Tensor]:
    """Return views of a contiguous cache in planes, uint8 [..., block size, D + 4]: codes uint8 [..., block size, D]
    and scales float32 [..., block size]."""
    block_size, head_dim = kv.shape[-2], kv.shape[-1] - PLANE_SCALE_BYTES
    flat = kv.flatten(-2)
    codes = flat[..., : block_size * head_dim].unflatten(-1, (block_size, head_dim))  # type: ignore[no-untyped-call]
    return codes, flat[..., block_size * head_dim :].view(torch.float32)


def encoded_apart(values: Tensor) -> tuple[Tensor, Tensor]:
    """Encode numbers [..., D] as planes hold them: codes uint8 [..., D] and scales float32 [...]."""
    rows = encoded(values)
    exponents = rows[..., -1].int()
    return rows[..., :-1], torch.where(exponents >= _SPOILED, torch.nan, _power_of_two(exponents - _BIAS))


def decoded_apart(codes: Tensor, scales: Tensor) -> Tensor:
    """Return float32 [..., D], the numbers that `decoded` gives for the same row."""
    exponents = torch.where(scales.isnan(), _SPOILED, (scales.view(torch.int32) >> 23) - 127 + _BIAS)
    return decoded(torch.cat((codes, exponents[..., None].to(torch.uint8)), dim=-1))


def decoded(rows: Tensor) -> Tensor:
    """Return float32 [..., D] of rows uint8 [..., D + 1]; bfloat16 holds these numbers, too."""
    codes, scales = rows[..., :-1].int(), rows[..., -1:].int()
    size = (codes & 0x7F) << 20
    bits = torch.where(size < 0x800000, 0, size + (scales << 23)) | torch.where(codes >= 0x80, -(1 << 31), 0)
    return bits.int().view(torch.float32)
