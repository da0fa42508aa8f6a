"""Metrics: one family per part of the system, over the registry of one process, under the names dashboards know.

Called by the services, which own one family each (or several) and touch its fields as things happen; `service.py`
serves the registry. The constant labels `model_name` and `instance` are bound once; a field is called with the
varying label values and gives the child to touch:

    metrics.ttft_seconds("rt").observe(0.12)          metrics.request_success("rt", "stop").inc()

Never aggregates over processes (the monitor does) and never resets.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from typing import Generic, Literal, TypeVar, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest
from prometheus_client.samples import Sample

disable_created_metrics()  # type: ignore[no-untyped-call]  # a `_created` gauge for each counter: a seventh of all lines

PREFIX = "cohort"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
TOKEN_HEADER = "x-cohort-metrics-token"
"""Header in which the monitor shows a process the token of its heartbeats."""

TtftStage = Literal["tokenize", "predict", "bucket", "prefill_queue", "prefill", "transfer", "first_decode"]
TTFT_STAGES: tuple[TtftStage, ...] = get_args(TtftStage)

_BELOW_A_SECOND = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 0.75)
LATENCY_BUCKETS_S = (*_BELOW_A_SECOND, 1, 1.5, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 300, 600)
SHORT_BUCKETS_S = (1e-4, 2.5e-4, 5e-4, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
TOKEN_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 200_000)
ROW_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
FRACTION_BUCKETS = (0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)

M = TypeVar("M", Counter, Gauge, "ManyHistogram")


class Labelled(Generic[M]):
    """A metric whose constant labels are filled in. Children are kept, so touching one costs a dictionary look-up."""

    __slots__ = ("_children", "_constant", "_metric")

    def __init__(self, metric: M, constant: tuple[str, ...]) -> None:
        self._metric: M = metric
        self._constant = constant
        self._children: dict[tuple[str, ...], M] = {}

    def __call__(self, *values: str) -> M:
        child = self._children.get(values)
        if child is None:
            child = self._children[values] = self._metric.labels(*self._constant, *values)
        return child

    def values(self) -> list[tuple[dict[str, str], float]]:
        """Return labels, the constant ones included, and value of each child of a counter or gauge."""
        return [(sample.labels, sample.value) for sample in self.samples()]

    def children(self) -> list[tuple[tuple[str, ...], M]]:
        """Return the varying labels and the child of each that was touched."""
        return list(self._children.items())

    def samples(self) -> list[Sample]:
        """Return the samples of all children, a histogram's buckets, sums and counts one by one."""
        return [sample for family in self._metric.collect() for sample in family.samples]


class ManyHistogram(Histogram):
    """A histogram that takes many observations of one value at the cost of one, and finds its bucket by halves."""

    def observe(self, amount: float, exemplar: Mapping[str, str] | None = None) -> None:
        self.observe_many(amount, 1)

    def observe_many(self, amount: float, count: int) -> None:
        """Observe `amount` `count` times."""
        self._sum.inc(amount * count)
        self._buckets[bisect_left(self._upper_bounds, amount)].inc(count)

    @property
    def counts(self) -> list[float]:
        """Observations by bucket, not cumulative, `+Inf` last."""
        return [bucket.get() for bucket in self._buckets]

    @property
    def sum(self) -> float:
        value: float = self._sum.get()
        return value


def quantile(counts: Mapping[float, float], share: float) -> float | None:
    """Return a histogram's quantile, interpolated as Prometheus does; None where nothing was observed. `counts`: of
    each bucket alone, by its upper bound."""
    total = sum(counts.values())
    if not total:
        return None
    rank, below, lower = share * total, 0.0, 0.0
    for bound in sorted(counts):
        if below + counts[bound] >= rank:
            if math.isinf(bound):
                return lower
            return lower + (bound - lower) * (rank - below) / counts[bound] if counts[bound] else bound
        below, lower = below + counts[bound], bound
    return lower


