"""`cohort simulate`: adds the simulator's options to the command line and hands over to `services.simulator`.

The simulator itself is imported only when it runs, so that `cohort --help` stays fast.
"""

from __future__ import annotations

import argparse
from typing import Any

from cohort.services.simulator import options as options_


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    parser = subparsers.add_parser(
        "simulate",
        help="replay traffic on a cluster that need not exist",
        epilog=options_.SIMULATE_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    options_.add_simulate_arguments(parser)


def run(args: argparse.Namespace) -> int:
    from cohort.services.simulator.__main__ import run_simulate

    return run_simulate(args)
