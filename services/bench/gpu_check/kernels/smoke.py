"""Section: a Llama of two layers, to see in half a minute whether the path works at all.

Recorded steps against steps kernel by kernel, bit for bit, of one device and of a rank of a group; the device's sampler
against the processor's; flash prefill against the reference, and a prompt in one step against the same prompt token by
token.

NCCL takes one rank a GPU, and there may be only one: that group has one rank. What it exchanges goes nowhere, so no
kernel of NCCL's waits; all else is as in a larger one: the communicator, calls of it in a recording, replays between
launches, the end.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from cohort.common.engine.config.device_memory import DeviceShare
from cohort.common.engine.ranks.ranks import RankGroup
from cohort.common.engine.runner.model_runner import ModelRunner
from cohort.common.engine.step.batch import SamplingRow, StepBatch, StepOutput
from cohort.services.bench.gpu_check.frame.batches import rows_of, sampled_with, with_tokens
from cohort.services.bench.gpu_check.frame.cases import Heads
from cohort.services.bench.gpu_check.frame.context import Check
from cohort.services.bench.gpu_check.frame.shapes import LLAMA_3_8B, TINY
from cohort.services.bench.gpu_check.kernels import kernels, sampling

_TOP = 20
_CLOSE = 2e-2
_SCORED = SamplingRow(seed=0, position=0, temperature=0.0, logprobs=_TOP)


def run(check: Check) -> None:
    runner = check.guard.item("load two layers", lambda: _load(check), 20)
    if runner is not None:
        _recorded(check, runner)
        check.guard.item("prefill = decode", lambda: _prefill_is_decode(check, runner), 15)
    place = RankGroup(0, 1, str(check.folder / "ranks"), lambda: None)
    rank = check.guard.item("load a rank", lambda: _load(check, place), 20)
    if rank is not None:
        _recorded(check, rank, "a rank: ")
        check.guard.item("a rank: end", lambda: _end(rank), 10)
    for name, kind in sampling.KINDS.items():
        check.guard.item(f"sampler: {name}", partial(_sampled, check, name, kind), 10)
    check.guard.item("flash prefill", lambda: _flash(check), 15)


def _load(check: Check, group: RankGroup | None = None) -> ModelRunner:
    wide: dict[str, Any] = {
        **LLAMA_3_8B,
        "num_hidden_layers": 2,
        "vocab_size": 32000,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    config = wide if check.real else TINY
    share = DeviceShare(graphs=2 << 30, most_kv=1 << 30)
    rows = 64 if check.real else 8
    runner = check.runner("two-layers", config, max_rows=rows, share=share, max_step_tokens=512, group=group)
    steps = runner._device_steps
    check.found.checked(f"{'' if group is None else 'a rank '}runs as on a GPU", steps is not None)
    return runner


def _end(rank: ModelRunner) -> None:
    """NCCL waits for the end of everything that was recorded with it."""
    steps, ranks = rank._device_steps, rank.ranks
    assert steps is not None and ranks is not None
    steps.forget()
    ranks.close()


def _recorded(check: Check, runner: ModelRunner, of: str = "") -> None:
    """The same rows before anything is recorded, and after."""
    sizes = (1, 4, 16, 64) if check.real else (1, 4)
    batches = {rows: _varied(runner, rows) for rows in sizes}
    padded = _varied(runner, 3)
    eager = check.guard.item(f"{of}eager steps", lambda: {n: _fresh(runner, b) for n, b in batches.items()}, 30)
    eager_padded = check.guard.item(f"{of}an eager step of 3", lambda: _fresh(runner, padded), 5)
    check.guard.item(f"{of}record", lambda: runner.warm_up(classes=sizes), 25)
    steps = runner._device_steps
    classes = () if steps is None else steps.decode.classes
    check.found.checked(f"{of}recorded", set(sizes) <= set(classes), f"classes {list(classes)}")
    for rows, batch in batches.items():
        if eager is not None:
            name = f"{of}recorded = eager, {rows} rows"
            check.guard.item(name, partial(_compare, check, runner, name, batch, eager[rows], exact=True), 10)
    if eager_padded is not None:
        name = f"{of}recorded ~ eager, 3 rows padded to 4"
        check.guard.item(name, partial(_compare, check, runner, name, padded, eager_padded), 10)


def _varied(runner: ModelRunner, rows: int) -> StepBatch:
    return with_tokens(sampled_with(rows_of(runner, rows, 1, 40), _SCORED), runner.geometry.vocab_size)


def _fresh(runner: ModelRunner, batch: StepBatch) -> StepOutput:
    """Over the same cache content each time."""
    generator = torch.Generator(runner.kv.blocks.device).manual_seed(7)
    runner.kv.blocks.normal_(generator=generator)
    if runner.device.type == "cuda":  # steps run on a stream of their own, which waits for no other
        torch.cuda.synchronize(runner.device)
    return runner.execute(batch)


def _compare(
    check: Check, runner: ModelRunner, name: str, batch: StepBatch, expected: StepOutput, exact: bool = False
) -> None:
    """Exact: every bit of tokens and log-probabilities. A difference within rounding is then a miss, not a failure."""
    ours = _fresh(runner, batch)
    apart = _apart(ours, expected)
    note = f"log-probabilities at most {apart:.2g} apart"
    same = bool(np.array_equal(ours.tokens, expected.tokens)) and ours.logprobs == expected.logprobs
    if same:
        check.found.checked(name, True, "bit for bit")
    elif exact and apart < _CLOSE:
        check.found.said(name, note, "miss")
    else:
        check.found.checked(name, apart < _CLOSE, note)


def _apart(ours: StepOutput, theirs: StepOutput) -> float:
    """The largest difference between log-probabilities of tokens that both name; infinite where they name no common
    ones."""
    worst = 0.0
    for left, right in zip(ours.logprobs, theirs.logprobs, strict=True):
        if left is None or right is None:
            return float("inf")
        values = dict(zip(right.top_ids, right.top_logprobs, strict=True))
        common = [abs(v - values[i]) for i, v in zip(left.top_ids, left.top_logprobs, strict=True) if i in values]
        if len(common) < len(left.top_ids) // 2:
            return float("inf")
        worst = max(worst, *(each if each == each else float("inf") for each in common))
    return worst


def _prefill_is_decode(check: Check, runner: ModelRunner) -> None:
    """A prompt at once (flash attention in 16 bits) and token by token (the paged kernel, recorded): two ways to the
    same logits."""
    length = 40 if check.real else 12
    tokens = np.arange(3, 3 + length, dtype=np.int64) * 101 % runner.geometry.vocab_size
    whole = rows_of(runner, 1, length, length)
    at_once = runner.execute(sampled_with(_replaced(whole, tokens), _SCORED))
    by_token: StepOutput | None = None
    for place in range(length):
        batch = rows_of(runner, 1, 1, place + 1)
        by_token = runner.execute(sampled_with(_replaced(batch, tokens[place : place + 1]), _SCORED))
    assert by_token is not None
    apart = _apart(at_once, by_token)
    bound = 0.1 if check.real else 1e-3
    check.found.checked("a prompt at once = token by token", apart < bound, f"log-probabilities {apart:.2g} apart")


def _replaced(batch: StepBatch, tokens: np.ndarray) -> StepBatch:
    return replace(batch, token_ids=tokens)


def _sampled(check: Check, name: str, kind: SamplingRow) -> None:
    vocabulary = 32000 if check.real else 500
    torch.manual_seed(3)
    rows = sampling.rows_of(kind, 16, vocabulary)
    logits = sampling.logits_of(check, 16, vocabulary)
    ours, theirs = sampling.OnDevice(check.device).tokens(logits, rows), sampling.on_processor(logits, rows)
    wrong = sum(left != right for left, right in zip(ours, theirs, strict=True))
    check.found.checked(f"sampler: {name}", not wrong, f"{wrong} of {len(rows)} tokens differ from the processor's")


def _flash(check: Check) -> None:
    """Prompts, one of them behind a cached prefix, in the precision that is served."""
    heads = Heads(32, 8, 128) if check.real else Heads(4, 2, 16)
    contexts, queries = ([700, 300, 90], [300, 300, 90]) if check.real else ([40, 20], [10, 20])
    error = kernels.attention_error(check, heads, check.dtype, contexts, queries)
    served = "the processor's kernel"
    if check.device.type == "cuda":
        from cohort.kernels.gpu.attention.flash import prefill_attention_name

        served = prefill_attention_name()
    bound = 1e-2 if check.real else 1e-5
    check.found.checked("flash prefill = reference", error <= bound, f"relative error {error:.2g}; by {served}")
