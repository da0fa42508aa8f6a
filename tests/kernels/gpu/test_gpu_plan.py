"""How work is cut: numbers from shapes alone, so a captured graph may keep them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cohort.kernels.gpu.plan import MAX_SPLITS, decode_plan, decode_splits, power_of_two_from, prefill_plan

H200 = 132


def test_one_long_row_fills_the_device():
    """8 kv heads × 66 parts = 4 programs for each of 132 multiprocessors."""
    assert decode_splits(1, 8, 131_072, H200, 128) == 66


def test_a_large_batch_is_not_split():
    assert decode_splits(256, 8, 4096, H200, 128) == 1


def test_a_large_batch_of_possibly_long_rows_is_split_so_that_none_walks_far():
    assert decode_splits(256, 8, 131_072, H200, 128) == 131_072 // 8192


def test_a_short_context_has_few_parts():
    assert decode_splits(1, 8, 500, H200, 128) == 4
    assert decode_splits(1, 8, 1, H200, 128) == 1


@settings(max_examples=100)
@given(
    rows=st.integers(1, 1024), kv_heads=st.integers(1, 64), context=st.integers(1, 1 << 20),
    multiprocessors=st.integers(1, 200),
)  # fmt: skip
def test_splits_stay_in_their_bounds(rows, kv_heads, context, multiprocessors):
    splits = decode_splits(rows, kv_heads, context, multiprocessors, 128)
    assert 1 <= splits <= MAX_SPLITS
    assert (splits - 1) * 128 < context
    programs = rows * kv_heads * splits
    assert programs < 4 * multiprocessors + rows * kv_heads or (splits - 1) * 8192 < context


@pytest.mark.parametrize("head_dim", [20, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("element_bytes", [2, 4])
@pytest.mark.parametrize("group", [1, 4, 5, 8, 17, 71])
def test_tiles_fit_the_device(head_dim, element_bytes, group):
    """Three stages of keys and values stay within the 227 KiB of a multiprocessor; Triton wants powers of two."""
    decode = decode_plan(
        16, kv_heads=8, head_dim=head_dim, element_bytes=element_bytes, max_context=8192, multiprocessors=H200
    )
    prefill = prefill_plan(group=group, head_dim=head_dim, element_bytes=element_bytes)
    for plan in (decode, prefill):
        assert plan.tile_keys == power_of_two_from(plan.tile_keys) >= 16
        assert plan.stages * 2 * plan.tile_keys * power_of_two_from(head_dim) * element_bytes <= 200 << 10
    assert decode.min_split_keys % decode.tile_keys == 0
    assert prefill.tile_rows == power_of_two_from(prefill.tile_rows)
    assert 1 <= prefill.tile_tokens <= prefill.tile_rows // group
