"""A served shape of few layers: recorded steps are those kernel by kernel, bit for bit, of a device and of a rank.

NCCL takes one rank a GPU, and there may be only one: that group has one rank. What it exchanges goes nowhere, so no
kernel of NCCL's waits; all else is as in a larger one: the communicator, calls of it in a recording, replays between
launches, the end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from cohort.common.engine.config.device_memory import DeviceShare
from cohort.common.engine.ranks.ranks import RankSettings
from cohort.common.engine.runner.model_runner import ModelRunner
from cohort.common.engine.step.batch import GREEDY, SamplingRow, StepBatch, StepOutput
from cohort.common.sampling_inputs import TokenHistory
from cohort.kernels.cpu import native
from cohort.services.bench.gpu_check.frame.context import LLAMA_3_8B, TINY, random_model, rows_of
from tests.kernels.gpu.conftest import DEVICE, REAL

SCORED = SamplingRow(seed=0, position=0, temperature=0.0, logprobs=20)
PENALISED = SamplingRow(0, 0, 0.8, top_p=0.95, repetition_penalty=1.2, presence_penalty=0.3, frequency_penalty=0.3)
SIZES = (1, 4, 16, 64) if REAL else (1, 4)
WIDE = {**LLAMA_3_8B, "num_hidden_layers": 2, "vocab_size": 32000, "bos_token_id": 1, "eos_token_id": 2}


@pytest.fixture(scope="module", params=["a device", "a rank"])
def runner(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelRunner]:
    folder = tmp_path_factory.mktemp("two-layers")
    group = RankSettings(0, 1, str(folder / "ranks"), lambda: None) if request.param == "a rank" else None
    made = random_model(
        folder / "model",
        WIDE if REAL else TINY,
        DEVICE,
        real=REAL,
        max_rows=128 if REAL else 8,
        max_step_tokens=512,
        share=DeviceShare(graphs=2 << 30, most_kv=1 << 30),
        group=group,
    )
    assert made._device_steps is not None, "it runs as on a GPU"
    yield made
    if made.ranks is not None:  # NCCL waits for the end of everything that was recorded with it
        made._device_steps.forget()
        made.ranks.close()


def with_tokens(batch: StepBatch, vocabulary: int) -> StepBatch:
    """The batch with different tokens in all rows."""
    tokens = np.arange(3, 3 + batch.num_tokens, dtype=np.int64) * 7919 % vocabulary
    return replace(batch, token_ids=tokens)


def sampled_with(batch: StepBatch, sampling: SamplingRow) -> StepBatch:
    return replace(batch, sampling=tuple(replace(sampling, position=row) for row in range(len(batch.sample_rows))))


def fresh(runner: ModelRunner, batch: StepBatch) -> StepOutput:
    """Over the same cache content each time."""
    with torch.inference_mode():
        runner.kv.blocks.normal_(generator=torch.Generator(runner.kv.blocks.device).manual_seed(7))
    settle()
    return runner.execute(batch)


def settle() -> None:
    if DEVICE.type == "cuda":  # steps run on a stream of their own, which waits for no other
        torch.cuda.synchronize(DEVICE)


def apart(ours: StepOutput, theirs: StepOutput) -> float:
    """The largest difference between log-probabilities of tokens that both name; infinite where they name few common
    ones."""
    worst = 0.0
    for left, right in zip(ours.logprobs, theirs.logprobs, strict=True):
        assert left is not None and right is not None
        values = dict(zip(right.top_ids, right.top_logprobs, strict=True))
        common = [abs(v - values[i]) for i, v in zip(left.top_ids, left.top_logprobs, strict=True) if i in values]
        if len(common) < len(left.top_ids) // 2:
            return float("inf")
        worst = max(worst, *(each if each == each else float("inf") for each in common))
    return worst


def test_recorded_steps_are_those_kernel_by_kernel(runner: ModelRunner) -> None:
    """The same rows before anything is recorded, and after; three rows run as a class of four."""
    batches = {
        rows: with_tokens(sampled_with(rows_of(runner, rows, 1, 40), SCORED), runner.geometry.vocab_size)
        for rows in (*SIZES, 3)
    }
    eager = {rows: fresh(runner, batch) for rows, batch in batches.items()}
    runner.warm_up(classes=SIZES)
    steps = runner._device_steps
    assert steps is not None and set(SIZES) <= set(steps.decode.classes)
    for rows, batch in batches.items():
        ours, expected = fresh(runner, batch), eager[rows]
        assert apart(ours, expected) < 2e-2, f"{rows} rows"
        if rows != 3:
            assert np.array_equal(ours.tokens, expected.tokens), f"{rows} rows"
            assert ours.logprobs == expected.logprobs, f"{rows} rows: at most {apart(ours, expected):.2g} apart"


def test_a_prompt_at_once_is_the_prompt_token_by_token(runner: ModelRunner) -> None:
    """Flash attention in 16 bits, and the paged kernel, recorded: two ways to the same logits."""
    length = 40 if REAL else 12
    tokens = np.arange(3, 3 + length, dtype=np.int64) * 101 % runner.geometry.vocab_size
    at_once = runner.execute(sampled_with(replace(rows_of(runner, 1, length, length), token_ids=tokens), SCORED))
    for place in range(length):
        batch = replace(rows_of(runner, 1, 1, place + 1), token_ids=tokens[place : place + 1])
        by_token = runner.execute(sampled_with(batch, SCORED))
    assert apart(at_once, by_token) < (0.1 if REAL else 1e-3)


@pytest.mark.parametrize(
    ("rows", "drafts", "how"),
    [(1, 2, GREEDY), (4, 8, GREEDY), (8, 8, GREEDY), (8, 8, PENALISED)]
    if REAL
    else [(1, 2, GREEDY), (2, 2, GREEDY), (2, 2, PENALISED)],
    ids=str,
)
def test_rows_with_drafts_say_what_they_say_in_a_step_each(
    runner: ModelRunner, rows: int, drafts: int, how: SamplingRow
) -> None:
    """In 16 bits products choose their tiles by the number of rows, so two candidates that nearly tie may change."""
    context = (256 if REAL else 32) - drafts  # so that the drafts lie in blocks that the row has anyway
    following = one_by_one(runner, rows, context, drafts, how)
    right, wrong = drafted(runner, rows, context, following, how), following.copy()
    wrong[:, drafts // 2] = (wrong[:, drafts // 2] + 1) % runner.geometry.vocab_size
    output, cut = runner.execute(right), runner.execute(drafted(runner, rows, context, wrong, how))
    equal = sum(map(int, output.tokens == following.reshape(-1)))
    assert equal >= (0.97 if REAL else 1.0) * following.size
    if not REAL:
        assert output.counts == (drafts + 1,) * rows and cut.counts == (drafts // 2 + 1,) * rows


def one_by_one(runner: ModelRunner, rows: int, context: int, drafts: int, how: SamplingRow) -> np.ndarray:
    """What every row says next, int64 [rows, drafts + 1]: a step for each, behind whatever lies in the cache."""
    found, tokens = np.zeros((rows, 0), dtype=np.int64), np.arange(3, 3 + rows, dtype=np.int64)
    for ahead in range(drafts + 1):
        sampling = tuple([counting(how, row, context + ahead, said) for row, said in enumerate(found.tolist())])
        batch = replace(rows_of(runner, rows, 1, context + ahead), token_ids=tokens, sampling=sampling)
        tokens = runner.execute(batch).tokens
        found = np.concatenate([found, tokens[:, None]], axis=1)
    return found


def counting(how: SamplingRow, row: int, position: int, said: Sequence[int]) -> SamplingRow:
    """Of a row with 16 tokens in its prompt that has said these, whose history is made anew."""
    history = TokenHistory(range(16), said) if how is PENALISED else None
    return replace(how, seed=row, position=position, history=history)


def drafted(runner: ModelRunner, rows: int, context: int, following: np.ndarray, how: SamplingRow) -> StepBatch:
    """One step of the same rows, whose drafts are all but the last of these tokens."""
    drafts = following.shape[1] - 1
    known = np.arange(3, 3 + rows, dtype=np.int64)[:, None]
    sampling = [
        replace(counting(how, row, context + at, []), ahead=tuple(said[:at]) if how is PENALISED else ())
        for row, said in enumerate(following.tolist())
        for at in range(drafts + 1)
    ]
    return replace(
        rows_of(runner, rows, drafts + 1, context + drafts),
        token_ids=np.concatenate([known, following[:, :-1]], axis=1).reshape(-1),
        sampling=tuple(sampling),
        drafts=np.full(rows, drafts, dtype=np.int32),
    )


Cut = Sequence[tuple[int, int]]
"""Steps, one behind the other: rows, of which the prompt's is the first, and tokens of each."""


