"""A scripted manager and workers on a memory bus: what a gateway needs to believe in a cluster.

Every token is a pure function of the request and its position, as with real workers, so a stream that was moved,
repeated or recovered must show exactly the same text.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field

from cohort.common.errors import PeerUnreachable
from cohort.common.messages import (
    AttemptsLost,
    Cancel,
    ClusterLoad,
    GatewayHello,
    ManagerHello,
    Message,
    ObserveLength,
    Outstanding,
    Placed,
    PooledStates,
    Predicted,
    PredictLength,
    RevisePrediction,
    StageTimes,
    Submit,
    TokenBatch,
    TokenLogprob,
    TokenUpdate,
)
from cohort.common.transport.memory_bus import MemoryBus, MemoryNetwork
from cohort.common.types import Attempt, EngineFacts, FinishReason, Prediction, Request
from tests.services.gateway.tiny_model import WIDTH

Script = Callable[[Request], list[int]]
Gate = Callable[[], Awaitable[object]]
LOAD = ClusterLoad(
    ready=True,
    instances=["worker-0"],
    waiting=0,
    waiting_tokens=0,
    running=0,
    free_tokens=10_000,
    total_tokens=10_000,
    max_model_len=0,
    drain_rate=2.0,
    engines=[EngineFacts("NVIDIA H200", "9.0", kernels="triton")],
)


@dataclass
class Manager:
    """Answers greetings, places every request on a worker, and remembers what it was told."""

    network: MemoryNetwork
    script: Script
    incarnation: int = 1
    workers: list[Worker] = field(default_factory=list)
    submitted: list[Request] = field(default_factory=list)
    cancelled: list[Attempt] = field(default_factory=list)
    outstanding: list[list[Attempt]] = field(default_factory=list)
    revised: list[RevisePrediction] = field(default_factory=list)
    load: ClusterLoad = LOAD
    place: bool = True
    step_s: float = 0.0
    gate: Gate | None = None
    """What workers await before each token."""

    def __post_init__(self) -> None:
        self.bus: MemoryBus = self.network.bus("manager")
        if not self.workers:
            self.add_worker("worker-0")

    def add_worker(self, name: str) -> Worker:
        worker = Worker(self, name)
        self.workers.append(worker)
        return worker

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._report())
            while True:
                sender, message = await self.bus.receive()
                self.handle(sender, message, tasks)

    async def _report(self) -> None:
        while True:
            with suppress(PeerUnreachable):
                self.bus.send("gateway", self.load)
            await asyncio.sleep(0.05)

    def handle(self, sender: str, message: Message, tasks: asyncio.TaskGroup) -> None:
        match message:
            case GatewayHello():
                self.bus.send(sender, ManagerHello(self.incarnation))
                self.bus.send(sender, self.load)
            case Submit(request):
                self.submitted.append(request)
                if self.place:
                    living = [worker for worker in self.workers if not worker.dead]
                    worker = living[len(self.submitted) % len(living)]
                    self.bus.send(sender, Placed(request.attempt, [worker.name], 0.001, "scripted"))
                    worker.start(request, tasks)
            case Cancel(attempts):
                self.cancelled += attempts
                for worker in self.workers:
                    worker.cancel(attempts)
            case Outstanding(attempts):
                self.outstanding.append(attempts)
            case RevisePrediction():
                self.revised.append(message)
            case _:
                raise AssertionError(f"a manager does not expect {message}")

    def lose(self, attempts: list[Attempt], reason: str = "scripted loss") -> None:
        self.bus.send("gateway", AttemptsLost(attempts, reason))

    def held(self) -> list[Attempt]:
        return [held for worker in self.workers for held in worker.running]


class Worker:
    def __init__(self, manager: Manager, name: str) -> None:
        self.manager = manager
        self.name = name
        self.bus = manager.network.bus(name)
        self.bus.connect("gateway", "memory://gateway")
        self.running: dict[Attempt, asyncio.Task[None]] = {}
        self.cancelled: list[Attempt] = []
        self.dead = False

    def start(self, request: Request, tasks: asyncio.TaskGroup) -> None:
        held = request.attempt
        task = tasks.create_task(self._generate(request))
        self.running[held] = task
        task.add_done_callback(lambda _: self.running.pop(held, None))

    def cancel(self, attempts: list[Attempt]) -> None:
        for held in attempts:
            task = self.running.get(held)
            if task is not None:
                self.cancelled.append(held)
                task.cancel()

    def kill(self) -> list[Attempt]:
        """As kill -9; returns what is lost."""
        lost = list(self.running)
        self.dead = True
        for task in list(self.running.values()):
            task.cancel()
        self.manager.network.kill(self.name)
        return lost

    async def _generate(self, request: Request) -> None:
        output = self.manager.script(request)[: request.sampling.max_tokens]
        done = request.output_known
        first = True
        while done < len(output):
            await asyncio.sleep(self.manager.step_s)
            if self.manager.gate is not None:
                await self.manager.gate()
            token = output[done]
            done += 1
            finish = None
            if token in request.sampling.stop_token_ids:
                finish = FinishReason.STOP
            elif done == request.sampling.max_tokens:
                finish = FinishReason.LENGTH
            self.send(
                [
                    TokenUpdate(
                        attempt=request.attempt,
                        position=request.prompt_tokens + done - 1,
                        tokens=[token],
                        logprobs=scores(request, token),
                        finish=finish,
                        cached_tokens=1 if first else 0,
                        times=StageTimes(self.name, queue_s=0.001, prefill_s=0.002) if first else None,
                        prompt_logprobs=prompt_scores(request) if first else [],
                        pooled=pooled(request),
                    )
                ]
            )
            first = False
            if finish is not None:
                return

    def send(self, updates: list[TokenUpdate]) -> None:
        self.bus.send("gateway", TokenBatch(self.name, updates))


def scores(request: Request, token: int) -> list[TokenLogprob]:
    count = request.sampling.logprobs
    if count < 0:
        return []
    top = [(token + step) % 300 for step in range(count)]
    return [TokenLogprob(-0.25, top, [-0.25 - step for step in range(count)])]


def prompt_scores(request: Request) -> list[TokenLogprob]:
    """Of the prompt's tokens from the second on."""
    count = request.sampling.prompt_logprobs
    if count < 0:
        return []
    return [
        TokenLogprob(-0.5 - index, [(token + step) % 300 for step in range(count)], [-0.5 - index] * count)
        for index, token in enumerate(request.tokens[1 : request.prompt_tokens])
    ]


