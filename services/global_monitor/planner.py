"""Hosts the planner's machine: feeds it what the monitor receives, and does what it decides.

    RequestTraffic, heartbeats ──▶ PlannerMachine ──Evaluate──▶ `ForesightProcess`, which simulates
                                        │──Apply────▶ worker by worker (launcher_orders.py, kubernetes_orders.py)
                                        └──Decided──▶ log line; metrics and live page read the machine

Called by `__main__.py` where section `planner` is not off. Decides nothing; a defect here ends no other work of the
monitor's.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Callable, Coroutine, Iterable, Iterator
from pathlib import Path
from typing import Any, assert_never

import msgspec
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from structlog.stdlib import BoundLogger

from cohort.common.clock import Clock
from cohort.common.config import Config, dump_config
from cohort.common.errors import CohortError
from cohort.common.keys.private_files import open_private
from cohort.common.machines.events import Tick
from cohort.common.messages import RequestTraffic
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
from cohort.common.planning.orders import WorkerOrders
from cohort.common.planning.shape import Kind, Shape, steps
from cohort.common.planning.simulation_jobs import Answer, Job, WorkerCost, from_stats
from cohort.common.types import InstanceId, Role, StepTimes
from cohort.services.global_monitor.aggregate import Cluster, Process

TICK_S = 1.0
_REMOVAL_S = 30.0
"""Longest time after a drain until a worker's heartbeats stop."""

_SIMULATION = "cohort.services.simulator.advise.foresee"
_LONGEST_LINE = 64 << 20
CONFIG_FILE = "planner.yaml"
"""Configuration of the pipeline for the simulations, in the run folder."""

Simulate = Callable[[Job], Coroutine[Any, Any, Answer]]


