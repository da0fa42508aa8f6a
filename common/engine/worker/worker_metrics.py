"""A worker's metrics: one table of its stats for Prometheus and for the heartbeat, and every step's facts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, get_args

import msgspec
from prometheus_client import Counter, Gauge

from cohort.common.engine.device import compiled_kernels
from cohort.common.engine.worker.slow_iterations import SlowIterations
from cohort.common.machines.worker.worker import WorkerMachine
from cohort.common.machines.worker.worker_state import NotAhead, WorkerCounters
from cohort.common.policies.interface import IterationPlan
from cohort.common.policies.step_times.profile_table import IterationKind
from cohort.common.process.metrics import EngineMetrics, MetricFactory, TransferMetrics
from cohort.common.sequence import Phase
from cohort.common.types import DraftSource, TrafficClass, WorkerStats


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Sources of a worker's stats. `used_blocks` are neither free nor reusable."""

    stats: WorkerStats
    counters: WorkerCounters
    running: dict[str, int]
    waiting: dict[str, int]
    """Requests that run, and all others, by traffic class."""
    held_blocks: int
    quarantined_blocks: int
    oom_retries: int
    unstaged_rows: int
    """Prefill rows whose step's contexts were too long for flash attention."""
    kernel_compilations: int
    """Compilations since the worker was ready."""
    step_time_errors: dict[IterationKind, float]
    """Relative errors of the learned iteration times (`ProfileTable.error_of`)."""

    @property
    def used_blocks(self) -> int:
        return self.stats.total_blocks - self.stats.free_blocks - self.stats.cached_blocks


@dataclass(frozen=True, slots=True)
class Stat:
    """Number to show. `name`: in the heartbeat, "" = not there. `metric`: in Prometheus, None = not there."""

    name: str
    get: Callable[[Snapshot], float]
    metric: Gauge | Counter | None = None


