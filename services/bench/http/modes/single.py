"""One run of one server."""

from __future__ import annotations

from cohort.services.bench.http.harness import Harness, Measurement
from cohort.services.bench.http.results.export import BenchResult


async def run(harness: Harness) -> tuple[BenchResult, list[Measurement]]:
    options = harness.options
    measured = await harness.measure(harness.servers[0], options.workload, label="run", salt=options.prompt_salt)
    return BenchResult(mode="single", settings=options.settings, runs=[measured.report]), [measured]
