"""Sampling of a whole batch on the device: what it takes, and whether it samples the processor's tokens.

The one place here that calls the samplers. Called by the sections `smoke` (tokens) and `model` (time).
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from cohort.common.engine.config.model_config import ModelGeometry
from cohort.common.engine.device.uploads import Uploads
from cohort.common.engine.step import sampler
from cohort.common.engine.step.batch import GREEDY, SamplingRow
from cohort.common.engine.step.device_sampler import SampledOnDevice, sample_on_device
from cohort.common.sampling_inputs import TokenHistory
from cohort.services.bench.gpu_check.frame import rates
from cohort.services.bench.gpu_check.frame.context import Check
from cohort.services.bench.gpu_check.frame.predictions import Facts, expect

KINDS: dict[str, SamplingRow] = {
    "greedy": GREEDY,
    "temperature 0.8": SamplingRow(seed=5, position=0, temperature=0.8),
    "temperature 0.8, top-p 0.95": SamplingRow(seed=5, position=0, temperature=0.8, top_p=0.95),
    "temperature 0.8, top-k 40": SamplingRow(seed=5, position=0, temperature=0.8, top_k=40),
    "penalties": SamplingRow(
        seed=5, position=0, temperature=0.8, repetition_penalty=1.1, presence_penalty=0.3, frequency_penalty=0.2
    ),
}


INSTRUCTIONS = {
    "greedy": 10,
    "temperature 0.8": 72,
    "temperature 0.8, top-p 0.95": 153,
    "temperature 0.8, top-k 40": 130,
    "penalties": 72,
}
"""Per logit, of rows as `logits_of` makes them: the table of docs/benchmarks-gpu-kernels.md."""


class OnDevice:
    """The batch sampler with its inputs' memory."""

    def __init__(self, device: torch.device) -> None:
        self._uploads = Uploads(device)

    def launch(self, logits: Tensor, rows: Sequence[SamplingRow]) -> SampledOnDevice:
        """Everything is launched; nothing is awaited."""
        self._uploads.restart()
        return sample_on_device(logits, rows, self._uploads)

    def tokens(self, logits: Tensor, rows: Sequence[SamplingRow]) -> list[int]:
        sampled = self.launch(logits, rows)
        if logits.is_cuda:
            torch.cuda.synchronize(logits.device)
        found: list[int] = sampled.output().tokens.tolist()
        return found


def on_processor(logits: Tensor, rows: Sequence[SamplingRow]) -> list[int]:
    """The row sampler's tokens, which define what is right."""
    found: list[int] = sampler.sample(logits.cpu(), rows).tokens.tolist()
    return found


def rows_of(kind: SamplingRow, count: int, vocabulary: int) -> list[SamplingRow]:
    """Rows with seeds and places of their own; those with penalties look back on 500 tokens."""
    draw = random.Random(9)
    rows = []
    for index in range(count):
        history = None
        if kind.repetition_penalty != 1.0:
            tokens = [draw.randrange(vocabulary) for _ in range(500)]
            history = TokenHistory(tokens[:400], tokens[400:])
        rows.append(replace(kind, seed=kind.seed + index, position=17 + index, history=history))
    return rows


def logits_of(check: Check, count: int, vocabulary: int) -> Tensor:
    """Random, as far apart as a model's: a few likely tokens, a long tail."""
    return torch.randn(count, vocabulary, device=check.device) * 4.0


def run(check: Check, geometry: ModelGeometry) -> None:
    for count in (1, 64, 256) if check.real else (1, 3):
        for name, kind in KINDS.items():
            label = f"sampling, {count} rows, {name}"
            facts = Facts(
                check.ceilings(),
                geometry,
                rows=count,
                instructions=INSTRUCTIONS[name],
                penalised=kind.repetition_penalty != 1.0,
            )
            check.guard.item(label, partial(_time, check, facts, label, kind), 6)


def _time(check: Check, facts: Facts, label: str, kind: SamplingRow) -> None:
    count, vocabulary = facts.rows, facts.model.vocab_size
    rows, logits, device = rows_of(kind, count, vocabulary), logits_of(check, count, vocabulary), OnDevice(check.device)
    repeats = 10 if check.real else 2

    def call() -> object:
        return device.launch(logits, rows)

    on_device_s = rates.seconds(call, check.device, repeats=repeats)
    host = []
    for _ in range(repeats):
        if check.device.type == "cuda":
            torch.cuda.synchronize(check.device)
        started = time.perf_counter()
        call()
        host.append(time.perf_counter() - started)
    check.found.measured(
        label,
        on_device_s * 1e3,
        "ms",
        expect=expect("sampler", facts),
        note=f"the host launches for {statistics.median(host) * 1e3:.2f} ms",
    )
