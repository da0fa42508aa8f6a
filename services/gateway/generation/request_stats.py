"""Measurements of one gateway's requests: metrics, the stats of its heartbeat, a log line per request.

Told by `streams.py` of every admitted request, its tokens and its end, and by `generator.py` of refusals; `service.py`
reads totals and counts twice a second. Decides nothing.
"""

from __future__ import annotations

import structlog

from cohort.common.machines.entry import Entry
from cohort.common.process.metrics import RequestMetrics
from cohort.common.types import FinishReason, Request, TrafficClass
from cohort.services.gateway.generation.delta import GatewayTimes, slo_outcomes, tpot_s, ttft_stages
from cohort.services.gateway.generation.past_requests import PastRequests
from cohort.services.gateway.generation.traffic_report import TrafficReport

_TOTALS = (
    "requests_total",
    "finished_total",
    "failed_total",
    "cancelled_total",
    "refused_total",
    "rejected_total",
    "prompt_tokens_total",
    "generation_tokens_total",
)
_TOTAL_OF = {FinishReason.CANCELLED: "cancelled_total", FinishReason.FAILED: "failed_total"}


class RequestStats:
    def __init__(self, metrics: RequestMetrics, log: structlog.stdlib.BoundLogger) -> None:
        self.recorded = dict.fromkeys(_TOTALS, 0)
        """Totals for the heartbeat."""
        self.past = PastRequests()
        self.traffic: TrafficReport | None = None
        """Report for the planner; None without one (section `planner`)."""
        self.looked_up_tokens = self.cached_tokens = self.preemptions = 0
        """Counts of requests that had a first token: prompt tokens, those found in a prefix cache, preemptions. Workers
        export the same as metrics; here they are of this gateway's requests (`vllm_names.py`)."""
        self._metrics = metrics
        self._log = log
        self._dropped_tokens = self._default_predictions = 0
        """Part of the machine's totals that the metrics have already."""
        self._update_gaps: dict[tuple[TrafficClass, float, int], int] = {}
        """Updates until `observe` by class, gap and tokens, in which a step's rows are often alike."""

    def admitted(self, request: Request) -> None:
        self._metrics.in_flight(request.traffic_class).inc()
        self._metrics.prompt_tokens(request.traffic_class).inc(request.prompt_tokens)
        self.recorded["requests_total"] += 1
        self.recorded["prompt_tokens_total"] += request.prompt_tokens
        if self.traffic is not None:
            self.traffic.admitted(request)
        if request.adapter:
            self._metrics.lora_requests(request.adapter_name).inc()

    def totals(self, dropped_tokens: int, default_predictions: int) -> None:
        if more := dropped_tokens - self._dropped_tokens:
            self._dropped_tokens = dropped_tokens
            self._metrics.stale_tokens().inc(more)
        if more := default_predictions - self._default_predictions:
            self._default_predictions = default_predictions
            self._metrics.default_predictions().inc(more)

    def resubmitted(self, entry: Entry) -> None:
        self._log.info(
            "resubmitting",
            request_id=entry.request_id,
            attempt=entry.attempt.number,
            tokens=len(entry.output),
            reason=entry.lost_because,
        )
        self._metrics.resubmissions(entry.lost_kind).inc()

    def first_tokens(self, now_s: float, entry: Entry, times: GatewayTimes, count: int) -> None:
        traffic_class = entry.request.traffic_class
        self._metrics.generation_tokens(traffic_class).inc(count)
        ttft_s = now_s - times.arrived_s
        self._metrics.ttft_seconds(traffic_class).observe(ttft_s)
        self._metrics.observe_ttft_stages(traffic_class, ttft_stages(times, entry))
        self.recorded["generation_tokens_total"] += count

    def tokens(self, traffic_class: TrafficClass, since_s: float, count: int) -> None:
        """Record `count` tokens that came `since_s` after the ones before. They count once `observe` is called."""
        key = (traffic_class, since_s, count)
        counts = self._update_gaps
        counts[key] = counts.get(key, 0) + 1

    def observe(self) -> None:
        """Count what `tokens` recorded, in one go: a step's tokens come together."""
        if not self._update_gaps:
            return
        for (traffic_class, since_s, count), updates in self._update_gaps.items():
            gap_s = since_s / count  # tokens that came together share the time
            self._metrics.generation_tokens(traffic_class).inc(updates * count)
            self._metrics.itl_seconds(traffic_class).observe_many(gap_s, updates * count)
            self.recorded["generation_tokens_total"] += updates * count
        self._update_gaps.clear()

    def rejected(self, traffic_class: TrafficClass, status: int, reason: str) -> None:
        """Count a request that was rejected before it was accepted."""
        self.recorded["rejected_total"] += 1
        self._metrics.rejections(traffic_class, str(status), reason).inc()

    def counts(self) -> dict[str, list[float]]:
        """Return what the monitor's figures of the last minute are made of (`Heartbeat.counts`), from the metrics."""
        metrics, found = self._metrics, dict[str, list[float]]()
        latencies = {"ttft": metrics.ttft_seconds, "tpot": metrics.tpot_seconds, "itl": metrics.itl_seconds}
        for name, histogram in latencies.items():
            found |= {f"{name} {labels[0]}": child.counts for labels, child in histogram.children()}
        for labels, value in metrics.slo.values():
            judged = found.setdefault(f"slo {labels['class']} {labels['objective']}", [0.0, 0.0])
            judged[labels["outcome"] != "met"] += value
        for labels, value in (*metrics.requests_refused.values(), *metrics.rejections.values()):
            found.setdefault(f"refused {labels['reason']}", [0.0])[0] += value
        return found

    def ended(self, now_s: float, entry: Entry, times: GatewayTimes, finish: FinishReason, reason: str) -> None:
        self.past.ended(now_s, entry, times, finish, reason)
        if self.traffic is not None:
            self.traffic.ended(now_s, entry, times, finish)
        e2e_s = now_s - times.arrived_s
        ttft_s = None if entry.first_token_s is None else entry.first_token_s - times.arrived_s
        self._count(entry, times, finish, ttft_s, e2e_s)
        refused = bool(entry.refused_because)
        write = self._log.warning if finish is FinishReason.FAILED and not refused else self._log.info
        fields: dict[str, object] = {}
        if times.trace is not None:
            fields["trace_id"] = times.trace.ended(now_s, entry, ttft_stages(times, entry), finish, reason)
        if entry.forecast_s:
            fields |= {"forecast_ttft_s": round(entry.forecast_s, 3), "slo_ttft_s": entry.request.slo.ttft_s}
        write(
            "request refused" if refused else "request finished",
            request_id=entry.request_id,
            status=entry.refused_because or finish.value,
            reason=reason or None,
            prompt_tokens=entry.request.prompt_tokens,
            output_tokens=len(entry.output),
            cached_tokens=entry.cached_tokens,
            ttft_s=None if ttft_s is None else round(ttft_s, 6),
            e2e_s=round(e2e_s, 6),
            attempts=entry.attempt.number + 1,
            instances=entry.instances,
            traffic_class=entry.request.traffic_class,
            best_effort=entry.best_effort or None,
            adapter=entry.request.adapter_name or None,
            **fields,
        )

    def _count(
        self, entry: Entry, times: GatewayTimes, finish: FinishReason, ttft_s: float | None, e2e_s: float
    ) -> None:
        request, metrics = entry.request, self._metrics
        traffic_class = request.traffic_class
        metrics.in_flight(traffic_class).dec()
        if entry.refused_because:
            metrics.request_success(traffic_class, "refused").inc()
            metrics.requests_refused(traffic_class, entry.refused_because).inc()
            self.recorded["refused_total"] += 1
            self._count_slo(entry, times, None, None, None)  # missed; its times say nothing of how fast we were
            return
        metrics.request_success(traffic_class, finish.value).inc()
        self.recorded[_TOTAL_OF.get(finish, "finished_total")] += 1
        if entry.first_times is not None:
            self.looked_up_tokens += request.prompt_tokens
            self.cached_tokens += entry.cached_tokens
            self.preemptions += sum(part.preemptions for part in entry.times.values())
        if entry.best_effort:
            metrics.requests_demoted(traffic_class).inc()
        if finish is FinishReason.CANCELLED:
            return  # its times show when the client left, not how fast we were
        metrics.e2e_seconds(traffic_class).observe(e2e_s)
        metrics.request_prompt_tokens(traffic_class).observe(request.prompt_tokens)
        metrics.request_generation_tokens(traffic_class).observe(len(entry.output))
        if entry.first_times is not None:
            metrics.queue_seconds(traffic_class).observe(entry.bucket_s + entry.first_times.queue_s)
            metrics.prefill_seconds(traffic_class).observe(entry.first_times.prefill_s)
        if entry.first_token_s is not None and entry.last_token_s is not None:
            metrics.decode_seconds(traffic_class).observe(entry.last_token_s - entry.first_token_s)
        per_token_s = tpot_s(entry)
        if per_token_s is not None:
            metrics.tpot_seconds(traffic_class).observe(per_token_s)
        self._count_slo(entry, times, ttft_s, per_token_s, None if finish is FinishReason.FAILED else e2e_s)

    def _count_slo(
        self, entry: Entry, times: GatewayTimes, ttft_s: float | None, per_token_s: float | None, e2e_s: float | None
    ) -> None:
        request = entry.request
        outcomes = slo_outcomes(request.slo, ttft_s=ttft_s, per_token_s=per_token_s, e2e_s=e2e_s)
        for objective, met in outcomes.items():
            self._metrics.slo(request.traffic_class, objective, "met" if met else "missed").inc()
        if outcomes and times.on_slo_result is not None:
            times.on_slo_result(request.traffic_class, outcomes)
