"""The sums over a worker's prompts, kept while prompts come and go, are those of all of them summed up anew."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from cohort.common.policies.cohort.placed_work import PlacedWork
from cohort.common.policies.cohort.request_record import RequestRecord
from cohort.common.policies.interface import InstanceView
from cohort.common.policies.settings import CohortSettings
from cohort.common.policies.step_times.step_cost import BatchShape, step_seconds
from cohort.common.types import Attempt, QueuedWork, Role, StepTimes, WorkerCapacity, WorkerStats
from tests.common.policies.cohort.test_least_ttft import prompt, worker
from tests.examples import another_of_its_kind, examples

PLACED = st.tuples(
    st.integers(0, 12), st.integers(1, 3000), st.floats(0.0, 3.0), st.sampled_from(["both", "prompt", "decode"])
)
STEPS = st.lists(st.one_of(PLACED, st.integers(0, 12)), max_size=40)
"""Placements (name, tokens, seconds until due, part) and names that are forgotten."""


def known(name: str, tokens: int, due_s: float) -> RequestRecord:
    return RequestRecord(Attempt(name, 0), False, 0, 0.0, due_s, 0.1, tokens, 0, 7.3, 0.0)


def placed(steps: list[tuple[int, int, float, str] | int], *, look: bool) -> PlacedWork:
    """`look`: what is kept is asked for after every step, so that it is kept at all."""
    work = PlacedWork(CohortSettings(), own_order=True)
    work.refresh(0.0, worker("u", prompt("x", 700), prompt("y", 90)), {})
    for step in steps:
        if isinstance(step, int):
            work.forget(f"r{step}")
        else:
            number, tokens, due_s, part = step
            work.place(
                0.0, known(f"r{number}", tokens, due_s), prompt=part != "decode", decode=part != "prompt", output=3.7
            )
        if look:
            _ = work.prompt_tokens, work.memory, work.strictest_s, work.pace()
    return work


@given(STEPS)
def test_what_is_kept_is_what_is_summed_up(steps: list[tuple[int, int, float, str] | int]) -> None:
    kept, anew = placed(steps, look=True), placed(steps, look=False)
    assert (kept.prompt_tokens, kept.memory, kept.strictest_s) == (anew.prompt_tokens, anew.memory, anew.strictest_s)
    assert (kept.rows, kept.context, kept.pace()) == (anew.rows, anew.context, anew.pace())
    for tokens, due_s in ((1, 0.0), (500, 1.0), (3000, 2.9)):
        rank = kept.rank(0.0, known("z", tokens, due_s), 0)
        assert kept.before(rank, 10.0) == anew.before(rank, 10.0)
        assert kept.blocked_s(rank, 100.0, 0.0, best_effort=False) == anew.blocked_s(
            rank, 100.0, 0.0, best_effort=False
        )


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 90), st.booleans()), min_size=1, max_size=6))
def test_a_report_of_an_idle_worker_leaves_nothing_behind_of_those_before(reports: list[tuple[int, int, bool]]) -> None:
    """Each with so many prompts, free blocks, and step times or none; the same view, as the manager keeps it."""
    shown = worker("u")
    kept = PlacedWork(CohortSettings(), own_order=True)
    for at, (prompts, free, timed) in enumerate(reports):
        told = worker("u", *(prompt(f"p{index}", 300) for index in range(prompts)))
        stats = replace(told.stats, total_blocks=100, free_blocks=free)
        shown.stats = stats if timed else replace(stats, step_times=None)
        kept.refresh(float(at), shown, {})
        anew = PlacedWork(CohortSettings(), own_order=True)
        anew.refresh(float(at), shown, {})
        rank = kept.rank(0.0, known("z", 100, 1.0), 0)
        for each in (kept, anew):
            assert each.before(rank, 0.0) == anew.before(rank, 0.0)
        assert (kept.memory, kept.strictest_s, kept.pace()) == (anew.memory, anew.strictest_s, anew.pace())
        assert kept.max_step_s(64, 3) == anew.max_step_s(64, 3)
        assert (kept.rows, kept.context, kept.busy, kept.prompt_tokens) == (0, 0, prompts > 0, anew.prompt_tokens)


AS = [(0, 400, 7), (0, 410, 300), (0, 90, 0), (90, 0, 7), (2000, 0, 300), (1800, 200, 300), (1, 0, 0)]
"""Tokens left of the prompt, positions, tokens to come."""
REPORT = st.tuples(
    st.dictionaries(st.integers(0, 3), st.sampled_from(AS), max_size=4),
    st.sampled_from([True, True, False]),  # and what the report before it says, as it was
    st.sampled_from([0, 0, 0, 1, 2]),  # of the prices of a token
    st.sampled_from([0.0, 0.2, 0.2, 5.0, 70.0]),  # seconds later
    st.integers(0, 3),  # forgotten
    st.tuples(
        st.integers(0, 4), st.integers(1, 3000), st.floats(0.0, 3.0), st.sampled_from(["both", "prompt", "decode"])
    ),
)
TIMES = [StepTimes(1e-3, 1e-4, token_s, 1e-2, 1e-9, 1e-8) for token_s in (1e-4, 1.04e-4, 3e-4)]
WINDOWED = WorkerCapacity(Role.UNIFIED, "m", 4096, 2, 1, 1, 1, 16, 60, 0, 64, 512, window=128)


@pytest.mark.parametrize(
    "capacity", [worker("u").capacity, pytest.param(WINDOWED, marks=another_of_its_kind())], ids=["whole", "windowed"]
)
@settings(max_examples=examples(4.0))
@given(reports=st.lists(REPORT, min_size=2, max_size=12))
def test_reading_what_changed_is_reading_everything(reports: list[Any], capacity: WorkerCapacity) -> None:
    """Another view is another process of this name, of which nothing is kept."""
    kept, anew = (PlacedWork(CohortSettings(), own_order=True) for _ in range(2))
    shown, now_s = InstanceView("u", capacity), 0.0
    knows: dict[str, RequestRecord] = {}
    before: dict[int, tuple[int, int, int]] = {}
    for entries, again, price, later_s, changed, (number, tokens, due_s, part) in reports:
        now_s += later_s
        before = before | entries if again else entries
        queue = [QueuedWork(f"r{each}", left, context, decode) for each, (left, context, decode) in before.items()]
        stats = WorkerStats(total_blocks=60, free_blocks=9, queue=queue, step_times=TIMES[price], step_s=0.03)
        shown.stats = stats
        assert kept.refresh(now_s, shown, knows) and anew.refresh(now_s, InstanceView("u", capacity, stats), knows)
        begun = [
            sorted((row.request_id, row.context) for row, _ in w.reported.take_new_decodes()) for w in (kept, anew)
        ]
        assert begun[0] == begun[1]
        for name, _ in begun[0]:
            knows[name].predicted_s = None
        rank = kept.rank(now_s, known("z", 100, now_s + 1.0), 0)
        for each in (kept, anew):
            for tokens_left, until_s in ((1, 1.0), (100, 1.0), (5000, 10.0)):
                place = each.rank(now_s, known("z", tokens_left, now_s + until_s), 0)
                assert each.before(place, 0.0) == anew.before(place, 0.0)
            for alike in (False, True):
                waits = [one.blocked_s(rank, 500.0, 0.0, best_effort=alike) for one in (each, anew)]
                assert waits[0] == waits[1]
        assert (kept.memory, kept.strictest_s, kept.pace()) == (anew.memory, anew.strictest_s, anew.pace())
        assert (kept.rows, kept.context, kept.busy) == (anew.rows, anew.context, anew.busy)
        assert (kept.prompt_tokens, kept.done(now_s + 1.0, kept.pace())) == (
            anew.prompt_tokens,
            anew.done(now_s + 1.0, anew.pace()),
        )
        rows = max(3, anew.rows) + 1
        positions = min(rows * capacity.max_model_len, capacity.positions)
        assert kept.max_step_s(64, 3) >= step_seconds(kept.times, BatchShape(64, 1, 0, rows, positions))
        name = f"r{changed}"
        if knows.pop(name, None) is not None:
            kept.forget(name), anew.forget(name)
        request = known(f"r{number}", tokens, now_s + due_s)
        request.cached, request.best_effort, request.predicted_s = tokens // 3, number % 3 == 0, 1.0
        knows[f"r{number}"] = request
        for each in (kept, anew):
            each.place(now_s, request, prompt=part != "decode", decode=part != "prompt", output=3.7)
