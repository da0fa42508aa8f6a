"""AlignedServe's motivating measurements on this machine's engine (A1, §2.3 and §2.4).

    python -m cohort.services.prefill_worker.mixed_lengths [--preset NAME] [--rows 16] [--long 4096] [--lengths 8]

Two tables: the decode step of short rows alone and with a few long ones among them; as many prompts of each of several
lengths in batches of one length, and mixed. Beside each time the KV it reads: a step that costs no more than its share
of positions has no bubble. Serves nothing.
"""

from __future__ import annotations

import argparse
import os
import sys

from cohort.common.config import load_config
from cohort.common.engine.bench.mixed_lengths import (
    Timed,
    aligned_and_mixed,
    few_long_among_short,
    measure,
    mixed_over_aligned,
)
from cohort.common.engine.worker_process import load_runner
from cohort.common.errors import CohortError


def table(found: list[Timed]) -> str:
    lines = ["| batch | rows | KV positions | step, ms | ns a position |", "|---|---:|---:|---:|---:|"]
    for each in found:
        step_ms, position_ns = 1e3 * each.step_s, 1e9 * each.step_s / each.context
        lines.append(f"| {each.name} | {each.rows} | {each.context} | {step_ms:.2f} | {position_ns:.0f} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="cohort", help="whose engine options")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--short", type=int, default=32, help="prefix of a short row, tokens")
    parser.add_argument("--long", type=int, default=4096, help="prefix of a long row, tokens")
    parser.add_argument("--lengths", type=int, default=8, help="how many lengths; as many prompts of each")
    parser.add_argument("--longest", type=int, default=2048, help="the longest of them, tokens")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=0, help="0 = as a worker of the preset")
    parser.add_argument("--memory-bytes", type=int, default=1 << 30, help="of the cache measured over")
    options = parser.parse_args()
    try:
        overrides = {"engine": {"device": "cpu"}, "kv": {"memory_bytes": options.memory_bytes, "host_memory_bytes": 0}}
        config = load_config(preset=options.preset, overrides=overrides)
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        runner = load_runner(config, options.threads or config.default_threads(cores))
        runner.warm_up()
    except CohortError as error:
        sys.stderr.write(f"mixed_lengths: {error}\n")
        return 2
    few = measure(runner, few_long_among_short(options.rows, options.short, options.long), options.rounds)
    step = max(1, (options.longest - options.short) // max(1, options.lengths - 1))
    lengths = [options.short + step * index for index in range(options.lengths)]
    both = measure(runner, aligned_and_mixed(lengths), options.rounds)
    sys.stdout.write(f"{table(few)}\n{table(both)}\n")
    if len(both) == len(lengths) + 1:
        sys.stdout.write(f"mixed over aligned, same rows in as many steps: {mixed_over_aligned(both):.3f}\n")
    else:
        sys.stdout.write("the cache is too small for all lengths: raise --memory-bytes or lower --longest\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
