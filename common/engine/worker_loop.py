"""The live host of a `WorkerMachine`: bus, engine thread, KV links, reports.

    receive ──messages──▶ machine ◀──deadlines── tick
                            │ effects ──▶ bus, transfer agent
    step: machine.plan ─▶ batch ─▶ engine thread ─▶ machine.completed ─▶ …

The step loop waits for the engine and for work, never for the network. Everything that touches the machine runs on
the event loop, so the machine needs no locks. Called by the worker services; decides nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import random
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import torch

from cohort.common import paths
from cohort.common.config import Config, dump_config
from cohort.common.engine import run_checksum
from cohort.common.engine.batch import StepBatch, StepOutput, TokenLogprobs
from cohort.common.engine.batch_builder import build_batch
from cohort.common.engine.device_memory import DeviceShare, place
from cohort.common.engine.iteration_gaps import IterationGaps
from cohort.common.engine.kv_copies import KvCopier
from cohort.common.engine.kv_tensors import KvTensors
from cohort.common.engine.learned_state import LearnedState
from cohort.common.engine.model_config import read_geometry
from cohort.common.engine.model_runner import ModelRunner, resolve_device, resolve_dtype
from cohort.common.engine.prompt_states import prompt_states
from cohort.common.engine.stream_copies import StreamCopier
from cohort.common.engine.streams import stream_for
from cohort.common.engine.transfer_agent import TransferAgent
from cohort.common.errors import ConfigError, PeerUnreachable
from cohort.common.machines.effects import CancelRuns, Dial, ReceiveRuns, Send, SendRuns
from cohort.common.machines.recording import RecordedWorkerMachine
from cohort.common.machines.worker import Sampled, WorkerMachine, WorkerSettings
from cohort.common.messages import (
    Drain,
    KvChunk,
    Leaving,
    ManagerHello,
    Message,
    Registered,
    RegisterWorker,
    SegmentEnded,
    TokenLogprob,
    WorkerReport,
)
from cohort.common.metrics import EngineMetrics, TransferMetrics
from cohort.common.policies.interface import IterationPlan, IterationScheduler
from cohort.common.policies.kv_interface import KvAllocator
from cohort.common.sequence import Sequence
from cohort.common.service import MANAGER, PREDICTOR, ServiceContext, bind_address
from cohort.common.transport.kv_link import KvLink
from cohort.common.transport.links import open_links
from cohort.common.transport.security import load_keys
from cohort.common.types import KvGeometry, Role, WorkerCapacity, WorkerFigures

_TICK_S = 0.1
_REGISTER_EVERY_S = 0.5
_STEP_FAILURE_PAUSE_S = 0.05


class WorkerPolicies(Protocol):
    """Where a worker's policies come from: `common/policies/compose.py`, handed in by the service."""

    def check_names(self, config: Config) -> None: ...

    def iteration(self, config: Config) -> IterationScheduler: ...

    def allocation(self, config: Config, geometry: KvGeometry, num_blocks: int, host_blocks: int) -> KvAllocator: ...


