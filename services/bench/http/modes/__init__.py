"""The measurements and their order; one file per mode, each `run(harness, …) -> BenchResult`.

A further mode is a dataclass in `options.Mode`, a file here and a branch in `run_mode`. One that measures something
else than an HTTP server brings its own `StreamClient`; driver, report and export stay as they are.
"""

from __future__ import annotations

from typing import assert_never

from cohort.services.bench.http.harness import Harness, Measurement
from cohort.services.bench.http.modes import capacity, compare, single, sweep
from cohort.services.bench.http.options import Capacity, Compare, Single, Sweep
from cohort.services.bench.http.results.export import BenchResult


async def run_mode(harness: Harness) -> tuple[BenchResult, list[Measurement]]:
    """The result and every measurement behind it, in the order they were made."""
    match harness.options.mode:
        case Single():
            return await single.run(harness)
        case Compare(rounds):
            return await compare.run(harness, rounds)
        case Sweep(key, values):
            return await sweep.run(harness, key, values)
        case Capacity() as asked:
            return await capacity.run(harness, asked)
        case _:
            assert_never(harness.options.mode)
