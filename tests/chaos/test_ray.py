"""A pipeline on a Ray cluster: a node dies with its workers while 400 clients stream, and every stream says exactly
what an undisturbed run says. Ray brings back what was on the node, on another one."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from cohort.common.config import load_config
from cohort.common.http.ports import free_port
from cohort.common.types import Role
from cohort.services.global_monitor.launcher_orders import LauncherOrders, OrderFailed
from tests.chaos.ray_nodes import RayNodes, why_not
from tests.chaos.streams import bodies, same
from tests.e2e.pipeline import Answer, complete
from tests.examples import nightly

pytestmark = [
    pytest.mark.pipeline,
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs the extra ray"),
]
on_three_nodes = pytest.mark.skipif(
    not nightly() or bool(why_not()), reason=why_not() or "three nodes take minutes: scripts/test --nightly"
)

STREAMS = 400
NEW_TOKENS = 100
SHORT_STREAMS, FEWER_STREAMS = 40, 120
LEADS = "leads from now on"
NOTICED_BY_RAY_S = 3.0
"""At the earliest: three health checks a second apart (`ray_nodes.ENVIRONMENT`)."""


def options(model: Path, workers: int = 3) -> list[str]:
    """Workers that compute prompts and decode."""
    return [
        *("--preset", "unified", "--model", str(model), "--set", "model.dtype=float32"),
        *("--set", f"workers=[{{role: unified, count: {workers}, threads: 1}}]"),
        *("--set", "kv.memory_bytes=67108864", "--set", "kv.host_memory_bytes=0", "--set", "drain_s=10"),
    ]


class Streams:
    """Clients that stream at once; `began` counts those of which something has arrived."""

    def __init__(self, url: str, streams: int) -> None:
        self._url = url
        self._bodies = bodies(streams, NEW_TOKENS)

    async def run(self, disturb: Any = None) -> list[Answer]:
        timeout = aiohttp.ClientTimeout(total=400)
        async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
            tasks = [asyncio.create_task(complete(session, self._url, **body)) for body in self._bodies]
            if disturb is not None:
                await self._in_the_middle(session)
                running = sum(not task.done() for task in tasks)
                assert running > len(tasks) // 2, f"only {running} streams still ran when the node was to die"
                await asyncio.to_thread(disturb)
            return await asyncio.gather(*tasks)

    async def _in_the_middle(self, session: aiohttp.ClientSession) -> None:
        """Until a fifth of all tokens has been generated since the beginning."""
        enough = len(self._bodies) * NEW_TOKENS // 5
        before = await self._generated(session)
        deadline_s = time.monotonic() + 120
        while await self._generated(session) - before < enough:
            assert time.monotonic() < deadline_s
            await asyncio.sleep(0.05)

    async def _generated(self, session: aiohttp.ClientSession) -> float:
        async with session.get(f"{self._url}/metrics") as response:
            text = await response.text()
        values = [line.split()[-1] for line in text.splitlines() if line.startswith("cohort_generation_tokens_total")]
        return sum(float(value) for value in values)


def check(answers: list[Answer], undisturbed: list[Answer]) -> None:
    same(answers, undisturbed, NEW_TOKENS)


class Kill:
    """A node is killed, and what the pipeline says of it from then on."""

    def __init__(self, nodes: RayNodes, index: int) -> None:
        self._nodes, self._index = nodes, index
        self.monotonic_s = self._unix_s = 0.0

    def __call__(self) -> None:
        self.monotonic_s, self._unix_s = time.monotonic(), time.time()
        self._nodes.kill(self._index)

    def after_s(self, instance: str, event: str) -> list[float]:
        """Seconds after the kill at which this process wrote this line."""
        lines = (line for line in self._nodes.log(instance) if line.get("event") == event)
        passed = (datetime.fromisoformat(line["timestamp"]).timestamp() - self._unix_s for line in lines)
        return sorted(each for each in passed if each > 0)

    def report(self, what: str, answers: list[Answer], undisturbed: list[Answer], back_s: float) -> None:
        """Printed: what the guide's table has."""
        noticed, moved = self.after_s("manager", "attempts lost"), self.after_s("gateway", "resubmitting")
        lost = [answer for answer in answers if answer.extras.get("attempts", 1) > 1]
        others = [answer for answer in answers if answer.extras.get("attempts", 1) == 1]
        print(
            f"\n{what}: {len(lost)} of {len(answers)} streams resubmitted {moved[0]:.2f} to {moved[-1]:.2f} s after it"
        )
        print(f"  the first manager noticed after {noticed[:1]} s; all is back after {back_s:.1f} s")
        for name, those, since_s in (
            ("streams that were resubmitted", lost, self.monotonic_s),
            ("the others", others, self.monotonic_s),
            ("an undisturbed run", undisturbed, 0.0),
        ):
            pauses = [pause_between_tokens_s(each, since_s) for each in those]
            print(
                f"  {name}: longest pause {max(pauses):.2f} s, median of the longest {statistics.median(pauses):.2f} s"
            )