class WorkerLoop:
    def __init__(
        self,
        context: ServiceContext,
        role: Role,
        runner: ModelRunner,
        links: dict[str, KvLink],
        policies: WorkerPolicies,
        engine: ThreadPoolExecutor,
    ) -> None:
        config = context.config
        self._context = context
        self._config = config
        self._runner = runner
        self._bus = context.bus
        self._clock = context.clock
        self._log = context.log
        self._engine_metrics = EngineMetrics(context.metrics)
        self._transfer_metrics = TransferMetrics(context.metrics)
        self.capacity = capacity_of(config, role, runner, context.model_name)
        self._agent = TransferAgent(
            links,
            _CacheMemory(runner.kv),
            block_bytes=runner.kv.block_bytes,
            checksums=config.transfer.checksum != "off",
            run_timeout_s=config.transfer.run_timeout_s,
            clock=context.clock,
            metrics=self._transfer_metrics,
            announce=self._announce,
            on_sent=self._run_sent,
            on_received=self._run_received,
        )
        kv = policies.allocation(config, self.capacity.geometry, self.capacity.num_blocks, self.capacity.host_blocks)
        settings = WorkerSettings(
            links=tuple(links),
            offer_timeout_s=config.transfer.offer_timeout_s,
            accept_timeout_s=2 * config.transfer.run_timeout_s + config.transfer.lease_s,
            lease_s=config.transfer.lease_s,
            default_prediction=float(config.gateway.default_prediction_tokens),
            stall_timeout_s=config.transfer.stall_timeout_s,
            chunked_transfer=config.transfer.chunked,
        )
        scheduler, seed = policies.iteration(config), random.SystemRandom().getrandbits(53)
        # A recording starts from nothing learned: its replay knows no files.
        self._learned = None if config.engine.record_dir else self._learned_state(scheduler)
        self.machine: WorkerMachine
        if config.engine.record_dir:
            self.machine = RecordedWorkerMachine(
                context.instance,
                MANAGER,
                self.capacity,
                settings,
                scheduler,
                kv,
                seed,
                lambda: self._agent.addresses,
                dump_config(config),
                _recording(config, context.instance).write,
            )
        else:
            self.machine = WorkerMachine(
                context.instance,
                MANAGER,
                self.capacity,
                settings,
                scheduler,
                kv,
                random.Random(seed),
                lambda: self._agent.addresses,
            )
        self._engine = engine
        # A GPU's step leaves the processor free: what the step before has to tell is told while it computes. On a
        # processor that would only take the step's own time.
        self._overlaps = runner.device.type == "cuda"
        self._copier: KvCopier | StreamCopier
        if runner.device.type == "cuda":
            self._copier = StreamCopier(runner.kv, runner.stream, stream_for(runner.device))
        else:
            self._copier = KvCopier(runner.kv)
        self._gaps = IterationGaps(self._clock.now_s, self._engine_metrics.gap_seconds().observe)
        self._work = asyncio.Event()
        self._manager_incarnation: int | None = None
        self._report_sequence = 0
        self._seen = _Seen()
        self._draining = False

    def _learned_state(self, scheduler: IterationScheduler) -> LearnedState | None:
        """Read what this scheduler learned before, if it learns."""
        if scheduler.learned is None:
            return None
        context, config, runner = self._context, self._config, self._runner
        threads = config.worker_threads(context.instance, len(_cores()))
        learned = LearnedState(
            scheduler.learned,
            Path(config.engine.state_dir) if config.engine.state_dir else paths.cache_dir() / "learned",
            f"{context.model_name}-{runner.device}-{runner.dtype}-{threads}-{context.instance}-{config.policies.iteration}",
            config.bros.profile if config.policies.iteration == "slack_packing" else config.dynaserve.profile,
        )
        self._log.info("step times", start=learned.load())
        return learned

    async def run(self) -> None:
        """Until asked to stop, then drain. All tasks end with this coroutine."""
        self._bus.connect(MANAGER, self._context.endpoint_of("manager"))
        if self._config.predictor.refine_after_prefill:
            self._bus.connect(PREDICTOR, self._context.endpoint_of("predictor"))
        self._context.figures = self.figures
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

    # -- messages ----------------------------------------------------------------------------------------------

    async def _receive(self) -> None:
        while True:
            sender, message = await self._bus.receive()
            self._handle(sender, message)

    def _handle(self, sender: str, message: Message) -> None:
        match message:
            case Registered(incarnation=incarnation):
                self._manager_incarnation = incarnation
            case ManagerHello(incarnation=incarnation):
                # It does not know us (any more): it restarted, or thought us dead.
                self._manager_incarnation = None
                self._register()
            case Drain():
                self._context.stopping.set()
            case _:
                if not self.machine.on_message(self._clock.now_s(), sender, message):
                    self._log.warning("message not for a worker", sender=sender, type=type(message).__name__)
                self._perform()

    def _perform(self) -> None:
        """Do what the machine asked for, in order. Wakes the step loop: anything may have made work."""
        for effect in self.machine.take_effects():
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
        self._work.set()

    def _send(self, peer: str, message: Message) -> None:
        try:
            self._bus.send(peer, message)
        except PeerUnreachable as error:
            # What is lost here is repaired: workers by deadlines, gateway and manager by their reconciliation.
            self._log.warning("peer unreachable", peer=peer, type=type(message).__name__, error=str(error))
            if peer != MANAGER:
                asyncio.get_running_loop().call_soon(self._peer_lost, peer)

    def _peer_lost(self, peer: str) -> None:
        self.machine.on_peer_lost(self._clock.now_s(), peer)
        self._perform()

    def _announce(self, peer: str, chunk: KvChunk) -> None:
        self._send(peer, chunk)

    def _run_sent(self, lease_id: int, error: str | None) -> None:
        self.machine.run_sent(self._clock.now_s(), lease_id, error)
        self._perform()

    def _run_received(self, lease_id: int, round_: int, error: str | None) -> None:
        self.machine.run_received(self._clock.now_s(), lease_id, round_, error)
        self._perform()

    # -- iterations --------------------------------------------------------------------------------------------

    async def _step(self) -> None:
        loop = asyncio.get_running_loop()
        metrics = self._engine_metrics
        while True:
            self._work.clear()
            decided_s = self._clock.now_s()
            plan = self.machine.plan(decided_s)
            if plan is None or not self._overlaps:
                self._perform_quietly()
            if plan is None:
                self._gaps.out_of_work()
                await self._work.wait()
                continue
            batch, drawing = build_batch(plan, self.machine.kv)
            started_s = self._clock.now_s()
            metrics.schedule_seconds().observe(started_s - decided_s)
            computing = loop.run_in_executor(self._engine, self._execute, plan, batch)
            if self._overlaps:
                self._perform_quietly()  # of the step before, and of this plan
            try:
                output = await computing
            except Exception as error:
                self._log.exception("iteration failed", rows=len(plan.rows), tokens=plan.tokens)
                self.machine.step_failed(self._clock.now_s(), f"iteration failed: {error}")
                self._perform()
                await asyncio.sleep(_STEP_FAILURE_PAUSE_S)  # a broken device must not spin the loop
                continue
            ended_s = self._clock.now_s()
            if output is not None and batch.scoring:
                self._score_prompts(plan, batch, output)
            self.machine.completed(ended_s, _draws(drawing, output), ended_s - started_s)
            if self._config.predictor.refine_after_prefill and not batch.scoring:
                self._tell_predictor(drawing)
            if not self._overlaps:
                self._perform_quietly()
            self._observe_step(plan, ended_s - started_s)

    def _score_prompts(self, plan: IterationPlan, batch: StepBatch, output: StepOutput) -> None:
        for scoring, scores in zip(batch.scoring, output.scores, strict=True):
            row = plan.rows[scoring.row]
            self.machine.scored(row.sequence, row.start, [_to_wire(item) for item in scores])

    def _tell_predictor(self, drawing: list[Sequence]) -> None:
        """The states in which prompts ended; nobody waits for what the predictor makes of them."""
        for state in prompt_states(self._runner, drawing):
            with contextlib.suppress(PeerUnreachable):
                self._bus.send(PREDICTOR, state)

    def _perform_quietly(self) -> None:
        """`_perform` without waking the step loop by its own effects."""
        awake = self._work.is_set()
        self._perform()
        if not awake:
            self._work.clear()

    def _execute(self, plan: IterationPlan, batch: StepBatch) -> StepOutput | None:
        """On the engine thread: the plan's rows, after its copies or beside those that may run so."""
        with self._copier.around(plan.copies), self._gaps.rows():
            return self._runner.execute(batch) if batch.num_rows else None

    def _observe_step(self, plan: IterationPlan, latency_s: float) -> None:
        metrics = self._engine_metrics
        longest = max((row.count for row in plan.rows), default=0)
        shortest = min((row.count for row in plan.rows), default=0)
        kind = "decode" if longest <= 1 else "prefill" if shortest > 1 else "mixed"
        metrics.step_seconds(kind).observe(latency_s)
        metrics.step_rows().observe(len(plan.rows))
        metrics.step_tokens().observe(plan.tokens)
        for preempted in plan.preempted:
            metrics.preemptions(preempted.how).inc()
        for copy in plan.copies:
            if copy.unit == "block":
                metrics.swapped_blocks(copy.direction).inc(len(copy.device))
            else:
                metrics.swapped_slots(copy.direction).inc(len(copy.device))

    # -- reports and deadlines ---------------------------------------------------------------------------------

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            self.machine.tick(self._clock.now_s())
            self._perform()

    async def _report(self) -> None:
        """Register until the manager knows us, then report; the manager takes silence for death."""
        while True:
            if self._manager_incarnation is None:
                self._register()
                await asyncio.sleep(_REGISTER_EVERY_S)
                continue
            self._report_sequence += 1
            figures = self.machine.figures(self._memory_free_bytes())
            self._send(
                MANAGER,
                WorkerReport(
                    self._context.instance,
                    self._context.incarnation,
                    self._report_sequence,
                    figures,
                    self.machine.held,
                    self.machine.awaiting,
                    self._draining,
                ),
            )
            self._export(figures)
            if self._learned is not None:
                self._learned.save_if_due(self._clock.now_s())
            await asyncio.sleep(self._config.engine.report_interval_s)

    def _register(self) -> None:
        self._send(
            MANAGER,
            RegisterWorker(
                self._context.instance,
                self._context.incarnation,
                self._bus.endpoint,
                self.capacity,
                self.machine.held,
                self.machine.awaiting,
            ),
        )

    async def _drain(self) -> None:
        """Finish what is here; what is left at the deadline is displaced by `Leaving`."""
        self._draining = True
        deadline_s = self._clock.now_s() + self._config.engine.drain_s
        while not self.machine.idle and self._clock.now_s() < deadline_s:
            self._work.clear()
            try:
                async with asyncio.timeout(_TICK_S):
                    await self._work.wait()
            except TimeoutError:
                continue
            await asyncio.sleep(0)
        self._send(MANAGER, Leaving(self._context.instance, self._context.incarnation))

    def _memory_free_bytes(self) -> int:
        if self._runner.device.type == "cuda":
            return int(torch.cuda.mem_get_info(self._runner.device)[0])
        return _available_memory_bytes()

    def _export(self, figures: WorkerFigures) -> None:
        """Machine totals into this process's metrics."""
        machine, metrics, seen = self.machine, self._engine_metrics, self._seen
        waiting = {"rt": 0, "be": 0}
        running = {"rt": 0, "be": 0}
        for sequence in machine.sequences():
            group = running if sequence.phase.value == "running" else waiting
            group[sequence.request.traffic_class] += 1
        for name in ("rt", "be"):
            metrics.requests_running(name).set(running[name])
            metrics.requests_waiting(name).set(waiting[name])
        used = figures.total_blocks - figures.free_blocks - figures.cached_blocks
        metrics.requests_awaiting_kv().set(figures.awaiting_kv)
        metrics.requests_parked().set(figures.parked)
        metrics.kv_cache_usage().set(used / max(1, figures.total_blocks))
        for state, value in (("used", used), ("cached", figures.cached_blocks), ("free", figures.free_blocks)):
            metrics.kv_blocks(state).set(value)
        metrics.host_kv_blocks("used").set(figures.host_blocks - figures.host_free_blocks)
        metrics.host_kv_blocks("free").set(figures.host_free_blocks)
        self._transfer_metrics.leases().set(figures.leases)
        for seat, policy in (("iteration", machine.scheduler), ("allocation", machine.kv)):
            for name, figure in policy.metrics().items():
                metrics.policy_figures(seat, name).set(figure)
        counters = machine.counters
        metrics.prefix_cache_queries().inc(seen.grown("queries", figures.prefix_queries))
        metrics.prefix_cache_hits().inc(seen.grown("hits", figures.prefix_hits))
        metrics.prefill_tokens().inc(seen.grown("prefill", counters.prefill_tokens))
        metrics.decode_tokens().inc(seen.grown("decode", counters.decode_tokens))
        metrics.out_of_memory().inc(seen.grown("oom", self._runner.memory_retries))
        self._transfer_metrics.hand_overs().inc(seen.grown("hand_overs", counters.transfers_in))
        self._transfer_metrics.exposed_seconds().inc(seen.grown("exposed", counters.exposed_transfer_s))
        self._transfer_metrics.expired_leases().inc(seen.grown("expired", figures.expired_leases))
        self._transfer_metrics.retries("any").inc(seen.grown("retries", counters.transfer_retries))

    def figures(self) -> dict[str, float]:
        """For the heartbeat."""
        machine = self.machine
        figures = machine.figures(self._memory_free_bytes())
        counters = machine.counters
        return {
            "running": figures.running,
            "waiting": figures.waiting,
            "awaiting_kv": figures.awaiting_kv,
            "parked": figures.parked,
            "kv_total_blocks": figures.total_blocks,
            "kv_free_blocks": figures.free_blocks,
            "kv_cached_blocks": figures.cached_blocks,
            "host_free_blocks": figures.host_free_blocks,
            "leases": figures.leases,
            "expired_leases_total": figures.expired_leases,
            "held_blocks": sum(machine.kv.owners().values()),
            "quarantined_blocks": self._agent.quarantined_blocks,
            "step_ms": figures.step_s * 1000,
            "steps_total": counters.steps,
            "prefill_tokens_total": counters.prefill_tokens,
            "decode_tokens_total": counters.decode_tokens,
            "preemptions_total": counters.preemptions,
            "transfers_total": counters.transfers_in + counters.transfers_out,
            "hand_overs_in_total": counters.transfers_in,
            "exposed_transfer_seconds_total": counters.exposed_transfer_s,
            "transfer_failures_total": counters.transfer_failures,
            "transfer_retries_total": counters.transfer_retries,
            "transfer_stalls_total": counters.stalls,
            "pool_offloads_total": counters.pooled,
            "pool_prefetches_total": counters.prefetched,
            "pool_direct_hand_overs_total": counters.from_host,
            "device_memory_free_bytes": figures.memory_free_bytes,
            **machine.scheduler.metrics(),
            **machine.kv.metrics(),
        }


