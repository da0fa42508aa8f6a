"""The live host of a worker's machine, with a real engine and a bus that a test holds: steps planned ahead or not."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import pytest
import structlog
import torch
from prometheus_client import CollectorRegistry

from cohort.common import grammar
from cohort.common.config import load_config
from cohort.common.engine.config.device_memory import DeviceShare
from cohort.common.engine.runner.draft_loading import load_draft, plan_draft
from cohort.common.engine.step import grammar_masks
from cohort.common.engine.step.batch import StepBatch
from cohort.common.engine.step.grammar_masks import GrammarMasks
from cohort.common.engine.worker.engine_threads import StepUnderWay, device_of
from cohort.common.engine.worker.worker_loop import WorkerLoop
from cohort.common.engine.worker.worker_process import capacity_of
from cohort.common.machines.worker.plan_ahead import StepEndForecast
from cohort.common.machines.worker.worker import WorkerMachine
from cohort.common.machines.worker.worker_state import WorkerSettings, WorkerSetup
from cohort.common.messages import Message, SegmentEnded, StartSegment, TokenBatch
from cohort.common.policies import compose
from cohort.common.policies.interface import IterationPlan
from cohort.common.policies.settings import placed
from cohort.common.process.service import ServiceContext
from cohort.common.sequence import Sequence
from cohort.common.types import Attempt, FinishReason, Request, Role, SamplingParams, Segment
from tests.common.engine.driver import make_runner, random_prompts, save_random_model
from tests.engine_models import CONFIGS
from tests.services.gateway.tiny_model import byte_level

ModelFolder = Callable[[str], Path]


@dataclass
class HeldBus:
    """Takes what is said, and hands over what the test puts in."""

    endpoint: str = "inproc://worker"
    inbox: asyncio.Queue[tuple[str, Message]] = field(default_factory=asyncio.Queue)
    said: list[Message] = field(default_factory=list)
    heard: asyncio.Event = field(default_factory=asyncio.Event)

    def connect(self, peer: str, endpoint: str) -> None:
        pass

    def disconnect(self, peer: str) -> None:
        pass

    def watch(self, lost: Callable[[str], None]) -> None:
        pass

    def send(self, peer: str, message: Message) -> None:
        self.said.append(message)
        self.heard.set()

    async def receive(self) -> tuple[str, Message]:
        return await self.inbox.get()

    def take(self) -> tuple[str, Message] | None:
        return None if self.inbox.empty() else self.inbox.get_nowait()

    async def close(self) -> None:
        pass

    def updates(self) -> dict[str, tuple[list[int], FinishReason | None]]:
        """By request: its tokens, and how it ended."""
        found: dict[str, tuple[list[int], FinishReason | None]] = {}
        for message in self.said:
            for update in message.updates if isinstance(message, TokenBatch) else ():
                tokens, _ = found.get(update.attempt.request_id, ([], None))
                found[update.attempt.request_id] = ([*tokens, *update.tokens], update.finish)
        return found

    async def until(self, done: Callable[[], bool]) -> None:
        async with asyncio.timeout(120):
            while not done():
                self.heard.clear()
                await self.heard.wait()


@dataclass
class Running:
    bus: HeldBus
    machine: WorkerMachine
    registry: CollectorRegistry
    runner: Any
    penalised_behind: int = 0
    """Steps behind another one with rows whose penalties look back on it."""


@asynccontextmanager
async def worker(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    plan_ahead: bool,
    device_steps: bool,
    preset: str = "",
    speculation: str = "off",
    draft: Path | None = None,
    max_rows: int = 8,
    pause_s: float = 0.01,
) -> AsyncIterator[Running]:
    """`pause_s`: before each step, or a tiny model's is over before the event loop can plan another; none begins before
    the loop has asked for its successor, however late it comes to that."""
    engine_options = {"plan_ahead": plan_ahead, "max_rows": max_rows, "prefill_chunk": 12}
    speculates = {"mode": speculation, "draft_model": str(draft or "")}
    overrides = {"engine": engine_options, "speculation": speculates}
    config = load_config(preset=preset, overrides=placed(overrides))
    share = DeviceShare(graphs=1 << 40)
    engine = ThreadPoolExecutor(1)
    runner = make_runner(folder, device_steps=device_steps, share=share, num_blocks=80)
    plan = plan_draft(config, folder, runner.geometry, dtype="float32", device=runner.device, degree=1)
    if plan is not None:
        graphs = 1 << 40 if runner.samples_on_device else 0
        plan = dataclasses.replace(plan, block_size=runner.block_size, graph_bytes=graphs)
        runner.drafter = load_draft(plan, config, runner)
    runner.warm_up()
    begin, ahead, asked = runner._begin, WorkerLoop._plan_ahead, threading.Semaphore(0)

    def slow(batch: Any) -> Any:
        time.sleep(pause_s)
        assert asked.acquire(timeout=20)
        return begin(batch)

    async def told(self: WorkerLoop, step: StepUnderWay) -> StepUnderWay | None:
        try:
            return await ahead(self, step)
        finally:
            asked.release()

    if plan_ahead:
        monkeypatch.setattr(runner, "_begin", slow)
        monkeypatch.setattr(WorkerLoop, "_plan_ahead", told)
    bus, registry = HeldBus(), CollectorRegistry()
    log = structlog.get_logger("test")

    class Clock:
        def now_s(self) -> float:
            return time.monotonic()

    context = ServiceContext(config, "unified-0", "unified", 1, bus, log, Clock(), registry, tmp_path)  # type: ignore[arg-type]
    capacity = capacity_of(config, Role.UNIFIED, runner, "tiny")
    machine = WorkerMachine(
        WorkerSetup("unified-0", 1, bus.endpoint, "manager", capacity, WorkerSettings.of(config, ())),
        compose.iteration(config),
        compose.allocation(config, capacity.geometry, capacity.num_blocks, 0),
        Random(0),
    )
    loop = asyncio.create_task(WorkerLoop(context, device_of(runner), {}, machine, machine, None, engine).run())
    try:
        yield Running(bus, machine, registry, runner)
    finally:
        context.stopping.set()
        await loop
        engine.shutdown()


def request(name: str, prompt: list[int], *, owner: str = "", **sampling: Any) -> tuple[str, Message]:
    asked = Request(Attempt(name, 1), "gateway", prompt, len(prompt), SamplingParams(**sampling), 0.0, owner=owner)
    return "manager", StartSegment(asked, [Segment(0, None, "unified-0")], 0, "inproc://gateway")


async def _answers(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    plan_ahead: bool,
    device_steps: bool,
    preset: str = "",
) -> tuple[Any, Running]:
    """Of seven requests that come in two waves, greedy and drawn, ended by length, by a stop token, with penalties; the
    last with a prompt of several chunks."""
    prompts = random_prompts((5, 17, 9, 3, 12, 8, 90))
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.9, "seed": 3},
        {"temperature": 1.0, "seed": 5, "top_p": 0.9, "logprobs": 2},
        {"temperature": 0.8, "seed": 8, "stop_token_ids": tuple(range(0, 199, 13)), "min_tokens": 6},
        {"temperature": 0.7, "seed": 9, "stop_token_ids": tuple(range(0, 199, 9))},
        {"temperature": 0.5, "seed": 7, "frequency_penalty": 0.7},
        {"temperature": 0.5, "seed": 4, "repetition_penalty": 1.3},
    ]
    lengths = (40, 31, 36, 40, 40, 12, 9)
    options: dict[str, Any] = {"plan_ahead": plan_ahead, "device_steps": device_steps, "preset": preset}
    async with worker(folder, tmp_path, monkeypatch, **options) as running:
        bus = running.bus
        launch = running.runner.launch

        def counted(batch: StepBatch) -> Any:
            running.penalised_behind += batch.needs_last_tokens
            return launch(batch)

        monkeypatch.setattr(running.runner, "launch", counted)
        asked = [
            request(f"r{index}", prompt, max_tokens=length, **kind)
            for index, (prompt, kind, length) in enumerate(zip(prompts, kinds, lengths, strict=True))
        ]
        for each in asked[:4]:
            bus.inbox.put_nowait(each)
        await bus.until(lambda: len(bus.updates().get("r0", ([], None))[0]) > 8)
        for each in asked[4:]:
            bus.inbox.put_nowait(each)
        await bus.until(lambda: sum(finish is not None for _, finish in bus.updates().values()) == len(asked))
        await bus.until(lambda: running.machine.idle)
        running.machine.check()
        assert running.machine.kv.owners() == {}
        return bus.updates(), running


@pytest.mark.parametrize("device_steps", [False, True])
async def test_the_same_tokens_with_steps_planned_ahead(
    model_folder: ModelFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device_steps: bool
) -> None:
    folder = model_folder("llama")
    after, plain = await _answers(folder, tmp_path, monkeypatch, plan_ahead=False, device_steps=device_steps)
    ahead, running = await _answers(folder, tmp_path, monkeypatch, plan_ahead=True, device_steps=device_steps)
    assert ahead == after
    assert plain.machine.counters.planned_ahead == 0
    counters = running.machine.counters
    assert counters.planned_ahead > 5
    assert counters.finished["stop"] > 0
    assert running.penalised_behind > 3, "penalties take the token in while the next step runs"


@pytest.mark.parametrize("device_steps", [False, True])
async def test_the_same_tokens_with_steps_begun_behind_prompts(
    model_folder: ModelFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device_steps: bool
) -> None:
    """Whenever they end: what a step with prompts takes is not foreseen so early."""
    folder = model_folder("llama")
    options: dict[str, Any] = {"device_steps": device_steps, "preset": "unified"}
    after, _ = await _answers(folder, tmp_path, monkeypatch, plan_ahead=False, **options)
    monkeypatch.setattr(StepEndForecast, "plan_after_s", lambda self, plan, times: 0.0)
    behind_prompts = chunks = 0
    begin = WorkerLoop._begin

    def counted(self: WorkerLoop, plan: IterationPlan, running: list[Sequence] | None = None) -> StepUnderWay:
        nonlocal behind_prompts, chunks
        flying = self._machine.plan_in_flight
        behind_prompts += running is not None and flying is not plan and any(row.count > 1 for row in flying.rows)
        chunks += running is not None and any(row.count > 1 for row in plan.rows)
        return begin(self, plan, running)

    monkeypatch.setattr(WorkerLoop, "_begin", counted)
    ahead, _ = await _answers(folder, tmp_path, monkeypatch, plan_ahead=True, **options)
    assert ahead == after
    assert behind_prompts > chunks > 0


@pytest.mark.parametrize("device_steps", [False, True])
async def test_a_grammar_binds_the_same_tokens_with_steps_begun_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device_steps: bool
) -> None:
    """Beside a row without one, whose steps are not kept waiting."""
    folder = save_random_model(CONFIGS["llama"](), tmp_path / "m")  # whose end token is the tokenizer's
    byte_level().save(str(folder / "tokenizer.json"))
    answers = []
    for plan_ahead in (False, True):
        with monkeypatch.context() as patch:
            async with worker(folder, tmp_path, patch, plan_ahead=plan_ahead, device_steps=device_steps) as running:
                bus = running.bus
                digits = grammar.of_regex("[0-9]{20}")
                bus.inbox.put_nowait(
                    request(
                        "bound", [5, 6, 7], max_tokens=40, temperature=0.9, seed=4, grammar=digits, stop_token_ids=(2,)
                    )
                )
                bus.inbox.put_nowait(request("free", [8, 9], max_tokens=30, temperature=0.9, seed=5))
                await bus.until(lambda: sum(finish is not None for _, finish in bus.updates().values()) == 2)  # noqa: B023
                answers.append(bus.updates())
                planned = running.machine.counters.planned_ahead
                assert planned > 10 if plan_ahead else planned == 0
    assert answers[0] == answers[1]
    tokens, finish = answers[1]["bound"]
    assert finish is FinishReason.STOP and byte_level().decode(tokens).strip("\x00").isdecimal()


def late_in_turn(prepare: Callable[..., None]) -> Callable[..., None]:
    """Every other step has no time for masks."""
    looks = itertools.count()

    def begin(self: GrammarMasks, *args: Any) -> None:
        prepare(self, *args)
        self._left_s = 10.0 * (next(looks) % 2)

    return begin


@pytest.mark.parametrize("device_steps", [False, True])
@pytest.mark.parametrize("plan_ahead", [False, True])
async def test_rows_that_sit_steps_out_have_the_same_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device_steps: bool, plan_ahead: bool
) -> None:
    """Every other step has no time for masks, or none has any: penalties count no token twice then either."""
    folder = save_random_model(CONFIGS["llama"](), tmp_path / "m")
    byte_level().save(str(folder / "tokenizer.json"))
    monkeypatch.setattr(StepEndForecast, "plan_after_s", lambda self, plan, times: 0.0)
    digits: dict[str, Any] = {"grammar": grammar.of_regex("[0-9]{20}"), "stop_token_ids": (2,), "max_tokens": 40}
    answers, late = [], []  # of the first also while its grammar is compiled
    for step_s, in_turn in ((10.0, False), (10.0, True), (0.0, False)):
        with monkeypatch.context() as patch:
            patch.setattr(grammar_masks, "STEP_S", step_s)
            if in_turn:
                patch.setattr(GrammarMasks, "prepare", late_in_turn(GrammarMasks.prepare))
            async with worker(folder, tmp_path, patch, plan_ahead=plan_ahead, device_steps=device_steps) as running:
                bus = running.bus
                for name, sampling in {
                    "sampled": digits | {"temperature": 0.9, "seed": 4},
                    "greedy": digits | {"temperature": 0.0, "frequency_penalty": 0.7, "logprobs": 1},
                    "free": {"temperature": 0.9, "seed": 5, "max_tokens": 30},
                }.items():
                    bus.inbox.put_nowait(request(name, [5, 6, 7 + len(name)], **sampling))
                await bus.until(lambda: sum(finish is not None for _, finish in bus.updates().values()) == 3)  # noqa: B023
                answers.append(bus.updates())
                late.append(running.machine.counters.late_rows)
    assert answers[0] == answers[1] == answers[2]
    assert late[1] > 15 and late[2] > 0


async def test_a_failed_step_costs_its_requests_and_nothing_else(
    model_folder: ModelFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = random_prompts((6,))[0]
    async with worker(model_folder("llama"), tmp_path, monkeypatch, plan_ahead=True, device_steps=False) as running:
        bus, runner, calls = running.bus, running.runner, 0
        begin = runner._begin

        def broken(batch: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == 12:
                raise RuntimeError("broken")
            return begin(batch)

        monkeypatch.setattr(runner, "_begin", broken)
        bus.inbox.put_nowait(request("a", prompt, max_tokens=60, temperature=0.0))
        await bus.until(lambda: any(isinstance(said, SegmentEnded) for said in bus.said))
        (ended,) = [said for said in bus.said if isinstance(said, SegmentEnded)]
        assert (ended.attempt.request_id, ended.outcome.value) == ("a", "failed")
        assert running.machine.idle and running.machine.kv.owners() == {}
        bus.inbox.put_nowait(request("b", prompt, max_tokens=20, temperature=0.0))
        await bus.until(lambda: len(bus.updates().get("b", ([], None))[0]) == 20)
        first, second = bus.updates()["a"][0], bus.updates()["b"][0]
        assert second[: len(first)] == first[:20]
        assert torch.isfinite(runner.kv.blocks).all()
