"""Host of a `WorkerMachine`: feeds it events, performs its effects, and runs its steps on the engine thread.

    receive, report, tick, drain, KV links ──events──▶ machine
        │ effects ──▶ bus, transfer agent
        │ StartStep ─▶ batch ─▶ engine thread ─▶ StepEnded ──▶ machine …
        └ StartStep(ahead), the reply to `PlanAhead` ─▶ batch ─▶ queued on the engine thread after the running step

The machine (a state machine without I/O, called on the event loop only) makes all decisions. The step task waits for
the engine and for work, never for the network. Shortly before a step ends, it asks for the next plan and queues it, if
that needs neither a decision nor this step's results. On a GPU the effects of a step's end wait for the next launch.

Attempt: one try to compute a request. Segment: its positions on one worker. Row: a sequence's tokens in a step. A run
(`SendRuns`, `run_timeout_s`): neighbouring KV blocks in one piece. Lease: blocks reserved for runs; round: one try.
"""

from __future__ import annotations

import asyncio
import contextlib
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import assert_never

from cohort.common.addresses import MONITOR
from cohort.common.engine.ranks.group_memory import GroupLink, GroupMemory
from cohort.common.engine.ranks.rank_memory import RankMemory
from cohort.common.engine.ranks.rank_transfers import RankTransfers
from cohort.common.engine.runner.drafting import Drafting
from cohort.common.engine.runner.model_runner import ModelRunner
from cohort.common.engine.step.batch import StepBatch, StepOutput, TokenLogprobs
from cohort.common.engine.step.batch_builder import BatchBuilder
from cohort.common.engine.transfer.transfer_agent import TransferAgent, TransferOptions
from cohort.common.engine.worker.engine_threads import CpuDevice, EngineThreads, LoraLoader, StepUnderWay
from cohort.common.engine.worker.iteration_gaps import IterationGaps
from cohort.common.engine.worker.learned_state import LearnedState
from cohort.common.engine.worker.worker_metrics import WorkerMetrics
from cohort.common.errors import PeerUnreachable
from cohort.common.machines.effects import (
    CancelRuns,
    Dial,
    LoadAdapter,
    ReceiveRuns,
    Send,
    SendRuns,
    StartStep,
    WorkerEffect,
)
from cohort.common.machines.events import (
    Drafted,
    DrainEnded,
    DrainStarted,
    LinkAddresses,
    LinkMeasured,
    PlanAhead,
    Pooled,
    PromptScores,
    Received,
    ReportDue,
    RunsReceived,
    RunsSent,
    Sampled,
    StepEnded,
    StepFailed,
    Tick,
    Undelivered,
    WorkerEvent,
)
from cohort.common.machines.machine import Machine
from cohort.common.machines.worker.plan_ahead import StepEndForecast
from cohort.common.machines.worker.worker import WorkerMachine
from cohort.common.machines.worker.worker_state import REPORT_INTERVAL_S
from cohort.common.machines.worker.worker_view import blocks_of, drafts_of, iteration_of, rows_of
from cohort.common.messages import (
    Look,
    Message,
    PooledStates,
    SegmentEnded,
    TokenLogprob,
    ToWorker,
    WorkerReport,
    WorkerView,
)
from cohort.common.planning.simulation_jobs import to_stats
from cohort.common.policies.interface import IterationPlan
from cohort.common.policies.settings import EngineSettings, settings_of
from cohort.common.process.decision_log import DecisionLog
from cohort.common.process.metrics import TransferMetrics
from cohort.common.process.service import ServiceContext
from cohort.common.sequence import Sequence
from cohort.common.transport.kv_link import KvLink
from cohort.common.transport.repeated_warning import RepeatedWarning
from cohort.common.types import InstanceId

_TICK_S = 0.1
_IDLE_TICK_S = 60.0
"""The same without requests: then there is no deadline."""
_REGISTER_RETRY_S = 0.5
_STEP_FAILURE_PAUSE_S = 0.05
_MAX_BATCHED_MESSAGES = 256
"""Maximum messages handed to the machine in one call: until it returns, no step is launched."""


