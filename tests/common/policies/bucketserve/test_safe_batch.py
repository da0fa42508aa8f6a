"""Eq. 1, 5 and 6 with Llama-2-13B's numbers and against brute force."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from cohort.common.policies.bucketserve.safe_batch import batch_kv_blocks, expected_safe_batch, next_is_safe, safe_bytes
from cohort.common.types import KvGeometry
from tests.common.policies.bucketserve.cluster import BLOCK, controller, pair
from tests.examples import examples

LLAMA_2_13B = KvGeometry(num_layers=40, num_kv_heads=40, head_dim=128, dtype_bytes=2, block_size=1)
LLAMA_3_8B = KvGeometry(num_layers=32, num_kv_heads=8, head_dim=128, dtype_bytes=2, block_size=1)


def test_equation_1_by_hand() -> None:
    # 2 · 40 · 40 · 128 · 2 B = 819,200 B a token; 8 requests of 1,000 tokens
    assert batch_kv_blocks(1000, 8, LLAMA_2_13B) * LLAMA_2_13B.block_bytes == 819_200 * 8000
    # Grouped queries: 8 key/value heads instead of 32 attention heads, a quarter of the bytes
    assert batch_kv_blocks(1, 1, LLAMA_3_8B) * LLAMA_3_8B.block_bytes == 131_072


def test_equation_5_keeps_ten_per_cent() -> None:
    assert safe_bytes(10 * 2**30, 0.1) == 9 * 2**30
    assert safe_bytes(-5, 0.1) == 0


def batch_of(lengths: list[int], memory_bytes: int, geometry: KvGeometry) -> int:
    """As `Round.take` goes on: each next request as long as it is safe."""
    left, taken = memory_bytes // geometry.block_bytes, 0
    for length in lengths:
        if not next_is_safe(left, geometry.blocks_for(length)):
            break
        left, taken = left - geometry.blocks_for(length), taken + 1
    return taken


def test_equation_6_by_hand() -> None:
    token = LLAMA_2_13B.token_bytes
    assert batch_of([300, 300, 300, 300], 1000 * token, LLAMA_2_13B) == 3
    assert batch_of([300, 300, 400], 1000 * token, LLAMA_2_13B) == 3
    assert batch_of([1001, 1], 1000 * token, LLAMA_2_13B) == 0
    assert batch_of([], 1000 * token, LLAMA_2_13B) == 0


def test_blocks_that_are_kept_are_not_for_this_request() -> None:
    assert next_is_safe(10, 6, 4) and not next_is_safe(10, 7, 4)


def test_lengths_take_whole_blocks() -> None:
    paged = KvGeometry(40, 40, 128, 2, block_size=16)
    # 17 tokens are two blocks: of four blocks only two such requests may come
    assert batch_of([17, 17, 17], 4 * paged.block_bytes, paged) == 2


def test_the_expected_batch_is_equation_6_at_the_mean() -> None:
    assert expected_safe_batch(300.0, 1000 * LLAMA_2_13B.token_bytes, LLAMA_2_13B) == 3
    assert expected_safe_batch(300.0, 0, LLAMA_2_13B) == 1


@given(
    lengths=st.lists(st.integers(1, 500), max_size=12),
    blocks=st.integers(0, 100),
    block_size=st.sampled_from([1, 8, 16]),
)
def test_the_largest_prefix_that_fits(lengths: list[int], blocks: int, block_size: int) -> None:
    geometry = KvGeometry(2, 1, 8, 2, block_size)
    memory = blocks * geometry.block_bytes
    fitting = [
        n
        for n in range(len(lengths) + 1)
        if sum(geometry.blocks_for(length) for length in lengths[:n]) * geometry.block_bytes <= memory
    ]
    assert batch_of(lengths, memory, geometry) == max(fitting)


@settings(max_examples=examples(1))
@given(lengths=st.lists(st.integers(2, 20), min_size=1, max_size=60), blocks=st.integers(10, 80))
def test_a_live_batch_is_the_largest_of_equation_6(lengths: list[int], blocks: int) -> None:
    """Prompts of one token, so that nothing but the decode worker's memory bounds the batch."""
    round_ = controller().open(0.0, pair(blocks=blocks))
    round_.next_batch()
    taken = [round_.take(f"r{i}", 1, length, online=True) for i, length in enumerate(lengths)]
    safe = int(0.9 * blocks)
    fitting = [n for n in range(len(lengths) + 1) if sum(-(-length // BLOCK) for length in lengths[:n]) <= safe]
    first_refused = taken.index(False) if False in taken else len(lengths)
    assert first_refused == max(fitting)
