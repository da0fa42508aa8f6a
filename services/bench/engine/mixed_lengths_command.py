"""`cohort bench mixed-lengths`: AlignedServe's motivating measurements on this machine's engine (A1, §2.3 and §2.4).

Two tables: the decode step of short rows alone and with a few long ones among them; as many prompts of each of several
lengths in batches of one length, and mixed. Beside each time the KV it reads: a step that costs no more than its share
of positions has no bubble.
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from cohort.common.devices.cores import usable_cores
from cohort.services.bench.output import markdown_table

if TYPE_CHECKING:
    from cohort.services.bench.engine.inside.mixed_lengths import Timed


def table(found: list[Timed]) -> str:
    rows = [
        [
            each.name,
            str(each.rows),
            str(each.context),
            f"{1e3 * each.step_s:.2f}",
            f"{1e9 * each.step_s / each.context:.0f}",
        ]
        for each in found
    ]
    return markdown_table(["batch"], ["rows", "KV positions", "step, ms", "ns a position"], rows)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = __doc__
    parser.add_argument("--preset", default="cohort", help="whose engine options")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--short", type=int, default=32, help="prefix of a short row, tokens")
    parser.add_argument("--long", type=int, default=4096, help="prefix of a long row, tokens")
    parser.add_argument("--lengths", type=int, default=8, help="how many lengths; as many prompts of each")
    parser.add_argument("--longest", type=int, default=2048, help="the longest of them, tokens")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=0, help="0 = as a worker of the preset")
    parser.add_argument("--memory-bytes", type=int, default=1 << 30, help="of the cache measured over")


def run(args: argparse.Namespace) -> int:
    """Run the command with parsed options; load the model in this process. Raises `CohortError`."""
    from cohort.common.config import load_config
    from cohort.common.engine.worker.worker_process import load_runner
    from cohort.services.bench.engine.inside.mixed_lengths import (
        aligned_and_mixed,
        few_long_among_short,
        measure,
        mixed_over_aligned,
    )

    overrides = {"engine": {"device": "cpu"}, "kv": {"memory_bytes": args.memory_bytes, "host_memory_bytes": 0}}
    config = load_config(preset=args.preset, overrides=overrides)
    cores = usable_cores()
    runner = load_runner(config, args.threads or config.default_threads(cores))
    runner.warm_up()
    few = measure(runner, few_long_among_short(args.rows, args.short, args.long), args.rounds)
    step = max(1, (args.longest - args.short) // max(1, args.lengths - 1))
    lengths = [args.short + step * index for index in range(args.lengths)]
    both = measure(runner, aligned_and_mixed(lengths), args.rounds)
    sys.stdout.write(f"{table(few)}\n{table(both)}\n")
    if len(both) == len(lengths) + 1:
        sys.stdout.write(f"mixed over aligned, same rows in as many steps: {mixed_over_aligned(both):.3f}\n")
    else:
        sys.stdout.write("the cache is too small for all lengths: raise --memory-bytes or lower --longest\n")
    return 0
