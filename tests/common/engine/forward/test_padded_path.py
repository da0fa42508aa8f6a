"""Padded batches compute more and answer the same: scheduler, batch builder and a real forward together."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random

import numpy as np

from cohort.common.engine.runner.model_runner import ModelRunner
from cohort.common.engine.step.batch_builder import BatchBuilder
from cohort.common.policies.baselines.continuous_batching import ContinuousBatching
from cohort.common.policies.baselines.paged_allocation import PagedAllocator
from cohort.common.policies.bucketserve.padded_prefill import PaddedPrefill
from cohort.common.policies.interface import IterationPlan, IterationScheduler
from cohort.common.sequence import Row, Sequence
from cohort.common.types import Attempt, KvGeometry, Request, SamplingParams
from tests.common.engine.driver import BLOCK_SIZE, VOCAB, make_runner
from tests.common.policies.baselines.drive import decide

OUTPUTS = 5


def sequence(name: str, tokens: list[int], batch_id: int = 1) -> Sequence:
    sampling = SamplingParams(max_tokens=OUTPUTS, temperature=0.0)
    return Sequence(
        Request(Attempt(name, 1), "g", list(tokens), len(tokens), sampling, 0.0), list(tokens), None, batch_id, 0.0
    )


def generate(
    runner: ModelRunner, scheduler: IterationScheduler, prompts: list[list[int]]
) -> tuple[list[list[int]], int]:
    """Every request's output, and how many tokens of padding the device computed."""
    kv = PagedAllocator(KvGeometry(1, 1, 1, 1, BLOCK_SIZE), len(runner.kv.blocks), 0)
    sequences = [sequence(f"r{i}", prompt, batch_id=1 + i // 3) for i, prompt in enumerate(prompts)]
    for each in sequences:
        scheduler.add(0.0, each)
    padding = 0
    for _ in range(200):
        plan = decide(scheduler, kv, 0.0)
        if not plan.rows:
            break
        batch, sampled = BatchBuilder(kv).build(plan)
        batch.check()
        padding += 0 if batch.padding is None else int(batch.padding.sum())
        output = runner.execute(batch)
        for row in plan.rows:
            row.sequence.computed = row.start + row.count
            kv.committed(row.sequence)
        for each, token in zip(sampled, output.tokens.tolist(), strict=True):
            each.tokens.append(token)
            if each.output_tokens == OUTPUTS:
                scheduler.remove(0.0, each)
                kv.release(each.key)
        kv.check()
    return [each.tokens[each.request.prompt_tokens :] for each in sequences], padding


def test_padding_changes_no_answer(model_folder: Callable[[str], Path]) -> None:
    random = Random(3)
    prompts = [[random.randrange(VOCAB) for _ in range(random.randint(2, 60))] for _ in range(9)]
    prompts[4] = prompts[0] + prompts[4]  # shares a cached prefix with another
    options = {"max_rows": 16, "max_step_tokens": 256, "prefill_chunk": 48, "preemption": "recompute"}
    runner = make_runner(model_folder("llama"))
    plain, nothing = generate(runner, ContinuousBatching(**options), prompts)  # type: ignore[arg-type]
    runner.kv.blocks.fill_(7.0)  # whatever was there before must not matter
    scheduler = PaddedPrefill(**options)  # type: ignore[arg-type]
    padded, padding = generate(runner, scheduler, prompts)
    assert padded == plain
    assert all(len(output) == OUTPUTS for output in plain)
    assert nothing == 0
    assert padding > 20
    assert scheduler.metrics()["padding_tokens_total"] == padding
    assert 0.0 < scheduler.metrics()["padding_share"] < 1.0


def test_rows_become_a_rectangle_behind_which_only_padding_lies() -> None:
    kv = PagedAllocator(KvGeometry(1, 1, 1, 1, 4), 20, 0)
    long, short, decoding = sequence("a", [5] * 10), sequence("b", [6] * 3), sequence("c", [7] * 5)
    decoding.computed = 4
    for each in (long, short, decoding):
        kv.admit(each)
    assert kv.extend(short, 10)
    plan = IterationPlan(rows=[Row(long, 0, 10), Row(short, 0, 3), Row(decoding, 4, 1)], padded_to=10)
    batch, sampled = BatchBuilder(kv).build(plan)
    batch.check()
    assert batch.padding is not None
    assert batch.padding.tolist() == [0, 7, 0]
    assert np.diff(batch.query_start).tolist() == [10, 10, 1]
    assert batch.token_ids[10:20].tolist() == [6] * 10
    assert batch.positions[10:20].tolist() == list(range(10))
    assert sampled == [long, short, decoding]
    first, second = batch.split()
    first.check()
    second.check()
    assert second.padding is not None
    assert second.padding.tolist() == [7, 0]


def test_padding_ends_where_the_blocks_or_the_longest_row_end() -> None:
    kv = PagedAllocator(KvGeometry(1, 1, 1, 1, 4), 20, 0)
    long, short = sequence("a", [5] * 10), sequence("b", [6] * 3)
    kv.admit(long)
    kv.admit(short)
    batch, _ = BatchBuilder(kv).build(IterationPlan(rows=[Row(long, 0, 10), Row(short, 0, 3)], padded_to=10))
    assert batch.padding is not None
    assert batch.padding.tolist() == [0, 1]  # one block of four
    started_later = sequence("c", [6] * 9)
    kv.admit(started_later)
    kv.extend(started_later, 20)
    batch, _ = BatchBuilder(kv).build(IterationPlan(rows=[Row(long, 0, 10), Row(started_later, 6, 3)], padded_to=10))
    assert batch.padding is not None
    assert batch.padding.tolist() == [0, 1]  # position 10 may not exist
