"""`cohort compare`: adds its options to the command line and hands over to `services.simulator`.

The simulator itself is imported only when it runs, so that `cohort --help` stays fast.
"""

from __future__ import annotations

import argparse
from typing import Any

from cohort.services.simulator import options as options_


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    parser = subparsers.add_parser(
        "compare",
        help="systems side by side over workloads, loads and seeds, simulated",
        epilog=options_.COMPARE_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    options_.add_compare_arguments(parser)


def run(args: argparse.Namespace) -> int:
    from cohort.services.simulator.__main__ import run_compare

    return run_compare(args)
