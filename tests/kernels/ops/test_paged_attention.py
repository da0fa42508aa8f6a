"""Paged attention against dense attention in float64, for both implementations."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from cohort.kernels.ops.paged_attention import AttentionMeta, paged_attention, write_kv
from tests.examples import examples

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
MIXED_ROWS = [(40, 40), (70, 33), (19, 2), (1, 1), (16, 1), (133, 1)]  # whole prompt, chunks, decode


def attend(step, **options) -> Tensor:
    out = torch.full_like(step.query, float("nan"))
    paged_attention(step.query, step.kv, step.layer, step.meta, step.scale, out, **options)
    return out


def sinks_of(step, spread: float = 4.0) -> Tensor:
    """From far below the scores to far above: heads that hardly notice, and heads that give almost nothing."""
    return torch.linspace(-spread, spread, step.query.shape[1])


@DTYPES
@pytest.mark.parametrize("head_dim", [16, 32, 64, 80, 96, 112, 128, 256, 20])
def test_every_head_size(implementation, make_step, assert_close, dtype, head_dim):
    step = make_step([(37, 20), (50, 1)], head_dim=head_dim, group=3, dtype=dtype, directions="mixed")
    assert_close(attend(step), step.expected())


@DTYPES
@pytest.mark.parametrize("head_dim", [20, 40, 64, 72])
def test_many_decode_rows(implementation, make_step, assert_close, dtype, head_dim):
    """From a few rows per thread on, one task takes all heads of a row, where the head's size lets it."""
    step = make_step([(37 + row, 1) for row in range(12)], head_dim=head_dim, dtype=dtype, directions="mixed")
    assert_close(attend(step), step.expected())


@DTYPES
@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 6, 7, 8, 17])
def test_every_group_size(implementation, make_step, assert_close, dtype, group):
    step = make_step([(37, 11), (50, 1), (9, 1)], group=group, head_dim=32, dtype=dtype, directions="mixed")
    assert_close(attend(step), step.expected())


@DTYPES
@pytest.mark.parametrize("directions", ["forward", "reversed", "mixed"])
@pytest.mark.parametrize("sliding_window", [0, 1, 25])
def test_prefill_chunks_and_decode_in_one_call(
    implementation, make_step, assert_close, dtype, directions, sliding_window
):
    step = make_step(MIXED_ROWS, dtype=dtype, directions=directions)
    assert_close(attend(step, sliding_window=sliding_window), step.expected(sliding_window))


@DTYPES
@pytest.mark.parametrize("head_dim", [20, 64, 256])
@pytest.mark.parametrize("sliding_window", [0, 25])
@pytest.mark.parametrize("softcap", [0.05, 1.0, 50.0])
def test_soft_capped_scores(implementation, make_step, assert_close, dtype, head_dim, sliding_window, softcap):
    step = make_step(MIXED_ROWS, head_dim=head_dim, dtype=dtype, directions="mixed")
    step.scale *= 8  # scores from far below the caps to far above
    found, expected = (
        attend(step, sliding_window=sliding_window, softcap=softcap),
        step.expected(sliding_window, softcap),
    )
    assert_close(found, expected)
    assert softcap == 50 or not torch.allclose(expected, step.expected(sliding_window), rtol=0.1, atol=0.1)


@DTYPES
@pytest.mark.parametrize("head_dim", [20, 64, 256])
@pytest.mark.parametrize("sliding_window", [0, 25])
def test_sinks_take_their_share(implementation, make_step, assert_close, dtype, head_dim, sliding_window):
    step = make_step(MIXED_ROWS, head_dim=head_dim, dtype=dtype, directions="mixed")
    sinks = sinks_of(step)
    expected = step.expected(sliding_window, sinks=sinks)
    assert_close(attend(step, sliding_window=sliding_window, sinks=sinks), expected)
    assert not torch.allclose(expected, step.expected(sliding_window), rtol=0.1, atol=0.1)


@DTYPES
def test_sinks_far_from_the_scores_do_not_overflow(implementation, make_step, assert_close, dtype):
    step = make_step([(80, 20), (80, 1)], dtype=dtype)
    sinks = torch.tensor([-1e4, float("-inf"), 1e4, 300.0])
    found = attend(step, sinks=sinks)
    assert_close(found[:, :2], step.expected()[:, :2])
    assert found[:, 2:].eq(0).all()


