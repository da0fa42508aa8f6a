"""vLLM's first scheduler by hand."""

from __future__ import annotations

from typing import Literal

from cohort.common.policies.baselines.batch_builder import IterationLimits
from cohort.common.policies.baselines.prefill_first import PrefillFirst
from cohort.common.sequence import Phase
from tests.common.policies.baselines.drive import cache, leave, names, rows, sequence, step


def vllm(rows: int = 4, tokens: int = 16, how: Literal["swap", "recompute"] = "swap") -> PrefillFirst:
    return PrefillFirst(IterationLimits(rows, tokens, tokens, how))


def test_an_iteration_is_prefill_or_decode() -> None:
    policy, kv = vllm(), cache(40)
    policy.add(0.0, sequence("a", 6))
    policy.add(0.0, sequence("b", 6, arrived_s=1.0))
    assert rows(step(policy, kv)) == [("a", 0, 6), ("b", 0, 6)]
    assert rows(step(policy, kv)) == [("a", 6, 1), ("b", 6, 1)]
    policy.add(0.0, sequence("c", 6, arrived_s=2.0))
    assert rows(step(policy, kv)) == [("c", 0, 6)]  # the others stall
    assert names(step(policy, kv)) == ["a", "b", "c"]


def test_prompts_are_not_cut_unless_no_iteration_could_hold_them() -> None:
    policy, kv = vllm(), cache(40)
    for at, (name, prompt) in enumerate((("a", 10), ("b", 10), ("c", 40))):
        policy.add(0.0, sequence(name, prompt, arrived_s=at))
    assert [rows(step(policy, kv)) for _ in range(5)] == [
        [("a", 0, 10)],
        [("b", 0, 10)],
        [("c", 0, 16)],
        [("c", 16, 16)],
        [("c", 32, 8)],
    ]
    assert names(step(policy, kv)) == ["a", "b", "c"]


def test_the_latest_is_swapped_out_and_no_new_sequence_comes_before_it_is_back() -> None:
    policy, kv = vllm(), cache(4, 8)
    old, young = sequence("old", 8), sequence("young", 8, arrived_s=1.0)
    policy.add(0.0, old)
    policy.add(0.0, young)
    step(policy, kv)
    plan = step(policy, kv)  # both want a third block
    assert (names(plan), young.phase) == (["old"], Phase.SWAPPED)
    policy.add(0.0, sequence("new", 2, arrived_s=2.0))
    assert names(step(policy, kv)) == ["old"]
    leave(policy, kv, old)
    plan = step(policy, kv)
    assert [(copy.direction, len(copy.device)) for copy in plan.copies] == [("in", 2)]
    assert names(plan) == ["young"]
    assert names(step(policy, kv)) == ["new"]


def test_a_newcomer_takes_the_last_block_where_no_headroom_is_asked_for() -> None:
    for headroom, started in ((True, []), (False, [("new", 0, 8)])):
        policy = PrefillFirst(IterationLimits(4, 400, 400, "swap"), headroom=headroom)
        kv = cache(100)
        policy.add(0.0, sequence("old", 390))
        step(policy, kv)  # 98 of the blocks
        policy.add(0.0, sequence("new", 8, arrived_s=1.0))
        assert rows(step(policy, kv)) == (started or [("old", 390, 1)])


def test_all_running_count_against_the_rows() -> None:
    policy, kv = vllm(rows=2), cache(40)
    for at, name in enumerate("abc"):
        policy.add(0.0, sequence(name, 2, arrived_s=at))
    assert names(step(policy, kv)) == ["a", "b"]
    assert names(step(policy, kv)) == ["a", "b"]


def test_a_newcomer_leaves_the_watermark_free() -> None:
    policy, kv = vllm(tokens=800), cache(200)
    policy.add(0.0, sequence("a", 4))
    step(policy, kv)
    policy.add(0.0, sequence("b", 198 * 4, arrived_s=1.0))  # would leave one block of 200, not two
    assert names(step(policy, kv)) == ["a"]
