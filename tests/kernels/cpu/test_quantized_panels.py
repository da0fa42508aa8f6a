"""Packed weights of few bits: they come back, and products keep within the rounding of x to 8 bits."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cohort.common.engine.weights.quantized import Code, QuantizedWeight
from cohort.kernels.cpu import native
from cohort.kernels.cpu.panels import Arena
from cohort.kernels.cpu.quantized_panels import Codes, QuantizedPanels, available, unit_of
from tests.examples import examples

pytestmark = pytest.mark.skipif(native.operators() is None, reason="no compiled kernels here")
KINDS = ("int8", "int8 with offsets", "uint4", "uint4 around 8", "uint4 with offsets")


def made(kind: str, outputs: int, inputs: int, group: int, seed: int) -> QuantizedWeight:
    """Random codes over their whole range; scales and offsets that float16 holds, as checkpoints have them."""
    random = torch.Generator().manual_seed(seed)
    code: Code = "int8" if kind.startswith("int8") else "uint4"
    if code == "int8":
        codes = torch.randint(-128, 128, (outputs, inputs), generator=random, dtype=torch.int8)
    else:
        codes = torch.randint(0, 256, (outputs, inputs // 2), generator=random, dtype=torch.uint8)
    scales = (torch.rand(outputs, -(-inputs // group), generator=random) * 0.02 + 0.001).half().float()
    offsets = None
    if kind == "uint4 around 8":
        offsets = scales * -8
    elif kind.endswith("with offsets"):
        offsets = torch.randn(scales.shape, generator=random).mul(0.05).half().float()
    return QuantizedWeight(code, codes, scales, offsets, group)


def pack(weight: QuantizedWeight, *, gated: bool = False) -> QuantizedPanels:
    return QuantizedPanels([codes_of(weight)], Arena(), gated=gated)


def codes_of(weight: QuantizedWeight) -> Codes:
    return Codes(weight.codes, weight.scales, weight.offsets, weight.group)


def bound(x: Tensor, weight: Tensor, unit: int) -> Tensor:
    """[rows, outputs]: how far rounding x to 8 bits can move a product, and float32's summing beside it.

    A unit's inputs move by at most half a step, |x|max / 254, each; every one meets its own weight.
    """
    x, weight = x.double(), weight.double()
    moved = torch.zeros(len(x), len(weight), dtype=torch.float64)
    for first in range(0, x.shape[1], unit):
        part = slice(first, first + unit)
        moved += x[:, part].abs().amax(dim=1)[:, None] / 254 * weight[:, part].abs().sum(dim=1)[None]
    return moved * 1.001 + 2e-6 * (x.abs() @ weight.abs().T)


@settings(max_examples=examples(1))
@given(
    kind=st.sampled_from(KINDS),
    rows=st.integers(1, 30),
    outputs=st.integers(1, 70),
    inputs=st.integers(1, 100).map(lambda half: 2 * half),
    group=st.sampled_from([16, 32, 48, 64, 128, 0]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 2**16),
)
def test_product_is_that_of_the_dequantised_weight_within_the_rounding_of_x(
    kind: str, rows: int, outputs: int, inputs: int, group: int, dtype: torch.dtype, seed: int
) -> None:
    group = group or inputs
    weight = made(kind, outputs, inputs, group, seed)
    x = torch.randn(rows, inputs, generator=torch.Generator().manual_seed(seed)).to(dtype)
    out = torch.full((rows, outputs), float("nan"))
    pack(weight).product(x, None, out)
    whole = weight.dequantized()
    allowed = bound(x, whole, unit_of(group, inputs) or 0)
    assert ((out.double() - x.double() @ whole.double().T).abs() <= allowed).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_has_the_same_bits_in_every_batch(kind: str, dtype: torch.dtype) -> None:
    """Over every height of a tile, and over several tiles."""
    weight = made(kind, 80, 96, 32, seed=3)
    plain, gated = pack(weight), pack(weight, gated=True)
    x = torch.randn(41, 96).to(dtype)
    residual = torch.randn(41, 80).to(dtype)
    alone = [torch.empty(1, 80, dtype=dtype) for _ in range(41)]
    alone_added, alone_gated = residual.clone(), torch.empty(41, 40, dtype=dtype)
    for row in range(41):
        part = slice(row, row + 1)
        plain.product(x[part], None, alone[row])
        plain.add_product(x[part], alone_added[part])
        gated.gated_product(x[part], alone_gated[part])
    for rows in (*range(2, 27), 41):
        together, added = torch.empty(rows, 80, dtype=dtype), residual[:rows].clone()
        activated = torch.empty(rows, 40, dtype=dtype)
        plain.product(x[:rows], None, together)
        plain.add_product(x[:rows], added)
        gated.gated_product(x[:rows], activated)
        assert torch.equal(together, torch.cat(alone[:rows]))
        assert torch.equal(added, alone_added[:rows])
        assert torch.equal(activated, alone_gated[:rows])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("outputs", [1, 15, 16, 17, 31, 33, 64, 65])
def test_rows_gives_the_dequantised_weights_back(kind: str, outputs: int) -> None:
    weight = made(kind, outputs, 80, 16, seed=outputs)
    out = torch.empty(outputs, 80)
    pack(weight).rows(torch.arange(outputs), out)
    assert torch.allclose(out, weight.dequantized(), rtol=1e-6, atol=1e-7)
    with pytest.raises(IndexError, match="token"):
        pack(weight).rows(torch.tensor([outputs]), out[:1])


@pytest.mark.parametrize("kind", KINDS)
def test_bias_residual_and_activation_are_those_of_the_plain_product(kind: str) -> None:
    weight = made(kind, 72, 64, 32, seed=5)
    x, bias, residual = torch.randn(5, 64), torch.randn(72), torch.randn(5, 72)
    plain, out = torch.empty(5, 72), torch.empty(5, 72)
    packed = pack(weight)
    packed.product(x, None, plain)
    packed.product(x, bias, out)
    assert torch.equal(out, plain + bias)
    added = residual.clone()
    packed.add_product(x, added)
    assert torch.equal(added, residual + plain)
    activated = torch.empty(5, 36)
    pack(weight, gated=True).gated_product(x, activated)
    expected = torch.nn.functional.silu(plain[:, :36]) * plain[:, 36:]
    assert torch.allclose(activated, expected, rtol=1e-4, atol=1e-6)


def test_parts_of_different_kinds_stand_one_after_the_other() -> None:
    """As query, key and value of a checkpoint that gives them different formats."""
    weights = [made("uint4", 37, 64, 32, 1), made("int8", 16, 64, 16, 2), made("uint4 around 8", 50, 64, 64, 3)]
    together = QuantizedPanels([codes_of(weight) for weight in weights], Arena())
    x, bias, out = torch.randn(5, 64), torch.randn(103), torch.empty(5, 103)
    together.product(x, bias, out)
    alone = [torch.empty(5, weight.shape[0]) for weight in weights]
    for weight, own in zip(weights, alone, strict=True):
        pack(weight).product(x, None, own)
    assert torch.equal(out, torch.cat(alone, dim=1) + bias)
    residual = torch.randn(5, 103)
    expected = residual + torch.cat(alone, dim=1)
    together.add_product(x, residual)
    assert torch.equal(residual, expected)
    ids, rows = torch.tensor([102, 0, 36, 37, 52, 53]), torch.empty(6, 64)
    together.rows(ids, rows)
    whole = torch.cat([weight.dequantized() for weight in weights])
    assert torch.allclose(rows, whole[ids], rtol=1e-6, atol=1e-7)


def test_small_scales_beside_large_ones_stay_exact() -> None:
    """Float16 alone would lose them: a row's scales are kept relative to its largest."""
    codes = torch.full((2, 64), 100, dtype=torch.int8)
    scales = torch.tensor([[3e-5, 2.0], [1e-9, 1e-7]]).bfloat16().float()
    out = torch.empty(2, 64)
    QuantizedPanels([Codes(codes, scales, None, 32)], Arena()).rows(torch.arange(2), out)
    assert torch.equal(out, scales.repeat_interleave(32, dim=1) * 100)


