"""The forms of a matrix product: equal results, and rows that do not depend on their neighbours."""

from __future__ import annotations

import pytest
import torch

from cohort.common.engine.device.device_name import native_bfloat16
from cohort.common.engine.weights import linear
from cohort.common.engine.weights.linear import Embedding, Form, GatedLinear, Linear, linear_form
from cohort.common.engine.weights.quantized import Code, QuantizedWeight
from cohort.kernels.ops import coded
from cohort.kernels.ops.fused import silu_mul

CPU = torch.device("cpu")
COMPILED = linear_form(CPU, torch.float32, 64) == "panels"
needs_kernels = pytest.mark.skipif(not COMPILED, reason="no compiled kernels here")
needs_bfloat16 = pytest.mark.skipif(
    linear_form(CPU, torch.bfloat16, 64) != "panels", reason="this processor does not multiply bfloat16"
)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("dtype", "form", "tolerance"),
    [
        (torch.float32, "plain", 1e-5),
        (torch.bfloat16, "plain", 2e-2),
        pytest.param(torch.float32, "panels", 1e-5, marks=needs_kernels),
        pytest.param(torch.bfloat16, "panels", 1e-2, marks=needs_bfloat16),
        pytest.param(torch.bfloat16, "widened", 1e-2, marks=needs_kernels),
        pytest.param(torch.float16, "widened", 2e-3, marks=needs_kernels),
    ],
)
def test_forms_agree(dtype: torch.dtype, form: Form, tolerance: float, bias: bool) -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(70, 48).to(dtype), torch.randn(9, 48).to(dtype)
    offset = torch.randn(70).to(dtype) if bias else None
    exact = x.double() @ weight.double().T + (0 if offset is None else offset.double())
    out = Linear(weight, offset, form=form)(x)
    assert out.dtype == dtype
    assert torch.allclose(out.double(), exact, rtol=tolerance, atol=tolerance * 4)


