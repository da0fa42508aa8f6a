"""`cohort bench in-process`: the engine without the pipeline, in a closed loop. Prints one JSON object."""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", type=Path, action="append", default=[], help="configuration file, repeatable")
    parser.add_argument("--preset", default="", help="a preset of configs/presets")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0 = all cores")
    parser.add_argument("--concurrency", type=int, default=1, help="requests at a time")
    parser.add_argument("--requests", type=int, default=16, help="requests in all, after one warm-up request")
    parser.add_argument("--input-len", type=int, default=64, help="prompt tokens")
    parser.add_argument("--output-len", type=int, default=64, help="output tokens")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts")


def run(args: argparse.Namespace) -> int:
    """Loads the model in this process. Raises `CohortError`."""
    from cohort.common.config import load_config
    from cohort.common.engine.worker.worker_process import load_runner
    from cohort.services.bench.engine.inside.in_process import closed_loop

    config = load_config(args.config, preset=args.preset)
    runner = load_runner(config, args.threads or len(os.sched_getaffinity(0)))
    runner.warm_up()
    shape = {"prompt_tokens": args.input_len, "output_tokens": args.output_len}
    closed_loop(config, runner, concurrency=1, requests=1, seed=args.seed + 1, **shape)
    measured = closed_loop(
        config, runner, concurrency=args.concurrency, requests=args.requests, seed=args.seed, **shape
    )
    json.dump(asdict(measured), sys.stdout, indent=2)
    sys.stdout.write("\n")
    return 0
