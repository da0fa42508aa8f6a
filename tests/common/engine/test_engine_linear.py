"""The forms of a matrix product: equal results, and rows that do not depend on their neighbours."""

from __future__ import annotations

import pytest
import torch

from cohort.common.engine.linear import Form, Linear, linear_form

CPU = torch.device("cpu")


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("dtype", "form", "tolerance"),
    [
        (torch.float32, "plain", 1e-5),
        (torch.float32, "packed", 1e-5),
        (torch.bfloat16, "widened", 1e-2),
        (torch.float16, "widened", 2e-3),
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


@pytest.mark.skipif(linear_form(CPU, torch.float32) != "packed", reason="this torch was built without oneDNN")
@pytest.mark.parametrize(("outputs", "inputs"), [(96, 64), (576, 1536), (1999, 576)])
def test_packed_rows_are_independent(outputs: int, inputs: int) -> None:
    """To the last bit: what makes a request compute the same in every batch."""
    torch.manual_seed(1)
    linear, x = Linear(torch.randn(outputs, inputs)), torch.randn(70, inputs)
    whole = linear(x)
    for rows in (1, 2, 3, 7, 16, 33):
        assert torch.equal(linear(x[:rows]), whole[:rows])
        assert torch.equal(linear(x[70 - rows :]), whole[70 - rows :])
