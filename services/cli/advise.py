"""`cohort advise`: adds the simulator's options to the command line and hands over to `services.simulator`.

The simulator itself is imported only when it runs, so that `cohort --help` stays fast.
"""

from __future__ import annotations

import argparse
from typing import Any

from cohort.services.simulator import options as options_


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    parser = subparsers.add_parser("advise", help="which preset suits this traffic and cluster")
    options_.add_advise_arguments(parser)


def run(args: argparse.Namespace) -> int:
    from cohort.services.simulator.__main__ import run_advise

    return run_advise(args)
