"""The fault tester: the virtual cluster with an engine of digests, a faulty network, clients that check every token.

Workers, the manager, the gateway's clients and links can be broken at any moment. All three machines are the live ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from cohort.common.addresses import STANDBY_MANAGERS
from cohort.common.config import SpeculationConfig
from cohort.common.machines.effects import Admitted, Deliver, Ended, Fail, GatewayEffect, ManagerFound, Rejected
from cohort.common.machines.events import Closed, DrainEnded, DrainStarted, LinkAddresses, Offered, PeerLost
from cohort.common.machines.gateway.gateway import GatewayMachine, GatewaySettings
from cohort.common.machines.manager.manager import ManagerMachine, ManagerSettings
from cohort.common.machines.worker.worker import WorkerMachine
from cohort.common.machines.worker.worker_state import WorkerSettings, WorkerSetup
from cohort.common.messages import Message
from cohort.common.policies.baselines.bounded_admission import BoundedAdmission
from cohort.common.policies.baselines.continuous_batching import ContinuousBatching
from cohort.common.policies.baselines.fcfs import Fcfs
from cohort.common.policies.baselines.paged_allocation import PagedAllocator
from cohort.common.policies.interface import IterationScheduler, LateBinding, Placement, PrefillOrder
from cohort.common.policies.kv_interface import KvAllocator
from cohort.common.types import (
    Attempt,
    FinishReason,
    IfLate,
    KvGeometry,
    Prediction,
    Request,
    Role,
    SamplingParams,
    Slo,
    TrafficClass,
    WorkerCapacity,
)
from cohort.common.virtual_cluster.cluster import GATEWAY, MANAGER, VirtualCluster
from cohort.common.virtual_cluster.plugins import Cadence, Node, WorkerNode
from tests.common.machines.digest_engine import (
    BLOCK,
    STOP_TOKEN,
    VOCABULARY,
    DigestEngine,
    expected_output,
    next_token,
    silent,
)
from tests.common.machines.faulty_network import FaultyNetwork, Weather
from tests.common.machines.split_anywhere import SplitAnywhere

__all__ = ["BLOCK", "STOP_TOKEN", "VOCABULARY", "SplitAnywhere", "World", "expected_output", "next_token"]

CADENCE = Cadence(report_s=0.2, worker_tick_s=0.1, manager_tick_s=0.05, gateway_tick_s=0.5, adapter_load_s=0.03)
GATEWAY_SETTINGS = GatewaySettings(
    stall_timeout_s=20.0,
    request_timeout_s=10_000.0,
    max_attempts=10_000,
    predictor_wait_s=0.01,
    default_prediction_tokens=8,
    rt_ttft_slo_s=0.0,
    rt_tpot_slo_s=0.0,
    load_interval_s=0.5,
    drain_s=30.0,
)
"""No SLO defaults: what a policy assumes for a request without an SLO is the policy's own option here."""
RETURN_S = 0.05
"""From the end of a connection until its peer counts as lost."""
NO_SLO = Slo()
MANAGER_SETTINGS = ManagerSettings(3.0, 1.5, 0.5, 10_000)


@dataclass
class Owned:
    """A request as its client knows it."""

    prompt: list[int]
    max_tokens: int
    tokens: list[int]
    finish: FinishReason | None = None
    refused: bool = False
    cancelled: bool = False
    submitted_s: float = 0.0
    attempt: Attempt | None = None
    """Whose tokens came last."""
    times_s: list[float] = field(default_factory=list)
    """Of every arrival of tokens."""
    ended_s: float | None = None
    ends: int = 0
    """How often the gateway said that it is over."""
    adapter: str = ""

    @property
    def first_token_s(self) -> float | None:
        return self.times_s[0] if self.times_s else None

    def next_token_s(self, from_s: float) -> float:
        """When its first token from then on came."""
        return next((at_s for at_s in self.times_s if at_s >= from_s), float("inf"))

    @property
    def over(self) -> bool:
        return self.finish is not None or self.refused or self.cancelled