class Planner:
    def __init__(
        self,
        config: Config,
        settings: PlannerSettings,
        cluster: Cluster,
        clock: Clock,
        log: BoundLogger,
        *,
        simulate: Simulate,
        orders: WorkerOrders | None,
    ) -> None:
        """`orders` None: nothing may be changed (`advise`)."""
        self.machine = PlannerMachine(settings, clock.now_s())
        self._config = config
        self._cluster = cluster
        self._clock = clock
        self._log = log
        self._simulate = simulate
        self._orders = orders
        self._started_s = clock.now_s()
        self._waited_for = ""
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Plan until cancelled."""
        try:
            while True:
                await asyncio.sleep(TICK_S)
                self.tick()
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def tick(self) -> None:
        self._feed(Workers(*present(self._config, self._cluster)), Tick())
        if self._waited_for != self.waits_for:
            self._waited_for = self.waits_for
            self._log.info("planner_waits" if self._waited_for else "planner_begins", what=self._waited_for or None)

    def on_traffic(self, message: RequestTraffic) -> None:
        self._feed(Traffic(message.instance, message.incarnation, message.records))

    @property
    def waits_for(self) -> str:
        """Condition without which no round begins; "" if nothing is missing."""
        shape, known = self.machine.shape, self.machine.costs.keys()
        if shape is None or not shape.serves:
            return "workers that can serve a request between them"
        unknown = {group.degree for group in shape.groups} - known
        return f"step times of workers of degree {min(unknown)}: learned from steps of unlike sizes" if unknown else ""

    @property
    def cpu_share(self) -> float:
        """Share of one core that planning took so far."""
        return self.machine.budget.spent_s / max(1e-9, self._clock.now_s() - self._started_s)

    # -- what the machine wants ------------------------------------------------------------------------------------

    def _feed(self, *events: PlannerEvent) -> None:
        for effect in self.machine.handle(self._clock.now_s(), *events):
            match effect:
                case Evaluate(job=job):
                    self._begin(self._evaluate(job))
                case Apply(before=before, after=after):
                    self._begin(self._apply(before, after))
                case Decided(decision=decision):
                    self._log_decision(decision)
                case _:
                    assert_never(effect)

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work, name="planner")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _evaluate(self, job: Job) -> None:
        answer = await self._simulate(job)
        if answer.failure:
            self._log.warning("planner_simulation_failed", reason=answer.failure)
        self._feed(Evaluated(answer))

    async def _apply(self, before: Shape, after: Shape) -> None:
        failure = ""
        try:
            await self._change(before, after)
        except CohortError as error:
            failure = str(error)
        except Exception as error:  # the machine must hear of an end, whatever it is
            self._log.exception("planner_change_failed")
            failure = f"{type(error).__name__}: {error}"
        self._feed(Applied(failure))

    async def _change(self, before: Shape, after: Shape) -> None:
        """Add workers before others go, so that capacity does not fall in between; on GPUs, whose shares are all taken,
        the other way round, as long as a worker is left."""
        if self._orders is None:
            raise CohortError("nothing here may change workers")
        wanted = steps(before, after)
        first_out = self._config.on_gpu and before.workers > len(wanted.drain)
        if first_out:
            await self._drain(wanted.drain)
        added: list[InstanceId] = []
        try:
            for kind in wanted.add:
                added.append(await self._orders.add(kind))
        except CohortError:
            for instance in reversed(added):
                with contextlib.suppress(CohortError):
                    await self._orders.drain(instance)
            raise
        if not first_out:
            await self._drain(wanted.drain)
        await self._until(lambda: present(self._config, self._cluster)[0] == after)

    async def _drain(self, kinds: Iterable[Kind]) -> None:
        assert self._orders is not None
        for kind in kinds:
            candidates = [name for name, its in _kinds(self._config, self._cluster).items() if its == kind]
            if not candidates:
                raise CohortError(f"no {kind[0].value} worker to drain")
            name = max(candidates, key=_index)
            self._log.info("planner_drains", worker=name)
            await self._orders.drain(name)
            await self._until(lambda name=name: name not in _kinds(self._config, self._cluster))  # type: ignore[misc]

    async def _until(self, shown: Callable[[], bool]) -> None:
        """Wait until heartbeats show it. If they do not, the machine compares what is there with its plan later."""
        deadline_s = self._clock.now_s() + _REMOVAL_S
        while not shown() and self._clock.now_s() < deadline_s:  # noqa: ASYNC110
            await asyncio.sleep(0.1)

    def _log_decision(self, decision: PlanDecision) -> None:
        what = f"planner_{'judged' if decision.verdict else decision.action}"
        write = self._log.warning if decision.action == "failed" or decision.verdict == "undone" else self._log.info
        write(
            what,
            number=decision.number,
            before=str(decision.before),
            after=str(decision.after),
            predicted=round(decision.predicted, 4),
            predicted_before=round(decision.predicted_before, 4),
            error=round(decision.error, 4),
            measured_before=_rounded(decision.measured_before),
            measured_after=_rounded(decision.measured_after),
            verdict=decision.verdict or None,
            why=decision.why or None,
        )


def present(config: Config, cluster: Cluster) -> tuple[Shape, dict[int, WorkerCost]]:
    """Return the ready workers, and the mean learned costs by degree."""
    counts: dict[Kind, int] = {}
    learned: dict[int, list[WorkerCost]] = {}
    for name, kind in _kinds(config, cluster).items():
        counts[kind] = counts.get(kind, 0) + 1
        process = cluster.processes[name]
        times, blocks = from_stats(process.stats), int(process.stats.get("kv_total_blocks", 0))
        if times is not None and blocks:
            width = 4 if process.facts.get("dtype") == "float32" else 2
            learned.setdefault(kind[1], []).append(WorkerCost(times, blocks, width))
    return Shape.of(counts), {degree: _mean(costs) for degree, costs in learned.items()}


def _kinds(config: Config, cluster: Cluster) -> dict[InstanceId, Kind]:
    return {
        process.instance: (role, config.worker_group(process.instance, role).degree)
        for process in cluster.up()
        if process.ready and process.role.endswith("_worker") and (role := _role(process)) is not None
    }


def _role(process: Process) -> Role | None:
    """Return the role in which a worker's name begins, or else, as in a container, that of its service."""
    for name in (process.instance.partition("-")[0], process.role.removesuffix("_worker")):
        if name in list(Role):
            return Role(name)
    return None


def _index(instance: InstanceId) -> tuple[int, str]:
    number = instance.rpartition("-")[2]
    return (int(number) if number.isdecimal() else -1, instance)