class MetricFactory:
    """Maker of metrics named `cohort_…` with the constant labels; for families here and for a service's own stats."""

    def __init__(self, registry: CollectorRegistry, *, model_name: str, instance: str) -> None:
        self._registry = registry
        self._constant = (model_name, instance)

    def counter(self, name: str, documentation: str, labels: Sequence[str] = ()) -> Labelled[Counter]:
        """Make a counter, exported as cohort_<name>_total."""
        return self._ready(Counter(*self._named(name, documentation, labels), registry=self._registry), labels)

    def gauge(self, name: str, documentation: str, labels: Sequence[str] = ()) -> Labelled[Gauge]:
        return self._ready(Gauge(*self._named(name, documentation, labels), registry=self._registry), labels)

    def histogram(
        self, name: str, documentation: str, labels: Sequence[str] = (), buckets: Iterable[float] = LATENCY_BUCKETS_S
    ) -> Labelled[ManyHistogram]:
        named, bounds = self._named(name, documentation, labels), (*buckets, math.inf)
        return self._ready(ManyHistogram(*named, registry=self._registry, buckets=bounds), labels)

    @staticmethod
    def _named(name: str, documentation: str, labels: Sequence[str]) -> tuple[str, str, tuple[str, ...]]:
        return f"{PREFIX}_{name}", documentation, ("model_name", "instance", *labels)

    def _ready(self, metric: M, labels: Sequence[str]) -> Labelled[M]:
        labelled = Labelled(metric, self._constant)
        if not labels:
            labelled()  # shows as 0 from the first scrape on, so that rates and alerts have a start
        return labelled


class RequestMetrics:
    """The gateway's view of requests, from arrival to the last token. `class` is rt or be."""

    def __init__(self, make: MetricFactory) -> None:
        by_class = ("class",)
        self.in_flight = make.gauge("gateway_requests_in_flight", "Requests the gateway owns now", by_class)
        self.prompt_tokens = make.counter("prompt_tokens", "Prompt tokens of accepted requests", by_class)
        self.lora_requests = make.counter("lora_requests", "Accepted requests by LoRA adapter", ("adapter",))
        self.generation_tokens = make.counter("generation_tokens", "Tokens delivered to clients", by_class)
        self.request_success = make.counter(
            "request_success",
            "Requests that ended, by reason: stop, length, cancelled, failed, refused",
            ("class", "finished_reason"),
        )
        self.rejections = make.counter(
            "rejections", "Requests refused at arrival, by HTTP status and reason", ("class", "status", "reason")
        )
        self.requests_refused = make.counter(
            "requests_refused",
            "Refused by the manager: infeasible (no worker keeps the TTFT), impossible (none can hold it), queue_full",
            ("class", "reason"),
        )
        self.requests_demoted = make.counter(
            "requests_demoted", "Requests served as best-effort, as no worker keeps their TTFT SLO", by_class
        )
        self.resubmissions = make.counter("resubmissions", "Attempts after the first, by reason", ("reason",))
        self.default_predictions = make.counter(
            "default_predictions", "Requests that went on without an answer of the length predictor"
        )
        self.stale_tokens = make.counter("stale_tokens", "Tokens of older attempts or known positions, dropped")
        self.slo = make.counter(
            "slo_requests",
            "Finished requests by objective (ttft, tpot, deadline) and outcome (met, missed)",
            ("class", "objective", "outcome"),
        )
        self.ttft_seconds = make.histogram("time_to_first_token_seconds", "Arrival to first token", by_class)
        self.ttft_stage_seconds = make.histogram(
            "ttft_stage_seconds",
            "Parts that time to first token consists of",
            ("class", "stage"),
            (*SHORT_BUCKETS_S, 60.0, 120.0, 300.0, 600.0),
        )
        self.itl_seconds = make.histogram(
            "inter_token_latency_seconds", "Time between two tokens of a stream", by_class
        )
        self.tpot_seconds = make.histogram(
            "request_time_per_output_token_seconds", "Mean time per output token after the first, by request", by_class
        )
        self.e2e_seconds = make.histogram("e2e_request_latency_seconds", "Arrival to last token", by_class)
        self.queue_seconds = make.histogram(
            "request_queue_time_seconds", "Waiting before the first computation", by_class
        )
        self.prefill_seconds = make.histogram("request_prefill_time_seconds", "Computing the prompt", by_class)
        self.decode_seconds = make.histogram("request_decode_time_seconds", "First token to last token", by_class)
        self.request_prompt_tokens = make.histogram(
            "request_prompt_tokens", "Prompt tokens of a request", by_class, TOKEN_BUCKETS
        )
        self.request_generation_tokens = make.histogram(
            "request_generation_tokens", "Output tokens of a request", by_class, TOKEN_BUCKETS
        )

    def observe_ttft_stages(self, traffic_class: str, seconds_by_stage: dict[TtftStage, float]) -> None:
        for stage, seconds in seconds_by_stage.items():
            self.ttft_stage_seconds(traffic_class, stage).observe(max(0.0, seconds))