def stats(engine: EngineMetrics, transfer: TransferMetrics) -> tuple[Stat, ...]:
    return (
        Stat("", lambda s: s.running["rt"], engine.requests_running("rt")),
        Stat("", lambda s: s.running["be"], engine.requests_running("be")),
        Stat("", lambda s: s.waiting["rt"], engine.requests_waiting("rt")),
        Stat("", lambda s: s.waiting["be"], engine.requests_waiting("be")),
        Stat("running", lambda s: s.stats.running),
        Stat("waiting", lambda s: s.stats.waiting),
        Stat("awaiting_kv", lambda s: s.stats.awaiting_kv, engine.requests_awaiting_kv()),
        Stat("parked", lambda s: s.stats.parked, engine.requests_parked()),
        Stat("", lambda s: s.used_blocks / max(1, s.stats.total_blocks), engine.kv_cache_usage()),
        Stat("kv_total_blocks", lambda s: s.stats.total_blocks),
        Stat("kv_used_blocks", lambda s: s.used_blocks, engine.kv_blocks("used")),
        Stat("kv_cached_blocks", lambda s: s.stats.cached_blocks, engine.kv_blocks("cached")),
        Stat("kv_free_blocks", lambda s: s.stats.free_blocks, engine.kv_blocks("free")),
        Stat("", lambda s: s.stats.host_blocks - s.stats.host_free_blocks, engine.host_kv_blocks("used")),
        Stat("host_free_blocks", lambda s: s.stats.host_free_blocks, engine.host_kv_blocks("free")),
        Stat("leases", lambda s: s.stats.leases, transfer.leases()),
        Stat("expired_leases_total", lambda s: s.stats.expired_leases, transfer.expired_leases()),
        Stat("held_blocks", lambda s: s.held_blocks),
        Stat("quarantined_blocks", lambda s: s.quarantined_blocks),
        Stat("step_ms", lambda s: s.stats.step_s * 1000),
        *(
            Stat(
                f"step_time_error_{kind}",
                partial(_of, lambda s: s.step_time_errors, kind),
                engine.step_time_error(kind),
            )
            for kind in get_args(IterationKind)
        ),
        Stat("steps_total", lambda s: s.counters.steps),
        Stat("", lambda s: s.stats.prefix_queries, engine.prefix_cache_queries()),
        Stat("", lambda s: s.stats.prefix_hits, engine.prefix_cache_hits()),
        Stat("prefill_tokens_total", lambda s: s.counters.prefill_tokens, engine.prefill_tokens()),
        Stat("decode_tokens_total", lambda s: s.counters.decode_tokens, engine.decode_tokens()),
        Stat("", lambda s: s.oom_retries, engine.out_of_memory()),
        Stat("", lambda s: s.unstaged_rows, engine.unstaged_rows()),
        Stat("", lambda s: s.kernel_compilations, engine.kernel_compilations()),
        Stat("planned_ahead_total", lambda s: s.counters.planned_ahead, engine.steps_ahead()),
        *(
            Stat("", partial(_of, lambda s: s.counters.not_ahead, reason), engine.steps_not_ahead(reason))
            for reason in get_args(NotAhead)
        ),
        *(
            Stat(f"{name}_{of_class}_total", partial(_of, totals, of_class), metric(of_class))
            for name, totals, metric in (
                ("drafted_rows", lambda s: s.counters.drafted_rows, engine.drafted_rows),
                ("drafted_tokens", lambda s: s.counters.drafted_tokens, engine.drafted_tokens),
                ("accepted_tokens", lambda s: s.counters.accepted_tokens, engine.accepted_tokens),
            )
            for of_class in get_args(TrafficClass)
        ),
        *(
            Stat("", partial(_of, totals, source), metric(source))
            for totals, metric in (
                (lambda s: s.counters.drafts_of, engine.drafts_of),
                (lambda s: s.counters.right_of, engine.right_drafts_of),
            )
            for source in get_args(DraftSource)
        ),
        Stat("wasted_rows_total", lambda s: s.counters.wasted_rows, engine.wasted_rows()),
        Stat("late_rows_total", lambda s: s.counters.late_rows, engine.late_rows()),
        Stat("loras_held", lambda s: len(s.stats.adapters), engine.loras_held()),
        Stat("lora_loads_total", lambda s: s.counters.adapter_loads, engine.lora_loads("loaded")),
        Stat("", lambda s: s.counters.adapter_failures, engine.lora_loads("failed")),
        Stat("preemptions_total", lambda s: s.counters.preemptions),
        Stat("transfers_total", lambda s: s.counters.transfers_in + s.counters.transfers_out),
        Stat("kv_transfers_in_total", lambda s: s.counters.transfers_in, transfer.kv_transfers()),
        Stat("exposed_transfer_seconds_total", lambda s: s.counters.exposed_transfer_s, transfer.exposed_seconds()),
        Stat("transfer_failures_total", lambda s: s.counters.transfer_failures),
        Stat("transfer_retries_total", lambda s: s.counters.transfer_retries, transfer.retries("any")),
        Stat("transfer_stalls_total", lambda s: s.counters.stalls),
        Stat("misnamed_total", lambda s: s.counters.misnamed),
        Stat("fenced_total", lambda s: s.counters.fenced),
        Stat("pool_offloads_total", lambda s: s.counters.pooled),
        Stat("pool_prefetches_total", lambda s: s.counters.prefetched),
        Stat("pool_direct_transfers_total", lambda s: s.counters.from_host),
        Stat("device_memory_free_bytes", lambda s: s.stats.memory_free_bytes),
    )


def _of(totals: Callable[[Snapshot], Mapping[Any, float]], name: str, snapshot: Snapshot) -> float:
    return totals(snapshot).get(name, 0)


