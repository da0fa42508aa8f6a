"""Eq. 1, 5 and 6 with Llama-2-13B's numbers and against brute force."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cohort.common.policies.bucketserve.safe_batch import (
    batch_kv_bytes,
    expected_safe_batch,
    max_safe_batch,
    safe_bytes,
)
from cohort.common.types import KvGeometry

LLAMA_2_13B = KvGeometry(num_layers=40, num_kv_heads=40, head_dim=128, dtype_bytes=2, block_size=1)
LLAMA_3_8B = KvGeometry(num_layers=32, num_kv_heads=8, head_dim=128, dtype_bytes=2, block_size=1)


def test_equation_1_by_hand() -> None:
    # 2 · 40 · 40 · 128 · 2 B = 819,200 B a token; 8 requests of 1,000 tokens
    assert batch_kv_bytes(1000, 8, LLAMA_2_13B) == 819_200 * 8000
    # Grouped queries: 8 key/value heads instead of 32 attention heads, a quarter of the bytes
    assert batch_kv_bytes(1, 1, LLAMA_3_8B) == 131_072


def test_equation_5_keeps_ten_per_cent() -> None:
    assert safe_bytes(10 * 2**30, 0.1) == 9 * 2**30
    assert safe_bytes(-5, 0.1) == 0


def test_equation_6_by_hand() -> None:
    token = LLAMA_2_13B.token_bytes
    assert max_safe_batch([300, 300, 300, 300], 1000 * token, LLAMA_2_13B) == 3
    assert max_safe_batch([300, 300, 400], 1000 * token, LLAMA_2_13B) == 3
    assert max_safe_batch([1001, 1], 1000 * token, LLAMA_2_13B) == 0
    assert max_safe_batch([], 1000 * token, LLAMA_2_13B) == 0


def test_spans_take_whole_blocks() -> None:
    paged = KvGeometry(40, 40, 128, 2, block_size=16)
    # 17 tokens are two blocks: of four blocks only two such requests may come
    assert max_safe_batch([17, 17, 17], 4 * paged.block_bytes, paged) == 2


def test_the_expected_batch_is_equation_6_at_the_mean() -> None:
    assert expected_safe_batch(300.0, 1000 * LLAMA_2_13B.token_bytes, LLAMA_2_13B) == 3
    assert expected_safe_batch(300.0, 0, LLAMA_2_13B) == 1


@given(
    spans=st.lists(st.integers(1, 500), max_size=12), blocks=st.integers(0, 100), block_size=st.sampled_from([1, 8, 16])
)
def test_the_largest_prefix_that_fits(spans: list[int], blocks: int, block_size: int) -> None:
    geometry = KvGeometry(2, 1, 8, 2, block_size)
    memory = blocks * geometry.block_bytes
    fitting = [
        n
        for n in range(len(spans) + 1)
        if sum(geometry.blocks_for(span) for span in spans[:n]) * geometry.block_bytes <= memory
    ]
    assert max_safe_batch(spans, memory, geometry) == max(fitting)
