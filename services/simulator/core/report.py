"""The results of a simulation, as data: built once a run has ended, printed by `render`, saved as JSON.

Everything but `measured` depends on inputs and seed only. Definitions (docs/guide/simulator.md says the same in prose):

    TTFT   first token − arrival                      JCT    last token − arrival
    second second token − arrival: with a wait between prompt and decode, this has it and TTFT has not
    TPOT   (last − first token) / (tokens − 1)        TBT    every gap between two tokens of a request
    normalised latency   JCT / output tokens          goodput   requests that kept their whole SLO, a second
    kept of sent         requests that kept their whole SLO / requests sent with one: refused, failed and unserved ones
                         count as missed. The headline
    attainment           the same / those of them that ended or were refused: what was unserved at the end is left out
"""

from __future__ import annotations

import msgspec

from cohort.common.policies.cost_model import StackShape
from cohort.common.workloads.items import WorkloadFacts
from cohort.services.simulator.core.clients import ClassStats
from cohort.services.simulator.core.cluster import SimCluster
from cohort.services.simulator.core.engine import SimWorker
from cohort.services.simulator.core.statistics import Distribution


class SloAttainment(msgspec.Struct, frozen=True):
    """`sent` requests had an SLO, `kept_of_sent` of them kept it, `judged` ended or were refused; other shares are of
    these. `tbt`: tokens within the TPOT objective; `gaps`: requests without any gap beyond it."""

    sent: int
    kept_of_sent: float
    judged: int
    attainment: float
    ttft: float
    tpot: float
    deadline: float
    tbt: float
    gaps: float
    goodput_requests_per_s: float
    goodput_tokens_per_s: float


class Slice(msgspec.Struct, frozen=True):
    """The requests of one class, or all. Latencies in ms; rates over the whole run's duration."""

    sent: int
    finished: int
    refused: dict[str, int]
    requests_per_s: float
    prompt_tokens_per_s: float
    output_tokens_per_s: float
    ttft_ms: Distribution | None
    second_ms: Distribution | None
    tpot_ms: Distribution | None
    tbt_ms: Distribution | None
    jct_ms: Distribution | None
    normalised_ms: Distribution | None
    slo: SloAttainment | None
    normalised_to_end_ms: float | None = None
    """Mean normalised latency, unserved requests as if they had ended at the end. Refused ones are in neither mean."""


class InstanceReport(msgspec.Struct, frozen=True):
    """`busy`: share of the duration in iterations. `compute`: model FLOPs over peak. `kv_mean`, `kv_peak`: share of
    blocks in use at reports; `kv_filled`: of slots that hold KV of a request (what a prefix cache shares counts for
    each that uses it). `mean_rows`: rows of an iteration. `kv_transfers` to this instance, and the time in them that no
    computing of the request hid. `scheduler`: its own stats at the end, counted from the start."""

    instance: str
    role: str
    steps: int
    busy: float
    compute: float
    kv_mean: float
    kv_peak: float
    kv_filled: float
    kv_blocks: int
    mean_rows: float
    prefill_tokens: int
    decode_tokens: int
    preemptions: int
    allocation_failures: int
    padding_waste: float
    swapped_bytes: int
    kv_transfers: int
    exposed_transfer_s: float
    scheduler: dict[str, float]
    decode_steps: int = 0
    mixed_steps: int = 0
    """Iterations with decodes, and of these the ones with more than one batch of the late binding."""


class Measured(msgspec.Struct, frozen=True):
    """Wall-clock time of the deciding code, on the machine that simulated: the only figures that vary between runs."""

    worker_decisions: int
    worker_mean_us: float
    manager_events: int
    manager_mean_us: float


class SimReport(msgspec.Struct, frozen=True):
    preset: str
    model: str
    cluster: str
    device: str
    stack: str
    decode_attention: str
    workload: str
    source: str
    arrivals: str
    seed: int
    predictor: str
    duration_s: float
    ended: bool
    notes: list[str]
    overall: Slice
    by_class: dict[str, Slice]
    instances: list[InstanceReport]
    moved_bytes: int
    manager: dict[str, float]
    """The manager's own stats at the end: of its order and its placement."""
    measured: Measured


def _stack(stack: StackShape) -> str:
    share = f", mixed iterations +{100 * stack.mixed_share:g} %" if stack.mixed_share else ""
    return stack.name + share


