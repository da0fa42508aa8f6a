"""What every scheduler promises under any load: bounds, one row per sequence, blocks for each row, an end for all.

And for those that foresee their decisions: what they foresee is what they decide.
"""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cohort.common.config import Config, load_config
from cohort.common.policies import baselines, compose
from cohort.common.policies.kv_interface import KvAllocator
from cohort.common.policies.settings import placed
from cohort.common.sequence import Phase, Sequence
from cohort.common.types import TrafficClass
from tests.common.policies.baselines.drive import GEOMETRY, decide, leave, ran, rows, run, sequence
from tests.examples import examples

SCHEDULERS = [name for name, policy in compose.ITERATIONS.items() if policy.build.__module__ == baselines.__name__]
Load = tuple[int, int, float, int, int]

LOADS = st.lists(
    st.tuples(
        st.integers(1, 30), st.integers(1, 12), st.sampled_from([0.3, 1.0, 3.0]), st.integers(0, 1), st.integers(0, 20)
    ),
    min_size=1,
    max_size=16,
)
"""(prompt, output, how wrong the prediction is, class, iteration in which it comes)"""


def configured(
    name: str, allocation: str, *, max_rows: int, budget: int, swap: bool, caching: bool, padded: bool
) -> Config:
    return load_config(
        overrides=placed(
            {
                "policies": {"iteration": name, "allocation": allocation},
                "engine": {
                    "max_rows": max_rows,
                    "max_step_tokens": budget,
                    "prefill_chunk": max(1, budget // 2),
                    "preemption": "swap" if swap else "recompute",
                },
                "baselines": {"batch_size": 3, "queue_starvation_s": 5.0, "padded": padded},
                "kv": {"prefix_caching": caching},
            }
        )
    )


def arrivals(loads: list[Load]) -> list[tuple[int, Sequence]]:
    classes: tuple[TrafficClass, TrafficClass] = ("rt", "be")
    return [
        (
            at,
            sequence(
                f"s{i}",
                prompt,
                arrived_s=at,
                max_tokens=output,
                predicted=max(1.0, output * wrong),
                traffic_class=classes[kind],
            ),
        )
        for i, (prompt, output, wrong, kind, at) in enumerate(loads)
    ]


def ended(alive: list[Sequence]) -> list[Sequence]:
    return [s for s in alive if s.output_tokens >= s.request.sampling.max_tokens]


@pytest.mark.parametrize("name", SCHEDULERS)
@settings(max_examples=examples(0.5))
@given(
    loads=LOADS,
    allocation=st.sampled_from(["paged", "max", "predicted"]),
    blocks=st.integers(11, 40),
    host=st.sampled_from([0, 5, 40]),
    max_rows=st.integers(1, 6),
    budget=st.integers(1, 40),
    swap=st.booleans(),
    caching=st.booleans(),
    padded=st.booleans(),
)
@example(  # a prompt of one token beside padded ones that have no tokens to spare
    loads=[*[(1, 1, 0.3, 0, 0)] * 2, (1, 1, 3.0, 0, 2), (1, 2, 0.3, 0, 0), (6, 1, 3.0, 0, 1), (14, 1, 3.0, 0, 0)],
    allocation="paged",
    blocks=11,
    host=0,
    max_rows=3,
    budget=12,
    swap=False,
    caching=False,
    padded=True,
)
def test_everything_ends_within_bounds(
    name: str,
    loads: list[Load],
    allocation: str,
    blocks: int,
    host: int,
    max_rows: int,
    budget: int,
    swap: bool,
    caching: bool,
    padded: bool,
) -> None:
    config = configured(name, allocation, max_rows=max_rows, budget=budget, swap=swap, caching=caching, padded=padded)
    policy = compose.iteration(config)
    kv = compose.allocation(config, GEOMETRY, blocks, host)
    coming, alive = arrivals(loads), []
    idle = 0
    for iteration in range(4000):
        now_s = float(iteration)
        for one in [s for at, s in coming if at == iteration]:
            policy.add(now_s, one)
            alive.append(one)
        if not alive and iteration > 20:
            break
        plan = decide(policy, kv, now_s)
        assert len(plan.rows) <= max_rows
        widths = [max(row.count, plan.padded_to) if row.count > 1 else 1 for row in plan.rows]
        assert sum(widths) <= budget
        assert len({row.sequence.key for row in plan.rows}) == len(plan.rows)
        assert [row.count > 1 for row in plan.rows] == sorted((row.count > 1 for row in plan.rows), reverse=True)
        preempted = {p.sequence.key for p in plan.preempted}
        for row in plan.rows:
            assert row.sequence.phase is Phase.RUNNING and row.sequence.key not in preempted
            assert row.start == row.sequence.computed
            assert len(kv.blocks(row.sequence.key)) >= GEOMETRY.blocks_for(row.start + row.count)
        # A sequence may have lost its place for blocks alone; two iterations without rows are a standstill.
        idle = 0 if plan.rows or not alive else idle + 1
        assert idle < 2, "work is left but nothing runs"
        ran(policy, plan, now_s, 0.5)
        run(plan, kv)
        kv.check()
        for one in ended(alive):
            leave(policy, kv, one)
            alive.remove(one)
    assert not alive, "something starved"
    assert kv.owners() == {}


@pytest.mark.parametrize("name", ["orca", "vllm", "chunked_prefill"])
@settings(max_examples=examples(0.5))
@given(
    loads=LOADS,
    allocation=st.sampled_from(["paged", "max", "predicted"]),
    blocks=st.integers(11, 40),
    max_rows=st.integers(1, 6),
    budget=st.integers(1, 40),
    caching=st.booleans(),
)
def test_foreseen_iterations_are_decided(
    name: str, loads: list[Load], allocation: str, blocks: int, max_rows: int, budget: int, caching: bool
) -> None:
    config = configured(name, allocation, max_rows=max_rows, budget=budget, swap=True, caching=caching, padded=False)
    policy = compose.iteration(config)
    kv = compose.allocation(config, GEOMETRY, blocks, 20)
    coming, alive = arrivals(loads), []
    foreseen: list[tuple[str, int, int]] | None = None
    for iteration in range(4000):
        fresh = [s for at, s in coming if at == iteration]
        for one in fresh:
            policy.add(float(iteration), one)
        alive += fresh
        if not alive and iteration > 20:
            return
        enough = _grows_without_preemption(alive, kv)
        plan = decide(policy, kv, float(iteration))
        if foreseen is not None and not fresh and enough:
            # As a set: a row that has just come in may change its place among the others, which changes no decision.
            assert (sorted(rows(plan)), plan.preempted, plan.copies) == (sorted(foreseen), [], [])
        repeats = bool(plan.rows) and policy.steady_for(plan, kv) > 0
        ran(policy, plan, float(iteration), 0.5)
        run(plan, kv)
        gone = ended(alive)
        for one in gone:
            leave(policy, kv, one)
            alive.remove(one)
        foreseen = [(name, start + 1, 1) for name, start, _ in rows(plan)] if repeats and not gone else None


def _grows_without_preemption(alive: list[Sequence], kv: KvAllocator) -> bool:
    """The condition under which a prediction counts: every running sequence finds a block if it needs one."""
    wanted = sum(
        max(0, GEOMETRY.blocks_for(s.computed + 1) - len(kv.blocks(s.key))) for s in alive if s.phase is Phase.RUNNING
    )
    return wanted <= kv.free_blocks + kv.cached_blocks
