"""Iteration times: the closed form by hand, the fit recovers what made the points, the table learns and shrugs."""

from __future__ import annotations

import json
import math
from random import Random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cohort.common.policies.step_times.profile_table import ProfileTable, cell_key
from cohort.common.policies.step_times.step_cost import BatchShape, step_seconds, tokens_within
from cohort.common.policies.step_times.step_fit import fit_step_times
from cohort.common.types import StepTimes
from tests.examples import examples

GPU = StepTimes(1.3e-3, 1.06e-4, 1.3e-4, 0.022, 6e-9, 1.5e-7)
"""Roughly Qwen2.5-14B on an A100."""


def batch(decodes: int = 0, context: int = 0, prefill: int = 0, start: int = 0) -> BatchShape:
    shape = BatchShape(0, 0, 0, decodes, decodes * context)
    return shape.with_prefill(start, prefill) if prefill else shape


def test_an_iteration_by_hand() -> None:
    simple = StepTimes(1.0, 0.1, 0.01, 0.0, 0.001, 0.0001)
    # 4 rows; 3 + 10 tokens; pairs of positions 5..14: 6 + … + 15 = 105; three decodes that read 20 positions each.
    assert step_seconds(simple, batch(3, 20, 10, 5)) == pytest.approx(1.0 + 0.4 + 0.13 + 0.105 + 0.006)
    assert step_seconds(simple, batch()) == 0.0


def test_few_tokens_cost_the_reading_of_the_weights() -> None:
    assert step_seconds(GPU, batch(1, 1)) == pytest.approx(1.3e-3 + 1.06e-4 + 0.022, rel=1e-3)
    both = step_seconds(GPU, batch(prefill=2000))
    assert 2000 * GPU.token_s < both < 1.06 * 2000 * GPU.token_s + 2000 * 2001 / 2 * GPU.pair_s


def test_mixing_is_paid_for_by_iterations_that_mix_and_copies_by_the_position() -> None:
    dear = msgspec.structs.replace(GPU, mixed_share=0.3, copy_s=1e-6)
    assert step_seconds(dear, batch(3, 20, 10)) == pytest.approx(1.3 * step_seconds(GPU, batch(3, 20, 10)))
    for alone in (batch(3, 20), batch(prefill=10)):
        assert step_seconds(dear, alone) == step_seconds(GPU, alone)
    copying = batch(3, 20, 10)._replace(copied=1000)
    assert step_seconds(dear, copying) == pytest.approx(1.3 * step_seconds(GPU, batch(3, 20, 10)) + 1e-3)
    assert step_seconds(dear, batch()._replace(copied=1000)) == pytest.approx(1e-3)


@given(st.floats(0.001, 1.0))
def test_tokens_within_is_the_inverse(seconds: float) -> None:
    tokens = tokens_within(GPU, seconds)
    if seconds <= GPU.floor_s:
        assert tokens == 0.0
    else:
        again = ((GPU.token_s * tokens) ** 4 + GPU.floor_s**4) ** 0.25
        assert again == pytest.approx(seconds, rel=1e-6)


def random_batch(random: Random) -> BatchShape:
    decodes = random.choice([0, 1, 4, 16, 50, 120])
    prefill = random.randint(16, 1500) if not decodes or random.random() < 0.6 else 0
    return batch(decodes, random.randint(50, 3000), prefill, random.choice([0, 0, 500, 4000]))


