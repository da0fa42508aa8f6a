"""Products over weights of 8 and 4 bits against the reference: every code, scales of every layout, any rows."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from cohort.kernels import reference
from cohort.kernels.code_dtypes import E2M1, E8M0
from cohort.kernels.cpu.quantized_panels import Codes
from cohort.kernels.gpu import operators
from cohort.kernels.gpu.plan import coded_plan
from cohort.kernels.gpu.products import coded
from cohort.kernels.ops import coded as entry
from cohort.kernels.ops.coded import CodedMatrix
from tests.examples import another_of_its_kind, examples
from tests.kernels.gpu.conftest import DEVICE
from tests.support.kinds import by_default, in_turn

INT8, UINT4, E4M3 = torch.int8, torch.uint8, torch.float8_e4m3fn
CODES = pytest.mark.parametrize("codes", [INT8, UINT4, E4M3], ids=str)
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)


def weight_of(codes: torch.dtype, outputs: int, inputs: int, group: int, *, offsets: bool = False) -> Codes:
    random = torch.Generator().manual_seed(3)
    if codes == E2M1:
        values = torch.randint(0, 256, (outputs, inputs // 2), generator=random, dtype=torch.uint8).view(E2M1)
        exponents = torch.randint(120, 124, (outputs, inputs // 32), generator=random, dtype=torch.uint8)
        return Codes(values.to(DEVICE), exponents.view(E8M0).to(DEVICE), None, 32)
    if codes == E4M3:
        values = (torch.randn((outputs, inputs), generator=random) * 100).clamp(-448, 448).to(E4M3)
        values.view(torch.uint8)[0, :4] = torch.tensor([0x01, 0x87, 0x7E, 0x80], dtype=torch.uint8)  # subnormals, 448
    elif codes == INT8:
        values = torch.randint(-128, 128, (outputs, inputs), generator=random, dtype=torch.int8)
    else:
        values = torch.randint(0, 256, (outputs, inputs // 2), generator=random, dtype=torch.uint8)
    groups = -(-inputs // group)
    size = {INT8: 127.0, UINT4: 15.0, E4M3: 448.0}[codes]
    scales = (0.5 + torch.rand((outputs, groups), generator=random)) * inputs**-0.5 / size
    zeros = torch.randint(0, 16, (outputs, groups), generator=random) if offsets else None
    moved = None if zeros is None else (-scales * zeros).to(DEVICE)
    return Codes(values.to(DEVICE), scales.to(DEVICE), moved, group)


def rows_of(rows: int, inputs: int, dtype: torch.dtype) -> Tensor:
    return torch.randn((rows, inputs), generator=torch.Generator().manual_seed(7)).to(DEVICE, dtype)


def both(
    x: Tensor, weight: Codes, bias: Tensor | None = None, *, add: bool = False, wide: bool = False
) -> list[Tensor]:
    """By the kernel and by the reference, over what stands there before."""
    outputs = len(weight.codes)
    kind = torch.float32 if wide else x.dtype
    before = torch.randn((len(x), outputs), generator=torch.Generator().manual_seed(9)).to(x.device, kind)
    found = []
    for compute in (coded.coded_product, reference.coded_product):
        out = before.clone()
        compute(x, weight.codes, weight.scales, weight.offsets, weight.group, bias, out, add=add)
        found.append(out.cpu())
    return found


@CODES
@pytest.mark.parametrize(
    ("group", "dtype"), in_turn(product((32, 64, 128, 160), (torch.float32, torch.bfloat16, torch.float16)), of=3)
)
def test_groups_and_whole_rows(assert_close, codes, dtype, group):
    """160 is all inputs of a row, and no power of two."""
    weight = weight_of(codes, 40, 160, group, offsets=codes == UINT4)
    found, expected = both(rows_of(5, 160, dtype), weight)
    assert_close(found, expected)


@CODES
@pytest.mark.parametrize("rows", by_default([1, 16, 17, 70], 1, 17))
def test_few_rows_and_many(assert_close, codes, rows):
    found, expected = both(rows_of(rows, 96, torch.bfloat16), weight_of(codes, 70, 96, 32, offsets=True))
    assert_close(found, expected)


@CODES
def test_every_code_is_the_number_that_it_means(codes):
    """To the bit: one row of ones and zeros picks each code."""
    inputs = 256 if codes != UINT4 else 16
    every = torch.arange(256, dtype=torch.uint8)
    if codes == UINT4:
        values = (every[0:16:2] | (every[1:16:2] << 4)).view(1, -1)
    else:
        values = every.view(codes).clone().view(1, -1)
        if codes == E4M3:
            values.view(torch.uint8)[0, [0x7F, 0xFF]] = 0  # those are no numbers
    values = values.to(DEVICE)
    scales = torch.ones(1, 1, device=DEVICE)
    x = torch.eye(inputs, dtype=torch.bfloat16, device=DEVICE)
    out = torch.empty((inputs, 1), dtype=torch.float32, device=DEVICE)
    coded.coded_product(x, values, scales, None, inputs, None, out)
    assert torch.equal(out[:, 0], reference.coded_numbers(values, scales, None, inputs)[0])


def test_every_code_of_mxfp4_and_every_scale():
    """To the bit, an output for each scale from 2^-124 to 2^113; below, Triton's interpreter widens no bfloat16."""
    codes = torch.tensor([low | (low + 1) << 4 for low in range(0, 16, 2)] * 2, dtype=torch.uint8)
    exponents = torch.arange(3, 241, dtype=torch.uint8)[:, None].view(E8M0).to(DEVICE)
    values = codes.repeat(len(exponents), 1).view(E2M1).to(DEVICE)
    out = torch.empty((32, len(exponents)), dtype=torch.float32, device=DEVICE)
    coded.coded_product(torch.eye(32, dtype=torch.bfloat16, device=DEVICE), values, exponents, None, 32, None, out)
    expected = reference.coded_numbers(values, exponents, None, 32)
    assert expected[124, :8].tolist() == [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]  # of 2^0
    assert torch.equal(out, expected.t())


