"""Workers that come and go: the configuration they leave behind, the orders on the socket, the supervisor beneath."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from cohort.common.config import Config, load_config
from cohort.common.config.serving import WorkerGroup
from cohort.common.planning.orders import AddWorker, Done, DrainWorker
from cohort.common.types import Role
from cohort.services.launcher import box
from cohort.services.launcher.local_hosts import LocalHosts
from cohort.services.launcher.plan import resolve
from cohort.services.launcher.run_files import RunFiles, RunFilesError
from cohort.services.launcher.worker_orders import WorkerOrders, with_worker, without_worker


def config(*groups: WorkerGroup) -> Config:
    return Config(workers=groups)


def test_a_worker_more_is_the_last_of_its_role():
    two = config(WorkerGroup(Role.PREFILL), WorkerGroup(Role.DECODE, 2, threads=3))
    more = with_worker(two, Role.PREFILL, 1)
    assert list(more.instance_roles) == ["prefill-0", "prefill-1", "decode-0", "decode-1"]
    other = with_worker(more, Role.UNIFIED, 1)
    assert other.instance_roles.keys() - more.instance_roles.keys() == {"unified-0"}
    assert other.worker_group("unified-0").threads == 3
    wider = with_worker(two, Role.DECODE, 2)
    assert wider.worker_group("decode-2").degree == 2 and wider.worker_group("decode-1").degree == 1


def test_a_worker_less_is_the_last_of_its_role_and_the_others_keep_their_names():
    three = config(WorkerGroup(Role.PREFILL), WorkerGroup(Role.DECODE, 2))
    assert list(without_worker(three, "decode-1").instance_roles) == ["prefill-0", "decode-0"]
    assert list(without_worker(three, "prefill-0").instance_roles) == ["decode-0", "decode-1"]
    for wrong in ("decode-0", "decode-2", "manager"):
        with pytest.raises(RunFilesError, match="not the last"):
            without_worker(three, wrong)
    with pytest.raises(RunFilesError, match="only worker"):
        without_worker(config(WorkerGroup(Role.UNIFIED)), "unified-0")


@pytest.mark.pipeline
async def test_a_process_that_is_added_is_kept_and_one_that_is_retired_stays_away(run, toys, files: RunFiles):
    pipeline = run(toys(gateway="ready", manager="ready"))
    await pipeline.until_ready()
    added = toys(**{"prefill-0": "ready"})[0]
    await pipeline.supervisor.add(added, 20.0)
    assert set(pipeline.supervisor.marks) == {"gateway", "manager", "prefill-0"}
    mark = pipeline.supervisor.marks["prefill-0"]
    await pipeline.supervisor.retire("prefill-0")
    assert not mark.alive and set(pipeline.supervisor.marks) == {"gateway", "manager"}
    assert "prefill-0" not in pipeline.supervisor.ready_urls
    pipeline.supervisor.request_stop()
    assert await pipeline.exit_code() == 0


@pytest.mark.pipeline
async def test_an_added_process_that_cannot_start_ends_nothing_else(run, toys):
    pipeline = run(toys(gateway="ready"))
    await pipeline.until_ready()
    with pytest.raises(RunFilesError, match="its configuration is wrong"):
        await pipeline.supervisor.add(toys(**{"prefill-0": "config_error"})[0], 20.0)
    assert set(pipeline.supervisor.marks) == {"gateway"} and pipeline.supervisor.failure == ""
    assert list(pipeline.supervisor.ready_urls) == ["gateway"]


class Fake:
    """A supervisor that remembers."""

    def __init__(self) -> None:
        self.added: list[str] = []
        self.retired: list[str] = []
        self.failure = ""

    async def add(self, plan, timeout_s: float) -> None:
        if self.failure:
            raise RunFilesError(self.failure)
        self.added.append(plan.instance)

    async def retire(self, instance: str) -> None:
        self.retired.append(instance)


async def test_orders_on_the_socket(files: RunFiles, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    looked: list[tuple[WorkerGroup, ...]] = []
    monkeypatch.setattr(box, "check_host", lambda config, model: looked.append(config.workers))
    supervisor = Fake()
    desk = WorkerOrders(config(WorkerGroup(Role.UNIFIED, threads=1)), supervisor, LocalHosts(files))  # type: ignore[arg-type]
    server = await asyncio.start_unix_server(desk.serve, tmp_path / "workers.sock")
    reader, writer = await asyncio.open_unix_connection(tmp_path / "workers.sock")

    async def ask(line: bytes) -> Done:
        writer.write(line + b"\n")
        return msgspec.json.decode(await reader.readline(), type=Done)

    add = msgspec.json.encode(AddWorker(Role.UNIFIED, 1))
    assert await ask(add) == Done("unified-1")
    assert load_config([files.config_file]).instance_roles == {"unified-0": Role.UNIFIED, "unified-1": Role.UNIFIED}
    assert "not the last" in (await ask(msgspec.json.encode(DrainWorker("unified-0")))).failure
    assert await ask(msgspec.json.encode(DrainWorker("unified-1"))) == Done("unified-1")
    assert supervisor.added == supervisor.retired == ["unified-1"]
    assert (await ask(b"{}")).failure and (await ask(b"nonsense")).failure
    supervisor.failure = "unified-1: every share of every GPU is taken"
    assert "every share" in (await ask(add)).failure
    assert looked == [(WorkerGroup(Role.UNIFIED, 1, threads=1),)] * 2, "room for one beside those that are there"
    assert list(load_config([files.config_file]).instance_roles) == ["unified-0"], "as it was"
    writer.close()
    server.close()


def test_the_most_workers_are_settled_while_the_configuration_names_those_of_the_start(tmp_path: Path):
    """A monitor that is started again reads how many there are now."""
    three = load_config(overrides={"workers": [{"role": "unified", "count": 3}], "planner": {"mode": "act"}})
    settled = resolve(three, model=tmp_path, cores=2, free_port=lambda: 9000)
    assert settled.planner.max_workers == 3
    assert without_worker(settled, "unified-2").planner.max_workers == 3
    assert resolve(Config(), model=tmp_path, cores=2, free_port=lambda: 9000).planner == Config().planner
