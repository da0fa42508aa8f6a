"""The cost model against cases worked out by hand, on a device of round numbers."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cohort.common.policies.cost_model import CostModel, DeviceShape, ModelShape, StackShape, StepWork, prefill_pairs

# One layer: attention 4·(8 + 2·4)·2 in, 8·2·4 out; MLP 3·4·10; head 5·4. In parameters: 128 + 64 + 120 = 312, and 20.
MODEL = ModelShape("m", 2, 4, 8, 4, 2, 10, True, 5, False, 1000, 2, 2)
DEVICE = DeviceShape("d", 1000.0, 100.0, 10_000, 0.5, 0.5, 0.25, 10, 2.0, 50.0, 0.001, 40.0)
STACK = StackShape("s", 0.0, 0.0, 0.0)


def decode(rows: int, context: int, longest: int = 0) -> StepWork:
    return StepWork(rows, rows, rows, 0, 0, rows, context, longest)


def test_parameters_and_bytes():
    assert MODEL.layer_parameters == 312
    assert MODEL.parameters == 2 * 312 + 2 * 20
    assert replace(MODEL, tied_embeddings=True).parameters == 2 * 312 + 20
    assert replace(MODEL, gated_mlp=False).layer_parameters == 272
    assert MODEL.weights_total_bytes == 2 * 664
    assert MODEL.kv_geometry(16).token_bytes == 2 * 2 * 4 * 2 * 2


def test_a_real_model_has_the_size_on_its_name():
    llama = ModelShape("llama-2-7b", 32, 4096, 32, 32, 128, 11008, True, 32000, False, 4096, 2, 2)
    assert llama.parameters == pytest.approx(6.74e9, rel=0.01)


def test_one_decode_step_is_bound_by_the_weights():
    # Memory: (624 + 20) parameters of 2 bytes at 50 B/s = 25.76 s. Compute: 2·624 + 2·20 = 1288 FLOP at 500 = 2.576 s.
    expected = (25.76**4 + 2.576**4) ** 0.25 + 10 * 64 / 50
    assert CostModel(MODEL, DEVICE, STACK).step_s(decode(1, 10, 10)) == pytest.approx(expected)


def test_decode_attention_may_read_its_kv_at_a_rate_of_its_own():
    # 10 positions of 64 bytes at 100 x 0.1 instead of 100 x 0.5 bytes a second: 64 s instead of 12.8 s.
    slow = replace(DEVICE, kv_efficiency=0.1)
    usual = CostModel(MODEL, DEVICE, STACK).step_s(decode(1, 10, 10))
    assert CostModel(MODEL, slow, STACK).step_s(decode(1, 10, 10)) == pytest.approx(usual + 64.0 - 12.8)


def test_a_long_prefill_is_bound_by_compute():
    work = StepWork(100, 1, 1, prefill_pairs(0, 100), 100)
    # Compute: 2·624·100 + 40 at 500 FLOP/s = 249.68 s. Attention: 4·2·8·2 = 128 FLOP a pair, 5050 pairs, at 250.
    expected = (249.68**4 + 25.76**4) ** 0.25 + 128 * 5050 / 250 + 100 * 64 / 50
    assert CostModel(MODEL, DEVICE, STACK).step_s(work) == pytest.approx(expected)


def test_host_time_hides_behind_the_device_and_the_rest_adds():
    stack = StackShape("s", launch_s=1.0, step_s=0.5, row_s=0.25)
    quiet = CostModel(MODEL, DEVICE, STACK).step_s(decode(3, 30, 10))
    assert CostModel(MODEL, DEVICE, stack).step_s(decode(3, 30, 10)) == pytest.approx(quiet + 0.5 + 0.75)
    slow_host = replace(stack, launch_s=1000.0)
    assert CostModel(MODEL, DEVICE, slow_host).step_s(decode(3, 30, 10)) == pytest.approx(2000.0 + 0.5 + 0.75)


def test_what_is_planned_ahead_shows_only_where_decodes_are_faster() -> None:
    stack = StackShape("s", launch_s=1.0, step_s=0.5, row_s=0.25, ahead=True)
    quiet, planned = CostModel(MODEL, DEVICE, STACK), CostModel(MODEL, DEVICE, stack)
    assert planned.step_s(decode(3, 30, 10)) == quiet.step_s(decode(3, 30, 10))
    slow = CostModel(MODEL, DEVICE, replace(stack, step_s=1000.0))
    assert slow.step_s(decode(3, 30, 10)) == 2.0 + 1000.0 + 0.75
    assert slow.repeated_s(decode(3, 30, 10), 2) == [1002.75, 1002.75]
    prompt = StepWork(100, 1, 1, prefill_pairs(0, 100), 100)
    assert planned.step_s(prompt) == pytest.approx(quiet.step_s(prompt) + 0.5 + 0.25)


def test_two_devices_halve_the_work_and_pay_for_the_exchange():
    one, two = CostModel(MODEL, DEVICE, STACK), CostModel(MODEL, DEVICE, STACK, tensor_parallel=2)
    # Two all-reduces a layer, two layers: 4 latencies, and 2·(1/2)·4·2 B = 8 B a token each at 50 B/s.
    exchange = 4 * 0.001 + 4 * 8 * 7 / 50
    assert two.step_s(decode(7, 70, 10)) == pytest.approx(one.step_s(decode(7, 70, 10)) / 2 + exchange)
    stack = StackShape("s", 0.0, 0.0, 0.0, parallel_step_s=3.0, parallel_row_s=1.0)
    driven = CostModel(MODEL, DEVICE, stack, tensor_parallel=2).step_s(decode(7, 70, 10))
    assert driven == pytest.approx(two.step_s(decode(7, 70, 10)) + 10.0)


def test_what_all_devices_have_of_the_kv_each_of_them_reads():
    """One head, as of latents: each of four devices reads and swaps all of it. With four heads each has its own."""
    latents = replace(MODEL, kv_heads=1, head_dim=8, attention_weights=MODEL.attention_parameters)
    assert (latents.kv_copies(4), MODEL.kv_copies(4), MODEL.kv_copies(8)) == (4, 1, 2)
    four, one = CostModel(latents, DEVICE, STACK, tensor_parallel=4), CostModel(latents, DEVICE, STACK)
    for cost in (one, four):  # 64 bytes a position at 50 bytes a second
        assert cost.step_s(decode(1, 1010, 1010)) - cost.step_s(decode(1, 10, 10)) == pytest.approx(1000 * 64 / 50)
    assert four.swap_s(80) == one.swap_s(80) == 2.0
    divided = CostModel(MODEL, DEVICE, STACK, tensor_parallel=4)
    assert divided.step_s(decode(1, 1010)) - divided.step_s(decode(1, 10)) == pytest.approx(1000 * 16 / 50)


def test_split_kv_counts_positions_and_unit_per_row_the_longest():
    """A1: with one unit a row and head a long row holds the others up; with split-KV it makes no difference which row
    is long."""
    split = CostModel(MODEL, DEVICE, STACK)
    unit = CostModel(MODEL, DEVICE, STACK, decode_attention="unit_per_row")
    even, skewed = decode(4, 4000, 1000), decode(4, 4000, 3700)
    assert split.step_s(even) == split.step_s(skewed)
    # A unit draws 2/10 of 50 B/s and reads 64/4 B a position: 3700 take 5920 s, all of them together 5120 s.
    assert unit.step_s(skewed) - split.step_s(skewed) == pytest.approx(3700 * 16 / 10 - 4000 * 64 / 50)
    assert unit.step_s(even) == split.step_s(even)
    # Last of all: 300 positions at the device's bandwidth, then 3700 of one unit.
    last = CostModel(MODEL, DEVICE, STACK, decode_attention="unit_last")
    assert last.step_s(skewed) - split.step_s(skewed) == pytest.approx(3700 * 16 / 10 + 300 * 64 / 50 - 4000 * 64 / 50)
    assert last.step_s(even) == pytest.approx(split.step_s(even) + 1000 * 16 / 10 - 1000 * 64 / 50)


def test_copies_go_over_the_host_link():
    assert CostModel(MODEL, DEVICE, STACK).swap_s(80) == 2.0
    assert CostModel(MODEL, DEVICE, STACK, tensor_parallel=2).swap_s(80) == 1.0


def test_iterations_that_mix_prompts_and_decodes_pay_for_it() -> None:
    plain = replace(STACK, step_s=0.25, row_s=0.5)
    free, dear = (CostModel(MODEL, DEVICE, replace(plain, mixed_share=share)) for share in (0.0, 0.2))
    mixed = StepWork(21, 2, 2, prefill_pairs(0, 20), 20, 1, 300, 300)
    assert dear.step_s(mixed) == pytest.approx(1.2 * free.step_s(mixed))
    for alone in (decode(3, 300), StepWork(20, 1, 1, prefill_pairs(0, 20), 20)):
        assert dear.step_s(alone) == free.step_s(alone)
    assert dear.repeated_s(decode(3, 300), 4) == free.repeated_s(decode(3, 300), 4)


def test_flops_of_an_iteration():
    work = StepWork(11, 2, 2, prefill_pairs(5, 10), 15, 1, 20, 20)
    assert CostModel(MODEL, DEVICE, STACK).flops(work) == 2 * 624 * 11 + 2 * 20 * 2 + 128 * (105 + 20)


def test_nothing_costs_nothing():
    assert CostModel(MODEL, DEVICE, StackShape("s", 1.0, 1.0, 1.0)).step_s(StepWork(0, 0, 0)) == 0.0


@given(start=st.integers(0, 60), count=st.integers(1, 60))
def test_pairs_are_counted_as_by_hand(start: int, count: int):
    assert prefill_pairs(start, count) == sum(position + 1 for position in range(start, start + count))


@given(
    rows=st.integers(1, 40),
    mean=st.integers(1, 500),
    longest=st.integers(1, 5000),
    attention=st.sampled_from(["split_kv", "unit_per_row", "unit_last"]),
    devices=st.sampled_from([1, 4]),
)
def test_repeated_iterations_cost_as_much_as_one_by_one(rows, mean, longest, attention, devices):
    cost = CostModel(MODEL, DEVICE, StackShape("s", 0.3, 0.2, 0.1), tensor_parallel=devices, decode_attention=attention)
    context = rows * mean
    expected = [cost.step_s(decode(rows, context + step * rows, longest + step)) for step in range(20)]
    assert cost.repeated_s(decode(rows, context, longest), 20) == expected


@given(rows=st.integers(1, 100), context=st.integers(1, 10_000), more=st.integers(1, 1000))
def test_more_work_never_takes_less_time(rows: int, context: int, more: int):
    cost = CostModel(MODEL, DEVICE, StackShape("s", 0.01, 0.2, 0.1), decode_attention="unit_per_row")
    base = cost.step_s(decode(rows, context, context))
    assert cost.step_s(decode(rows, context + more, context + more)) >= base
    assert cost.step_s(decode(rows + more, context, context)) >= base


# As MODEL, with 4 experts of 3·4·5 = 60 in place of each MLP, 2 of them for a token, and a router of 4·4.
MIXTURE = replace(MODEL, experts=4, experts_per_token=2, expert_intermediate=5)


def test_a_mixture_has_all_experts_and_computes_with_some():
    assert MIXTURE.parameters == 2 * (192 + 16 + 4 * 60) + 2 * 20
    assert MIXTURE.active_parameters == 2 * (192 + 16 + 2 * 60)
    shared = replace(MIXTURE, shared_intermediate=7, dense_layers=1)
    assert shared.parameters == 312 + (192 + 16 + 3 * 4 * 7 + 4 * 60) + 2 * 20
    assert replace(MIXTURE, expert_bits=4.0).weights_total_bytes == 2 * (2 * 208 + 2 * 20) + 2 * 4 * 60 // 2


@pytest.mark.parametrize(("count", "each", "tokens"), [(4, 2, 1), (4, 2, 3), (5, 1, 3), (3, 3, 2)])
def test_the_experts_that_tokens_reach_are_those_of_all_ways_to_choose(count: int, each: int, tokens: int):
    ways = list(product(combinations(range(count), each), repeat=tokens))
    reached = sum(len(set().union(*way)) for way in ways) / len(ways)
    shape = replace(MIXTURE, experts=count, experts_per_token=each)
    assert count * shape.reached_share(tokens) == pytest.approx(reached)


def test_an_iteration_of_a_mixture_reads_more_weights_the_more_tokens_it_has():
    free = replace(DEVICE, compute_efficiency=1.0, flops_per_s=1e12)
    cost = CostModel(MIXTURE, free, STACK)
    for rows in (1, 2, 8, 100):
        nbytes = 2 * (2 * 208 + 20) + 2 * 480 * (1.0 - 0.5**rows)
        assert MIXTURE.read_bytes(rows) == pytest.approx(nbytes)
        assert cost.step_s(decode(rows, 0)) == pytest.approx(nbytes / 50, rel=1e-6)
    steps = cost.repeated_s(decode(3, 30, 10), 4)
    assert steps == [cost.step_s(decode(3, 30 + 3 * step, 10 + step)) for step in range(4)]
