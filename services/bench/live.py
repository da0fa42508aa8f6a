"""The `cohort` command for the comparisons in `scripts/bench_*`, which start, load and stop pipelines of their own."""

from __future__ import annotations

import subprocess
import sys


def cohort(*arguments: str) -> None:
    """Run it to its end, without its output. Raises `subprocess.CalledProcessError` when it fails."""
    subprocess.run([sys.executable, "-m", "cohort.services.cli", *arguments], check=True, stdout=subprocess.DEVNULL)
