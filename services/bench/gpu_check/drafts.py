"""Decode rows that carry drafts: their tokens beside those of a step each, and what the further positions cost.

Rows of several positions take the path of prompts, recorded where a class holds them (`static_mixed`): the drafts of
eight rows are at most 72 positions. Called by `model`.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from functools import partial

import numpy as np

from cohort.common.engine.batch import GREEDY, StepBatch
from cohort.common.engine.model_runner import ModelRunner
from cohort.services.bench.gpu_check.batches import rows_of
from cohort.services.bench.gpu_check.context import Check

_EQUAL = 0.97
"""Of the tokens: products choose their tiles by the number of rows, so two candidates that nearly tie may change."""


def run(check: Check, runner: ModelRunner, model: str) -> None:
    for rows in (1, 4, 8) if check.real else (1, 2):
        for drafts in (2, 8) if check.real else (2,):
            name = f"{model}, {rows} rows with {drafts} drafts"
            check.guard.item(name, partial(_measure, check, runner, name, rows, drafts), 6)


def _measure(check: Check, runner: ModelRunner, name: str, rows: int, drafts: int) -> None:
    context = (1024 if check.real else 32) - drafts  # so that the drafts lie in blocks that the row has anyway
    following = _one_by_one(runner, rows, context, drafts)
    right, wrong = _drafted(runner, rows, context, following), following.copy()
    wrong[:, drafts // 2] = (wrong[:, drafts // 2] + 1) % runner.geometry.vocab_size
    output = runner.execute(right)
    expected = following.reshape(-1).tolist()
    equal = sum(a == b for a, b in zip(output.tokens.tolist(), expected, strict=False)) / len(expected)
    cut = runner.execute(_drafted(runner, rows, context, wrong)).counts
    kept = output.counts == (drafts + 1,) * rows and cut == (drafts // 2 + 1,) * rows
    check.found.checked(
        f"{name}: tokens of a step each",
        equal >= _EQUAL if check.real else equal == 1.0 and kept,
        f"{equal:.1%} of {len(expected)}; right ones kept {output.counts}, with a wrong one {cut}",
    )
    plain_s, drafted_s = (_seconds(check, runner, batch) for batch in (rows_of(runner, rows, 1, context), right))
    steps = runner._device_steps
    taken = None if steps is None else steps.mixed.takes(right)
    recorded = "not recorded" if taken is None else f"recorded for {taken.prompt_tokens} positions"
    check.found.measured(
        f"{name}: step",
        drafted_s / plain_s,
        "x one without",
        note=f"{drafted_s * 1e3:.2f} ms and {plain_s * 1e3:.2f} ms; {recorded}",
    )


def _one_by_one(runner: ModelRunner, rows: int, context: int, drafts: int) -> np.ndarray:
    """What every row says next, int64 [rows, drafts + 1]: a step for each, behind whatever lies in the cache."""
    found, tokens = [], np.arange(3, 3 + rows, dtype=np.int64)
    for ahead in range(drafts + 1):
        batch = replace(rows_of(runner, rows, 1, context + ahead), token_ids=tokens)
        tokens = runner.execute(batch).tokens
        found.append(tokens)
    return np.stack(found, axis=1)


def _drafted(runner: ModelRunner, rows: int, context: int, following: np.ndarray) -> StepBatch:
    """One step of the same rows, whose drafts are all but the last of these tokens."""
    drafts = following.shape[1] - 1
    known = np.arange(3, 3 + rows, dtype=np.int64)[:, None]
    return replace(
        rows_of(runner, rows, drafts + 1, context + drafts),
        token_ids=np.concatenate([known, following[:, :-1]], axis=1).reshape(-1),
        sampling=(GREEDY,) * (rows * (drafts + 1)),
        drafts=np.full(rows, drafts, dtype=np.int32),
    )


def _seconds(check: Check, runner: ModelRunner, batch: StepBatch) -> float:
    runner.execute(batch)
    times = []
    for _ in range(20 if check.real else 3):
        started = time.perf_counter()
        runner.execute(batch)
        times.append(time.perf_counter() - started)
    return statistics.median(times)
