"""`cohort bench mixed-iterations`: what a prompt chunk costs beside decode rows, against both alone, on this engine.

One table: each chunk beside each number of decode rows at each context. `--json` writes all measured points in the form
of `cohort profile`, for `cohort bench fit cost-model profile` and for `engine.profile`.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = __doc__
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--model", metavar="FOLDER", help="in Hugging Face format (default: the default model)")
    parser.add_argument("--model-name", default="smollm2-135m", help="the shape in configs/models, for a fit")
    parser.add_argument("--chunks", type=int, nargs="+", default=[16, 64, 256, 512], help="prompt tokens")
    parser.add_argument("--decodes", type=int, nargs="+", default=[1, 4, 16], help="rows beside them")
    parser.add_argument("--contexts", type=int, nargs="+", default=[128, 1024], help="of a decode row")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=0, help="0 = as a worker of the default preset")
    parser.add_argument("--memory-bytes", type=int, default=1 << 30, help="of the cache measured over")
    parser.add_argument("--json", metavar="FILE", help="write the points")


def run(args: argparse.Namespace) -> int:
    """Loads the model in this process. Raises `CohortError`."""
    from cohort.common.config import load_config
    from cohort.common.engine.worker.worker_process import load_runner
    from cohort.services.bench.engine.inside.mixed_iterations import measure, profile, shapes, table

    overrides = {"engine": {"device": "cpu"}, "kv": {"memory_bytes": args.memory_bytes, "host_memory_bytes": 0}}
    if args.model:
        overrides["model"] = {"path": args.model}
    config = load_config(overrides=overrides)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = args.threads or config.default_threads(cores)
    runner = load_runner(config, threads)
    runner.warm_up()
    points = measure(runner, shapes(args.chunks, args.decodes, args.contexts), args.rounds)
    sys.stdout.write(f"{table(points)}\n")
    if args.json:
        Path(args.json).write_bytes(profile(runner, args.model_name, threads, points))
    return 0
