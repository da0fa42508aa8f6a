"""`continues` is a promise: where it is given, and the allocator gives the slots, the next decision has these rows."""

from __future__ import annotations

from copy import deepcopy
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cohort.common.policies import compose
from cohort.common.policies.interface import IterationPlan, IterationScheduler, News, Ran
from cohort.common.sequence import Row, Sequence
from tests.cluster.cases import PRESETS
from tests.common.machines.clusters import small
from tests.common.policies.baselines.drive import GEOMETRY, rows, run, sequence
from tests.examples import examples

BY_FORECAST = {"cohort"}
"""Presets that promise what they would have done an iteration before while prompts wait: the times that it follows from
are forecast."""


def _follows(plan: IterationPlan, policy: IterationScheduler) -> tuple[IterationPlan, int] | None:
    """The plan that the worker machine would propose, and how many sequences end with this one."""
    on, begun, leaving = list[Row](), list[Row](), 0
    for row in plan.rows:
        sequence, end = row.sequence, row.start + row.count
        if end >= sequence.max_positions:
            leaving += 1
        elif end == sequence.known:
            on.append(Row(sequence, end, 1))
        elif row.count == 1 or plan.padded_to:
            return None
        else:
            (on if sequence.known - end == 1 else begun).append(Row(sequence, end, sequence.known - end))
    if begun:
        counts = policy.chunks_ahead(begun, len(on))
        if counts is None:
            return None
        on += [Row(row.sequence, row.start, count) for row, count in zip(begun, counts, strict=True)]
    return (IterationPlan(on), leaving) if on else None


def _promises(preset: str, loads: list[tuple[int, int, int]], blocks: int, seed: int) -> tuple[int, int]:
    """Runs to the end of all loads; how many promises were given, and kept, and of how many with prompts that go on."""
    config = small(preset, {"engine": {"max_rows": 4}})
    policy, random = compose.iteration(config), Random(seed)
    kv = compose.allocation(config, GEOMETRY, blocks, 20)
    coming = [
        (
            at,
            sequence(
                f"r{i}",
                prompt,
                arrived_s=0.01 * at,
                max_tokens=output,
                predicted=output + random.choice([0, 3]),
                traffic_class="be" if seed % 2 and i % 3 == 2 else "rt",
            ),
        )
        for i, (at, prompt, output) in enumerate(loads)
    ]
    alive: list[Sequence] = []
    ran: Ran | None = None
    promised: IterationPlan | None = None
    ahead = kv
    kept = chunks = 0
    waits = False
    for iteration in range(600):
        now_s = 0.01 * iteration
        came = [one for at, one in coming if at == iteration]
        fresh, late = came[::2], came[1::2]
        for one in fresh:
            policy.add(now_s, one)
        alive += came
        if not alive and iteration > 20:
            return kept, chunks
        plan = policy.decide(now_s, kv, News(ran))
        plan.copies = kv.take_copies()
        if promised is not None and not fresh and (not waits or preset not in BY_FORECAST):
            assert (sorted(rows(plan)), plan.preempted, plan.copies) == (sorted(rows(promised)), [], [])
            for row in plan.rows:
                assert len(kv.blocks(row.sequence.key)) == len(ahead.blocks(row.sequence.key))
            kept += 1
            chunks += any(row.count > 1 for row in plan.rows)
        promised, waits = None, any(one.computed < one.known - 1 for one in alive)
        for one in late:  # while the iteration runs, and before the next is planned
            policy.add(now_s, one)
        following = _follows(plan, policy) if plan.rows and not plan.copies else None
        promises = following is not None and policy.continues(following[0], kv, following[1], 0)
        if promises and following is not None:
            # The decision that follows finds the blocks as they are without.
            ahead = deepcopy(kv, {id(one): one for one in alive})
            promised = following[0] if ahead.extend_ahead(following[0].rows) is None else None
            ahead.check()
        run(plan, kv)
        for row in plan.rows:
            row.sequence.last_token_s = now_s + 0.01
        ran = Ran(plan, now_s, (0.01,)) if plan.rows or plan.copies else None
        for one in [s for s in alive if s.output_tokens >= s.request.sampling.max_tokens]:
            policy.remove(now_s, one)
            kv.release(one.key)
            alive.remove(one)
    return kept, chunks


@pytest.mark.parametrize("preset", PRESETS)
@settings(max_examples=examples(0.08))
@given(
    loads=st.lists(st.tuples(st.integers(0, 20), st.integers(1, 44), st.integers(1, 12)), min_size=1, max_size=6),
    blocks=st.integers(11, 40),
    seed=st.integers(0, 9),
)
def test_the_next_decision_has_these_rows(
    preset: str, loads: list[tuple[int, int, int]], blocks: int, seed: int
) -> None:
    _promises(preset, loads, blocks, seed)


@pytest.mark.parametrize("preset", PRESETS)
def test_schedulers_promise_where_nothing_is_left_to_choose(preset: str) -> None:
    assert _promises(preset, [(0, 9, 12), (0, 5, 9), (1, 7, 12)], 40, 0)[0] > 5


BY_TIMES = {"bros", "cohort", "dynaserve", "ecoserve", "ecoserve-forecast"}
"""Presets whose chunks follow from times or deadlines, which are not known before the iteration has ended."""


@pytest.mark.parametrize("preset", PRESETS)
def test_chunks_are_promised_where_counts_decide_them(preset: str) -> None:
    _, chunks = _promises(preset, [(0, 90, 3), (8, 85, 3)], 40, 0)
    assert (chunks > 0) == (preset not in {*BY_TIMES, "baseline-uellm"}), "the last pads prompts to rectangles"
