"""A whole cluster of machines under virtual time, with a memory model that notices every wrong byte of KV.

Each worker's cache is a list of slots. Computing position p writes a digest of tokens[:p+1] into its slot and first
checks that all earlier slots of the row hold exactly the digests they should: stale, foreign, lost or half-transferred
KV fails at once. The next token is a digest too, so a request's output is known beforehand whatever happens on the way.

Messages take random time, in order per pair; runs of blocks read their source when they *end* and write then, so
blocks that were freed or reused too early show. Workers, the manager and links can be broken at any moment.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from cohort.common.codec import decode, encode
from cohort.common.machines.effects import CancelRuns, Dial, Effect, ReceiveRuns, Run, Send, SendRuns, Wake
from cohort.common.machines.events import ManagerEvent, Received, Tick
from cohort.common.machines.manager import ManagerMachine, ManagerSettings
from cohort.common.machines.worker import Sampled, WorkerMachine, WorkerSettings
from cohort.common.messages import (
    Cancel,
    ClusterLoad,
    Displaced,
    GatewayHello,
    KvChunk,
    KvRun,
    Leaving,
    ManagerHello,
    Message,
    Outstanding,
    Placed,
    Refused,
    Registered,
    RegisterWorker,
    Submit,
    TokenBatch,
    WorkerReport,
)
from cohort.common.policies import interface
from cohort.common.policies.baselines.continuous_batching import ContinuousBatching
from cohort.common.policies.baselines.first_come import FirstCome
from cohort.common.policies.baselines.paged_allocation import PagedAllocator
from cohort.common.policies.baselines.placements import fits
from cohort.common.policies.interface import (
    ClusterView,
    Impossible,
    IterationPlan,
    IterationScheduler,
    KvAllocator,
    KvCopy,
    LateBinding,
    Placement,
    PrefillOrder,
    Wait,
    WaitingRequest,
)
from cohort.common.policies.padding import row_padding
from cohort.common.types import (
    Attempt,
    FinishReason,
    KvGeometry,
    Prediction,
    Request,
    Role,
    SamplingParams,
    Segment,
    TrafficClass,
    WorkerCapacity,
)

BLOCK = 4
VOCABULARY = 50
STOP_TOKEN = 7
RUN_TIMEOUT_S = 1.0


def digest(tokens: list[int]) -> int:
    value = 17
    for token in tokens:
        value = (value * 1_000_003 ^ token) & 0xFFFF_FFFF_FFFF
    return value


def next_token(tokens: list[int]) -> int:
    return digest([*tokens, 99]) % VOCABULARY


def expected_output(prompt: list[int], max_tokens: int) -> list[int]:
    tokens = list(prompt)
    while len(tokens) - len(prompt) < max_tokens:
        tokens.append(next_token(tokens))
        if tokens[-1] == STOP_TOKEN:
            break
    return tokens[len(prompt) :]


class SplitAnywhere:
    """Segments that meet at any position, in the prompt or in the output, on any two workers."""

    def __init__(self, seed: int = 0) -> None:
        self._random = Random(seed)

    def place(
        self, now_s: float, waiting: WaitingRequest, cluster: ClusterView, wish: str | None
    ) -> interface.Placed | Wait | Impossible:
        request = waiting.request
        names = sorted(cluster.instances)
        views = [view for view in cluster.instances.values() if fits(view, request)]
        if not names or len(views) < len(names):
            return Impossible("too big") if names else Wait("nobody is there")
        first, second = self._random.choice(names), self._random.choice(names)
        split = self._random.randint(1, len(request.tokens) + request.sampling.max_tokens)
        if first == second:
            return interface.Placed((Segment(0, None, first),), "one")
        return interface.Placed((Segment(0, split, first), Segment(split, None, second)), "two")

    def finished(self, now_s: float, request_id: str) -> None:
        pass


@dataclass
class Owned:
    """A request as its gateway owns it."""

    prompt: list[int]
    max_tokens: int
    tokens: list[int]
    attempt: int = 1
    finish: FinishReason | None = None
    refused: bool = False
    cancelled: bool = False
    traffic_class: TrafficClass = "rt"
    predicted: float = 0.0
    """0 = the workers' default."""
    finishes: int = 0
    opened_s: float = 0.0
    times_s: list[float] = field(default_factory=list)
    """Of every arrival of tokens."""
    placed: bool = False
    """A worker is known for the current attempt."""

    def next_token_s(self, from_s: float) -> float:
        """When its first token from then on came."""
        return next((at_s for at_s in self.times_s if at_s >= from_s), float("inf"))


