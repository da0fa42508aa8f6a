"""What a request costs the manager, by the number of workers and of requests that wait: `cohort bench decisions width`.

The whole `ManagerMachine` of a preset, told what a live one is told: so many requests a second come, as many end, and
every worker reports five times a second, the oldest requests that it has decoding and the others waiting. Prints
microseconds of processor time: of a decision (`Submit`, up to the effects that place it), of its messages' way from
and to bytes, of a request's end, of a report; and the share of a core that all of it takes at that rate. The workers
are counters, the clock is virtual. One core, no processes, no model. Exit status 1 where a decision is not flat
(`--within`).
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice
from statistics import median

from cohort.common import codec
from cohort.common.config import load_config
from cohort.common.machines.effects import ManagerEffect, Send
from cohort.common.machines.events import ManagerEvent, Received, Tick
from cohort.common.machines.manager.manager import ManagerMachine, ManagerSettings
from cohort.common.machines.worker.worker_state import REPORT_INTERVAL_S
from cohort.common.messages import (
    GatewayHello,
    Outstanding,
    RegisterWorker,
    SegmentEnded,
    StartSegment,
    Submit,
    WorkerReport,
)
from cohort.common.policies import compose
from cohort.common.tokens import PackedTokens
from cohort.common.types import Attempt, InstanceId, Outcome, Prediction, QueuedWork, Role, WorkerCapacity, WorkerStats
from cohort.services.bench.decisions.placement import STEP_TIMES, made_request
from cohort.services.bench.output import print_costs
from cohort.services.bench.rounds import no_collection

_FIRST = 2_000
"""Requests that wait and are placed one by one; the others are on workers when the manager starts."""
_BLOCKS, _BLOCK_SIZE = 1_000_000, 16
_LISTED = 512
"""Requests that a report lists one by one, as of a live worker."""
_GATEWAY = "gateway"
_ROWS = 32
"""Number of the first sequences, which decode: each report has them a few tokens further."""
_WHOLE_EVERY = 5
"""Reports of a worker for one that names everything that it holds."""
_ROUNDS = 10
"""Rounds of reports while the waiting requests come."""
_UNSEEN_S = 3.0


@dataclass(frozen=True, slots=True)
class Cost:
    """Microseconds of processor time. `core_share`: of everything at the rate."""

    preset: str
    workers: int
    waiting: int
    rate: float
    decision_us: float
    decision_p99_us: float
    wire_us: float
    end_us: float
    report_us: float
    core_share: float


@dataclass(slots=True)
class _Spent:
    decisions: list[float] = field(default_factory=list)
    wire: list[float] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)
    reports: list[float] = field(default_factory=list)
    ticks: list[float] = field(default_factory=list)

    @property
    def total_s(self) -> float:
        return sum(map(sum, (self.decisions, self.wire, self.ends, self.reports, self.ticks)))


class _Cluster:
    """A manager and its workers, of which it is known what they hold and nothing else."""

    def __init__(self, preset: str, workers: int, seed: int, held: int = 0, prompt: int = 0) -> None:
        """`held`: requests that are on the workers already, as when a manager was started again. `prompt`: tokens of
        each that comes; 0 = some hundreds."""
        self._prompt = prompt
        config = load_config(preset=preset)
        self._random = random.Random(seed)
        self.machine = ManagerMachine(
            "manager",
            1,
            ManagerSettings.of(config),
            compose.prefill_order(config),
            compose.placement(config),
            compose.late_binding(config),
            0.0,
        )
        roles = [group.role for group in config.workers]
        self.held: dict[InstanceId, dict[Attempt, int]] = {}
        self._placed: deque[list[tuple[InstanceId, Attempt]]] = deque()
        """Workers of the segments of each request, in order."""
        self._serial = 0
        self._started: list[StartSegment] = []
        self.machine.handle(0.0, Received(_GATEWAY, GatewayHello(_GATEWAY, 1, "at-gateway")))
        named = {f"{role}-{index}": role for index, role in zip(range(workers), cycle(roles), strict=False)}
        self.held = {name: {} for name in named}
        self._reports = dict.fromkeys(named, 0)
        self._reported: dict[InstanceId, dict[Attempt, None]] = {}
        decoding = cycle([name for name, role in named.items() if role.decodes] or list(named))
        for number, name in zip(range(held), decoding, strict=False):
            attempt = Attempt(f"h{number}", 0)
            self.held[name][attempt] = self._random.randint(16, 800)
            self._placed.append([(name, attempt)])
        for name, role in named.items():
            self._register(name, role)
        outstanding = Outstanding([attempt for each in self.held.values() for attempt in each])
        self.machine.handle(0.0, Received(_GATEWAY, outstanding))

    def _register(self, name: InstanceId, role: Role) -> None:
        capacity = WorkerCapacity(role, "m", 131_072, 48, 8, 128, 2, _BLOCK_SIZE, _BLOCKS, 0, 256, 2048)
        self.machine.handle(0.0, Received(name, RegisterWorker(name, 1, f"at-{name}", capacity, list(self.held[name]))))
        self.machine.handle(0.0, Received(name, self._report(name)))

    def handle_event(self, now_s: float, event: ManagerEvent) -> float:
        """Return the seconds that handling the event took."""
        began_s = time.thread_time()
        effects = self.machine.handle(now_s, event)
        spent_s = time.thread_time() - began_s
        self._perform(effects)
        return spent_s

    def wire_s(self, event: Received) -> float:
        """Return the seconds that it takes to read a request, and to write what was sent for the last event."""
        data = codec.encode(event.message)
        began_s = time.thread_time()
        codec.decode(data)
        for start in self._started:
            codec.encode(start)
        return time.thread_time() - began_s

    def _perform(self, effects: Sequence[ManagerEffect]) -> None:
        self._started = [e.message for e in effects if isinstance(e, Send) and isinstance(e.message, StartSegment)]
        for start in self._started:
            instance = start.segments[start.index].instance
            assert instance is not None
            self.held[instance][start.request.attempt] = len(start.request.tokens)
            if start.index == 0:
                segments = (each for each in start.segments if each.instance is not None)
                self._placed.append([(str(each.instance), start.request.attempt) for each in segments])

    def submission(self, now_s: float) -> Received:
        self._serial += 1
        draw = self._random
        prompt, output = self._prompt or draw.randint(16, 800), float(draw.randint(1, 500))
        tokens = PackedTokens([self._serial]) * prompt  # no two share a prefix
        prediction = Prediction(output, output, output, output)
        request = made_request(f"r{self._serial}", tokens, 1000, now_s, prediction=prediction)
        return Received(_GATEWAY, Submit(request))

    def ends(self) -> list[Received]:
        """Return the ends of the oldest request's segments."""
        if not self._placed:
            return []
        segments = self._placed.popleft()
        events = []
        for instance, attempt in segments:
            tokens = self.held[instance].pop(attempt)
            outcome = Outcome.FINISHED if instance == segments[-1][0] else Outcome.HANDED_OVER
            events.append(Received(instance, SegmentEnded(instance, attempt, outcome, tokens)))
        return events

    def all_report(self, now_s: float) -> None:
        for name in self.held:
            self.handle_event(now_s, self.report(name))

    def report(self, name: InstanceId) -> Received:
        return Received(name, self._report(name))

    def _report(self, name: InstanceId) -> WorkerReport:
        """Return a worker's report with the shape of a live one."""
        held = self.held[name]
        number = self._reports[name] = self._reports[name] + 1
        listed = list(islice(held.items(), _LISTED))
        further = 7 * number
        queue = [QueuedWork(a.request_id, 0, tokens + further, 1 + further % 100) for a, tokens in listed[:_ROWS]]
        queue += [QueuedWork(a.request_id, tokens, 0, 100) for a, tokens in listed[_ROWS:]]
        stats = WorkerStats(
            total_blocks=_BLOCKS,
            free_blocks=_BLOCKS - sum(held.values()) // _BLOCK_SIZE,
            running=min(len(held), _ROWS),
            waiting=max(0, len(held) - _ROWS),
            queue=queue,
            step_times=STEP_TIMES,
            step_s=0.03,
            queued_prefill_tokens=sum([work.prefill_left for work in queue]),
        )
        seen = self._reported.get(name)
        self._reported[name] = dict.fromkeys(held)
        if seen is None or number % _WHOLE_EVERY == 0:
            return WorkerReport(name, 1, number, stats, list(held))
        new, ended = [each for each in held if each not in seen], [each for each in seen if each not in held]
        return WorkerReport(name, 1, number, stats, new, since=number - 1, gone=ended)