def pause_between_tokens_s(answer: Answer, since_s: float) -> float:
    """The longest that ended after `since_s`; the wait for the first token is none."""
    pairs = pairwise(answer.arrived_s[1:])
    return max((later - earlier for earlier, later in pairs if later > since_s), default=0.0)


def assert_nothing_left(nodes: RayNodes, indices: list[int]) -> None:
    deadline_s = time.monotonic() + 15
    while left := [line for index in indices for line in nodes.processes(index)]:
        assert time.monotonic() < deadline_s, left
        time.sleep(0.1)
    assert set(nodes.groups().values()) <= {"REMOVED"}


@pytest.fixture
def nodes(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[RayNodes]:
    with RayNodes(tmp_path, request.param) as running:
        yield running


@on_three_nodes
@pytest.mark.parametrize("nodes", [(4, 4, 4)], indirect=True)
def test_a_node_dies_with_its_worker_and_no_stream_is_lost(nodes: RayNodes, tiny_model: Path) -> None:
    nodes.serve(*options(tiny_model))
    nodes.wait_said("Cohort serves")
    where = nodes.where()
    workers = {name: address for name, address in where.items() if name.startswith("unified")}
    assert len(set(workers.values())) == 3, "one on each node"
    assert {where[name] for name in ("gateway", "manager", "monitor", "predictor")} == {nodes.address(0)}
    streams = Streams(nodes.url, STREAMS)
    undisturbed = asyncio.run(streams.run())
    before = nodes.said().count(" ready ")
    kill = Kill(nodes, 1)
    answers = asyncio.run(streams.run(kill))
    nodes.wait_said(" ready ", before + 1)
    kill.report("a node with a worker", answers, undisturbed, time.monotonic() - kill.monotonic_s)
    check(answers, undisturbed)
    assert nodes.address(1) not in nodes.where().values(), "the lost worker is on another node"
    check(asyncio.run(streams.run()), undisturbed)
    assert nodes.stop(signal.SIGINT) == 0
    assert_nothing_left(nodes, [0, 2])


@on_three_nodes
@pytest.mark.parametrize("nodes", [(0, 4, 4)], indirect=True)
def test_a_manager_that_moves_to_another_node_is_found_there(nodes: RayNodes, tiny_model: Path) -> None:
    """A head that gives Ray no CPUs takes neither workers nor the manager."""
    nodes.serve(*options(tiny_model))
    nodes.wait_said("Cohort serves")
    where = nodes.where()
    [victim] = [index for index in (1, 2) if nodes.address(index) == where["manager"]]
    streams = Streams(nodes.url, STREAMS)
    undisturbed = asyncio.run(streams.run())
    lost = [name for name, address in where.items() if address == where["manager"]]
    before = nodes.said().count(" ready ")
    kill = Kill(nodes, victim)
    answers = asyncio.run(streams.run(kill))
    nodes.wait_said(" ready ", before + len(lost))
    back_s = time.monotonic() - kill.monotonic_s
    kill.report(f"the node of {', '.join(lost)}", answers, undisturbed, back_s)
    check(answers, undisturbed)
    assert nodes.where()["manager"] == nodes.address(3 - victim)
    nodes.kill_launcher()
    assert_nothing_left(nodes, [0, 3 - victim])


@on_three_nodes
@pytest.mark.parametrize("nodes", [(0, 4, 4)], indirect=True)
def test_the_manager_of_another_node_leads_before_ray_knows_of_the_loss(nodes: RayNodes, tiny_model: Path) -> None:
    nodes.serve(*options(tiny_model), "--set", "manager.standbys=1")
    nodes.wait_said("Cohort serves")
    where = nodes.where()
    streams = Streams(nodes.url, STREAMS)
    undisturbed = asyncio.run(streams.run())
    leader, standby = sorted(("manager", "manager-1"), key=lambda name: led_since(nodes, name), reverse=True)
    [victim] = [index for index in (1, 2) if nodes.address(index) == where[leader]]
    assert where[standby] == nodes.address(3 - victim), "on nodes of their own"
    lost = [name for name, address in where.items() if address == where[leader]]
    before = nodes.said().count(" ready ")
    kill = Kill(nodes, victim)
    answers = asyncio.run(streams.run(kill))
    nodes.wait_said(" ready ", before + len(lost))
    back_s = time.monotonic() - kill.monotonic_s
    led_s = kill.after_s(standby, LEADS)
    kill.report(
        f"the node of {', '.join(lost)}, with a standby that leads after {led_s[0]:.2f} s", answers, undisturbed, back_s
    )
    check(answers, undisturbed)
    assert len(led_s) == 1, "and leads on when the other one is back"
    assert led_s[0] < NOTICED_BY_RAY_S, "Ray has not even noticed"
    check(asyncio.run(streams.run()), undisturbed)
    assert nodes.stop(signal.SIGINT) == 0
    assert_nothing_left(nodes, [0, 3 - victim])


@on_three_nodes
@pytest.mark.parametrize("nodes", [(1, 1, 1)], indirect=True)
def test_workers_come_and_go_as_the_monitor_orders_and_no_stream_is_lost(nodes: RayNodes, tiny_model: Path) -> None:
    """The services take the head; each other node has room for one worker."""
    acts = ("planner.mode=act", "planner.max_workers=3", "experiment.planner.interval_s=3600", "drain_s=0.1")
    nodes.serve(*options(tiny_model, workers=1), *(word for each in acts for word in ("--set", each)))
    nodes.wait_said("Cohort serves")
    alone = nodes.agents(), in_use(nodes)
    folder = nodes.run_folder("monitor")
    orders = LauncherOrders(folder, load_config([folder / "resolved.yaml"]))
    streams = Streams(nodes.url, FEWER_STREAMS)
    undisturbed = asyncio.run(streams.run())

    check(asyncio.run(streams.run(lambda: took_s("a worker comes", orders.add((Role.UNIFIED, 1))))), undisturbed)
    where = nodes.where()
    assert {where["unified-0"], where["unified-1"]} == {nodes.address(1), nodes.address(2)}
    assert (nodes.agents(), in_use(nodes)) == (alone[0] + 1, alone[1] + 1)
    assert list(load_config([folder / "resolved.yaml"]).instance_roles) == ["unified-0", "unified-1"]
    with pytest.raises(OrderFailed, match="for 1 CPU: no node has it to spare"):
        took_s("a worker without a place", orders.add((Role.UNIFIED, 1)))

    answers = asyncio.run(streams.run(lambda: took_s("a worker goes", orders.drain("unified-1"))))
    check(answers, undisturbed)
    assert any(answer.extras.get("attempts", 1) > 1 for answer in answers), "what was on it went on elsewhere"
    assert (nodes.agents(), in_use(nodes)) == alone and "unified-1" not in nodes.where()

    [victim] = [index for index in (1, 2) if nodes.address(index) != where["unified-0"]]
    with ThreadPoolExecutor(1) as pool:
        adding = pool.submit(took_s, "a worker whose node dies", orders.add((Role.UNIFIED, 1)))
        nodes.wait_said("unified-1    starting", 2)
        nodes.kill(victim)
        with pytest.raises(OrderFailed, match="no node has it to spare"):
            adding.result(120)
    assert (nodes.agents(), in_use(nodes)) == alone
    check(asyncio.run(streams.run()), undisturbed)
    assert nodes.stop(signal.SIGINT) == 0
    assert_nothing_left(nodes, [0, 3 - victim])


def in_use(nodes: RayNodes) -> int:
    """Placement groups that have not been given back."""
    return sum(state != "REMOVED" for state in nodes.groups().values())


def took_s(what: str, order: Coroutine[Any, Any, Any]) -> None:
    began_s = time.monotonic()
    try:
        asyncio.run(order)
    finally:
        print(f"\n{what}: {time.monotonic() - began_s:.1f} s")


def led_since(nodes: RayNodes, name: str) -> str:
    """When this manager began to lead; "" if it never did. Which one does at first is a matter of who is up."""
    return max([line["timestamp"] for line in nodes.log(name) if line.get("event") == LEADS], default="")


def test_a_ray_of_this_machine_serves_and_leaves_nothing(tiny_model: Path, tmp_path: Path) -> None:
    """Detached, asked for its status, a worker killed under streams, and stopped."""
    port = free_port()
    environment = {**os.environ, "OMP_WAIT_POLICY": "passive"}

    def serve(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-P", "-m", "cohort.services.cli", "serve", "--port", str(port), *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment)

    started = serve("--on", "ray=local", "--detach", *options(tiny_model), "--set", f"state.folder={tmp_path}")
    try:
        assert started.returncode == 0, started.stdout + started.stderr
        shown = serve("--status")
        assert shown.returncode == 0 and shown.stdout.count(" ready ") == 7, shown.stdout
        streams = Streams(f"http://127.0.0.1:{port}", SHORT_STREAMS)
        undisturbed = asyncio.run(streams.run())
        victims = worker_pids(port)
        assert len(victims) == 3
        assert {os.getpriority(os.PRIO_PROCESS, pid) for pid in victims} == {os.getpriority(os.PRIO_PROCESS, 0)}
        answers = asyncio.run(streams.run(lambda: os.kill(victims[0], signal.SIGKILL)))
        check(answers, undisturbed)
    finally:
        stopped = serve("--stop")
    assert stopped.returncode == 0, stopped.stdout + stopped.stderr
    assert serve("--status").returncode == 3
    assert not worker_pids(port)


def worker_pids(port: int) -> list[int]:
    """Of this pipeline, by the run folder in their command lines."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            line = (folder / "cmdline").read_bytes().decode(errors="replace")
        except OSError:
            continue
        if f"/run/{port}/nodes/" in line and "prefill_worker" in line:
            found.append(int(folder.name))
    return sorted(found)
