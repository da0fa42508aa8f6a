"""How much memory a batch of requests needs, how much there is, and so how large a batch may be.

Pure arithmetic; `controller.py` feeds it with live figures. Never decides which requests.
"""

from __future__ import annotations

from collections.abc import Sequence

from cohort.common.types import KvGeometry


def batch_kv_bytes(longest_tokens: int, requests: int, geometry: KvGeometry) -> int:
    """B1 · BucketServe Eq. 1: KV bytes of a batch padded to its longest request.

        2 · L · H · D · S_max · B · N

    H → key/value heads after GQA (the paper writes attention heads, which counts a GQA model several times over).
    """
    return geometry.token_bytes * longest_tokens * requests


def safe_bytes(remaining_bytes: int, reserve: float) -> int:
    """B3 · BucketServe Eq. 5: M_safe = (1 − reserve) · M_remain; the paper's reserve is 0.1."""
    return max(0, int((1.0 - reserve) * remaining_bytes))


def max_safe_batch(span_tokens: Sequence[int], memory_bytes: int, geometry: KvGeometry) -> int:
    """B4 · BucketServe Eq. 6: the largest batch that cannot exhaust memory.

        max N  s.t.  Σ_{i≤N} S_i ≤ M_safe / (2·L·H·D·B)

    S_i → span_tokens in dispatch order (prompt + predicted output); M_safe → memory_bytes (B3).
    Differs from the paper: a span is rounded up to whole blocks, because paged memory is handed out so; with a block
    size of 1 it is Eq. 6 exactly.
    """
    blocks_left = memory_bytes // geometry.block_bytes
    for count, tokens in enumerate(span_tokens):
        blocks_left -= geometry.blocks_for(tokens)
        if blocks_left < 0:
            return count
    return len(span_tokens)


def expected_safe_batch(mean_span_tokens: float, memory_bytes: int, geometry: KvGeometry) -> int:
    """B4 · Eq. 6 for requests of mean length: the N_max of Alg. 1, without looking at each waiting request.

    At least 1: a bucket set that may hold nothing cannot be adjusted.
    """
    return max(1, int(memory_bytes / (geometry.token_bytes * max(1.0, mean_span_tokens))))
