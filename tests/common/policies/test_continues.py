"""`continues` is a promise: where a scheduler gives it, the next decision has exactly those rows."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cohort.common.policies import compose
from cohort.common.policies.interface import IterationPlan, News, Ran, Row
from cohort.common.policies.kv_interface import KvAllocator
from cohort.common.sequence import Sequence
from tests.cluster.cases import PRESETS
from tests.common.machines.clusters import small
from tests.common.policies.baselines.drive import GEOMETRY, rows, run, sequence
from tests.examples import examples

NEVER = {"bros", "baseline-multires", "baseline-uellm"}
"""Presets whose schedulers choose anew in every iteration; found below, so that the list stays true."""


def _follows(plan: IterationPlan) -> tuple[IterationPlan, int] | None:
    """The plan that the worker machine would propose, and how many sequences end with this one."""
    if any(row.count != 1 or row.start < row.sequence.request.prompt_tokens for row in plan.rows):
        return None
    on = [row for row in plan.rows if row.sequence.output_tokens + 1 < row.sequence.request.sampling.max_tokens]
    if not on:
        return None
    return IterationPlan([Row(row.sequence, row.start + 1, 1) for row in on]), len(plan.rows) - len(on)


def _has_blocks(plan: IterationPlan, kv: KvAllocator) -> bool:
    lacking = sum(row.start >= len(kv.blocks(row.sequence.key)) * GEOMETRY.block_size for row in plan.rows)
    return lacking <= (kv.free_blocks + kv.cached_blocks if kv.grows_by_block else 0)


def _promises(preset: str, loads: list[tuple[int, int, int]], blocks: int, seed: int) -> int:
    """Runs to the end of all loads; how many promises were given, and kept."""
    config = small(preset, {"engine": {"max_rows": 4}})
    policy, random = compose.iteration(config), Random(seed)
    kv = compose.allocation(config, GEOMETRY, blocks, 20)
    coming = [
        (
            at,
            sequence(f"r{i}", prompt, arrived_s=0.01 * at, max_tokens=output, predicted=output + random.choice([0, 3])),
        )
        for i, (at, prompt, output) in enumerate(loads)
    ]
    alive: list[Sequence] = []
    ran: Ran | None = None
    promised: list[tuple[str, int, int]] | None = None
    kept = 0
    for iteration in range(600):
        now_s = 0.01 * iteration
        fresh = [one for at, one in coming if at == iteration]
        for one in fresh:
            policy.add(now_s, one)
        alive += fresh
        if not alive and iteration > 20:
            return kept
        plan = policy.decide(now_s, kv, News(ran))
        plan.copies = kv.take_copies()
        if promised is not None and not fresh:
            assert (sorted(rows(plan)), plan.preempted, plan.copies) == (sorted(promised), [], [])
            kept += 1
        promised = None
        following = _follows(plan) if plan.rows and not plan.copies else None
        promises = following is not None and policy.continues(following[0], kv, following[1], 0)
        if promises and following is not None and _has_blocks(following[0], kv):
            promised = rows(following[0])
        run(plan, kv)
        ran = Ran(plan, now_s, (0.01,)) if plan.rows or plan.copies else None
        for one in [s for s in alive if s.output_tokens >= s.request.sampling.max_tokens]:
            policy.remove(now_s, one)
            kv.release(one.key)
            alive.remove(one)
    return kept


@pytest.mark.parametrize("preset", PRESETS)
@settings(max_examples=examples(0.08))
@given(
    loads=st.lists(st.tuples(st.integers(0, 20), st.integers(1, 20), st.integers(1, 12)), min_size=1, max_size=6),
    blocks=st.integers(11, 40),
    seed=st.integers(0, 9),
)
def test_the_next_decision_has_these_rows(
    preset: str, loads: list[tuple[int, int, int]], blocks: int, seed: int
) -> None:
    _promises(preset, loads, blocks, seed)


@pytest.mark.parametrize("preset", PRESETS)
def test_schedulers_promise_where_nothing_is_left_to_choose(preset: str) -> None:
    kept = _promises(preset, [(0, 9, 12), (0, 5, 9), (1, 7, 12)], 40, 0)
    assert (kept > 5) == (preset not in NEVER)
