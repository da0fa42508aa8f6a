"""How much memory a batch of requests needs, how much there is, and so how large a batch may be.

Pure arithmetic, called by `controller.py` with live stats and by `baselines/predicted_batches.py` for its padded cache.
"""

from __future__ import annotations

import math

from cohort.common.types import KvGeometry


def batch_kv_blocks(longest_tokens: int, requests: int, geometry: KvGeometry) -> int:
    """B1 · BucketServe Eq. 1: Return the KV, in blocks, of a batch padded to its longest request.

        2 · L · H · D · S_max · B · N

    H → key/value heads after GQA (the paper writes attention heads, which counts a GQA model several times over).
    2 · L · H · D · B is `geometry.token_bytes`. Differs from the paper: in whole blocks; with a block size of 1 it is
    Eq. 1 divided by the bytes of a token.
    """
    return requests * geometry.blocks_for(longest_tokens)


def safe_bytes(remaining_bytes: int, reserve: float) -> int:
    """B3 · BucketServe Eq. 5: Return M_safe = (1 − reserve) · M_remain; the paper's reserve is 0.1."""
    return max(0, int((1.0 - reserve) * remaining_bytes))


def next_is_safe(remaining_blocks: int, span_blocks: int, reserved_blocks: int = 0) -> bool:
    """Return whether a batch may take this request too: the longest run of such requests is the largest batch that
    cannot exhaust memory (B4 · BucketServe Eq. 6).

        max N  s.t.  Σ_{i≤N} S_i ≤ M_safe / (2·L·H·D·B)

    S_i (prompt + predicted output, in dispatch order) → span_blocks; M_safe (B3) less the spans before →
    remaining_blocks, of which `reserved_blocks` are not for this request.
    Differs from the paper: spans are whole blocks; with a block size of 1 it is Eq. 6 exactly.
    """
    return span_blocks <= remaining_blocks - reserved_blocks


def expected_safe_batch(mean_total_length: float, memory_bytes: int, geometry: KvGeometry) -> int:
    """B4 · Return the N_max of Alg. 1 from Eq. 6 for requests of mean length; at least 1."""
    held = min(mean_total_length, geometry.most_held(math.ceil(mean_total_length)))
    return max(1, int(memory_bytes / (geometry.token_bytes * max(1.0, held))))
