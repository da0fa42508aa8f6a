"""`cohort bench soak`: `cohort chaos --minutes 10` of the preset with the most kinds of processes, and more clients."""

from __future__ import annotations

import argparse

from cohort.services.bench.chaos import command
from cohort.services.bench.chaos.command import run

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    command.add_arguments(parser)
    parser.set_defaults(minutes=10.0, preset=["disaggregated"], clients=12)