def make_report(sim: SimCluster, name: str, facts: WorkloadFacts) -> SimReport:
    clients, cluster = sim.clients, sim.cluster
    start_s = clients.first_arrival_s if clients.first_arrival_s < float("inf") else 0.0
    end_s = clients.last_end_s if not clients.live else sim.events.now_s
    duration_s = max(end_s - start_s, 1e-9)
    notes = list(facts.notes)
    if clients.clipped_outputs:
        notes.append(f"{clients.clipped_outputs} answers are cut at the context's end")
    if clients.live:
        notes.append(f"{len(clients.live)} requests had not ended at the horizon")
    variation = cluster.scatter if sim.options.scatter is None else sim.options.scatter
    if variation:
        notes.append(f"iterations scatter by {100 * variation:.3g} %")
    counters = [worker.machine.counters for worker in sim.workers]
    if drafted := sum(sum(each.drafted_tokens.values()) for each in counters):
        rows = sum(sum(each.drafted_rows.values()) for each in counters)
        right = sum(sum(each.accepted_tokens.values()) for each in counters)
        of_all = right / max(1, sum(each.decode_tokens for each in counters))
        notes.append(
            f"{drafted} tokens drafted in {rows} rows, {right / drafted:.1%} right: {of_all:.1%} of all decoded"
        )
        if drafting_s := sum(worker.tally.drafting_s for worker in sim.workers):
            notes.append(f"the draft model took {drafting_s:.3g} s of the workers' time")
    resubmitted = sim.gateway.ledger.resubmitted_total
    if resubmitted:
        notes.append(f"{resubmitted} requests were given back and submitted again")
    counts = {
        "rows without usable lengths": facts.skipped_rows,
        "prompts clipped": facts.clipped_prompts,
        "outputs clipped": facts.clipped_outputs,
    }
    notes += [f"workload: {count} {what}" for what, count in counts.items() if count]
    worker, manager = sim.wall["worker"], sim.wall["manager"]
    return SimReport(
        preset=sim.config.name,
        model=sim.model.name,
        cluster=cluster.name,
        device=cluster.hardware,
        stack=_stack(cluster.stack),
        decode_attention=cluster.decode_attention,
        workload=name,
        source=facts.source,
        arrivals=facts.arrivals,
        seed=sim.options.seed,
        predictor=sim.options.predictor,
        duration_s=duration_s,
        ended=not clients.live,
        notes=notes,
        overall=_slice(sim, clients.all, "", duration_s),
        by_class={name: _slice(sim, stats, name, duration_s) for name, stats in sorted(clients.classes.items())},
        instances=[_instance(sim, worker, duration_s) for worker in sim.workers],
        moved_bytes=sim.ports.moved_bytes,
        manager=sim.manager.stats(),
        measured=Measured(worker.calls, worker.mean_us, manager.calls, manager.mean_us),
    )


def _slice(sim: SimCluster, stats: ClassStats, traffic_class: str, duration_s: float) -> Slice:
    """Report one class; "" = all."""
    unserved = sim.clients.unserved_with_slo(traffic_class)
    to_end_s = sim.clients.normalised_to_end_s(stats, traffic_class, sim.events.now_s)
    return Slice(
        sent=stats.sent,
        finished=stats.finished,
        refused=dict(stats.refused),
        requests_per_s=stats.finished / duration_s,
        prompt_tokens_per_s=stats.prompt_tokens / duration_s,
        output_tokens_per_s=stats.output_tokens / duration_s,
        ttft_ms=stats.ttft.stats(),
        second_ms=stats.second.stats(),
        tpot_ms=stats.tpot.stats(),
        tbt_ms=stats.tbt.stats(),
        jct_ms=stats.jct.stats(),
        normalised_ms=stats.normalised.stats(),
        slo=_slo_attainment(stats, unserved, duration_s) if stats.with_slo + unserved else None,
        normalised_to_end_ms=None if to_end_s is None else 1e3 * to_end_s,
    )


def _slo_attainment(stats: ClassStats, unserved: int, duration_s: float) -> SloAttainment:
    sent, judged = stats.with_slo + unserved, max(1, stats.with_slo)
    return SloAttainment(
        sent=sent,
        kept_of_sent=stats.attained / sent,
        judged=stats.with_slo,
        attainment=stats.attained / judged,
        ttft=stats.attained_ttft / judged,
        tpot=stats.attained_tpot / judged,
        deadline=stats.attained_deadline / judged,
        tbt=stats.tokens_within_tbt / max(1, stats.slo_output_tokens),
        gaps=stats.without_late_gap / judged,
        goodput_requests_per_s=stats.attained / duration_s,
        goodput_tokens_per_s=stats.attained_output_tokens / duration_s,
    )


def _instance(sim: SimCluster, worker: SimWorker, duration_s: float) -> InstanceReport:
    counters, tally, kv = worker.machine.counters, worker.tally, worker.machine.kv
    computed = tally.useful_tokens + tally.padded_tokens
    return InstanceReport(
        instance=worker.name,
        role=worker.machine.setup.capacity.role.value,
        steps=tally.steps,
        busy=tally.busy_s / duration_s,
        compute=tally.flops / (duration_s * sim.costs[worker.number].peak_flops_per_s),
        kv_mean=tally.kv_used_sum / max(1, tally.kv_samples),
        kv_peak=tally.kv_used_peak,
        kv_filled=tally.kv_filled_sum / max(1, tally.kv_samples),
        kv_blocks=kv.total_blocks,
        mean_rows=tally.rows / max(1, tally.steps),
        prefill_tokens=counters.prefill_tokens - tally.before.prefill_tokens,
        decode_tokens=counters.decode_tokens - tally.before.decode_tokens,
        preemptions=counters.preemptions - tally.before.preemptions,
        allocation_failures=int(kv.metrics().get("allocation_failures_total", 0)) - tally.failures_before,
        padding_waste=tally.padded_tokens / max(1, computed),
        swapped_bytes=tally.swapped_bytes,
        kv_transfers=counters.transfers_in - tally.before.transfers_in,
        exposed_transfer_s=counters.exposed_transfer_s - tally.before.exposed_transfer_s,
        scheduler=worker.machine.scheduler.metrics(),
        decode_steps=tally.decode_steps,
        mixed_steps=tally.mixed_steps,
    )
