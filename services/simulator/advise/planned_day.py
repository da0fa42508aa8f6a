"""A cluster whose planner changes its workers, and the same traffic on every fixed shape that the planner might choose.

    traffic ─▶ SimCluster with places ─records, step times─▶ PlannerMachine ─Evaluate─▶ foresee (simulations within)
                    ▲ add_worker, drain_worker ◀───────────────────┘ Apply

Called by `cohort simulate --planner`. The planner knows what it would know live: traffic that has come, and the step
times that workers report. Its simulations run at virtual time's expense: a nominal time for every request replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import assert_never

import msgspec

from cohort.common.config import Config
from cohort.common.machines.events import Tick
from cohort.common.planning.machine import (
    Applied,
    Apply,
    Decided,
    Evaluate,
    Evaluated,
    PlanDecision,
    PlannerEvent,
    PlannerMachine,
    PlannerSettings,
    Traffic,
    Workers,
)
from cohort.common.planning.shape import Bounds, Kind, Shape, steps
from cohort.common.planning.simulation_jobs import Answer, Job, WorkerCost
from cohort.common.planning.traffic import Timing, TrafficRecord, in_time
from cohort.common.policies.cost_model import ModelShape
from cohort.common.types import InstanceId, Role
from cohort.common.virtual_cluster.cluster import GATEWAY
from cohort.common.workloads.items import Workload
from cohort.services.simulator.advise.candidate_shapes import foresee, timing_of, without_planner
from cohort.services.simulator.core.clients import InFlight
from cohort.services.simulator.core.cluster import SimCluster
from cohort.services.simulator.core.sim_options import SimOptions
from cohort.services.simulator.hardware.hardware import Cluster

_TICK_S = 1.0
_NOMINAL_S = 0.004
"""Processor time of replaying one request on one shape (docs/guide/planner.md has what was measured)."""
_HOPELESS = 0.5
"""Share of late requests beyond which a fixed shape is simulated no further: overloads take the most time."""
_PLACES = 400
"""Number of workers started in the whole day, at most."""


class DayRow(msgspec.Struct, frozen=True):
    """One way to serve the traffic. `score`: share in time less what the devices cost, on average over the time.
    `broken_off`: more than half came late, so the rest was not simulated; the true share and score are below these."""

    name: str
    requests: int
    in_time: float
    devices: float
    score: float
    broken_off: bool = False


class DayReport(msgspec.Struct, frozen=True):
    """`planned` beside all fixed shapes, best first; `cpu_share`: nominal, of one core."""

    planned: DayRow
    fixed: list[DayRow]
    started_with: str
    decisions: list[PlanDecision]
    counts: dict[str, int]
    error: float | None
    time_errors: dict[str, float]
    cpu_share: float


@dataclass(slots=True)
class Tally:
    """Requests that ended, as the planner judges them; and devices over time."""

    best_effort_s: float
    sent: int = 0
    met: int = 0
    late: int = 0
    device_s: float = 0.0
    _since_s: float = 0.0
    _devices: int = 0

    def ended(self, live: InFlight, finished: bool) -> None:
        timing = timing_of(live) if finished else Timing()
        met = in_time(live.item.slo, timing, self.best_effort_s)
        self.met, self.late = self.met + met, self.late + (not met)

    def devices(self, now_s: float, count: int) -> None:
        """Count `count` devices from now on."""
        self.device_s += self._devices * (now_s - self._since_s)
        self._since_s, self._devices = now_s, count

    def row(self, name: str, end_s: float, cost: float) -> DayRow:
        self.devices(end_s, self._devices)
        share, mean = self.met / max(1, self.sent), self.device_s / max(1e-9, end_s)
        return DayRow(name, self.sent, share, mean, share - cost * mean)

    @property
    def hopeless(self) -> bool:
        return self.late > _HOPELESS * self.sent


@dataclass(frozen=True, slots=True)
class Day:
    """Common parts of all simulations of a day."""

    config: Config
    cluster: Cluster
    model: ModelShape
    workload: Workload
    settings: PlannerSettings
    seed: int = 0

    def simulation(self, config: Config, shape: Shape, places: int) -> SimCluster:
        options = SimOptions(seed=self.seed, predictor="lognormal", predictor_sigma=0.5, if_late="", profiled=False)
        cluster = msgspec.structs.replace(self.cluster, instances=places)
        return SimCluster(config, cluster, self.model, self.workload, options, shape.roles, grows=True)

    def tally(self, shape: Shape) -> Tally:
        tally = Tally(self.settings.best_effort_s, sent=len(self.workload.items))
        tally.devices(0.0, shape.devices)
        return tally


class PlannedCluster:
    def __init__(
        self, day: Day, start: Shape, *, start_s: float, decided: Callable[[PlanDecision], None] = lambda decision: None
    ) -> None:
        """`start_s`: time from a worker's start until it serves; it costs its device from the start. `decided` gets
        each decision, and again its outcome."""
        self._config, self._model = day.config, day.model
        self.sim = day.simulation(day.config, start, start.workers + _PLACES)
        self.sim.clients.on_end = self._ended
        self.machine = PlannerMachine(day.settings, 0.0)
        self.tally = day.tally(start)
        self._start_s, self._drain_s = start_s, day.config.drain_s
        self._known: set[int] = set()
        """Requests that were reported to the planner, and (`_over`) those whose end is yet to be reported."""
        self._over: list[tuple[InFlight, bool]] = []
        self._decided = decided
        self._next: dict[Role, int] = {role: start.roles.get(role, 0) for role in Role}
        self._shape = start
        self.sim.events.at(0.0, self._tick)

    def run(self) -> float:
        """Run the day. Return the end of the last request."""
        self.sim.run()
        return self.sim.events.now_s

    # -- what the planner hears ------------------------------------------------------------------------------------

    def _ended(self, live: InFlight, finished: bool) -> None:
        self.tally.ended(live, finished)
        self._over.append((live, finished))

    def _tick(self) -> None:
        now_s = self.sim.events.now_s
        self._handle(Traffic(GATEWAY, 1, list(self._records(now_s))), Workers(self._shape, self._costs()), Tick())
        self.sim.events.at(now_s + _TICK_S, self._tick)

    def _records(self, now_s: float) -> Iterable[TrafficRecord]:
        for live in list(self.sim.clients.live.values()):
            if live.index not in self._known:
                self._known.add(live.index)
                yield _record(live, now_s)
        for live, finished in self._over:
            self._known.discard(live.index)
            timing = timing_of(live) if finished else Timing()
            yield msgspec.structs.replace(_record(live, now_s), output_tokens=live.produced, timing=timing)
        self._over.clear()

    def _costs(self) -> dict[int, WorkerCost]:
        """Return the costs that the first worker with learned times reports: all instances are alike."""
        for worker in self.sim.workers:
            times = worker.machine.stats(0).step_times if worker.alive else None
            if times is not None:
                return {1: WorkerCost(times, worker.machine.kv.total_blocks, self._model.kv_bytes)}
        return {}

    # -- what it decides -------------------------------------------------------------------------------------------

    def _handle(self, *events: PlannerEvent) -> None:
        for effect in self.machine.handle(self.sim.events.now_s, *events):
            match effect:
                case Evaluate(job=job):
                    self._evaluate(job)
                case Apply(before=before, after=after):
                    self._apply(before, after)
                case Decided(decision=decision):
                    self._decided(decision)
                case _:
                    assert_never(effect)

    def _evaluate(self, job: Job) -> None:
        replayed: list[int] = []
        found = tuple(foresee(job, self._config, self._model, replayed.append))
        cpu_s = _NOMINAL_S * sum(replayed)
        answer = Evaluated(Answer(job.round, found, cpu_s))
        self.sim.events.at(self.sim.events.now_s + cpu_s, self._handle, answer)

    def _apply(self, before: Shape, after: Shape) -> None:
        wanted, now_s = steps(before, after), self.sim.events.now_s
        self.tally.devices(now_s, before.devices + sum(degree for _, degree in wanted.add))
        self.sim.events.at(
            now_s + (self._start_s if wanted.add else 0.0), self._started, after, wanted.add, wanted.drain
        )

    def _started(self, after: Shape, add: Iterable[Kind], drain: Iterable[Kind]) -> None:
        for role, _ in add:
            number = self._next[role]
            self._next[role] = number + 1
            self.sim.add_worker(f"{role.value}-{number}", role)
        leaving = self._leaving([role for role, _ in drain])
        remaining = set(leaving)

        def removed(name: InstanceId) -> None:
            remaining.discard(name)
            if not remaining:
                self._settled(after)

        for name in leaving:
            self.sim.drain_worker(name, self._drain_s, partial(removed, name))
        if not leaving:
            self._settled(after)

    def _leaving(self, roles: Iterable[Role]) -> list[InstanceId]:
        """Choose the last workers of each role."""
        chosen: list[InstanceId] = []
        for role in roles:
            names = [name for name, its in self.sim.roles.items() if its is role and name not in chosen]
            chosen.append(names[-1])
        return chosen

    def _settled(self, after: Shape) -> None:
        self._shape = after
        self.tally.devices(self.sim.events.now_s, after.devices)
        self._handle(Applied())


def planned_day(
    day: Day, start: Shape, *, start_s: float, progress: Callable[[str], None] = lambda line: None
) -> DayReport:
    """Simulate the planner's day from the shape `start` on, and every fixed shape within its bounds."""
    progress(f"planned, from {start}")

    def decided(decision: PlanDecision) -> None:
        progress(
            f"  {decision.verdict or decision.action}: {decision.before} -> {decision.after}, at {decision.at_s:.0f} s"
        )

    planned = PlannedCluster(day, start, start_s=start_s, decided=decided)
    end_s = planned.run()
    machine, row = planned.machine, planned.tally.row("planned", end_s, day.settings.worker_cost)
    progress(f"planned: {row.in_time:.4f} in time with {row.devices:.2f} devices, score {row.score:.4f}")
    fixed = []
    for shape in all_shapes(day.settings.bounds):
        fixed.append(_fixed(day, shape))
        progress(f"fixed, {shape}: {fixed[-1].in_time:.4f} in time{' at most' * fixed[-1].broken_off}")
    return DayReport(
        planned=row,
        fixed=sorted(fixed, key=lambda row: -row.score),
        started_with=str(start),
        decisions=list(machine.decisions),
        counts=dict(machine.counts),
        error=machine.error,
        time_errors=dict(machine.time_errors),
        cpu_share=machine.budget.spent_s / max(1e-9, end_s),
    )


