"""Sums over a run's bytes that both ends of a transfer compare, in the form that suits the memory they lie in.

Called by the worker's view of its cache. CRC-32 where a processor sums; on a GPU a weighted sum of words, in one
pass at the memory's speed and with eight bytes to the host instead of the run. The sum tells its own form, so that
workers of both kinds understand each other: values under 2**32 are CRC-32, others carry bit 32.
"""

from __future__ import annotations

import math
import zlib

import torch
from torch import Tensor

_WEIGHTED = 1 << 32
_WORDS_PER_GROUP = 1024


def crc32(data: Tensor) -> int:
    """Of host bytes, uint8; never 0, which means "no sum"."""
    return zlib.crc32(data.numpy().data) or 1


def weighted(data: Tensor) -> int:
    """Of bytes in any memory, uint8, a multiple of four: Σ (2 g + 1) · (sum of group g's words), folded to 32 bits.

    Any changed word, and groups that changed places, change it; words that changed places inside a group of 4 KiB do
    not.
    """
    words = data.view(torch.int32)
    groups = words.view(-1, math.gcd(len(words), _WORDS_PER_GROUP)).sum(dim=1, dtype=torch.int64)
    weights = torch.arange(1, 2 * len(groups) + 1, 2, dtype=torch.int64, device=data.device)
    total = int((groups * weights).sum()) & ((1 << 64) - 1)
    return (total ^ total >> 32) & 0xFFFFFFFF | _WEIGHTED


def alike(data: Tensor, other: int) -> int:
    """The sum of `data` in the form that `other` has."""
    return weighted(data) if other & _WEIGHTED else crc32(data.cpu())
