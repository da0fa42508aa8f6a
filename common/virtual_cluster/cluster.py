"""The live machines under virtual time: its host decides nothing that a machine decides.

    Clients ─events─▶ GatewayMachine ─Submit─▶ ManagerMachine ─StartSegment─▶ WorkerMachine ─StartStep─▶ Engine
       ▲ Deliver          ▲ tokens                 ▲ reports, segment ends       │ KV runs ─▶ KvFlights ─▶ Network
       └──────────────────┴────────────────────────┴─────────────────────────────┘

Every effect of every machine is performed here, in its order. A process may be killed, stopped or started again at any
moment: messages on their way to or from a killed one are lost, those to a stopped one wait. Nothing here is random;
the network is, if it wants.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from typing import Any, assert_never

from cohort.common.machines.effects import (
    CancelRuns,
    Dial,
    LoadAdapter,
    ReceiveRuns,
    Run,
    Send,
    SendRuns,
    StartStep,
    Wake,
    WorkerEffect,
)
from cohort.common.machines.events import AdapterLoaded, Received, ReportDue, RunsReceived, RunsSent, Tick
from cohort.common.messages import KvChunk, KvRun, Message
from cohort.common.types import InstanceId
from cohort.common.virtual_cluster.plugins import Builder, Cadence, Clients, Engine, Flight, Network, Node, WorkerNode

MANAGER, GATEWAY, PREDICTOR = "manager", "gateway", "predictor"


class Events:
    """The clock and a heap of events to come: (time, rank, order of scheduling, action, arguments).

    Two events of the same moment happen by rank, then in the order of scheduling, so a run depends on its inputs and
    seed only. Ranks keep that order the same however early an event was foreseen.
    """

    def __init__(self, start_s: float = 0.0) -> None:
        self.now_s = start_s
        self.handled = 0
        self._heap: list[tuple[float, int, int, Callable[..., None], tuple[Any, ...]]] = []
        self._scheduled = 0

    def at(self, time_s: float, action: Callable[..., None], *arguments: Any, rank: int = 0) -> None:
        """Schedule an action. A time that has passed means now."""
        self._scheduled += 1
        at_s = time_s if time_s > self.now_s else self.now_s
        heapq.heappush(self._heap, (at_s, rank, self._scheduled, action, arguments))

    def run(self, until_s: float, done: Callable[[], bool]) -> None:
        """Handle events until none is left, `done` is true, or the next one is later than `until_s`."""
        heap = self._heap
        while heap and heap[0][0] <= until_s and not done():
            self.now_s, _, _, action, arguments = heapq.heappop(heap)
            self.handled += 1
            action(*arguments)


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
        """Start every process. Reports of many workers are spread over the interval."""
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
        """Start a worker. It registers at once, and reports from `first_report_s` from now on."""
        node = self._builder.make_worker(name, self._incarnation(), self.now_s)
        self._around(node)
        self.nodes[name] = node
        report_s = self._cadence.report_s
        if self._cadence.worker_tick_s:
            self._every(self._cadence.worker_tick_s, node, Tick())
            self._every(report_s, node, ReportDue(0), after_s=first_report_s)
        else:
            self._every(report_s, node, Tick(), ReportDue(0), after_s=first_report_s)
        self.feed(node, ReportDue(0))
        return node

    def _started(self, node: Node, tick_s: float) -> Node:
        self._around(node)
        self.nodes[node.name] = node
        self.feed(node, Tick())
        if tick_s:
            self._every(tick_s, node, Tick())
        return node

    def kill(self, name: InstanceId) -> None:
        """Kill a process like kill -9: messages it had sent are lost with it."""
        node = self.nodes.get(name)
        if node is None or not node.alive:
            return
        node.alive = False
        if isinstance(node, WorkerNode):
            self.engine.died(node)
            self.flights.died(node)

    def freeze(self, name: InstanceId, seconds: float) -> None:
        """Stop a process like kill -STOP, with -CONT after `seconds`."""
        node = self.nodes.get(name)
        if node is not None:
            node.frozen_until_s = max(node.frozen_until_s, self.now_s + seconds)

    def _incarnation(self) -> int:
        self._incarnations += 1
        return self._incarnations

    def _every(self, interval_s: float, node: Node, *events: Any, after_s: float | None = None) -> None:
        def again() -> None:
            if node.alive and self._goes_on():
                self.feed(node, *events)
                self.events.at(self.now_s + interval_s, again)

        self.events.at(self.now_s + (interval_s if after_s is None else after_s), again)

    # -- messages ----------------------------------------------------------------------------------------------

    def post(self, source: Node, peer: InstanceId, message: Message) -> None:
        if peer == PREDICTOR:
            self.clients.send_to_predictor(source, message)
            return
        target = self.nodes.get(peer)
        if target is not None:
            for arrival_s in self.network.arrivals(self.now_s, source.name, peer, message):
                self.events.at(arrival_s, self._deliver, source, target, message)

    def _deliver(self, source: Node, target: Node, message: Message) -> None:
        if source.alive and target.alive:
            self.feed(target, Received(source.name, self.network.decoded(message)))

    # -- machines ----------------------------------------------------------------------------------------------

    def feed(self, node: Node, *events: Any) -> None:
        """Feed events to a node's machine now, and perform its effects."""
        if not node.alive:
            return
        if node.frozen_until_s > self.events.now_s:
            self.events.at(node.frozen_until_s, self.feed, node, *events)
            return
        now_s = self.events.now_s
        try:
            if isinstance(node, WorkerNode):
                self.engine.before_events(node, events)
                effects = node.handle(now_s, *events)
                self.engine.after_events(node, events, effects)
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
                    self.events.at(at_s, self.feed, node, AdapterLoaded(adapter))
                case Dial():
                    pass
                case _:
                    assert_never(effect)

    def _perform(self, node: Node, effects: Iterable[Any]) -> None:
        """Perform effects of a gateway or a manager. A gateway's effects within its own process reach its clients."""
        hear = self.clients.on_effect
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
            self.feed(node, Tick())