def _mean(costs: list[WorkerCost]) -> WorkerCost:
    names = StepTimes.__struct_fields__
    times = StepTimes(*(sum(getattr(cost.times, name) for cost in costs) / len(costs) for name in names))
    return WorkerCost(times, min(cost.blocks for cost in costs), costs[0].kv_element_bytes)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def keep_config(config: Config, file: Path) -> None:
    """Write all options as one file for its owner alone, without keys, which no simulation needs."""
    replace = msgspec.structs.replace
    plain = replace(
        config,
        gateway=replace(config.gateway, api_keys=(), tls_cert="", tls_key=""),
        keys=type(config.keys)(),
        recording=type(config.recording)(),
        tracing=type(config.tracing)(),
    )
    with open_private(file, "wb") as written:
        written.write(dump_config(plain).encode())


class ForesightProcess:
    """Process that simulates: a job in, an answer out. Started early, since its start takes a second of processor time;
    if it dies, the next job starts another one. It stays in the monitor's process group, which the launcher ends with
    the monitor, and its input ends with the monitor in any case."""

    def __init__(self, config_file: Path) -> None:
        self._config_file = config_file
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Start the process ahead of the first job."""
        with contextlib.suppress(OSError):
            await self._started()

    async def forecast(self, job: Job) -> Answer:
        """Run a job, one at a time. Returns `Answer.failure` if the process ended."""
        try:
            process = await self._started()
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write(msgspec.json.encode(job) + b"\n")
            await process.stdin.drain()
            line = await process.stdout.readline()
            if line:
                return msgspec.json.decode(line, type=Answer)
            why = "the simulating process ended"
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            why = f"{type(error).__name__}: {error}"
        await self.close()
        return Answer(job.round, (), 0.0, failure=why)

    async def close(self) -> None:
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def _started(self) -> asyncio.subprocess.Process:
        if self._process is None or self._process.returncode is not None:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-P",
                "-m",
                _SIMULATION,
                "--config",
                str(self._config_file),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                limit=_LONGEST_LINE,
            )
        return self._process


class PlannerState(msgspec.Struct, frozen=True):
    """Planner's part of `/api/state`: shares of requests served in time; errors as in `PlannerMachine`."""

    mode: str
    waits_for: str
    shape: str
    predicted: float | None
    measured: float | None
    error: float | None
    ttft_error: float | None
    tpot_error: float | None
    bar: float
    cpu_share: float
    counts: dict[str, int]
    decisions: list[PlanDecision]


def planner_state(planner: Planner) -> PlannerState:
    machine = planner.machine
    return PlannerState(
        mode=machine.settings.mode,
        waits_for=planner.waits_for,
        shape=str(machine.shape or ""),
        predicted=machine.predicted,
        measured=machine.measured,
        error=machine.error,
        ttft_error=machine.time_errors.get("ttft_s"),
        tpot_error=machine.time_errors.get("tpot_s"),
        bar=machine.bar,
        cpu_share=planner.cpu_share,
        counts=dict(machine.counts),
        decisions=list(reversed(machine.decisions)),
    )


class PlannerCollector(Collector):
    """The planner as metrics."""

    def __init__(self, planner: Planner) -> None:
        self._planner = planner

    def collect(self) -> Iterator[Metric]:
        state = planner_state(self._planner)
        share = GaugeMetricFamily(
            "cohort_planner_in_time", "Share of requests served in time, last round.", labels=["source"]
        )
        for source, value in (("predicted", state.predicted), ("measured", state.measured)):
            if value is not None:
                share.add_metric([source], value)
        error = GaugeMetricFamily(
            "cohort_planner_error", "Smoothed error: of the share, and of median times as a factor - 1.", labels=["of"]
        )
        for name, value in (("in_time", state.error), ("ttft", state.ttft_error), ("tpot", state.tpot_error)):
            if value is not None:
                error.add_metric([name], value)
        decisions = CounterMetricFamily("cohort_planner_decisions", "Decisions, and verdicts on them.", labels=["what"])
        for name, count in sorted(state.counts.items()):
            decisions.add_metric([name], count)
        spent = CounterMetricFamily("cohort_planner_cpu_seconds", "Processor time of the planner's simulations.")
        spent.add_metric([], self._planner.machine.budget.spent_s)
        yield from (share, error, decisions, spent)
