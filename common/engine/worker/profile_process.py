"""The worker side of `cohort profile`: load the model as a worker would, time steps, write the points as JSON.

    python -m cohort.common.engine.worker.profile_process --config FILE --threads N --repeats N --model-name NAME \\
        --output FILE

A process of its own because the command line never loads torch. Serves nothing; decides nothing.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch

from cohort.common import paths
from cohort.common.config import load_config
from cohort.common.engine.config.model_shape import ShapeFields, model_shape
from cohort.common.engine.config.quantization_config import keeps_codes, mxfp4_codes
from cohort.common.engine.runner.model_runner import ModelRunner
from cohort.common.engine.worker.profiler import StepPoint, StepShape, default_shapes, measure
from cohort.common.engine.worker.worker_process import load_runner
from cohort.common.errors import CohortError


class Profile(msgspec.Struct, frozen=True, omit_defaults=True):
    """Measured times and their device. `model` is the name of the shape in configs/models that a fit uses;
    `model_shape` the same as measured, in the fields of such a file; `model_folder` where it was loaded from.
    `memory_bytes`: of the device; `units`: what runs work units of attention at a time, multiprocessors or threads."""

    model: str
    machine: str
    device: str
    dtype: str
    threads: int
    points: list[StepPoint]
    model_folder: str = ""
    model_shape: ShapeFields = {}
    memory_bytes: int = 0
    units: int = 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="profile_process")
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--repeats", type=int, required=True)
    parser.add_argument("--max-context", type=int, required=True)
    parser.add_argument("--budget", type=float, default=float("inf"), metavar="S", help="no round begins after so long")
    parser.add_argument("--shapes", default="", metavar="JSON", help="these shapes alone, a list")
    parser.add_argument("--model-name", required=True)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args(arguments)
    try:
        config = load_config([options.config])
        runner = load_runner(config, options.threads)
        longest = min(options.max_context, runner.geometry.max_positions)
        shapes = (
            msgspec.json.decode(options.shapes, type=list[StepShape])
            if options.shapes
            else default_shapes(longest, config.engine.max_rows, config.engine.max_step_tokens)
        )
        points = measure(runner, shapes, repeats=options.repeats, budget_s=options.budget)
    except CohortError as error:
        sys.stderr.write(f"cohort profile: {error}\n")
        return 2
    memory_bytes, units = _device(runner, options.threads)
    profile = Profile(
        options.model_name,
        platform.processor() or platform.machine(),
        str(runner.device),
        str(runner.dtype),
        options.threads,
        points,
        str(Path(config.model.path or paths.default_model_dir()).absolute()),
        _shape(options.model_name, runner),
        memory_bytes,
        units,
    )
    options.output.write_bytes(msgspec.json.format(msgspec.json.encode(profile), indent=1) + b"\n")
    return 0


def _shape(name: str, runner: ModelRunner) -> ShapeFields:
    coded = runner.geometry.family == "gpt_oss" and keeps_codes(runner.device.type, runner.dtype, mxfp4_codes())
    return model_shape(name, runner.geometry, runner.dtype, runner.kv_dtype, mxfp4=coded)


def _device(runner: ModelRunner, threads: int) -> tuple[int, int]:
    """Its memory, and what runs work units at a time."""
    if runner.device.type == "cuda":
        found = torch.cuda.get_device_properties(runner.device)
        return int(found.total_memory), int(found.multi_processor_count)
    pages = os.sysconf("SC_PHYS_PAGES") if "SC_PHYS_PAGES" in os.sysconf_names else 0
    return pages * os.sysconf("SC_PAGE_SIZE"), threads or os.cpu_count() or 1


if __name__ == "__main__":
    sys.exit(main())
