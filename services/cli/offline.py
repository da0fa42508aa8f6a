"""Commands that need no running pipeline: simulations, comparisons, figures, replays, benchmarks.

Each fronts a program of `services/simulator/` or `services/bench/`, and loads it when it is called: `cohort --help`
stays fast.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from typing import Any


def front(name: str, summary: str) -> Simulated | Measured:
    match name:
        case "bench":
            return Measured()
        case "chaos":
            return Measured("chaos")
        case _:
            return Simulated(name, summary)


class Simulated:
    """Of `services.simulator`: `add_NAME_arguments`, `NAME_EPILOG` if there is one, and `run_NAME`."""

    def __init__(self, name: str, summary: str) -> None:
        self._name, self._summary = name, summary

    def add_parser(self, subparsers: Any) -> None:
        from cohort.services.simulator import options

        parser = subparsers.add_parser(
            self._name,
            help=self._summary,
            epilog=getattr(options, f"{self._name.upper()}_EPILOG", None),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        getattr(options, f"add_{self._name}_arguments")(parser)

    def run(self, options: argparse.Namespace) -> int:
        work = getattr(import_module("cohort.services.simulator.__main__"), f"run_{self._name}")
        if getattr(options, "live", False):  # `cohort compare --live`: pipelines run what the simulator would
            from cohort.services.bench.live.measured import measure

            work = partial(work, live=partial(measure, port=options.port))
        code: int = work(options)
        return code


class Measured:
    """Of `services.bench`, which has commands of its own: `first` and the words of the command line."""

    def __init__(self, *first: str) -> None:
        self._first = first

    def main(self, words: Sequence[str]) -> int:
        from cohort.services.bench.__main__ import main

        return main([*self._first, *words])
