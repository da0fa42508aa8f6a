"""Section: `engine.batch_invariant` (ADR 14): the bits of a position in every cut of its prompt, and what they cost.

One model is loaded twice, without the option and with it, and the same steps are timed. With it, a prompt's keys,
values and log-probabilities are compared bit for bit: at once, in chunks, token by token, in rows of a few positions,
alone and beside other rows, recorded and kernel by kernel.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from cohort.common.engine.config.device_memory import DeviceShare
from cohort.common.engine.runner.model_runner import ModelRunner
from cohort.common.engine.step.batch import GREEDY, SamplingRow, StepOutput
from cohort.services.bench.gpu_check.engine import decode, drafts
from cohort.services.bench.gpu_check.frame import rates
from cohort.services.bench.gpu_check.frame.batches import rows_of, sampled_with
from cohort.services.bench.gpu_check.frame.context import Check

_MODEL = "Llama-3-8B"
_SCORED = SamplingRow(seed=0, position=0, temperature=0.0, logprobs=20)
_MEASURED_KV = 12 << 30  # 64 rows of 1,024 tokens of an 8B model, and what they grow by

Cut = Sequence[tuple[int, int]]
"""Steps, one behind the other: rows, of which the prompt's is the first, and tokens of each."""


def run(check: Check) -> None:
    plain: dict[str, float] = {}
    for invariant in (False, True):
        name = f"{_MODEL}, batch_invariant {str(invariant).lower()}"
        runner = check.guard.item(f"{name}: load", partial(_load, check, invariant), 30)
        if runner is None:
            return
        if invariant:
            check.guard.item(f"{name}: bits", partial(_same_bits, check, runner), 20)
        for step, tokens, seconds in _steps(check, runner):
            check.guard.item(f"{name}: {step}", partial(_measure, check, step, tokens, seconds, plain, invariant), 10)
        del runner, seconds
        gc.collect()
        if check.device.type == "cuda":
            torch.cuda.empty_cache()


def _rows(check: Check) -> tuple[int, ...]:
    return (1, 16, 64) if check.real else (1, 3)


def _load(check: Check, invariant: bool) -> ModelRunner:
    share = DeviceShare(graphs=2 << 30, most_kv=_MEASURED_KV)
    runner = check.runner(_MODEL, check.shape(_MODEL), share=share, batch_invariant=invariant)
    runner.warm_up(classes=_rows(check))
    return runner


def _steps(check: Check, runner: ModelRunner) -> list[tuple[str, int, Callable[[], float | None]]]:
    """Of each step that is timed its name, the tokens that it yields or computes, and its seconds."""
    context, found = decode.context_of(check), list[tuple[str, int, Callable[[], float | None]]]()
    for rows in _rows(check):
        call = partial(decode.recorded_s, check, runner, rows_of(runner, rows, 1, context))
        found.append((f"decode, {rows} rows of {context}", rows, call))
    rows, positions = (16, 5) if check.real else (2, 3)
    following = np.full((rows, positions), 3, dtype=np.int64)
    drafted = drafts.drafted(runner, rows, context - positions, following, GREEDY)
    found.append(
        (f"{rows} rows of {positions} positions", rows * positions, lambda: drafts.seconds(check, runner, drafted))
    )
    tokens = 2048 if check.real else 48
    prompt = rows_of(runner, 1, tokens, tokens)
    repeats = 5 if check.real else 2
    found.append(
        (
            f"a prompt of {tokens}",
            tokens,
            lambda: rates.seconds(lambda: runner.execute(prompt), check.device, repeats=repeats, warm_ups=2),
        )
    )
    return found


def _measure(
    check: Check, step: str, tokens: int, seconds: Callable[[], float | None], plain: dict[str, float], invariant: bool
) -> None:
    taken_s = seconds()
    if taken_s is None:
        check.found.checked(f"{step}: recorded", False, "no recorded class takes it")
    elif not invariant:
        plain[step] = taken_s
    elif step in plain:
        check.found.measured(
            f"{step}: with the option",
            taken_s / plain[step],
            "x without",
            note=f"{taken_s * 1e3:.3f} ms and {plain[step] * 1e3:.3f} ms; {tokens / taken_s:,.0f} and "
            f"{tokens / plain[step]:,.0f} positions/s",
        )


def _same_bits(check: Check, runner: ModelRunner) -> None:
    length, tail = (608, 16) if check.real else (48, 3)
    others = 15 if check.real else 2
    head = length - tail
    cuts: dict[str, Cut] = {
        "token by token": [(1, head), *[(1, 1)] * tail],
        "token by token beside others": [(1, head), *[(1 + others, 1)] * tail],
        "in chunks": [(1, 1), (1, head // 2), (1, head - head // 2 - 1 + tail)],
        "chunks beside others": [(1, head // 2), (1 + others, 2), (1, length - head // 2 - 2)],
        "rows of a few positions": [(1, length - 5), (1 + others, 5)],
        "a few positions, then one": [(1, length - 4), (1 + others, 3), (1, 1)],
    }
    runner.kv.blocks.normal_()
    _wait(runner)
    whole = _computed(runner, length, [(1, length)])
    for name, cut in cuts.items():
        kv, output = _computed(runner, length, cut)
        same = torch.equal(kv, whole[0])
        alike = output.tokens[0] == whole[1].tokens[0] and output.logprobs[0] == whole[1].logprobs[0]
        apart = "" if same else f"{int((kv != whole[0]).flatten(1).any(1).sum())} of {len(kv)} blocks differ; "
        check.found.checked(
            f"a prompt at once = {name}", same and bool(alike), f"{apart}log-probabilities equal: {bool(alike)}"
        )


def _computed(runner: ModelRunner, length: int, cut: Cut) -> tuple[Tensor, StepOutput]:
    """The bits of the prompt's KV, and what its last position gives. Other rows have other tokens, and as long contexts
    as the prompt has by then."""
    at, tokens = 0, np.arange(3, 3 + length, dtype=np.int64) * 101 % runner.geometry.vocab_size
    output: StepOutput | None = None
    for rows, count in cut:
        batch = rows_of(runner, rows, count, at + count)
        own = np.tile(tokens[at : at + count], rows)
        own[count:] = (own[count:] + 7) % runner.geometry.vocab_size
        output = runner.execute(sampled_with(replace(batch, token_ids=own), _SCORED))
        at += count
    assert output is not None and at == length
    _wait(runner)
    kept = runner.kv.blocks[: length // runner.block_size].clone()
    return kept.view(torch.int16 if kept.element_size() == 2 else torch.int32), output


def _wait(runner: ModelRunner) -> None:
    if runner.device.type == "cuda":  # steps run on a stream of their own, which waits for no other
        torch.cuda.synchronize(runner.device)
