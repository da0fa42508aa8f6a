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
    """One process of the virtual cluster. A process that is started again is another node of the same name."""

    name: InstanceId
    machine: Any
    handle: Callable[..., list[Any]] = field(init=False)
    """The machine's verb, as the host wants it called."""
    alive: bool = True
    frozen_until_s: float = float("-inf")
    """End of a stop; events before it are handled then."""
    wake_s: float = float("inf")
    """Time of the tick that the machine's last `Wake` requested."""

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
    """Factory of the machines. `incarnation` differs for every process that is started."""

    def make_gateway(self, name: InstanceId, incarnation: int, now_s: float) -> GatewayMachine: ...

    def make_manager(self, name: InstanceId, incarnation: int, now_s: float) -> ManagerMachine: ...

    def make_worker(self, name: InstanceId, incarnation: int, now_s: float) -> WorkerNode: ...


class Engine(Protocol):
    """Computes a worker's steps and holds its KV. Ends every step with `VirtualCluster.tell(node, StepEnded(…))`."""

    def begin(self, node: WorkerNode, step: StartStep) -> None: ...

    def before_events(self, node: WorkerNode, events: tuple[WorkerEvent, ...]) -> None:
        """Prepare for events that the worker gets next: steps foreseen beyond this moment may not hold."""

    def after_events(self, node: WorkerNode, events: tuple[WorkerEvent, ...], effects: list[Any]) -> None:
        """Learn the effects of those events, before they are performed."""

    def copy(self, flight: Flight) -> None:
        """Write the bytes of a flight that landed."""

    def corrupt(self, flight: Flight) -> None:
        """Overwrite the target of a flight that broke: anything may stand there."""

    def died(self, node: WorkerNode) -> None: ...


class Network(Protocol):
    """Model of when messages and KV arrive, if they do."""

    whole_sends: bool
    """Whether the runs of one `SendRuns` land together; else each by itself."""
    run_timeout_s: float
    """Time after which a run breaks if its other end is not posted."""

    def arrivals(self, now_s: float, source: InstanceId, target: InstanceId, message: Message) -> Iterable[float]:
        """Return a message's arrivals: one, none, or several. The order of each pair is the network's promise."""

    def decoded(self, message: Message) -> Message:
        """Return the message as its receiver reads it."""

    def landing_s(self, now_s: float, flight: Flight) -> float:
        """Return when the bytes of a flight that starts now have arrived."""

    def breaks(self, flight: Flight) -> bool:
        """Return whether this flight fails in transit."""

    def break_delay_s(self) -> float:
        """Return how much later both ends of a broken flight learn of it."""


class Clients(Protocol):
    """Source of requests and sink of tokens; also the length predictor, which only gateways ask."""

    def on_effect(self, gateway: Node, effect: Any) -> None:
        """Receive a gateway's effect for its own process: a decision about a request, tokens, an error."""

    def send_to_predictor(self, gateway: Node, message: Message) -> None:
        """Receive a gateway's message to the length predictor."""


@dataclass(frozen=True, slots=True)
class Cadence:
    """Intervals of a host's periodic actions, in seconds. 0 = only when the machine's `Wake` asks, or, for workers'
    ticks, together with the report."""

    report_s: float
    worker_tick_s: float
    manager_tick_s: float
    gateway_tick_s: float
    adapter_load_s: float = 0.0
    """Time that a worker takes to load a LoRA adapter."""


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
    arrived: bool = False
    broken: bool = False

    @property
    def num_blocks(self) -> int:
        return sum(run.num_blocks for run in self.sent)