class EngineMetrics:
    """A worker's scheduler, cache and iterations."""

    def __init__(self, make: MetricFactory) -> None:
        self.requests_running = make.gauge("num_requests_running", "Requests in the running batch", ("class",))
        self.requests_waiting = make.gauge("num_requests_waiting", "Requests waiting to be scheduled", ("class",))
        self.requests_awaiting_kv = make.gauge("num_requests_awaiting_kv", "Requests whose KV is under way to here")
        self.requests_parked = make.gauge("num_requests_parked", "Prefilled requests whose KV waits for a decoder")
        self.policy_stats = make.gauge(
            "worker_policy", "The worker's policies' own metrics, by policy interface and name", ("interface", "metric")
        )
        self.kv_cache_usage = make.gauge("kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1")
        self.kv_blocks = make.gauge("kv_blocks", "KV blocks by state: used, cached, free", ("state",))
        self.host_kv_blocks = make.gauge("host_kv_blocks", "Host pool blocks by state: used, free", ("state",))
        self.prefix_cache_queries = make.counter("prefix_cache_queries", "Tokens looked up in the prefix cache")
        self.prefix_cache_hits = make.counter("prefix_cache_hits", "Tokens found in the prefix cache")
        self.preemptions = make.counter("num_preemptions", "Requests preempted, by way: swap, recompute", ("way",))
        self.prefill_tokens = make.counter("engine_prefill_tokens", "Prompt tokens computed, recomputation included")
        self.decode_tokens = make.counter("engine_decode_tokens", "Tokens produced")
        self.swapped_blocks = make.counter(
            "swapped_blocks", "KV blocks moved between device and host (in, out)", ("direction",)
        )
        self.swapped_slots = make.counter(
            "swapped_slots", "Single KV slots moved between device and host (in, out)", ("direction",)
        )
        self.device = make.gauge("worker_device", "1: this worker computes on that device of that host", ("device",))
        self.engine_info = make.gauge(
            "worker_engine",
            "1: this worker computes on such a device, with these kernels",
            ("device", "capability", "dtype", "kernels", "decode_attention", "prefill_attention"),
        )
        self.decode_classes_recorded = make.gauge(
            "decode_classes_recorded", "Batch sizes whose decode steps are recorded as CUDA graphs; 0 = none is"
        )
        self.out_of_memory = make.counter("out_of_memory_retries", "Batches halved because the device refused memory")
        self.unstaged_rows = make.counter(
            "prefill_rows_without_flash",
            "Prefill rows left to slower attention: their step's contexts were too long to gather",
        )
        self.kernel_compilations = make.counter(
            "kernel_compilations", "Variants of GPU kernels compiled after the worker was ready; should stay 0"
        )
        self.step_time_error = make.gauge(
            "step_time_error",
            "Mean relative error of foreseen iteration times, by kind: prefill, decode, mixed",
            ("kind",),
        )
        self.step_seconds = make.histogram(
            "step_seconds", "One iteration, by kind: prefill, decode, mixed", ("kind",), SHORT_BUCKETS_S
        )
        self.step_rows = make.histogram("step_rows", "Requests in an iteration", (), ROW_BUCKETS)
        self.step_tokens = make.histogram("iteration_tokens", "Tokens in an iteration", (), TOKEN_BUCKETS)
        self.schedule_seconds = make.histogram("schedule_seconds", "Deciding an iteration", (), SHORT_BUCKETS_S)
        self.steps_ahead = make.counter("steps_planned_ahead", "Decode steps begun behind the one that ran")
        self.steps_not_ahead = make.counter(
            "steps_not_planned_ahead",
            "Steps whose next one had to be decided after them, by reason: prompts, ended, request, kv_transfer, news, "
            "policy, memory, shared, drafts",
            ("reason",),
        )
        self.drafted_rows = make.counter("drafted_rows", "Decode rows computed with drafted tokens", ("class",))
        self.drafted_tokens = make.counter("drafted_tokens", "Drafted tokens that were computed", ("class",))
        self.accepted_tokens = make.counter("accepted_tokens", "Drafted tokens that were right", ("class",))
        self.drafts_of = make.counter("drafts", "Drafted tokens that were computed, by drafter", ("drafter",))
        self.right_drafts_of = make.counter("right_drafts", "Drafted tokens that were right, by drafter", ("drafter",))
        self.drafting_seconds = make.histogram(
            "drafting_seconds", "A draft model's part of an iteration", (), SHORT_BUCKETS_S
        )
        self.draft_filled_tokens = make.counter(
            "draft_filled_tokens",
            "Positions a draft model computed first, of prompts and of KV that came from elsewhere",
        )
        self.wasted_rows = make.counter("wasted_rows", "Rows computed for requests that had ended meanwhile")
        self.late_rows = make.counter("late_rows", "Rows without a token, because what a grammar allows was not known")
        self.loras_held = make.gauge("lora_adapters_held", "LoRA adapters that requests need not wait for")
        self.lora_loads = make.counter("lora_loads", "LoRA adapters read, by outcome: loaded, failed", ("outcome",))
        self.gap_seconds = make.histogram(
            "iteration_gap_seconds", "Between the rows of two iterations", (), SHORT_BUCKETS_S
        )


