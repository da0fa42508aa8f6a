"""`cohort bench kernels`: decode and prefill attention and the elementwise steps, against memory and plain torch."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--threads", type=int, default=0, help="torch threads (default: torch's own choice)")
    parser.add_argument("--rounds", type=int, default=7, help="more for a busy machine (default: %(default)s)")
    parser.add_argument("--attention", action="store_true", help="leave out the elementwise steps")


def run(args: argparse.Namespace) -> int:
    """Prints a line for every case; a minute on two idle cores. Raises `ConfigError`."""
    from cohort.services.bench.engine.inside.kernels import print_all

    print_all(args.threads, args.rounds, elementwise=not args.attention)
    return 0
