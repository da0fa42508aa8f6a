"""Packed weights in E4M3: every code is its number, and products round nothing before their sums."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cohort.kernels.cpu import native
from cohort.kernels.cpu.panels import Arena
from cohort.kernels.cpu.quantized_panels import Codes, QuantizedPanels, available
from tests.examples import examples

pytestmark = pytest.mark.skipif(native.operators() is None, reason="no compiled kernels here")
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


def made(outputs: int, inputs: int, group: int, seed: int = 0) -> Codes:
    """Codes over their whole range but NaN."""
    random = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 254, (outputs, inputs), generator=random)
    codes = (codes + (codes >= 0x7F)).to(torch.uint8).view(torch.float8_e4m3fn)
    scales = torch.rand(outputs, -(-inputs // group), generator=random) * 0.02 + 0.001
    return Codes(codes, scales, None, group)


def numbers(weight: Codes) -> Tensor:
    return weight.codes.float() * weight.scales[:, torch.arange(weight.inputs) // weight.group]


def product(weight: Codes, x: Tensor) -> Tensor:
    out = torch.full((len(x), len(weight.codes)), float("nan"))
    QuantizedPanels([weight], Arena()).product(x, None, out)
    return out


def test_every_code_is_its_number() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(2, 128).view(torch.float8_e4m3fn)
    weight = Codes(codes[:, :126].contiguous(), torch.tensor([[1.0], [0.5]]), None, 126)
    out = torch.empty(2, 126)
    QuantizedPanels([weight], Arena()).rows(torch.arange(2), out)
    assert torch.equal(out, numbers(weight)) and out[0, 1] == 2**-9


@DTYPES
def test_every_code_is_its_number_in_products(dtype: torch.dtype) -> None:
    """One input at a time."""
    codes = torch.cat((torch.arange(0, 0x7F), torch.arange(0x80, 0xFF))).to(torch.uint8).view(1, 254)
    weight = Codes(codes.view(torch.float8_e4m3fn), torch.tensor([[2.0]]), None, 254)
    assert torch.equal(product(weight, torch.eye(254, dtype=dtype))[:, 0], numbers(weight)[0])


@settings(max_examples=examples(1))
@given(
    rows=st.integers(1, 30),
    outputs=st.integers(1, 70),
    inputs=st.integers(1, 100).map(lambda half: 2 * half),
    group=st.sampled_from([2, 16, 18, 32, 48, 128, 0]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 2**16),
)
def test_product_is_that_of_the_dequantised_weight(
    rows: int, outputs: int, inputs: int, group: int, dtype: torch.dtype, seed: int
) -> None:
    """But for the order of float32's sums."""
    weight = made(outputs, inputs, group or inputs, seed)
    x = torch.randn(rows, inputs, generator=torch.Generator().manual_seed(seed)).to(dtype)
    wide, exact = numbers(weight).double(), x.double()
    allowed = 4e-6 * (exact.abs() @ wide.abs().T)
    assert ((product(weight, x).double() - exact @ wide.T).abs() <= allowed).all()


@pytest.mark.xfail(
    torch.backends.cpu.get_cpu_capability() == "AVX2",
    reason="rows of one batch differ in a sum's last bit",
    strict=False,
)
@DTYPES
def test_a_row_has_the_same_bits_in_every_batch(dtype: torch.dtype) -> None:
    weight = made(80, 96, 32, seed=3)
    x = torch.randn(41, 96, generator=torch.Generator().manual_seed(1)).to(dtype)
    alone = torch.cat([product(weight, x[row : row + 1]) for row in range(41)])
    for rows in (*range(2, 27), 41):
        assert torch.equal(product(weight, x[:rows]), alone[:rows])


@DTYPES
def test_bias_residual_activation_and_rows(dtype: torch.dtype) -> None:
    weight = made(72, 64, 32, seed=5)
    random = torch.Generator().manual_seed(2)
    x, bias, residual = (torch.randn(5, size, generator=random).to(dtype) for size in (64, 72, 72))
    packed, plain = QuantizedPanels([weight], Arena()), product(weight, x).to(dtype)
    out = torch.empty(5, 72, dtype=dtype)
    packed.product(x, bias[0], out)
    torch.testing.assert_close(out, plain + bias[0], rtol=2**-6, atol=2**-6)
    added = residual.clone()
    packed.add_product(x, added)
    assert torch.equal(added, residual + plain)
    gated, activated = QuantizedPanels([weight], Arena(), gated=True), torch.empty(5, 36, dtype=dtype)
    gated.gated_product(x, activated)
    expected = torch.nn.functional.silu(plain[:, :36].float()) * plain[:, 36:].float()
    torch.testing.assert_close(activated.float(), expected, rtol=2**-6, atol=2**-6)
    assert torch.equal(gated.halves(x), plain)


def test_parts_of_several_kinds_in_one_product() -> None:
    """Query, key and value may be in E4M3 with scales of their own, beside integers."""
    random = torch.Generator().manual_seed(4)
    integers = Codes(
        torch.randint(-127, 128, (20, 64), generator=random, dtype=torch.int8), torch.full((20, 2), 0.01), None, 32
    )
    parts = [made(37, 64, 64, 1), integers, made(16, 64, 16, 2)]
    x, out = torch.randn(3, 64, generator=random).bfloat16(), torch.empty(3, 73)
    QuantizedPanels(parts, Arena()).product(x, None, out)
    assert torch.equal(out, torch.cat([product(part, x) for part in parts], dim=1))


def test_a_weight_that_is_no_number_spoils_its_output_alone() -> None:
    weight = made(20, 64, 32)
    weight.codes.view(torch.uint8)[7, 40] = 0x7F
    out = product(weight, torch.ones(2, 64))
    assert out[:, 7].isnan().all()
    assert out[:, [*range(7), *range(8, 20)]].isfinite().all()


def test_bytes_are_half_of_bfloat16() -> None:
    packed = QuantizedPanels([made(512, 1024, 128)], Arena())
    assert packed.data.nbytes == 512 * (1024 + 8 * 4) + 64


def test_what_is_not_packed() -> None:
    e4m3 = torch.float8_e4m3fn
    assert available(e4m3, 128, 512) and available(e4m3, 512, 512) and available(e4m3, 4, 512)
    assert not available(e4m3, 3, 512) and not available(e4m3, 511, 511) and not available(e4m3, 128, 512, offsets=True)
    assert not available(torch.float8_e5m2, 128, 512)
    with pytest.raises(ValueError, match="even"):
        QuantizedPanels([made(4, 30, 15)], Arena())
