"""R3: linear costs from a profile, learned online, and the longer of computing and copying."""

from __future__ import annotations

import json
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cohort.common.policies.bros.iteration_cost import BatchLoad, IterationCost
from tests.examples import examples


def truth(load: BatchLoad) -> float:
    """20 ms, 0.1 ms a prompt token, 0.2 ms a row, 1 µs a position."""
    prefill = 0.005 + 1e-4 * load.prefill_tokens if load.prefill_tokens else 0.0
    return 0.02 + prefill + 2e-4 * load.decode_rows + 1e-6 * load.context


def some_load(random: Random) -> BatchLoad:
    rows = random.randint(1, 100)
    tokens = random.choice([0, 0, random.randint(16, 2000)])
    return BatchLoad(tokens, rows, rows * random.randint(10, 800))


def profile() -> bytes:
    points = []
    for tokens in (16, 64, 256, 1024):
        shape = {"rows": 1, "tokens_per_row": tokens, "context": tokens}
        points.append({"shape": shape, "median_s": truth(BatchLoad(tokens, 0, 0))})
    for rows in (1, 4, 16, 64):
        for context in (128, 512, 2048):
            shape = {"rows": rows, "tokens_per_row": 1, "context": context}
            points.append({"shape": shape, "median_s": truth(BatchLoad(0, rows, rows * context))})
    return json.dumps({"model": "m", "points": points}).encode()


def test_a_profile_is_enough_to_foresee_mixed_batches() -> None:
    cost = IterationCost()
    cost.import_state(profile())
    for load in (BatchLoad(0, 8, 4000), BatchLoad(512, 0, 0), BatchLoad(300, 40, 20_000)):
        assert cost.exec_s(load) == pytest.approx(truth(load), rel=0.02)


def test_without_a_profile_it_learns_while_serving_and_says_how_wrong_it_is() -> None:
    random, cost = Random(1), IterationCost()
    assert cost.exec_s(BatchLoad(100, 3, 500)) == 0.0
    for _ in range(400):
        load = some_load(random)
        cost.observe(load, 0, truth(load) * random.uniform(0.98, 1.02))
    for _ in range(20):
        load = some_load(random)
        assert cost.exec_s(load) == pytest.approx(truth(load), rel=0.05)
    stats = cost.metrics()
    assert 0.0 < stats["cost_error"] < 0.05
    assert stats["cost_observations_total"] == 400


def test_it_follows_a_machine_that_became_slower() -> None:
    random, cost = Random(2), IterationCost()
    for factor, count in ((1.0, 300), (2.0, 1500)):
        for _ in range(count):
            load = some_load(random)
            cost.observe(load, 0, factor * truth(load))
    load = BatchLoad(200, 20, 5000)
    assert cost.exec_s(load) == pytest.approx(2 * truth(load), rel=0.1)


def test_an_iteration_takes_the_longer_of_computing_and_copying() -> None:
    cost = IterationCost()
    cost.import_state(profile())
    load = BatchLoad(0, 4, 400)
    cost.observe(BatchLoad(), 100, 0.01)  # copies alone: 0.1 ms a slot
    assert cost.swap_s(50) == pytest.approx(0.005)
    assert cost.iteration_s(load, 50) == cost.exec_s(load)
    assert cost.iteration_s(load, 1000) == pytest.approx(0.1)


def test_copies_ahead_of_the_rows_teach_the_price_of_a_slot_and_nothing_else() -> None:
    cost = IterationCost()
    cost.import_state(profile())
    load = BatchLoad(0, 4, 400)
    before = cost.exec_s(load)
    cost.observe(load, 0, truth(load))
    cost.observe(load, 0, before + 0.02, slots_before=100)
    assert cost.exec_s(load) == pytest.approx(before, rel=0.01)
    assert cost.swap_s(100) == pytest.approx(0.02, rel=0.05)


def test_prompt_tokens_that_fit_into_a_time() -> None:
    cost = IterationCost()
    cost.import_state(profile())
    load = BatchLoad(0, 10, 5000)
    tokens = cost.tokens_within(load, 0.1)
    assert cost.exec_s(load.plus(0, tokens)) <= 0.1 < cost.exec_s(load.plus(0, tokens + 2))
    assert cost.tokens_within(load, 0.02) == 0
    assert IterationCost().tokens_within(load, 0.1) > 10_000