@dataclass
class Transfer:
    """One run in flight, known by its tag from both ends."""

    tag: int
    sender: WorkerNode | None = None
    sender_lease: int = 0
    source: Run | None = None
    receiver: WorkerNode | None = None
    receiver_lease: int = 0
    round: int = 0
    target: Run | None = None
    from_host: bool = False
    doomed: bool = False


@dataclass
class WorkerNode:
    name: str
    machine: WorkerMachine
    incarnation: int
    slots: list[int]
    host: list[int]
    alive: bool = True
    registered: bool = False
    stepping: bool = False
    sequence: int = 0
    runs: dict[int, list[Transfer]] = field(default_factory=dict)


def _move(node: WorkerNode, copy: KvCopy) -> None:
    size = BLOCK if copy.unit == "block" else 1
    for device, host in zip(copy.device, copy.host, strict=True):
        d, h = slice(device * size, device * size + size), slice(host * size, host * size + size)
        if copy.direction == "out":
            node.host[h] = node.slots[d]
        else:
            node.slots[d] = node.host[h]


class World:
    def __init__(
        self,
        seed: int,
        roles: dict[str, Role],
        placement: Callable[[], Placement],
        *,
        blocks: int = 64,
        host_blocks: int = 16,
        preemption: str = "recompute",
        chunk: int = 8,
        caching: bool = True,
        run_failure_rate: float = 0.0,
        message_delay_s: float = 0.01,
        late_binding: Callable[[], LateBinding | None] = lambda: None,
        order: Callable[[], PrefillOrder] = lambda: FirstCome(dispatch_ahead_tokens=64),
        scheduler: Callable[[], IterationScheduler] | None = None,
        allocator: Callable[[KvGeometry, int, int], KvAllocator] | None = None,
    ) -> None:
        self.random = Random(seed)
        self.now_s = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._pair_time: dict[tuple[str, str], float] = {}
        self._placement = placement
        self._order = order
        self._late_binding = late_binding
        self._scheduler = scheduler or (
            lambda: ContinuousBatching(max_rows=8, max_step_tokens=32, prefill_chunk=chunk, preemption=preemption)  # type: ignore[arg-type]
        )
        self._allocator = allocator or (
            lambda geometry, device, host: PagedAllocator(geometry, device, host, prefix_caching=caching)
        )
        self._blocks = (blocks, host_blocks)
        self._run_failure_rate = run_failure_rate
        self._message_delay_s = message_delay_s
        self.roles = roles
        self.owned: dict[str, Owned] = {}
        self.workers: dict[str, WorkerNode] = {}
        self.transfers: dict[int, Transfer] = {}
        self.generation: dict[str, int] = {"gateway": 0, "manager": 0}
        self._incarnations = 0
        self.known_manager = 0
        self.known_workers: list[str] = []
        self.displaced = 0
        self.start_manager()
        for name in roles:
            self.start_worker(name)
        self.every(0.5, self._gateway_beat)

    # -- time --------------------------------------------------------------------------------------------------

    def at(self, delay_s: float, action: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._events, (self.now_s + delay_s, self._count, action))

    def every(self, interval_s: float, action: Callable[[], None]) -> None:
        def again() -> None:
            action()
            self.at(interval_s, again)

        self.at(0.0, again)

    def run(self, until_s: float, done: Callable[[], bool] = lambda: False) -> None:
        while self._events and self._events[0][0] <= until_s and not done():
            self.now_s, _, action = heapq.heappop(self._events)
            action()

    def run_until_quiet(self, limit_s: float = 400.0) -> None:
        """Until every request ended and every worker is empty; then check that nothing is left anywhere."""
        limit_s += self.now_s
        self.run(limit_s, lambda: all(o.finish or o.refused or o.cancelled for o in self.owned.values()))
        unfinished = {name: o for name, o in self.owned.items() if not (o.finish or o.refused or o.cancelled)}
        assert not unfinished, f"{len(unfinished)} requests never ended: {sorted(unfinished)[:5]}"
        self.run(self.now_s + 20.0)
        for node in self.workers.values():
            if node.alive:
                node.machine.check()
                assert node.machine.kv.owners() == {}, f"{node.name} still holds {node.machine.kv.owners()}"
                assert len(node.machine.leases) == 0
                assert node.machine.idle
        assert self.manager.live == 0
        assert self.manager.waiting == 0

    def check_outputs(self) -> None:
        for name, owned in self.owned.items():
            output = owned.tokens[len(owned.prompt) :]
            expected = expected_output(owned.prompt, owned.max_tokens)
            if owned.finish is not None:
                assert output == expected, name
                assert owned.finishes == 1
                assert owned.finish is (FinishReason.STOP if expected[-1] == STOP_TOKEN else FinishReason.LENGTH)
            else:
                assert output == expected[: len(output)], name

    # -- nodes -------------------------------------------------------------------------------------------------

    def _incarnation(self) -> int:
        self._incarnations += 1
        return self._incarnations

    def start_manager(self) -> None:
        self.generation["manager"] += 1
        incarnation = self._incarnation()
        self.manager_incarnation = incarnation
        self.manager = ManagerMachine(
            "manager",
            incarnation,
            ManagerSettings(3.0, 1.5, 0.5, 10_000),
            self._order(),
            self._placement(),
            self._late_binding(),
            self.now_s,
        )
        self.manager_alive = True

        def tick() -> None:
            if self.manager_alive and self.manager_incarnation == incarnation:
                self._tell_manager(Tick())
                self.at(0.05, tick)

        self.at(0.05, tick)

    def kill_manager(self, back_after_s: float) -> None:
        self.manager_alive = False
        self.generation["manager"] += 1
        self.at(back_after_s, self.start_manager)

    def start_worker(self, name: str) -> None:
        blocks, host_blocks = self._blocks
        self.generation[name] = self.generation.get(name, 0) + 1
        geometry = KvGeometry(1, 1, 1, 1, BLOCK)
        capacity = WorkerCapacity(self.roles[name], "m", 10_000, 1, 1, 1, 1, BLOCK, blocks, host_blocks, 8, 32)
        machine = WorkerMachine(
            name,
            "manager",
            capacity,
            WorkerSettings(("ucx", "zmq"), 5.0, 5.0, 2.0, 8.0, 2.0),
            self._scheduler(),
            self._allocator(geometry, blocks, host_blocks),
            Random(self.random.getrandbits(32)),
            lambda: {"ucx": name.encode(), "zmq": name.encode()},
        )
        node = WorkerNode(
            name,
            machine,
            self._incarnation(),
            [self.random.getrandbits(40) for _ in range(blocks * BLOCK)],
            [0] * (host_blocks * BLOCK),
        )
        self.workers[name] = node

        def tick() -> None:
            if node.alive:
                node.machine.tick(self.now_s)
                self._perform(name, node.machine.take_effects())
                self.at(0.1, tick)

        def report() -> None:
            if node.alive:
                if not node.registered:
                    self.post(
                        name,
                        "manager",
                        RegisterWorker(name, node.incarnation, name, capacity, machine.held, machine.awaiting),
                    )
                else:
                    node.sequence += 1
                    figures = machine.figures(0)
                    self.post(
                        name,
                        "manager",
                        WorkerReport(name, node.incarnation, node.sequence, figures, machine.held, machine.awaiting),
                    )
                self.at(0.2, report)

        self.at(0.0, tick)
        self.at(0.0, report)

    def inflict(self, kind: str, back_s: float, *, leaving: str = "decode-1", cancelled: int = 5) -> None:
        """One fault: "manager" (killed, back after `back_s`), "leave" (the worker `leaving` drains), "cancel" (of the
        first `cancelled` requests), or the name of a worker to kill."""
        match kind:
            case "manager":
                if self.manager_alive:
                    self.kill_manager(back_s)
            case "leave":
                self.leave_worker(leaving)
            case "cancel":
                for name in [f"r{index}" for index in range(cancelled)]:
                    if name in self.owned:
                        self.cancel(name)
            case worker:
                self.kill_worker(worker, back_s)

    def kill_worker(self, name: str, back_after_s: float | None) -> None:
        node = self.workers[name]
        if not node.alive:
            return
        node.alive = False
        self.generation[name] += 1
        for transfers in node.runs.values():
            for transfer in transfers:
                self._break(transfer, node)
        if back_after_s is not None:
            self.at(back_after_s, lambda: self.start_worker(name))

    def leave_worker(self, name: str) -> None:
        node = self.workers[name]
        self.post(name, "manager", Leaving(name, node.incarnation))
        self.at(0.05, lambda: self.kill_worker(name, 1.0))

    # -- messages ----------------------------------------------------------------------------------------------

    def post(self, source: str, target: str, message: Message) -> None:
        """Random delay, order kept per pair; lost when either end was replaced meanwhile."""
        data = encode(message)
        generations = (self.generation.get(source), self.generation.get(target))
        arrival = max(
            self._pair_time.get((source, target), 0.0), self.now_s + self.random.random() * self._message_delay_s
        )
        self._pair_time[(source, target)] = arrival

        def deliver() -> None:
            if generations == (self.generation.get(source), self.generation.get(target)):
                self._deliver(source, target, decode(data))

        self.at(arrival - self.now_s, deliver)

    def _deliver(self, source: str, target: str, message: Message) -> None:
        if target == "gateway":
            self._to_gateway(message)
        elif target == "manager":
            if self.manager_alive:
                self._tell_manager(Received(source, message))
        else:
            node = self.workers[target]
            if not node.alive:
                return
            if isinstance(message, Registered):
                node.registered = True
            elif isinstance(message, ManagerHello):
                node.registered = False
            else:
                assert node.machine.on_message(self.now_s, source, message)
                self._perform(target, node.machine.take_effects())
                self._step(node)

    def _tell_manager(self, event: ManagerEvent) -> None:
        effects = self.manager.handle(self.now_s, event)
        self.manager.check()
        for effect in effects:
            match effect:
                case Send(peer=peer, message=message):
                    self.post("manager", peer, message)
                case Wake():
                    pass  # it is told the time every 0.05 s

    def _perform(self, name: str, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Send(peer=peer, message=message):
                    self.post(name, peer, message)
                case Dial():
                    pass
                case SendRuns():
                    self._send_runs(self.workers[name], effect)
                case ReceiveRuns():
                    self._receive_runs(self.workers[name], effect)
                case CancelRuns(lease_id=lease_id):
                    for transfer in list(self.workers[name].runs.get(lease_id, ())):
                        self._break(transfer, None)
        if name in self.workers:
            self._step(self.workers[name])

    # -- runs --------------------------------------------------------------------------------------------------

    def _send_runs(self, node: WorkerNode, effect: SendRuns) -> None:
        for run in effect.runs:
            transfer = self.transfers.setdefault(run.tag, Transfer(run.tag))
            transfer.sender, transfer.sender_lease, transfer.source = node, effect.lease_id, run
            transfer.from_host = effect.from_host
            node.runs.setdefault(effect.lease_id, []).append(transfer)
            self._started(transfer)
        runs = [KvRun(run.tag, run.target, run.num_blocks, 0) for run in effect.runs]
        self.post(node.name, effect.peer, KvChunk(effect.attempt, effect.lease_id, effect.round, effect.link, runs))

    def _receive_runs(self, node: WorkerNode, effect: ReceiveRuns) -> None:
        for run in effect.runs:
            transfer = self.transfers.setdefault(run.tag, Transfer(run.tag))
            transfer.receiver, transfer.receiver_lease, transfer.target = node, effect.lease_id, run
            transfer.round = effect.round
            node.runs.setdefault(effect.lease_id, []).append(transfer)
            self._started(transfer)

    def _started(self, transfer: Transfer) -> None:
        if transfer.source is not None and transfer.target is not None:
            failing = self.random.random() < self._run_failure_rate
            self.at(
                self.random.random() * 0.05, lambda: self._break(transfer, None) if failing else self._end(transfer)
            )
        else:
            self.at(RUN_TIMEOUT_S, lambda: self._break(transfer, None))

    def _end(self, transfer: Transfer) -> None:
        if transfer.doomed:
            return
        sender, receiver, source, target = transfer.sender, transfer.receiver, transfer.source, transfer.target
        if sender is None or receiver is None or source is None or target is None:
            return
        if not (sender.alive and receiver.alive):
            return
        length = source.num_blocks * BLOCK
        start, end = source.source * BLOCK, target.target * BLOCK
        memory = sender.host if transfer.from_host else sender.slots
        receiver.slots[end : end + length] = memory[start : start + length]
        self._answer(transfer, None)

    def _break(self, transfer: Transfer, dead: WorkerNode | None) -> None:
        """Fails after a while; until then it may still write into the target, as a real link would."""
        if transfer.doomed or transfer.tag not in self.transfers:
            return
        transfer.doomed = True

        def late() -> None:
            if transfer.receiver is not None and transfer.target is not None and transfer.receiver.alive:
                first = transfer.target.target * BLOCK
                for slot in range(first, first + transfer.target.num_blocks * BLOCK):
                    transfer.receiver.slots[slot] = -1
            self._answer(transfer, "broken")

        self.at(self.random.random() * 0.3, late)

    def _answer(self, transfer: Transfer, error: str | None) -> None:
        if self.transfers.pop(transfer.tag, None) is None:
            return
        for node, lease in ((transfer.sender, transfer.sender_lease), (transfer.receiver, transfer.receiver_lease)):
            if node is None or not node.alive:
                continue
            node.runs[lease].remove(transfer)
            if node is transfer.sender:
                node.machine.run_sent(self.now_s, lease, error)
            else:
                node.machine.run_received(self.now_s, lease, transfer.round, error)
            self._perform(node.name, node.machine.take_effects())

    # -- iterations --------------------------------------------------------------------------------------------

    def _step(self, node: WorkerNode) -> None:
        if node.stepping or not node.alive:
            return
        plan = node.machine.plan(self.now_s)
        node.machine.check()
        if plan is None:
            self._perform_without_step(node)
            return
        node.stepping = True
        self._perform_without_step(node)
        self.at(0.005 + 0.001 * plan.tokens, lambda: self._complete(node, plan))

    def _perform_without_step(self, node: WorkerNode) -> None:
        stepping, node.stepping = node.stepping, True
        self._perform(node.name, node.machine.take_effects())
        node.stepping = stepping

    def _complete(self, node: WorkerNode, plan: IterationPlan) -> None:
        if not node.alive:
            return
        for copy in plan.copies:
            if not copy.beside:
                _move(node, copy)
        sampled = []
        padding = row_padding(plan.rows, plan.padded_to, node.machine.kv) if plan.padded_to else [0] * len(plan.rows)
        for row, filled in zip(plan.rows, padding, strict=True):
            tokens = row.sequence.tokens
            blocks = node.machine.kv.blocks(row.sequence.key)
            directions = node.machine.kv.directions(row.sequence.key)
            for position in range(row.start + row.count):
                offset = position % BLOCK
                if directions is not None and directions[position // BLOCK]:
                    offset = BLOCK - 1 - offset
                slot = blocks[position // BLOCK] * BLOCK + offset
                value = digest(tokens[: position + 1])
                if position < row.start:
                    assert node.slots[slot] == value, (
                        f"{node.name}: {row.sequence.key} reads wrong KV at position {position}"
                    )
                else:
                    node.slots[slot] = value
            for position in range(row.start + row.count, row.start + row.count + filled):
                node.slots[blocks[position // BLOCK] * BLOCK + position % BLOCK] = -1  # the engine writes there too
            if row.start + row.count == row.sequence.known:
                sampled.append(Sampled(row.sequence, next_token(tokens)))
        for copy in plan.copies:  # as late as can be: no row may need them
            if copy.beside:
                _move(node, copy)
        node.stepping = False
        node.machine.completed(self.now_s, sampled, 0.01)
        node.machine.check()
        self._perform(node.name, node.machine.take_effects())
        self._step(node)

    # -- the gateway -------------------------------------------------------------------------------------------

    def submit(
        self, name: str, prompt: list[int], max_tokens: int, traffic_class: TrafficClass = "rt", predicted: float = 0.0
    ) -> None:
        self.owned[name] = Owned(
            prompt, max_tokens, list(prompt), traffic_class=traffic_class, predicted=predicted, opened_s=self.now_s
        )
        self._submit(name)

    def cancel(self, name: str) -> None:
        owned = self.owned[name]
        if owned.finish is None and not owned.refused:
            owned.cancelled = True
            self.post("gateway", "manager", Cancel([Attempt(name, owned.attempt)]))

    def _submit(self, name: str) -> None:
        owned = self.owned[name]
        request = Request(
            Attempt(name, owned.attempt),
            "gateway",
            owned.tokens,
            len(owned.prompt),
            SamplingParams(max_tokens=owned.max_tokens, stop_token_ids=(STOP_TOKEN,)),
            owned.opened_s,
            traffic_class=owned.traffic_class,
            prediction=Prediction(*(owned.predicted,) * 4) if owned.predicted else None,
            waited_s=self.now_s - owned.opened_s if owned.attempt > 1 else 0.0,
        )
        owned.placed = False
        self.post("gateway", "manager", Submit(request))

    def _live(self) -> list[Attempt]:
        return [
            Attempt(name, owned.attempt)
            for name, owned in self.owned.items()
            if not (owned.finish or owned.refused or owned.cancelled)
        ]

    def _gateway_beat(self) -> None:
        self._greet()
        self.post("gateway", "manager", Outstanding(self._live()))

    def _greet(self) -> None:
        self.post("gateway", "manager", GatewayHello("gateway", 1, "gateway", self.known_workers))

    def _manager_is_new(self) -> None:
        """What no worker is known for is lost with the former manager; the rest workers may still have."""
        self._greet()
        live = self._live()
        for attempt in live:
            owned = self.owned[attempt.request_id]
            if not owned.placed:
                owned.attempt += 1
                self._submit(attempt.request_id)
        self.post("gateway", "manager", Outstanding([a for a in live if self.owned[a.request_id].placed]))

    def _to_gateway(self, message: Message) -> None:
        match message:
            case TokenBatch(updates=updates):
                for update in updates:
                    owned = self.owned[update.attempt.request_id]
                    if owned.attempt != update.attempt.number or owned.cancelled:
                        continue
                    assert update.position <= len(owned.tokens), "a gap in the stream"
                    fresh = update.tokens[len(owned.tokens) - update.position :]
                    owned.tokens.extend(fresh)
                    owned.placed = True
                    if fresh:
                        owned.times_s.append(self.now_s)
                    if update.finish is not None:
                        owned.finish = update.finish
                        owned.finishes += 1
            case Placed(attempt=attempt):
                owned = self.owned[attempt.request_id]
                owned.placed |= owned.attempt == attempt.number
            case ClusterLoad(instances=instances):
                self.known_workers = instances
            case Displaced(attempts=attempts):
                for attempt in attempts:
                    owned = self.owned[attempt.request_id]
                    if owned.attempt == attempt.number and not (owned.finish or owned.cancelled):
                        self.displaced += 1
                        owned.attempt += 1
                        self._submit(attempt.request_id)
            case Refused(attempt=attempt):
                self.owned[attempt.request_id].refused = True
            case ManagerHello(incarnation=incarnation):
                if incarnation != self.known_manager:
                    first, self.known_manager = self.known_manager == 0, incarnation
                    if first:
                        self.post("gateway", "manager", Outstanding(self._live()))
                    else:
                        self._manager_is_new()
            case _:
                pass
