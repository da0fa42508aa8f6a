"""`cohort bench` against a server. The benchmark itself is imported only when it runs: `--help` answers at once."""

from __future__ import annotations

import argparse

from cohort.services.bench.http.arguments import add_arguments

__all__ = ["add_arguments", "run"]


def run(args: argparse.Namespace) -> int:
    """Measure, print and write. Raises `CohortError`."""
    from cohort.services.bench.http.measuring import measure

    return measure(args)