class _Seen:
    """Last exported totals, so that counters only ever grow by what is new."""

    def __init__(self) -> None:
        self._totals: dict[str, float] = {}

    def grown(self, name: str, total: float) -> float:
        new = total - self._totals.get(name, 0)
        self._totals[name] = total
        return max(0, new)


class _CacheMemory:
    """The cache tensors as transfer buffers."""

    def __init__(self, kv: KvTensors) -> None:
        self._kv = kv
        self._stream = stream_for(kv.device)  # sums must not wait for a step

    def buffer(self, first_block: int, num_blocks: int, *, host: bool = False) -> object:
        view = self._kv.run_view(first_block, num_blocks, host=host)
        return view if view.is_cuda else view.numpy()

    def checksum(self, first_block: int, num_blocks: int, *, host: bool = False, like: int = 0) -> int:
        view = self._kv.run_view(first_block, num_blocks, host=host)
        if self._kv.device.type == "cpu":
            return run_checksum.alike(view, like) if like else run_checksum.crc32(view)
        with torch.inference_mode(), self._stream.use():
            return run_checksum.alike(view, like) if like else run_checksum.weighted(view)


def _recording(config: Config, instance: str) -> io.BufferedWriter:
    """A new file per worker process, closed with it."""
    folder = Path(config.engine.record_dir)
    folder.mkdir(parents=True, exist_ok=True)
    return (folder / f"{instance}-{time.time_ns()}.jsonl").open("wb")


