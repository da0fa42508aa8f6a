"""`cohort bench host-time`: the host's part of a decode step by rows: completed, planned, built, filled.

Once with every step decided after the one before it, and once planned ahead, while that one would run. Processor time
of the one thread that does it, in microseconds; no model is loaded.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from dataclasses import asdict

from cohort.services.bench.output import cells, markdown_table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = __doc__
    parser.add_argument("--preset", default="unified", help="whose policies")
    parser.add_argument("--rows", type=int, nargs="+", default=[16, 64, 256])
    parser.add_argument("--context", type=int, default=512, help="prompt tokens of every row")
    parser.add_argument("--steps", type=int, default=100, help="steps measured; their median is shown")
    parser.add_argument("--temperature", type=float, default=0.0, help="of every request; 0 = greedy")
    parser.add_argument("--json", action="store_true", help="a list of objects instead of the table")


def run(args: argparse.Namespace) -> int:
    """Run the command with parsed options. Raises `CohortError`."""
    from cohort.services.bench.engine.inside.host_time import measure

    with contextlib.redirect_stdout(sys.stderr):  # logs
        found = [
            measure(args.preset, rows, args.context, args.steps, ahead=ahead, temperature=args.temperature)
            for rows in args.rows
            for ahead in (False, True)
        ]
    if args.json:
        json.dump([asdict(each) for each in found], sys.stdout, indent=1)
        return 0
    columns = {
        "rows": "{0.rows}",
        "planned": "{0.planned}",
        "completed, µs": "{0.completed_us:.0f}",
        "planned, µs": "{0.planned_us:.0f}",
        "built, µs": "{0.built_us:.0f}",
        "filled, µs": "{0.filled_us:.0f}",
        "together, µs": "{0.whole_us:.0f}",
    }
    labels, numbers = list(columns)[:2], list(columns)[2:]
    sys.stdout.write(markdown_table(labels, numbers, cells(found, columns)) + "\n")
    return 0
