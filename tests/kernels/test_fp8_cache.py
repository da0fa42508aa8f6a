"""Keys and values in FP8: how far a number moves, the same bytes and the same numbers in C++ as in torch, attention."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cohort.kernels.cpu import native
from cohort.kernels.fp8_cache import decoded, encoded
from cohort.kernels.ops.paged_attention import AttentionMeta, paged_attention, write_kv
from cohort.kernels.ops.slots import gather_slots, scatter_slots
from tests.examples import examples

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
MIXED_ROWS = [(40, 40), (70, 33), (19, 2), (1, 1), (16, 1), (133, 1)]
TIE = float.fromhex("0x1.1p4")  # between two codes


def rows_of_all_sizes(dtype: torch.dtype) -> Tensor:
    """Rows whose largest number is anything that the dtype holds, of numbers of all sizes below it."""
    random = torch.Generator().manual_seed(1)
    sizes = torch.ldexp(torch.ones(254), torch.arange(-126, 128))[:, None]
    numbers = torch.randn(254, 72, generator=random) * torch.ldexp(
        torch.ones(254, 72), -torch.randint(0, 24, (254, 72), generator=random)
    )
    edges = torch.zeros(8, 72)
    edges[1, 5], edges[2] = 1e-40, -0.0
    edges[3, 0], edges[3, 1:] = 448.0, 448.0 / 2**15
    edges[4, 0], edges[4, 1:] = 449.0, TIE
    edges[5, 7], edges[6, 70] = float("inf"), float("nan")
    edges[7] = torch.finfo(dtype).max
    return torch.cat((numbers.clamp(-3.9, 3.9) / 4 * sizes, edges)).to(dtype)


@settings(max_examples=examples(1))
@given(width=st.integers(1, 200), exponent=st.integers(-60, 60), spread=st.integers(0, 30), seed=st.integers(0, 2**16))
def test_a_number_moves_by_a_sixteenth_of_itself_or_hardly_at_all(
    width: int, exponent: int, spread: int, seed: int
) -> None:
    random = torch.Generator().manual_seed(seed)
    down = torch.ldexp(torch.ones(3, width), exponent - torch.randint(0, spread + 1, (3, width), generator=random))
    values = torch.randn(3, width, generator=random) * down
    rows = encoded(values)
    assert rows.dtype == torch.uint8 and rows.shape == (3, width + 1)
    back, largest = decoded(rows), values.abs().amax(dim=1, keepdim=True)
    allowed = torch.maximum(values.abs() * 2**-4, largest * 2**-14)
    assert ((back - values).abs() <= allowed).all()
    assert torch.equal(back.bfloat16().float(), back)  # bfloat16 holds them
    assert torch.equal(decoded(encoded(back)), back)  # and they are what they are


def test_what_is_no_number_stays_none() -> None:
    values = torch.ones(3, 64)
    values[0, 3], values[1, 9] = float("nan"), float("-inf")
    back = decoded(encoded(values))
    assert back[:2].isnan().all() and torch.equal(back[2], values[2])
    assert back.bfloat16()[:2].isnan().all()


def cache(rows: int, width: int) -> Tensor:
    return torch.full((-(-rows // 16), 2, 2, 1, 16, width), 7, dtype=torch.uint8)


@DTYPES
def test_compiled_kernels_write_the_same_bytes(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    if native.operators() is None:
        pytest.skip("no compiled kernels here")
    numbers = rows_of_all_sizes(dtype)[:, None]
    slots = torch.randperm(len(numbers), generator=torch.Generator().manual_seed(2))
    ours, theirs = cache(len(numbers), 73), cache(len(numbers), 73)
    write_kv(numbers, numbers.flip(0), ours, 1, slots)
    monkeypatch.setattr(native, "_operators", None)
    write_kv(numbers, numbers.flip(0), theirs, 1, slots)
    assert torch.equal(ours, theirs)
    assert (ours[:, 0] == 7).all()  # the other layer


def in_fp8(step) -> tuple[Tensor, Tensor]:
    """The step's cache in FP8, and what it then says in the step's dtype; slots that nobody wrote are NaN in both."""
    rows = encoded(step.kv)
    return rows, decoded(rows).to(step.kv.dtype)


def attend(step, kv: Tensor, **options) -> Tensor:
    out = torch.full_like(step.query, float("nan"))
    paged_attention(step.query, kv, step.layer, step.meta, step.scale, out, **options)
    return out


@DTYPES
@pytest.mark.parametrize("head_dim", [16, 20, 64, 72, 80, 128, 256])
@pytest.mark.parametrize("directions", ["forward", "mixed"])
def test_attention_is_that_over_the_numbers_the_codes_stand_for(implementation, make_step, dtype, head_dim, directions):
    """To the bit: rows are read as numbers of the query's dtype, and the rest is the same."""
    step = make_step(MIXED_ROWS, head_dim=head_dim, group=3, dtype=dtype, directions=directions)
    rows, numbers = in_fp8(step)
    found = attend(step, rows)
    assert found.isfinite().all() and torch.equal(found, attend(step, numbers))


