"""The live machines under virtual time: its host decides nothing that a machine decides.

    Clients ─events─▶ GatewayMachine ─Submit─▶ ManagerMachine ─StartSegment─▶ WorkerMachine ─StartStep─▶ Engine
       ▲ Deliver          ▲ tokens                 ▲ reports, segment ends       │ KV runs ─▶ KvFlights ─▶ Network
       └──────────────────┴────────────────────────┴─────────────────────────────┘

Every effect of every machine is performed here, in its order. A process may be killed, stopped or started again at any
moment: messages on their way to or from a killed one are lost, those to a stopped one wait. Nothing here is random;
the network is, if it wants.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, assert_never

from cohort.common.machines.effects import (
    CancelRuns,
    Dial,
    LoadAdapter,
    ReceiveRuns,
    Send,
    SendRuns,
    StartStep,
    Wake,
    WorkerEffect,
)
from cohort.common.machines.events import AdapterLoaded, Received, ReportDue, Tick
from cohort.common.messages import Message
from cohort.common.types import InstanceId
from cohort.common.virtual_cluster.events import Events
from cohort.common.virtual_cluster.kv_flights import KvFlights
from cohort.common.virtual_cluster.plugins import Builder, Cadence, Clients, Engine, Network, Node, WorkerNode

MANAGER, GATEWAY, PREDICTOR = "manager", "gateway", "predictor"


class VirtualCluster:
    def __init__(
        self,
        builder: Builder,
        worker_names: Iterable[InstanceId],
        network: Network,
        cadence: Cadence,
        *,
        managers: tuple[InstanceId, ...] = (MANAGER,),
        start_s: float = 0.0,
        goes_on: Callable[[], bool] = lambda: True,
        around: Callable[[Node], None] = lambda node: None,
    ) -> None:
        """`engine` and `clients` are set by the host before `start`. Periodic work ends when `goes_on` says no.
        `around` may wrap `Node.handle` of every process that is started."""
        self.events = Events(start_s)
        self.network = network
        self.engine: Engine
        self.clients: Clients
        self.nodes: dict[InstanceId, Node] = {}
        self._builder = builder
        self._worker_names = tuple(worker_names)
        self._managers = managers
        self._cadence = cadence
        self._goes_on = goes_on
        self._around = around
        self._incarnations = 0
        self.flights = KvFlights(self)

    @property
    def now_s(self) -> float:
        return self.events.now_s

    def worker(self, name: InstanceId) -> WorkerNode | None:
        node = self.nodes.get(name)
        return node if isinstance(node, WorkerNode) else None

    @property
    def workers(self) -> list[WorkerNode]:
        return [node for node in self.nodes.values() if isinstance(node, WorkerNode)]

    # -- processes ---------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Every process for the first time. Reports of many workers never come in step."""
        self.start_gateway()
        for name in self._managers:
            self.start_manager(name)
        for index, name in enumerate(self._worker_names):
            self.start_worker(name, self._cadence.report_s * (index + 1) / len(self._worker_names))

    def start_gateway(self) -> Node:
        machine = self._builder.make_gateway(GATEWAY, self._incarnation(), self.now_s)
        return self._started(Node(GATEWAY, machine), self._cadence.gateway_tick_s)

    def start_manager(self, name: InstanceId = MANAGER) -> Node:
        machine = self._builder.make_manager(name, self._incarnation(), self.now_s)
        return self._started(Node(name, machine), self._cadence.manager_tick_s)

    def start_worker(self, name: InstanceId, first_report_s: float | None = None) -> WorkerNode:
        """It registers at once, and reports from `first_report_s` from now on."""
        node = self._builder.make_worker(name, self._incarnation(), self.now_s)
        self._around(node)
        self.nodes[name] = node
        report_s = self._cadence.report_s
        if self._cadence.worker_tick_s:
            self._every(self._cadence.worker_tick_s, node, Tick())
            self._every(report_s, node, ReportDue(0), after_s=first_report_s)
        else:
            self._every(report_s, node, Tick(), ReportDue(0), after_s=first_report_s)
        self.tell(node, ReportDue(0))
        return node

    def _started(self, node: Node, tick_s: float) -> Node:
        self._around(node)
        self.nodes[node.name] = node
        self.tell(node, Tick())
        if tick_s:
            self._every(tick_s, node, Tick())
        return node

    def kill(self, name: InstanceId) -> None:
        """As kill -9. Messages it had sent are lost with it."""
        node = self.nodes.get(name)
        if node is None or not node.alive:
            return
        node.alive = False
        if isinstance(node, WorkerNode):
            self.engine.died(node)
            self.flights.died(node)

    def freeze(self, name: InstanceId, seconds: float) -> None:
        """As kill -STOP, and -CONT later."""
        node = self.nodes.get(name)
        if node is not None:
            node.frozen_until_s = max(node.frozen_until_s, self.now_s + seconds)

    def _incarnation(self) -> int:
        self._incarnations += 1
        return self._incarnations

    def _every(self, interval_s: float, node: Node, *events: Any, after_s: float | None = None) -> None:
        def again() -> None:
            if node.alive and self._goes_on():
                self.tell(node, *events)
                self.events.at(self.now_s + interval_s, again)

        self.events.at(self.now_s + (interval_s if after_s is None else after_s), again)

    # -- messages ----------------------------------------------------------------------------------------------

    def post(self, source: Node, peer: InstanceId, message: Message) -> None:
        if peer == PREDICTOR:
            self.clients.ask_predictor(source, message)
            return
        target = self.nodes.get(peer)
        if target is not None:
            for arrival_s in self.network.arrivals(self.now_s, source.name, peer, message):
                self.events.at(arrival_s, self._deliver, source, target, message)

    def _deliver(self, source: Node, target: Node, message: Message) -> None:
        if source.alive and target.alive:
            self.tell(target, Received(source.name, self.network.travelled(message)))

    # -- machines ----------------------------------------------------------------------------------------------

    def tell(self, node: Node, *events: Any) -> None:
        """These happen to the node now; its machine's effects are performed."""
        if not node.alive:
            return
        if node.frozen_until_s > self.events.now_s:
            self.events.at(node.frozen_until_s, self.tell, node, *events)
            return
        now_s = self.events.now_s
        try:
            if isinstance(node, WorkerNode):
                self.engine.about_to_tell(node, events)
                effects = node.handle(now_s, *events)
                self.engine.told(node, events, effects)
            else:
                effects = node.handle(now_s, *events)
        except Exception as error:
            error.add_note(f"{node.name} at {now_s} s, told {[type(event).__name__ for event in events]}")
            raise
        if isinstance(node, WorkerNode):
            self._perform_of_worker(node, effects)
        else:
            self._perform(node, effects)

    def _perform_of_worker(self, node: WorkerNode, effects: Iterable[WorkerEffect]) -> None:
        for effect in effects:
            match effect:
                case Send(peer=peer, message=message):
                    self.post(node, peer, message)
                case StartStep():
                    self.engine.begin(node, effect)
                case SendRuns():
                    self.flights.send(node, effect)
                case ReceiveRuns():
                    self.flights.receive(node, effect)
                case CancelRuns(lease_id=lease_id):
                    self.flights.cancel(node, lease_id)
                case LoadAdapter(adapter=adapter):
                    at_s = self.now_s + self._cadence.adapter_load_s
                    self.events.at(at_s, self.tell, node, AdapterLoaded(adapter))
                case Dial():
                    pass
                case _:
                    assert_never(effect)

    def _perform(self, node: Node, effects: Iterable[Any]) -> None:
        """Of a gateway or the manager. A gateway's effects within its own process reach its clients."""
        hear = self.clients.hear
        for effect in effects:
            kind = type(effect)
            if kind is Send:
                self.post(node, effect.peer, effect.message)
            elif kind is Wake:
                self._wake(node, effect.at_s)
            else:
                hear(node, effect)

    def _wake(self, node: Node, at_s: float) -> None:
        if at_s != node.wake_s:
            node.wake_s = at_s
            if at_s < float("inf"):
                self.events.at(at_s, self._woken, node, at_s)

    def _woken(self, node: Node, at_s: float) -> None:
        if node.wake_s == at_s and self._goes_on():
            node.wake_s = float("inf")
            self.tell(node, Tick())
