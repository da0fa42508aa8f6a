"""One run per value of one aspect of the load; everything else about the workload stays the same."""

from __future__ import annotations

from dataclasses import replace
from typing import assert_never

from cohort.common.errors import ConfigError
from cohort.common.workloads.arrivals import ClosedLoop, TraceTimes
from cohort.common.workloads.generate import FromTrace
from cohort.services.bench.http.arguments import SweepKey
from cohort.services.bench.http.harness import Harness, Interrupted, Measurement, derive_salt
from cohort.services.bench.http.load.workload import WorkloadSpec, at_rate
from cohort.services.bench.http.results.export import BenchResult


async def run(harness: Harness, key: SweepKey, values: tuple[float, ...]) -> tuple[BenchResult, list[Measurement]]:
    options = harness.options
    measured: list[Measurement] = []
    specs = [_at(options.workload, key, value) for value in values]
    try:
        for value, spec in zip(values, specs, strict=True):
            if harness.stop.is_set():
                raise Interrupted
            label = f"{key}={value:g}"
            measured.append(
                await harness.measure(
                    harness.servers[0], spec, label=label, salt=derive_salt(options.prompt_salt, label)
                )
            )
    except Interrupted:
        if not measured:
            raise
    result = BenchResult(
        mode="sweep",
        settings=options.settings,
        runs=[m.report for m in measured],
        sweep_key=key,
        sweep_values=list(values[: len(measured)]),
    )
    return result, measured


def _at(spec: WorkloadSpec, key: SweepKey, value: float) -> WorkloadSpec:
    match key:
        case "rate":
            return at_rate(spec, value)
        case "concurrency":
            return replace(spec, arrivals=ClosedLoop(int(value)))
        case "time-scale":
            if not isinstance(spec.source, FromTrace) or spec.source.trace.arrival_s is None:
                raise ConfigError("--sweep time-scale=… needs a --trace that has arrival times")
            return replace(spec, arrivals=TraceTimes(value))
        case _:
            assert_never(key)