@DTYPES
@pytest.mark.parametrize("threads", [1, 2])
def test_a_context_in_parts_counts_a_sink_once(implementation, make_step, assert_close, dtype, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        step = make_step([(1100, 20), (2000, 1)], kv_heads=1, group=3, head_dim=32, dtype=dtype, directions="mixed")
        sinks = sinks_of(step) + 6  # about the sum of a thousand keys' weights
        assert_close(attend(step, sinks=sinks), step.expected(sinks=sinks))
        assert_close(attend(step, sliding_window=900, sinks=sinks), step.expected(900, sinks=sinks))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("queries", [1, 20])
def test_direction_changes_where_tokens_lie_and_nothing_else(implementation, make_step, queries):
    rows = [(96, queries), (32, queries)]  # full blocks, so that reading the wrong way round reads tokens, not NaN
    forward, backward = make_step(rows), make_step(rows, directions="reversed")
    torch.testing.assert_close(attend(backward), attend(forward), rtol=1e-5, atol=1e-6)
    backward.meta.context_lens -= 3  # the last block's first tokens are the ones on the right
    expected = make_step([(93, queries), (29, queries)])
    expected.kv, expected.query = forward.kv, forward.query
    expected.meta.block_tables = forward.meta.block_tables
    torch.testing.assert_close(attend(backward), attend(expected), rtol=1e-5, atol=1e-6)
    backward.meta.directions = None
    assert not torch.allclose(attend(backward), attend(expected), atol=1e-2)


@pytest.mark.parametrize("block_size", [1, 4, 8, 32, 128])
@pytest.mark.parametrize("sliding_window", [0, 40])
def test_other_block_sizes(implementation, make_step, assert_close, block_size, sliding_window):
    step = make_step([(150, 1), (131, 20)], block_size=block_size, group=3, head_dim=32, directions="mixed")
    assert_close(attend(step, sliding_window=sliding_window), step.expected(sliding_window))


@DTYPES
def test_contexts_long_enough_to_be_split_among_threads(implementation, make_step, assert_close, dtype):
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        step = make_step([(1100, 20), (2000, 1)], kv_heads=1, group=3, head_dim=32, dtype=dtype, directions="mixed")
        assert_close(attend(step), step.expected())
        assert_close(attend(step, sliding_window=900), step.expected(900))
        assert_close(attend(step, softcap=0.5), step.expected(softcap=0.5))
    finally:
        torch.set_num_threads(threads)


def test_one_thread_and_two_agree(implementation, make_step, assert_close):
    threads = torch.get_num_threads()
    step = make_step([(700, 64), (900, 1), (30, 1)], kv_heads=3, group=3)
    results = []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            results.append(attend(step))
    finally:
        torch.set_num_threads(threads)
    assert_close(results[1], results[0])


@DTYPES
def test_scores_far_apart_do_not_overflow(implementation, make_step, dtype):
    step = make_step([(80, 20), (80, 1)], dtype=dtype)
    step.scale *= 200.0  # softmax weights from 1 down to e^-thousands; scores in the thousands carry an error of 1e-4
    torch.testing.assert_close(attend(step).double(), step.expected(), rtol=1e-2, atol=1e-2)


@DTYPES
def test_query_and_out_may_be_views(implementation, make_step, assert_close, dtype):
    step = make_step(MIXED_ROWS, dtype=dtype, group=3)
    tokens, heads, head_dim = step.query.shape
    fused = torch.randn(tokens, heads + 4, head_dim).to(dtype)
    fused[:, :heads] = step.query
    wide = torch.full((tokens, heads + 1, head_dim), 7.0, dtype=dtype)
    step.query = fused[:, :heads]
    paged_attention(step.query, step.kv, step.layer, step.meta, step.scale, wide[:, :heads])
    assert_close(wide[:, :heads], step.expected())
    assert (wide[:, heads] == 7.0).all()


def test_rows_without_queries_are_skipped(implementation, make_step, assert_close):
    step = make_step([(5, 5), (40, 0), (40, 1)])
    assert_close(attend(step), step.expected())


@settings(max_examples=examples(0.4), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_shape(implementation, make_step, assert_close, data):
    rows = data.draw(
        st.lists(
            st.integers(1, 70).flatmap(lambda context: st.tuples(st.just(context), st.integers(1, context))),
            min_size=1,
            max_size=4,
        )
    )
    step = make_step(
        rows,
        kv_heads=data.draw(st.integers(1, 3)),
        group=data.draw(st.integers(1, 9)),
        head_dim=data.draw(st.sampled_from([8, 16, 24, 48, 64])),
        block_size=data.draw(st.sampled_from([1, 2, 7, 16])),
        dtype=data.draw(st.sampled_from([torch.float32, torch.bfloat16])),
        directions=data.draw(st.sampled_from(["forward", "reversed", "mixed"])),
        seed=data.draw(st.integers(0, 1000)),
    )
    window = data.draw(st.sampled_from([0, 1, 5, 64]))
    assert_close(attend(step, sliding_window=window), step.expected(window))


@DTYPES
@pytest.mark.parametrize("group", [3, 20])
@pytest.mark.parametrize("head_dim", [64, 80, 576])
def test_latents_are_keys_and_values_at_once(implementation, make_step, assert_close, dtype, group, head_dim):
    """A cache with one plane: as one with two whose values are its keys."""
    step = make_step(MIXED_ROWS, kv_heads=1, group=group, head_dim=head_dim, dtype=dtype, directions="mixed")
    step.values, step.kv = step.keys, step.kv[:, :, :1].contiguous()
    assert_close(attend(step), step.expected())


@DTYPES
def test_a_latent_is_written_once(implementation, dtype):
    latent = torch.randn(5, 2, 24).to(dtype)[:, :1]  # strided
    kv = torch.randn(4, 3, 1, 1, 16, 24).to(dtype)
    expected, slots = kv.clone(), torch.tensor([3, 40, 17, 0, 63])
    for token, slot in enumerate(slots.tolist()):
        expected[slot // 16, 1, 0, 0, slot % 16] = latent[token, 0]
    write_kv(latent, latent, kv, 1, slots)
    assert torch.equal(kv, expected)


@DTYPES
@pytest.mark.parametrize("tokens", [1, 300])
def test_write_kv_puts_strided_views_into_their_slots_only(implementation, dtype, tokens):
    layers, kv_heads, block_size, head_dim = 3, 2, 16, 24
    qkv = torch.randn(tokens, 5 + 2 * kv_heads, head_dim).to(dtype)
    _, key, value = torch.split(qkv, [5, kv_heads, kv_heads], dim=1)
    kv = torch.randn(32, layers, 2, kv_heads, block_size, head_dim).to(dtype)
    slots = torch.randperm(32 * block_size)[:tokens]
    expected = kv.clone()
    for token, slot in enumerate(slots.tolist()):
        expected[slot // block_size, 1, 0, :, slot % block_size] = key[token]
        expected[slot // block_size, 1, 1, :, slot % block_size] = value[token]
    write_kv(key, value, kv, 1, slots)
    assert torch.equal(kv, expected)


class TestNativeRefuses:
    """Wrong arguments raise; they must never read or write outside the tensors."""

    @pytest.fixture(autouse=True)
    def only_native(self, implementation: str) -> None:
        if implementation != "native":
            pytest.skip("the reference leaves these checks to torch's indexing")

    def test_a_block_outside_the_cache(self, make_step):
        for bad in (-1, 1000):
            for queries in (1, 20):
                step = make_step([(40, queries)])
                step.meta.block_tables[0, 1] = bad
                with pytest.raises(IndexError):
                    attend(step)

    def test_a_slot_outside_the_cache(self):
        kv = torch.randn(2, 1, 2, 2, 16, 8)
        for bad in (-1, 32):
            with pytest.raises(IndexError):
                write_kv(torch.randn(1, 2, 8), torch.randn(1, 2, 8), kv, 0, torch.tensor([bad]))

    def test_a_context_longer_than_its_blocks(self, make_step):
        step = make_step([(40, 1)])
        step.meta.context_lens[0] = 49
        with pytest.raises(ValueError, match="context_lens"):
            attend(step)

    def test_queries_outside_the_tensor(self, make_step):
        step = make_step([(40, 2)])
        step.meta.query_start[1] = 3
        with pytest.raises(ValueError, match="query_start"):
            attend(step)

    @pytest.mark.parametrize(
        "change",
        [
            lambda step: {"kv": step.kv.bfloat16()},
            lambda step: {"kv": step.kv.transpose(0, 1)},
            lambda step: {"layer": 2},
            lambda step: {"query": step.query[:, :3]},
            lambda step: {"query": step.query[..., :32]},
        ],
        ids=["dtype", "layout", "layer", "heads", "head_dim"],
    )
    def test_tensors_that_do_not_fit(self, make_step, change: Callable):
        step = make_step([(40, 2)], group=2)
        for name, value in change(step).items():
            setattr(step, name, value)
        with pytest.raises((ValueError, TypeError, IndexError)):
            attend(step)

    def test_tables_of_the_wrong_type(self, make_step):
        step = make_step([(40, 2)])
        meta = step.meta
        step.meta = AttentionMeta(
            meta.query_start.long(), meta.context_lens, meta.block_tables, None, meta.block_size, 2, 1
        )
        with pytest.raises(TypeError, match="int32"):
            attend(step)
