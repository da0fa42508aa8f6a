"""The live host of a `WorkerMachine`: bus, engine thread, KV links, reports.

    receive, links ──events──▶ machine ◀──events── tick, report, drain
                                  │ effects ──▶ bus, transfer agent
                                  │ StartStep ─▶ batch ─▶ engine thread ─▶ StepEnded ─▶ machine …
                                  └ the same, ahead ─▶ behind the step that runs (`PlanAhead`)

The step task waits for the engine and for work, never for the network. Shortly before a step ends it has the next one
planned and queued, if the machine can; effects are performed once the engine is at work. Everything that touches the
machine runs on the event loop, so the machine needs no locks. Decides nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import assert_never

from cohort.common.addresses import MONITOR, PREDICTOR
from cohort.common.engine.drafts.prompt_lookup import PromptLookup
from cohort.common.engine.drafts.recent_answers import AnswerMemory
from cohort.common.engine.ranks.group_memory import GroupLink, GroupMemory
from cohort.common.engine.ranks.rank_memory import RankMemory
from cohort.common.engine.ranks.rank_transfers import RankTransfers
from cohort.common.engine.runner.drafting import Drafting
from cohort.common.engine.runner.model_runner import ModelRunner
from cohort.common.engine.step.batch import StepBatch, StepOutput, TokenLogprobs
from cohort.common.engine.step.batch_builder import BatchBuilder
from cohort.common.engine.transfer.transfer_agent import TransferAgent, TransferOptions
from cohort.common.engine.worker.engine_threads import CpuHost, EngineThreads, LoraLoader, StepUnderWay
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
    PromptState,
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
from cohort.common.types import InstanceId

_TICK_S = 0.1
_REGISTER_EVERY_S = 0.5
_STEP_FAILURE_PAUSE_S = 0.05
_TOGETHER = 256
"""Maximum messages handed to the machine together: a flood must not keep the engine waiting."""


class WorkerLoop:
    def __init__(
        self,
        context: ServiceContext,
        host: CpuHost,
        links: dict[str, KvLink],
        machine: WorkerMachine,
        told: Machine[WorkerEvent, WorkerEffect],
        learned: LearnedState | None,
        engine: ThreadPoolExecutor,
    ) -> None:
        """`told`: the machine itself, or its recorder. `engine`: one thread, which the caller ends."""
        config, runner = context.config, host.runner
        self._host = host
        self._context = context
        self._config = config
        self._plans_ahead = settings_of(config, EngineSettings).plan_ahead
        self._machine = machine
        self._handler = told
        self._learned = learned
        self._bus = context.bus
        self._clock = context.clock
        self._log = context.log
        self._metrics = WorkerMetrics(context.metrics, machine, lambda: runner.memory_retries)
        if host.overlaps:
            self._metrics.engine.decode_classes_recorded().set(len(runner.recorded_classes))
        self._show = WorkerShow(context, machine, self._metrics.transfer)
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
        self._builder = BatchBuilder(machine.kv, numbered=runner.drafter is not None)
        self._drafting = _drafting(context, runner)
        self._loras = LoraLoader(runner.lora, self._feed)
        self._gaps = IterationGaps(self._clock.now_s, self._metrics.engine.gap_seconds().observe)
        self._copier = host.copier()
        self._engine = EngineThreads(host, self._copier, self._gaps, engine)
        self._step_ends = StepEndForecast()
        self._forgotten = 0
        """Number of ended requests when drafts of sequences that are gone were forgotten last."""
        self._next_plan: IterationPlan | None = None
        """Plan that was decided and not yet begun."""
        self._queued_plan: IterationPlan | None = None
        """Plan to be queued after the step that runs."""
        self._decided_s = 0.0
        self._deferred_effects: list[WorkerEffect] = []
        """Effects of a step's end that are performed once the next step runs."""
        self._step_ready = asyncio.Event()
        self._wakeup = asyncio.Event()
        self._addresses: dict[str, bytes] = {}

    async def run(self) -> None:
        """Serve until asked to stop, then drain. All tasks end with this coroutine."""
        for manager, endpoint in self._context.manager_endpoints.items():
            self._bus.connect(manager, endpoint)
        if self._config.predictor.refine_after_prefill:
            self._bus.connect(PREDICTOR, self._context.endpoint_of("predictor"))
        self._context.stats = self._heartbeat
        self._context.ready = True
        try:
            async with asyncio.TaskGroup() as tasks:
                running = [
                    tasks.create_task(self._receive(), name="receive"),
                    tasks.create_task(self._step(), name="step"),
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
            self._copier.close()
            if self._learned is not None:
                self._learned.save()

    def _feed(self, *events: WorkerEvent) -> list[WorkerEffect]:
        """Feed events to the machine, perform its effects and return them."""
        effects = self._feed_deferring(*events)
        self._perform(effects)
        return effects

    def _feed_deferring(self, *events: WorkerEvent) -> list[WorkerEffect]:
        """Feed events to the machine. The next step, if there is one, is stored; the caller performs the rest."""
        addresses = self._agent.addresses
        if addresses != self._addresses:  # a link may have had to move
            self._addresses = addresses
            events = (LinkAddresses(addresses), *events)
        now_s = self._clock.now_s()
        try:
            effects = self._handler.handle(now_s, *events)
        except Exception:
            # It may be what was learned that a decision stumbles over, and a restart must not stumble again.
            if self._learned is not None:
                self._learned.forget()
                self._learned = None
            raise
        if effects and isinstance(last := effects[-1], StartStep):
            self._decided_s = now_s
            if last.ahead:
                self._queued_plan = last.plan
            else:
                self._next_plan = last.plan
                self._step_ready.set()
        self._wakeup.set()
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
                    pass  # the step task's, see `_feed_deferring`
                case _:
                    assert_never(effect)

    def _send(self, peer: InstanceId, message: Message) -> None:
        try:
            self._bus.send(peer, message)
        except PeerUnreachable as error:
            # A message lost here is repaired: workers by deadlines, gateway and manager by their reconciliation.
            self._log.warning("peer unreachable", peer=peer, type=type(message).__name__, error=str(error))
            asyncio.get_running_loop().call_soon(self._feed, Undelivered(peer, message))

    async def _receive(self) -> None:
        """Receive messages. Those that arrived together are fed together, so that the machine plans once."""
        while True:
            arrived = [await self._bus.receive()]
            while len(arrived) < _TOGETHER and (more := self._bus.take()) is not None:
                arrived.append(more)
            events = []
            for sender, message in arrived:
                if isinstance(message, ToWorker):
                    events.append(Received(sender, message))
                elif isinstance(message, Look):
                    self._show.show(sender, message)
                else:
                    self._log.warning("message not for a worker", sender=sender, type=type(message).__name__)
            self._feed(*events)

    # -- iterations --------------------------------------------------------------------------------------------

    async def _step(self) -> None:
        """Run one iteration after the other; at most one runs, and one is queued after it."""
        while True:
            plan, self._next_plan = self._next_plan, None
            if plan is None:
                self._gaps.out_of_work()
                self._step_ready.clear()
                await self._step_ready.wait()
            else:
                await self._iterate(plan)

    async def _iterate(self, plan: IterationPlan) -> None:
        """Run a decided plan, and those that are planned ahead after it."""
        drafting_s = await self._draft(plan)
        step = self._begin(plan)
        step.drafting_s = drafting_s
        await step.launched
        put_off, self._deferred_effects = self._deferred_effects, []
        self._perform(put_off)
        while True:
            following = await self._plan_ahead(step)
            try:
                output = await step.computed
            except Exception as error:
                self._log.exception("iteration failed", rows=len(step.plan.rows), tokens=step.plan.tokens)
                if following is not None:
                    await asyncio.wait([following.computed])  # it fails as well, and its blocks are about to be freed
                    following.computed.exception()
                self._feed(StepFailed(f"iteration failed: {error}"))
                await asyncio.sleep(_STEP_FAILURE_PAUSE_S)  # a broken device must not spin the loop
                return
            ended_s = self._clock.now_s()
            if following is not None:
                await following.launched
            self._ended(step, output, ended_s - step.begun_s, alone=following is None)
            if following is None:
                return
            following.begun_s = ended_s
            step = following

    async def _draft(self, plan: IterationPlan) -> float:
        """Let the draft model propose for rows that may carry drafts. Return the seconds that it took."""
        drafting = self._drafting
        asked = [] if drafting is None else drafting.model_requests(plan.rows, self._machine.kv, self._builder.number)
        if drafting is None or drafting.model is None or not asked:
            return 0.0
        try:
            drafts = await self._engine.between(partial(drafting.model.propose_all, asked))
        except Exception:  # responses do not depend on it
            self._log.exception("the draft model failed and drafts no more", rows=len(asked))
            drafting.model = None
            return 0.0
        drafting.drafted(plan.rows, asked, drafts.tokens)
        self._metrics.drafting(drafts.seconds, drafts.filled)
        self._decided_s = self._clock.now_s()
        return drafts.seconds

    def _begin(self, plan: IterationPlan, behind: list[Sequence] | None = None) -> StepUnderWay:
        drafting = self._drafting
        proposals = drafting.proposals(plan.rows) if drafting is not None and behind is None else None
        batch, sampling = self._builder.build(plan, behind, proposals)
        now_s = self._clock.now_s()
        self._metrics.engine.schedule_seconds().observe(now_s - self._decided_s)
        return self._engine.begin(plan, batch, sampling, now_s)

    async def _plan_ahead(self, step: StepUnderWay) -> StepUnderWay | None:
        """Queue the next step after this one, as late as possible; None: it must be decided when this one has ended."""
        after_s = self._plan_after_s(step.plan) if self._plans_ahead else None
        if after_s is None or step.batch.drafts is not None:  # how many tokens it yields is not known before its end
            return None
        pause_s = step.begun_s + after_s - self._clock.now_s()
        if pause_s > 0 and not step.computed.done():
            await asyncio.wait([step.computed], timeout=pause_s)
        if step.computed.done():
            return None
        drafting = self._drafting
        expected = [] if drafting is None or not step.plan.watched else drafting.expected(step.sampling)
        self._perform(self._feed_deferring(PlanAhead(expected)))
        plan, self._queued_plan = self._queued_plan, None
        return None if plan is None else self._begin(plan, behind=step.sampling)

    def _plan_after_s(self, plan: IterationPlan) -> float | None:
        """Return the time from this step's start until its successor is to be planned; None if its end is unknown."""
        if self._config.predictor.refine_after_prefill and any(
            [row.start + row.count == row.sequence.request.prompt_tokens for row in plan.rows]
        ):
            return None  # their states are read when the step has ended, and no other runs
        return self._step_ends.plan_after_s(plan, self._machine.times)

    def _ended(self, step: StepUnderWay, output: StepOutput | None, latency_s: float, *, alone: bool) -> None:
        """Take a step's results. `alone`: no other step was queued after it."""
        if step.batch.drafts is None:
            self._step_ends.note(step.plan, latency_s)
        scores, drafts = scores_of(step.plan, step.batch, output), list[Drafted]()
        if self._drafting is not None and step.plan.watched and output is not None:
            proposed = None if step.batch.drafts is None else step.batch.drafts[step.batch.sample_rows].tolist()
            drafts = self._drafting.judged(step.sampling, proposed, output)
        finished = 0 if self._drafting is None else self._finished
        effects = self._feed_deferring(
            StepEnded(sampled_of(step.sampling, output), latency_s, scores, drafts, step.drafting_s)
        )
        if self._drafting is not None and (now_finished := self._finished) != self._forgotten:
            holds, self._forgotten = self._machine.state.holds, now_finished
            if self._drafting.learns and now_finished != finished:
                self._drafting.on_ended([each for each in step.sampling if not holds(each)])
            self._drafting.forget(holds)  # between two steps: one that runs is judged by what was expected
        if self._config.predictor.refine_after_prefill and not step.batch.scoring:
            self._send_prompt_states(step.sampling)
        if alone and self._host.overlaps and self._next_plan is not None:
            self._deferred_effects = effects
        else:
            self._perform(effects)
        self._metrics.step(step.plan, latency_s)
        self._show.ran(step.plan)
        if self._drafting is not None:
            self._drafting.learn()

    @property
    def _finished(self) -> int:
        """Requests that ended here, one way or another."""
        return sum(self._machine.counters.finished.values())

    def _send_prompt_states(self, sampling: list[Sequence]) -> None:
        """Send the predictor the states in which prompts ended; nothing waits for its result."""
        for state in prompt_states(self._host.runner, sampling):
            with contextlib.suppress(PeerUnreachable):
                self._bus.send(PREDICTOR, state)

    # -- reports, deadlines, the end ---------------------------------------------------------------------------

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            self._feed(Tick())
            if self._drafting is not None:
                self._drafting.learn()

    async def _report(self) -> None:
        """Report often while the manager does not know this worker, else at the configured interval."""
        while True:
            pause_s = _REGISTER_EVERY_S
            await self._host.count_free()
            for effect in self._feed(ReportDue(self._host.free_bytes)):
                match effect:
                    case Send(message=WorkerReport(stats=stats)):
                        pause_s = REPORT_INTERVAL_S
                        self._metrics.export(stats, self._agent.quarantined_blocks)
                        if self._learned is not None:
                            self._learned.save_if_due(self._clock.now_s())
                    case _:
                        pass
            await asyncio.sleep(pause_s)

    async def _drain(self) -> None:
        """Finish the sequences here, except those that the manager, informed at once, moves to other workers. Those
        left at the deadline are rescheduled by the leave."""
        self._feed(DrainStarted())
        self._feed(ReportDue(self._host.free_bytes))
        deadline_s = self._clock.now_s() + self._config.drain_s
        while not self._machine.idle and self._clock.now_s() < deadline_s:
            self._wakeup.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_TICK_S):
                    await self._wakeup.wait()
        self._feed(DrainEnded())

    def _heartbeat(self) -> dict[str, float]:
        stats = self._machine.stats(self._host.free_bytes)
        links = {f"link_bytes_per_s.{peer}": rate for peer, rate in stats.link_rates.items()}
        return self._metrics.heartbeat(stats, self._agent.quarantined_blocks) | to_stats(stats.step_times) | links