def _draws(drawing: list[Sequence], output: StepOutput | None) -> Iterable[Sampled]:
    if output is None:
        return
    for sequence, token, logprobs in zip(drawing, output.tokens.tolist(), output.logprobs, strict=True):
        yield Sampled(sequence, token, _to_wire(logprobs) if logprobs else None)


def _to_wire(logprobs: TokenLogprobs) -> TokenLogprob:
    return TokenLogprob(logprobs.logprob, list(logprobs.top_ids), list(logprobs.top_logprobs))


def capacity_of(config: Config, role: Role, runner: ModelRunner, model: str) -> WorkerCapacity:
    geometry = runner.kv.geometry
    num_blocks = len(runner.kv.blocks)
    longest = config.model.max_model_len or runner.geometry.max_positions
    return WorkerCapacity(
        role=role,
        model=model,
        max_model_len=min(longest, num_blocks * geometry.block_size),
        num_layers=geometry.num_layers,
        num_kv_heads=geometry.num_kv_heads,
        head_dim=geometry.head_dim,
        dtype_bytes=geometry.dtype_bytes,
        block_size=geometry.block_size,
        num_blocks=num_blocks,
        host_blocks=len(runner.kv.host_blocks),
        max_rows=config.engine.max_rows,
        max_step_tokens=config.engine.max_step_tokens,
    )


