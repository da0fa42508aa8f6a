"""A head that drafts from the model's states: its recorded steps beside its plain forward, and what they cost.

Its weights are random, so its drafts are never right; that they are the head's is what is compared. The last of a
section: the model's steps are recorded anew, and keep their states from then on. Called by `model`.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Sequence
from functools import partial

import numpy as np

from cohort.common.config import load_config
from cohort.common.engine.drafts.batch_drafts import FILLED_AT_ONCE, DraftRow
from cohort.common.engine.drafts.states_drafter import StatesDrafter
from cohort.common.engine.drafts.token_chain import TokenChain
from cohort.common.engine.runner.draft_loading import load_draft, plan_draft
from cohort.common.engine.runner.model_runner import ModelRunner
from cohort.common.engine.step.batch import GREEDY
from cohort.services.bench.gpu_check.engine import decode
from cohort.services.bench.gpu_check.frame.batches import rows_of, with_tokens
from cohort.services.bench.gpu_check.frame.context import Check

_DRAFTS = 4
_EQUAL = 0.97
"""Of the drafts: products choose their tiles by the number of rows, so two candidates that nearly tie may change."""
_GRAPHS = 1 << 30


def run(check: Check, runner: ModelRunner, model: str) -> None:
    check.guard.item(f"{model}: a head that drafts", partial(_measure, check, runner, model), 30)


def _measure(check: Check, runner: ModelRunner, model: str) -> None:
    rows, context = (8, 1000) if check.real else (2, 21)  # the drafts lie in blocks that the rows have anyway
    alone = rows_of(runner, 1, 1, context)
    without_s = decode.recorded_s(check, runner, alone)
    drafter = _head(check, runner, model)
    runner.drafter = drafter
    runner.warm_up(classes=decode.classes(check)[:2])
    with_s = decode.recorded_s(check, runner, alone)
    if without_s is not None and with_s is not None:
        ratio, note = with_s / without_s, f"{with_s * 1e3:.3f} ms and {without_s * 1e3:.3f} ms"
        check.found.measured(f"{model} decode, states kept", ratio, "x one without", note=note)
    asked = _rows(runner, rows, context)
    recorded = _drafts(drafter, asked, rows * context)
    several = [drafter.propose_all(asked).seconds for _ in range(20 if check.real else 3)]
    steps, drafter._steps = drafter._steps, None
    drafter._computed[:] = 0
    plain = _drafts(drafter, asked, rows * context)
    drafter._steps = steps
    pairs = [pair for one, other in zip(recorded, plain, strict=True) for pair in zip(one, other, strict=True)]
    equal = sum(one == other for one, other in pairs) / max(1, len(pairs))
    name = f"{model}, a head's drafts of {rows} rows"
    check.found.checked(
        f"{name}: recorded and plain",
        len(pairs) == rows * _DRAFTS and equal >= (_EQUAL if check.real else 1.0),
        f"{equal:.1%} of {len(pairs)}",
    )
    note = "" if steps is None else f"recorded for {list(steps.decode.classes)} rows"
    check.found.measured(f"{name}: one of each", statistics.median(several) / _DRAFTS * 1e3, "ms", note=note)


def _head(check: Check, runner: ModelRunner, model: str) -> StatesDrafter:
    """Of the model's shape, with random weights."""
    folder = check.folder / f"{model}-head"
    folder.mkdir(parents=True, exist_ok=True)
    shape = {**check.shape(model), "architectures": ["LlamaForCausalLMEagle"], "num_hidden_layers": 1}
    (folder / "config.json").write_text(json.dumps(shape), encoding="utf-8")
    config = load_config(overrides={"speculation": {"mode": "model", "draft_model": str(folder)}})
    plan = plan_draft(config, folder, runner.geometry, dtype=runner.dtype, device=runner.device, degree=1)
    assert plan is not None
    plan = dataclasses.replace(plan, block_size=runner.block_size, graph_bytes=_GRAPHS)
    drafter = load_draft(plan, config, runner, "random")
    assert isinstance(drafter, StatesDrafter)
    return drafter


def _rows(runner: ModelRunner, rows: int, context: int) -> list[DraftRow]:
    """Computed by the model, with the token that each says next."""
    batch = with_tokens(rows_of(runner, rows, context, context), runner.geometry.vocab_size)
    batch = dataclasses.replace(batch, numbers=np.arange(1, rows + 1, dtype=np.int64))
    asked = []
    for row, said in enumerate(runner.execute(batch).tokens.tolist()):
        chain = TokenChain("")
        chain.grow([*batch.token_ids[row * context : (row + 1) * context].tolist(), said])
        asked.append(DraftRow(chain, batch.block_tables[row].tolist(), None, (GREEDY,) * _DRAFTS, row + 1))
    return asked


def _drafts(drafter: StatesDrafter, asked: Sequence[DraftRow], lacking: int) -> list[list[int]]:
    """Once what the head lacks is computed, so much at a time."""
    for _ in range(lacking // FILLED_AT_ONCE + len(asked)):
        found = drafter.propose_all(asked).tokens
        if all(found):
            break
    return found
