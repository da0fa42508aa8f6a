"""The time of one prediction on this core, alone or while another process trains."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.synchronize import Event

import msgspec
import numpy as np

from cohort.common.errors import ConfigError
from cohort.services.bench.study.answers import Answer
from cohort.services.bench.study.judging import fit
from cohort.services.length_predictor.features import Facts, extract
from cohort.services.length_predictor.model import LengthModel, to_prediction
from cohort.services.length_predictor.trainer_process import NICENESS

_TRAINER_START_S = 300.0


class Latency(msgspec.Struct, frozen=True):
    """Of one prediction, features included, in milliseconds: by the clock and in processor time of this thread."""

    median_ms: float
    p99_ms: float
    cpu_p99_ms: float


def latency(model: LengthModel, rounds: int = 5000, prompt_tokens: int = 512) -> Latency:
    """One prediction after the other on this core, for prompts of `prompt_tokens`."""
    draw = np.random.default_rng(0)
    prompts = [draw.integers(0, 50_000, size=prompt_tokens).tolist() for _ in range(64)]
    wall, cpu = [], []
    for index in range(rounds):
        facts = Facts(prompts[index % len(prompts)], True, 1024, 1.0, 0, 4 * prompt_tokens)
        started, started_cpu = time.perf_counter(), time.thread_time()
        to_prediction(model.predict_log(extract(facts)), facts.max_tokens)
        cpu.append(1e3 * (time.thread_time() - started_cpu))
        wall.append(1e3 * (time.perf_counter() - started))
    return Latency(float(np.median(wall)), float(np.quantile(wall, 0.99)), float(np.quantile(cpu, 0.99)))


@contextmanager
def training_beside(answers: Sequence[Answer], wanted: bool) -> Iterator[None]:
    """Within, if wanted, another process trains over and over, at the priority the service gives it."""
    if not wanted:
        yield
        return
    spawn = multiprocessing.get_context("spawn")
    trains = spawn.Event()
    trainer = spawn.Process(target=_train_for_ever, args=(answers, trains), daemon=True)
    trainer.start()
    try:
        if not trains.wait(_TRAINER_START_S):
            raise ConfigError(f"no training began within {_TRAINER_START_S:.0f} s")
        yield
    finally:
        trainer.kill()
        trainer.join()


def _train_for_ever(answers: Sequence[Answer], trains: Event) -> None:
    os.nice(NICENESS)
    while True:
        fit(answers)
        trains.set()  # from the second on; the first also loads the libraries