@pytest.mark.parametrize("exponent", [241, 255])
def test_what_no_weight_has_is_not_a_number(exponent):
    weight = weight_of(E2M1, 3, 32, 32)
    weight.scales.view(torch.uint8)[1] = exponent
    out = torch.empty((2, 3), device=DEVICE)
    coded.coded_product(rows_of(2, 32, torch.bfloat16), weight.codes, weight.scales, None, 32, None, out)
    assert out.isnan().cpu().tolist() == [[False, True, False]] * 2


@pytest.mark.parametrize(
    ("dtype", "rows", "inputs"),
    [
        (torch.bfloat16, 17, 160),  # a tile of 64 inputs, and a part of one
        (torch.bfloat16, 5, 32),
        *(
            pytest.param(*each, marks=another_of_its_kind())
            for each in [(torch.float16, 5, 160), (torch.float32, 3, 96), (torch.bfloat16, 70, 288)]
        ),
    ],
)
def test_products_over_mxfp4(assert_close, dtype, rows, inputs):
    weight, bias = weight_of(E2M1, 40, inputs, 32), rows_of(1, 40, dtype)[0]
    found, expected = both(rows_of(rows, inputs, dtype), weight, bias)
    assert_close(found, expected)


@CODES
@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("wide", [False, True])
def test_bias_residual_and_sums_that_are_not_rounded(assert_close, codes, add, wide):
    weight = weight_of(codes, 24, 64, 64)
    bias = rows_of(1, 24, torch.bfloat16)[0]
    found, expected = both(rows_of(3, 64, torch.bfloat16), weight, bias, add=add, wide=wide)
    assert_close(found, expected)
    assert found.dtype == (torch.float32 if wide else torch.bfloat16)


def test_x_and_product_may_be_parts_of_wider_rows(assert_close):
    weight = weight_of(UINT4, 24, 64, 32, offsets=True)
    wide, target = rows_of(4, 100, torch.bfloat16), torch.zeros((4, 50), dtype=torch.bfloat16, device=DEVICE)
    coded.coded_product(wide[:, :64], weight.codes, weight.scales, weight.offsets, 32, None, target[:, 10:34])
    expected = torch.zeros((4, 24), dtype=torch.bfloat16, device=DEVICE)
    reference.coded_product(wide[:, :64], weight.codes, weight.scales, weight.offsets, 32, None, expected)
    assert_close(target[:, 10:34].cpu(), expected.cpu())
    assert not target[:, :10].any() and not target[:, 34:].any()


