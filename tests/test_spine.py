"""The page that follows one request through all processes (docs/architecture.md, "The spine") says what runs.

A streamed chat of a few tokens goes through a gateway, a manager and a worker with a tiny model, in one process. Every
place that the page names is called, in the page's order; and the page is short enough to be read.
"""

from __future__ import annotations

import ast
import asyncio
import re
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
import pytest
import torch
from prometheus_client import CollectorRegistry

from cohort.common.clock import SystemClock
from cohort.common.config import Config, load_config
from cohort.common.engine.worker.engine_threads import device_of
from cohort.common.engine.worker.worker_loop import WorkerLoop
from cohort.common.engine.worker.worker_process import capacity_of
from cohort.common.machines.worker.worker import WorkerMachine
from cohort.common.machines.worker.worker_state import WorkerSettings, WorkerSetup
from cohort.common.policies import compose
from cohort.common.process.logs import configure_logging
from cohort.common.process.service import ServiceContext
from cohort.common.transport.memory_bus import MemoryBus, MemoryNetwork
from cohort.common.types import Role
from cohort.services.bucketing_manager.service import ManagerService
from cohort.services.gateway.service import Gateway, load_model
from tests.e2e.tiny_models import llama
from tests.engine_models import make_runner
from tests.services.gateway.cluster import Predictor
from tests.services.gateway.conftest import eventually
from tests.services.gateway.generation.test_one_request import CAP
from tests.services.gateway.tiny_model import write_model
from tests.support.traced import ROOT, Trace, recording

MOST_LINES = 1500
CHAT = {"messages": [{"role": "user", "content": "Tell me"}], "max_tokens": 8, "stream": True, "ignore_eos": True}
Place = tuple[str, str]
"""A file below the root, and a qualified name in it."""


def spine() -> str:
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    return page.split("\n## The spine\n")[1].split("\n## ")[0]


def spine_steps(text: str) -> list[list[Place]]:
    """The places of each row of its table."""
    rows = [row.split("|")[3] for row in text.splitlines() if re.match(r"\| *\d+ \|", row)]
    found = []
    for row in rows:
        places: list[Place] = []
        for name in re.findall(r"`([^`]+)`", row):
            if name.endswith(".py"):
                file = name
            else:
                places.append((file, name))
        found.append(places)
    return found


def lengths(file: str) -> dict[str, int]:
    """Lines of every class and function, by qualified name."""
    found: dict[str, int] = {}

    def look(node: ast.AST, before: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                assert child.end_lineno is not None
                found[before + child.name] = child.end_lineno - child.lineno + 1
                look(child, f"{before}{child.name}.")

    look(ast.parse((ROOT / file).read_text(encoding="utf-8")), "")
    return found


def faults_of(text: str, called: list[Place]) -> list[str]:
    """What is wrong with the page. `called`: functions in the order of their first calls."""
    rows, lines, wrong, last = spine_steps(text), 0, [], -1
    if not 10 <= len(rows) <= 14:
        wrong.append(f"{len(rows)} steps")
    for number, places in enumerate(rows, 1):
        for file, name in places:
            known = lengths(file) if (ROOT / file).is_file() else {}
            if name not in known:
                wrong.append(f"step {number}: there is no {name} in {file}")
                continue
            lines += known[name]
            # A class stands for its methods.
            at = next((at for at, (f, n) in enumerate(called) if f == file and f"{n}.".startswith(f"{name}.")), None)
            if at is None:
                wrong.append(f"step {number}: {name} was not called")
            elif name == places[0][1]:
                if at < last:
                    wrong.append(f"step {number}: {name} was called before the step above")
                last = at
    if lines > MOST_LINES:
        wrong.append(f"{lines} lines are more than {MOST_LINES}")
    return wrong


class ToldBus:
    """A bus that notes the types of messages that it is given."""

    def __init__(self, bus: MemoryBus, said: set[str]) -> None:
        self._bus = bus
        self._said = said

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bus, name)

    def send(self, peer: str, message: Any) -> None:
        self._said.add(type(message).__name__)
        self._bus.send(peer, message)


