"""The worker side of `cohort profile`: load the model as a worker would, time steps, write the points as JSON.

    python -m cohort.common.engine.profile_process --config FILE --threads N --repeats N --model-name NAME --output FILE

A process of its own because the command line never loads torch. Serves nothing; decides nothing.
"""

from __future__ import annotations

import argparse
import platform
import sys
from pathlib import Path

import msgspec

from cohort.common.config import load_config
from cohort.common.engine.profiler import StepPoint, default_shapes, measure
from cohort.common.engine.worker_process import load_runner
from cohort.common.errors import CohortError


class Profile(msgspec.Struct, frozen=True):
    """Measured times and their device. `model` is the name of the shape in configs/models that a fit uses."""

    model: str
    machine: str
    device: str
    dtype: str
    threads: int
    points: list[StepPoint]


def main() -> int:
    parser = argparse.ArgumentParser(prog="profile_process")
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--repeats", type=int, required=True)
    parser.add_argument("--max-context", type=int, required=True)
    parser.add_argument("--model-name", required=True)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    try:
        config = load_config([options.config])
        runner = load_runner(config, options.threads)
        longest = min(options.max_context, runner.geometry.max_positions)
        shapes = default_shapes(longest, config.engine.max_rows, config.engine.max_step_tokens)
        points = measure(runner, shapes, repeats=options.repeats)
    except CohortError as error:
        sys.stderr.write(f"cohort profile: {error}\n")
        return 2
    profile = Profile(
        options.model_name,
        platform.processor() or platform.machine(),
        str(runner.device),
        str(runner.dtype),
        options.threads,
        points,
    )
    options.output.write_bytes(msgspec.json.format(msgspec.json.encode(profile), indent=1) + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