def state_of(token: int) -> list[float]:
    """The final hidden state of a position: eight numbers of its token alone."""
    return [float(token * (place + 1) % 7) for place in range(WIDTH)]


def pooled(request: Request) -> PooledStates | None:
    """The sum of the states that the request wants."""
    match request.sampling.pooling:
        case "":
            return None
        case "last":
            start = request.prompt_tokens - 1
        case "mean":
            start = 0
    tokens = request.tokens[start : request.prompt_tokens]
    sums = [sum(numbers) for numbers in zip(*map(state_of, tokens), strict=True)]
    return PooledStates(start, len(tokens), array("f", sums).tobytes())


@dataclass
class Predictor:
    network: MemoryNetwork
    delay_s: float = 0.0
    asked: list[PredictLength] = field(default_factory=list)
    observed: list[ObserveLength] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.bus = self.network.bus("predictor")

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            while True:
                sender, message = await self.bus.receive()
                match message:
                    case PredictLength():
                        self.asked.append(message)
                        tasks.create_task(self._answer(sender, message))
                    case ObserveLength():
                        self.observed.append(message)

    async def _answer(self, sender: str, message: PredictLength) -> None:
        if self.delay_s:
            await asyncio.sleep(self.delay_s)
        self.bus.send(sender, Predicted(message.request_id, Prediction(mean=7, p50=6, p90=12, p99=20)))
