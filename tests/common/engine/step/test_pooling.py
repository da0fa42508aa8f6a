"""Final hidden states of prompts against transformers', however the prompt is cut and whatever runs beside it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from transformers import AutoModel

from cohort.common.engine.runner.model_runner import ModelRunner
from cohort.common.engine.step.batch import PoolingRow
from cohort.common.engine.step.batch_builder import BatchBuilder
from cohort.common.engine.worker.worker_loop import pooled_of
from cohort.common.policies.baselines.paged_allocation import PagedAllocator
from cohort.common.policies.interface import IterationPlan
from cohort.common.sequence import Row, Sequence
from cohort.common.types import Attempt, Pooling, Request, SamplingParams
from tests.common.engine.driver import VOCAB
from tests.engine_models import make_runner

SIZE = 16
LENGTH = 23
FAMILIES = ["llama", "qwen2", "qwen3", "qwen3-moe", "gemma3", "opt", "opt-350m-like", "deepseek2", "gpt-oss", "gpt2"]


def runner_of(folder: Path, **options: object) -> ModelRunner:
    return make_runner(folder, **{"num_blocks": 32, "host_blocks": 0, "block_size": SIZE, **options})


def sequence_of(name: str, length: int, pooling: Pooling) -> Sequence:
    random = Random(name)
    tokens = [random.randrange(VOCAB) for _ in range(length)]
    sampling = SamplingParams(max_tokens=1, temperature=0.0, pooling=pooling)
    return Sequence(Request(Attempt(name, 0), "g", tokens, length, sampling, 0.0), list(tokens), None, 0, 0.0)


def reference(folder: Path, tokens: list[int]) -> np.ndarray:
    """[P, hidden]: transformers' last hidden state."""
    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        return model(torch.tensor([tokens]), use_cache=False).last_hidden_state[0].float().numpy()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("chunks", [[LENGTH], [1, 5, 16, 1]])
def test_states_are_those_of_transformers(model_folder: Callable[[str], Path], family: str, chunks: list[int]) -> None:
    """A prompt that is pooled by its mean, one by its last state, and one that is not, in one batch."""
    folder = model_folder(family)
    runner = runner_of(folder)
    kv = PagedAllocator(runner.block_geometry, 32, 0)
    builder = BatchBuilder(kv)
    mean, last, plain = (
        sequence_of("a", LENGTH, "mean"),
        sequence_of("b", LENGTH, "last"),
        sequence_of("c", LENGTH, ""),
    )
    for sequence in (plain, mean, last):
        assert kv.admit(sequence) == 0
    sums, ends, start = 0.0, [], 0
    for count in chunks:
        plan = IterationPlan(rows=[Row(sequence, start, count) for sequence in (plain, mean, last)])
        batch, _ = builder.build(plan)
        for pooled in pooled_of(batch, runner.execute(batch)):
            state = np.frombuffer(pooled.states.state, "<f4")
            if pooled.attempt == mean.key:
                assert (pooled.states.start, pooled.states.count) == (start, count)
                sums = sums + state
            else:
                assert (pooled.attempt, pooled.states.start, pooled.states.count) == (last.key, LENGTH - 1, 1)
                ends.append(state)
        start += count
    (end,) = ends
    assert sums / LENGTH == pytest.approx(reference(folder, mean.tokens).mean(axis=0), abs=1e-5)
    assert end == pytest.approx(reference(folder, last.tokens)[-1], abs=1e-5)


def test_neighbours_and_their_tokens_are_the_same(model_folder: Callable[[str], Path]) -> None:
    runner = runner_of(model_folder("llama"))
    outputs = []
    for pooling in ("", "mean"):
        kv = PagedAllocator(runner.block_geometry, 32, 0)
        sequences = [sequence_of("a", 9, pooling), sequence_of("b", 14, "")]
        for sequence in sequences:
            kv.admit(sequence)
        plan = IterationPlan(rows=[Row(sequence, 0, sequence.known) for sequence in sequences])
        outputs.append(runner.execute(BatchBuilder(kv).build(plan)[0]))
    assert outputs[0].tokens.tolist() == outputs[1].tokens.tolist()
    assert (len(outputs[0].pooled), len(outputs[1].pooled)) == (0, 1)


def test_a_batch_in_halves_gives_the_same(model_folder: Callable[[str], Path]) -> None:
    runner = runner_of(model_folder("llama"))
    kv = PagedAllocator(runner.block_geometry, 32, 0)
    sequences = [sequence_of(name, 9, pooling) for name, pooling in (("a", ""), ("b", "mean"), ("c", "last"))]
    for sequence in sequences:
        kv.admit(sequence)
    batch, _ = BatchBuilder(kv).build(IterationPlan(rows=[Row(sequence, 0, 9) for sequence in sequences]))
    assert batch.pooling == (PoolingRow(sequences[1].key, 1, 9, 9), PoolingRow(sequences[2].key, 2, 26, 1))
    whole = runner.execute(batch)
    first, second = batch.split()
    assert first.pooling + second.pooling == (
        PoolingRow(sequences[1].key, 0, 0, 9),
        PoolingRow(sequences[2].key, 1, 17, 1),
    )
    halves = runner._in_halves(batch).pooled
    for ours, theirs in zip(whole.pooled, halves, strict=True):
        assert np.frombuffer(ours, "<f4") == pytest.approx(np.frombuffer(theirs, "<f4"), abs=1e-6)


def test_steps_of_a_device_give_the_same(model_folder: Callable[[str], Path]) -> None:
    """As on a GPU, whose recorded steps hand out no states: such a step is run by itself."""
    folder, found = model_folder("llama"), []
    for device_steps in (False, True):
        runner = runner_of(folder, device_steps=device_steps)
        kv = PagedAllocator(runner.block_geometry, 32, 0)
        sequence = sequence_of("a", 20, "mean")
        kv.admit(sequence)
        batch, _ = BatchBuilder(kv).build(IterationPlan(rows=[Row(sequence, 0, 20)]))
        (state,) = runner.execute(batch).pooled
        found.append(np.frombuffer(state, "<f4"))
    assert found[0] == pytest.approx(found[1], abs=1e-5)


def test_only_the_mean_is_computed_anew_where_a_prefix_is_cached(model_folder: Callable[[str], Path]) -> None:
    kv = PagedAllocator(runner_of(model_folder("llama")).block_geometry, 32, 0)
    first = sequence_of("a", 40, "")
    kv.admit(first)
    first.computed = 40
    kv.committed(first)
    kv.release(first.key)
    for pooling, cached in (("mean", 0), ("last", 32)):
        sequence = sequence_of("a", 40, pooling)  # type: ignore[arg-type]
        assert kv.admit(sequence) == cached
        kv.release(sequence.key)
