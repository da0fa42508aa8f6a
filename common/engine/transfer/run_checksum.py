"""Sums over a run's bytes that both ends of a transfer compare, in the form that suits their memory.

CRC-32 if a processor sums; on a GPU a weighted sum of words, in one pass at the memory's speed and with eight bytes to
the host instead of the run. The sum carries its form, so that workers of both kinds understand each other: values under
2**32 are CRC-32, others carry bit 32.

A sender may gather scattered runs and send them as one message under the first one's tag. It announces that with the
sums: a run with bit 33 has no sum of its own; its bytes follow those of the run before in the same message, whose first
run carries the sum of all.

A message between workers of which one has several ranks goes in parts, from rank to rank (`kv_parts`). Its sum is a sum
over its parts' sums; bits 34 on hold the sender's number of ranks less one.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

JOINED = 1 << 33
WEIGHTED = 1 << 32
_SUM_BITS = (1 << 33) - 1
_RANKS_SHIFT = 34
_WORDS_PER_GROUP = 1024


def crc32(data: Tensor) -> int:
    """Sum host bytes, uint8; never 0, which means "no sum"."""
    return zlib.crc32(data.numpy().data) or 1


def weighted_all(datas: Sequence[Tensor]) -> list[int]:
    """Sum each, bytes in one device's memory, uint8, a multiple of four: Σ (2 g + 1) · (sum of group g's words), folded
    to 32 bits. Computed one after the other there, with one wait for all. Any changed word, and groups that changed
    places, change it; words that changed places inside a group of 4 KiB do not."""
    if not datas:
        return []
    totals = [total & ((1 << 64) - 1) for total in torch.stack([_weighted_words(data) for data in datas]).tolist()]
    return [(bits ^ bits >> 32) & 0xFFFFFFFF | WEIGHTED for bits in totals]


def alike_all(datas: Sequence[Tensor], others: Sequence[int]) -> list[int]:
    """Return the sum of each in the form that its counterpart in `others` has."""
    heavy = iter(weighted_all([data for data, other in zip(datas, others, strict=True) if other & WEIGHTED]))
    return [next(heavy) if other & WEIGHTED else crc32(data.cpu()) for data, other in zip(datas, others, strict=True)]


def of_ranks(ranks: int) -> int:
    """Return the bits by which a sum carries its sender's number of ranks; 0 for one rank."""
    return ranks - 1 << _RANKS_SHIFT


def ranks_of(value: int) -> int:
    return (value >> _RANKS_SHIFT) + 1


def sum_of(value: int) -> int:
    """Return the sum alone; 0 if there is none."""
    return value & _SUM_BITS


def joint(sums: Sequence[int]) -> int:
    """Return one sum over those of a message's parts, in their form."""
    return (zlib.crc32(struct.pack(f"<{len(sums)}Q", *sums)) or 1) | sums[0] & WEIGHTED


def _weighted_words(data: Tensor) -> Tensor:
    words = data.view(torch.int32)
    groups = words.view(-1, math.gcd(len(words), _WORDS_PER_GROUP)).sum(dim=1, dtype=torch.int64)
    weights = torch.arange(1, 2 * len(groups) + 1, 2, dtype=torch.int64, device=data.device)
    return (groups * weights).sum()
