"""The launcher's side and its agents, with objects of this process in place of Ray's actors and toys in place of the
pipeline's processes. `Ray` here loses an actor as Ray does: what was asked of it fails, and it is made anew."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from cohort.common.address_book import AddressBook, read_book
from cohort.common.config import Config, WorkerGroup, load_config
from cohort.common.config.serving import PlannerConfig
from cohort.common.errors import ConfigError
from cohort.common.http.ports import PORT_BLOCK, free_port
from cohort.common.planning.orders import socket_of
from cohort.common.types import Role
from cohort.services.global_monitor.launcher_orders import LauncherOrders
from cohort.services.launcher import hosts, local_hosts, supervisor, worker_orders
from cohort.services.launcher.console import Console, Line
from cohort.services.launcher.on_ray import actors, agent
from cohort.services.launcher.on_ray.actors import Actors
from cohort.services.launcher.on_ray.agent import Agent
from cohort.services.launcher.on_ray.order import Order
from cohort.services.launcher.on_ray.placement import Placement
from cohort.services.launcher.plan import StopStage
from cohort.services.launcher.run_files import ProcessMark, RunFiles, RunFilesError
from cohort.services.launcher.supervisor import Supervisor
from cohort.services.launcher.worker_orders import WorkerOrders
from tests.examples import another_of_its_kind
from tests.services.launcher.conftest import ToyPlan

pytestmark = pytest.mark.pipeline

FOLDERS = {
    "gateway": ("gateway", StopStage.GATEWAY),
    "manager": ("bucketing_manager", StopStage.MANAGER),
    "monitor": ("global_monitor", StopStage.OTHERS),
    "predictor": ("length_predictor", StopStage.OTHERS),
    "decode-0": ("decode_worker", StopStage.WORKERS),
}


CONFIG = Config(workers=(WorkerGroup(Role.DECODE, 1, threads=1),), planner=PlannerConfig(start_timeout_s=20.0))


class RayActorError(Exception): ...


class ActorDiedError(RayActorError): ...


class RayTaskError(Exception):
    cause: Exception | None = None


class Actor:
    def __init__(self, ray: FakeRay, made: type[Agent], order: Order) -> None:
        self._ray, self._made, self._order = ray, made, order
        self.lost, self.back = asyncio.Event(), asyncio.Event()
        self.back.set()
        self.agent, self.gone = made(order), False
        ray.actors[order.plan.instance] = self
        if ray.full:
            self.vanish()

    async def orphan(self) -> None:
        """It is gone, and Ray says so to everyone who asks: no node has room for another one."""
        self._ray.full = self.gone = True
        self.lost.set()
        kill(self.agent)

    def stumble(self) -> None:
        """What is asked now fails, as of a lost actor, and it was none."""
        self.lost.set()
        self.lost = asyncio.Event()

    def vanish(self) -> None:
        """Nothing that is asked of it is answered, and Ray does not know why."""
        self.back.clear()

    async def lose(self) -> None:
        """The agent is gone, and its process with it; another one takes its place after a while."""
        self.back.clear()
        self.lost.set()
        held, self.agent._held = self.agent._held, []  # till then: the next one is to have other ports
        kill(self.agent)
        if self.agent._life is not None:
            await self.agent._life
        self.agent, self.lost = self._made(self._order), asyncio.Event()
        for each in held:
            each.close()
        self.back.set()

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=lambda *words: asyncio.ensure_future(self._call(name, words)))

    async def _call(self, name: str, words: tuple[Any, ...]) -> Any:
        await self.back.wait()
        if self.gone:
            raise RayActorError
        lost = asyncio.ensure_future(self.lost.wait())
        work = asyncio.ensure_future(getattr(self.agent, name)(*words))
        await asyncio.wait((lost, work), return_when=asyncio.FIRST_COMPLETED)
        if lost.done():
            raise RayActorError
        lost.cancel()
        try:
            return await work
        except Exception as raised:
            error = RayTaskError()
            error.cause = raised
            raise error from raised


def kill(agent: Agent) -> None:
    """As the end of its process does: its child ends, its ports are free."""
    if agent._process.child is not None:
        agent._process.child.kill()
    for held in agent._held:
        held.close()


class FakeRay:
    exceptions = SimpleNamespace(RayActorError=RayActorError, ActorDiedError=ActorDiedError, RayTaskError=RayTaskError)

    def __init__(self) -> None:
        self.actors: dict[str, Actor] = {}
        self.groups: list[tuple[list[dict[str, float]], str]] = []
        self.killed = 0
        self.full = False
        """No node has room for what is asked for from now on."""
        self.util = SimpleNamespace(
            placement_group=self._group,
            remove_placement_group=self.groups.remove,
            get_node_ip_address=lambda: "127.0.0.1",
            placement_group_table=lambda group: {"state": "PENDING" if self.full else "CREATED"},
            scheduling_strategies=SimpleNamespace(PlacementGroupSchedulingStrategy=lambda group, **_: group),
        )

    def _group(self, bundles: list[dict[str, float]], strategy: str) -> tuple[list[dict[str, float]], str]:
        self.groups.append((bundles, strategy))
        return self.groups[-1]

    def nodes(self) -> list[dict[str, Any]]:
        return [{"Alive": True, "Resources": {"CPU": 4.0}}, {"Alive": False, "Resources": {"CPU": 64.0}}]

    def get_runtime_context(self) -> Any:
        return SimpleNamespace(get_node_id=lambda: "0123456789abcdef")

    def remote(self, made: type[Agent]) -> Any:
        return SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda order: Actor(self, made, order)))

    def kill(self, actor: Actor, *, no_restart: bool) -> None:
        self.killed += no_restart
        kill(actor.agent)


class Running:
    def __init__(
        self, ray: FakeRay, folder: Path, folders: dict[str, tuple[str, StopStage]] = FOLDERS, **behaviours: str
    ) -> None:
        self.ray = ray
        self.files = RunFiles(folder / "launcher")
        self.files.make()
        plans = [
            ToyPlan(
                name, *folders[name], "127.0.0.1", 1, 3.0, behaviour=behaviours.get(name.partition("-")[0], "ready")
            )
            for name in folders
        ]
        console = Console([Line(each.instance, each.port, self.files.log_file(each.instance)) for each in plans])
        managers = [each for each in plans if each.folder == "bucketing_manager"]
        spread = managers if len(managers) > 1 else []
        placements = [Placement(each, {"CPU": 1.0}, spread=each in spread) for each in plans]
        self.ready = asyncio.Event()
        pipeline = hosts.Pipeline(self.files, console, lambda: None)
        self.hosts = Actors(ray, pipeline, placements, self.order_of, CONFIG)
        self.supervisor = Supervisor(pipeline, self.hosts, plans)
        self.desk = WorkerOrders(CONFIG, self.supervisor, self.hosts)
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> int:
        async with self.desk.listening(self.files.folder):
            return await self.supervisor.run(self.ready.set)

    def order_of(self, placement: Placement) -> Order:
        desk = str(socket_of(self.files.folder)) if placement.plan.instance == "monitor" else ""
        return Order(placement.plan, 8000, "the key", {}, placement.added, desk)

    async def until(self, condition: Any, what: str) -> None:
        async with asyncio.timeout(40):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.02)

    def book(self, name: str) -> AddressBook | None:
        return read_book(self.ray.actors[name].agent._files.folder)

    def workers(self, name: str) -> list[str]:
        """That the configuration names which this process finds when it is started again."""
        return list(load_config([self.ray.actors[name].agent._files.config_file]).instance_roles)

    def pid(self, name: str) -> int:
        process = self.ray.actors[name].agent._process
        return process.child.pid if process.running and process.child is not None else 0

    async def stop(self) -> int:
        self.supervisor.request_stop()
        async with asyncio.timeout(60):
            return await self.task


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeRay]:
    made = FakeRay()
    monkeypatch.setitem(sys.modules, "ray", made)  # type: ignore[arg-type]
    first = free_port()
    monkeypatch.setattr(agent, "_PORTS", range(first, first + PORT_BLOCK))
    monkeypatch.setenv("COHORT_CACHE_DIR", str(tmp_path / "cache"))
    yield made


async def test_all_start_with_the_addresses_come_back_and_end_in_order_and_nothing_is_left(
    ray: FakeRay, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A killed process starts again at its agent; a manager that moves is made known to all."""
    running = Running(ray, tmp_path)
    await running.until(running.ready.is_set, "ready")
    assert ray.groups == [([{"CPU": 1.0}], "STRICT_PACK")] * len(FOLDERS)
    book = running.book("decode-0")
    assert book is not None and sorted(book.named()) == ["manager", "monitor", "predictor"]
    folder = ray.actors["manager"].agent._files.folder
    assert (folder / "cluster.key").read_text() == "the key"
    assert (folder / "cluster.key").stat().st_mode & 0o077 == 0
    assert running.supervisor.nodes == dict.fromkeys(FOLDERS, "127.0.0.1")

    killed, its_agent = running.pid("decode-0"), ray.actors["decode-0"].agent
    assert killed
    os.kill(killed, signal.SIGKILL)
    await running.until(lambda: running.pid("decode-0") not in (0, killed), "another process")
    assert ray.actors["decode-0"].agent is its_agent

    worker = running.pid("decode-0")
    await ray.actors["manager"].lose()

    def moved() -> bool:
        now = [running.book(name) for name in FOLDERS]
        return all(each is not None and each.manager not in ("", book.manager) for each in now)

    await running.until(moved, "the new address is in every book")
    await running.until(lambda: running.pid("manager") != 0, "the manager is back")
    assert running.pid("decode-0") == worker, "no other process was started again"

    folder = ray.actors["manager"].agent._files.folder
    assert await running.stop() == 0
    stopped = [line.split()[0] for line in capsys.readouterr().out.splitlines() if " stopped" in line]
    assert stopped[:3] == ["gateway", "manager", "decode-0"]
    assert ray.groups == [] and ray.killed == len(FOLDERS)
    assert not (folder / "cluster.key").exists()