class WorkerMetrics:
    def __init__(
        self,
        make: MetricFactory,
        machine: WorkerMachine,
        oom_retries: Callable[[], int],
        unstaged_rows: Callable[[], int],
    ) -> None:
        self.engine = EngineMetrics(make)
        self.engine.device(machine.setup.capacity.device).set(1)
        if (facts := machine.setup.capacity.engine) is not None:
            self.engine.engine_info(*msgspec.structs.astuple(facts)).set(1)
        self.transfer = TransferMetrics(make)
        self.slow = SlowIterations(machine.times)
        self._machine = machine
        self._oom_retries, self._unstaged_rows = oom_retries, unstaged_rows
        self._compiled_at_start = compiled_kernels.compilations()
        self._stats = stats(self.engine, self.transfer)
        self._exported: dict[int, float] = {}
        """Totals as last exported, by their place in the table: a counter grows by the difference."""

    def export(self, stats: WorkerStats, quarantined_blocks: int) -> None:
        now = self._snapshot(stats, quarantined_blocks)
        for place, stat in enumerate(self._stats):
            match stat.metric:
                case Gauge() as gauge:
                    gauge.set(stat.get(now))
                case Counter() as counter:
                    total = stat.get(now)
                    counter.inc(max(0, total - self._exported.get(place, 0)))
                    self._exported[place] = total
                case None:
                    pass
        for interface, name, value in self._policy_stats():
            self.engine.policy_stats(interface, name).set(value)

    def heartbeat(self, stats: WorkerStats, quarantined_blocks: int) -> dict[str, float]:
        now = self._snapshot(stats, quarantined_blocks)
        shown = {stat.name: stat.get(now) for stat in self._stats if stat.name}
        return shown | {name: value for _, name, value in self._policy_stats()}

    def counts(self) -> dict[str, list[float]]:
        """Return iterations, their seconds and rows, behind the figures of the last minute (`Heartbeat.counts`)."""
        rows = self.engine.step_rows()
        seconds = sum(child.sum for _, child in self.engine.step_seconds.children())
        return {"steps": [sum(rows.counts), seconds, rows.sum]}

    def step(self, plan: IterationPlan, latency_s: float) -> None:
        engine, self.slow.last = self.engine, (plan, latency_s)
        longest = max((row.count for row in plan.rows), default=0)
        shortest = min((row.count for row in plan.rows), default=0)
        kind = "decode" if longest <= 1 else "prefill" if shortest > 1 else "mixed"
        engine.step_seconds(kind).observe(latency_s)
        engine.step_rows().observe(len(plan.rows))
        engine.step_tokens().observe(plan.tokens)
        for preempted in plan.preempted:
            engine.preemptions(preempted.how).inc()
        for copy in plan.copies:
            moved = engine.swapped_blocks if copy.unit == "block" else engine.swapped_slots
            moved(copy.direction).inc(len(copy.device))

    def drafting(self, seconds: float, filled: int) -> None:
        self.engine.drafting_seconds().observe(seconds)
        self.engine.draft_filled_tokens().inc(filled)

    def _snapshot(self, stats: WorkerStats, quarantined_blocks: int) -> Snapshot:
        machine = self._machine
        waiting, running = {"rt": 0, "be": 0}, {"rt": 0, "be": 0}
        for sequence in machine.sequences():
            group = running if sequence.phase is Phase.RUNNING else waiting
            group[sequence.request.traffic_class] += 1
        held = sum(machine.kv.owners().values())
        times = machine.times
        errors: dict[IterationKind, float] = {
            kind: times.table.error_of(kind) if times is not None else 0.0 for kind in get_args(IterationKind)
        }
        retries, unstaged = self._oom_retries(), self._unstaged_rows()
        compiled = compiled_kernels.compilations() - self._compiled_at_start
        return Snapshot(
            stats, machine.counters, running, waiting, held, quarantined_blocks, retries, unstaged, compiled, errors
        )

    def _policy_stats(self) -> Iterator[tuple[str, str, float]]:
        for interface, policy in (
            ("iteration", self._machine.scheduler),
            ("allocation", self._machine.kv),
            ("speculation", self._machine.drafts),
        ):
            for name, value in policy.metrics().items():
                yield interface, name, value
