"""The state of the whole pipeline, from heartbeats: processes that are up, their latest stats, what failed, what is
coming.

Pure: no I/O, time is an argument. Called by `service.py` for every message and tick; read by page, exporter and the
push to the manager. Decides what "down" means; never acts on it.

                    Heartbeat                silence_s without one, and quiet_s
      (unknown) ───────────────▶  UP  ─────────────────────────────▶ DOWN
                                 │  ▲ ▲                                │
                        Farewell │  │ └────────── Heartbeat ───────────┘
                                 ▼  │ Heartbeat of a new incarnation
                                LEFT┘

A new incarnation without a Farewell before it is a restart after a failure, even if the silence was too short to be
seen.
"""

from __future__ import annotations

import enum
import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from cohort.common.messages import ClusterStats, Farewell, Heartbeat
from cohort.common.types import InstanceId
from cohort.services.global_monitor.demand import Counters, Demand
from cohort.services.global_monitor.window import WINDOW_S, Figures, Growth, figures, summed

MAX_INSTANCES = 1000  # more names than that is a mistake somewhere, not a pipeline
MAX_EVENTS = 200
SAMPLE_EVERY_S = 1.0
HISTORY_S = 3600.0  # what the live page can show
FORGET_S = 900.0  # after so long a process that is down or has left is forgotten


class Status(enum.StrEnum):
    UP = "up"
    DOWN = "down"
    LEFT = "left"


