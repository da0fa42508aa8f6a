"""The live host of a `WorkerMachine`: bus, engine thread, KV links, reports.

    receive, links ──events──▶ machine ◀──events── tick, report, drain
                                  │ effects ──▶ bus, transfer agent
                                  │ StartStep ─▶ batch ─▶ engine thread ─▶ StepEnded ─▶ machine …

The step task waits for the engine and for work, never for the network. Everything that touches the machine runs on the
event loop, so the machine needs no locks. Made by `worker_process.py`; decides nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
from concurrent.futures import ThreadPoolExecutor
from typing import assert_never

from cohort.common.engine.batch import StepBatch, StepOutput, TokenLogprobs
from cohort.common.engine.batch_builder import build_batch
from cohort.common.engine.free_memory import FreeMemory
from cohort.common.engine.iteration_gaps import IterationGaps
from cohort.common.engine.kv_copies import KvCopier
from cohort.common.engine.learned_state import LearnedState
from cohort.common.engine.model_runner import ModelRunner
from cohort.common.engine.prompt_states import prompt_states
from cohort.common.engine.stream_copies import StreamCopier
from cohort.common.engine.streams import stream_for
from cohort.common.engine.transfer_agent import TransferAgent
from cohort.common.engine.transfer_memory import CacheMemory
from cohort.common.engine.worker_metrics import WorkerMetrics
from cohort.common.errors import PeerUnreachable
from cohort.common.machines.effects import CancelRuns, Dial, ReceiveRuns, Send, SendRuns, StartStep, WorkerEffect
from cohort.common.machines.events import (
    DrainEnded,
    DrainStarted,
    LinkAddresses,
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
from cohort.common.machines.worker import WorkerMachine
from cohort.common.machines.worker_state import REPORT_INTERVAL_S
from cohort.common.messages import KvChunk, Message, RegisterWorker, SegmentEnded, TokenLogprob, ToWorker, WorkerReport
from cohort.common.policies.interface import IterationPlan
from cohort.common.sequence import Sequence
from cohort.common.service import MANAGER, PREDICTOR, ServiceContext
from cohort.common.transport.kv_link import KvLink
from cohort.common.types import InstanceId

_TICK_S = 0.1
_REGISTER_EVERY_S = 0.5
_STEP_FAILURE_PAUSE_S = 0.05
_TOGETHER = 256
"""Messages handed to the machine together, at most: a flood must not keep the engine waiting."""


class WorkerLoop:
    def __init__(
        self,
        context: ServiceContext,
        runner: ModelRunner,
        links: dict[str, KvLink],
        machine: WorkerMachine,
        told: Machine[WorkerEvent, WorkerEffect],
        learned: LearnedState | None,
        engine: ThreadPoolExecutor,
    ) -> None:
        """`told`: the machine itself, or its recorder. `engine`: one thread."""
        config = context.config
        self._context = context
        self._config = config
        self._runner = runner
        self._machine = machine
        self._told = told
        self._learned = learned
        self._engine = engine
        self._bus = context.bus
        self._clock = context.clock
        self._log = context.log
        self._metrics = WorkerMetrics(context.metrics, machine, lambda: runner.memory_retries)
        if runner.device.type == "cuda":
            self._metrics.engine.decode_classes_recorded().set(len(runner.recorded_classes))
        self._agent = TransferAgent(
            links,
            CacheMemory(runner.kv, staged=bool(links)),
            checksums=config.transfer.checksum != "off",
            run_timeout_s=config.transfer.run_timeout_s,
            runs_at_once=config.transfer.runs_at_once,
            clock=context.clock,
            metrics=self._metrics.transfer,
            announce=self._announce,
            on_sent=self._run_sent,
            on_received=self._run_received,
        )
        # A GPU's step leaves the processor free: the results of the step before are told while it computes. On a
        # processor that would only take the step's own time.
        self._overlaps = runner.device.type == "cuda"
        self._copier: KvCopier | StreamCopier
        if runner.device.type == "cuda":
            self._copier = StreamCopier(runner.kv, runner.stream, stream_for(runner.device))
        else:
            self._copier = KvCopier(runner.kv)
        self._free_memory = FreeMemory(runner.device)
        self._gaps = IterationGaps(self._clock.now_s, self._metrics.engine.gap_seconds().observe)
        self._next: IterationPlan | None = None
        """Decided, and not yet begun."""
        self._decided_s = 0.0
        self._put_off: list[WorkerEffect] = []
        """Effects of a step's end that are performed once the next step runs."""
        self._work = asyncio.Event()
        self._something = asyncio.Event()
        self._addresses: dict[str, bytes] = {}

    async def run(self) -> None:
        """Until asked to stop, then drain. All tasks end with this coroutine."""
        self._bus.connect(MANAGER, self._context.endpoint_of("manager"))
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
            await self._agent.close()
            self._copier.close()
            if self._learned is not None:
                self._learned.save()

    # -- the machine -------------------------------------------------------------------------------------------

    def _tell(self, *events: WorkerEvent) -> list[WorkerEffect]:
        """Hand over what happened, and do what the machine asks for. Returns that."""
        effects = self._ask(*events)
        self._perform(effects)
        return effects

    def _ask(self, *events: WorkerEvent) -> list[WorkerEffect]:
        """Hand over what happened. The next step, if there is one, is taken note of; the rest is the caller's to
        perform."""
        addresses = self._agent.addresses
        if addresses != self._addresses:  # a link may have had to move
            self._addresses = addresses
            events = (LinkAddresses(addresses), *events)
        now_s = self._clock.now_s()
        effects = self._told.handle(now_s, *events)
        if effects and isinstance(effects[-1], StartStep):
            self._next, self._decided_s = effects[-1].plan, now_s
            self._work.set()
        self._something.set()
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
                case StartStep():
                    pass  # the step task's, see `_ask`
                case _:
                    assert_never(effect)

    def _send(self, peer: InstanceId, message: Message) -> None:
        try:
            self._bus.send(peer, message)
        except PeerUnreachable as error:
            # A message lost here is repaired: workers by deadlines, gateway and manager by their reconciliation.
            self._log.warning("peer unreachable", peer=peer, type=type(message).__name__, error=str(error))
            asyncio.get_running_loop().call_soon(self._tell, Undelivered(peer, message))

    def _announce(self, peer: InstanceId, chunk: KvChunk) -> None:
        self._send(peer, chunk)

    def _run_sent(self, lease_id: int, error: str | None) -> None:
        self._tell(RunsSent(lease_id, error))

    def _run_received(self, lease_id: int, round_: int, error: str | None) -> None:
        self._tell(RunsReceived(lease_id, round_, error))

    async def _receive(self) -> None:
        """Messages that arrived together are handed over together, so that the machine plans once."""
        while True:
            arrived = [await self._bus.receive()]
            while len(arrived) < _TOGETHER and (more := self._bus.take()) is not None:
                arrived.append(more)
            events = []
            for sender, message in arrived:
                if isinstance(message, ToWorker):
                    events.append(Received(sender, message))
                else:
                    self._log.warning("message not for a worker", sender=sender, type=type(message).__name__)
            self._tell(*events)

    # -- iterations --------------------------------------------------------------------------------------------

    async def _step(self) -> None:
        """One iteration after the other; at most one runs."""
        while True:
            plan, self._next = self._next, None
            if plan is None:
                self._gaps.out_of_work()
                self._work.clear()
                await self._work.wait()
            else:
                await self._iterate(plan)

    async def _iterate(self, plan: IterationPlan) -> None:
        batch, sampling = build_batch(plan, self._machine.kv)
        started_s = self._clock.now_s()
        self._metrics.engine.schedule_seconds().observe(started_s - self._decided_s)
        computing = asyncio.get_running_loop().run_in_executor(self._engine, self._execute, plan, batch)
        put_off, self._put_off = self._put_off, []
        self._perform(put_off)
        try:
            output = await computing
        except Exception as error:
            self._log.exception("iteration failed", rows=len(plan.rows), tokens=plan.tokens)
            self._tell(StepFailed(f"iteration failed: {error}"))
            await asyncio.sleep(_STEP_FAILURE_PAUSE_S)  # a broken device must not spin the loop
            return
        latency_s = self._clock.now_s() - started_s
        effects = self._ask(StepEnded(_sampled(sampling, output), latency_s, _scores(plan, batch, output)))
        if self._config.predictor.refine_after_prefill and not batch.scoring:
            self._tell_predictor(sampling)
        if self._overlaps and self._next is not None:
            self._put_off = effects
        else:
            self._perform(effects)
        self._metrics.step(plan, latency_s)

    def _execute(self, plan: IterationPlan, batch: StepBatch) -> StepOutput | None:
        """On the engine thread: the plan's rows, after its copies or beside those that may run so."""
        with self._copier.around(plan.copies), self._gaps.rows():
            return self._runner.execute(batch) if batch.num_rows else None

    def _tell_predictor(self, sampling: list[Sequence]) -> None:
        """The states in which prompts ended; nothing waits for what the predictor makes of them."""
        for state in prompt_states(self._runner, sampling):
            with contextlib.suppress(PeerUnreachable):
                self._bus.send(PREDICTOR, state)

    # -- reports, deadlines, the end ---------------------------------------------------------------------------

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            self._tell(Tick())

    async def _report(self) -> None:
        """Often while the manager does not know this worker, else at the configured interval."""
        while True:
            pause_s = REPORT_INTERVAL_S
            await self._free_memory.refresh()
            for effect in self._tell(ReportDue(self._free_memory.bytes)):
                match effect:
                    case Send(message=RegisterWorker()):
                        pause_s = _REGISTER_EVERY_S
                    case Send(message=WorkerReport(stats=stats)):
                        self._metrics.export(stats, self._agent.quarantined_blocks)
                        if self._learned is not None:
                            self._learned.save_if_due(self._clock.now_s())
                    case _:
                        pass
            await asyncio.sleep(pause_s)

    async def _drain(self) -> None:
        """Finish the sequences here; those left at the deadline are rescheduled by the leave."""
        self._tell(DrainStarted())
        deadline_s = self._clock.now_s() + self._config.engine.drain_s
        while not self._machine.idle and self._clock.now_s() < deadline_s:
            self._something.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_TICK_S):
                    await self._something.wait()
        self._tell(DrainEnded())

    def _heartbeat(self) -> dict[str, float]:
        stats = self._machine.stats(self._free_memory.bytes)
        return self._metrics.heartbeat(stats, self._agent.quarantined_blocks)


def _sampled(sampling: list[Sequence], output: StepOutput | None) -> list[Sampled]:
    if output is None:
        return []
    return [
        Sampled(sequence.key, token, _to_wire(logprobs) if logprobs else None, output.failures.get(index, ""))
        for index, (sequence, token, logprobs) in enumerate(
            zip(sampling, output.tokens.tolist(), output.logprobs, strict=True)
        )
    ]


def _scores(plan: IterationPlan, batch: StepBatch, output: StepOutput | None) -> list[PromptScores]:
    if output is None or not batch.scoring:
        return []
    return [
        PromptScores(plan.rows[scoring.row].sequence.key, plan.rows[scoring.row].start, [_to_wire(s) for s in scores])
        for scoring, scores in zip(batch.scoring, output.scores, strict=True)
    ]


def _to_wire(logprobs: TokenLogprobs) -> TokenLogprob:
    return TokenLogprob(logprobs.logprob, list(logprobs.top_ids), list(logprobs.top_logprobs))
