"""What the fronts of the simulator's commands share: a name, options, and a function that is imported when it runs.

`cohort --help` stays fast that way. Used by `simulate`, `advise`, `compare`, `reproduce` and `replay`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from importlib import import_module
from typing import Any

Add = Callable[["argparse._SubParsersAction[Any]"], None]
Run = Callable[[argparse.Namespace], int]


def simulator_front(
    name: str, summary: str, add_arguments: Callable[[argparse.ArgumentParser], None], epilog: str = ""
) -> tuple[Add, Run]:
    """`add_parser` and `run` of a command whose work is `run_NAME` of `services.simulator`."""

    def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
        parser = subparsers.add_parser(
            name, help=summary, epilog=epilog or None, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        add_arguments(parser)

    def run(options: argparse.Namespace) -> int:
        module = import_module("cohort.services.simulator.__main__")
        code: int = getattr(module, f"run_{name}")(options)
        return code

    return add_parser, run