@dataclass(slots=True)
class Process:
    """The last known state of one instance. `last_heartbeat_s`, `since_s`: monotonic, of the last heartbeat and of the
    last change of status; `restarts` counts incarnations after the first that followed no Farewell; `quiet_s`: as in
    the last heartbeat."""

    instance: InstanceId
    role: str = ""
    incarnation: int = 0
    pid: int = 0
    ready: bool = False
    metrics_url: str = ""
    stats: dict[str, float] = field(default_factory=dict)
    status: Status = Status.UP
    last_heartbeat_s: float = 0.0
    quiet_s: float = 0.0
    since_s: float = 0.0
    restarts: int = 0
    facts: dict[str, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    metrics_token: str = field(default="", repr=False)
    counters: Counters = field(default_factory=Counters)
    growth: Growth = field(default_factory=Growth)

    def age_s(self, now_s: float) -> float:
        return max(0.0, now_s - self.last_heartbeat_s)


@dataclass(frozen=True, slots=True)
class Event:
    """Event for the live page. `what`: appeared, down, back, restarted, left."""

    at_s: float
    instance: InstanceId
    what: str


@dataclass(frozen=True, slots=True)
class Sample:
    """The whole at one moment, for the page's curves. Rates are per second since the sample before; `kv_used` and
    `kv_cached` are shares of all blocks: referenced, and kept for reuse. Latencies: of the last minute, NaN = none."""

    at_s: float
    requests_running: float
    requests_waiting: float
    arrivals_per_s: float
    output_tokens_per_s: float
    prompt_tokens_per_s: float
    kv_used: float
    kv_cached: float
    failed_per_s: float
    rt_ttft_p50_s: float
    rt_ttft_p99_s: float
    rt_tpot_p50_s: float
    rt_tpot_p99_s: float
    be_ttft_p50_s: float
    be_ttft_p99_s: float
    be_tpot_p50_s: float
    be_tpot_p99_s: float


_COUNTED = ("requests_total", "finished_total", "prompt_tokens_total", "generation_tokens_total", "failed_total")


class Cluster:
    """All processes, the demand, recent events and samples."""

    def __init__(self, *, silence_s: float, history_s: float = HISTORY_S) -> None:
        self.processes: dict[InstanceId, Process] = {}
        self.demand = Demand()
        self.events: deque[Event] = deque(maxlen=MAX_EVENTS)
        self.samples: deque[Sample] = deque(maxlen=max(1, round(history_s / SAMPLE_EVERY_S)))
        self._silence_s = silence_s
        self._forget_s = min(history_s, FORGET_S)
        self._began_s: float | None = None
        self._sampled_s: float | None = None
        self._grown = dict.fromkeys(_COUNTED, 0.0)

    def on_heartbeat(self, now_s: float, beat: Heartbeat) -> list[Event]:
        """Take a heartbeat in; what it changed."""
        process = self.processes.get(beat.instance)
        events: list[Event] = []
        if process is None:
            if len(self.processes) >= MAX_INSTANCES:
                return []
            process = self.processes[beat.instance] = Process(beat.instance)
            events.append(Event(now_s, beat.instance, "appeared"))
        elif beat.incarnation < process.incarnation:
            return []  # a late word of a process that has been replaced
        elif beat.incarnation == process.incarnation and process.status is Status.LEFT:
            return []  # it said farewell; this one was still under way
        elif beat.incarnation != process.incarnation:
            left = process.status is Status.LEFT
            process.restarts += not left
            events.append(Event(now_s, beat.instance, "back" if left else "restarted"))
        elif process.status is Status.DOWN:
            events.append(Event(now_s, beat.instance, "back"))
        if events:
            process.since_s = now_s
        process.role, process.incarnation, process.pid = beat.role, beat.incarnation, beat.pid
        process.ready, process.metrics_url, process.stats = beat.ready, beat.metrics_url, dict(beat.stats)
        process.status, process.last_heartbeat_s, process.quiet_s = Status.UP, now_s, beat.quiet_s
        process.facts, process.warnings = dict(beat.facts), list(beat.warnings)
        process.metrics_token = beat.metrics_token
        process.growth.note(now_s, beat.incarnation, beat.stats, beat.counts)
        if process.role == "gateway":
            self._count(now_s, process)
        return self._note(events)

    def on_farewell(self, now_s: float, farewell: Farewell) -> list[Event]:
        """Take a farewell in; silence from now on is no failure."""
        process = self.processes.get(farewell.instance)
        if process is None or farewell.incarnation != process.incarnation or process.status is Status.LEFT:
            return []
        process.status, process.ready, process.since_s = Status.LEFT, False, now_s
        return self._note([Event(now_s, farewell.instance, "left")])

    def tick(self, now_s: float) -> list[Event]:
        """Let time pass: notice silence, forget the long gone, take a sample when one is due."""
        events = []
        for process in list(self.processes.values()):
            if process.status is Status.UP and process.age_s(now_s) > self._silence_s + process.quiet_s:
                process.status, process.ready, process.since_s = Status.DOWN, False, now_s
                events.append(Event(now_s, process.instance, "down"))
            elif process.status is not Status.UP and now_s - process.since_s > self._forget_s:
                del self.processes[process.instance]
        self.demand.advance(now_s)
        if self._sampled_s is None:
            self._sampled_s = self._began_s = now_s
        elif now_s - self._sampled_s >= SAMPLE_EVERY_S - 1e-6:
            self._sample(now_s, now_s - self._sampled_s)
        return self._note(events)

    def stats_for_manager(self, quiet_s: float = 0.0) -> ClusterStats:
        return ClusterStats(
            arrival_rate=self.demand.rate,
            arrival_rate_forecast=self.demand.forecast(),
            mean_prompt_tokens=self.demand.mean_prompt_tokens,
            mean_output_tokens=self.demand.mean_output_tokens,
            quiet_s=quiet_s,
        )

    def up(self) -> Iterable[Process]:
        return (process for process in self.processes.values() if process.status is Status.UP)

    def total(self, name: str, role: str | None = None) -> float:
        """Return the sum of one figure over the processes that are up."""
        return sum(p.stats.get(name, 0.0) for p in self.up() if role is None or p.role == role)

    def window_s(self, now_s: float) -> float:
        """Return the length of the window that ends now: a minute, less until the monitor has run so long."""
        return 0.0 if self._began_s is None else min(WINDOW_S, now_s - self._began_s)

    def figures(self, now_s: float) -> Figures:
        """Return the figures of the last minute, of all gateways."""
        gateways = [process for process in self.processes.values() if process.role == "gateway"]
        return figures(summed(each.growth.since(now_s) for each in gateways), self.window_s(now_s))

    def _count(self, now_s: float, gateway: Process) -> None:
        grown = {name: gateway.counters.increase(gateway.incarnation, gateway.stats, name) for name in _COUNTED}
        for name, amount in grown.items():
            self._grown[name] += amount
        self.demand.arrived(now_s, grown["requests_total"], grown["prompt_tokens_total"])
        self.demand.finished(now_s, grown["finished_total"], grown["generation_tokens_total"])

    def _sample(self, now_s: float, passed_s: float) -> None:
        blocks = self.total("kv_total_blocks")
        self.samples.append(
            Sample(
                at_s=now_s,
                requests_running=self.total("requests_running", "gateway"),
                requests_waiting=self.total("requests_waiting", "gateway"),
                arrivals_per_s=self._grown["requests_total"] / passed_s,
                output_tokens_per_s=self._grown["generation_tokens_total"] / passed_s,
                prompt_tokens_per_s=self._grown["prompt_tokens_total"] / passed_s,
                kv_used=self.total("kv_used_blocks") / max(1.0, blocks),
                kv_cached=self.total("kv_cached_blocks") / max(1.0, blocks),
                failed_per_s=self._grown["failed_total"] / passed_s,
                **{
                    f"{name}_{which}_{share}_s": math.nan if value is None else value
                    for name, each in self.figures(now_s).classes.items()
                    for which, latency in (("ttft", each.ttft), ("tpot", each.tpot))
                    for share, value in (("p50", latency.p50_s), ("p99", latency.p99_s))
                },
            )
        )
        self._sampled_s = now_s
        self._grown = dict.fromkeys(_COUNTED, 0.0)

    def _note(self, events: list[Event]) -> list[Event]:
        self.events.extend(events)
        return events
