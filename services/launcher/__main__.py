"""`python -m cohort.services.launcher`: the same as `cohort serve`."""

from __future__ import annotations

import argparse
import sys

from cohort.services.launcher.main import run
from cohort.services.launcher.options import DESCRIPTION, EPILOG, add_arguments


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="cohort serve",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_arguments(parser)
    arguments = sys.argv[1:]
    return run(parser.parse_args(arguments), arguments)


if __name__ == "__main__":
    sys.exit(main())
