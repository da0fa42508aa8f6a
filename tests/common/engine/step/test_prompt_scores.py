"""A prompt's log-probabilities against transformers', however the prompt is cut and whatever runs beside it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from cohort.common.engine.runner.model_runner import ModelRunner
from cohort.common.engine.step.batch import ScoringRow, TokenLogprobs
from cohort.common.engine.step.batch_builder import BatchBuilder
from cohort.common.engine.step.prompt_scores import AT_ONCE, score
from cohort.common.policies.baselines.paged_allocation import PagedAllocator
from cohort.common.policies.interface import IterationPlan
from cohort.common.sequence import Row, Sequence
from cohort.common.types import Attempt, Request, SamplingParams
from tests.common.engine.driver import VOCAB
from tests.engine_models import make_runner

MAX_ROWS = 4
SIZE = 16


def runner_of(folder: Path) -> ModelRunner:
    return make_runner(folder, block_size=SIZE, num_blocks=32, host_blocks=0, max_rows=MAX_ROWS, max_step_tokens=64)


def sequence_of(name: str, length: int, *, prompt_logprobs: int) -> Sequence:
    random = Random(name)
    tokens = [random.randrange(VOCAB) for _ in range(length)]
    sampling = SamplingParams(max_tokens=4, temperature=0.0, prompt_logprobs=prompt_logprobs)
    return Sequence(Request(Attempt(name, 0), "g", tokens, length, sampling, 0.0), list(tokens), None, 0, 0.0)


def reference(folder: Path, tokens: list[int]) -> torch.Tensor:
    """[P - 1, vocabulary]: after every token but the last."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        return model(torch.tensor([tokens])).logits[0, :-1].float().log_softmax(-1)


def check(scores: list[TokenLogprobs], truth: torch.Tensor, tokens: list[int], top: int) -> None:
    assert len(scores) == len(tokens) - 1
    for position, item in enumerate(scores):
        assert item.logprob == pytest.approx(float(truth[position, tokens[position + 1]]), abs=1e-4)
        assert len(item.top_ids) == len(item.top_logprobs) == top
        assert item.top_logprobs == pytest.approx(truth[position].topk(top).values.tolist(), abs=1e-4)
        assert [float(truth[position, token]) for token in item.top_ids] == pytest.approx(
            list(item.top_logprobs), abs=1e-4
        )


@pytest.mark.parametrize("family", ["llama", "opt", "gpt2"])
@pytest.mark.parametrize("chunks", [[23], [1, 5, 16, 1], [7, 16]])
def test_as_transformers_says(model_folder: Callable[[str], Path], family: str, chunks: list[int]) -> None:
    """Beside it runs another scored prompt and one that is not scored; 23 tokens are more than logits fit at a time."""
    folder = model_folder(family)
    runner = runner_of(folder)
    kv = PagedAllocator(runner.kv.geometry, 32, 0)
    scored, other, plain = (sequence_of(name, 23, prompt_logprobs=k) for name, k in (("a", 3), ("b", 0), ("c", -1)))
    sequences = (scored, other, plain)
    for sequence in sequences:
        assert kv.admit(sequence) == 0
    found: dict[str, list[TokenLogprobs]] = {"a": [], "b": []}
    start = 0
    for count in chunks:
        plan = IterationPlan(rows=[Row(sequence, start, count) for sequence in sequences])
        batch, sampled = BatchBuilder(kv).build(plan)
        output = runner.execute(batch)
        assert [batch.scoring[index].row for index in range(2)] == [0, 1] and len(batch.scoring) == 2
        for row, scores in zip(batch.scoring, output.scores, strict=True):
            found[plan.rows[row.row].sequence.request_id] += scores
        start += count
    assert len(sampled) == 3
    check(found["a"], reference(folder, scored.tokens), scored.tokens, 3)
    check(found["b"], reference(folder, other.tokens), other.tokens, 0)
    again = runner.execute(BatchBuilder(kv).build(IterationPlan(rows=[Row(plain, 0, 23)]))[0])
    assert again.scores == ()
    assert output.tokens[2] == again.tokens[0], "scoring changes nothing for its neighbours"