def all_shapes(bounds: Bounds) -> list[Shape]:
    """Return all shapes of degree 1 within the bounds."""
    found = []
    for total in range(bounds.min_workers, bounds.max_workers + 1):
        found.append(Shape.of({(Role.UNIFIED, 1): total}))
        found += [Shape.of({(Role.PREFILL, 1): each, (Role.DECODE, 1): total - each}) for each in range(1, total)]
    return [shape for shape in found if bounds.allows(shape)]


def _fixed(day: Day, shape: Shape) -> DayRow:
    sim = day.simulation(without_planner(day.config), shape, shape.workers)
    tally, cost = day.tally(shape), day.settings.worker_cost

    def ended(live: InFlight, finished: bool) -> None:
        tally.ended(live, finished)
        if tally.hopeless:
            raise _Hopeless

    sim.clients.on_end = ended
    try:
        sim.run()
    except _Hopeless:
        share = 1.0 - tally.late / tally.sent
        return DayRow(str(shape), tally.sent, share, shape.devices, share - cost * shape.devices, broken_off=True)
    return tally.row(str(shape), sim.events.now_s, cost)


class _Hopeless(Exception):
    """See `Tally.hopeless`."""


def _record(live: InFlight, now_s: float) -> TrafficRecord:
    item = live.item
    return TrafficRecord(live.index, now_s - item.arrival_s, item.prompt_tokens, item.traffic_class, item.slo)
