"""From records to figures: throughput, latency distributions, SLO attainment, goodput, failures. Pure.

Called by `measuring` after each run. docs/guide/benchmarking.md defines every metric.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from cohort.services.bench.http.load.client import RequestRecord, RunLog
from cohort.services.bench.http.load.target import Dialect, Target
from cohort.services.bench.http.load.workload import WorkloadFacts

MAX_GROUPS = 12
"""More kinds than this are not broken down: the table would be too long to read."""
LAG_WARNING_MS = 10.0
QUEUE_WARNING_MS = 50.0


class Distribution(msgspec.Struct, frozen=True):
    """Milliseconds. Percentiles interpolate linearly between the two nearest samples."""

    count: int
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float


class LengthCheck(msgspec.Struct, frozen=True):
    """Planned lengths against the server's own count, over completed requests that have a usage.

    A difference is (server − plan): a begin token or a chat template shows as a constant, an ignored `ignore_eos` as
    negative output differences.
    """

    with_usage: int
    prompt_exact: int
    prompt_min_difference: int
    prompt_max_difference: int
    output_exact: int
    output_min_difference: int
    output_max_difference: int
    cached_prompt_tokens: int | None


class SloReport(msgspec.Struct, frozen=True):
    """`limits_ms` by class and figure ("" = every class); `within` counts requests per figure alone. `kept_of_sent` is
    the share of all `sent`, `attainment` that of the `judged`, which completed or failed. `itl_share` is the share of
    all gaps between tokens within their limit; None without one."""

    limits_ms: dict[str, dict[str, float]]
    sent: int
    kept_of_sent: float
    judged: int
    attained: int
    attainment: float
    goodput_requests_per_s: float
    goodput_output_tokens_per_s: float
    within: dict[str, int]
    itl_share: float | None = None


class Slice(msgspec.Struct, frozen=True):
    """Figures of all requests of a run, or of one class or kind; rates always over the whole run's duration."""

    sent: int
    completed: int
    failed: int
    cancelled: int
    requests_per_s: float
    prompt_tokens_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    prompt_tokens: int
    output_tokens: int
    ttft_ms: Distribution | None
    tpot_ms: Distribution | None
    itl_ms: Distribution | None
    e2e_ms: Distribution | None
    client_queue_ms: Distribution | None
    normalised_ms: Distribution | None
    """Latency by output token: e2e / output tokens."""
    slo: SloReport | None
    tokens_at_once: float = 0.0
    """Output tokens that a client read together, on average: more than one where several come of one iteration, in one
    chunk or in several."""


class RunReport(msgspec.Struct, frozen=True):
    name: str
    model: str
    url: str
    dialect: Dialect
    workload: WorkloadFacts
    prompt_salt: int
    started_at: str
    duration_s: float
    interrupted: bool
    overall: Slice
    by_class: dict[str, Slice]
    by_kind: dict[str, Slice]
    errors: dict[str, int]
    error_examples: dict[str, str]
    lengths: LengthCheck | None
    loop_lag_ms: Distribution | None
    max_in_flight: int
    warnings: list[str]


@dataclass(frozen=True, slots=True)
class SloLimits:
    """Limits in ms by figure and class; the class "" holds for every class that has no limit of its own."""

    ttft_ms: Mapping[str, float] = field(default_factory=dict)
    tpot_ms: Mapping[str, float] = field(default_factory=dict)
    itl_ms: Mapping[str, float] = field(default_factory=dict)
    e2e_ms: Mapping[str, float] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.ttft_ms or self.tpot_ms or self.itl_ms or self.e2e_ms)

    def by_figure(self) -> dict[str, Mapping[str, float]]:
        figures = {"ttft": self.ttft_ms, "tpot": self.tpot_ms, "itl": self.itl_ms, "e2e": self.e2e_ms}
        return {name: limits for name, limits in figures.items() if limits}


def slo_verdict(record: RequestRecord, limits: SloLimits) -> dict[str, bool]:
    """Return whether each figure with a limit met it. A request that did not complete meets none; a figure that does
    not exist (TPOT and ITL of a single token) cannot be broken. ITL is judged by the request's own 99th percentile."""
    verdict = {}
    for name, by_class in limits.by_figure().items():
        limit_ms = by_class.get(record.plan.traffic_class, by_class.get("", None))
        if limit_ms is None:
            continue
        if record.status != "completed":
            verdict[name] = False
            continue
        value_s: float | None
        match name:
            case "ttft":
                value_s = record.ttft_s
            case "tpot":
                value_s = record.tpot_s
            case "itl":
                gaps = record.itl_s
                value_s = float(np.percentile(gaps, 99)) if gaps else None
            case _:
                value_s = record.e2e_s
        verdict[name] = value_s is None or value_s * 1000.0 <= limit_ms
    return verdict


