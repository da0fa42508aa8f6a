"""`cohort serve`: the launcher behind the common command. Imports it only when it runs."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from cohort.services.launcher.options import EPILOG, add_arguments


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "serve",
        help="start a whole pipeline on this machine",
        description="Serve a language model: start all processes of a pipeline on this machine and watch over them.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_arguments(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    from cohort.services.launcher.main import run as serve

    # --detach starts the launcher again with the same options, whatever stood before `serve`.
    arguments = sys.argv[1:]
    after = arguments[arguments.index("serve") + 1 :] if "serve" in arguments else arguments
    return serve(options, after)