def _available_memory_bytes() -> int:
    """MemAvailable of this host; 0 where /proc does not say."""
    try:
        with open("/proc/meminfo", encoding="ascii") as meminfo:
            for line in meminfo:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0


def load_runner(config: Config, threads: int, instance: str = "") -> ModelRunner:
    """Model and cache as configured; the cache sized from what the device has. Raises `ConfigError`, `ModelError`.

    `instance` is the worker's name in the configuration; "" = it has the machine to itself.
    """
    model_dir = Path(config.model.path) if config.model.path else paths.default_model_dir()
    if not model_dir.is_dir():
        raise ConfigError(f"model.path: no folder {model_dir}; run scripts/setup or name a Hugging Face folder")
    device, sharers = _device(config, instance)
    dtype = resolve_dtype(config.model.dtype, device)
    geometry = read_geometry(model_dir)
    block_bytes = geometry.kv_geometry(dtype, config.kv.block_size).block_bytes
    memory_bytes = config.kv.memory_bytes
    num_blocks = 0
    if device.type == "cpu":
        memory_bytes = memory_bytes or config.kv.cpu_memory_bytes
        num_blocks = ModelRunner.plan_kv_blocks(geometry, dtype, config.kv.block_size, memory_bytes)
        if num_blocks < 2:
            raise ConfigError(
                f"kv.memory_bytes: {memory_bytes} bytes hold {num_blocks} blocks of {block_bytes} bytes; give it more"
            )
    return ModelRunner(
        model_dir,
        dtype=dtype,
        device=str(device),
        threads=threads,
        block_size=config.kv.block_size,
        num_blocks=num_blocks,
        host_blocks=config.kv.host_memory_bytes // block_bytes,
        max_rows=config.engine.max_rows,
        max_step_tokens=config.engine.max_step_tokens,
        max_context=config.model.max_model_len,
        share=DeviceShare(config.kv.memory_fraction, sharers, memory_bytes, config.engine.cuda_graph_memory_bytes),
        weights=config.model.weights,
    )


