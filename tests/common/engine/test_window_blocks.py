"""Sliding windows over the real allocator: blocks change hands while sequences run, the tokens are transformers'."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from cohort.common.engine.config.model_config import read_geometry
from cohort.common.engine.runner.model_runner import ModelRunner
from cohort.common.engine.step.batch_builder import BatchBuilder
from cohort.common.policies.baselines.continuous_batching import ContinuousBatching
from cohort.common.policies.baselines.paged_allocation import PagedAllocator
from cohort.common.policies.kv_interface import NO_BLOCK
from cohort.common.sequence import Sequence
from cohort.common.types import KvGeometry
from tests.common.engine.driver import count_near_ties, make_runner, random_prompts, reference_generate
from tests.common.engine.forward.test_padded_path import sequence
from tests.common.policies.baselines.drive import decide

OUTPUTS = 40


def generate(runner: ModelRunner, kv: PagedAllocator, prompts: list[list[int]], preemption: str) -> list[Sequence]:
    """All of them, in a cache that is too small for all at once; one joins after the other."""
    scheduler = ContinuousBatching(
        max_rows=16,
        max_step_tokens=64,
        prefill_chunk=13,
        preemption=preemption,  # type: ignore[arg-type]
    )
    sequences = [sequence(f"r{index}", prompt) for index, prompt in enumerate(prompts)]
    waiting, builder = list(sequences), BatchBuilder(kv)
    for step in range(2000):
        if waiting and step % 2 == 0:
            scheduler.add(0.0, waiting.pop(0))
        plan = decide(scheduler, kv, 0.0)
        if not plan.rows:
            if not waiting:
                break
            continue
        for copy in plan.copies:
            pairs = list(zip(copy.device, copy.host, strict=True))
            if copy.direction == "out":
                runner.kv.copy_out(pairs)
            else:
                runner.kv.copy_in([(host, device) for device, host in pairs])
        batch, sampled = builder.build(plan)
        batch.check()
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
    return sequences


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
@pytest.mark.parametrize("name", ["mistral-window", "phi3", "mixtral-window"])
def test_blocks_change_hands_while_sequences_run(
    name: str, preemption: str, model_folder: Callable[[str], Path]
) -> None:
    folder = model_folder(name)
    prompts = random_prompts((40, 3, 5, 4, 7, 3, 6, 9, 21, 4, 5, 8), seed=4)
    prompts[2] = prompts[0][:32] + prompts[2]  # a prefix whose beginning the first one has given back
    expected = reference_generate(folder, prompts, OUTPUTS)
    runner = make_runner(folder, num_blocks=12, host_blocks=40)
    assert runner.kv.geometry.window == 11
    kv = PagedAllocator(runner.kv.geometry, 12, 40)
    found = generate(runner, kv, prompts, preemption)
    ties = [count_near_ties(one, each.tokens[len(one.prompt) :]) for one, each in zip(expected, found, strict=True)]
    assert sum(ties) <= 1
    metrics = kv.metrics()
    assert metrics["window_blocks_total"] > 30
    assert metrics["prefix_hits_total"] >= 24
    assert sum(each.preemptions for each in found) > 0


@pytest.mark.parametrize("name", ["mistral-window", "gemma2"])
def test_kernels_never_read_a_block_that_was_given_back(name: str, model_folder: Callable[[str], Path]) -> None:
    """The compiled kernels refuse a block outside the cache; what is written to those given back changes nothing. With
    groups of layers, of which one gives nothing back, too."""
    runner = make_runner(model_folder(name), num_blocks=120, grouped=True)
    (prompt,) = random_prompts([70])
    outputs = []
    for spoil in (False, True):
        kv = PagedAllocator(runner.kv.geometry, 120, 0, prefix_caching=False)
        each = sequence("r", prompt)
        kv.admit(each)
        scheduler = ContinuousBatching(max_rows=4, max_step_tokens=64, prefill_chunk=9, preemption="recompute")
        scheduler.add(0.0, each)
        owned = set().union(*kv.tables(each.key))
        kv.release(each.key)
        for _ in range(40):
            plan = decide(scheduler, kv, 0.0)
            batch, sampled = BatchBuilder(kv).build(plan)  # from the table as it is now, with what was given back
            output = runner.execute(batch)
            for row in plan.rows:
                row.sequence.computed = row.start + row.count
                kv.committed(row.sequence)
            for token in output.tokens.tolist()[: len(sampled)]:
                each.tokens.append(token)
            if spoil:
                given_back = owned.difference(*kv.tables(each.key))
                for block in given_back:
                    runner.kv.blocks[block].fill_(float("nan"))
        given_back_by_group = [list(table).count(NO_BLOCK) for table in kv.tables(each.key)]
        assert given_back_by_group[-1] > 8
        assert len(given_back_by_group) == 1 or given_back_by_group[0] == 0
        outputs.append(each.tokens)
        runner.kv.blocks.zero_()
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize(
    ("name", "window"),
    [("mistral-window", 11), ("phi3", 11), ("mixtral-window", 11), ("qwen2-window", 0), ("gemma3", 0), ("llama", 0)],
)
def test_which_models_have_a_window_in_every_layer(name: str, window: int, model_folder: Callable[[str], Path]) -> None:
    assert read_geometry(model_folder(name)).kv_geometry("float32", 8).window == window


def test_the_numbers_of_a_long_decode() -> None:
    """Mistral 7B v0.1: a window of 4096, blocks of 16; after 20,000 positions 257 blocks, not 1250."""
    geometry = KvGeometry(32, 8, 128, 2, 16, 4096)
    assert geometry.blocks_for(20_000) == 1250
    assert max(geometry.blocks_held(positions) for positions in range(20_001)) == 257
