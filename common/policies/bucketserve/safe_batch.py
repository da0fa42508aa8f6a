"""How much memory a batch of requests needs, how much there is, and so how large a batch may be.

Pure arithmetic; `controller.py` asks with live stats, `baselines/predicted_batches.py` for its padded cache. Never
decides which requests.
"""

from __future__ import annotations

import math

from cohort.common.types import KvGeometry


def batch_kv_blocks(longest_tokens: int, requests: int, geometry: KvGeometry) -> int:
    """B1 · BucketServe Eq. 1: KV of a batch padded to its longest request.

        2 · L · H · D · S_max · B · N

    H → key/value heads after GQA (the paper writes attention heads, which counts a GQA model several times over).
    2 · L · H · D · B is `geometry.token_bytes`. Differs from the paper: in whole blocks, because memory is handed out
    so; with a block size of 1 it is Eq. 1 divided by the bytes of a token.
    """
    return requests * geometry.blocks_for(longest_tokens)


def safe_bytes(remaining_bytes: int, reserve: float) -> int:
    """B3 · BucketServe Eq. 5: M_safe = (1 − reserve) · M_remain; the paper's reserve is 0.1."""
    return max(0, int((1.0 - reserve) * remaining_bytes))


def next_is_safe(left_blocks: int, span_blocks: int, kept_blocks: int = 0) -> bool:
    """B4 · BucketServe Eq. 6, asked for one request after the other: a batch that takes each next one as long as this
    holds is the largest that cannot exhaust memory.

        max N  s.t.  Σ_{i≤N} S_i ≤ M_safe / (2·L·H·D·B)

    S_i (prompt + predicted output, in dispatch order) → span_blocks; M_safe (B3) less the spans before → left_blocks.
    `kept_blocks` of them are not for this request.
    Differs from the paper: a span is rounded up to whole blocks, because paged memory is handed out so; with a block
    size of 1 it is Eq. 6 exactly.
    """
    return span_blocks <= left_blocks - kept_blocks


def expected_safe_batch(mean_total_length: float, memory_bytes: int, geometry: KvGeometry) -> int:
    """B4 · Eq. 6 for requests of mean length: the N_max of Alg. 1, without looking at each waiting request.

    At least 1: a bucket set that may hold nothing cannot be adjusted.
    """
    held = min(mean_total_length, geometry.most_held(math.ceil(mean_total_length)))
    return max(1, int(memory_bytes / (geometry.token_bytes * max(1.0, held))))
