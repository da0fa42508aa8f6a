"""Two gateways that reach one manager each, and workers that reach both: the leadership goes to and fro (ADR 13)."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import msgspec

from cohort.common.machines.effects import ManagerEffect, Send, WorkerEffect
from cohort.common.machines.events import Received, ReportDue, Tick
from cohort.common.machines.gateway.peers import ManagerLink
from cohort.common.machines.manager.manager import ManagerMachine, ManagerSettings
from cohort.common.machines.worker.worker import WorkerMachine
from cohort.common.messages import (
    AttemptsLost,
    Cancel,
    ClusterLoad,
    GatewayHello,
    ManagerHello,
    Message,
    Outstanding,
    Placed,
    Submit,
)
from cohort.common.policies.baselines.fcfs import Fcfs
from cohort.common.policies.baselines.placements import Colocated
from cohort.common.types import Attempt, Request, Role, SamplingParams
from tests.common.machines import small_worker

MANAGERS = ("manager", "manager-1")
REACHES = {"g0": "manager", "g1": "manager-1"}
WORKER = "unified"
STEP_S = 0.05


class Divided:
    """Messages take no time; a step of the worker is never done, so that what it was given runs on."""

    def __init__(self) -> None:
        self.managers = {
            name: ManagerMachine(
                name,
                7 + rank,
                ManagerSettings(3.0, 2.0, 0.2, 100, rank, len(MANAGERS)),
                Fcfs(dispatch_ahead_tokens=10_000),
                Colocated(),
                None,
                0.0,
            )
            for rank, name in enumerate(MANAGERS)
        }
        self.links = {
            name: ManagerLink(GatewayHello(name, 1, f"at-{name}"), load_interval_s=0.2, managers=MANAGERS)
            for name in REACHES
        }
        self.worker = _worker()
        self.now_s = 0.0
        self.placed_s: dict[str, list[float]] = {name: [] for name in REACHES}
        self.ended: list[Message] = []
        self.running: dict[str, list[Attempt]] = {name: [] for name in REACHES}
        self.waiting: dict[str, Request] = {}
        self.serial = 0
        self.divided = False

    def run(self, seconds: float) -> None:
        until_s = self.now_s + seconds
        while self.now_s < until_s - 1e-9:
            self.now_s += STEP_S
            tick = round(self.now_s / STEP_S)
            for name, link in self.links.items():
                for manager, hello in link.due_hellos(self.now_s):
                    self.send(name, manager, hello)
                if tick % 20 == 0:
                    self.send(name, link.manager, Outstanding([*self.running[name]]))
            for name, manager in self.managers.items():
                self.perform(name, manager.handle(self.now_s, Tick()))
            if tick % 4 == 0:
                self.perform(WORKER, self.worker.handle(self.now_s, ReportDue(0)))

    def ask(self, gateway: str) -> None:
        """Once its manager leads; as a gateway does."""
        self.serial += 1
        request = Request(Attempt(f"r{self.serial}", 0), gateway, [1, 2, 3], 3, SamplingParams(max_tokens=60), 0.0)
        self.waiting[gateway] = request
        self.submit(gateway)

    def submit(self, gateway: str) -> None:
        link = self.links[gateway]
        if gateway in self.waiting and link.known(self.now_s):
            self.send(gateway, link.manager, Submit(self.waiting[gateway]))

    def send(self, sender: str, receiver: str, message: Message) -> None:
        ends = {sender, receiver}
        for gateway, manager in REACHES.items():
            if self.divided and gateway in ends and ends & set(MANAGERS) - {manager}:
                return
        if receiver in self.managers:
            self.perform(receiver, self.managers[receiver].handle(self.now_s, Received(sender, message)))
        elif receiver == WORKER:
            self.perform(WORKER, self.worker.handle(self.now_s, Received(sender, message)))
        elif receiver in self.links:
            self.hear(receiver, sender, message)

    def hear(self, gateway: str, manager: str, message: Message) -> None:
        link = self.links[gateway]
        link.note_alive(self.now_s, manager)
        match message:
            case ManagerHello():
                if link.on_hello(self.now_s, manager, message):
                    self.send(gateway, manager, Outstanding([*self.running[gateway]]))
                    if gateway in self.waiting:  # as the next attempt
                        request = self.waiting[gateway]
                        attempt = Attempt(request.request_id, request.attempt.number + 1)
                        self.waiting[gateway] = msgspec.structs.replace(request, attempt=attempt)
                self.submit(gateway)
            case ClusterLoad():
                link.on_load(message)
            case Placed(attempt=attempt):
                self.placed_s[gateway].append(self.now_s)
                self.running[gateway].append(attempt)
                self.waiting.pop(gateway, None)
            case AttemptsLost():
                self.ended.append(message)
            case _:
                pass

    def perform(self, name: str, effects: Sequence[ManagerEffect | WorkerEffect]) -> None:
        for effect in effects:
            match effect:
                case Send(peer=peer, message=message):
                    if isinstance(message, Cancel):
                        self.ended.append(message)
                    self.send(name, peer, message)
                case _:
                    pass

    @property
    def takeovers(self) -> int:
        return sum(manager.counters.takeovers for manager in self.managers.values())


def _worker() -> WorkerMachine:
    worker = small_worker.machine(Role.UNIFIED)
    setup = msgspec.structs.replace(worker.setup, standbys=MANAGERS[1:])
    return WorkerMachine(setup, worker.scheduler, worker.kv, Random(0))


def test_each_is_served_in_its_turn_nothing_that_runs_is_ended_and_it_ends_with_the_division() -> None:
    world = Divided()
    world.run(3.0)
    for gateway in REACHES:
        world.ask(gateway)
    world.run(1.0)
    assert {name: len(running) for name, running in world.running.items()} == {"g0": 1, "g1": 1}
    assert world.takeovers == 1

    world.divided = True
    waits_s = []
    for _ in range(8):
        asked_s = world.now_s
        for gateway in REACHES:
            world.ask(gateway)
        world.run(4.0)
        assert not world.waiting
        waits_s += [world.placed_s[gateway][-1] - asked_s for gateway in REACHES]
    assert max(waits_s) < 2.5, "the rest of the one that was replaced, and what it takes to be asked again"
    assert 8 <= world.takeovers <= 20
    assert world.ended == [], "neither cancelled nor lost: none leads for as long as it takes to miss an owner"

    world.divided = False
    world.run(4.0)
    before = world.takeovers
    world.run(6.0)
    assert world.takeovers == before and sum(manager.leads for manager in world.managers.values()) == 1
    assert len({link.manager for link in world.links.values()}) == 1
    assert world.ended == []