class KvFlights:
    """Runs of KV blocks on their way between two workers.

    SendRuns ──▶ announced (KvChunk) ──▶ posted by the receiver ─┐
        └──────▶ bytes on their way ───────▶ landed ─────────────┴─▶ both ends are told
        └──────▶ broken (link, deadline, cancelled, an end died) ──▶ both ends are told, a while later

    A flight is known by its tag from both ends, in whichever order they post it. Its source is read when it lands, and
    its target written then, so that blocks which were freed or reused too early show.
    """

    def __init__(self, cluster: VirtualCluster) -> None:
        self._cluster = cluster
        self._network = cluster.network
        self._flights: dict[int, Flight] = {}

    def send(self, node: WorkerNode, effect: SendRuns) -> None:
        cluster = self._cluster
        runs = [KvRun(run.tag, run.target, run.num_blocks, run.checksum) for run in effect.runs]
        cluster.post(node, effect.peer, KvChunk(effect.attempt, effect.lease_id, effect.round, effect.link, runs))
        receiver = cluster.worker(effect.peer)
        for together in self._together(effect.runs):
            flight = self._flight(together, node)
            flight.sender, flight.sender_lease, flight.sent = node, effect.lease_id, together
            flight.from_host = effect.from_host
            if flight.receiver is None:
                flight.receiver = receiver
            landing_s = self._network.landing_s(cluster.now_s, flight)
            if self._network.breaks(flight):
                cluster.events.at(landing_s, self.break_off, flight)
            else:
                cluster.events.at(landing_s, self._land, flight)

    def receive(self, node: WorkerNode, effect: ReceiveRuns) -> None:
        for together in self._together(effect.runs):
            flight = self._flight(together, node)
            flight.receiver, flight.receiver_lease, flight.round = node, effect.lease_id, effect.round
            flight.posted = together
            if flight.arrived:  # not now: the effects that this one stands among are still being performed
                self._cluster.events.at(self._cluster.now_s, self._land, flight)

    def cancel(self, node: WorkerNode, lease_id: int) -> None:
        """Break every flight of this lease at this end."""
        for flight in list(node.flights.values()):
            sends = flight.sender is node and flight.sent and flight.sender_lease == lease_id
            receives = flight.receiver is node and flight.posted and flight.receiver_lease == lease_id
            if sends or receives:
                self.break_off(flight)

    def died(self, node: WorkerNode) -> None:
        for flight in list(node.flights.values()):
            self.break_off(flight)

    def break_off(self, flight: Flight) -> None:
        """Break a flight. Until both ends learn of it, its bytes may still arrive, or others."""
        if flight.broken or flight.tag not in self._flights:
            return
        flight.broken = True
        cluster = self._cluster
        cluster.events.at(cluster.now_s + self._network.break_delay_s(), self._complete_broken, flight)

    # -- within ------------------------------------------------------------------------------------------------

    def _together(self, runs: tuple[Run, ...]) -> Iterator[tuple[Run, ...]]:
        if self._network.whole_sends:
            yield runs
        else:
            for run in runs:
                yield (run,)

    def _flight(self, runs: tuple[Run, ...], node: WorkerNode) -> Flight:
        tag = runs[0].tag
        flight = self._flights.get(tag)
        if flight is None:
            flight = self._flights[tag] = Flight(tag)
        node.flights[tag] = flight
        timeout_s = self._network.run_timeout_s
        if timeout_s < float("inf"):
            self._cluster.events.at(self._cluster.now_s + timeout_s, self.break_off, flight)
        return flight

    def _land(self, flight: Flight) -> None:
        if flight.broken or flight.tag not in self._flights:
            return
        flight.arrived = True
        if not flight.posted or not flight.sent:
            return
        self._cluster.engine.copy(flight)
        self._complete(flight, None)

    def _complete_broken(self, flight: Flight) -> None:
        if flight.posted and flight.receiver is not None and flight.receiver.alive:
            self._cluster.engine.corrupt(flight)
        self._complete(flight, "broken")

    def _complete(self, flight: Flight, error: str | None) -> None:
        if self._flights.pop(flight.tag, None) is None:
            return
        sender, receiver = flight.sender, flight.receiver
        for node in (sender, receiver):
            if node is not None:
                node.flights.pop(flight.tag, None)
        if sender is not None and flight.sent:
            self._cluster.feed(sender, RunsSent(flight.sender_lease, error, len(flight.sent)))
        if receiver is not None and flight.posted:
            runs = len(flight.posted)
            self._cluster.feed(receiver, RunsReceived(flight.receiver_lease, flight.round, error, runs))
