"""`cohort bench decisions WHICH`: the cost of one decision, by the policy that makes it."""

from __future__ import annotations

import argparse

from cohort.services.bench.decisions import iteration_scheduling, placement, scheduling, width


def add_arguments(parser: argparse.ArgumentParser) -> None:
    which = parser.add_subparsers(dest="which", metavar="WHICH", required=True)
    for name, module, summary in (
        ("prefill-order", scheduling, "a request's way through the manager's prefill order"),
        ("placement", placement, "placing a request on instances with so much queued"),
        ("width", width, "a whole manager with many workers and many requests"),
        ("iteration", iteration_scheduling, "deciding a worker's iteration"),
    ):
        one = which.add_parser(name, help=summary, description=module.__doc__)
        one.formatter_class = argparse.RawDescriptionHelpFormatter
        module.add_arguments(one)
        one.add_argument("--json", action="store_true", help="a list of objects instead of the table")
        one.set_defaults(execute=module.execute)


def run(args: argparse.Namespace) -> int:
    """Run the chosen one. Raises `CohortError`."""
    code: int = args.execute(args)
    return code