class WorkerLoop:
    def __init__(
        self,
        context: ServiceContext,
        device: CpuDevice,
        links: dict[str, KvLink],
        machine: WorkerMachine,
        handler: Machine[WorkerEvent, WorkerEffect],
        learned_state: LearnedState | None,
        engine_thread: ThreadPoolExecutor,
    ) -> None:
        """`device`: also a GPU (a subclass). `links`: by name. `handler`: `machine`, or a recording or tracing one.
        `learned_state`: stored step times. `engine_thread`: executor with one thread; the caller shuts it down."""
        config, runner = context.config, device.runner
        self._device = device
        self._context = context
        self._config = config
        self._planning_ahead_enabled = settings_of(config, EngineSettings).plan_ahead
        self._machine = machine
        self._handler = handler
        self._learned_state = learned_state
        self._bus, self._clock, self._log = context.bus, context.clock, context.log
        self._activity = context.activity
        self._warn_unexpected = RepeatedWarning(context.log, "message not for a worker")
        self._metrics = WorkerMetrics(
            context.metrics, machine, lambda: runner.oom_retries, lambda: runner.unstaged_rows
        )
        if device.leaves_cpu_free:  # a GPU: decode steps of these batch sizes are recorded as CUDA graphs
            self._metrics.engine.decode_classes_recorded().set(len(runner.captured_batch_sizes))
        self._live_view = LiveView(context, machine, self._metrics.transfer)
        memory = _transfer_memory(runner, links)
        self._agent = TransferAgent(
            {name: GroupLink(link, memory) for name, link in links.items()},
            memory,
            TransferOptions(config.transfer.run_timeout_s),
            clock=context.clock,
            metrics=self._metrics.transfer,
            announce=self._send,
            on_sent=lambda lease_id, error: self._feed(RunsSent(lease_id, error)),
            on_received=lambda lease_id, round_, error: self._feed(RunsReceived(lease_id, round_, error)),
            on_measured=lambda peer, bytes_per_s: self._feed(LinkMeasured(peer, bytes_per_s)),
        )
        self._builder = BatchBuilder(machine.kv, numbers_sequences=runner.drafter is not None)
        self._drafting = _drafting(context, runner)
        self._loras = LoraLoader(runner.lora, self._feed)
        self._idle_gaps = IterationGaps(self._clock.now_s, self._metrics.engine.gap_seconds().observe)
        self._kv_copier = device.copier()
        self._engine = EngineThreads(device, self._kv_copier, self._idle_gaps, engine_thread)
        self._step_ends = StepEndForecast()
        self._cleaned_up_count = 0
        """Value of `_ended_count` when drafts of ended sequences were last dropped."""
        self._next_plan: IterationPlan | None = None
        """Plan to start when no step runs."""
        self._plan_to_queue: IterationPlan | None = None
        """Plan to queue after the running step."""
        self._scheduling_since_s = 0.0  # start of the latest decision, or end of the draft model's call after it
        self._deferred_effects: list[WorkerEffect] = []
        """Effects of a step's end that are performed once the next step was launched."""
        self._plan_ready = asyncio.Event()
        self._event_handled = asyncio.Event()
        self._link_addresses: dict[str, bytes] = {}

    async def run(self) -> None:
        """Serve until asked to stop, then drain. All tasks end with this coroutine."""
        for manager, endpoint in self._context.manager_endpoints.items():
            self._bus.connect(manager, endpoint)
        self._context.stats, self._context.counts = self._heartbeat_stats, self._metrics.counts
        fixed = self._context.warnings
        self._context.warnings = lambda: [*fixed(), *filter(None, [self._metrics.slow.warning()])]
        self._context.ready = True
        self._activity.work.set()  # the weights took their time
        try:
            async with asyncio.TaskGroup() as tasks:
                running = [
                    tasks.create_task(self._receive(), name="receive"),
                    tasks.create_task(self._run_steps(), name="step"),
                    tasks.create_task(self._report(), name="report"),
                    tasks.create_task(self._tick(), name="tick"),
                ]
                await self._context.stopping.wait()
                await self._drain()
                for task in running:
                    task.cancel()
        finally:
            self._loras.close()
            await self._agent.close()
            self._engine.close()
            self._kv_copier.close()
            if self._learned_state is not None:
                self._learned_state.save()

    def _feed(self, *events: WorkerEvent) -> list[WorkerEffect]:
        """Feed events to the machine, perform its effects and return them."""
        effects = self._feed_deferring(*events)
        self._perform(effects)
        return effects

    def _feed_deferring(self, *events: WorkerEvent) -> list[WorkerEffect]:
        """Feed events to the machine, store a `StartStep`'s plan, and return all effects for the caller to perform."""
        addresses = self._agent.addresses
        if addresses != self._link_addresses:  # first call, or a link has opened another endpoint
            self._link_addresses = addresses
            events = (LinkAddresses(addresses), *events)
        now_s = self._clock.now_s()
        try:
            effects = self._handler.handle(now_s, *events)
        except Exception:
            # The stored step times may be the cause: delete them, so that the restarted worker does not fail again.
            if self._learned_state is not None:
                self._learned_state.forget()
                self._learned_state = None
            raise
        if effects and isinstance(last := effects[-1], StartStep):  # only the last effect can be one
            self._scheduling_since_s = now_s
            if last.ahead:
                self._plan_to_queue = last.plan
            else:
                self._next_plan = last.plan
                self._plan_ready.set()
        self._event_handled.set()
        if not self._machine.idle:
            self._activity.work.set()
        return effects

    def _perform(self, effects: list[WorkerEffect]) -> None:
        for effect in effects:
            match effect:
                case Send(peer=peer, message=message):
                    if isinstance(message, SegmentEnded):
                        self._log.info(
                            "segment ended",
                            request_id=message.attempt.request_id,
                            attempt=message.attempt.number,
                            outcome=message.outcome,
                            positions=message.positions,
                            reason=message.reason,
                        )
                    self._send(peer, message)
                case Dial(peer=peer, endpoint=endpoint):
                    self._bus.connect(peer, endpoint)
                case SendRuns():
                    self._agent.send(effect)
                case ReceiveRuns():
                    self._agent.receive(effect)
                case CancelRuns(lease_id=lease_id):
                    self._agent.cancel(lease_id)
                case LoadAdapter():
                    self._loras.load(effect)
                case StartStep():
                    pass  # the step task starts it, see `_feed_deferring`
                case _:
                    assert_never(effect)

    def _send(self, peer: InstanceId, message: Message) -> None:
        try:
            self._bus.send(peer, message)
        except PeerUnreachable as error:
            # No retry: the receiving worker's deadline, or the manager's next reconciliation, recovers what is lost.
            self._log.warning("peer unreachable", peer=peer, type=type(message).__name__, error=str(error))
            asyncio.get_running_loop().call_soon(self._feed, Undelivered(peer, message))

    async def _receive(self) -> None:
        """Receive messages. All that have arrived are fed to the machine in one call, so that it plans once."""
        while True:
            arrived = [await self._bus.receive()]
            while len(arrived) < _MAX_BATCHED_MESSAGES and (more := self._bus.take()) is not None:
                arrived.append(more)
            events = []
            for sender, message in arrived:
                if isinstance(message, ToWorker):
                    events.append(Received(sender, message))
                elif isinstance(message, Look):
                    self._live_view.send(sender, message)
                else:
                    self._warn_unexpected(sender=sender, type=type(message).__name__)
            self._feed(*events)

    # -- steps -------------------------------------------------------------------------------------------------

    async def _run_steps(self) -> None:
        """Run one step after the other; at most one runs, and one is queued after it."""
        while True:
            plan, self._next_plan = self._next_plan, None
            if plan is None:
                self._idle_gaps.out_of_work()
                self._plan_ready.clear()
                await self._plan_ready.wait()
            else:
                await self._run_chain(plan)

    async def _run_chain(self, plan: IterationPlan) -> None:
        """Run the step of a plan, and the steps that are planned ahead after it."""
        drafting_s = await self._draft(plan)
        step = self._begin(plan)
        step.drafting_s = drafting_s
        await step.launch_future
        effects, self._deferred_effects = self._deferred_effects, []
        self._perform(effects)
        while True:
            following = await self._plan_ahead(step)
            try:
                output = await step.output_future
            except Exception as error:
                self._log.exception("iteration failed", rows=len(step.plan.rows), tokens=step.plan.tokens)
                if following is not None:
                    await asyncio.wait([following.output_future])  # fails, too; only then may its blocks be freed
                    following.output_future.exception()  # marks it as retrieved: else asyncio logs it
                self._feed(StepFailed(f"iteration failed: {error}"))
                await asyncio.sleep(_STEP_FAILURE_PAUSE_S)  # no busy loop if every step fails
                return
            ended_at_s = self._clock.now_s()
            if following is not None:
                await following.launch_future  # taking the results must not delay the launch
            self._ended(step, output, ended_at_s - step.begun_at_s, alone=following is None)
            if following is None:
                return
            following.begun_at_s = ended_at_s
            step = following

    async def _draft(self, plan: IterationPlan) -> float:
        """Let the draft model propose tokens for the plan's rows that may have drafts. Return the seconds it took."""
        drafting, kv = self._drafting, self._machine.kv
        requests = [] if drafting is None else drafting.requests_for(plan.rows, kv, self._builder.number_of)
        if drafting is None or drafting.model is None or not requests:
            return 0.0
        try:
            drafts = await self._engine.run_between_steps(partial(drafting.model.propose_all, requests))
        except Exception:  # without drafts the responses are the same, only slower
            self._log.exception("draft model failed: not used until this worker restarts", rows=len(requests))
            drafting.model = None
            return 0.0
        drafting.store_drafts(plan.rows, requests, drafts.tokens)
        self._metrics.drafting(drafts.seconds, drafts.filled_positions)
        self._scheduling_since_s = self._clock.now_s()
        return drafts.seconds

    def _begin(self, plan: IterationPlan, running: list[Sequence] | None = None) -> StepUnderWay:
        """Queue a plan's batch. `running`: sequences sampled by the running step; this batch reads their new tokens."""
        drafting = self._drafting
        drafts = drafting.drafts_of(plan.rows) if drafting is not None and running is None else None
        batch, sampling = self._builder.build(plan, running, drafts)
        now_s = self._clock.now_s()
        self._metrics.engine.schedule_seconds().observe(now_s - self._scheduling_since_s)
        return self._engine.begin(plan, batch, sampling, now_s)

    async def _plan_ahead(self, step: StepUnderWay) -> StepUnderWay | None:
        """Plan the next step as late as possible and queue it. Return it, or None: it is planned when this one ends."""
        after_s = self._step_ends.plan_after_s(step.plan, self._machine.times) if self._planning_ahead_enabled else None
        if after_s is None or step.batch.drafts is not None:  # a step that verifies drafts yields 1 to n tokens per row
            return None
        pause_s = step.begun_at_s + after_s - self._clock.now_s()
        if pause_s > 0 and not step.output_future.done():
            await asyncio.wait([step.output_future], timeout=pause_s)
        if step.output_future.done():
            return None
        drafting, watched = self._drafting, step.plan.watched  # watched: the machine asks what is worth drafting
        worth_drafting = drafting.worth_drafting(step.sampling) if drafting is not None and watched else []
        self._perform(self._feed_deferring(PlanAhead(worth_drafting)))
        plan, self._plan_to_queue = self._plan_to_queue, None
        return None if plan is None else self._begin(plan, running=step.sampling)

    def _ended(self, step: StepUnderWay, output: StepOutput | None, latency_s: float, *, alone: bool) -> None:
        """Take a step's results. `alone`: no other step was queued after it."""
        if step.batch.drafts is None:
            self._step_ends.note(step.plan, latency_s)
        scores = prompt_logprobs_of(step.plan, step.batch, output)
        judged: list[Drafted] = []
        if self._drafting is not None and step.plan.watched and output is not None:
            proposed = None if step.batch.drafts is None else step.batch.drafts[step.batch.sample_rows].tolist()
            judged = self._drafting.acceptance(step.sampling, proposed, output)
        effects = self._feed_deferring(
            StepEnded(
                sampled_of(step.sampling, output),
                latency_s,
                scores,
                judged,
                step.drafting_s,
                [each.key for each in late_of(step.sampling, output)],
                pooled_of(step.batch, output),
            )
        )
        if self._drafting is not None and self._ended_count != self._cleaned_up_count:
            # Drafts of requests cancelled before this step's end go only now: `acceptance` has needed them.
            self._cleaned_up_count = self._ended_count
            self._drafting.forget(self._machine.state.holds)
        if alone and self._device.leaves_cpu_free and self._next_plan is not None:
            self._deferred_effects = effects  # the next step is launched first
        else:
            self._perform(effects)
        self._metrics.step(step.plan, latency_s)
        self._live_view.note_preemptions(step.plan)

    @property
    def _ended_count(self) -> int:
        """Number of requests that ended here, whatever the outcome."""
        return sum(self._machine.counters.finished.values())

    # -- reports, deadlines, the end ---------------------------------------------------------------------------

    async def _tick(self) -> None:
        while True:
            await self._activity.pause(_TICK_S, _IDLE_TICK_S)
            self._feed(Tick())

    async def _report(self) -> None:
        """Register with the manager until it knows this worker; report at `REPORT_INTERVAL_S` from then on, seldom
        while quiet."""
        while True:
            pause_s, quiet_s = _REGISTER_RETRY_S, 0.0
            await self._device.update_free_bytes()
            for effect in self._feed(ReportDue(self._device.free_bytes, self._activity.quiet_s())):
                if isinstance(effect, Send) and isinstance(effect.message, WorkerReport):
                    pause_s, quiet_s = REPORT_INTERVAL_S, effect.message.quiet_s
                    # Quarantined: a link may still write into these blocks.
                    self._metrics.export(effect.message.stats, self._agent.quarantined_blocks)
                    if self._learned_state is not None:
                        self._learned_state.save_if_due(self._clock.now_s())
            await self._activity.pause(pause_s, quiet_s)

    async def _drain(self) -> None:
        """Report the drain at once: the manager moves what it can to other workers. Finish the rest until the deadline.
        The manager reschedules what is left then, when `DrainEnded` makes this worker leave."""
        self._feed(DrainStarted())
        self._feed(ReportDue(self._device.free_bytes))
        deadline_at_s = self._clock.now_s() + self._config.drain_s
        while not self._machine.idle and self._clock.now_s() < deadline_at_s:
            self._event_handled.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_TICK_S):
                    await self._event_handled.wait()
        self._feed(DrainEnded())

    def _heartbeat_stats(self) -> dict[str, float]:
        stats, quarantined = self._machine.stats(self._device.free_bytes), self._agent.quarantined_blocks
        links = {f"link_bytes_per_s.{peer}": rate for peer, rate in stats.link_rates.items()}
        return self._metrics.heartbeat(stats, quarantined) | to_stats(stats.step_times) | links