@asynccontextmanager
async def pipeline(folder: Path, run_dir: Path, said: set[str]) -> AsyncIterator[str]:
    """Its URL."""
    config: Config = load_config(
        overrides={
            "model": {"path": str(folder)},
            "workers": [{"role": "unified"}],
            "gateway": {"port": 0},
            "state": {"folder": str(run_dir)},
            "endpoints": {"manager": "memory://manager", "predictor": "memory://predictor"},
            "logging": {"level": "error"},
        }
    )
    network, stopping = MemoryNetwork(), []

    def context(instance: str, role: str) -> ServiceContext:
        log = configure_logging(config.logging, service=role, instance=instance)
        bus: Any = ToldBus(network.bus(instance), said)
        made = ServiceContext(config, instance, role, 1, bus, log, SystemClock(), CollectorRegistry(), run_dir)
        stopping.append(made.stopping)
        return made

    predicting: Any = Predictor(network)
    predicting.bus = ToldBus(predicting.bus, said)
    predictor = asyncio.create_task(predicting.run())
    manager = asyncio.create_task(ManagerService(context("manager", "manager")).run())
    gateway_context, worker_context = context("gateway", "gateway"), context("unified-0", "unified")
    gateway = asyncio.create_task(Gateway(gateway_context, *load_model(config)).run())
    runner = make_runner(folder)
    runner.warm_up()
    capacity = capacity_of(config, Role.UNIFIED, runner, "tiny")
    machine = WorkerMachine(
        WorkerSetup("unified-0", 1, "memory://unified-0", "manager", capacity, WorkerSettings.of(config, ())),
        compose.iteration(config),
        compose.allocation(config, capacity.geometry, capacity.num_blocks, 0),
        Random(0),
    )
    with ThreadPoolExecutor(1) as engine:
        worker = asyncio.create_task(
            WorkerLoop(worker_context, device_of(runner), {}, machine, machine, None, engine).run()
        )
        try:
            await eventually(lambda: gateway_context.ready and bool(gateway_context.metrics_url), 60.0)
            yield gateway_context.metrics_url.removesuffix("/metrics")
        finally:
            for event in stopping:
                event.set()
            predictor.cancel()
            await asyncio.gather(gateway, manager, worker)


@pytest.fixture(scope="module")
def one_request(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[list[Place], set[str]]]:
    """The functions that ran, by their first calls, and the messages that were sent."""
    folder = write_model(tmp_path_factory.mktemp("models") / "tiny")
    torch.manual_seed(3)
    llama().save_pretrained(folder)
    said: set[str] = set()

    async def ask(trace: Trace) -> None:
        async with pipeline(folder, tmp_path_factory.mktemp("run"), said) as url, aiohttp.ClientSession() as session:
            said.clear()
            trace.on = True
            async with session.post(f"{url}/v1/chat/completions", json=CHAT) as response:
                assert response.status == 200, await response.text()
                assert (await response.read()).endswith(b"data: [DONE]\n\n")
            trace.on = False

    with recording() as trace:
        asyncio.run(ask(trace))
    yield list(trace.calls), said


def test_the_page_says_what_runs(one_request: tuple[list[Place], set[str]]) -> None:
    assert faults_of(spine(), one_request[0]) == []


def test_every_message_of_the_request_is_named(one_request: tuple[list[Place], set[str]]) -> None:
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    wanted = {"Submit", "Placed", "StartSegment", "TokenBatch", "PredictLength", "Predicted"}
    assert wanted <= one_request[1]
    assert all(f"`{name}`" in page for name in wanted)


def test_the_page_quotes_the_cap() -> None:
    assert f"{CAP} files" in spine()


@pytest.mark.parametrize(
    ("old", "new", "wrong"),
    [
        ("`Streams.offer`", "`Streams.offers`", "there is no Streams.offers"),
        ("`GatewayMachine.handle`", "`GatewayMachine._undelivered`", "was not called"),
        ("`sample`", "`sample`; `services/gateway/service.py`: `Gateway`", "lines are more than"),
    ],
)
def test_a_page_that_is_wrong_is_found(
    one_request: tuple[list[Place], set[str]], old: str, new: str, wrong: str
) -> None:
    assert spine().count(old) == 1
    found = faults_of(spine().replace(old, new), one_request[0])
    assert any(wrong in each for each in found), found


def test_steps_out_of_order_are_found(one_request: tuple[list[Place], set[str]]) -> None:
    rows = [row for row in spine().splitlines() if re.match(r"\| *\d+ \|", row)]
    swapped = "\n".join([*rows[:3], rows[8], *rows[4:8], rows[3], *rows[9:]])
    assert any("before the step above" in each for each in faults_of(swapped, one_request[0]))