def test_a_scale_of_a_whole_row_stays_float32() -> None:
    codes, scales = torch.full((3, 40), -128, dtype=torch.int8), torch.tensor([[0.1], [1e-12], [0.0]])
    out = torch.empty(3, 40)
    QuantizedPanels([Codes(codes, scales, None, 40)], Arena()).rows(torch.arange(3), out)
    assert torch.equal(out, (scales * -128).expand(3, 40))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_spoils_its_own_row_alone(value: float) -> None:
    weight = made("uint4", 40, 64, 32, seed=1)
    x, out, clean = torch.randn(3, 64), torch.empty(3, 40), torch.empty(3, 40)
    pack(weight).product(x, None, clean)
    x[1, 7] = value
    pack(weight).product(x, None, out)
    assert not out[1].isfinite().any()
    assert torch.equal(out[::2], clean[::2])


def test_rows_of_zeros_and_of_vanishing_values_give_zero() -> None:
    packed, out = pack(made("int8 with offsets", 40, 64, 32, seed=1)), torch.full((2, 40), 7.0)
    packed.product(torch.stack((torch.zeros(64), torch.full((64,), 1e-40))), None, out)
    assert not out.any()


def test_groups_that_cannot_be_packed() -> None:
    assert not available(torch.int8, 24, 96)
    assert available(torch.int8, 200, 96)
    assert available(torch.uint8, 48, 96)
    assert not available(torch.float32, 32, 96)


def test_shapes_that_do_not_fit_are_errors() -> None:
    packed = pack(made("uint4", 48, 32, 32, seed=0))
    with pytest.raises(ValueError, match="x must be"):
        packed.product(torch.randn(3, 31), None, torch.empty(3, 48))
    with pytest.raises(ValueError, match="out must be"):
        packed.product(torch.randn(3, 32), None, torch.empty(3, 49))
    with pytest.raises(ValueError, match="out must be"):
        pack(made("uint4", 48, 32, 32, seed=0), gated=True).product(torch.randn(3, 32), None, torch.empty(3, 24))
    with pytest.raises(ValueError, match="packed plain"):
        pack(made("uint4", 48, 32, 32, seed=0), gated=True).add_product(torch.randn(3, 32), torch.empty(3, 24))
    with pytest.raises(ValueError, match="bias"):
        packed.product(torch.randn(3, 32), torch.randn(47), torch.empty(3, 48))
    with pytest.raises(TypeError):
        packed.product(torch.randn(3, 32, dtype=torch.float64), None, torch.empty(3, 48))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("outputs", [6, 72, 130])
def test_gates_and_ups_are_had_before_they_are_activated(kind: str, outputs: int) -> None:
    """As rows with adapters need them."""
    weight = made(kind, outputs, 64, 32, seed=outputs)
    x, plain = torch.randn(5, 64), torch.empty(5, outputs)
    pack(weight).product(x, None, plain)
    gated = pack(weight, gated=True)
    assert torch.equal(gated.halves(x), plain)
    with pytest.raises(ValueError, match="no bias"):
        torch.ops.cohort.panel_product(x, gated.data, torch.zeros(outputs), plain)
