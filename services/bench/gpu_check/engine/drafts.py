"""Decode rows that carry drafts: their tokens beside those of a step each, and what the further positions cost.

Some rows are sampled under penalties, which count the drafts before each position. Rows of several positions take the
path of prompts, recorded where a class holds them (`static_mixed`): the drafts of eight rows are at most 72 positions.
Called by `model`.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from functools import partial

import numpy as np

from cohort.common.engine.runner.model_runner import ModelRunner
from cohort.common.engine.step.batch import GREEDY, SamplingRow, StepBatch
from cohort.common.sampling_inputs import TokenHistory
from cohort.services.bench.gpu_check.frame.batches import rows_of
from cohort.services.bench.gpu_check.frame.context import Check

_EQUAL = 0.97
"""Of the tokens: products choose their tiles by the number of rows, so two candidates that nearly tie may change."""
_PROMPT = 16
"""Distinct tokens that a penalised row has in its prompt."""
_PENALISED = SamplingRow(0, 0, 0.8, top_p=0.95, repetition_penalty=1.2, presence_penalty=0.3, frequency_penalty=0.3)


def run(check: Check, runner: ModelRunner, model: str) -> None:
    for rows in (1, 4, 8) if check.real else (1, 2):
        for drafts in (2, 8) if check.real else (2,):
            name = f"{model}, {rows} rows with {drafts} drafts"
            check.guard.item(name, partial(_measure, check, runner, name, rows, drafts, GREEDY), 6)
    name = f"{model}, penalised rows with drafts"
    check.guard.item(name, partial(_measure, check, runner, name, *((8, 8) if check.real else (2, 2)), _PENALISED), 6)


def _measure(check: Check, runner: ModelRunner, name: str, rows: int, drafts: int, how: SamplingRow) -> None:
    context = (1024 if check.real else 32) - drafts  # so that the drafts lie in blocks that the row has anyway
    following = _one_by_one(runner, rows, context, drafts, how)
    right, wrong = drafted(runner, rows, context, following, how), following.copy()
    wrong[:, drafts // 2] = (wrong[:, drafts // 2] + 1) % runner.geometry.vocab_size
    output = runner.execute(right)
    expected = following.reshape(-1).tolist()
    equal = sum(a == b for a, b in zip(output.tokens.tolist(), expected, strict=False)) / len(expected)
    cut = runner.execute(drafted(runner, rows, context, wrong, how)).counts
    kept = output.counts == (drafts + 1,) * rows and cut == (drafts // 2 + 1,) * rows
    check.found.checked(
        f"{name}: tokens of a step each",
        equal >= _EQUAL if check.real else equal == 1.0 and kept,
        f"{equal:.1%} of {len(expected)}; right ones kept {output.counts}, with a wrong one {cut}",
    )
    plain_s, drafted_s = (seconds(check, runner, batch) for batch in (rows_of(runner, rows, 1, context), right))
    steps = runner._device_steps
    taken = None if steps is None else steps.mixed.takes(right)
    recorded = "not recorded" if taken is None else f"recorded for {taken.prompt_tokens} positions"
    check.found.measured(
        f"{name}: step",
        drafted_s / plain_s,
        "x one without",
        note=f"{drafted_s * 1e3:.2f} ms and {plain_s * 1e3:.2f} ms; {recorded}",
    )


def _one_by_one(runner: ModelRunner, rows: int, context: int, drafts: int, how: SamplingRow) -> np.ndarray:
    """What every row says next, int64 [rows, drafts + 1]: a step for each, behind whatever lies in the cache."""
    found, tokens = np.zeros((rows, 0), dtype=np.int64), np.arange(3, 3 + rows, dtype=np.int64)
    for ahead in range(drafts + 1):
        sampling = tuple([_counting(how, row, context + ahead, said) for row, said in enumerate(found.tolist())])
        batch = replace(rows_of(runner, rows, 1, context + ahead), token_ids=tokens, sampling=sampling)
        tokens = runner.execute(batch).tokens
        found = np.concatenate([found, tokens[:, None]], axis=1)
    return found


def _counting(how: SamplingRow, row: int, position: int, said: list[int]) -> SamplingRow:
    """Of a row that has said these, whose history is made anew."""
    history = TokenHistory(range(_PROMPT), said) if how is _PENALISED else None
    return replace(how, seed=row, position=position, history=history)


def drafted(runner: ModelRunner, rows: int, context: int, following: np.ndarray, how: SamplingRow) -> StepBatch:
    """One step of the same rows, whose drafts are all but the last of these tokens."""
    drafts = following.shape[1] - 1
    known = np.arange(3, 3 + rows, dtype=np.int64)[:, None]
    sampling = [
        replace(_counting(how, row, context + at, []), ahead=tuple(said[:at]) if how is _PENALISED else ())
        for row, said in enumerate(following.tolist())
        for at in range(drafts + 1)
    ]
    return replace(
        rows_of(runner, rows, drafts + 1, context + drafts),
        token_ids=np.concatenate([known, following[:, :-1]], axis=1).reshape(-1),
        sampling=tuple(sampling),
        drafts=np.full(rows, drafts, dtype=np.int32),
    )


def seconds(check: Check, runner: ModelRunner, batch: StepBatch) -> float:
    runner.execute(batch)
    times = []
    for _ in range(20 if check.real else 3):
        started = time.perf_counter()
        runner.execute(batch)
        times.append(time.perf_counter() - started)
    return statistics.median(times)
