"""One batch per iteration, as wide as its longest row, never wider than an iteration."""

from __future__ import annotations

from cohort.common.policies.baselines.paged_allocation import PagedAllocator
from cohort.common.policies.bucketserve.padded_prefill import PaddedPrefill
from cohort.common.sequence import Phase, Sequence
from cohort.common.types import Attempt, KvGeometry, Request, SamplingParams
from tests.common.policies.baselines.drive import decide


def scheduler(step_tokens: int = 64, chunk: int = 32) -> PaddedPrefill:
    return PaddedPrefill(max_rows=16, max_step_tokens=step_tokens, prefill_chunk=chunk, preemption="recompute")


def cache(blocks: int = 100) -> PagedAllocator:
    return PagedAllocator(KvGeometry(1, 1, 1, 1, 4), blocks, 0, prefix_caching=False)


def sequence(name: str, prompt: int, batch_id: int, arrived_s: float = 0.0) -> Sequence:
    request = Request(Attempt(name, 1), "g", [0] * prompt, prompt, SamplingParams(max_tokens=20), 0.0)
    return Sequence(request, [0] * prompt, None, batch_id, arrived_s)


def run(policy: PaddedPrefill, kv: PagedAllocator) -> tuple[list[tuple[str, int]], int]:
    """The next iteration's rows, and what they are padded to; computes it."""
    plan = decide(policy, kv, 0.0)
    for row in plan.rows:
        row.sequence.computed = row.start + row.count
        if row.sequence.computed == row.sequence.known:
            row.sequence.tokens.append(1)
    return [(row.sequence.request_id, row.count) for row in plan.rows], plan.padded_to


def test_batches_come_one_after_the_other_with_decode_rows_beside_them() -> None:
    policy, kv = scheduler(), cache()
    for each in (sequence("a", 10, 1), sequence("b", 6, 1), sequence("c", 9, 2, arrived_s=1.0)):
        policy.add(0.0, each)
    assert run(policy, kv) == ([("a", 10), ("b", 6)], 10)
    assert run(policy, kv) == ([("c", 9), ("a", 1), ("b", 1)], 9)
    assert run(policy, kv) == ([("a", 1), ("b", 1), ("c", 1)], 0)
    assert policy.metrics()["padding_tokens_total"] == 4.0


def test_a_rectangle_is_never_wider_than_an_iteration() -> None:
    policy, kv = scheduler(step_tokens=40), cache()
    for each in (sequence("a", 4, 1), sequence("b", 4, 1), sequence("c", 20, 1)):
        policy.add(0.0, each)
    # Three rows of 20 would be 60 tokens; a and b go first, c afterwards on its own
    assert run(policy, kv) == ([("a", 4), ("b", 4)], 4)
    assert run(policy, kv) == ([("c", 20), ("a", 1), ("b", 1)], 20)


def test_long_prompts_go_in_chunks() -> None:
    policy, kv = scheduler(), cache()
    policy.add(0.0, sequence("a", 50, 1))
    policy.add(0.0, sequence("b", 30, 1))
    assert run(policy, kv) == ([("a", 32), ("b", 30)], 32)
    assert run(policy, kv) == ([("a", 18), ("b", 1)], 18)


def test_no_block_for_padding_is_no_reason_to_wait() -> None:
    policy, kv = scheduler(), cache(blocks=4)
    a, b = sequence("a", 12, 1), sequence("b", 2, 1)
    for each in (a, b):
        policy.add(0.0, each)
    rows, width = run(policy, kv)
    assert rows == [("a", 12), ("b", 2)]
    assert width == 12
    assert len(kv.blocks(b.key)) == 1
    assert a.phase is Phase.RUNNING
    kv.check()
