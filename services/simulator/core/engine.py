"""The simulator's engine: a step takes what the cost model says; steps that provably repeat each other are run as one.

With `jump`, steps that repeat (`FastForward.repeatable`) become one event, up to the next event that disturbs that
worker. Decisions and times are the same as one by one; a test demands it. On cores or devices that several workers
share (`Cluster.shares`) a step takes longer the more of them run, and nothing is run ahead. With `plans_ahead` such
workers plan a step while the one before it runs, at the moment at which live ones do (`StepEndForecast`): what arrives
later waits for both. `plan_cost` is a plan in the cost model's numbers: what one iteration computes, draws and copies.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import msgspec

from cohort.common.config import Config
from cohort.common.machines.effects import Send, StartStep
from cohort.common.machines.events import PlanAhead, Received, ReportDue, RunsReceived, StepEnded, Tick, WorkerEvent
from cohort.common.machines.worker.fast_forward import FastForward
from cohort.common.machines.worker.plan_ahead import StepEndForecast
from cohort.common.messages import KvRenew, WorkerReport
from cohort.common.policies.alignedserve.batch_numbers import batches_of
from cohort.common.policies.cost_model import CostModel, StepWork, prefill_pairs
from cohort.common.policies.interface import IterationPlan
from cohort.common.policies.kv_interface import can_overlap
from cohort.common.policies.settings import EngineSettings, settings_of
from cohort.common.sequence import Phase, Row
from cohort.common.types import KvGeometry
from cohort.common.virtual_cluster.cluster import VirtualCluster
from cohort.common.virtual_cluster.plugins import Flight, WorkerNode
from cohort.services.simulator.core.clients import OUTPUT_TOKEN, TraceClients
from cohort.services.simulator.core.sim_options import SimOptions
from cohort.services.simulator.core.tally import WorkerTally
from cohort.services.simulator.hardware.draft_price import DraftPrice
from cohort.services.simulator.hardware.hardware import Cluster
from cohort.services.simulator.hardware.scatter import StepScatter
from cohort.services.simulator.hardware.simulated_network import link_of

_HARMLESS = (WorkerReport, KvRenew)
"""Messages that a worker sends at its deadlines without anything having changed."""
MAX_FAST_FORWARD = 64
"""Maximum number of steps run ahead at once: something comes in between, and the rest is wasted."""


class PlanCost(msgspec.Struct, frozen=True):
    """`useful_tokens` without padding; `padded_tokens` are the ones computed for nothing (B2)."""

    work: StepWork
    useful_tokens: int
    padded_tokens: int
    copied_bytes: int
    """Bytes copied before the rows."""
    concurrent_bytes: int = 0
    """Bytes copied while the rows are computed (R12)."""


@dataclass(slots=True, eq=False)
class SimWorker(WorkerNode):
    """One instance: its machine, the step in flight, and its statistics."""

    fast_forward: FastForward = field(init=False)
    tally: WorkerTally = field(default_factory=WorkerTally)
    epoch: int = 0
    ends_s: list[float] = field(default_factory=list)
    """End times of the step in flight, and of those that will repeat it."""
    latencies_s: list[float] = field(default_factory=list)
    alone_s: float = 0.0
    """Time of the step in flight on a core of its own."""
    service_load: float = 0.0
    """Cores that other processes need for it."""
    memory_share: float = 0.0
    """Share of it that reads memory."""
    step: int = 0
    """Number of the step in flight, since the start."""
    slowdown: float = 1.0
    """Factor by which it is slower now than alone, on shared cores."""
    undelivered_s: list[float] = field(default_factory=list)
    """End times of steps run ahead that were applied and whose tokens the gateway lacks: it gets them with the next
    step's, and no process asks before."""
    needs_recheck: bool = False
    """Flag: an event that takes blocks is being handled; which steps run ahead still hold is checked afterwards."""
    blocked_s: float = 0.0
    """Time of KV arrivals since the last iteration began, where transfers block."""
    draft_price: DraftPrice | None = None
    """Price of the draft model's steps, if there is one."""
    drafting_share: float = 0.0
    step_share: float = 1.0
    """Shares of the iteration: the draft model's drafts, and the verifying step. The rest filled that model's KV."""
    aligned_batches: int = 0
    """Batches of the late binding among the rows of the step in flight."""
    step_ends: StepEndForecast = field(default_factory=StepEndForecast)
    queued_step: StartStep | None = None
    """Step that was planned after the one in flight."""

    def __post_init__(self) -> None:
        WorkerNode.__post_init__(self)
        self.fast_forward = FastForward(self.machine)


