"""Packed weights: the layout holds every weight once, and the products equal plain ones on every edge of the tiles."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cohort.kernels.cpu import native, panels
from cohort.kernels.cpu.panels import Arena, Panels
from tests.examples import examples

pytestmark = pytest.mark.skipif(native.operators() is None, reason="no compiled kernels here")
DTYPES = [torch.float32] + ([torch.bfloat16] if panels.available(torch.bfloat16, 2) else [])


@settings(max_examples=examples(0.8))
@given(
    rows=st.one_of(st.integers(1, 40), st.sampled_from((64, 129, 300))),
    outputs=st.integers(1, 100),
    steps=st.integers(1, 40),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**16),
)
def test_product_equals_matmul(rows: int, outputs: int, steps: int, dtype: torch.dtype, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    inputs = steps * (2 if dtype == torch.bfloat16 else 1)
    weight = torch.randn(outputs, inputs, generator=random).to(dtype)
    x = torch.randn(rows, inputs, generator=random).to(dtype)
    packed, out = Panels(weight, Arena()), torch.full((rows, outputs), float("nan"))
    packed.product(x, None, out)
    assert torch.allclose(out.double(), x.double() @ weight.double().T, rtol=1e-5, atol=1e-4)
    alone, row = torch.empty(1, outputs), seed % rows
    packed.product(x[row : row + 1], None, alone)
    assert torch.equal(alone[0], out[row]), "a row's bits depend on other rows"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("outputs", [1, 15, 16, 17, 31, 32, 33, 64, 65])
def test_rows_gives_the_weights_back(outputs: int, dtype: torch.dtype) -> None:
    weight = torch.randn(outputs, 10).to(dtype)
    out = torch.empty(outputs, 10, dtype=dtype)
    Panels(weight, Arena()).rows(torch.arange(outputs), out)
    assert torch.equal(out, weight)


@pytest.mark.parametrize("dtype", DTYPES)
def test_strided_inputs_and_outputs(dtype: torch.dtype) -> None:
    """Views of wider buffers, as the models hand them in; what lies beside them stays."""
    weight = torch.randn(48, 32).to(dtype)
    wide_x, wide_out = torch.randn(5, 40).to(dtype), torch.zeros(5, 60, dtype=dtype)
    Panels(weight, Arena()).product(wide_x[:, 4:36], None, wide_out[:, 6:54])
    expected = (wide_x[:, 4:36].double() @ weight.double().T).to(dtype)
    assert torch.allclose(wide_out[:, 6:54].float(), expected.float(), rtol=2e-2, atol=1e-2)
    assert not wide_out[:, :6].any() and not wide_out[:, 54:].any()


def test_shapes_that_do_not_fit_are_errors() -> None:
    packed = Panels(torch.randn(48, 32), Arena())
    with pytest.raises(ValueError, match="x must be"):
        packed.product(torch.randn(3, 31), None, torch.empty(3, 48))
    with pytest.raises(ValueError, match="out must be"):
        packed.product(torch.randn(3, 32), None, torch.empty(3, 90))
    with pytest.raises(TypeError):
        packed.product(torch.randn(3, 32, dtype=torch.float64), None, torch.empty(3, 48))
    with pytest.raises(ValueError, match="bias"):
        packed.product(torch.randn(3, 32), torch.randn(47), torch.empty(3, 48))


def test_an_arena_cuts_pieces_that_do_not_overlap() -> None:
    arena = Arena()
    taken = [arena.take((n, 3), torch.float32) for n in (1, 1000, 7, 30_000_000 // 3, 5)]
    for index, tensor in enumerate(taken):
        assert tensor.data_ptr() % 64 == 0 and not tensor[:100].any()
        tensor.fill_(index)
    for index, tensor in enumerate(taken):
        assert (tensor == index).all()


def test_huge_zeros_are_zero_and_writable() -> None:
    memory = panels.huge_zeros(5_000_001)
    assert len(memory) == 5_000_001 and not memory.any()
    memory[-1] = 7
    assert int(memory.sum()) == 7
    assert len(panels.huge_zeros(0)) == 0
