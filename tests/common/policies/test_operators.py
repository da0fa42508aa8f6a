"""Operators by hand, on a device of round numbers, and what must hold of any work."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cohort.common.policies.cost_model import CostModel, DeviceShape, ModelShape, StackShape, StepWork, prefill_pairs
from cohort.common.policies.operators import Between, Decodes, Matrices, Operators, Prompts, exchange_s

MATRICES = Matrices((1, 16), (100.0, 400.0), ((0.25, 0.5), (0.5, 1.0)))
EXCHANGE = {2: ((10.0, 1.0), (1000.0, 4.0)), 4: ((10.0, 2.0), (1000.0, 8.0))}
OPERATORS = Operators(
    MATRICES, Between(2.0, 0.5), Prompts(3.0, 10.0, 0.25, 0.5), Decodes(5.0, 0.5), tuple(EXCHANGE.items())
)
DEVICE = DeviceShape("d", 1000.0, 100.0, 10_000, 1.0, 0.5, 1.0, 10, 2.0, 1.0, 0.0, 40.0, operators=OPERATORS)
# Parameters of a layer: attention 4·(8 + 2·4)·2 in = 128 + 8·2·4 = 64 out; MLP 80 and 40; head 20.
MODEL = ModelShape("m", 2, 4, 8, 4, 2, 10, True, 5, False, 1000, 2, 2)
STACK = StackShape("s", 0.0, 0.0, 0.0)


def decode(rows: int, context: int) -> StepWork:
    return StepWork(rows, rows, rows, 0, 0, rows, context, context)


def test_the_table_holds_at_its_knots_between_them_and_beyond() -> None:
    assert [MATRICES.attained(*at) for at in ((1, 100), (16, 400), (1, 400))] == pytest.approx([0.25, 1.0, 0.5])
    assert MATRICES.attained(4, 200) == pytest.approx(0.5)  # half way in both, each time a factor of the root of 2
    assert MATRICES.attained(1000, 1) == pytest.approx(0.5)


def matrix_s(parameters: int, tokens: int) -> float:
    return max(2 * tokens * parameters / 1000, 2 * parameters / 100) / MATRICES.attained(tokens, 2 * parameters)


def test_one_decode_by_hand() -> None:
    matrices = sum(matrix_s(each, 1) for each in (128, 64, 80, 40))
    # Moved a layer: 10 · 4 hidden, 2 · 24 rotated, 3 · 10 of the MLP, of 2 bytes, at 50 bytes a second.
    between = (2.0**3 + (2 * (40 + 48 + 30) / 50) ** 3) ** (1 / 3)
    expected = 2 * (matrices + between + 5.0) + matrix_s(20, 1) + 10 * 64 / 50
    cost = CostModel(MODEL, DEVICE, STACK)
    assert cost.step_s(decode(1, 10)) == pytest.approx(expected)
    assert cost.repeated_s(decode(1, 10), 3) == [cost.step_s(decode(1, 10 + step)) for step in range(3)]


def test_attention_of_prompts_by_hand() -> None:
    cost = CostModel(MODEL, DEVICE, STACK)
    fresh = StepWork(20, 1, 1, prefill_pairs(0, 20), 20)
    behind = StepWork(20, 1, 1, prefill_pairs(30, 20), 50)
    # 600 pairs with what lies before; 4 · 8 · 2 FLOPs a pair at half of 1000, in two layers.
    assert cost.step_s(behind) - cost.step_s(fresh) == pytest.approx(2 * 600 * 64 / 500)
    alone = cost.step_s(fresh) - cost.step_s(StepWork(20, 1, 1))
    assert alone == pytest.approx(2 * (3.0 + (210 + 20 * 10) * 64 / 250))


def test_devices_divide_the_work_and_exchange_their_sums() -> None:
    two = CostModel(MODEL, DEVICE, STACK, tensor_parallel=2)
    matrices = sum(matrix_s(each // 2, 1) for each in (128, 64, 80, 40))
    between = (2.0**3 + (2 * (40 + 24 + 15) / 50) ** 3) ** (1 / 3)
    layer = matrices + between + 5.0 + 2 * exchange_s(EXCHANGE[2], 8)
    assert two.step_s(decode(1, 10)) == pytest.approx(2 * layer + matrix_s(10, 1) + 10 * 32 / 50)


def test_all_reduces_between_the_measured_sizes_and_numbers() -> None:
    assert [exchange_s(EXCHANGE[2], size) for size in (1, 100, 1000, 3000)] == pytest.approx([1.0, 2.0, 4.0, 12.0])
    three, four = (CostModel(MODEL, DEVICE, STACK, tensor_parallel=each) for each in (3, 4))
    assert three.step_s(decode(1, 10)) > four.step_s(decode(1, 10)), "as four exchange, with more work each"


def test_experts_that_are_reached_are_read_with_the_tokens_of_each() -> None:
    mixture = replace(MODEL, experts=4, experts_per_token=2, expert_intermediate=6)
    dense = replace(MODEL, intermediate=12)
    cost, other = CostModel(mixture, DEVICE, STACK), CostModel(dense, DEVICE, STACK)
    # One token reaches two experts of four: what a dense MLP of both their widths reads and computes, by two experts'
    # efficiencies, and the same is moved between.
    assert cost.step_s(decode(1, 10)) == pytest.approx(other.step_s(decode(1, 10)))
    assert cost.step_s(decode(9, 10)) > other.step_s(decode(9, 10))


@given(tokens=st.integers(1, 300), more=st.integers(1, 100), devices=st.sampled_from([1, 2, 4]))
def test_more_context_and_more_rows_never_take_less(tokens: int, more: int, devices: int) -> None:
    cost = CostModel(MODEL, DEVICE, STACK, tensor_parallel=devices)
    assert cost.step_s(decode(tokens, tokens + more)) > cost.step_s(decode(tokens, tokens))
    whole = StepWork(tokens, 1, 1, prefill_pairs(more, tokens), tokens + more)
    assert cost.step_s(whole) > cost.step_s(StepWork(tokens, 1, 1, prefill_pairs(0, tokens), tokens))
