"""`cohort replay`: adds its options to the command line and hands over to `services.simulator`.

The policies are imported only when it runs, so that `cohort --help` stays fast.
"""

from __future__ import annotations

import argparse
from typing import Any

from cohort.services.simulator import options as options_

EPILOG = """\
Every file is fed to a fresh machine with the same policies, which must answer as the live process did: prints what was
compared and the first difference with its line. Exit status 1 if anything differs.

examples:
  cohort serve --set recording.folder=/tmp/run
  cohort replay /tmp/run/*.jsonl
  cohort replay /tmp/run/manager-*.jsonl --show 120"""


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    parser = subparsers.add_parser(
        "replay",
        help="check or step through what live processes recorded",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    options_.add_replay_arguments(parser)


def run(args: argparse.Namespace) -> int:
    from cohort.services.simulator.__main__ import run_replay

    return run_replay(args)