class TransferMetrics:
    """KV between workers. `link` is ucx or zmq, `direction` is sent or received."""

    def __init__(self, make: MetricFactory) -> None:
        self.seconds = make.histogram(
            "kv_transfer_seconds", "One run of blocks over the link", ("link", "direction"), SHORT_BUCKETS_S
        )
        self.bytes = make.counter("kv_transfer_bytes", "KV bytes moved", ("link", "direction"))
        self.failures = make.counter(
            "kv_transfer_failures", "Runs that failed: timeout, checksum, error, aborted", ("link", "reason")
        )
        self.bytes_per_s = make.gauge(
            "kv_link_bytes_per_second", "What a link carries to a worker, by what went there lately", ("link", "peer")
        )
        self.paths = make.gauge(
            "kv_link_path", "1 = by this a link reaches a worker: transport/device", ("link", "peer", "path")
        )
        self.retries = make.counter("kv_transfer_retries", "Runs sent again over a second path", ("link",))
        self.kv_transfers = make.counter("kv_transfers", "Sequences taken over from another worker")
        self.exposed_seconds = make.counter(
            "kv_transfer_exposed_seconds", "Part of KV transfers during which nothing was computed for the request"
        )
        self.leases = make.gauge("kv_leases", "Leases open now")
        self.expired_leases = make.counter("kv_expired_leases", "Leases that were not renewed in time")
        self.quarantined_blocks = make.gauge(
            "kv_quarantined_blocks", "Blocks kept out of use because a link could not promise silence"
        )


class SchedulerMetrics:
    """The manager's decisions."""

    def __init__(self, make: MetricFactory) -> None:
        self.requests_waiting = make.gauge("num_requests_waiting", "Requests not yet placed", ("class",))
        self.workers = make.gauge(
            "workers", "Workers registered, by role and state (alive, draining, dead)", ("role", "state")
        )
        self.leads = make.gauge("manager_leads", "1 = this manager leads, 0 = it stands by")
        self.buckets = make.gauge("buckets", "Buckets in use")
        self.placements = make.counter("placements", "Requests placed, by reason", ("reason",))
        self.attempts_lost = make.counter("attempts_lost", "Attempts lost and given back to their gateway", ("reason",))
        self.queue_seconds = make.histogram("placement_queue_seconds", "Submitted to placed", ("class",))
        self.decision_seconds = make.histogram(
            "decision_seconds", "One call of a policy, by policy interface", ("interface",), SHORT_BUCKETS_S
        )
        self.batch_size = make.histogram("placed_batch_size", "Requests in a batch the manager formed", (), ROW_BUCKETS)
        self.padding_waste = make.histogram(
            "padding_waste_ratio", "Share of a batch that would be padding", (), FRACTION_BUCKETS
        )
        self.order_stats = make.gauge("prefill_order", "The prefill order's own metrics, by name", ("metric",))


def exposition(registry: CollectorRegistry) -> bytes:
    """Return Prometheus text, format 0.0.4; send it with `CONTENT_TYPE`."""
    return generate_latest(registry)