@dataclass
class Clients:
    """The clients of one world."""

    world: World
    owned: dict[str, Owned] = field(default_factory=dict)

    def on_effect(self, gateway: Node, effect: GatewayEffect) -> None:
        match effect:
            case Deliver(entry, tokens, _, finish):
                owned = self.owned[entry.request_id]
                assert owned.finish is None and not owned.refused, "tokens after the end"
                owned.tokens.extend(tokens)
                if tokens:
                    owned.times_s.append(self.world.now_s)
                    owned.attempt = entry.attempt
                if finish is not None:
                    owned.finish, owned.ended_s = finish, self.world.now_s
            case Fail(entry, error):
                owned = self.owned[entry.request_id]
                assert 400 <= error.status < 500, f"{entry.request_id} failed: {error.message}"
                if error.status == 429 and not entry.sibling_ids:
                    assert not entry.attempt.number and not entry.output, f"{entry.request_id} was accepted before"
                owned.refused = True
            case Rejected(offer_id, error):
                raise AssertionError(f"{offer_id} was rejected: {error.message}")
            case Ended(entry):
                self.owned[entry.request_id].ends += 1
            case Admitted() | ManagerFound():
                pass
            case _:
                raise AssertionError(f"not for a client: {effect}")

    def send_to_predictor(self, gateway: Node, message: Message) -> None:
        """There is none: requests bring a prediction, or have none."""


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
        loss_rate: float = 0.0,
        repeat_rate: float = 0.0,
        stall_timeout_s: float = 20.0,
        late_binding: Callable[[], LateBinding | None] = lambda: None,
        order: Callable[[], PrefillOrder] = lambda: Fcfs(dispatch_ahead_tokens=64),
        scheduler: Callable[[], IterationScheduler] | None = None,
        allocator: Callable[[KvGeometry, int, int], KvAllocator] | None = None,
        plan_ahead: bool = True,
        window: int = 0,
        groups: tuple[int, ...] = (),
        max_loras: int = 2,
        managers: int = 1,
        load_interval_s: float = GATEWAY_SETTINGS.load_interval_s,
        acceptance: float | None = None,
        step: tuple[int, int] = (8, 32),
        lateness: float = 0.0,
    ) -> None:
        """`step`: the most rows and tokens of one, as workers say it and the scheduler keeps to. `managers`: one that
        leads, the others stand by. `acceptance`: workers may draft, and a drafted token is right with this chance; None
        = they may not. `groups` of layers, by their windows: caches have `blocks` for each of them.
        `lateness`: the chance of a row to sit a step out; then every request has a grammar."""
        self.manager_names = (MANAGER, *STANDBY_MANAGERS[: managers - 1])
        self._max_loras, self._step = max_loras, step
        self._speculation = SpeculationConfig("off" if acceptance is None else "lookup", max_drafts=6)
        self.seed = seed
        self.random = Random(seed)
        self.roles = roles
        self._placement = placement
        self._gateway_settings = replace(
            GATEWAY_SETTINGS, stall_timeout_s=stall_timeout_s, load_interval_s=load_interval_s
        )
        self._order = order
        self._late_binding = late_binding
        self._scheduler = scheduler or (
            lambda: ContinuousBatching(max_rows=8, max_step_tokens=32, prefill_chunk=chunk, preemption=preemption)  # type: ignore[arg-type]
        )
        self._allocator = allocator or (
            lambda geometry, device, host: PagedAllocator(geometry, device, host, prefix_caching=caching)
        )
        blocks, host_blocks = blocks * max(1, len(groups)), host_blocks * max(1, len(groups))
        self._blocks = (blocks, host_blocks)
        self._geometry = KvGeometry(max(1, len(groups)), 1, 1, 1, BLOCK, 0 if groups else window, groups)
        weather = Weather(message_delay_s, loss_rate, repeat_rate, run_failure_rate)
        self.network = FaultyNetwork(Random(self.random.getrandbits(32)), weather)
        self.cluster = VirtualCluster(
            self, roles, self.network, CADENCE, managers=self.manager_names, around=self._checked
        )
        engine_random = Random(self.random.getrandbits(32))
        self.cluster.engine = DigestEngine(
            self.cluster,
            engine_random,
            blocks,
            host_blocks,
            plan_ahead=plan_ahead,
            acceptance=acceptance or 0.0,
            lateness=lateness,
        )
        self._grammar = "any" if lateness else ""
        self.clients = Clients(self)
        self.cluster.clients = self.clients
        self.cluster.start()

    # -- time --------------------------------------------------------------------------------------------------

    @property
    def now_s(self) -> float:
        return self.cluster.now_s

    def at(self, delay_s: float, action: Callable[[], Any]) -> None:
        self.cluster.events.at(self.now_s + delay_s, action)

    def run(self, until_s: float, done: Callable[[], bool] = lambda: False) -> None:
        try:
            self.cluster.events.run(until_s, done)
        except Exception as error:
            error.add_note(f"in the world of seed {self.seed}")
            raise

    def run_until_quiet(self, limit_s: float = 400.0) -> None:
        """Until every request ended and every worker is empty; then check that nothing is left anywhere."""
        limit_s += self.now_s
        self.run(limit_s, lambda: all(owned.over for owned in self.owned.values()))
        unfinished = sorted(name for name, owned in self.owned.items() if not owned.over)
        assert not unfinished, f"{len(unfinished)} requests never ended: {unfinished[:5]}"
        self.run(self.now_s + 20.0, self._empty)
        self.run(self.now_s + 6.0)  # longer than a lease, a silence or a message under way lasts
        for node in self.workers.values():
            if node.alive:
                machine = node.worker
                machine.check()
                assert machine.kv.owners() == {}, f"{node.name} still holds {machine.kv.owners()}"
                assert machine.idle
                assert machine.stats(0).leases == 0
        assert [node.name for node in self.managers if node.machine.leads] == [self.leader], "one leads"
        for node in (*self.managers, self.cluster.nodes[GATEWAY]):
            node.machine.check()
        for node in self.managers:
            assert (node.machine.live, node.machine.waiting) == (0, 0), node.name
        assert len(self.gateway.ledger) == 0

    def _empty(self) -> bool:
        workers = [node.worker for node in self.workers.values() if node.alive]
        return not len(self.gateway.ledger) and all(worker.idle and not worker.kv.owners() for worker in workers)

    def check_outputs(self) -> None:
        for name, owned in self.owned.items():
            output = owned.tokens[len(owned.prompt) :]
            expected = expected_output(owned.prompt, owned.max_tokens, owned.adapter)
            if owned.finish is not None:
                assert output == expected, name
                assert owned.finish is (FinishReason.STOP if expected[-1] == STOP_TOKEN else FinishReason.LENGTH)
            else:
                assert output == expected[: len(output)], name
            assert owned.ends == 1, f"{name} ended {owned.ends} times"

    # -- what there is -----------------------------------------------------------------------------------------

    @property
    def owned(self) -> dict[str, Owned]:
        return self.clients.owned

    @property
    def workers(self) -> dict[str, WorkerNode]:
        return {node.name: node for node in self.cluster.workers}

    @property
    def managers(self) -> list[Node]:
        """Those that live."""
        nodes = [self.cluster.nodes[name] for name in self.manager_names]
        return [node for node in nodes if node.alive]

    @property
    def leader(self) -> str:
        """The manager that the gateway follows, or did last."""
        return self.gateway.link.manager

    @property
    def manager(self) -> ManagerMachine:
        machine: ManagerMachine = self.cluster.nodes[self.leader].machine
        return machine

    @property
    def gateway(self) -> GatewayMachine:
        machine: GatewayMachine = self.cluster.nodes[GATEWAY].machine
        return machine

    @property
    def attempts_lost(self) -> int:
        """Attempts that were lost and submitted again."""
        return self.gateway.ledger.resubmitted_total

    # -- its machines (`Builder`) ------------------------------------------------------------------------------

    def make_gateway(self, name: str, incarnation: int, now_s: float) -> GatewayMachine:
        admission = BoundedAdmission(max_waiting_requests=10_000, max_waiting_tokens=10**9)
        return GatewayMachine(
            name,
            incarnation,
            name,
            self._gateway_settings,
            admission,
            now_s,
            predictor="",
            standbys=self.manager_names[1:],
        )

    def make_manager(self, name: str, incarnation: int, now_s: float) -> ManagerMachine:
        names = self.manager_names
        load_interval_s = self._gateway_settings.load_interval_s
        settings = replace(
            MANAGER_SETTINGS, load_interval_s=load_interval_s, rank=names.index(name), managers=len(names)
        )
        return ManagerMachine(
            name, incarnation, settings, self._order(), self._placement(), self._late_binding(), now_s
        )

    def make_worker(self, name: str, incarnation: int, now_s: float) -> WorkerNode:
        blocks, host_blocks = self._blocks
        kv = self._allocator(self._geometry, blocks, host_blocks)
        capacity = WorkerCapacity(
            *(
                self.roles[name],
                "m",
                10_000,
                self._geometry.num_layers,
                1,
                1,
                1,
                BLOCK,
                blocks,
                host_blocks,
                *self._step,
            ),
            window=kv.geometry.window,
            groups=kv.geometry.groups,
        )
        settings = WorkerSettings(
            ("ucx", "zmq"), 5.0, 5.0, 2.0, 8.0, 2.0, max_loras=self._max_loras, speculation=self._speculation
        )
        seed = self.random.getrandbits(32)
        machine = WorkerMachine(
            WorkerSetup(name, incarnation, name, MANAGER, capacity, settings, self.manager_names[1:]),
            self._scheduler(),
            kv,
            Random(seed),
        )
        node = WorkerNode(name, machine)
        self._worker_made(node, seed)
        node.handle(now_s, LinkAddresses({"ucx": name.encode(), "zmq": name.encode()}))
        return node

    def _worker_made(self, node: WorkerNode, seed: int) -> None:
        """Before it is told anything: `node.handle` may be wrapped."""

    def _checked(self, node: Node) -> None:
        """Every machine's invariants hold after every word it is told or says."""
        handle, check = node.handle, node.machine.check

        def checked(now_s: float, *events: Any) -> list[Any]:
            effects = handle(now_s, *events)
            if not silent(events, effects):
                check()
            return effects

        if not isinstance(node, WorkerNode):  # the engine checks workers, once a step
            node.handle = checked

    # -- faults ------------------------------------------------------------------------------------------------

    def inflict(self, kind: str, back_s: float, *, leaving: str = "decode-1", cancelled: int = 5) -> None:
        """One fault, as `tests.common.machines.faults` names them: "manager", "manager-1" … (killed, back after
        `back_s`), the name of a worker to kill with its host, so that its silence tells, "crash NAME" (the same, but
        its connections end), "alarm NAME" (its connection to the managers ends, and it lives), "leave" (the worker
        `leaving` ends in an orderly way, at once), "drain NAME" (the same, once it is empty or after `back_s`),
        "cancel" (of the first `cancelled` requests), "freeze NAME" (stopped and, `back_s` later, continued), "cut NAME
        NAME" (the two hear nothing of each other)."""
        match kind.split():
            case [name] if name in self.manager_names:
                self.kill_manager(back_s, name)
            case ["leave"]:
                self.leave_worker(leaving)
            case ["drain", name]:
                self.drain_worker(name, back_s)
            case ["cancel"]:
                for name in [f"r{index}" for index in range(cancelled)]:
                    if name in self.owned:
                        self.cancel(name)
            case ["cut", one, other]:
                self.network.cut(one, other, self.now_s + back_s)
            case ["crash", name]:
                self.kill_worker(name, back_s)
                self.lose_peer(name)
            case ["alarm", name]:
                self.lose_peer(name)
            case ["freeze", name]:
                self.cluster.freeze(name, back_s)
            case [worker]:
                self.kill_worker(worker, back_s)
            case _:
                raise ValueError(f"no such fault: {kind}")

    def kill_manager(self, back_after_s: float | None, name: str = MANAGER) -> None:
        if self.cluster.nodes[name].alive:
            self.cluster.kill(name)
            if back_after_s is not None:
                self.at(back_after_s, lambda: self.cluster.start_manager(name))

    def kill_worker(self, name: str, back_after_s: float | None) -> None:
        if self.workers[name].alive:
            self.cluster.kill(name)
            if back_after_s is not None:
                self.at(back_after_s, lambda: self.cluster.start_worker(name))

    def lose_peer(self, name: str) -> None:
        """The managers' buses say that the connection of `name` ended and did not come back."""

        def lost() -> None:
            for manager in self.manager_names:
                self.cluster.feed(self.cluster.nodes[manager], PeerLost(name))

        self.at(RETURN_S, lost)

    def leave_worker(self, name: str) -> None:
        node = self.workers[name]
        self.cluster.feed(node, DrainStarted())
        self.cluster.feed(node, DrainEnded())
        self.at(0.05, lambda: self.kill_worker(name, 1.0))

    def drain_worker(self, name: str, for_s: float, back_after_s: float = 1.0) -> None:
        """It takes its leave once it is empty, at the latest after `for_s`, and is started again."""
        node = self.workers[name]
        if not node.alive:
            return
        self.cluster.feed(node, DrainStarted())
        until_s = self.now_s + for_s

        def look() -> None:
            if node is not self.workers[name] or not node.alive:
                return  # something else has ended it
            if node.worker.idle or self.now_s >= until_s:
                self.cluster.feed(node, DrainEnded())
                self.at(0.05, lambda: self.kill_worker(name, back_after_s))
            else:
                self.at(0.05, look)

        self.at(0.05, look)

    # -- requests ----------------------------------------------------------------------------------------------

    def submit(
        self,
        name: str,
        prompt: list[int],
        max_tokens: int,
        traffic_class: TrafficClass = "rt",
        predicted: float = 0.0,
        slo: Slo = NO_SLO,
        if_late: IfLate = "",
        choices: int = 1,
        adapter: str = "",
    ) -> None:
        """`predicted` 0 = the default. Several `choices` are NAME-0, NAME-1 …, as of one HTTP request."""
        names = [name] if choices == 1 else [f"{name}-{index}" for index in range(choices)]
        requests = [
            self._request(each, prompt, max_tokens, traffic_class, predicted, slo, if_late, adapter) for each in names
        ]
        self.cluster.feed(self.cluster.nodes[GATEWAY], Offered(name, requests, choices))

    def _request(
        self,
        name: str,
        prompt: list[int],
        max_tokens: int,
        traffic_class: TrafficClass,
        predicted: float,
        slo: Slo,
        if_late: IfLate,
        adapter: str = "",
    ) -> Request:
        self.owned[name] = Owned(prompt, max_tokens, list(prompt), submitted_s=self.now_s, adapter=adapter)
        return Request(
            Attempt(name, 0),
            GATEWAY,
            prompt,
            len(prompt),
            SamplingParams(max_tokens=max_tokens, stop_token_ids=(STOP_TOKEN,), grammar=self._grammar),
            self.now_s,
            traffic_class=traffic_class,
            slo=slo,
            prediction=Prediction(*(predicted,) * 4) if predicted else None,
            if_late=if_late,
            adapter=adapter,
        )

    def cancel(self, name: str) -> None:
        owned = self.owned[name]
        if not owned.over:
            owned.cancelled = True
            self.cluster.feed(self.cluster.nodes[GATEWAY], Closed(name, FinishReason.CANCELLED, "its client left"))