def distribution(values_s: Sequence[float]) -> Distribution | None:
    """Return the distribution; None without samples: a made-up zero would read as very fast."""
    if not len(values_s):
        return None
    ms = np.asarray(values_s, dtype=np.float64) * 1000.0
    p50, p90, p95, p99 = (float(p) for p in np.percentile(ms, (50, 90, 95, 99)))
    return Distribution(len(ms), float(ms.mean()), p50, p90, p95, p99, float(ms.max()))


def slice_figures(records: Sequence[RequestRecord], duration_s: float, limits: SloLimits) -> Slice:
    done = [record for record in records if record.status == "completed"]
    prompt_tokens = sum(record.prompt_tokens for record in done)
    output_tokens = sum(record.output_tokens for record in done)
    per_s = 1.0 / duration_s if duration_s > 0 else 0.0
    return Slice(
        sent=len(records),
        completed=len(done),
        failed=sum(record.status == "failed" for record in records),
        cancelled=sum(record.status in ("cancelled", "pending") for record in records),
        requests_per_s=len(done) * per_s,
        prompt_tokens_per_s=prompt_tokens * per_s,
        output_tokens_per_s=output_tokens * per_s,
        total_tokens_per_s=(prompt_tokens + output_tokens) * per_s,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        ttft_ms=distribution([t for record in done if (t := record.ttft_s) is not None]),
        tpot_ms=distribution([t for record in done if (t := record.tpot_s) is not None]),
        itl_ms=distribution([gap for record in done for gap in record.itl_s]),
        e2e_ms=distribution([record.e2e_s for record in done]),
        client_queue_ms=distribution([record.client_queue_s for record in records]),
        normalised_ms=distribution([record.e2e_s / max(1, record.output_tokens) for record in done]),
        slo=_slo(records, limits, per_s) if limits else None,
        tokens_at_once=output_tokens / max(1, sum(len(set(record.token_s)) for record in done)),
    )


def _slo(records: Sequence[RequestRecord], limits: SloLimits, per_s: float) -> SloReport:
    judged = [record for record in records if record.status in ("completed", "failed")]
    within: Counter[str] = Counter({name: 0 for name in limits.by_figure()})
    attained: list[RequestRecord] = []
    for record in judged:
        verdict = slo_verdict(record, limits)
        within.update(name for name, met in verdict.items() if met)
        # A class without any limit attains by completing.
        if record.status == "completed" and all(verdict.values()):
            attained.append(record)
    return SloReport(
        limits_ms={name: dict(by_class) for name, by_class in limits.by_figure().items()},
        sent=len(records),
        kept_of_sent=len(attained) / len(records) if records else 0.0,
        judged=len(judged),
        attained=len(attained),
        attainment=len(attained) / len(judged) if judged else 0.0,
        goodput_requests_per_s=len(attained) * per_s,
        goodput_output_tokens_per_s=sum(record.output_tokens for record in attained) * per_s,
        within=dict(within),
        itl_share=_itl_share(judged, limits),
    )


def _itl_share(records: Sequence[RequestRecord], limits: SloLimits) -> float | None:
    within = gaps = 0
    for record in records:
        limit_ms = limits.itl_ms.get(record.plan.traffic_class, limits.itl_ms.get("", None))
        if limit_ms is not None and record.status == "completed":
            gaps += len(record.itl_s)
            within += sum(gap * 1000.0 <= limit_ms for gap in record.itl_s)
    return within / gaps if gaps else None


def length_check(records: Sequence[RequestRecord]) -> LengthCheck | None:
    """Compare lengths with the plans'; None when no answer had a usage."""
    counted = [r for r in records if r.status == "completed" and r.reported_output_tokens is not None]
    if not counted:
        return None
    planned = [r for r in counted if r.reported_prompt_tokens is not None]
    prompt = [(r.reported_prompt_tokens or 0) - r.plan.prompt_tokens for r in planned] or [0]
    output = [(r.reported_output_tokens or 0) - r.plan.output_tokens for r in counted]
    cached = [r.cached_tokens for r in counted if r.cached_tokens is not None]
    return LengthCheck(
        with_usage=len(counted),
        prompt_exact=sum(d == 0 for d in prompt) if planned else 0,
        prompt_min_difference=min(prompt),
        prompt_max_difference=max(prompt),
        output_exact=sum(d == 0 for d in output),
        output_min_difference=min(output),
        output_max_difference=max(output),
        cached_prompt_tokens=sum(cached) if cached else None,
    )