def _transfer_memory(runner: ModelRunner, links: dict[str, KvLink]) -> GroupMemory:
    whole = runner.block_geometry
    heads = (0, whole.num_kv_heads) if runner.ranks is None else runner.ranks.share.kv_heads
    own = RankTransfers(RankMemory(runner.kv, heads, staged=bool(links)), links)
    return GroupMemory(own, [] if runner.followers is None else runner.followers.ends, whole)


def _drafting(context: ServiceContext, runner: ModelRunner) -> Drafting | None:
    speculation = context.config.speculation
    if not speculation.drafts:
        return None
    answers = AnswerMemory() if speculation.mode == "recent" else None
    return Drafting(PromptLookup, speculation.max_drafts, answers, runner.drafter)


def sampled_of(sampling: list[Sequence], output: StepOutput | None) -> list[Sampled]:
    if output is None:
        return []
    if output.counts is not None:
        sampling = [each for each, count in zip(sampling, output.counts, strict=True) for _ in range(count)]
    return [
        Sampled(sequence.key, token, _to_wire(logprobs) if logprobs else None, output.failures.get(index, ""))
        for index, (sequence, token, logprobs) in enumerate(
            zip(sampling, output.tokens.tolist(), output.logprobs, strict=True)
        )
    ]


def scores_of(plan: IterationPlan, batch: StepBatch, output: StepOutput | None) -> list[PromptScores]:
    if output is None or not batch.scoring:
        return []
    return [
        PromptScores(plan.rows[scoring.row].sequence.key, plan.rows[scoring.row].start, [_to_wire(s) for s in scores])
        for scoring, scores in zip(batch.scoring, output.scores, strict=True)
    ]