def test_a_batch_in_halves_gives_the_same(model_folder: Callable[[str], Path]) -> None:
    runner = runner_of(model_folder("llama"))
    kv = PagedAllocator(runner.kv.geometry, 32, 0)
    sequences = [sequence_of(name, 9, prompt_logprobs=k) for name, k in (("a", -1), ("b", 2), ("c", 1))]
    for sequence in sequences:
        kv.admit(sequence)
    batch, _ = BatchBuilder(kv).build(IterationPlan(rows=[Row(sequence, 0, 9) for sequence in sequences]))
    whole = runner.execute(batch)
    halves = [runner.execute(half) for half in batch.split()]
    assert [row for half in batch.split() for row in half.scoring] == [
        ScoringRow(0, 0, tuple(sequences[1].tokens[1:]), 2),
        ScoringRow(1, 9, tuple(sequences[2].tokens[1:]), 1),
    ]
    parts = halves[0].scores + halves[1].scores
    for ours, theirs in zip(whole.scores, parts, strict=True):
        assert [item.logprob for item in ours] == pytest.approx([item.logprob for item in theirs], abs=1e-5)


def test_a_scored_prompt_takes_nothing_from_the_prefix_cache(model_folder: Callable[[str], Path]) -> None:
    kv = PagedAllocator(runner_of(model_folder("llama")).kv.geometry, 32, 0)
    first = sequence_of("a", 40, prompt_logprobs=-1)
    kv.admit(first)
    first.computed = 40
    kv.committed(first)
    kv.release(first.key)
    scored = sequence_of("a", 40, prompt_logprobs=0)
    assert kv.admit(scored) == 0
    kv.release(scored.key)
    scored.tokens.append(1)  # preempted later: its scores are with the gateway
    assert kv.admit(scored) == 32


def test_nothing_follows_tokens_that_are_not_in_the_prompt() -> None:
    """A row that ends with the prompt, one that ends before, and one of one token: how many targets each has."""
    from cohort.common.types import KvGeometry

    kv = PagedAllocator(KvGeometry(1, 1, 1, 1, SIZE), 8, 0)
    sequence = sequence_of("a", 10, prompt_logprobs=0)
    kv.admit(sequence)
    for start, count, targets in ((0, 10, 9), (0, 4, 4), (9, 1, 0), (8, 1, 1)):
        batch, _ = BatchBuilder(kv).build(IterationPlan(rows=[Row(sequence, start, count)]))
        [row] = batch.scoring
        assert row.targets == tuple(sequence.tokens[start + 1 : start + 1 + targets])
    sequence.tokens.append(3)
    assert BatchBuilder(kv).build(IterationPlan(rows=[Row(sequence, 10, 1)]))[0].scoring == ()


def test_scores_against_numpy() -> None:
    """More positions than exist at a time, every one with another number of likeliest tokens."""
    generator = np.random.default_rng(3)
    logits = generator.normal(0, 5, (2 * AT_ONCE + 7, 30)).astype(np.float32)
    pairs = [(int(generator.integers(30)), int(generator.integers(4))) for _ in logits]
    exact = logits.astype(np.float64)
    exact -= np.log(np.exp(exact).sum(axis=1, keepdims=True))
    found = list(score(torch.from_numpy(logits), iter(pairs)))
    for item, row, (target, top) in zip(found, exact, pairs, strict=True):
        assert item.logprob == pytest.approx(row[target], abs=1e-5)
        assert item.top_ids == tuple(np.argsort(-row)[:top])
        assert item.top_logprobs == pytest.approx(tuple(np.sort(row)[::-1][:top]), abs=1e-5)
