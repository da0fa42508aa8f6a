"""A gateway's metrics under vLLM's names, for routers, autoscalers and boards that know no others.

Registered by `service.py`, collected at a scrape of this gateway's `/metrics`, and left out of what the monitor gets.
All values are of this gateway's own requests, so that a sum over gateways has each request once; the use of the KV
cache, whose sum means nothing, is the cluster's. Counts nothing itself: each family is one of `cohort_…`, its classes
added up, since readers take a single series (`tests/services/gateway/apis/test_vllm_names.py` lists who reads what).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from prometheus_client import Counter
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from cohort.common.clock import Clock
from cohort.common.config import Config
from cohort.common.machines.gateway.gateway import GatewayMachine
from cohort.common.process.metrics import Labelled, ManyHistogram, RequestMetrics
from cohort.common.types import FinishReason
from cohort.services.gateway.generation.request_stats import RequestStats

_ENGINE = "0"
"""Label `engine`: of its engines behind one server vLLM numbers the data-parallel ones."""
_FINISHED = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.CANCELLED: "abort",
    FinishReason.FAILED: "error",
}


class VllmNames(Collector):
    def __init__(
        self,
        metrics: RequestMetrics,
        stats: RequestStats,
        machine: GatewayMachine,
        config: Config,
        clock: Clock,
        model_name: str,
    ) -> None:
        self._metrics = metrics
        self._stats = stats
        self._machine = machine
        self._config = config
        self._clock = clock
        self._labels = {"model_name": model_name, "engine": _ENGINE}

    def collect(self) -> Iterator[Metric]:
        yield from self._gauges()
        yield from self._counters()
        yield from self._histograms()

    def _gauges(self) -> Iterator[Metric]:
        ledger, load = self._machine.ledger, self._machine.link.load
        waiting = ledger.waiting_requests
        yield self._gauge("num_requests_running", "Requests that are on a worker", len(ledger) - waiting)
        yield self._gauge("num_requests_waiting", "Requests that are on no worker yet", waiting)
        total = load.total_tokens if load else 0
        used = 1 - load.free_tokens / total if load and total else 0.0
        for name in ("kv_cache_usage_perc", "gpu_cache_usage_perc"):
            yield self._gauge(name, "Share of all workers' KV blocks in use, 0 to 1", used)
        block = self._config.kv.block_size
        blocks = {"block_size": str(block), "num_gpu_blocks": str(total // block)}
        yield self._gauge("cache_config_info", "1: so many KV blocks, each of so many tokens", 1, blocks)
        yield self._loras()

    def _loras(self) -> Metric:
        running: set[str] = set()
        waiting: set[str] = set()
        for entry in self._machine.ledger.entries():
            if adapter := entry.request.adapter_name:
                (waiting if entry.queued_tokens else running).add(adapter)
        adapters = {
            "max_lora": str(self._config.engine.max_loras),
            "waiting_lora_adapters": ",".join(sorted(waiting)),
            "running_lora_adapters": ",".join(sorted(running)),
        }
        return self._gauge("lora_requests_info", "Now: adapters of requests", self._clock.wall_s(), adapters)

    def _counters(self) -> Iterator[Metric]:
        metrics, stats = self._metrics, self._stats
        yield self._counter("prompt_tokens", "Prompt tokens of accepted requests", _sum(metrics.prompt_tokens))
        yield self._counter("generation_tokens", "Tokens delivered to clients", _sum(metrics.generation_tokens))
        yield self._counter("num_preemptions", "Preemptions of requests that ended", stats.preemptions)
        for prefix in ("", "gpu_"):
            yield self._counter(f"{prefix}prefix_cache_queries", "Prompt tokens looked up", stats.looked_up_tokens)
            yield self._counter(f"{prefix}prefix_cache_hits", "Prompt tokens found in the cache", stats.cached_tokens)
        success = CounterMetricFamily(
            "vllm:request_success", "Requests that ended, by reason", labels=[*self._labels, "finished_reason"]
        )
        for reason, name in _FINISHED.items():
            ended = _sum(metrics.request_success, finished_reason=reason.value)
            success.add_metric([*self._labels.values(), name], ended)
        yield success

    def _histograms(self) -> Iterator[Metric]:
        metrics = self._metrics
        yield self._histogram("time_to_first_token_seconds", "Arrival to first token", metrics.ttft_seconds)
        for name in ("inter_token_latency_seconds", "time_per_output_token_seconds"):  # today's name, the former one
            yield self._histogram(name, "Time between two tokens of a stream", metrics.itl_seconds)
        yield self._histogram(
            "request_time_per_output_token_seconds", "Mean time per output token, by request", metrics.tpot_seconds
        )
        yield self._histogram("e2e_request_latency_seconds", "Arrival to last token", metrics.e2e_seconds)
        yield self._histogram("request_queue_time_seconds", "Before the first computation", metrics.queue_seconds)
        yield self._histogram("request_prefill_time_seconds", "Computing the prompt", metrics.prefill_seconds)
        yield self._histogram("request_decode_time_seconds", "First to last token", metrics.decode_seconds)
        yield self._histogram("request_prompt_tokens", "Prompt tokens of a request", metrics.request_prompt_tokens)
        yield self._histogram(
            "request_generation_tokens", "Output tokens of a request", metrics.request_generation_tokens
        )

    def _gauge(self, name: str, text: str, value: float, more: dict[str, str] | None = None) -> Metric:
        labels = self._labels | (more or {})
        family = GaugeMetricFamily(f"vllm:{name}", text, labels=list(labels))
        family.add_metric(list(labels.values()), value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(f"vllm:{name}", text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family

    def _histogram(self, name: str, text: str, histogram: Labelled[ManyHistogram]) -> Metric:
        """Return the histogram over all classes. Buckets of `collect` are cumulative, in order, `+Inf` last."""
        buckets: defaultdict[str, float] = defaultdict(float)
        total = 0.0
        for sample in histogram.samples():
            if sample.name.endswith("_bucket"):
                buckets[sample.labels["le"]] += sample.value
            elif sample.name.endswith("_sum"):
                total += sample.value
        family = HistogramMetricFamily(f"vllm:{name}", text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), list(buckets.items()) or [("+Inf", 0.0)], total)
        return family


def _sum(counter: Labelled[Counter], **having: str) -> float:
    """Return the counter over all children that have these labels."""
    return sum(value for labels, value in counter.values() if having.items() <= labels.items())