def _to_wire(logprobs: TokenLogprobs) -> TokenLogprob:
    return TokenLogprob(logprobs.logprob, list(logprobs.top_ids), list(logprobs.top_logprobs))


class WorkerShow:
    """View of a worker for the live page: answers `Look` with a `WorkerView`. Without requests it stores only the
    latest sequences that lost their KV to an iteration."""

    def __init__(self, context: ServiceContext, machine: WorkerMachine, transfers: TransferMetrics) -> None:
        self._context = context
        self._machine = machine
        self._transfers = transfers
        self._decisions = DecisionLog()

    def ran(self, plan: IterationPlan) -> None:
        """Record which sequences had to leave the device for an iteration."""
        if not plan.preempted and not plan.evicted:
            return
        now_s, here = self._context.clock.now_s(), (self._context.instance,)
        for preempt in plan.preempted:
            name = preempt.sequence.request_id
            self._decisions.note(now_s, "preempted", name, instances=here, reason=preempt.how)
        for sequence in plan.evicted:
            self._decisions.note(now_s, "evicted", sequence.request_id, instances=here, reason="parked for later")

    def show(self, sender: InstanceId, asked: Look) -> None:
        """Answer the monitor's request. A view that cannot be sent is not missed: the next one is fresher."""
        if sender != MONITOR:
            return
        with contextlib.suppress(PeerUnreachable):
            self._context.bus.send(MONITOR, self._view(asked.cells))

    def _view(self, cells: int) -> WorkerView:
        machine, now_s = self._machine, self._context.clock.now_s()
        rows = rows_of(machine, now_s)
        sent = received = 0.0
        for labels, amount in self._transfers.bytes.values():
            if labels.get("direction") == "sent":
                sent += amount
            else:
                received += amount
        return WorkerView(
            instance=self._context.instance,
            role=machine.setup.capacity.role.value,
            sequences=len(machine.state.held),
            rows=rows,
            blocks=blocks_of(machine, rows, cells),
            decisions=self._decisions.latest(now_s),
            iteration=iteration_of(machine.state.in_flight),
            kv_sent_bytes=sent,
            kv_received_bytes=received,
            drafts=drafts_of(machine.state.counters),
        )


def prompt_states(runner: ModelRunner, sampled: list[Sequence]) -> list[PromptState]:
    """Return the model's final hidden states at the end of prompts, for the length predictor: one message per sequence
    that has just sampled its first token. Empty for models that store no states and for steps that ran in parts."""
    first = [index for index, each in enumerate(sampled) if each.output_tokens == 1 and not each.request.output_known]
    states = runner.sampled_states(len(sampled)) if first else None
    if states is None:
        return []
    return [PromptState(sampled[index].key, states[index].tobytes()) for index in first]
