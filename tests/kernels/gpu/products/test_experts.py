"""Grouped products of a mixture of experts against the reference, expert by expert."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from cohort.kernels import reference
from cohort.kernels.code_dtypes import E2M1, E8M0, as_bytes
from cohort.kernels.gpu.plan import expert_plan
from cohort.kernels.gpu.products import experts
from cohort.kernels.types import ClampedSwiglu, ExpertCodes
from tests.examples import another_of_its_kind, examples
from tests.kernels.gpu.conftest import DEVICE
from tests.kernels.gpu.products.test_coded import weight_of

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def weights_of(count: int, hidden: int, inner: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(3)
    gate_up = torch.randn((count, 2 * inner, hidden), generator=random) * hidden**-0.5
    down = torch.randn((count, hidden, inner), generator=random) * inner**-0.5
    return gate_up.to(DEVICE, dtype), down.to(DEVICE, dtype)


def routed(tokens: int, per_token: int, count: int, seed: int = 0) -> Tensor:
    """Ascending in each row, as a router gives them."""
    random = torch.Generator().manual_seed(seed)
    rows = [torch.randperm(count, generator=random)[:per_token].sort().values for _ in range(tokens)]
    return torch.stack(rows).to(DEVICE)


def rows_of(tokens: int, hidden: int, dtype: torch.dtype) -> Tensor:
    return torch.randn((tokens, hidden), generator=torch.Generator().manual_seed(7)).to(DEVICE, dtype)


@pytest.mark.parametrize(
    ("tokens", "per_token", "count", "dtype"),
    [
        *((*each, torch.float32) for each in [(1, 2, 4), (5, 3, 7), (40, 1, 3), (30, 4, 4), (3, 2, 33)]),
        *((*each, torch.bfloat16) for each in [(1, 2, 4), (30, 4, 4)]),
        *(
            pytest.param(*each, torch.bfloat16, marks=another_of_its_kind())
            for each in [(5, 3, 7), (40, 1, 3), (3, 2, 33)]
        ),
    ],
)
def test_every_expert_computes_its_rows(assert_close, dtype, tokens, per_token, count):
    """Few rows and many for their experts, experts without rows, numbers that are no powers of two."""
    gate_up, down = weights_of(count, 48, 40, dtype)
    x, chosen = rows_of(tokens, 48, dtype), routed(tokens, per_token, count)
    found = experts.expert_outputs(x, chosen, gate_up, down)
    assert_close(found.cpu(), reference.expert_outputs(x, chosen, gate_up, down).cpu())


@DTYPES
def test_all_rows_on_one_expert(assert_close, dtype):
    gate_up, down = weights_of(5, 40, 24, dtype)
    x, chosen = rows_of(35, 40, dtype), torch.full((35, 1), 3, device=DEVICE)
    found = experts.expert_outputs(x, chosen, gate_up, down)
    assert_close(found.cpu(), reference.expert_outputs(x, chosen, gate_up, down).cpu())


def test_rows_are_sorted_by_expert_and_stay_in_order():
    chosen = torch.tensor([[1, 4], [0, 4], [1, 2]], device=DEVICE)
    order, starts = experts.sorted_rows(chosen, 6)
    assert order.tolist() == [2, 0, 4, 5, 1, 3]
    assert starts.tolist() == [0, 1, 3, 4, 4, 6, 6]
    assert starts.dtype == torch.int32


def test_a_row_is_the_same_whatever_stands_beside_it(assert_close):
    """But for rounding: the interpreter's products take another order for another place in a tile."""
    gate_up, down = weights_of(4, 48, 40, torch.float32)
    x, chosen = rows_of(20, 48, torch.float32), routed(20, 2, 4)
    together = experts.expert_outputs(x, chosen, gate_up, down).view(20, 2, -1)
    for rows in (slice(0, 1), slice(3, 9), slice(11, 20)):
        found = experts.expert_outputs(x[rows], chosen[rows], gate_up, down).view(-1, 2, 48)
        assert_close(found.cpu(), together[rows].cpu())


def test_views_of_wider_rows(assert_close):
    gate_up, down = weights_of(4, 48, 40, torch.float32)
    wide, chosen = rows_of(6, 60, torch.float32), routed(6, 2, 4)
    found = experts.expert_outputs(wide[:, :48], chosen, gate_up, down)
    assert_close(found.cpu(), reference.expert_outputs(wide[:, :48].contiguous(), chosen, gate_up, down).cpu())


