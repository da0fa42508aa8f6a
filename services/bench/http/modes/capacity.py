"""The highest rate at which the server still meets the SLO for the asked share of requests: measures what
`CapacitySearch` asks for."""

from __future__ import annotations

from cohort.services.bench.http.capacity import CapacitySearch
from cohort.services.bench.http.harness import Harness, Interrupted, Measurement, derive_salt
from cohort.services.bench.http.load.workload import at_rate
from cohort.services.bench.http.options import Capacity
from cohort.services.bench.http.results.export import BenchResult, CapacityPoint, CapacityResult


async def run(harness: Harness, asked: Capacity) -> tuple[BenchResult, list[Measurement]]:
    options = harness.options
    search = CapacitySearch(asked.start_rate, asked.max_rate, asked.tolerance)
    measured: list[Measurement] = []
    points: list[CapacityPoint] = []
    complete = True
    while (rate := search.next_rate()) is not None:
        label = f"rate={rate:.4g}"
        try:
            found = await harness.measure(
                harness.servers[0],
                at_rate(options.workload, rate),
                label=label,
                salt=derive_salt(options.prompt_salt, label),
            )
        except Interrupted:
            if not measured:
                raise
            complete = False
            break
        measured.append(found)
        if found.report.interrupted:
            complete = False
            break
        slo = found.report.overall.slo
        kept = slo.kept_of_sent if slo is not None else 0.0
        attained = kept >= asked.attainment
        points.append(CapacityPoint(rate, kept, attained))
        search.observe(attained)
    result = CapacityResult(
        wanted_attainment=asked.attainment,
        requests_per_s=search.best_rate,
        at_least=search.bounded_by_max_rate,
        complete=complete,
        points=points,
    )
    reports = [m.report for m in measured]
    return BenchResult(mode="capacity", settings=options.settings, runs=reports, capacity=result), measured