def _transfer_memory(runner: ModelRunner, links: dict[str, KvLink]) -> GroupMemory:
    """Return the KV memory of all ranks of this worker, as one. Staging buffers are needed only if KV ever moves."""
    full_geometry = runner.block_geometry
    own_heads = (0, full_geometry.num_kv_heads) if runner.ranks is None else runner.ranks.share.kv_heads
    own_rank = RankTransfers(RankMemory(runner.kv, own_heads, staged=bool(links)), links)
    return GroupMemory(own_rank, [] if runner.followers is None else runner.followers.remote_ranks, full_geometry)


def _drafting(context: ServiceContext, runner: ModelRunner) -> Drafting | None:
    speculation = context.config.speculation
    if not speculation.drafts:
        return None
    return Drafting(speculation.max_drafts, runner.drafter)


def sampled_of(sampling: list[Sequence], output: StepOutput | None) -> list[Sampled]:
    """Return the step's tokens and failures, by token: several per sequence where drafts were accepted."""
    if output is None:
        return []
    if output.counts is not None:
        sampling = [each for each, count in zip(sampling, output.counts, strict=True) for _ in range(count)]
    return [
        Sampled(sequence.key, token, _to_wire(logprobs) if logprobs else None, output.failures.get(index, ""))
        for index, (sequence, token, logprobs) in enumerate(
            zip(sampling, output.tokens.tolist(), output.logprobs, strict=True)
        )
        if index not in output.late
    ]


