"""The forecast against a worker's own scheduler, iteration by iteration; the order against the worker's queue."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cohort.common.policies.cohort.arriving_prompts import ArrivingPrompts, slowdown
from cohort.common.policies.cohort.placed_work import PlacedWork
from cohort.common.policies.cohort.prompt_order import PromptOrder, PromptQueue
from cohort.common.policies.cohort.request_record import RequestRecord
from cohort.common.policies.cohort.ttft_forecast import memory_price_s, prompt_pace, transfer_fits
from cohort.common.policies.settings import CohortSettings
from cohort.common.policies.step_times.step_cost import BatchShape, step_seconds
from cohort.common.types import Attempt, StepTimes
from tests.common.policies.cohort.promised import promised
from tests.common.policies.cohort.test_least_ttft import prompt, report, worker

GPU = StepTimes(1.3e-3, 1.06e-4, 1.3e-4, 0.022, 6e-9, 1.5e-7)
GPU_LINEAR = StepTimes(1.3e-3, 1.06e-4, 1.3e-4, 0.022, 0.0, 1.5e-7)
"""Prompts attend to nothing."""


def replayed(prompts: list[int], index: int, decodes: BatchShape, aim_s: float, most: int) -> float:
    """When this prompt of the list, computed in its order, is done: each iteration takes tokens until the aim."""
    now_s, left = 0.0, list(prompts)
    while left[index]:
        tokens = 0
        for at in range(len(left)):
            while left[at] and tokens < most:
                step = min(2, left[at])
                shape = BatchShape(tokens + step, 1, 0, decodes.decodes, decodes.decode_context)
                if step_seconds(GPU_LINEAR, shape) > aim_s and tokens >= 16:
                    break
                left[at] -= step
                tokens += step
            if left[at]:
                break
        now_s += step_seconds(GPU_LINEAR, BatchShape(tokens, 1, 0, decodes.decodes, decodes.decode_context))
    return now_s


@given(
    st.lists(st.integers(50, 3000), min_size=1, max_size=8),
    st.integers(0, 120),
    st.sampled_from([0.035, 0.05, 0.1, 0.4]),
    st.data(),
)
def test_the_forecast_is_the_replay_of_the_iterations_to_within_one(
    prompts: list[int], rows: int, aim_s: float, data: st.DataObject
) -> None:
    prompts = sorted(prompts)
    index = data.draw(st.integers(0, len(prompts) - 1))
    decodes = BatchShape(0, 0, 0, rows, rows * 800)
    pace = prompt_pace(GPU_LINEAR, decodes, aim_s, most=2048, least=16)
    before, behind = sum(prompts[: index + 1]), sum(prompts[index + 1 :])
    # A pace meets its aim to within half a per cent; where the weights' reads hide tokens, that is one in ten of them.
    soonest_s, latest_s = (replayed(prompts, index, decodes, aim_s * near, 2048) for near in (1.005, 0.995))
    longest_s = max(aim_s, step_seconds(GPU_LINEAR, BatchShape(64, 1, 0, rows, rows * 800)))
    forecast_s = pace.seconds(before, 0.0, behind)
    assert min(0.9 * soonest_s, soonest_s - 1.2 * longest_s) <= forecast_s
    assert forecast_s <= max(1.1 * latest_s, latest_s + 1.2 * longest_s)


@given(st.integers(0, 250), st.floats(0.02, 0.5), st.integers(16, 2048))
def test_a_chunk_fills_the_aim_and_no_more(rows: int, aim_s: float, most: int) -> None:
    decodes = BatchShape(0, 0, 0, rows, rows * 900)
    pace = prompt_pace(GPU, decodes, aim_s, most=most, least=16)
    takes_s = step_seconds(GPU, BatchShape(int(pace.chunk), 1, 0, rows, rows * 900))
    assert 16 <= pace.chunk <= max(most, 16)
    assert pace.chunk <= 17 or takes_s <= aim_s * 1.01
    if 17 < pace.chunk < most - 1:
        assert takes_s >= aim_s * 0.97
    assert pace.rate > 0


def test_long_prompts_take_longer_for_their_attention_and_more_decode_rows_leave_less() -> None:
    few, many = (prompt_pace(GPU, BatchShape(0, 0, 0, n, n * 800), 0.1, most=2048, least=16) for n in (5, 100))
    assert few.seconds(8000, 0.0) < few.seconds(8000, 8000 * 4000.0) < many.seconds(8000, 8000 * 4000.0)
    unbounded = prompt_pace(GPU, BatchShape(0, 0, 0, 5, 4000), inf, most=2048, least=1)
    assert unbounded.chunk == 2048 and unbounded.seconds(20_480, 0.0) < inf


def test_memory_costs_from_three_quarters_of_the_cache_on_and_errors_cancel_in_part() -> None:
    assert memory_price_s(250, 0.0, 500, 1000) == 0.0
    assert memory_price_s(900, 0.0, 1000, 1000) == pytest.approx(0.15)
    one, many = (memory_price_s(900, v, 1000, 1000) for v in (100.0**2, 25 * 20.0**2))
    assert one == many == pytest.approx(0.25)
    # How little is free just now changes nothing that its share of the cache does not.
    assert memory_price_s(500, 0.0, 1, 1000) - memory_price_s(500, 0.0, 101, 1000) == pytest.approx(0.1)


def test_a_transfer_is_made_up_for_by_tokens_that_come_early() -> None:
    assert transfer_fits(0.01, 101, 0.001) and not transfer_fits(0.01, 5, 0.001)
    assert not transfer_fits(0.01, 1, 1.0) and not transfer_fits(0.01, 1000, -0.001)


KNOWN = st.tuples(
    st.integers(2, 5000),  # tokens
    st.booleans(),  # best-effort
    st.sampled_from([0.0, 0.3, 2.0]),  # TTFT
    st.floats(0.0, 5.0),  # arrival
    st.integers(0, 2),  # priority
)


@given(st.lists(KNOWN, min_size=1, max_size=12), st.sampled_from(["shortest", "earliest_due"]), st.floats(5.0, 100.0))
def test_prompts_before_a_newcomer_are_those_before_it_in_the_workers_queue(
    prompts: list[tuple[int, bool, float, float, int]], first: str, now_s: float
) -> None:
    options = CohortSettings(prompt_order=first, patience_s=40.0)
    queue = PromptQueue(PromptOrder(first=options.prompt_order, patience_s=40.0))
    queue.advance(now_s, GPU.token_s)
    work, known = PlacedWork(options, own_order=True), {}
    for index, (tokens, effort, ttft_s, arrived_s, priority) in enumerate(prompts):
        name = f"r{index}"
        sequence = promised(
            name, tokens, ttft_s=ttft_s, arrived_s=arrived_s, traffic_class="be" if effort else "rt", priority=priority
        )
        queue.add(now_s, sequence)
        due_s = arrived_s + ttft_s if ttft_s and not effort else inf
        known[name] = RequestRecord(sequence.key, effort, priority, arrived_s, due_s, 0.1, tokens, 0, 0.0, arrived_s)
    *others, newcomer = known
    view = worker("a")
    view.stats = report(*(prompt(name, known[name].tokens) for name in others))
    work.refresh(now_s, view, known)
    order = [sequence.request.request_id for sequence in queue]
    ahead = order[: order.index(newcomer)]
    tokens, _ = work.before(work.rank(now_s, known[newcomer], 0), 0.0)
    assert tokens == sum(known[name].tokens for name in ahead)
    # The same, if they were placed after the report.
    later = PlacedWork(options, own_order=True)
    later.refresh(now_s, worker("b"), known)
    for name in others:
        later.place(now_s, known[name], prompt=True, decode=True, output=10.0)
    assert later.before(later.rank(now_s, known[newcomer], 0), 0.0)[0] == tokens


def test_a_report_replaces_what_was_placed_and_a_request_that_never_shows_is_forgotten() -> None:
    work, view = PlacedWork(CohortSettings(), own_order=True), worker("a")
    known = {n: RequestRecord(Attempt(n, 1), False, 0, 0.0, 9.0, 0.1, 500, 0, 0.0, 0.0) for n in ("seen", "gone")}
    work.refresh(0.0, view, known)
    for one in known.values():
        work.place(0.0, one, prompt=True, decode=True, output=10.0)
    assert (work.prompt_tokens, work.rows) == (1000, 2)
    view.stats = report(prompt("seen", 300))
    work.refresh(0.5, view, known)
    assert work.prompt_tokens == 300 + 500
    view.stats = report(prompt("seen", 200))
    work.refresh(2.5, view, known)
    assert (work.prompt_tokens, work.rows) == (200, 0)


def test_what_was_computed_since_the_report_is_no_longer_before_a_newcomer() -> None:
    work, view = PlacedWork(CohortSettings(), own_order=True), worker("a")
    view.stats = report(prompt("x", 2000))
    work.refresh(1.0, view, {})
    newcomer = RequestRecord(Attempt("n", 1), False, 0, 1.0, 50.0, 0.1, 3000, 0, 0.0, 1.0)
    rank, pace = work.rank(1.1, newcomer, 0), work.pace()
    before = [work.before(rank, work.done(now_s, pace))[0] for now_s in (1.0, 1.05, 1.1, 9.0)]
    assert before == sorted(before, reverse=True) and before[0] > before[2] > 0 == before[3]


def test_shorter_prompts_that_keep_coming_stretch_the_wait_of_longer_ones() -> None:
    arriving = ArrivingPrompts()
    for index in range(200):
        arriving.arrived(0.1 * index, 100, 300.0)
    assert arriving.shorter_per_s(5000) == pytest.approx((1000, 3000), rel=0.15)
    assert arriving.shorter_per_s(50) == (0.0, 0.0)
    assert slowdown(1000, 4000) == pytest.approx(4 / 3)
    assert slowdown(9000, 4000) == pytest.approx(10.0)
    arriving.arrived(100.0, 100, 300.0)  # a long silence
    assert arriving.shorter_per_s(5000).tokens < 50