def _device(config: Config, instance: str) -> tuple[torch.device, int]:
    """A worker's device, and how many workers share it: they go round the GPUs unless the configuration names one."""
    device = resolve_device(config.engine.device)
    if device.type != "cuda":
        return device, 1
    names = list(config.instance_roles)
    worker = names.index(instance) if instance in names else 0
    workers = len(names) if instance else 1
    visible = 1 if device.index is not None else torch.cuda.device_count()
    placement = place(worker, workers, visible, config.engine.workers_per_gpu)
    return torch.device("cuda", device.index if device.index is not None else placement.device_index), placement.sharers


def open_worker_links(context: ServiceContext) -> dict[str, KvLink]:
    """The configured links that can be had here, best first."""
    endpoint = _data_endpoint(context)
    curve = load_keys(context.config.security.curve_secret_key_file)
    links = open_links(
        context.config.transfer.links,
        zmq_bind=bind_address(endpoint, context.config.endpoints.bind_host),
        zmq_advertise=endpoint,
        curve=curve,
    )
    return {link.name: link for link in links}


def _data_endpoint(context: ServiceContext) -> str:
    """Where the fallback link listens: beside the worker's inbox."""
    worker = context.config.endpoints.worker
    if worker.startswith("tcp://"):
        return f"{worker.rpartition(':')[0]}:0"
    return f"ipc://{context.run_dir / context.instance}.kv.sock"


async def run_worker(context: ServiceContext, default_role: Role, policies: WorkerPolicies) -> None:
    """The whole life of a worker process: load, serve, drain."""
    config = context.config
    policies.check_names(config)
    role = config.instance_roles.get(context.instance, default_role)
    threads = config.worker_threads(context.instance, len(_cores()))
    started = time.monotonic()
    # One thread does everything with torch, from loading on: OpenMP keeps a pool per calling thread, and with two pools
    # on the cores of one it stops spinning between two operators, which makes a step half as slow again.
    engine = ThreadPoolExecutor(1, thread_name_prefix="engine")
    in_engine = asyncio.get_running_loop().run_in_executor
    runner = await in_engine(engine, load_runner, config, threads, context.instance)
    await in_engine(engine, runner.warm_up)
    if runner.device.type == "cuda":
        # UCX finds out what it can do, and moves bytes, on the event loop's thread: the device must be current there.
        torch.cuda.set_device(runner.device)
        torch.cuda.synchronize(runner.device)
    loop = WorkerLoop(context, role, runner, open_worker_links(context), policies, engine)
    context.log.info(
        "worker ready",
        role=role.value,
        threads=threads,
        seconds=round(time.monotonic() - started, 2),
        kv_blocks=loop.capacity.num_blocks,
        max_model_len=loop.capacity.max_model_len,
        dtype=runner.dtype,
    )
    try:
        await loop.run()
    finally:
        engine.shutdown(wait=True)


def _cores() -> set[int]:
    import os

    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