def late_of(sampling: list[Sequence], output: StepOutput | None) -> list[Sequence]:
    """Return the sequences whose rows gave no token (`StepEnded.late`)."""
    if output is None:
        return []
    if output.counts is not None:
        return [each for each, count in zip(sampling, output.counts, strict=True) if count == 0]
    return [sampling[index] for index in sorted(output.late)]


def prompt_logprobs_of(plan: IterationPlan, batch: StepBatch, output: StepOutput | None) -> list[PromptScores]:
    """Return the logprobs of prompt tokens, for the requests that want them."""
    if output is None or not batch.scoring:
        return []
    return [
        PromptScores(plan.rows[scoring.row].sequence.key, plan.rows[scoring.row].start, [_to_wire(s) for s in scores])
        for scoring, scores in zip(batch.scoring, output.scores, strict=True)
    ]


def pooled_of(batch: StepBatch, output: StepOutput | None) -> list[Pooled]:
    """Return the summed states of the rows that are pooled."""
    if output is None or not batch.pooling:
        return []
    return [
        Pooled(row.attempt, PooledStates(int(batch.positions[row.first]), row.count, state))
        for row, state in zip(batch.pooling, output.pooled, strict=True)
    ]


def _to_wire(logprobs: TokenLogprobs) -> TokenLogprob:
    return TokenLogprob(logprobs.logprob, list(logprobs.top_ids), list(logprobs.top_logprobs))


