"""The data of `cohort status` and, with what `live.py` adds, of the live page: the cluster's state as plain JSON.

Pure; called by `server.py` for every `/api/state`. Times leave as ages in seconds, because the reader's clock is not
ours.
"""

from __future__ import annotations

import math

import msgspec

from cohort.services.global_monitor.aggregate import Cluster, Process, Sample
from cohort.services.global_monitor.planner import PlannerState
from cohort.services.global_monitor.window import Figures, WorkerFigures, rates_of, worker_figures

_ROLE_ORDER = ("gateway", "length_predictor", "bucketing_manager", "global_monitor")


class ProcessState(msgspec.Struct, frozen=True):
    """One process. `status`: up, down or left; `since_s`: seconds in that status. `facts`: of a worker, its device.
    `rates`: per second, and `work`: of a worker, both of the last minute."""

    instance: str
    role: str
    status: str
    ready: bool
    pid: int
    age_s: float
    since_s: float
    restarts: int
    metrics_url: str
    stats: dict[str, float]
    facts: dict[str, str] = {}
    warnings: list[str] = []
    rates: dict[str, float] = {}
    work: WorkerFigures | None = None


class EventState(msgspec.Struct, frozen=True):
    age_s: float
    instance: str
    what: str


class ClusterState(msgspec.Struct, frozen=True):
    """`last_minute`: the figures. `samples`: columns of the curves, `samples[name][i]` taken `sample_ages_s[i]` seconds
    ago, oldest first. `slo`: seconds to the first token and for each later one that real-time requests get by default,
    where there are such."""

    name: str
    model: str
    uptime_s: float
    processes: list[ProcessState]
    events: list[EventState]
    last_minute: Figures
    slo: dict[str, float]
    arrival_rate: float
    arrival_rate_forecast: float
    mean_prompt_tokens: float
    mean_output_tokens: float
    sample_ages_s: list[float]
    samples: dict[str, list[float | None]]
    planner: PlannerState | None = None


def state(
    cluster: Cluster,
    now_s: float,
    *,
    name: str,
    model: str,
    uptime_s: float,
    history_s: float,
    slo: dict[str, float] | None = None,
    planner: PlannerState | None = None,
) -> ClusterState:
    """Return the state of `/api/state`. `history_s`: how far back the curves go."""
    samples = [sample for sample in cluster.samples if now_s - sample.at_s <= history_s]
    columns = [field for field in Sample.__dataclass_fields__ if field != "at_s"]
    return ClusterState(
        name=name,
        model=model,
        uptime_s=round(uptime_s, 3),
        processes=[_process(p, now_s, cluster.window_s(now_s)) for p in sorted(cluster.processes.values(), key=_order)],
        events=[
            EventState(round(max(0.0, now_s - event.at_s), 3), event.instance, event.what)
            for event in reversed(cluster.events)
        ],
        last_minute=cluster.figures(now_s),
        slo=slo or {},
        arrival_rate=cluster.demand.rate,
        arrival_rate_forecast=cluster.demand.forecast(),
        mean_prompt_tokens=cluster.demand.mean_prompt_tokens,
        mean_output_tokens=cluster.demand.mean_output_tokens,
        sample_ages_s=[round(now_s - sample.at_s, 2) for sample in samples],
        samples={column: [_rounded(getattr(sample, column)) for sample in samples] for column in columns},
        planner=planner,
    )


def _order(process: Process) -> tuple[int, str, str]:
    """Return a sort key: gateway, predictor, manager, monitor, then the workers."""
    known = process.role in _ROLE_ORDER
    return (_ROLE_ORDER.index(process.role) if known else len(_ROLE_ORDER), process.role, process.instance)


def _rounded(value: float) -> float | None:
    return None if math.isnan(value) else round(value, 4)


def _process(process: Process, now_s: float, window_s: float) -> ProcessState:
    grown = process.growth.since(now_s)
    return ProcessState(
        process.instance,
        process.role,
        process.status.value,
        process.ready,
        process.pid,
        round(process.age_s(now_s), 3),
        round(max(0.0, now_s - process.since_s), 3),
        process.restarts,
        process.metrics_url,
        process.stats,
        process.facts,
        process.warnings,
        rates_of(grown, window_s),
        worker_figures(grown),
    )