@pytest.mark.parametrize(
    "dtype", [pytest.param(torch.float32, marks=needs_kernels), pytest.param(torch.bfloat16, marks=needs_bfloat16)]
)
@pytest.mark.parametrize(("outputs", "inputs"), [(96, 64), (576, 1536), (1999, 576)])
def test_packed_rows_are_independent(outputs: int, inputs: int, dtype: torch.dtype) -> None:
    """To the last bit: what makes a request compute the same in every batch."""
    torch.manual_seed(1)
    linear, x = Linear(torch.randn(outputs, inputs).to(dtype)), torch.randn(70, inputs).to(dtype)
    whole = linear(x)
    for rows in (1, 2, 3, 7, 16, 33):
        assert torch.equal(linear(x[:rows]), whole[:rows])
        assert torch.equal(linear(x[70 - rows :]), whole[70 - rows :])


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("inner", "inputs"), [(32, 64), (70, 48), (1536, 576)])
def test_gated_linear_is_silu_of_gate_times_up(inner: int, inputs: int, dtype: torch.dtype, bias: bool) -> None:
    torch.manual_seed(2)
    weight, x = torch.randn(2 * inner, inputs).to(dtype) / inputs**0.5, torch.randn(5, inputs).to(dtype)
    offset = torch.randn(2 * inner).to(dtype) if bias else None
    out = torch.empty(5, inner, dtype=dtype)
    GatedLinear(weight, offset).into(x, out)
    both = x.double() @ weight.double().T + (0 if offset is None else offset.double())
    exact = torch.nn.functional.silu(both[:, :inner]) * both[:, inner:]
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    assert torch.allclose(out.double(), exact, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_add_into_adds_the_rounded_product(dtype: torch.dtype, bias: bool) -> None:
    torch.manual_seed(3)
    linear = Linear(torch.randn(70, 48).to(dtype), torch.randn(70).to(dtype) if bias else None)
    x, residual = torch.randn(9, 48).to(dtype), torch.randn(9, 70).to(dtype)
    expected = residual + linear(x)
    linear.add_into(x, residual)
    assert torch.equal(residual, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_embedding_shared_with_the_last_product_reads_the_same_rows(dtype: torch.dtype) -> None:
    table = torch.randn(101, 48).to(dtype)
    ids = torch.tensor([0, 100, 31, 32, 31, 64])
    out = torch.empty(6, 48, dtype=dtype)
    Embedding(table, Linear(table.clone())).into(ids, out)
    assert torch.equal(out, table[ids])
    Embedding(table).into(ids, out.zero_())
    assert torch.equal(out, table[ids])


def test_a_token_outside_the_vocabulary_is_an_error() -> None:
    """Never a read beyond the weights."""
    table = torch.randn(96, 48)
    with pytest.raises(IndexError):
        Embedding(table, Linear(table)).into(torch.tensor([3, 96]), torch.empty(2, 48))


@needs_bfloat16
def test_bfloat16_panels_only_where_the_processor_has_it() -> None:
    assert native_bfloat16()


def test_an_odd_number_of_inputs_is_served_too() -> None:
    weight, x = torch.randn(40, 7).bfloat16(), torch.randn(3, 7).bfloat16()
    out = Linear(weight)(x)
    assert torch.allclose(out.float(), x.float() @ weight.float().T, rtol=2e-2, atol=5e-2)


# -- codes on a GPU --------------------------------------------------------------------------------------------------


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Codes are taken to lie on a GPU that has the kernel; what computes is its reference."""
    monkeypatch.setattr(linear, "on_gpu", lambda weight: True)
    monkeypatch.setattr(coded, "available", lambda codes, group, inputs: coded.takes(codes.dtype, group, inputs))


def coded_weight(code: Code, outputs: int, inputs: int = 64) -> QuantizedWeight:
    groups = inputs // 32
    scales, offsets = torch.rand(outputs, groups) / 100, None
    if code == "uint4":
        codes, offsets = torch.randint(0, 256, (outputs, inputs // 2), dtype=torch.uint8), -8 * scales
    elif code == "int8":
        codes = torch.randint(-127, 128, (outputs, inputs), dtype=torch.int8)
    else:
        codes = torch.randn(outputs, inputs).to(torch.float8_e4m3fn)
    return QuantizedWeight(code, codes, scales, offsets, 32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_codes_on_a_gpu_stay_codes(as_on_a_gpu: None, dtype: torch.dtype) -> None:
    """A projection of three parts with a bias, one that adds to the residual, and a gated one; x is not rounded."""
    parts = [coded_weight("uint4", 16), coded_weight("int8", 8), coded_weight("e4m3", 8)]
    whole, bias = torch.cat([part.dequantized() for part in parts]), torch.randn(32).to(dtype)
    x = torch.randn(5, 64).to(dtype)
    product = Linear(parts, bias, dtype=dtype)
    assert (product.form, product.panel_data, product.out_features) == ("coded", None, 32)
    assert torch.equal(product(x), (x.float() @ whole.t() + bias.float()).to(dtype))
    residual = torch.randn(5, 32).to(dtype)
    expected = (residual.float() + x.float() @ whole.t()).to(dtype)
    Linear(parts, dtype=dtype).add_into(x, residual)
    assert torch.equal(residual, expected)
    gated, out = GatedLinear(parts[1:], dtype=dtype), torch.empty(5, 8, dtype=dtype)
    gated.into(x, out)
    both = (x.float() @ whole[16:].t()).to(dtype)
    reference = torch.empty_like(out)
    silu_mul(both, reference)
    assert torch.equal(out, reference) and torch.equal(gated.unactivated(x), both)


def test_a_table_in_codes_is_kept_once_on_a_gpu(as_on_a_gpu: None) -> None:
    part = coded_weight("int8", 20)
    head = Linear([part], dtype=torch.bfloat16)
    table = Embedding([part], head, dtype=torch.bfloat16)
    assert table._shared is head.packed
    for embedding in (table, Embedding([part], dtype=torch.float16)):
        out = torch.empty(3, 64, dtype=torch.float16)
        embedding.into(torch.tensor([4, 0, 19]), out)
        assert torch.equal(out, part.dequantized()[[4, 0, 19]].half())


def test_codes_that_the_kernel_of_a_gpu_does_not_take_are_dequantised(as_on_a_gpu: None) -> None:
    weight = QuantizedWeight("int8", torch.ones(4, 48, dtype=torch.int8), torch.ones(4, 3), None, 16)
    product = Linear([weight], dtype=torch.bfloat16, form="plain")
    assert product.packed is None and product.weight.dtype == torch.bfloat16
    assert torch.equal(product(torch.eye(48).bfloat16()), weight.dequantized().t().bfloat16())