@DTYPES
@pytest.mark.parametrize("options", [{"sliding_window": 25}, {"softcap": 1.5}], ids=["window", "softcap"])
@pytest.mark.parametrize("block_size", [8, 64])
def test_windows_caps_and_sinks(implementation, make_step, dtype, options, block_size):
    step = make_step(MIXED_ROWS, head_dim=32, dtype=dtype, directions="mixed", block_size=block_size)
    sinks = torch.linspace(-2, 3, step.query.shape[1])
    rows, numbers = in_fp8(step)
    assert torch.equal(attend(step, rows, sinks=sinks, **options), attend(step, numbers, sinks=sinks, **options))


@DTYPES
def test_many_decode_rows(implementation, make_step, dtype):
    """One task takes all heads of a row."""
    step = make_step([(37 + row, 1) for row in range(12)], kv_heads=3, dtype=dtype, directions="mixed")
    rows, numbers = in_fp8(step)
    assert torch.equal(attend(step, rows), attend(step, numbers))


@DTYPES
def test_the_result_moves_by_what_the_format_moves_keys_and_values(implementation, make_step, dtype):
    """A score moves by at most δ = scale · Σ |q| · |Δk|, so a weight by a factor of at most e^2δ, and the sum by the
    values' own move beside it. Keys and values near zero may move by 2^-14 of their row's largest."""
    step = make_step([(200, 7), (300, 1), (90, 90)], dtype=dtype, directions="mixed")
    rows, _ = in_fp8(step)
    found, exact, starts = attend(step, rows).double(), step.expected(), step.meta.query_start.tolist()
    for row, (key, value) in enumerate(zip(step.keys, step.values, strict=True)):
        moved = torch.maximum(key.abs() * 2**-4, key.abs().amax(dim=-1, keepdim=True) * 2**-14).double()
        for token in range(starts[row], starts[row + 1]):
            for head in range(step.query.shape[1]):
                q = step.query[token, head].double().abs()
                delta = (step.scale * (moved[:, head // 2] @ q)).max()
                reach = value[:, head // 2].double().abs().max()
                bound = ((2 * delta).exp() - 1 + 2**-4) * reach + 2**-7 * reach
                assert ((found[token, head] - exact[token, head]).abs() <= bound).all()
    # independent moves are far smaller together than the worst of them: 2^-4 / sqrt(3) each, 0.72 over mantissas
    assert (found - exact).square().mean().sqrt() < 2 * 0.026 * exact.square().mean().sqrt()


@pytest.mark.parametrize("dtype", [torch.float16])
def test_other_precisions_take_the_reference(make_step, dtype):
    step = make_step(MIXED_ROWS, dtype=dtype)
    rows = encoded(step.kv)
    expected = attend(step, decoded(rows).to(dtype))
    assert torch.allclose(attend(step, rows), expected, rtol=1e-3, atol=1e-3)


def test_tokens_move_as_bytes(implementation, make_step):
    step = make_step(MIXED_ROWS, dtype=torch.bfloat16)
    rows = encoded(step.kv)
    slots = torch.randperm(rows.shape[0] * 16, generator=torch.Generator().manual_seed(3))[:40]
    held = torch.empty(40, *rows.shape[1:4], rows.shape[5], dtype=torch.uint8)
    gather_slots(rows, slots, held)
    assert torch.equal(held, rows[slots // 16, :, :, :, slots % 16])
    other = torch.zeros_like(rows)
    scatter_slots(held, other, slots)
    assert torch.equal(other[slots // 16, :, :, :, slots % 16], held)
    assert other.sum() == held.sum(dtype=torch.int64)


def test_what_cannot_be_is_refused() -> None:
    if (ops := native.operators()) is None:
        pytest.skip("no compiled kernels here")
    latents, rows = torch.zeros(2, 1, 1, 1, 16, 65, dtype=torch.uint8), torch.zeros(1, 1, 64)
    with pytest.raises(ValueError, match="latents"):
        ops.write_kv(rows, rows, latents, 0, torch.zeros(1, dtype=torch.int64))
    kv = torch.zeros(2, 1, 2, 1, 16, 64, dtype=torch.uint8)  # no byte for the scale
    with pytest.raises(ValueError, match="dense heads"):
        ops.write_kv(rows, rows, kv, 0, torch.zeros(1, dtype=torch.int64))
    meta = AttentionMeta(
        *(torch.zeros(2, dtype=torch.int32),) * 2, torch.zeros(2, 1, dtype=torch.int32), None, 16, 1, 0
    )
    with pytest.raises(ValueError, match="query"):
        paged_attention(rows, kv, 0, meta, 1.0, torch.empty_like(rows))