def measure(
    preset: str, workers: int, waiting: int, *, rate: float, seconds: float, prompt: int = 0, seed: int = 0
) -> Cost:
    first = min(waiting, _FIRST)
    cluster = _Cluster(preset, workers, seed, waiting - first, prompt)
    names = list(cluster.held)
    now_s = 1.0
    for number in range(first):
        cluster.handle_event(now_s, cluster.submission(now_s))
        now_s += 1.0 / rate
        if number % (first // _ROUNDS + 1) == 0:
            cluster.all_report(now_s)
    now_s += _UNSEEN_S  # what no report lists counts no more as on its way
    cluster.all_report(now_s)
    spent, reporting, due = _Spent(), cycle(names), 0.0
    began_s, last_tick_s = now_s, now_s
    with no_collection():
        while now_s - began_s < seconds:
            now_s += 1.0 / rate
            submission = cluster.submission(now_s)
            spent.decisions.append(cluster.handle_event(now_s, submission))
            spent.wire.append(cluster.wire_s(submission))
            for event in cluster.ends():
                spent.ends.append(cluster.handle_event(now_s, event))
            due += len(names) / REPORT_INTERVAL_S / rate
            while due >= 1.0:
                due -= 1.0
                spent.reports.append(cluster.handle_event(now_s, cluster.report(next(reporting))))
            if now_s - last_tick_s >= 0.05:
                last_tick_s = now_s
                spent.ticks.append(cluster.handle_event(now_s, Tick()))
    decisions = sorted(spent.decisions)
    return Cost(
        preset,
        workers,
        waiting,
        rate,
        1e6 * median(decisions),
        1e6 * decisions[int(0.99 * len(decisions))],
        1e6 * median(spent.wire),
        1e6 * median(spent.ends),
        1e6 * median(spent.reports or [0.0]),
        spent.total_s / (now_s - began_s),
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--preset", default="cohort")
    parser.add_argument("--workers", nargs="*", type=int, default=[8, 64, 1000])
    parser.add_argument("--waiting", nargs="*", type=int, default=[10, 1000, 100_000], help="on all workers together")
    parser.add_argument("--rate", type=float, default=1000.0, help="requests a second")
    parser.add_argument("--prompt-tokens", type=int, default=0, metavar="N", help="of each (default: 16 to 800)")
    parser.add_argument("--seconds", type=float, default=1.0, help="of virtual time, for each point")
    parser.add_argument("--within", type=float, default=0.0, metavar="FACTOR", help="largest median / smallest at most")


def execute(options: argparse.Namespace) -> int:
    costs = [
        measure(
            options.preset, workers, waiting, rate=options.rate, seconds=options.seconds, prompt=options.prompt_tokens
        )
        for workers in options.workers
        for waiting in options.waiting
    ]
    columns = {
        "preset": "{0.preset}",
        "workers": "{0.workers:,}",
        "waiting": "{0.waiting:,}",
        "µs/decision": "{0.decision_us:.0f}",
        "p99": "{0.decision_p99_us:.0f}",
        "µs/wire": "{0.wire_us:.0f}",
        "µs/end": "{0.end_us:.0f}",
        "µs/report": "{0.report_us:.0f}",
        "of a core": "{0.core_share:.2f}",
    }
    print_costs(costs, columns, as_json=options.json)
    medians = [cost.decision_us for cost in costs]
    spread = max(medians) / min(medians)
    sys.stderr.write(f"a decision: largest median / smallest = {spread:.2f}\n")
    return 1 if options.within and spread > options.within else 0