@pytest.mark.usefixtures("ray")
async def test_no_two_agents_of_a_node_have_the_same_port() -> None:
    plan = ToyPlan("decode-0", *FOLDERS["decode-0"], "127.0.0.1", 1, 3.0)
    agents = [Agent(Order(plan, 8000)) for _ in range(PORT_BLOCK // 2)]
    try:
        taken = [port for each in agents for port in (each._inbox_port, each._process.plan.port)]
        assert sorted(taken) == list(agent._PORTS)
        with pytest.raises(ConfigError, match="no free port"):
            Agent(Order(plan, 8000))
    finally:
        for each in agents:
            kill(each)


async def test_managers_are_spread_and_all_of_them_known_to_all(ray: FakeRay, tmp_path: Path) -> None:
    running = Running(ray, tmp_path, {**FOLDERS, "manager-1": FOLDERS["manager"]})
    await running.until(running.ready.is_set, "ready")
    assert sorted(ray.groups, key=lambda group: len(group[0]))[-1] == ([{"CPU": 1.0}] * 2, "SPREAD")
    assert len(ray.groups) == len(FOLDERS)
    before = running.book("decode-0")
    assert before is not None and sorted(before.named()) == ["manager", "manager-1", "monitor", "predictor"]
    await ray.actors["manager-1"].lose()

    def moved() -> bool:
        now = [running.book(name) for name in FOLDERS]
        return all(book is not None and book.standbys not in ({}, before.standbys) for book in now)

    await running.until(moved, "the new address is in every book")
    assert await running.stop() == 0 and ray.groups == []


async def test_a_wrong_configuration_ends_all_and_shows_the_log_that_came_over(
    ray: FakeRay, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    running = Running(ray, tmp_path, decode="config_error")
    async with asyncio.timeout(60):
        assert await running.task == 1
    said = capsys.readouterr().out
    assert "decode-0 on 127.0.0.1: " in said and "kv.block_size: 7 is none of 8, 16" in said
    assert ray.groups == [] and ray.killed == len(FOLDERS)


async def test_what_never_starts_is_given_up_after_as_many_attempts_as_on_one_machine(
    ray: FakeRay, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cohort.services.launcher.processes.restart_policy.SECOND_DELAY_S", 0.01)
    running = Running(ray, tmp_path, decode="crash")
    async with asyncio.timeout(60):
        assert await running.task == 1
    said = capsys.readouterr().out
    assert "decode-0 on 127.0.0.1: exit code 1: it never became ready in 5 attempts" in said
    assert said.count("decode-0     starting") == 5 and ray.groups == []


async def test_an_agent_that_did_not_answer_has_the_same_process_and_its_log_comes_over_once(
    ray: FakeRay, tmp_path: Path
) -> None:
    running = Running(ray, tmp_path, decode="helper")  # it writes a line
    await running.until(running.ready.is_set, "ready")
    its_agent, pid = ray.actors["decode-0"].agent, running.pid("decode-0")
    ray.actors["decode-0"].stumble()
    await running.until(lambda: "decode-0" not in running.supervisor.nodes, "lost")
    await running.until(lambda: "decode-0" in running.supervisor.nodes, "found")
    assert ray.actors["decode-0"].agent is its_agent and running.pid("decode-0") == pid
    assert await running.stop() == 0
    log = its_agent._files.log_file("decode-0").read_bytes()
    assert log and running.files.log_file("decode-0").read_bytes() == log


@dataclass(frozen=True)
class Deaf(ToyPlan):
    """Never ready: it listens elsewhere."""

    def command(self, python: str, config_file: Path, run_dir: Path) -> list[str]:
        return [*super().command(python, config_file, run_dir)[:3], "0", str(run_dir / "marker")]


def toy(made: type[ToyPlan] = ToyPlan, behaviour: str = "ready", drain_s: float = 3.0) -> Any:
    """In place of `worker_plan`."""
    return lambda config, instance, port: made(
        instance, *FOLDERS["decode-0"], "127.0.0.1", port, drain_s, behaviour=behaviour
    )


@pytest.fixture
def comes(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """What the next worker that is added is. A toy has no model that wants memory."""
    monkeypatch.setattr(local_hosts, "check_added_worker", lambda config, instance: None)
    return lambda *words, **options: monkeypatch.setattr(worker_orders, "worker_plan", toy(*words, **options))


async def test_a_worker_comes_and_goes_and_all_who_are_started_again_know(
    ray: FakeRay, tmp_path: Path, comes: Callable[..., None]
) -> None:
    running = Running(ray, tmp_path)
    await running.until(running.ready.is_set, "ready")
    comes()
    monitor = ray.actors["monitor"].agent._files.folder
    assert await LauncherOrders(monitor, CONFIG).add((Role.DECODE, 1)) == "decode-1"
    assert len(ray.groups) == len(FOLDERS) + 1 and running.pid("decode-1")
    assert running.supervisor.nodes["decode-1"] == "127.0.0.1" and "decode-1" in running.supervisor.ready_urls
    await running.until(lambda: running.workers("gateway") == ["decode-0", "decode-1"], "told")
    await ray.actors["monitor"].lose()
    await running.until(lambda: running.pid("monitor") != 0, "the monitor is back")
    assert running.workers("monitor") == ["decode-0", "decode-1"]
    process = ProcessMark.of(running.pid("decode-1"))
    await LauncherOrders(monitor, CONFIG).drain("decode-1")
    assert process is not None and not process.alive
    assert len(ray.groups) == len(FOLDERS) and ray.killed == 1
    assert "decode-1" not in running.supervisor.nodes.keys() | running.supervisor.ready_urls.keys()
    await running.until(lambda: running.workers("monitor") == running.workers("decode-0") == ["decode-0"], "told")
    assert list(load_config([running.files.config_file]).instance_roles) == ["decode-0"]
    assert await running.stop() == 0 and ray.groups == []


async def test_a_worker_that_cannot_be_had_ends_nothing_else_and_leaves_nothing(
    ray: FakeRay, tmp_path: Path, comes: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    running = Running(ray, tmp_path)
    await running.until(running.ready.is_set, "ready")

    async def fails(why: str) -> None:
        with pytest.raises(RunFilesError, match=why):
            await running.desk.add(Role.DECODE, 1)
        assert len(ray.groups) == len(FOLDERS) and "decode-1" not in running.supervisor.ready_urls
        assert list(load_config([running.files.config_file]).instance_roles) == ["decode-0"]

    wide = WorkerOrders(
        msgspec.structs.replace(CONFIG, workers=(WorkerGroup(Role.DECODE, 1, 5),)), running.supervisor, running.hosts
    )
    with pytest.raises(ConfigError, match="no node of the Ray cluster has 5 CPUs"):
        await wide.add(Role.DECODE, 1)
    comes(behaviour="config_error")
    await fails("decode-1 on 127.0.0.1: exit code 2: its configuration is wrong")
    monkeypatch.setattr(actors, "NO_PLACE_S", 0.2)
    ray.full = True
    comes()
    await fails("decode-1: for 1 CPU: no node has it to spare")
    ray.full = False
    comes(Deaf)
    failing = asyncio.create_task(fails("decode-1: for 1 CPU: no node has it to spare"))
    await running.until(lambda: "decode-1" in running.supervisor.nodes and running.pid("decode-1"), "started")
    await ray.actors["decode-1"].orphan()
    await failing
    ray.full = False

    def too_small(config: Config, instance: str) -> None:
        raise ConfigError(f"no memory for {instance}")

    monkeypatch.setattr(local_hosts, "check_added_worker", too_small)
    await fails("on 127.0.0.1: no memory for decode-1")
    assert running.supervisor.nodes == dict.fromkeys(FOLDERS, "127.0.0.1")
    assert not running.task.done() and await running.stop() == 0


@another_of_its_kind()
async def test_what_dies_while_it_comes_or_goes_is_waited_for_no_longer_than_it_may_take(
    ray: FakeRay, tmp_path: Path, comes: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "KILL_TIMEOUT_S", 0.3)
    running = Running(ray, tmp_path)
    await running.until(running.ready.is_set, "ready")

    async def added() -> None:
        async with asyncio.timeout(20):
            assert await running.desk.add(Role.DECODE, 1) == "decode-1"

    async def drained() -> None:
        async with asyncio.timeout(5):
            await running.desk.drain("decode-1")
        assert len(ray.groups) == len(FOLDERS) and "decode-1" not in running.supervisor.nodes

    comes(Deaf, drain_s=-6.5)
    adding = asyncio.create_task(running.supervisor.add(worker_orders.worker_plan(CONFIG, "decode-1", 1), 4.0))
    await running.until(lambda: "decode-1" in ray.actors and running.pid("decode-1"), "started")
    await ray.actors["decode-1"].lose()
    with pytest.raises(RunFilesError, match="decode-1 is not ready after 4 s"):
        await adding
    assert len(ray.groups) == len(FOLDERS)

    comes(behaviour="stubborn", drain_s=30.0)
    await added()
    draining = asyncio.create_task(drained())
    await asyncio.sleep(0.2)
    await ray.actors["decode-1"].lose()
    await draining

    comes(drain_s=-6.5)
    await added()
    ray.actors["decode-1"].vanish()
    await drained()
    await running.until(lambda: running.workers("gateway") == ["decode-0"], "told")
    assert await running.stop() == 0 and ray.groups == []
