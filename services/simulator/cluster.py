"""A whole cluster under virtual time: the live machines and policies, a cost model for the engine, links for the KV.

    arrivals ─▶ SimGateway ─Submit─▶ ManagerMachine ─StartSegment─▶ WorkerMachine ─plan─▶ CostModel ─▶ completed ─▶ …
                    ▲                     ▲ reports, segment ends        │ KV runs ─▶ Ports
                    └─────── tokens ──────┴──────────────────────────────┘

The same `ManagerMachine`, `WorkerMachine` and the policies of `compose.py` as in the live services; this host only
replaces what performs. Control messages take a fixed time and keep their order. An iteration takes what the cost model
says; the reported figures are as old as live ones are.

With `jump` the host runs iterations that provably repeat each other (`WorkerMachine.repeatable`) as one event, up to
the next message that disturbs that worker. Decisions and times are the same as one by one; a test demands it.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice
from random import Random

import msgspec

from cohort.common.config import Config
from cohort.common.errors import ConfigError
from cohort.common.machines.effects import CancelRuns, Dial, Effect, ManagerEffect, ReceiveRuns, Send, SendRuns, Wake
from cohort.common.machines.events import ManagerEvent, Received, Tick
from cohort.common.machines.manager import ManagerMachine, ManagerSettings
from cohort.common.machines.worker import WorkerMachine, WorkerSettings
from cohort.common.messages import (
    ClusterLoad,
    Displaced,
    GatewayHello,
    KvChunk,
    KvRun,
    ManagerHello,
    Message,
    Outstanding,
    Placed,
    Refused,
    RegisterWorker,
    Submit,
    TokenBatch,
    WorkerReport,
)
from cohort.common.policies import compose
from cohort.common.policies.alignedserve.batch_numbers import batches_of
from cohort.common.policies.cost_model import CostModel, ModelShape
from cohort.common.policies.interface import IterationPlan, LearnsStepTimes, Phase, Placement
from cohort.common.types import KvGeometry, Role, WorkerCapacity
from cohort.common.workloads.closed_loop import ClosedLoopUsers
from cohort.common.workloads.items import WorkItem, Workload
from cohort.services.simulator.events import Events
from cohort.services.simulator.gateway import OUTPUT_TOKEN, PredictorKind, SimGateway
from cohort.services.simulator.hardware import Cluster, LinkShape
from cohort.services.simulator.network import Ports
from cohort.services.simulator.profile import profile_points
from cohort.services.simulator.work import PlanCost, plan_cost

_MANAGER, _GATEWAY = "manager", "gateway"
_MANAGER_TICK_S = 0.05
_GATEWAY_BEAT_S = 1.0
_FORESEEN = 64
"""Iterations foreseen at once, at most: something will come in between, and the rest was for nothing."""


@dataclass(frozen=True, slots=True)
class SimOptions:
    """`max_tokens`: what clients ask for at most; 0 = what the context leaves. `horizon_s`: virtual time after which
    the run ends even if requests are left. `warmup_s`: figures count from then on."""

    seed: int = 0
    predictor: PredictorKind = "oracle"
    predictor_sigma: float = 0.0
    max_tokens: int = 0
    horizon_s: float = float("inf")
    warmup_s: float = 0.0
    jump: bool = True
    profiled: bool = True
    """Schedulers that learn iteration times start from a profile of their instance, as after `cohort profile`."""


@dataclass(slots=True)
class WallTime:
    """Measured wall-clock time of policies: what scheduling costs, not part of virtual time."""

    calls: int = 0
    seconds: float = 0.0
    longest_s: float = 0.0

    def note(self, seconds: float) -> None:
        self.calls += 1
        self.seconds += seconds
        if seconds > self.longest_s:
            self.longest_s = seconds


@dataclass(slots=True)
class WorkerTally:
    """What one instance did since counting began. `before` are the machine's own counters at that moment."""

    steps: int = 0
    busy_s: float = 0.0
    flops: float = 0.0
    rows: int = 0
    useful_tokens: int = 0
    padded_tokens: int = 0
    swapped_bytes: int = 0
    decode_steps: int = 0
    mixed_steps: int = 0
    kv_samples: int = 0
    kv_used_sum: float = 0.0
    kv_used_peak: float = 0.0
    kv_filled_sum: float = 0.0
    prefill_tokens_before: int = 0
    decode_tokens_before: int = 0
    preemptions_before: int = 0
    exposed_before_s: float = 0.0
    transfers_before: int = 0
    failures_before: int = 0