@pytest.fixture
def on_kernel(monkeypatch):
    """The entry takes the kernel here too, where the device is no GPU."""
    monkeypatch.setattr(entry.gpu, "ops_for", lambda tensor: operators)


def test_a_weight_of_several_parts(assert_close, on_kernel):
    """q, k and v of different codes and groups, with a bias over all of them."""
    parts = [weight_of(UINT4, 32, 64, 32, offsets=True), weight_of(INT8, 16, 64, 64), weight_of(E4M3, 16, 64, 32)]
    matrix = CodedMatrix(parts)
    x, bias = rows_of(3, 64, torch.bfloat16), rows_of(1, 64, torch.bfloat16)[0]
    whole = torch.cat([reference.coded_numbers(p.codes, p.scales, p.offsets, p.group) for p in parts])
    out = torch.empty((3, 64), dtype=torch.bfloat16, device=DEVICE)
    matrix.product(x, bias, out)
    expected = x.float() @ whole.t() + bias.float()
    assert_close(out.cpu(), expected.to(torch.bfloat16).cpu())
    residual = out.clone()
    matrix.add_product(x, residual)
    assert_close(residual.cpu(), (out.float() + x.float() @ whole.t()).to(torch.bfloat16).cpu())
    assert (matrix.outputs, matrix.inputs) == (64, 64)
    assert matrix.num_bytes == 32 * 32 + 2 * 32 * 2 * 4 + 16 * 64 + 16 * 4 + 16 * 64 + 16 * 2 * 4


@CODES
def test_rows_of_a_table(codes):
    part = weight_of(codes, 20, 64, 32, offsets=codes == UINT4)
    ids = torch.tensor([3, 0, 19, 3], device=DEVICE)
    out = torch.empty((4, 64), dtype=torch.bfloat16, device=DEVICE)
    CodedMatrix([part]).rows(ids, out)
    whole = reference.coded_numbers(part.codes, part.scales, part.offsets, part.group)
    assert torch.equal(out, whole[ids].to(torch.bfloat16))


@settings(max_examples=examples(0.1), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_shape(assert_close, data):
    codes = data.draw(st.sampled_from([INT8, UINT4, E4M3]))
    inputs, outputs = data.draw(st.sampled_from([32, 96, 130])), data.draw(st.integers(1, 75))
    group = data.draw(st.sampled_from([32, 96, inputs]))
    weight = weight_of(codes, outputs, inputs, group, offsets=data.draw(st.booleans()))
    found, expected = both(rows_of(data.draw(st.integers(1, 40)), inputs, torch.bfloat16), weight)
    assert_close(found, expected)


def test_two_plans_serve_all_steps():
    for element_bytes in (2, 4):
        for group in (32, 64, 128, 4096):
            plans = {
                coded_plan(rows=rows, group=group, inputs=4096, element_bytes=element_bytes) for rows in range(1, 500)
            }
            assert len(plans) == 2
            assert all(group % plan.tile_depth == 0 and plan.tile_depth >= 32 for plan in plans)


@pytest.mark.parametrize(
    ("codes", "group", "inputs", "taken"),
    [
        (INT8, 128, 4096, True),
        (UINT4, 4096, 4096, True),
        (E4M3, 128, 4096, True),
        (INT8, 48, 4096, False),  # no multiple of 32
        (UINT4, 33, 33, False),  # half a byte
        (torch.int16, 128, 4096, False),
        (E2M1, 32, 2880, True),
        (E2M1, 64, 2880, False),
        (E2M1, 32, 48, False),
    ],
)
def test_which_weights_are_taken(codes, group, inputs, taken):
    assert entry.takes(codes, group, inputs) == taken


class TestRefuses:
    def test_groups_that_no_tile_fits(self):
        weight = weight_of(INT8, 8, 96, 48)
        with pytest.raises(TypeError, match="groups of 48"):
            both(rows_of(2, 96, torch.bfloat16), weight)

    def test_shapes_that_do_not_fit(self):
        weight = weight_of(INT8, 8, 64, 32)
        with pytest.raises(ValueError, match="scales"):
            both(rows_of(2, 96, torch.bfloat16), weight)

    def test_codes_that_are_not_dense(self):
        weight = weight_of(INT8, 64, 64, 32)
        strange = Codes(weight.codes.t(), weight.scales, None, 32)
        with pytest.raises(ValueError, match="dense"):
            both(rows_of(2, 64, torch.bfloat16), strange)
