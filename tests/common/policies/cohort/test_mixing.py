"""Where mixing has a price: the size that pays against brute force, what promises can spare, and how prompts gather."""

from __future__ import annotations

from math import inf
from random import Random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cohort.common.policies.baselines.batch_builder import IterationLimits
from cohort.common.policies.cohort.cohort_batching import CohortBatching
from cohort.common.policies.cohort.mixing import best_chunk
from cohort.common.policies.settings import CohortSettings
from cohort.common.policies.step_times.learned_times import plan_shape
from cohort.common.policies.step_times.step_cost import BatchShape, step_seconds
from cohort.common.sequence import Sequence
from cohort.common.types import Slo
from tests.common.policies.baselines.drive import cache, decide, names, step
from tests.common.policies.cohort.one_by_one import table
from tests.common.policies.cohort.promised import promised
from tests.common.policies.cohort.test_cohort_batching import decoding, scheduler
from tests.common.policies.step_times.test_step_times import GPU, random_batch


@given(share=st.floats(0.0, 1.0), rows=st.integers(1, 100), context=st.integers(1, 3000), most=st.integers(1, 2048))
def test_the_chunk_that_pays_is_about_the_best_of_all(share: float, rows: int, context: int, most: int) -> None:
    times = msgspec.structs.replace(GPU, mixed_share=share)
    decodes = BatchShape(0, 0, 0, rows, rows * context)

    def added_s(tokens: int) -> float:
        return (step_seconds(times, decodes.with_prefill(0, tokens)) - step_seconds(times, decodes)) / tokens

    chunk = best_chunk(times, decodes, 0, most)
    assert 1 <= chunk <= most
    if most >= 16:
        assert added_s(chunk) <= 1.05 * min(map(added_s, range(16, most + 1, 8)))


def test_the_dearer_mixing_is_the_larger_the_chunk_that_pays() -> None:
    decodes = BatchShape(0, 0, 0, 20, 20 * 500)
    chunks = [
        best_chunk(msgspec.structs.replace(GPU, mixed_share=share), decodes, 0, 2048) for share in (0.0, 0.1, 0.2, 0.5)
    ]
    assert chunks == sorted(chunks)
    assert chunks[0] <= 48 and chunks[1] >= 64


def row(name: str, *, tokens: int, first_s: float | None, tpot_s: float = 0.03, predicted: float = 100.0) -> Sequence:
    """It has its first token since `first_s`, and so many in all."""
    made = promised(name, 20, tpot_s=tpot_s)
    made.tokens += [1] * tokens
    made.prefill_done_s, made.predicted = first_s, predicted
    return made


def spare_s(now_s: float, rows: list[Sequence], decodes_s: float, *, headroom: float) -> float:
    running = table(rows, now_s)
    return running.spare_s(now_s, running.ranked(), decodes_s, headroom=headroom)


def test_what_a_request_can_spare_is_what_its_tokens_came_early() -> None:
    # The first at 0.5 s, ten more until 0.75 s where 0.8 s would have done.
    early = row("early", tokens=11, first_s=0.5)
    assert spare_s(0.75, [early], 0.025, headroom=0.0) == pytest.approx(0.05 + 0.03)
    assert spare_s(0.75, [early], 0.025, headroom=0.1) == pytest.approx(0.05 + 0.027)
    fresh = row("fresh", tokens=1, first_s=0.75)  # the one that has just begun rules
    assert spare_s(0.75, [early, fresh], 0.025, headroom=0.0) == pytest.approx(0.03)
    # Its first token was another worker's: the eleventh was due ten TPOTs after its TTFT of a second.
    arrived = row("arrived", tokens=11, first_s=None)
    assert spare_s(1.28, [arrived], 0.025, headroom=0.0) == pytest.approx(0.02 + 0.03)


def test_promises_that_are_lost_or_were_never_given_have_no_say() -> None:
    behind = row("behind", tokens=11, first_s=0.5, predicted=13.0)  # two tokens to come win 10 ms, it lacks 200
    recovers = row("recovers", tokens=11, first_s=0.5, predicted=100.0)
    late = row("late", tokens=2, first_s=1.5)
    best_effort = promised("be", 20, ttft_s=0.0, traffic_class="be")
    assert spare_s(1.0, [behind, late, best_effort], 0.025, headroom=0.0) == inf
    assert spare_s(1.0, [behind, recovers], 0.025, headroom=0.0) == pytest.approx(0.8 - 1.0 + 0.03)
    assert spare_s(1.0, [recovers], 0.031, headroom=0.0) == inf  # decodes alone take longer than it may
    assert spare_s(0.6, [row("on time", tokens=6, first_s=0.5)], 0.031, headroom=0.0) == inf


