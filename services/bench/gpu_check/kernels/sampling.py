"""What sampling a whole batch on the device takes. Called by `model`.

That it samples the processor's tokens is shown by tests/kernels/gpu/sampling, with the same kinds of rows.
"""

from __future__ import annotations

import random
import statistics
import time
from dataclasses import replace
from functools import partial

import torch

from cohort.common.engine.device.uploads import Uploads
from cohort.common.engine.step.batch import GREEDY, SamplingRow
from cohort.common.engine.step.device_sampler import sample_on_device
from cohort.common.sampling_inputs import TokenHistory
from cohort.services.bench.gpu_check.frame import rates
from cohort.services.bench.gpu_check.frame.context import Check

KINDS: dict[str, SamplingRow] = {
    "greedy": GREEDY,
    "temperature 0.8": SamplingRow(seed=5, position=0, temperature=0.8),
    "temperature 0.8, top-p 0.95": SamplingRow(seed=5, position=0, temperature=0.8, top_p=0.95),
    "temperature 0.8, top-k 40": SamplingRow(seed=5, position=0, temperature=0.8, top_k=40),
    "penalties": SamplingRow(
        seed=5, position=0, temperature=0.8, repetition_penalty=1.1, presence_penalty=0.3, frequency_penalty=0.2
    ),
}


def rows_of(kind: SamplingRow, count: int, vocabulary: int) -> list[SamplingRow]:
    """Return rows with seeds and places of their own; those with penalties look back on 500 tokens."""
    draw = random.Random(9)
    rows = []
    for index in range(count):
        history = None
        if kind.repetition_penalty != 1.0:
            tokens = [draw.randrange(vocabulary) for _ in range(500)]
            history = TokenHistory(tokens[:400], tokens[400:])
        rows.append(replace(kind, seed=kind.seed + index, position=17 + index, history=history))
    return rows


def run(check: Check, vocabulary: int) -> None:
    for count in (1, 64, 256) if check.real else (1, 3):
        for name, kind in KINDS.items():
            label = f"sampling, {count} rows, {name}"
            check.guard.item(label, partial(_time, check, label, kind, count, vocabulary), 6)


def _time(check: Check, label: str, kind: SamplingRow, count: int, vocabulary: int) -> None:
    """Time rows whose logits are as far apart as a model's: a few likely tokens, a long tail."""
    rows, logits = rows_of(kind, count, vocabulary), torch.randn(count, vocabulary, device=check.device) * 4.0
    uploads, repeats = Uploads(check.device), 10 if check.real else 2

    def call() -> object:
        uploads.restart()
        return sample_on_device(logits, rows, uploads)

    on_device_s = rates.seconds(call, check.device, repeats=repeats)
    host = []
    for _ in range(repeats):
        if check.device.type == "cuda":
            torch.cuda.synchronize(check.device)
        started = time.perf_counter()
        call()
        host.append(time.perf_counter() - started)
    note = f"the host launches for {statistics.median(host) * 1e3:.2f} ms"
    check.found.measured(label, on_device_s * 1e3, "ms", note=note)
