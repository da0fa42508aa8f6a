"""The feed of the live page: everything it shows at one moment, as bounded plain data.

Pure; called by `server.py` for each update of each open page. Sums over gateways and orders decisions of all processes
by time; ages become those of this moment. Names and ids that clients chose are handed on as text: the page never makes
markup of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from cohort.common.messages import GatewayView, ManagerView, WorkerView
from cohort.common.types import QueueBucket, RequestId
from cohort.common.views import (
    BLOCK_STATES,
    MOST_DECISIONS,
    MOST_REQUESTS,
    BlockMap,
    Decision,
    DraftTally,
    Iteration,
    QueueClass,
    RequestBrief,
    RequestLife,
    Row,
    SloTally,
)
from cohort.services.global_monitor.live_views import Aged, LiveViews, draft_counters
from cohort.services.global_monitor.page import ClusterState, ProcessState
from cohort.services.global_monitor.planner import PlannerState

MOST_PROCESSES = 160
MOST_WITH_STATS = 40
"""Processes whose stats are all in the feed; of the others the page shows what the picture needs."""
MOST_EVENTS_SHOWN = 40
MOST_SAMPLES = 150
MOST_TALLIES = 96
_ALL_ROWS = 512
_LEAST_ROWS = 8
_PICTURED = ("requests_running", "requests_waiting", "running", "waiting", "kv_total_blocks", "kv_used_blocks")


class LiveQueue(msgspec.Struct, frozen=True):
    order: str
    classes: list[QueueClass]
    buckets: list[QueueBucket]


class LiveDrafts(msgspec.Struct, frozen=True):
    """Draft statistics of a class, of the last minute (`lately`) or since the worker's start. `acceptance`: share of
    right drafts; `tokens_a_step`: of a row with drafts. `rows` are since the start."""

    traffic_class: str
    rows: int
    acceptance: float
    tokens_a_step: float
    lately: bool


class LiveWorker(msgspec.Struct, frozen=True):
    """`sequences` counts all, `rows` are the first of them."""

    instance: str
    role: str
    sequences: int
    rows: list[Row]
    blocks: BlockMap
    iteration: Iteration | None
    kv_sent_per_s: float | None
    kv_received_per_s: float | None
    drafts: list[LiveDrafts]


class LiveDecision(msgspec.Struct, frozen=True):
    """`by`: the process that decided."""

    by: str
    decision: Decision


class LiveState(msgspec.Struct, frozen=True):
    """`processes` counts all; `cluster` has the first of them. `life`: of the request that this page chose, None while
    no gateway knows it."""

    cluster: ClusterState
    processes: int
    block_states: tuple[str, ...]
    queue: LiveQueue | None
    workers: list[LiveWorker]
    requests: list[RequestBrief]
    open_requests: int
    life: RequestLife | None
    slo: list[SloTally]
    decisions: list[LiveDecision]


def live_state(cluster: ClusterState, looking: LiveViews, request_id: RequestId, now_s: float = 0.0) -> LiveState:
    """Return the live page's state. `cluster` as in `/api/state`; `now_s` dates a planner's decisions."""
    requests = sorted(
        (_older(brief, age_s) for age_s, view in looking.fresh(GatewayView) for brief in view.requests),
        key=lambda brief: (brief.ended_s is not None, brief.ended_s if brief.ended_s is not None else brief.age_s),
    )
    lives = [
        msgspec.structs.replace(life, age_s=life.age_s + age_s)
        for age_s, view in looking.fresh(GatewayView)
        for life in view.chosen
        if life.request_id == request_id
    ]
    queue = next((LiveQueue(view.order, view.classes, view.buckets) for _, view in looking.fresh(ManagerView)), None)
    return LiveState(
        cluster=_bounded(cluster),
        processes=len(cluster.processes),
        block_states=BLOCK_STATES,
        queue=queue,
        workers=_workers(looking),
        requests=requests[:MOST_REQUESTS],
        open_requests=sum(view.open for _, view in looking.fresh(GatewayView)),
        life=lives[0] if lives else None,
        slo=_tallies(looking),
        decisions=_decisions(looking, planned(cluster.planner, now_s)),
    )


def _bounded(cluster: ClusterState) -> ClusterState:
    """Bound the processes, events and samples."""
    step = -(-len(cluster.sample_ages_s) // MOST_SAMPLES) or 1
    thin = slice((len(cluster.sample_ages_s) - 1) % step, None, step)
    return msgspec.structs.replace(
        cluster,
        processes=[_process(process, index) for index, process in enumerate(cluster.processes[:MOST_PROCESSES])],
        events=cluster.events[:MOST_EVENTS_SHOWN],
        sample_ages_s=cluster.sample_ages_s[thin],
        samples={name: _thinned(name, values, thin.start, step) for name, values in cluster.samples.items()},
    )


def _thinned(name: str, values: Sequence[float | None], first: int, step: int) -> list[float | None]:
    """Return every `step`-th value from `first` on; of rates the mean since the one before."""
    if not name.endswith("_per_s"):
        return list(values[first::step])
    groups = (values[max(0, last + 1 - step) : last + 1] for last in range(first, len(values), step))
    return [round(sum(value or 0.0 for value in group) / len(group), 4) for group in groups]


def _process(process: ProcessState, index: int) -> ProcessState:
    stats = process.stats
    if index >= MOST_WITH_STATS:
        stats = {name: stats[name] for name in _PICTURED if name in stats}
    rounded = {name: float(f"{value:.6g}") for name, value in stats.items()}
    return msgspec.structs.replace(process, stats=rounded)


def _workers(looking: LiveViews) -> list[LiveWorker]:
    views = looking.fresh(WorkerView)
    rows = max(_LEAST_ROWS, _ALL_ROWS // max(1, len(views)))
    meter = looking.meter
    return [
        LiveWorker(
            view.instance,
            view.role,
            view.sequences,
            view.rows[:rows],
            view.blocks,
            view.iteration,
            meter.rate(view.instance, "sent"),
            meter.rate(view.instance, "received"),
            [_drafts(view.instance, tally, looking) for tally in view.drafts],
        )
        for _, view in views
    ]


def _drafts(instance: str, tally: DraftTally, looking: LiveViews) -> LiveDrafts:
    since_start = tuple(draft_counters(tally).values())
    rates = [looking.meter.rate(instance, name) for name in draft_counters(tally)]
    known = [rate for rate in rates if rate is not None]
    lately = len(known) == len(since_start) and known[0] > 0.0
    rows, proposed, accepted = known if lately else since_start
    return LiveDrafts(
        tally.traffic_class, tally.rows, round(accepted / max(proposed, 1e-9), 4), round(1 + accepted / rows, 3), lately
    )


def _older(brief: RequestBrief, by_s: float) -> RequestBrief:
    ended_s = None if brief.ended_s is None else round(brief.ended_s + by_s, 3)
    return msgspec.structs.replace(brief, age_s=round(brief.age_s + by_s, 3), ended_s=ended_s)


def _tallies(looking: LiveViews) -> list[SloTally]:
    """Return the SLO tallies of all gateways together."""
    sums: dict[tuple[str, str, str], SloTally] = {}
    for _, view in looking.fresh(GatewayView):
        for tally in view.slo:
            place = (tally.key, tally.traffic_class, tally.objective)
            before = sums.get(place)
            if before is None:
                sums[place] = tally
                continue
            sums[place] = msgspec.structs.replace(
                tally, met=before.met + tally.met, missed=before.missed + tally.missed
            )
    return [sums[place] for place in sorted(sums)][:MOST_TALLIES]


def planned(planner: PlannerState | None, now_s: float) -> list[LiveDecision]:
    """Return the planner's decisions: what was predicted, and what then happened."""
    rows = []
    for each in () if planner is None else planner.decisions:
        predicted = f"{each.predicted_before:.0%} → {each.predicted:.0%} in time predicted (error {each.error:.0%})"
        then = "" if each.measured_after is None else f"then {each.measured_after:.0%}"
        judged = {"": "not judged yet" if each.action == "changed" else "", "stands": "stands"}.get(
            each.verdict, each.verdict
        )
        what = ", ".join(part for part in (f"{each.action}: {each.before} → {each.after}", then, judged) if part)
        reason = each.why if each.action == "failed" else predicted
        rows.append(
            LiveDecision("planner", Decision(max(0.0, now_s - each.at_s), "planned", "", reason=reason, what=what))
        )
    return rows


def _decisions(looking: LiveViews, planned: Iterable[LiveDecision] = ()) -> list[LiveDecision]:
    """Return the latest decisions first. The many ordinary placements are kept apart where they are made."""
    views: list[Aged[ManagerView] | Aged[WorkerView]] = [*looking.fresh(ManagerView), *looking.fresh(WorkerView)]
    found = [
        LiveDecision(view.instance, msgspec.structs.replace(each, age_s=round(each.age_s + age_s, 3)))
        for age_s, view in views
        for each in view.decisions
    ]
    found += planned
    found.sort(key=lambda one: one.decision.age_s)
    return found[:MOST_DECISIONS]
