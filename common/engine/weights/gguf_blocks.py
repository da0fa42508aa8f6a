"""From the blocks of a GGUF file to the exchange form `QuantizedWeight`, without widening.

Called by `gguf_files` with rows of bytes. Pure: bytes in, codes out. The blocks are ggml's (`ggml-quants.c`): the codes
of a block stand beside its float16 scale, in the K types under a scale of 256 inputs. What a block of each type says:

    Q8_0  32 inputs, d · q                                 Q4_K  8 times 32 inputs, d · s · q - dmin · m
    Q4_0  32 inputs, d · (q - 8)                           Q5_K  as Q4_K with a fifth bit apart
    Q4_1  32 inputs, d · q + m                             Q6_K  16 times 16 inputs, d · s · (q - 32)
    Q5_0, Q5_1  as these with a fifth bit apart

Codes of 5 and 6 bits become int8; the others keep their size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from cohort.common.engine.weights.quantized import QuantizedWeight


class BlockType(NamedTuple):
    """A block of `inputs` numbers in `stored` bytes."""

    inputs: int
    stored: int
    decode: Callable[[Tensor], QuantizedWeight]
    """From uint8 [outputs, blocks, stored]."""


def _halves(blocks: Tensor, first: int) -> Tensor:
    """float32 [outputs, blocks]: the float16 that begins at byte `first` of every block."""
    return blocks[:, :, first : first + 2].contiguous().view(torch.float16)[:, :, 0].float()


def _nibbles(low_high: Tensor) -> Tensor:
    """uint8 [..., 32]: sixteen bytes hold inputs 0 to 15 in their low nibbles and 16 to 31 in their high ones."""
    return torch.cat((low_high & 15, low_high >> 4), dim=-1)


def _paired(codes: Tensor) -> Tensor:
    """uint8 [outputs, inputs / 2], two neighbouring inputs a byte, from uint8 [outputs, ...] of all inputs in order."""
    flat = codes.reshape(len(codes), -1)
    return flat[:, 0::2] | (flat[:, 1::2] << 4)


def _fifth_bits(bits: Tensor) -> Tensor:
    """uint8 [outputs, blocks, 32] of 0 and 16, from the four bytes of every block that hold them."""
    each = torch.arange(8, dtype=torch.uint8)
    return ((bits[..., None] >> each & 1) << 4).flatten(-2)


def _q8_0(blocks: Tensor) -> QuantizedWeight:
    codes = blocks[:, :, 2:].reshape(len(blocks), -1).view(torch.int8)
    return QuantizedWeight("int8", codes, _halves(blocks, 0), None, 32)


def _q4_0(blocks: Tensor) -> QuantizedWeight:
    scales = _halves(blocks, 0)
    return QuantizedWeight("uint4", _paired(_nibbles(blocks[:, :, 2:])), scales, scales * -8, 32)


def _q4_1(blocks: Tensor) -> QuantizedWeight:
    codes = _paired(_nibbles(blocks[:, :, 4:]))
    return QuantizedWeight("uint4", codes, _halves(blocks, 0), _halves(blocks, 2), 32)


def _q5_0(blocks: Tensor) -> QuantizedWeight:
    codes = (_nibbles(blocks[:, :, 6:]) | _fifth_bits(blocks[:, :, 2:6])).view(torch.int8) - 16
    return QuantizedWeight("int8", codes.reshape(len(codes), -1), _halves(blocks, 0), None, 32)


def _q5_1(blocks: Tensor) -> QuantizedWeight:
    codes = (_nibbles(blocks[:, :, 8:]) | _fifth_bits(blocks[:, :, 4:8])).view(torch.int8)
    return QuantizedWeight("int8", codes.reshape(len(codes), -1), _halves(blocks, 0), _halves(blocks, 2), 32)


def _small_scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """float32 [outputs, blocks · 8] each: the scales d · s and the offsets -dmin · m of the K types' eight groups.

    Their twelve bytes hold 6 bits of each: the first four groups in the low bits of bytes 0 to 3 (s) and 4 to 7 (m);
    of the others the low 4 bits in bytes 8 to 11, the upper two above those of the first.
    """
    s, m, rest = blocks[:, :, 4:8], blocks[:, :, 8:12], blocks[:, :, 12:16]
    scales = torch.cat((s & 63, (rest & 15) | (s >> 6 << 4)), dim=-1).float()
    offsets = torch.cat((m & 63, (rest >> 4) | (m >> 6 << 4)), dim=-1).float()
    scales = scales * _halves(blocks, 0)[:, :, None]
    offsets = offsets * -_halves(blocks, 2)[:, :, None]
    return scales.flatten(1), offsets.flatten(1)


def _k_nibbles(stored: Tensor) -> Tensor:
    """uint8 [outputs, blocks, 8, 32]: 32 bytes hold one group in their low nibbles and the next in their high ones."""
    pairs = stored.reshape(*stored.shape[:2], 4, 32)
    return torch.stack((pairs & 15, pairs >> 4), dim=-2).flatten(2, 3)


def _q4_k(blocks: Tensor) -> QuantizedWeight:
    scales, offsets = _small_scales(blocks)
    return QuantizedWeight("uint4", _paired(_k_nibbles(blocks[:, :, 16:])), scales, offsets, 32)


def _q5_k(blocks: Tensor) -> QuantizedWeight:
    scales, offsets = _small_scales(blocks)
    groups = torch.arange(8, dtype=torch.uint8)[:, None]
    fifth = (blocks[:, :, None, 16:48] >> groups & 1) << 4
    codes = (_k_nibbles(blocks[:, :, 48:]) | fifth).view(torch.int8)
    return QuantizedWeight("int8", codes.reshape(len(codes), -1), scales, offsets, 32)


def _q6_k(blocks: Tensor) -> QuantizedWeight:
    """Twice 128 inputs: of 64 bytes the nibbles are the low bits of four runs of 32, of 32 bytes the pairs of bits the
    upper ones."""
    bytes_of = blocks[:, :, :128].reshape(*blocks.shape[:2], 2, 64)  # half, two runs of 32
    low = torch.cat((bytes_of & 15, bytes_of >> 4), dim=-1).view(*blocks.shape[:2], 2, 4, 32)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None]
    high = (blocks[:, :, 128:192].reshape(*blocks.shape[:2], 2, 1, 32) >> shifts & 3) << 4
    codes = (low | high).view(torch.int8) - 32
    small = blocks[:, :, 192:208].contiguous().view(torch.int8).float()
    scales = (small * _halves(blocks, 208)[:, :, None]).flatten(1)
    return QuantizedWeight("int8", codes.reshape(len(codes), -1), scales, None, 16)


BLOCKS: Mapping[str, BlockType] = {
    "Q8_0": BlockType(32, 34, _q8_0),
    "Q4_0": BlockType(32, 18, _q4_0),
    "Q4_1": BlockType(32, 20, _q4_1),
    "Q5_0": BlockType(32, 22, _q5_0),
    "Q5_1": BlockType(32, 24, _q5_1),
    "Q4_K": BlockType(256, 144, _q4_k),
    "Q5_K": BlockType(256, 176, _q5_k),
    "Q6_K": BlockType(256, 210, _q6_k),
}


def decoded(kind: str, rows: Tensor) -> QuantizedWeight:
    """The codes of rows of blocks: uint8 [outputs, bytes of a row] of the type `kind`, one of `BLOCKS`."""
    block = BLOCKS[kind]
    return block.decode(rows.view(len(rows), -1, block.stored))