def test_the_fit_finds_the_constants_in_spite_of_noise_and_outliers() -> None:
    random = Random(3)
    shapes = [random_batch(random) for _ in range(300)]
    seconds = [
        step_seconds(GPU, shape) * math.exp(random.gauss(0.0, 0.03)) * (8.0 if random.random() < 0.03 else 1.0)
        for shape in shapes
    ]
    found = fit_step_times(shapes, seconds, [1.0] * len(shapes))
    errors = sorted(abs(step_seconds(found, s) / step_seconds(GPU, s) - 1) for s in shapes)
    assert errors[len(errors) // 2] < 0.02
    assert errors[int(0.95 * len(errors))] < 0.06


@settings(max_examples=examples(0.3))
@given(share=st.sampled_from([0.0, 0.15, 0.3]), scale=st.floats(0.1, 30.0), seed=st.integers(0, 10_000))
def test_the_price_of_mixing_is_found(share: float, scale: float, seed: int) -> None:
    """On devices of any speed, from what an online table sees: pure iterations as well as mixed ones."""
    seconds = [scale * value for value in msgspec.structs.astuple(GPU)[:6]]
    true = StepTimes(*seconds, mixed_share=share)
    table = learned(true, seed=seed)
    times = table.step_times
    assert times is not None
    assert times.mixed_share == pytest.approx(share, abs=0.04)
    random, errors = Random(seed + 1), []
    while len(errors) < 60:
        shape = random_batch(random)
        if shape.mixed:
            errors.append(abs(step_seconds(times, shape) / step_seconds(true, shape) - 1.0))
    assert sorted(errors)[54] < 0.05
    assert table.error_of("mixed") < 0.05 and table.error_of("decode") < 0.05


def test_without_iterations_that_do_not_mix_mixing_is_not_made_up() -> None:
    random = Random(5)
    shapes = [batch(random.randint(1, 60), random.randint(50, 3000), random.randint(16, 1500)) for _ in range(200)]
    found = fit_step_times(shapes, [step_seconds(GPU, shape) for shape in shapes], [1.0] * len(shapes))
    assert abs(found.mixed_share) < 0.1


@given(copy_s=st.floats(1e-8, 1e-3))
@settings(max_examples=examples(0.3))
def test_the_price_of_copies_is_found_and_nothing_else_moves(copy_s: float) -> None:
    random, table = Random(7), learned(GPU)
    before = table.step_times
    assert before is not None and before.copy_s == 0.0
    true = msgspec.structs.replace(GPU, copy_s=copy_s)
    for _ in range(2000):
        shape = random_batch(random)._replace(copied=random.choice([0, 160, 1600, 6400]))
        table.record(shape, step_seconds(true, shape) * math.exp(random.gauss(0.0, 0.02)))
    after = table.step_times
    assert after is not None
    if 6400 * copy_s > 0.1 * step_seconds(GPU, batch(prefill=300)):  # else it is noise
        assert after.copy_s == pytest.approx(copy_s, rel=0.25)
    for shape in (batch(30, 700, 300), batch(90, 1500)):
        assert step_seconds(after, shape) == pytest.approx(step_seconds(GPU, shape), rel=0.06)


def test_nothing_to_fit_is_an_error() -> None:
    with pytest.raises(ValueError, match="no measured"):
        fit_step_times([], [], [])


# -- the table -------------------------------------------------------------------------------------------------------


def learned(times: StepTimes, count: int = 600, seed: int = 1, noise: float = 0.02) -> ProfileTable:
    random, table = Random(seed), ProfileTable()
    for _ in range(count):
        shape = random_batch(random)
        table.record(shape, step_seconds(times, shape) * math.exp(random.gauss(0.0, noise)))
    return table


def test_an_empty_table_knows_nothing_and_bounds_nothing() -> None:
    table = ProfileTable()
    assert table.estimate(batch(3, 100)) is None
    assert table.prefill_budget(batch(3, 100), 0, 700, 0.01) == 700
    assert table.step_times is None


def test_a_learned_table_estimates_unseen_batches() -> None:
    table = learned(GPU)
    for shape in (batch(30, 700, 300), batch(90, 1500), batch(7, 100, 900, 2000)):
        assert table.estimate(shape) == pytest.approx(step_seconds(GPU, shape), rel=0.06)
    assert table.error < 0.06


def test_a_cell_that_is_slower_than_the_curve_is_believed() -> None:
    table, shape = learned(GPU), batch(30, 700, 300)
    for _ in range(60):  # some kernel is twice as slow exactly here
        table.record(shape, 2 * step_seconds(GPU, shape))
    estimate_s = table.estimate(shape)
    assert estimate_s is not None
    assert estimate_s > 1.6 * step_seconds(GPU, shape)


def test_single_outliers_hardly_move_a_settled_cell_a_lasting_change_does() -> None:
    table, shape = learned(GPU), batch(16, 500)
    true_s = step_seconds(GPU, shape)
    for _ in range(40):
        table.record(shape, true_s)
    before_s = table.estimate(shape)
    table.record(shape, 100 * true_s)
    after_s = table.estimate(shape)
    assert before_s is not None and after_s is not None
    assert after_s < 1.03 * before_s
    for _ in range(200):
        table.record(shape, 1.5 * true_s)
    assert table.estimate(shape) == pytest.approx(1.5 * true_s, rel=0.1)


@settings(max_examples=examples(0.6))
@given(
    decodes=st.integers(0, 150),
    context=st.integers(1, 3000),
    start=st.integers(0, 4000),
    most=st.integers(1, 2048),
    within_s=st.floats(0.01, 0.3),
)
def test_the_budget_is_within_the_bound_and_nothing_smaller_was_left_out(
    decodes: int, context: int, start: int, most: int, within_s: float
) -> None:
    table = _TABLE
    base = batch(decodes, context)
    budget = table.prefill_budget(base, start, most, within_s)
    assert 0 <= budget <= most
    if budget:
        estimate_s = table.estimate(base.with_prefill(start, budget))
        assert estimate_s is not None and estimate_s <= within_s
    if budget < most:  # one more token would break it
        estimate_s = table.estimate(base.with_prefill(start, budget + 1))
        assert estimate_s is not None and estimate_s > within_s


_TABLE = learned(GPU)


def test_an_exported_table_goes_on_where_it_was() -> None:
    copy = ProfileTable()
    copy.load(_TABLE.export())
    assert len(copy) == len(_TABLE)
    for shape in (batch(30, 700, 300), batch(90, 1500)):
        assert copy.estimate(shape) == pytest.approx(_TABLE.estimate(shape), rel=0.03)


def test_a_table_that_knew_neither_mixing_nor_copies_is_read() -> None:
    old = json.loads(_TABLE.export())
    for _, cell in old["cells"]:
        assert cell.pop() == 0.0  # the positions copied
    table = ProfileTable()
    table.load(json.dumps(old).encode())
    assert len(table) == len(_TABLE)
    assert table.estimate(batch(30, 700, 300)) == pytest.approx(_TABLE.estimate(batch(30, 700, 300)), rel=0.03)


def test_a_profile_may_hold_mixed_iterations() -> None:
    points = []
    for decodes, prefill in [(0, 64), (0, 512), (0, 1024), (4, 0), (32, 0), (64, 0), (4, 64), (32, 64), (32, 512)]:
        shape = batch(decodes, 500, prefill)
        seconds = step_seconds(msgspec.structs.replace(GPU, mixed_share=0.3), shape)
        words = {"rows": decodes, "tokens_per_row": 1, "context": 500}
        if prefill:
            words = {
                "rows": 1,
                "tokens_per_row": prefill,
                "context": prefill,
                "decodes": decodes,
                "decode_context": 500,
            }
        points.append({"shape": words, "median_s": seconds})
    table = ProfileTable()
    table.load(json.dumps({"points": points}).encode())
    assert len(table) == len(points)
    assert table.step_times is not None
    assert 0.15 < table.step_times.mixed_share < 0.4


def test_errors_are_kept_apart_by_kind() -> None:
    table = learned(GPU, noise=0.0)
    assert table.error_of("prefill") < 0.05
    for _ in range(300):
        table.record(batch(8, 400, 2000), 3 * step_seconds(GPU, batch(8, 400, 2000)))
    kept = table.error_of("decode")
    table.record(batch(8, 400, 150), 2 * step_seconds(GPU, batch(8, 400, 150)))
    assert table.error_of("decode") == kept
    assert ProfileTable().error_of("mixed") == 0.0


def test_it_starts_from_the_file_of_the_profile_command() -> None:
    points = []
    for rows, tokens, context in [
        (1, 64, 64),
        (1, 256, 256),
        (1, 1024, 1024),
        (1, 256, 2048),
        (1, 1, 128),
        (8, 1, 512),
        (64, 1, 512),
        (128, 1, 2048),
    ]:
        shape = batch(rows, context) if tokens == 1 else batch(prefill=tokens, start=context - tokens)
        points.append(
            {
                "shape": {"rows": rows, "tokens_per_row": tokens, "context": context},
                "median_s": step_seconds(GPU, shape),
                "fastest_s": 0.0,
                "repeats": 5,
            }
        )
    table = ProfileTable()
    table.load(json.dumps({"model": "m", "points": points}).encode())
    assert len(table) == len(points)
    assert table.estimate(batch(32, 700, 300)) == pytest.approx(step_seconds(GPU, batch(32, 700, 300)), rel=0.25)


@pytest.mark.parametrize("data", [b"", b"no json", b"{}", b'{"points": 3}', b"[1]"])
def test_anything_else_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"profile|JSON"):
        ProfileTable().load(data)


def test_neighbours_share_a_cell_and_others_do_not() -> None:
    assert cell_key(batch(30, 700, 280)) == cell_key(batch(31, 710, 285))
    assert (
        len(
            {
                cell_key(batch(30, 700, 300)),
                cell_key(batch(60, 700, 300)),
                cell_key(batch(30, 1400, 300)),
                cell_key(batch(30, 700, 600)),
            }
        )
        == 4
    )
