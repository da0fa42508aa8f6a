"""`cohort serve`: the launcher behind the common command. Imports it only when it runs."""

from __future__ import annotations

import argparse
import sys

from cohort.services.launcher.options import DESCRIPTION, EPILOG, add_arguments

__all__ = ["DESCRIPTION", "EPILOG", "add_arguments", "run"]


def run(options: argparse.Namespace) -> int:
    from cohort.services.launcher.main import run as serve

    # --detach starts the launcher again with the same options, whatever stood before `serve`.
    arguments = sys.argv[1:]
    after = arguments[arguments.index("serve") + 1 :] if "serve" in arguments else arguments
    return serve(options, after)