class CostEngine:
    def __init__(
        self,
        virtual: VirtualCluster,
        clients: TraceClients,
        cluster: Cluster,
        costs: Sequence[CostModel],
        geometry: KvGeometry,
        config: Config,
        options: SimOptions,
    ) -> None:
        """`costs`: of every instance, by number."""
        self.together = not options.warmup_s
        """Flag: tokens of steps run ahead are delivered with the next step's, however often steps were applied in
        between. Before metrics count (`warmup_s`) each is delivered at once: none of them may count later."""
        self._virtual = virtual
        self._events = virtual.events
        self._clients = clients
        self._cluster = cluster
        self._costs = costs
        self._geometry = geometry
        self._scatter = [_scatter(cluster.of(number), options) for number in range(cluster.instances)]
        self._late_binding = config.policies.waiting_kv != "none"
        # On shared cores and devices the others decide how long the next step takes: none is run ahead.
        self._shares = cluster.shares
        self._jump = options.jump and not self._shares
        self._blocking_transfers = options.blocking_transfers
        settings = settings_of(config, EngineSettings)
        self._plans_ahead = settings.plan_ahead and self._shares
        self._decision_s, self._decision_row_s = settings.decision_s, settings.decision_row_s
        shape = costs[0].model
        self._row_flops = 2.0 * (shape.active_parameters + shape.head_parameters)
        self._position_flops = 4.0 * shape.layers * shape.heads * (shape.pair_dim or shape.head_dim)

    # -- what the cluster asks for ---------------------------------------------------------------------------------

    def begin(self, node: WorkerNode, step: StartStep) -> None:
        worker = _sim(node)
        if step.ahead:
            worker.queued_step = step
        else:
            self._begin(worker, step.plan, self._decision_s + self._decision_row_s * len(step.plan.rows))

    def _begin(self, worker: SimWorker, plan: IterationPlan, decision_s: float = 0.0) -> None:
        """Compute a step, `decision_s` from now on."""
        now_s = self._events.now_s + decision_s
        stages, proposed = not self._cluster.of(worker.number).cpu, self._clients.proposed
        cost = plan_cost(plan, self._geometry, device_stages=stages, proposed=proposed)
        model = self._costs[worker.number]
        concurrent_s = model.swap_s(cost.concurrent_bytes)
        worker.step += 1
        step_s = model.step_s(cost.work)
        step_s *= self._factor(worker, 0, step_s if cost.work.pairs else 0.0)
        latency_s = model.swap_s(cost.copied_bytes) + max(step_s, concurrent_s) + worker.blocked_s
        worker.blocked_s = 0.0
        worker.drafting_share, worker.step_share = 0.0, 1.0
        if worker.draft_price is not None and plan.watched:
            drafts = [(row.sequence, count) for row in plan.rows if row.drafts and (count := proposed(row))]
            drafting = worker.draft_price.take(drafts)
            whole_s = latency_s + drafting.drafts_s + drafting.filling_s
            worker.drafting_share, worker.step_share = drafting.drafts_s / whole_s, latency_s / whole_s
            latency_s = whole_s
            worker.tally.drafting_s += drafting.drafts_s + drafting.filling_s
        worker.ends_s, worker.latencies_s = [now_s + latency_s], [latency_s]
        if self._late_binding:
            worker.aligned_batches = batches_of(plan.rows)
        self._note_step(worker, cost)
        if self._jump and worker.fast_forward.repeatable():
            self._fast_forward(worker, plan, cost)
        self._schedule_end(worker)
        if self._shares:
            worker.slowdown, worker.alone_s = 1.0, latency_s
            worker.service_load = self._cluster.service_load(len(plan.rows), latency_s)
            worker.memory_share = model.memory_share(cost.work) if self._cluster.contended else 0.0
            self._share_cores()
        if self._plans_ahead:
            after_s = worker.step_ends.plan_after_s(plan, worker.machine.times)
            if after_s is not None:
                self._events.at(now_s + after_s, self._plan_ahead, worker, worker.step)

    def _plan_ahead(self, worker: SimWorker, step: int) -> None:
        """Plan what follows the step of this number, if that is still in flight."""
        if worker.step == step and worker.ends_s and worker.queued_step is None:
            self._virtual.feed(worker, PlanAhead([]))

    def before_events(self, node: WorkerNode, events: tuple[WorkerEvent, ...]) -> None:
        worker = _sim(node)
        if len(worker.ends_s) <= 1:
            if isinstance(events[-1], ReportDue):
                self._sample_kv(worker)
            return
        for event in events:
            match event:
                case ReportDue():
                    self._catch_up(worker, self._events.now_s)
                    self._sample_kv(worker)
                case Tick():  # deadlines are of seconds: one that passes shows in what the machine then does
                    self._catch_up(worker, self._events.now_s)
                case Received(message=message):
                    if worker.fast_forward.is_unaffected_by(message):
                        continue
                    if worker.fast_forward.shows_in_state(message):
                        self._catch_up(worker, self._events.now_s)
                        worker.needs_recheck = True
                    else:
                        self._interrupt(worker)
                case RunsReceived(lease_id=lease_id, error=None, runs=runs):
                    if self._blocking_transfers or not worker.fast_forward.is_unaffected_by_runs(lease_id, runs):
                        self._interrupt(worker)
                case _:
                    self._interrupt(worker)

    def after_events(self, node: WorkerNode, events: tuple[WorkerEvent, ...], effects: list[Any]) -> None:
        """Discard steps run ahead that passed deadlines or taken blocks may have changed."""
        worker = _sim(node)
        if worker.needs_recheck:
            worker.needs_recheck = False
            self._shorten(worker)
        if len(worker.ends_s) <= 1 or not isinstance(events[0], Tick):
            return
        if not all(isinstance(e, Send) and isinstance(e.message, _HARMLESS) for e in effects):
            self._interrupt(worker)

    def copy(self, flight: Flight) -> None:
        if not self._blocking_transfers or flight.receiver is None:
            return
        link = link_of(self._cluster, flight)
        size = flight.num_blocks * self._geometry.block_bytes
        _sim(flight.receiver).blocked_s += size / link.bytes_per_s + len(flight.sent) * link.run_s

    def corrupt(self, flight: Flight) -> None:
        pass

    def died(self, node: WorkerNode) -> None:
        worker = _sim(node)
        worker.epoch += 1
        worker.ends_s, worker.latencies_s, worker.undelivered_s = [], [], []
        worker.queued_step = None

    # -- steps -----------------------------------------------------------------------------------------------------

    def _schedule_end(self, worker: SimWorker) -> None:
        worker.epoch += 1
        self._events.at(worker.ends_s[-1], self._step_ended, worker, worker.epoch, rank=worker.number + 1)

    def _step_ended(self, worker: SimWorker, epoch: int) -> None:
        if epoch != worker.epoch:
            return
        if len(worker.ends_s) > 1:
            self._repeat(worker, len(worker.ends_s) - 1)
        if worker.undelivered_s:
            self._deliver_tokens(worker)
        latency_s, plan = worker.latencies_s[0], worker.machine.plan_in_flight
        drafts = self._clients.drafted(plan)
        sampled = self._clients.sample(plan.rows, drafts)
        worker.ends_s, worker.latencies_s = [], []
        if self._shares:
            self._share_cores()
        step_s, drafting_s = latency_s * worker.step_share, latency_s * worker.drafting_share
        queued, worker.queued_step = worker.queued_step, None
        if self._plans_ahead:
            worker.step_ends.note(plan, step_s)
        self._virtual.feed(worker, StepEnded(sampled, step_s, drafts=drafts, drafting_s=drafting_s))
        if queued is not None and worker.alive:
            self._begin(worker, queued.plan)

    def _factor(self, worker: SimWorker, ahead: int, prompts_s: float = 0.0) -> float:
        """Return the scatter of the step `ahead` after the one in flight. `prompts_s`: its time, if it has prompts."""
        return self._scatter[worker.number].factor(worker.number, worker.step + ahead, prompts_s)

    def _share_cores(self) -> None:
        """Divide cores or devices anew, as a step began or ended: steps in flight end earlier or later."""
        cluster, now_s = self._cluster, self._events.now_s
        running = [worker for worker in map(_sim, self._virtual.workers) if worker.ends_s]
        slowdowns = cluster.shared_slowdowns(
            [(each.number, each.alone_s, each.service_load, each.memory_share) for each in running]
        )
        for worker, slowdown in zip(running, slowdowns, strict=True):
            if worker.slowdown != slowdown:
                later_s = (worker.ends_s[0] - now_s) * (slowdown / worker.slowdown - 1.0)
                worker.slowdown = slowdown
                worker.ends_s[0] += later_s
                worker.latencies_s[0] += later_s
                worker.tally.busy_s += later_s
                self._schedule_end(worker)

    def _note_step(self, worker: SimWorker, cost: PlanCost) -> None:
        tally = worker.tally
        tally.steps += 1
        tally.busy_s += worker.latencies_s[0]
        tally.flops += self._costs[worker.number].flops(cost.work)
        tally.rows += cost.work.rows
        tally.useful_tokens += cost.useful_tokens
        tally.padded_tokens += cost.padded_tokens
        tally.swapped_bytes += cost.copied_bytes + cost.concurrent_bytes
        tally.decode_steps += worker.aligned_batches > 0
        tally.mixed_steps += worker.aligned_batches > 1

    def _sample_kv(self, worker: SimWorker) -> None:
        """Sample how full the cache is, at every report from the first moment that counts."""
        if self._events.now_s < 1e-6:
            return
        tally, kv = worker.tally, worker.machine.kv
        used = 1.0 - (kv.free_blocks + kv.cached_blocks) / max(1, kv.total_blocks)
        tally.kv_samples += 1
        tally.kv_used_sum += used
        tally.kv_used_peak = max(tally.kv_used_peak, used)
        held = worker.machine.state.held  # what waits has nothing written
        resident = [held[key].sequence for key in kv.holders() if key in held]
        written = sum([sequence.computed for sequence in resident if sequence.phase is not Phase.SWAPPED])
        tally.kv_filled_sum += written / max(1, self._geometry.positions(kv.total_blocks))

    # -- running ahead ---------------------------------------------------------------------------------------------

    def _fast_forward(self, worker: SimWorker, plan: IterationPlan, cost: PlanCost) -> None:
        """Append the steps that repeat this one. A sequence's last token is a step of its own."""
        wanted = min(self._clients.fewest_remaining(plan.rows) - 1, MAX_FAST_FORWARD)
        if wanted < 1:
            return
        ahead = worker.fast_forward.fitting_repetitions(wanted)
        if ahead < 1:
            return
        latencies_s = self._costs[worker.number].repeated_s(cost.work, 1 + ahead)
        if self._scatter[worker.number]:
            latencies_s = [latency_s * self._factor(worker, after) for after, latency_s in enumerate(latencies_s)]
        latencies_s[0] = worker.latencies_s[0]  # with the copies of the plan
        worker.latencies_s = latencies_s
        worker.ends_s = list(accumulate(latencies_s[1:], initial=worker.ends_s[0]))

    def _repeat(self, worker: SimWorker, count: int) -> None:
        """Apply the first `count` steps run ahead; the one after them is in flight."""
        ends_s, latencies_s = worker.ends_s, worker.latencies_s
        rows = worker.machine.plan_in_flight.rows
        done_s = ends_s[:count]
        worker.fast_forward.repeat(done_s, latencies_s[:count], OUTPUT_TOKEN)
        worker.undelivered_s += done_s
        if not self.together:
            self._deliver_tokens(worker)
        worker.step += count
        number = len(rows)
        first_context = sum([row.start for row in rows]) + number
        tally = worker.tally
        tally.steps += count
        tally.decode_steps += count * (worker.aligned_batches > 0)
        tally.mixed_steps += count * (worker.aligned_batches > 1)
        tally.busy_s += sum(latencies_s[1 : count + 1])
        tally.rows += number * count
        tally.useful_tokens += number * count
        # Each further step attends to one more position a row.
        positions = count * first_context + number * count * (count + 1) // 2
        tally.flops += count * number * self._row_flops + positions * self._position_flops
        del ends_s[:count]
        del latencies_s[:count]

    def _deliver_tokens(self, worker: SimWorker) -> None:
        """Deliver the tokens of steps that were run ahead, as late as their last one."""
        delay_s, sampled_s = self._cluster.control_latency_s, worker.undelivered_s
        times_s = [end_s + delay_s for end_s in sampled_s]
        worker.undelivered_s = []
        self._clients.repeated(worker, worker.machine.plan_in_flight.rows, times_s, self._events.now_s + delay_s)

    def catch_up(self, worker: SimWorker, until_s: float) -> None:
        """Apply the steps run ahead that end before (not at) this moment, and deliver their tokens."""
        self._catch_up(worker, until_s)
        if worker.undelivered_s:
            self._deliver_tokens(worker)

    def _catch_up(self, worker: SimWorker, until_s: float) -> None:
        if len(worker.ends_s) > 1:
            ended = min(bisect_left(worker.ends_s, until_s), len(worker.ends_s) - 1)
            if ended:
                self._repeat(worker, ended)

    def _interrupt(self, worker: SimWorker) -> None:
        """Apply the steps that have ended, and void those run ahead beyond: an event disturbs the worker."""
        if len(worker.ends_s) <= 1:
            return
        self._catch_up(worker, self._events.now_s)
        if len(worker.ends_s) > 1:
            del worker.ends_s[1:]
            del worker.latencies_s[1:]
            self._schedule_end(worker)

    def _shorten(self, worker: SimWorker) -> None:
        """Keep only those steps run ahead that still hold."""
        ahead, foreseen = len(worker.ends_s) - 1, worker.fast_forward
        holding = foreseen.fitting_repetitions(ahead) if ahead and foreseen.repeatable() else 0
        if holding < ahead:
            del worker.ends_s[holding + 1 :]
            del worker.latencies_s[holding + 1 :]
            self._schedule_end(worker)


