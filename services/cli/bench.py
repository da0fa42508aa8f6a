"""`cohort bench`: adds the benchmark's options to the command line and hands over to `services.bench`.

The benchmark itself is imported only when it runs, so that `cohort --help` stays fast.
"""

from __future__ import annotations

import argparse
from typing import Any

from cohort.services.bench.options import add_arguments


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    add_arguments(subparsers.add_parser("bench", help="measure a server: throughput, latency, SLO, capacity"))


def run(args: argparse.Namespace) -> int:
    from cohort.services.bench.__main__ import execute

    return execute(args)