@dataclass(slots=True, eq=False)
class SimWorker:
    """One instance: its machine, the iteration in flight, and what it did so far."""

    name: str
    number: int
    machine: WorkerMachine
    role: Role
    tally: WorkerTally = field(default_factory=WorkerTally)
    epoch: int = 0
    ends_s: list[float] = field(default_factory=list)
    """When the iteration in flight ends, and those that will repeat it."""
    latencies_s: list[float] = field(default_factory=list)
    alone_s: float = 0.0
    """What the iteration in flight takes on a core of its own."""
    service_load: float = 0.0
    """Cores that other processes need for it."""
    slowdown: float = 1.0
    """How much longer it takes at present than alone, on cores that it shares."""
    aligned_batches: int = 0
    """Batches of the late binding among the rows of the iteration in flight."""
    report_sequence: int = 0
    pending_receives: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Tag of a piece → (lease, round) of the receive that was posted for it."""
    flying: dict[int, list[int]] = field(default_factory=dict)
    """Lease → tags of the pieces this worker sends."""

    @property
    def stepping(self) -> bool:
        return bool(self.ends_s)


@dataclass(slots=True, eq=False)
class _Piece:
    """All KV runs of one send: they are announced, posted, cancelled and there together, so the tag of the first names
    them from both ends."""

    tag: int
    runs: int
    sender: SimWorker
    sender_lease: int
    receiver: SimWorker
    arrived: bool = False
    error: str | None = None


class SimCluster:
    def __init__(
        self,
        config: Config,
        cluster: Cluster,
        model: ModelShape,
        workload: Workload,
        options: SimOptions,
        roles: Mapping[Role, int] | None = None,
        placement: Placement | None = None,
    ) -> None:
        """`placement` stands in for the configured one: an oracle, say, that no configuration has."""
        workload.check()
        compose.check_names(config)
        self.config, self.cluster, self.model, self.options = config, cluster, model, options
        self.events = Events()
        self.cost = CostModel(
            model,
            cluster.device,
            cluster.stack,
            tensor_parallel=cluster.tensor_parallel,
            decode_attention=cluster.decode_attention,
        )
        self.geometry = model.kv_geometry(config.kv.block_size)
        num_blocks, host_blocks = kv_blocks(config, cluster, model, self.geometry)
        longest = min(config.model.max_model_len or model.max_positions, num_blocks * config.kv.block_size)
        shared = config.kv.prefix_caching and any(
            item.hash_ids or item.session
            for items in (workload.items, *(part.items for part in workload.closed_loop))
            for item in items
        )
        # Where no prompt shares anything the prefix cache can only miss: hashing every block would change nothing.
        self._worker_config = config if shared else _without_prefix_cache(config)
        self.gateway = SimGateway(
            name=_GATEWAY,
            admission=compose.admission(config),
            max_model_len=longest,
            max_tokens=options.max_tokens,
            predictor=options.predictor,
            predictor_sigma=options.predictor_sigma,
            distinct_prompts=shared,
            seed=options.seed,
        )
        self._late_binding = config.policies.waiting_kv != "none"
        self.wall = {"worker": WallTime(), "manager": WallTime()}
        self.ports = Ports(cluster.instances)
        self.manager = ManagerMachine(
            _MANAGER,
            1,
            ManagerSettings(
                config.manager.report_timeout_s,
                config.manager.settle_s,
                config.manager.load_interval_s,
                config.manager.max_waiting_requests,
            ),
            compose.prefill_order(config),
            placement or compose.placement(config),
            compose.late_binding(config),
            -config.manager.settle_s,
        )
        self._manager_wake_s = 0.0
        self.workers = self._make_workers(num_blocks, host_blocks, longest, roles)
        self._by_name = {worker.name: worker for worker in self.workers}
        # On shared cores the others decide how long the next iteration takes: none is foreseen.
        self._jump = options.jump and not cluster.cores
        self._pieces: dict[int, _Piece] = {}
        self._arrivals = iter(workload.items)
        self._arrivals_left = True
        self._users = [(part, ClosedLoopUsers(part)) for part in workload.closed_loop]
        self._parts_to_start = len(self._users)

    # -- set-up ------------------------------------------------------------------------------------------------

    def _make_workers(
        self, num_blocks: int, host_blocks: int, longest: int, roles: Mapping[Role, int] | None
    ) -> list[SimWorker]:
        config, geometry, random = self.config, self.geometry, Random(self.options.seed)
        workers: list[SimWorker] = []
        for role, count in (roles or spread_roles(config, self.cluster.instances)).items():
            for index in range(count):
                name = f"{role.value}-{index}"
                capacity = WorkerCapacity(
                    role,
                    self.model.name,
                    longest,
                    geometry.num_layers,
                    geometry.num_kv_heads,
                    geometry.head_dim,
                    geometry.dtype_bytes,
                    geometry.block_size,
                    num_blocks,
                    host_blocks,
                    config.engine.max_rows,
                    config.engine.max_step_tokens,
                )
                machine = WorkerMachine(
                    name,
                    _MANAGER,
                    capacity,
                    WorkerSettings(
                        links=("link",),
                        offer_timeout_s=config.transfer.offer_timeout_s,
                        accept_timeout_s=2 * config.transfer.run_timeout_s + config.transfer.lease_s,
                        lease_s=config.transfer.lease_s,
                        default_prediction=float(config.gateway.default_prediction_tokens),
                        stall_timeout_s=config.transfer.stall_timeout_s,
                        chunked_transfer=config.transfer.chunked,
                    ),
                    compose.iteration(self._worker_config),
                    compose.allocation(self._worker_config, geometry, num_blocks, host_blocks),
                    Random(random.getrandbits(32)),
                    lambda: {"link": b""},
                )
                if isinstance(machine.scheduler, LearnsStepTimes) and self.options.profiled:
                    machine.scheduler.import_state(self._profile(longest))
                workers.append(SimWorker(name, len(workers), machine, role))
        if len(workers) != self.cluster.instances:
            raise ConfigError(f"roles name {len(workers)} instances, the cluster has {self.cluster.instances}")
        return workers

    def _profile(self, longest: int) -> bytes:
        """What `cohort profile` would measure on such an instance."""
        engine = self.config.engine
        return profile_points(self.cost, longest, engine.max_rows, engine.max_step_tokens)

    def run(self) -> None:
        """From the first arrival until everything has ended (or the horizon)."""
        self._to_manager(_GATEWAY, GatewayHello(_GATEWAY, 1, ""))
        interval_s = self.config.engine.report_interval_s
        for worker in self.workers:
            machine = worker.machine
            self._to_manager(worker.name, RegisterWorker(worker.name, 1, "", machine.capacity, [], []))
            # Reports of many workers never come in step.
            self.events.at(interval_s * (worker.number + 1) / len(self.workers), self._report, worker)
        self.events.at(0.0, self._manager_tick)
        self.events.at(0.0, self._gateway_beat)
        self._next_arrival()
        if self.options.warmup_s:
            self.events.at(self.options.warmup_s, self._begin_counting)
        for number, (part, _) in enumerate(self._users):
            self.events.at(part.start_s, self._start_users, number)
        self.events.run(self.options.horizon_s, self._done)
        if not self._done():
            for worker in self.workers:
                self._catch_up(worker, self.options.horizon_s)

    def _begin_counting(self) -> None:
        """The cluster is warm: what came before is no figure."""
        self.gateway.begin_counting(self.events.now_s)
        for worker in self.workers:
            self._catch_up(worker, self.events.now_s)
            counters, kv = worker.machine.counters, worker.machine.kv.figures()
            worker.tally = WorkerTally(
                prefill_tokens_before=counters.prefill_tokens,
                decode_tokens_before=counters.decode_tokens,
                preemptions_before=counters.preemptions,
                exposed_before_s=counters.exposed_transfer_s,
                transfers_before=counters.transfers_in,
                failures_before=int(kv.get("allocation_failures_total", 0)),
            )

    def _done(self) -> bool:
        return not self._arrivals_left and not self._parts_to_start and not self.gateway.live

    # -- arrivals ----------------------------------------------------------------------------------------------

    def _next_arrival(self) -> None:
        item = next(self._arrivals, None)
        if item is None:
            self._arrivals_left = False
        else:
            self.events.at(item.arrival_s, self._arrive_and_next, item)

    def _arrive_and_next(self, item: WorkItem) -> None:
        self._next_arrival()
        self._arrive(item, None)

    def _arrive(self, item: WorkItem, users: ClosedLoopUsers | None) -> None:
        answered = None if users is None else (lambda now_s: self._answered(users))
        request = self.gateway.arrive(self.events.now_s, item, answered)
        if request is not None:
            self._post_manager(_GATEWAY, Submit(request))

    def _start_users(self, number: int) -> None:
        self._parts_to_start -= 1
        users = self._users[number][1]
        for item in users.start(self.events.now_s):
            self._arrive(item, users)

    def _answered(self, users: ClosedLoopUsers) -> None:
        # As an event of its own: an answer ends in the middle of a worker's effects.
        self.events.at(self.events.now_s + self.cluster.control_latency_s, self._ask_again, users)

    def _ask_again(self, users: ClosedLoopUsers) -> None:
        for item in users.answered(self.events.now_s):
            self._arrive(item, users)

    def _gateway_beat(self) -> None:
        """Alive, and that is all: nothing is ever lost here that would have to be reconciled."""
        self._post_manager(_GATEWAY, Outstanding([]))
        if not self._done():
            self.events.at(self.events.now_s + _GATEWAY_BEAT_S, self._gateway_beat)

    # -- the manager -------------------------------------------------------------------------------------------

    def _post_manager(self, sender: str, message: Message) -> None:
        self.events.at(self.events.now_s + self.cluster.control_latency_s, self._to_manager, sender, message)

    def _to_manager(self, sender: str, message: Message) -> None:
        self._tell_manager(Received(sender, message))

    def _manager_tick(self) -> None:
        now_s = self.events.now_s
        self._tell_manager(Tick())
        wait_s = max(0.001, self._manager_wake_s - now_s)
        if self.manager.waiting:  # with an empty queue, a tick only keeps deadlines of seconds
            wait_s = min(_MANAGER_TICK_S, wait_s)
        if not self._done():
            self.events.at(now_s + wait_s, self._manager_tick)

    def _tell_manager(self, event: ManagerEvent) -> None:
        started = time.perf_counter()
        effects = self.manager.handle(self.events.now_s, event)
        self.wall["manager"].note(time.perf_counter() - started)
        for effect in effects:
            self._perform_manager(effect)

    def _perform_manager(self, effect: ManagerEffect) -> None:
        now_s = self.events.now_s
        if isinstance(effect, Wake):
            self._manager_wake_s = effect.at_s
        else:
            match effect.message:
                case ClusterLoad():
                    self.gateway.load = effect.message
                case Placed() | ManagerHello():
                    pass
                case Displaced() | Refused():
                    self.events.at(now_s + self.cluster.control_latency_s, self._to_gateway, effect.message)
                case _:
                    worker = self._by_name.get(effect.peer)
                    if worker is not None:
                        self._post_worker(_MANAGER, worker, effect.message)

    def _to_gateway(self, message: Displaced | Refused) -> None:
        if isinstance(message, Refused):
            self.gateway.refused(self.events.now_s, message)
            return
        for request in self.gateway.again(self.events.now_s, message):
            self._post_manager(_GATEWAY, Submit(request))

    # -- workers: messages and reports -------------------------------------------------------------------------

    def _post_worker(self, sender: str, worker: SimWorker, message: Message) -> None:
        self.events.at(self.events.now_s + self.cluster.control_latency_s, self._to_worker, sender, worker, message)

    def _to_worker(self, sender: str, worker: SimWorker, message: Message) -> None:
        if not worker.machine.undisturbed_by(message):
            self._interrupt(worker)
        if not worker.machine.on_message(self.events.now_s, sender, message):
            return
        self._perform(worker, worker.machine.take_effects())
        self._start_step(worker)

    def _report(self, worker: SimWorker) -> None:
        """Deadlines and the report, every report interval, as long as anything goes on."""
        machine, now_s = worker.machine, self.events.now_s
        self._catch_up(worker, now_s)
        machine.tick(now_s)
        figures = machine.figures(0)
        used = 1.0 - (figures.free_blocks + figures.cached_blocks) / max(1, figures.total_blocks)
        tally = worker.tally
        tally.kv_samples += 1
        tally.kv_used_sum += used
        tally.kv_used_peak = max(tally.kv_used_peak, used)
        written = sum(s.computed for s in machine.sequences() if s.phase is not Phase.SWAPPED)
        tally.kv_filled_sum += written / max(1, figures.total_blocks * self.geometry.block_size)
        worker.report_sequence += 1
        self._post_manager(
            worker.name, WorkerReport(worker.name, 1, worker.report_sequence, figures, machine.held, machine.awaiting)
        )
        effects = machine.take_effects()
        if effects:  # a tick without any has changed nothing
            self._interrupt(worker)
            self._perform(worker, effects)
        if not self._done():
            self.events.at(now_s + self.config.engine.report_interval_s, self._report, worker)
        self._start_step(worker)

    def _perform(self, worker: SimWorker, effects: list[Effect]) -> None:
        latency_s = self.cluster.control_latency_s
        for effect in effects:
            match effect:
                case Send(peer="gateway", message=TokenBatch(updates=updates)):
                    # Tokens travel as long as anything else; nothing reacts to them, so no event is needed.
                    self.gateway.tokens(self.events.now_s + latency_s, updates)
                case Send(peer="manager", message=message):
                    self._post_manager(worker.name, message)
                case Send(peer=peer, message=message):
                    self._post_worker(worker.name, self._by_name[peer], message)
                case SendRuns():
                    self._send_runs(worker, effect)
                case ReceiveRuns():
                    tag = effect.runs[0].tag
                    worker.pending_receives[tag] = (effect.lease_id, effect.round)
                    piece = self._pieces.get(tag)
                    if piece is not None and piece.arrived:  # not now: these effects are still being performed
                        self.events.at(self.events.now_s, self._arrived, [tag])
                case CancelRuns(lease_id=lease_id):
                    self._cancel_runs(worker, lease_id)
                case Dial():
                    pass

    # -- KV transfers ------------------------------------------------------------------------------------------

    def _send_runs(self, worker: SimWorker, effect: SendRuns) -> None:
        now_s = self.events.now_s
        receiver = self._by_name[effect.peer]
        self._post_worker(
            worker.name,
            receiver,
            KvChunk(
                effect.attempt,
                effect.lease_id,
                effect.round,
                effect.link,
                [KvRun(run.tag, run.target, run.num_blocks, 0) for run in effect.runs],
            ),
        )
        link = self.cluster.link(worker.number, receiver.number)
        if effect.from_host:  # no faster than the host's own path to its devices
            host_rate = self.cluster.device.host_bytes_per_s * self.cluster.tensor_parallel
            link = LinkShape(min(link.bytes_per_s, host_rate), link.latency_s, link.run_s)
        size = sum(run.num_blocks for run in effect.runs) * self.geometry.block_bytes
        arrival_s = self.ports.transfer(now_s, worker.number, receiver.number, link, size, len(effect.runs))
        tag = effect.runs[0].tag
        self._pieces[tag] = _Piece(tag, len(effect.runs), worker, effect.lease_id, receiver)
        worker.flying.setdefault(effect.lease_id, []).append(tag)
        self.events.at(max(arrival_s, now_s + self.cluster.control_latency_s), self._arrived, [tag])

    def _arrived(self, tags: list[int]) -> None:
        touched: dict[str, SimWorker] = {}
        for tag in tags:
            piece = self._pieces.get(tag)
            if piece is not None:
                piece.arrived = True
                for worker in self._settle(piece):
                    touched[worker.name] = worker
        for worker in touched.values():
            self._after_runs(worker)

    def _settle(self, piece: _Piece) -> tuple[SimWorker, ...]:
        """Both ends are told once the bytes are there and the receive was posted; who was told."""
        sender, receiver = piece.sender, piece.receiver
        posted = receiver.pending_receives.pop(piece.tag, None)
        if posted is None and piece.error is None:
            return ()
        del self._pieces[piece.tag]
        self._interrupt(sender)
        sender.flying[piece.sender_lease].remove(piece.tag)
        if not sender.flying[piece.sender_lease]:
            del sender.flying[piece.sender_lease]
        sender.machine.run_sent(self.events.now_s, piece.sender_lease, piece.error, piece.runs)
        if posted is None:
            return (sender,)
        if piece.error is not None or not receiver.machine.undisturbed_by_runs(posted[0], piece.runs):
            self._interrupt(receiver)
        receiver.machine.run_received(self.events.now_s, *posted, piece.error, piece.runs)
        return (sender, receiver)

    def _after_runs(self, worker: SimWorker) -> None:
        self._perform(worker, worker.machine.take_effects())
        self._start_step(worker)

    def _cancel_runs(self, worker: SimWorker, lease_id: int) -> None:
        """Every piece of the lease ends with an error, at either end."""
        tags = list(worker.flying.get(lease_id, ()))
        tags += [tag for tag, (lease, _) in worker.pending_receives.items() if lease == lease_id]
        for tag in tags:
            piece = self._pieces.get(tag)
            if piece is not None:
                piece.error = "cancelled"
        self.events.at(self.events.now_s, self._arrived, tags)

    # -- iterations --------------------------------------------------------------------------------------------

    def _start_step(self, worker: SimWorker) -> None:
        if worker.stepping:
            return
        now_s, machine = self.events.now_s, worker.machine
        started = time.perf_counter()
        plan = machine.plan(now_s)
        self.wall["worker"].note(time.perf_counter() - started)
        effects = machine.take_effects()
        if plan is None:
            self._perform(worker, effects)
            return
        cost = plan_cost(plan, self.geometry)
        beside_s = self.cost.swap_s(cost.beside_bytes)
        latency_s = self.cost.swap_s(cost.copied_bytes) + max(self.cost.step_s(cost.work), beside_s)
        worker.ends_s, worker.latencies_s = [now_s + latency_s], [latency_s]
        if self._late_binding:
            worker.aligned_batches = batches_of(plan.rows)
        self._note_step(worker, cost)
        self._perform(worker, effects)
        if self._jump and machine.repeatable():
            self._foresee(worker, plan, cost)
        worker.epoch += 1
        self.events.at(worker.ends_s[-1], self._step_ended, worker, worker.epoch, rank=worker.number + 1)
        if self.cluster.cores:
            worker.slowdown, worker.alone_s = 1.0, latency_s
            worker.service_load = self.cluster.service_load(len(plan.rows), latency_s)
            self._share_cores()

    def _share_cores(self) -> None:
        """Somebody has begun or ended: from now on everybody who runs has another share of the cores. What is in flight
        ends earlier or later."""
        cluster, now_s = self.cluster, self.events.now_s
        running = [worker for worker in self.workers if worker.stepping]
        slowdowns = cluster.slowdowns([(worker.alone_s, worker.service_load) for worker in running])
        for worker, slowdown in zip(running, slowdowns, strict=True):
            if worker.slowdown != slowdown:
                later_s = (worker.ends_s[0] - now_s) * (slowdown / worker.slowdown - 1.0)
                worker.slowdown = slowdown
                worker.ends_s[0] += later_s
                worker.latencies_s[0] += later_s
                worker.tally.busy_s += later_s
                worker.epoch += 1
                self.events.at(worker.ends_s[0], self._step_ended, worker, worker.epoch, rank=worker.number + 1)

    def _foresee(self, worker: SimWorker, plan: IterationPlan, cost: PlanCost) -> None:
        """Append the iterations that repeat this one."""
        # Somebody's last token is a step of its own.
        wanted = min(self.gateway.fewest_left(plan.rows) - 1, _FORESEEN)
        if wanted < 1:
            return
        ends_s, latencies_s = worker.ends_s, worker.latencies_s
        durations = self.cost.repeated_s(cost.work)
        next(durations)
        end_s = ends_s[0]
        for latency_s in islice(durations, worker.machine.fitting_repetitions(wanted)):
            end_s += latency_s
            ends_s.append(end_s)
            latencies_s.append(latency_s)

    def _note_step(self, worker: SimWorker, cost: PlanCost) -> None:
        tally = worker.tally
        tally.steps += 1
        tally.busy_s += worker.latencies_s[0]
        tally.flops += self.cost.flops(cost.work)
        tally.rows += cost.work.rows
        tally.useful_tokens += cost.useful_tokens
        tally.padded_tokens += cost.padded_tokens
        tally.swapped_bytes += cost.copied_bytes + cost.beside_bytes
        tally.decode_steps += worker.aligned_batches > 0
        tally.mixed_steps += worker.aligned_batches > 1

    def _repeat(self, worker: SimWorker, count: int) -> None:
        """The first `count` iterations foreseen have ended; the one after them is in flight."""
        machine, ends_s, latencies_s = worker.machine, worker.ends_s, worker.latencies_s
        plan = machine.plan_in_flight
        rows = plan.rows
        done_s = ends_s[:count]
        machine.repeat(done_s, latencies_s[:count], OUTPUT_TOKEN)
        delay_s = self.cluster.control_latency_s
        self.gateway.repeated(rows, [end_s + delay_s for end_s in done_s])
        number = len(rows)
        first_context = sum(row.start + 1 for row in rows)
        tally = worker.tally
        tally.steps += count
        tally.decode_steps += count * (worker.aligned_batches > 0)
        tally.mixed_steps += count * (worker.aligned_batches > 1)
        tally.busy_s += sum(latencies_s[1 : count + 1])
        tally.rows += number * count
        tally.useful_tokens += number * count
        # Each further iteration attends to one more position a row.
        positions = count * first_context + number * count * (count + 1) // 2
        tally.flops += count * number * self._row_flops + positions * self._position_flops
        del ends_s[:count]
        del latencies_s[:count]

    @property
    def _row_flops(self) -> float:
        model = self.model
        return 2.0 * (model.layers * model.layer_parameters + model.head_parameters)

    @property
    def _position_flops(self) -> float:
        return 4.0 * self.model.layers * self.model.heads * self.model.head_dim

    def _catch_up(self, worker: SimWorker, until_s: float) -> None:
        """Apply the foreseen iterations that end before then: what ends at that very moment comes after."""
        if len(worker.ends_s) > 1:
            ended = min(bisect_left(worker.ends_s, until_s), len(worker.ends_s) - 1)
            if ended:
                self._repeat(worker, ended)

    def _interrupt(self, worker: SimWorker) -> None:
        """Something happens to this worker: what has ended is applied, what was foreseen beyond is void."""
        if len(worker.ends_s) <= 1:
            return
        self._catch_up(worker, self.events.now_s)
        if len(worker.ends_s) > 1:
            del worker.ends_s[1:]
            del worker.latencies_s[1:]
            worker.epoch += 1
            self.events.at(worker.ends_s[0], self._step_ended, worker, worker.epoch, rank=worker.number + 1)

    def _step_ended(self, worker: SimWorker, epoch: int) -> None:
        if epoch != worker.epoch:
            return
        if len(worker.ends_s) > 1:
            self._repeat(worker, len(worker.ends_s) - 1)
        machine, latency_s = worker.machine, worker.latencies_s[0]
        sampled = self.gateway.draw(machine.plan_in_flight.rows)
        worker.ends_s, worker.latencies_s = [], []
        if self.cluster.cores:
            self._share_cores()
        machine.completed(self.events.now_s, sampled, latency_s)
        self._perform(worker, machine.take_effects())
        self._start_step(worker)


def spread_roles(config: Config, instances: int) -> dict[Role, int]:
    """The preset's workers, scaled to this many instances: every role at least one, shares as even as can be."""
    counts: dict[Role, int] = {}
    for group in config.workers:
        counts[group.role] = counts.get(group.role, 0) + group.count
    if len(counts) > instances:
        raise ConfigError(
            f"preset {config.name} needs {len(counts)} roles ({', '.join(role.value for role in counts)}); the cluster "
            f"has {instances} instance(s)"
        )
    total = sum(counts.values())
    spread = {role: max(1, instances * count // total) for role, count in counts.items()}

    # What rounding left over goes to whoever is furthest below its share.
    def above(role: Role) -> float:
        return spread[role] - instances * counts[role] / total

    while sum(spread.values()) < instances:
        spread[min(counts, key=above)] += 1
    while sum(spread.values()) > instances:
        spread[max((role for role in spread if spread[role] > 1), key=above)] -= 1
    return spread


def kv_blocks(config: Config, cluster: Cluster, model: ModelShape, geometry: KvGeometry) -> tuple[int, int]:
    """Blocks of one instance on its devices and in host memory, by the rules of the live worker.

    Raises `ConfigError` when the model does not fit.
    """
    devices = cluster.tensor_parallel
    total = devices * (cluster.device.memory_bytes - cluster.device_reserve_bytes)
    left = total - model.weights_total_bytes
    if left <= 0:
        raise ConfigError(
            f"cluster {cluster.name}: tensor_parallel: {model.name} has {model.weights_total_bytes / 1e9:.1f} GB of "
            f"weights, {devices} x {cluster.device.name} hold {total / 1e9:.1f} GB"
        )
    memory = config.kv.memory_bytes or (
        config.kv.cpu_memory_bytes if cluster.cpu else int(config.kv.memory_fraction * left)
    )
    blocks = memory // geometry.block_bytes
    if blocks < 2 or memory > left:
        raise ConfigError(
            f"cluster {cluster.name}: {memory / 1e9:.2f} GB for the KV cache of {model.name} ({left / 1e9:.2f} GB are "
            f"left beside the weights, a block is {geometry.block_bytes / 1e6:.2f} MB): change kv.memory_bytes or "
            "tensor_parallel"
        )
    host = cluster.host_memory_bytes or config.kv.host_memory_bytes
    return blocks, host // geometry.block_bytes


def _without_prefix_cache(config: Config) -> Config:
    return msgspec.structs.replace(config, kv=msgspec.structs.replace(config.kv, prefix_caching=False))