@DTYPES
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shared", [False, True])
def test_weighted_sums(dtype, weight_dtype, shared):
    """To the bit: both round after every operation, in ascending order of a token's experts."""
    random = torch.Generator().manual_seed(1)
    parts = torch.randn((7 * 3, 1500), generator=random).to(DEVICE, dtype)
    weights = torch.rand((7, 3), generator=random).to(DEVICE, weight_dtype)
    own = torch.randn((7, 1500), generator=random).to(DEVICE, dtype) if shared else None
    residual = torch.randn((7, 1500), generator=random).to(DEVICE, dtype)
    expected = residual.clone()
    reference.add_weighted(parts, weights, own, expected)
    experts.add_weighted(parts, weights, own, residual)
    assert torch.equal(residual, expected)


@settings(max_examples=examples(0.05), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_routing(assert_close, data):
    count = data.draw(st.integers(1, 9))
    per_token = data.draw(st.integers(1, min(3, count)))
    tokens = data.draw(st.integers(1, 25))
    hidden, inner = data.draw(st.sampled_from([16, 24])), data.draw(st.sampled_from([8, 40]))
    favourites = data.draw(st.lists(st.integers(0, count - 1), min_size=per_token, max_size=count, unique=True))
    chosen = torch.tensor([sorted(data.draw(st.permutations(favourites))[:per_token]) for _ in range(tokens)])
    gate_up, down = weights_of(count, hidden, inner, torch.float32)
    x, chosen = rows_of(tokens, hidden, torch.float32), chosen.to(DEVICE)
    found = experts.expert_outputs(x, chosen, gate_up, down)
    assert_close(found.cpu(), reference.expert_outputs(x, chosen, gate_up, down).cpu())


def test_two_plans_serve_all_steps():
    """By rows per expert alone: a recorded step keeps its plan whatever its rows are routed to."""
    for element_bytes in (2, 4):
        plans = {expert_plan(rows=rows, experts=8, element_bytes=element_bytes) for rows in range(1, 4000)}
        assert len(plans) == 2


def codes_of(count: int, outputs: int, inputs: int, codes: torch.dtype, group: int, *, offsets: bool) -> ExpertCodes:
    parts = [weight_of(codes, outputs, inputs, group, offsets=offsets) for _ in range(count)]
    if codes == E2M1:
        shifted = [[as_bytes(each).roll(3 * e, 0) for each in (p.codes, p.scales)] for e, p in enumerate(parts)]
        numbers, exponents = (torch.stack(each) for each in zip(*shifted, strict=True))
        return ExpertCodes(numbers.view(E2M1), exponents.view(E8M0), None, group)
    scales = torch.stack([part.scales * (1 + expert / count) for expert, part in enumerate(parts)])
    moved = [part.offsets for part in parts if part.offsets is not None]
    numbers = torch.stack([part.codes.roll(3 * expert, 0) for expert, part in enumerate(parts)])
    return ExpertCodes(numbers, scales, torch.stack(moved) if moved else None, group)


FORMS = {
    "fp8": (torch.float8_e4m3fn, 32, False),
    "int8": (torch.int8, 96, False),
    "int4": (torch.uint8, 32, True),
    "mxfp4": (E2M1, 32, False),
}
FEW, MANY = (5, 3, 7), (40, 2, 2)
NIGHTLY = [("mxfp4", FEW), ("int8", FEW), ("fp8", MANY), ("int4", MANY)]


@pytest.mark.parametrize(
    ("form", "routing"),
    [
        *(("fp8", FEW), ("int4", FEW), ("int8", MANY), ("mxfp4", MANY)),
        *(pytest.param(*each, marks=another_of_its_kind()) for each in NIGHTLY),
    ],
)
def test_over_codes_it_is_the_product_of_the_dequantised(assert_close, form, routing):
    """Few rows and many for their experts; a bfloat16 weight would be rounded, so numbers are compared in float32."""
    (codes, group, offsets), (tokens, per_token, count) = FORMS[form], routing
    gate_up = codes_of(count, 2 * 64, 96, codes, group, offsets=offsets)
    down = codes_of(count, 96, 64, codes, min(group, 64), offsets=offsets)
    x, chosen = rows_of(tokens, 96, torch.bfloat16), routed(tokens, per_token, count)
    found = experts.expert_outputs(x, chosen, gate_up, down)
    numbers = [reference.expert_numbers(weight) for weight in (gate_up, down)]
    expected = reference.expert_outputs(x.float(), chosen, *numbers)
    assert expected.abs().max() > 0.01
    assert_close(found.cpu(), expected.cpu())


@pytest.mark.parametrize(
    ("codes", "tokens"),
    [
        (None, 5),
        (E2M1, 40),
        *(
            pytest.param(*each, marks=another_of_its_kind())
            for each in [(None, 40), (E2M1, 5), (torch.int8, 5), (torch.int8, 40)]
        ),
    ],
)
def test_clamped_experts_with_biases(assert_close, codes, tokens):
    """gpt-oss: gates and ups in turn, some beyond the limit."""
    if codes is None:
        gate_up, down = weights_of(3, 96, 64, torch.bfloat16)
        numbers = [gate_up, down]
    else:
        gate_up, down = (codes_of(3, *shape, codes, 32, offsets=False) for shape in ((2 * 64, 96), (96, 64)))
        numbers = [reference.expert_numbers(weight) for weight in (gate_up, down)]
    biases = (rows_of(3, 2 * 64, torch.bfloat16), rows_of(3, 96, torch.bfloat16))
    x, chosen, clamped = rows_of(tokens, 96, torch.bfloat16), routed(tokens, 2, 3), ClampedSwiglu(1.702, 1.0)
    found = experts.expert_outputs(x, chosen, gate_up, down, biases, clamped)
    wide = [each.float() for each in (*numbers, *biases)]
    expected = reference.expert_outputs(x.float(), chosen, wide[0], wide[1], (wide[2], wide[3]), clamped)
    assert_close(found.cpu(), expected.cpu())


@pytest.mark.parametrize("codes", [None, pytest.param(E2M1, marks=another_of_its_kind())], ids=str)
def test_parts_of_the_columns_add_up(assert_close, codes):
    """As ranks hold them: three of every gate beside its up, of every input of down; its bias once. The parts are 32
    wide, of 96."""
    x, chosen, clamped = rows_of(5, 96, torch.bfloat16), routed(5, 2, 3), ClampedSwiglu(1.702, 1.0)
    gate_up, down = weights_of(3, 96, 96, torch.bfloat16)
    if codes is not None:
        gate_up, down = (codes_of(3, *shape, codes, 32, offsets=False) for shape in ((2 * 96, 96), (96, 96)))
    biases = (rows_of(3, 2 * 96, torch.bfloat16), rows_of(3, 96, torch.bfloat16))

    def part(weight, axis, first, end):
        if isinstance(weight, Tensor):
            return weight.narrow(axis, first, end - first).contiguous()
        cuts = [(as_bytes(weight.codes), 2, weight.codes.dtype), (as_bytes(weight.scales), 32, weight.scales.dtype)]
        numbers, exponents = (
            each.narrow(axis, *((first, end - first) if axis == 1 else (first // size, (end - first) // size)))
            .contiguous()
            .view(dtype)
            for each, size, dtype in cuts
        )
        return ExpertCodes(numbers, exponents, None, weight.group)

    def outputs(first, end, add):
        into, out_of = part(gate_up, 1, 2 * first, 2 * end), part(down, 2, first, end)
        own = (biases[0][:, 2 * first : 2 * end].contiguous(), biases[1] * add)
        return experts.expert_outputs(x, chosen, into, out_of, own, clamped).float()

    parts = sum(outputs(first, first + 32, first == 0) for first in (0, 32, 64))
    assert_close(parts.bfloat16().cpu(), outputs(0, 96, True).cpu())


class TestRefuses:
    def test_codes_beside_plain_weights(self):
        gate_up, _ = weights_of(4, 64, 64, torch.float32)
        codes = codes_of(4, 64, 64, torch.int8, 64, offsets=False)
        with pytest.raises(TypeError, match="all their products alike"):
            experts.expert_outputs(rows_of(3, 64, torch.float32), routed(3, 2, 4), gate_up, codes)
        wide = ExpertCodes(codes.codes, codes.scales[:, :5], None, 64)
        with pytest.raises(ValueError, match="do not fit codes"):
            experts.products(rows_of(3, 64, torch.float32), *experts.sorted_rows(routed(3, 2, 4), 4), wide, per_token=2)
        with pytest.raises(ValueError, match="bias"):
            experts.products(
                rows_of(3, 64, torch.float32),
                *experts.sorted_rows(routed(3, 2, 4), 4),
                gate_up,
                torch.zeros(4, 64, device=DEVICE),
                per_token=2,
            )

    def test_weights_that_do_not_fit(self):
        gate_up, down = weights_of(4, 48, 40, torch.float32)
        with pytest.raises(ValueError, match="do not fit"):
            experts.expert_outputs(rows_of(3, 40, torch.float32), routed(3, 2, 4), gate_up, down)

    def test_weights_that_are_not_dense(self):
        gate_up, down = weights_of(4, 48, 48, torch.float32)
        with pytest.raises(ValueError, match="dense"):
            experts.expert_outputs(rows_of(3, 48, torch.float32), routed(3, 2, 4), gate_up, down.transpose(1, 2))

    def test_sums_of_another_shape(self):
        with pytest.raises(ValueError, match="parts"):
            experts.add_weighted(torch.zeros(5, 8), torch.zeros(3, 2), None, torch.zeros(3, 8))
