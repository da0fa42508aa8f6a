"""MultiRes: the nearest demand vector by hand, then against a direct search."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from cohort.common.policies.baselines.batch_builder import IterationLimits
from cohort.common.policies.baselines.multi_resource import MultiResource
from cohort.common.policies.baselines.reserved_allocation import predicted_positions
from tests.common.policies.baselines.drive import GEOMETRY, cache, names, sequence, step

RULE = predicted_positions(0.0)


def policy(rows: int = 8, tokens: int = 20) -> MultiResource:
    return MultiResource(IterationLimits(rows, tokens, tokens, "recompute"), reservation=RULE)


def test_the_nearest_demand_joins_first() -> None:
    """20 tokens and 20 blocks are left: the vector (1, 1). Demands (tokens/20, blocks/20):
    a: 4 tokens, 4+5-1 = 8 positions, 2 blocks: (0.2, 0.1), distance 1.204
    b: 16 tokens, 16+1-1 = 16 positions, 4 blocks: (0.8, 0.2), distance 0.825
    c: 8 tokens, 8+41-1 = 48 positions, 12 blocks: (0.4, 0.6), distance 0.721 → first.
    Left (0.6, 0.4): a 0.5; b 0.283 → second. It gets the 12 tokens that are left; a waits."""
    multi, kv = policy(), cache(20, reservation=RULE)
    for name, prompt, predicted in (("a", 4, 5), ("b", 16, 1), ("c", 8, 41)):
        multi.add(0.0, sequence(name, prompt, predicted=predicted, max_tokens=100))
    plan = step(multi, kv)
    assert [(row.sequence.request_id, row.count) for row in plan.rows] == [("c", 8), ("b", 12)]


def test_a_request_that_does_not_fit_is_passed_over() -> None:
    multi, kv = policy(), cache(5, reservation=RULE)
    multi.add(0.0, sequence("large", 18, predicted=10, max_tokens=100))  # seven blocks
    multi.add(0.0, sequence("small", 3, predicted=2, arrived_s=1.0))
    assert names(step(multi, kv)) == ["small"]


def test_running_decodes_come_before_prompts() -> None:
    multi, kv = policy(rows=8, tokens=4), cache(40, reservation=RULE)
    multi.add(0.0, sequence("prompt", 9))
    step(multi, kv)
    multi.add(0.0, sequence("answer", 1, arrived_s=1.0))
    multi.add(0.0, sequence("more", 1, arrived_s=2.0))
    assert names(step(multi, kv)) == ["prompt"]
    step(multi, kv)  # the prompt's last token, beside which both others are let in
    multi.add(0.0, sequence("later", 9, arrived_s=3.0))
    plan = step(multi, kv)
    assert {row.sequence.request_id: row.count for row in plan.rows} == {
        "prompt": 1,
        "answer": 1,
        "more": 1,
        "later": 1,
    }


@given(
    demands=st.lists(st.tuples(st.integers(1, 40), st.floats(1, 30)), min_size=1, max_size=10),
    blocks=st.integers(1, 30),
)
def test_the_first_choice_is_the_nearest_of_all_that_fit(demands: list[tuple[int, float]], blocks: int) -> None:
    multi, kv = policy(rows=1), cache(blocks, reservation=RULE)
    offered = [
        sequence(f"s{i}", prompt, predicted=predicted, arrived_s=i, max_tokens=50)
        for i, (prompt, predicted) in enumerate(demands)
    ]
    for one in offered:
        multi.add(0.0, one)
    distance = {
        one.request_id: math.hypot(1 - min(1.0, one.uncomputed / 20), 1 - GEOMETRY.blocks_for(RULE(one)) / blocks)
        for one in offered
        if GEOMETRY.blocks_for(RULE(one)) <= blocks
    }
    chosen = names(step(multi, kv))
    assert len(chosen) == min(1, len(distance))
    if distance:
        assert distance[chosen[0]] == min(distance.values())
