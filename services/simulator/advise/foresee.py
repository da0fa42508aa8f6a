"""The process that simulates for the planner: `python -m cohort.services.simulator.advise.foresee --config FILE`.

    global monitor ──Job, a JSON line──▶ stdin ─▶ foresight.foresee ─▶ stdout ──Answer, a JSON line──▶ global monitor

It takes the lowest priority that still computes: nice 19 and SCHED_BATCH, whose weight is a sixtieth of an ordinary
process's, so that a box whose cores are all taken still plans. SCHED_IDLE, a three-hundredth, would not get the share
that the budget allows just where workers are missing. It tells the processor time that each answer took, its own start
included, and ends when its input ends.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import msgspec

from cohort.common.config import Config, load_config
from cohort.common.engine.config.model_config import read_geometry
from cohort.common.planning.simulation_jobs import Answer, Job
from cohort.common.policies.cost_model import ModelShape
from cohort.common.types import KvGeometry
from cohort.services.simulator.advise.candidate_shapes import foresee, model_of

_NICEST = 19


def main() -> int:
    lower_priority()
    parser = argparse.ArgumentParser(prog="foresee")
    parser.add_argument("--config", type=Path, required=True)
    options = parser.parse_args()
    spent_s = 0.0
    for line in sys.stdin.buffer:
        answer = _answer(line, options.config)
        now_s = time.process_time()
        sys.stdout.buffer.write(msgspec.json.encode(msgspec.structs.replace(answer, cpu_s=now_s - spent_s)) + b"\n")
        sys.stdout.buffer.flush()
        spent_s = now_s
    return 0


def lower_priority() -> None:
    os.nice(_NICEST)
    if hasattr(os, "SCHED_BATCH"):
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def _answer(line: bytes, config_file: Path) -> Answer:
    job = msgspec.json.decode(line, type=Job)
    try:
        config = load_config([config_file])
        cost = next(iter(job.costs.values()))
        return Answer(job.round, tuple(foresee(job, config, served_model(config, cost.kv_element_bytes))), 0.0)
    except Exception as error:  # a defect costs a round; the process goes on
        return Answer(job.round, (), 0.0, failure=f"{type(error).__name__}: {error}")


def served_model(config: Config, kv_element_bytes: int) -> ModelShape:
    """Return sizes of the KV of the pipeline's model, from its config.json."""
    model = read_geometry(Path(config.model.path), config.model.quantization)
    width = model.head_dim // (1 if model.latent is None else 2)  # a latent is key and value in one
    geometry = KvGeometry(model.num_layers, model.num_kv_heads, width, kv_element_bytes, config.kv.block_size)
    shape = model_of(geometry, Path(config.model.path).name, config.model.max_model_len or model.max_positions)
    windows = model.sliding_windows
    return replace(shape, window=max(windows, default=0), full_layers=windows.count(0) if any(windows) else 0)


if __name__ == "__main__":
    sys.exit(main())