def test_prompt_tokens_that_cost_nothing_beside_decode_rows_are_counted() -> None:
    cost = IterationCost()
    for tokens in (0, 16, 128, 256, 512) * 40:  # the first hundred come for nothing
        cost.observe(BatchLoad(tokens, 10, 1000), 0, 0.02 + 1e-4 * max(0, tokens - 100))
    for load in (BatchLoad(0, 10, 1000), BatchLoad(64, 10, 1000)):
        tokens = cost.tokens_within(load, 0.04)
        assert cost.exec_s(load.plus(0, tokens)) <= 0.04 < cost.exec_s(load.plus(0, tokens + 2))


def test_state_survives_and_foreign_state_is_refused() -> None:
    cost, other = IterationCost(), IterationCost()
    cost.import_state(profile())
    assert cost.export_state() == b""
    load = BatchLoad(300, 7, 900)
    cost.observe(load, 0, 2.0 * truth(load))
    other.import_state(cost.export_state())
    assert other.exec_s(load) == cost.exec_s(load)
    assert other.metrics()["cost_observations_total"] == 1
    assert other.metrics()["cost_error"] == 0.0
    other.observe(load, 0, 0.8 * cost.exec_s(load))
    assert other.metrics()["cost_error"] == pytest.approx(0.25)
    for data in (b"", b"{}", b"[]", b'{"weights": [1], "covariance": [[1]], "slot_s": 0, "observations": 1}', b"no"):
        with pytest.raises(ValueError):
            other.import_state(data)


def test_after_many_iterations_of_few_kinds_it_still_knows_what_it_is_sure_of() -> None:
    """Rounding of the plain update made variances negative after some thousand iterations of one row."""
    random, cost = Random(3), IterationCost()
    for number in range(30_000):
        busy = number % 500 < 20
        load = some_load(random) if busy else BatchLoad(0, 1, 100 + number % 60)
        cost.observe(load, 0, truth(load) * random.uniform(0.7, 1.4))
    covariance = np.array(json.loads(cost.export_state())["covariance"])
    assert np.allclose(covariance, covariance.T)
    assert np.linalg.eigvalsh(covariance)[0] > 0.0
    load = BatchLoad(300, 7, 900)
    assert cost.exec_s(load) == pytest.approx(truth(load), rel=0.25)


def test_a_state_that_no_observations_make_is_refused() -> None:
    cost = IterationCost()
    cost.observe(BatchLoad(0, 1, 100), 0, 0.01)
    state = json.loads(cost.export_state())
    state["covariance"][2][2] = -1e-3
    with pytest.raises(ValueError, match="covariance"):
        IterationCost().import_state(json.dumps(state).encode())


def test_where_positions_seem_to_gain_time_rows_are_not_dearer_for_it() -> None:
    """Longer contexts happen to come with faster iterations: about 2 ms a row, of which 6.5 would be the row's."""
    random, cost, off = Random(5), IterationCost(), []
    for _ in range(300):
        rows, length = random.randint(1, 16), random.uniform(100, 190)
        load = BatchLoad(0, rows, int(rows * length))
        seconds = 0.0075 + rows * (0.0065 - 3e-5 * length)
        cost.observe(load, 0, seconds)
        off.append(cost.exec_s(load) / seconds - 1.0)
    assert json.loads(cost.export_state())["weights"][4] < 0.0
    assert sum(off[100:]) / 200 == pytest.approx(0.0, abs=0.1)


@settings(max_examples=examples(0.5))
@given(seed=st.integers(0, 2**32))
def test_more_work_never_takes_less_time(seed: int) -> None:
    random, cost = Random(seed), IterationCost()
    for _ in range(random.randint(0, 12)):
        load = some_load(random)
        cost.observe(load, 0, truth(load) * random.uniform(0.2, 4.0))
    load = some_load(random)
    assert cost.exec_s(load.plus(50, 1)) >= cost.exec_s(load)
    assert cost.exec_s(BatchLoad(900, 3, 50)) >= cost.exec_s(BatchLoad(400, 3, 50))
    assert load.plus(9, 30).minus(9, 30) == load == load.plus(9, 1).minus(9, 1)