def _scatter(part: Cluster, options: SimOptions) -> StepScatter:
    """Return the scatter as measured, or as requested: alike for all iterations then."""
    if options.scatter is not None:
        return StepScatter(options.scatter, options.seed, part.scatter_lasting)
    return StepScatter(part.scatter, options.seed, part.scatter_lasting, part.scatter_prompts)


def _sim(node: WorkerNode) -> SimWorker:
    assert isinstance(node, SimWorker)
    return node


def plan_cost(
    plan: IterationPlan,
    geometry: KvGeometry,
    *,
    device_stages: bool = False,
    proposed: Callable[[Row], int] | None = None,
) -> PlanCost:
    """Compute a plan's cost. `device_stages`: the engine's copies out leave the device beside the rows where they can,
    as a GPU's do. `proposed`: the drafts of a row, each of which costs as much as a row."""
    tokens = useful = pairs = prefill_context = decode_rows = decode_context = longest = sampled = 0
    padded_to = plan.padded_to
    for row in plan.rows:
        start, count = row.start, row.count
        useful += count
        if start + count == len(row.sequence.tokens):
            sampled += 1
        if count == 1:
            tokens += 1
            decode_rows += 1
            decode_context += start + 1
            if start >= longest:
                longest = start + 1
            if row.drafts and proposed is not None and (drafted := proposed(row)):
                tokens, sampled, decode_rows = tokens + drafted, sampled + drafted, decode_rows + drafted
                decode_context += drafted * (start + 1) + drafted * (drafted + 1) // 2
        else:
            computed = max(count, padded_to)
            tokens += computed
            pairs += prefill_pairs(start, computed)
            prefill_context += start + computed
    tokens += plan.ended_rows
    sampled += plan.ended_rows
    decode_rows += plan.ended_rows
    decode_context += plan.ended_context
    copied = concurrent = 0
    staged = device_stages and bool(plan.copies) and can_overlap(plan.copies, geometry)
    for copy in plan.copies:
        size = copy.bytes_of(geometry)
        if copy.concurrent or staged:
            concurrent += size
        else:
            copied += size
    work = StepWork(
        tokens, len(plan.rows) + plan.ended_rows, sampled, pairs, prefill_context, decode_rows, decode_context, longest
    )
    return PlanCost(work, useful, tokens - useful, copied, concurrent)
