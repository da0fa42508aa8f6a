"""The parts that a host of the virtual cluster brings: how machines are made, an engine, a network, clients."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

from cohort.common.machines.effects import Run, StartStep
from cohort.common.machines.events import WorkerEvent
from cohort.common.machines.gateway.gateway import GatewayMachine
from cohort.common.machines.manager.manager import ManagerMachine
from cohort.common.machines.worker.worker import WorkerMachine
from cohort.common.messages import Message
from cohort.common.types import InstanceId


@dataclass(slots=True, eq=False)
class Node:
    """One process of the virtual cluster: its machine, and whether it is there. A process that is started again is
    another node of the same name."""

    name: InstanceId
    machine: Any
    handle: Callable[..., list[Any]] = field(init=False)
    """The machine's verb, as the host wants it called."""
    alive: bool = True
    frozen_until_s: float = float("-inf")
    """Stopped, not killed: events before then are handled then."""
    wake_s: float = float("inf")
    """When its machine's last `Wake` asks for a tick."""

    def __post_init__(self) -> None:
        self.handle = self.machine.handle


@dataclass(slots=True, eq=False)
class WorkerNode(Node):
    """A worker. `number` counts workers from 0 and names its ports; `step` belongs to the engine."""

    number: int = 0
    flights: dict[int, Flight] = field(default_factory=dict)
    """KV runs that this worker has posted at either end, by their first tag."""

    @property
    def worker(self) -> WorkerMachine:
        machine: WorkerMachine = self.machine
        return machine


class Builder(Protocol):
    """Makes the machines. `incarnation` is another number for every process that is started."""

    def make_gateway(self, name: InstanceId, incarnation: int, now_s: float) -> GatewayMachine: ...

    def make_manager(self, name: InstanceId, incarnation: int, now_s: float) -> ManagerMachine: ...

    def make_worker(self, name: InstanceId, incarnation: int, now_s: float) -> WorkerNode: ...


class Engine(Protocol):
    """Computes a worker's steps and holds its KV. Ends every step with `VirtualCluster.tell(node, StepEnded(…))`."""

    def begin(self, node: WorkerNode, step: StartStep) -> None: ...

    def about_to_tell(self, node: WorkerNode, events: tuple[WorkerEvent, ...]) -> None:
        """These events are about to reach the worker: the steps foreseen beyond this moment may not hold."""

    def told(self, node: WorkerNode, events: tuple[WorkerEvent, ...], effects: list[Any]) -> None:
        """The worker has answered, and these effects are about to be performed."""

    def copy(self, flight: Flight) -> None:
        """The flight has landed: its bytes are now where they should be."""

    def scribble(self, flight: Flight) -> None:
        """The flight broke: anything may stand where its bytes should be."""

    def died(self, node: WorkerNode) -> None: ...


class Network(Protocol):
    """When messages and KV arrive, if they do."""

    whole_sends: bool
    """The runs of one `SendRuns` land together; else each by itself."""
    run_timeout_s: float
    """A run whose other end is not posted by then breaks."""

    def arrivals(self, now_s: float, source: InstanceId, target: InstanceId, message: Message) -> Iterable[float]:
        """When a message arrives: once, not at all, or more than once. Order per pair is the network's promise."""

    def travelled(self, message: Message) -> Message:
        """The message as its receiver reads it."""

    def landing_s(self, now_s: float, flight: Flight) -> float:
        """When the bytes of a flight that starts now are there."""

    def breaks(self, flight: Flight) -> bool:
        """Whether this flight fails on its way."""

    def break_delay_s(self) -> float:
        """How much later both ends of a broken flight hear of it."""


class Clients(Protocol):
    """Where requests come from and tokens go; also the length predictor, whom only gateways ask."""

    def hear(self, gateway: Node, effect: Any) -> None:
        """A gateway's effect that is meant for its own process: a decision about a request, tokens, an error."""

    def ask_predictor(self, gateway: Node, message: Message) -> None:
        """A gateway's word to the length predictor."""


@dataclass(frozen=True, slots=True)
class Cadence:
    """Intervals of a host's unasked actions, in seconds. 0 = only when the machine's `Wake` asks, or,
    for workers' ticks, together with the report."""

    report_s: float
    worker_tick_s: float
    manager_tick_s: float
    gateway_tick_s: float
    adapter_load_s: float = 0.0
    """What a worker takes to load a LoRA adapter."""


@dataclass(slots=True, eq=False)
class Flight:
    """Runs that land together. `sent` and `posted` are the same runs as either end names them; () until it has."""

    tag: int
    sender: WorkerNode | None = None
    sender_lease: int = 0
    sent: tuple[Run, ...] = ()
    from_host: bool = False
    receiver: WorkerNode | None = None
    receiver_lease: int = 0
    round: int = 0
    posted: tuple[Run, ...] = ()
    landed: bool = False
    broken: bool = False

    @property
    def num_blocks(self) -> int:
        return sum(run.num_blocks for run in self.sent)
