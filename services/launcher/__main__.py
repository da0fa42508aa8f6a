"""`python -m cohort.services.launcher`: the same as `cohort serve`."""

from __future__ import annotations

import sys

from cohort.common.command_line import Parser
from cohort.services.launcher.main import run
from cohort.services.launcher.options import DESCRIPTION, EPILOG, add_arguments


def main() -> int:
    parser = Parser(prog="cohort serve", description=DESCRIPTION, epilog=EPILOG)
    add_arguments(parser)
    arguments = sys.argv[1:]
    return run(parser.parse_args(arguments), arguments)


if __name__ == "__main__":
    sys.exit(main())
