"""The order of prompts in schedulers that otherwise take them as they came: who goes first; nothing starves."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cohort.common.config import load_config
from cohort.common.policies import compose
from cohort.common.policies.baselines.batch_builder import IterationLimits
from cohort.common.policies.baselines.continuous_batching import ContinuousBatching
from cohort.common.policies.baselines.paged_allocation import PagedAllocator
from cohort.common.policies.cohort.ordered_prompts import OrderedPrompts
from cohort.common.policies.cohort.prompt_order import PromptOrder
from cohort.common.policies.dynaserve.slo_batching import SloBatching
from cohort.common.policies.interface import IterationPlan, IterationScheduler, Ran
from cohort.common.policies.settings import DynaServeSettings
from cohort.common.sequence import Row, Sequence
from cohort.common.types import Attempt, KvGeometry, Request, SamplingParams, Slo
from tests.common.policies.baselines.drive import decide, ran, rows, run

GEOMETRY = KvGeometry(1, 1, 1, 1, 4)


def sequence(name: str, prompt: int, *, arrived_s: float = 0.0, ttft_s: float = 5.0, tokens: int = 4) -> Sequence:
    prompt_tokens = list(range(prompt))
    params = SamplingParams(max_tokens=tokens)
    request = Request(Attempt(name, 1), "gateway", prompt_tokens, prompt, params, 0.0, slo=Slo(ttft_s, 0.1))
    return Sequence(request, list(prompt_tokens), None, 0, arrived_s)


def scheduler(kind: str, *, patience_s: float = 60.0) -> IterationScheduler:
    prompts = OrderedPrompts(PromptOrder(patience_s=patience_s))
    if kind == "slo_batching":
        return SloBatching(DynaServeSettings(), IterationLimits(4, 16, 16, "recompute"), cold_chunk=16, prompts=prompts)
    return ContinuousBatching(max_rows=4, max_step_tokens=16, prefill_chunk=16, preemption="recompute", prompts=prompts)


BOTH = pytest.mark.parametrize("kind", ["continuous_batching", "slo_batching"])


@BOTH
def test_a_short_prompt_overtakes_a_long_one_that_has_begun(kind: str) -> None:
    policy, kv = scheduler(kind), PagedAllocator(GEOMETRY, 64, 0, prefix_caching=False)
    policy.add(0.0, sequence("long", 60))
    run(decide(policy, kv, 0.0), kv)
    policy.add(0.1, sequence("short", 6, arrived_s=0.1))
    assert [(name, count) for name, _, count in rows(decide(policy, kv, 0.1))] == [("short", 6), ("long", 10)]


@BOTH
def test_who_is_late_waits_for_who_is_not_until_its_patience_ends(kind: str) -> None:
    for patience_s, first in ((60.0, "on time"), (9.0, "late")):
        policy, kv = scheduler(kind, patience_s=patience_s), PagedAllocator(GEOMETRY, 64, 0, prefix_caching=False)
        policy.add(0.0, sequence("late", 20, ttft_s=1.0))
        policy.add(9.9, sequence("on time", 30, arrived_s=9.9))
        assert rows(decide(policy, kv, 10.0))[0][0] == first


def test_the_price_of_a_token_is_learned_from_iterations_that_are_mostly_prompt() -> None:
    prompts = OrderedPrompts(PromptOrder(caution=1.0))
    slow, fast = sequence("slow", 1000, ttft_s=1.2), sequence("fast", 2000, ttft_s=5.0)
    assert prompts.sort(0.0, [fast, slow]) == [slow, fast]
    prompts.learn(Ran(IterationPlan(rows=[Row(fast, 0, 64)]), 1.0, (1.0,)))  # too small to say anything
    assert prompts.sort(0.0, [fast, slow]) == [slow, fast]
    prompts.learn(Ran(IterationPlan(rows=[Row(fast, 0, 500)]), 1.0, (1.0,)))  # 2 ms each: `slow` would take 2 s
    assert prompts.sort(0.0, [slow, fast]) == [fast, slow]


@BOTH
@given(
    loads=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 8), st.sampled_from([0.5, 3.0, 50.0])), max_size=15),
    blocks=st.integers(11, 40),
)
def test_everything_ends(kind: str, loads: list[tuple[int, int, float]], blocks: int) -> None:
    policy, kv = scheduler(kind, patience_s=20.0), PagedAllocator(GEOMETRY, blocks, 0)
    alive = [
        sequence(f"s{i}", prompt, arrived_s=i / 10, ttft_s=ttft_s, tokens=tokens)
        for i, (prompt, tokens, ttft_s) in enumerate(loads)
    ]
    for one in alive:
        policy.add(0.0, one)
    for step in range(3000):
        if not alive:
            break
        plan = decide(policy, kv, float(step))
        assert plan.rows, "work is left but nothing runs"
        assert plan.tokens <= 16
        run(plan, kv)
        ran(policy, plan, float(step), 0.05)
        kv.check()
        for one in [s for s in alive if s.output_tokens >= s.request.sampling.max_tokens]:
            policy.remove(float(step), one)
            kv.release(one.key)
            alive.remove(one)
    assert not alive, "something starved"


def test_the_setting_makes_the_order_of_both_and_of_no_other() -> None:
    for preset in ("unified", "dynaserve"):
        assert compose.iteration(load_config(preset=preset))._prompts is None  # type: ignore[attr-defined]
        config = load_config(preset=preset, overrides={"experiment": {"cohort": {"orders_others": True}}})
        assert isinstance(compose.iteration(config)._prompts, OrderedPrompts)  # type: ignore[attr-defined]