def test_an_iteration_stretches_by_a_tenth_of_a_tpot_and_shrinks_by_a_half_at_most() -> None:
    def stretched(now_s: float, *rows: Sequence, headroom: float = 0.0) -> float:
        running = table(rows, now_s)
        return running.stretched_s(now_s, running.ranked(), 0.01, headroom=headroom)

    early, behind = row("early", tokens=11, first_s=0.5), row("behind", tokens=11, first_s=0.44)
    assert stretched(0.75, early) == pytest.approx(1.1 * 0.03)
    assert stretched(0.799, early) == pytest.approx(0.031)
    assert stretched(0.8, early, headroom=0.1) == pytest.approx(0.027), "once, as a reserve"
    assert stretched(0.75, behind) == pytest.approx(0.02)
    assert stretched(0.78, early, behind) == pytest.approx(0.015)
    arrived = row("arrived", tokens=11, first_s=None)
    assert stretched(1.0, arrived) == pytest.approx(0.03), "when its first token came is not known"
    assert stretched(1.6, row("late", tokens=2, first_s=1.5)) == inf


def test_a_quarter_of_what_is_guessed_from_lengths_may_fall_behind_unless_prompts_are_late() -> None:
    guessed = []
    for number in range(1, 10):
        made = promised(f"g{number}", 8)
        made.request = msgspec.structs.replace(made.request, slo=Slo(ttft_s=1.0, deadline_s=1.0 + number))
        made.predicted = 100.0
        guessed.append(made)

    def strictest_s(rows: list[Sequence], *, late: bool) -> float:
        running = table(rows)
        return running.strictest_s(running.ranked(), late=late)

    assert strictest_s(guessed, late=False) == 0.03
    assert strictest_s(guessed, late=True) == 0.01
    named = promised("named", 8, tpot_s=0.02)
    assert strictest_s([*guessed, named], late=False) == 0.02, "a named TPOT is no guess"
    assert strictest_s([*guessed, named], late=True) == 0.01
    assert strictest_s([], late=False) == inf


def dear_scheduler(share: float) -> CohortBatching:
    limits = IterationLimits(64, 2048, 2048, "recompute")
    policy = CohortBatching(CohortSettings(), limits, cold_chunk=512)
    times, random = msgspec.structs.replace(GPU, mixed_share=share), Random(5)
    for _ in range(1500):
        shape = random_batch(random)
        policy.table.record(shape, step_seconds(times, shape))
    return policy


@pytest.mark.parametrize("share", [0.15, 0.3])
def test_prompts_gather_and_the_mean_tpot_of_those_that_decode_is_kept(share: float) -> None:
    policy, kv = dear_scheduler(share), cache(4000)
    times = msgspec.structs.replace(GPU, mixed_share=share)
    rows = [decoding(policy, kv, promised(f"d{index}", 200, tpot_s=0.031, max_tokens=400)) for index in range(8)]
    for made in rows:
        made.prefill_done_s, made.predicted = 0.0, 400.0
    policy.add(0.0, promised("p", 900, ttft_s=9.0))
    now_s, sizes = 0.0, []
    for _ in range(60):
        plan = step(policy, kv, now_s)
        now_s += step_seconds(times, plan_shape(plan))
        sizes += [each.count for each in plan.rows if each.count > 1]
        assert now_s <= 0.031 * (rows[0].output_tokens - 1) + 1e-3
    assert sum(sizes) >= 900  # the prompt was computed
    assert all(size >= 48 for size in sizes[:-1])  # and never a few tokens at the price of an iteration


def test_where_nothing_is_paid_for_mixing_every_iteration_holds_prompt_tokens() -> None:
    policy, kv = dear_scheduler(0.0), cache(4000)
    decoding(policy, kv, promised("d", 200, tpot_s=0.001))
    policy.add(0.0, promised("p", 900, ttft_s=9.0))
    assert [row.count for row in decide(policy, kv, 0.0).rows] == [16, 1]


def test_prompts_go_on_where_no_promise_is_left_to_break() -> None:
    policy, kv = dear_scheduler(0.3), cache(4000)
    made = decoding(policy, kv, promised("d", 200, tpot_s=0.01))  # less than a decode takes alone
    made.prefill_done_s = 0.49
    policy.add(0.0, promised("p", 900, ttft_s=9.0))
    plan = decide(policy, kv, 0.5)
    assert names(plan) == ["p", "d"] and plan.rows[0].count >= 48


def test_a_cold_scheduler_mixes() -> None:
    policy, kv = scheduler(learned=False), cache(400)
    decoding(policy, kv, promised("d", 40, tpot_s=0.01))
    policy.add(0.0, promised("p", 100, ttft_s=9.0))
    assert names(decide(policy, kv, 0.0)) == ["p", "d"]