def run_duration_s(records: Sequence[RequestRecord]) -> float:
    if not records:
        return 0.0
    return max(record.end_s for record in records) - min(record.sent_s for record in records)


def max_in_flight(records: Sequence[RequestRecord]) -> int:
    """Count ends before starts at the same instant, so back-to-back requests of one user are one."""
    steps = sorted([(record.sent_s, 1) for record in records] + [(record.end_s, -1) for record in records])
    running = peak = 0
    for _, step in steps:
        running += step
        peak = max(peak, running)
    return peak


def summarise(
    log: RunLog,
    facts: WorkloadFacts,
    target: Target,
    dialect: Dialect,
    limits: SloLimits,
    *,
    prompt_salt: int,
    started_at: str,
    ignore_eos_wanted: bool,
) -> RunReport:
    records = log.records
    duration_s = run_duration_s(records)
    overall = slice_figures(records, duration_s, limits)
    failed = [record for record in records if record.status == "failed"]
    lengths = length_check(records)
    loop_lag_ms = distribution(log.loop_lag_s)
    return RunReport(
        name=target.name,
        model=target.model,
        url=target.base_url,
        dialect=dialect,
        workload=facts,
        prompt_salt=prompt_salt,
        started_at=started_at,
        duration_s=duration_s,
        interrupted=log.interrupted,
        overall=overall,
        by_class=_grouped(records, lambda record: record.plan.traffic_class, duration_s, limits),
        by_kind=_grouped(records, lambda record: record.plan.group, duration_s, limits),
        errors=dict(Counter(record.error_kind for record in failed).most_common()),
        error_examples={record.error_kind: record.error_detail for record in reversed(failed)},
        lengths=lengths,
        loop_lag_ms=loop_lag_ms,
        max_in_flight=max_in_flight(records),
        warnings=_warnings(overall, facts, dialect, lengths, loop_lag_ms, ignore_eos_wanted),
    )


def _grouped(
    records: Sequence[RequestRecord], key: Callable[[RequestRecord], str], duration_s: float, limits: SloLimits
) -> dict[str, Slice]:
    groups: dict[str, list[RequestRecord]] = {}
    for record in records:
        groups.setdefault(key(record), []).append(record)
    if not 1 < len(groups) <= MAX_GROUPS:
        return {}
    return {name: slice_figures(members, duration_s, limits) for name, members in sorted(groups.items())}


def _warnings(
    overall: Slice,
    facts: WorkloadFacts,
    dialect: Dialect,
    lengths: LengthCheck | None,
    lag: Distribution | None,
    ignore_eos_wanted: bool,
) -> list[str]:
    """Return reasons why these figures are worth less than they seem."""
    found = []
    if lag is not None and lag.p99 > LAG_WARNING_MS:
        found.append(f"this client woke up late (p99 {lag.p99:.1f} ms): latencies contain its own delay")
    queue = overall.client_queue_ms
    if queue is not None and queue.p99 > QUEUE_WARNING_MS:
        found.append(
            f"requests left late (p99 {queue.p99:.0f} ms): the client could not keep up; TTFT and e2e do not contain "
            "that wait"
        )
    if overall.failed:
        found.append(f"{overall.failed} of {overall.sent} requests failed; latencies are of completed requests only")
    if ignore_eos_wanted and not dialect.ignore_eos:
        found.append("the server refuses ignore_eos: answers may end early")
    if lengths is None and overall.completed:
        found.append("the server sends no usage in streams: output tokens are counted by chunks")
    if lengths is not None and ignore_eos_wanted and lengths.output_exact < lengths.with_usage:
        found.append(
            f"{lengths.with_usage - lengths.output_exact} of {lengths.with_usage} answers differ in length from the "
            f"plan ({lengths.output_min_difference:+d} to {lengths.output_max_difference:+d} tokens)"
        )
    if lengths is not None and (lengths.prompt_min_difference or lengths.prompt_max_difference):
        found.append(
            "prompts differ in length from the plan by the server's count "
            f"({lengths.prompt_min_difference:+d} to {lengths.prompt_max_difference:+d} tokens)"
        )
    if lengths is not None and lengths.cached_prompt_tokens and not facts.shares_prefixes:
        found.append(
            f"{lengths.cached_prompt_tokens} prompt tokens came from the server's prefix cache, though this workload "
            "shares no prefixes"
        )
    if facts.clipped_prompts or facts.clipped_outputs:
        found.append(f"clipped: {facts.clipped_prompts} prompts, {facts.clipped_outputs} outputs of {facts.requests}")
    return found