class LiveView:
    """Worker's part of the monitor's live page. Stores only the latest preemptions and evictions; all else is read when
    the monitor requests a view."""

    def __init__(self, context: ServiceContext, machine: WorkerMachine, transfers: TransferMetrics) -> None:
        self._context = context
        self._machine, self._transfers = machine, transfers
        self._decisions = DecisionLog()

    def note_preemptions(self, plan: IterationPlan) -> None:
        """Record which sequences were preempted or evicted to make room for a step."""
        if not plan.preempted and not plan.evicted:
            return
        now_s, here = self._context.clock.now_s(), (self._context.instance,)
        for preempt in plan.preempted:
            self._decisions.note(now_s, "preempted", preempt.sequence.request_id, instances=here, reason=preempt.how)
        for sequence in plan.evicted:
            self._decisions.note(now_s, "evicted", sequence.request_id, instances=here, reason="parked for later")

    def send(self, sender: InstanceId, request: Look) -> None:
        """Send a view to the monitor, and to nobody else. If it cannot be reached, the view is dropped."""
        if sender != MONITOR:
            return
        with contextlib.suppress(PeerUnreachable):
            self._context.bus.send(MONITOR, self._view(request.cells))

    def _view(self, max_block_map_cells: int) -> WorkerView:
        machine, now_s = self._machine, self._context.clock.now_s()
        rows = rows_of(machine, now_s)
        moved = {"sent": 0.0, "received": 0.0}
        for labels, amount in self._transfers.bytes.values():
            moved["sent" if labels.get("direction") == "sent" else "received"] += amount
        return WorkerView(
            instance=self._context.instance,
            role=machine.setup.capacity.role.value,
            sequences=len(machine.state.held),
            rows=rows,
            blocks=blocks_of(machine, rows, max_block_map_cells),
            decisions=self._decisions.latest(now_s),
            iteration=iteration_of(machine.state.in_flight),
            kv_sent_bytes=moved["sent"],
            kv_received_bytes=moved["received"],
            drafts=drafts_of(machine.state.counters),
        )
