"""A row of a product has the same bits beside any other rows: plain weights, codes, and a mixture's experts."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from cohort.kernels.gpu import plan
from cohort.kernels.gpu.products import fixed_products
from cohort.kernels.gpu.products.coded import coded_product
from cohort.kernels.gpu.products.experts import expert_outputs
from cohort.kernels.gpu.products.fixed_products import fixed_product
from tests.examples import another_of_its_kind
from tests.kernels.gpu.conftest import DEVICE
from tests.kernels.gpu.products.test_coded import E4M3, INT8, UINT4, rows_of, weight_of
from tests.kernels.gpu.products.test_experts import routed, weights_of

# Triton's interpreter multiplies by NumPy, whose products without AVX-512 depend on the number of rows.
pytestmark = pytest.mark.skipif(
    DEVICE.type == "cpu" and torch.backends.cpu.get_cpu_capability() == "AVX2", reason="NumPy's depend on the rows"
)
ROWS = 40
DTYPES = [torch.float32, pytest.param(torch.bfloat16, marks=another_of_its_kind())]


def bits(tensor: Tensor) -> Tensor:
    return tensor.view(torch.int32 if tensor.dtype == torch.float32 else torch.int16)


def assert_rows_stand_alone(product: Callable[[Tensor], Tensor], x: Tensor) -> None:
    """In steps of one row, of few and of many, at other places of a tile."""
    whole = product(x)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(3)).to(x.device)
    assert torch.equal(bits(product(x[order].contiguous())), bits(whole[order]))
    for first, end in ((0, 1), (len(x) - 1, len(x)), (5, 10), (7, len(x) - 7)):
        assert torch.equal(bits(product(x[first:end])), bits(whole[first:end]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_plain_weights(device, dtype, monkeypatch):
    """In parts that one program adds, and in parts that lie in memory."""
    monkeypatch.setattr(fixed_products, "_planned", lambda **shape: plan.FixedPlan(16, 32, 32, 3, 32, 4, 2))
    torch.manual_seed(0)
    x = torch.randn(ROWS, 80, device=device).to(dtype)
    weight, bias = (torch.randn(*shape, device=device).to(dtype) for shape in ((48, 80), (48,)))
    residual = torch.randn(ROWS, 48, device=device).to(dtype)

    def biased(rows: Tensor) -> Tensor:
        out = rows.new_empty((len(rows), 48), dtype=torch.float32)
        fixed_product(rows, weight, bias, out)
        return out

    def added(rows: Tensor) -> Tensor:
        out = residual[: len(rows)].clone()
        fixed_product(rows, weight, None, out, add=True)
        return out

    assert_rows_stand_alone(biased, x)
    torch.testing.assert_close(biased(x), torch.nn.functional.linear(x.float(), weight.float(), bias.float()))
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 1e-2}
    torch.testing.assert_close(added(x), (residual.float() + x.float() @ weight.float().t()).to(dtype), **tolerance)
    for rows in (1, 17):  # beside the same residual
        assert torch.equal(bits(added(x[:rows])), bits(added(x)[:rows]))


def test_a_product_that_lies_elsewhere(device):
    """Operands whose rows begin where loads of 16 bytes cannot: copied, so that the same kernel takes them."""
    torch.manual_seed(0)
    x, weight = torch.randn(3, 24, device=device), torch.randn(20, 24, device=device)
    expected = torch.empty(3, 20, device=device)
    fixed_product(x, weight, None, expected)
    apart, wide = torch.empty(3 * 24 + 1, device=device)[1:].view(3, 24), torch.empty(3, 21, device=device)
    fixed_product(apart.copy_(x), weight, None, wide[:, 1:])
    assert torch.equal(wide[:, 1:], expected)


@pytest.mark.parametrize("codes", [INT8, *(pytest.param(code, marks=another_of_its_kind()) for code in (UINT4, E4M3))])
def test_weights_in_codes(codes):
    weight, x = weight_of(codes, 32, 256, 128), rows_of(ROWS, 256, torch.bfloat16)

    def product(rows: Tensor, fixed: bool = True) -> Tensor:
        out = rows.new_empty((len(rows), 32), dtype=torch.float32)
        coded_product(rows, weight.codes, weight.scales, weight.offsets, weight.group, None, out, fixed=fixed)
        return out

    assert_rows_stand_alone(product, x)
    if DEVICE.type == "cpu":  # what the comparison is worth: tiles chosen by rows sum up otherwise
        assert not torch.equal(product(x[:1], False), product(x, False)[:1])


def test_experts():
    count, hidden, inner = 3, 144, 24
    x, chosen = rows_of(ROWS, hidden, torch.bfloat16), routed(ROWS, 2, count)
    gate_up, down = weights_of(count, hidden, inner, torch.bfloat16)

    def outputs(first: int, end: int) -> Tensor:
        rows = slice(first, end)
        return expert_outputs(x[rows], chosen[rows], gate_up, down, fixed=True).view(-1, 2, hidden)

    whole = outputs(0, ROWS)
    for first, end in ((0, 1), (ROWS - 1, ROWS), (5, 10), (7, ROWS - 7)):
        assert torch.equal(bits(outputs(first, end)), bits(whole[first:end]))


def test_one_plan_for_any_number_of_rows():
    """On a GPU another tile is another instruction: what the interpreter cannot show is that none is chosen by rows."""
    for size in (2, 4):
        few, many = ({plan.expert_plan(rows=rows, experts=8, element_bytes=size, fixed=True)} for rows in (1, 4096))
        assert few == many
        few, many = (
            {plan.coded_plan(rows=rows, group=128, inputs=4096, element_bytes=size, fixed=True)} for rows in (1, 4096)
        )
        assert few == many
    for outputs, inputs in ((4096, 14336), (128256, 4096), (64, 2048), (16, 40), (6144, 4096)):
        found = plan.fixed_plan(outputs=outputs, inputs=inputs, element_bytes=2)
        assert (found.parts - 1) * found.part_depth < inputs <= found.parts * found.part_depth
        assert found.part_depth % found.tile_depth == 0