def test_a_batch_invariant_model_computes_the_same_in_every_cut(tmp_path: Path) -> None:
    """Keys, values and log-probabilities of a prompt, bit for bit; decode steps are recorded."""
    if DEVICE.type == "cpu" and native.implementation() != "native":
        pytest.skip("torch multiplies, and nothing can be promised")
    length, tail, others = (608, 16, 15) if REAL else (48, 3, 2)
    head, half = length - tail, (length - tail) // 2
    cuts: dict[str, Cut] = {
        "token by token": [(1, head), *[(1, 1)] * tail],
        "token by token beside others": [(1, head), *[(1 + others, 1)] * tail],
        "in chunks": [(1, 1), (1, half), (1, head - half - 1 + tail)],
        "chunks beside others": [(1, half), (1 + others, 2), (1, length - half - 2)],
        "rows of a few positions": [(1, length - 5), (1 + others, 5)],
        "a few positions, then one": [(1, length - 4), (1 + others, 3), (1, 1)],
    }
    share = DeviceShare(graphs=2 << 30, most_kv=2 << 30)
    shape = {**WIDE, "num_hidden_layers": 4} if REAL else TINY
    runner = random_model(tmp_path, shape, DEVICE, real=REAL, share=share, batch_invariant=True)
    runner.warm_up(classes=(1, 1 + others))
    with torch.inference_mode():
        runner.kv.blocks.normal_()
    whole, told = in_steps(runner, length, [(1, length)])
    for name, cut in cuts.items():
        kv, output = in_steps(runner, length, cut)
        differing = int((kv != whole).flatten(1).any(1).sum())
        assert not differing, f"{name}: {differing} of {len(kv)} blocks differ"
        assert output.tokens[0] == told.tokens[0] and output.logprobs[0] == told.logprobs[0], name


def in_steps(runner: ModelRunner, length: int, cut: Cut) -> tuple[Tensor, StepOutput]:
    """The bits of the prompt's KV, and what its last position gives. Other rows have other tokens, and as long contexts
    as the prompt has by then."""
    at, tokens = 0, np.arange(3, 3 + length, dtype=np.int64) * 101 % runner.geometry.vocab_size
    settle()
    for rows, count in cut:
        own = np.tile(tokens[at : at + count], rows)
        own[count:] = (own[count:] + 7) % runner.geometry.vocab_size
        batch = replace(rows_of(runner, rows, count, at + count), token_ids=own)
        output = runner.execute(sampled_with(batch, SCORED))
        at += count
    assert at == length
    settle()
    kept = runner.kv.blocks[: length // runner.block_size].clone()
    return kept.view(torch.int16 if kept.element_size() == 2 else torch.int32), output
