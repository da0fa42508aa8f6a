"""`cohort simulate --planner`: options in, a table of shapes out. Called by `__main__.py`."""

from __future__ import annotations

import argparse
from collections.abc import Callable

import msgspec
from rich.console import Console
from rich.table import Table

from cohort.common.errors import ConfigError
from cohort.common.planning.settings import configured_shape, planner_settings
from cohort.common.planning.shape import Shape
from cohort.services.simulator.advise.planned_day import DayReport, DayRow, planned_day
from cohort.services.simulator.core.setup import cluster_of, configuration, parse_roles, traffic_of
from cohort.services.simulator.hardware.hardware import load_model

_SLO = "ttft=2,tpot=0.2"


def run(options: argparse.Namespace, tell: Callable[[str], None]) -> DayReport:
    """The cluster's instances are the most workers that there may be. Raises `ConfigError`."""
    cluster = cluster_of(options, options.cluster)
    if cluster.parts or cluster.shares:
        raise ConfigError("--planner: instances want to be alike, each with a device of its own")
    if not options.slo:
        options.slo = _SLO
        tell(f"no --slo: judged by the gateway's defaults for real-time requests, {_SLO}")
    config = configuration(options, options.preset, cluster=cluster)
    most = min(config.planner.max_workers or cluster.instances, cluster.instances)
    planner = msgspec.structs.replace(config.planner, mode="act", max_workers=most)
    config = msgspec.structs.replace(config, planner=planner)
    given = parse_roles(options.roles)
    start = configured_shape(config) if given is None else Shape.of({(role, 1): n for role, n in given.items()})
    settings = planner_settings(config)
    if not settings.bounds.allows(start):
        raise ConfigError(f"--planner: {start} is not within section planner's bounds; name another with --roles")
    return planned_day(
        config,
        cluster,
        load_model(options.model),
        traffic_of(options).workload(options.rate),
        settings,
        start,
        start_s=options.worker_start,
        seed=options.seed,
        progress=tell,
    )


def show(report: DayReport, console: Console) -> None:
    table = Table(box=None, pad_edge=False)
    table.add_column("workers")
    for heading in ("requests", "in time", "devices", "score"):
        table.add_column(heading, justify="right")
    for row in (report.planned, *report.fixed):
        table.add_row(*_cells(row))
    console.print(table)
    changes = sum(report.counts.get(action, 0) for action in ("changed", "undone"))
    error = "unknown" if report.error is None else f"{report.error:.3f}"
    console.print(
        f"planned from {report.started_with}: {changes} changes, {report.counts.get('undone', 0)} of them undone; "
        f"error at the end {error}, simulations took {100 * report.cpu_share:.1f} % of a core",
        soft_wrap=True,
    )
    for decision in report.decisions:
        after = "" if decision.measured_after is None else f", then {decision.measured_after:.3f}"
        console.print(
            f"  {decision.at_s:6.0f} s  {decision.action}: {decision.before} -> {decision.after}; predicted "
            f"{decision.predicted_before:.3f} -> {decision.predicted:.3f}{after} {decision.verdict}".rstrip(),
            highlight=False,
            soft_wrap=True,
        )


def _cells(row: DayRow) -> tuple[str, ...]:
    less = "< " if row.broken_off else ""
    return row.name, str(row.requests), f"{less}{row.in_time:.4f}", f"{row.devices:.2f}", f"{less}{row.score:.4f}"
