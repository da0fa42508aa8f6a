"""The life of a process, on real processes; and where its endpoints and ports are."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from cohort.common.addresses import endpoint_of, inbox_of, manager_endpoints, metrics_port, model_name
from cohort.common.config import Config, EndpointsConfig, ManagerConfig, MetricsConfig, WorkerGroup
from cohort.common.errors import ConfigError
from cohort.common.messages import Farewell, Heartbeat, KvRenew, Registered
from cohort.common.process.service import EXIT_NO_DEVICE
from cohort.common.transport.zmq_bus import ZmqBus
from cohort.common.types import Role
from tests.common.service_program import SHORT_S
from tests.e2e.forked import ForkedProcess, fork

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = "tests.common.service_program"


class Running:
    def __init__(self, process: ForkedProcess, said: int) -> None:
        """`said`: descriptor of what the process writes."""
        self.process, self._said = process, said
        self.events: list[dict[str, Any]] = []
        self.plain: list[str] = []
        self._news = asyncio.Event()
        self._reader = asyncio.create_task(self._read())

    async def event(self, name: str, within_s: float = 30.0) -> dict[str, Any]:
        async with asyncio.timeout(within_s):
            while True:
                for event in self.events:
                    if event["event"] == name:
                        return event
                assert not self._reader.done(), (self.events, self.plain)
                self._news.clear()
                await self._news.wait()

    async def code(self, within_s: float = 30.0) -> int:
        code = await asyncio.to_thread(self.process.wait, within_s)
        await self._reader
        return code

    async def _read(self) -> None:
        said = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(said), os.fdopen(self._said, "rb"))
        while line := await said.readline():
            try:
                self.events.append(json.loads(line))
            except json.JSONDecodeError:
                self.plain.append(line.decode())
            self._news.set()
        self._news.set()


Launch = Callable[..., Awaitable[Running]]


@pytest.fixture
async def launch(tmp_path: Path) -> AsyncIterator[Launch]:
    running: list[Running] = []
    config = tmp_path / "config.yaml"
    config.write_text("metrics: {base_port: 0}\ndrain_s: 0.2\nlogging: {format: json}\n")

    async def start(instance: str, *options: str) -> Running:
        arguments = ["--config", str(config), "--run-dir", str(tmp_path / "run"), "--instance", instance, *options]
        said, log = os.pipe()
        with os.fdopen(log, "wb") as written:
            process = fork(PROGRAM, arguments, os.environ, written, ("cohort.common.process.service",))
        running.append(Running(process, said))
        return running[-1]

    yield start
    for one in running:
        one.process.kill()
        await one.code()


async def get(url: str) -> tuple[int, str, str]:
    async with aiohttp.ClientSession() as session, session.get(url) as answer:
        return answer.status, answer.headers["Content-Type"], await answer.text()


@pytest.mark.pipeline
async def test_a_whole_life(launch: Launch, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    service = await launch("echo")
    started = await service.event("started")
    assert started["endpoint"] == f"ipc://{run_dir}/echo.sock"

    # the monitor comes later than the service: it gets a few of the last heartbeats, then the new ones
    monitor = ZmqBus("monitor", f"ipc://{run_dir}/monitor.sock")
    beats = [await asyncio.wait_for(monitor.receive(), 5) for _ in range(12)]
    peer, beat = beats[-1]
    assert isinstance(beat, Heartbeat) and peer == beat.instance == "echo"
    assert (beat.role, beat.pid, beat.ready) == ("decode_worker", service.process.pid, True)
    assert (beat.incarnation, beat.metrics_url) == (started["incarnation"], started["metrics_url"])
    assert beat.stats["beats"] > 2
    await service.event("stats for the heartbeat could not be read")  # and yet it beat on

    client = ZmqBus("client")
    client.connect("echo", started["endpoint"])
    client.send("echo", Registered(7))
    assert await asyncio.wait_for(client.receive(), 5) == ("echo", KvRenew([7]))

    url = started["metrics_url"]
    status, content_type, text = await get(url)
    assert (status, content_type) == (200, "text/plain; version=0.0.4; charset=utf-8")
    assert 'cohort_echoes_total{instance="echo",model_name="SmolLM2-135M-Instruct"} 1.0' in text
    assert "cohort_bus_received_total" in text and "process_resident_memory_bytes" in text
    status, _, text = await get(url.replace("/metrics", "/health"))
    assert status == 200 and json.loads(text)["instance"] == "echo"
    assert (await get(url.replace("/metrics", "/ready")))[0] == 200

    service.process.send_signal(signal.SIGTERM)
    await service.event("draining")
    assert (await get(url.replace("/metrics", "/ready")))[0] == 503
    assert json.loads((await get(url.replace("/metrics", "/health")))[2])["status"] == "draining"
    client.send("echo", Registered(8))
    assert await service.code() == 0
    assert [event["event"] for event in service.events][-2:] == ["drained", "ended"]
    messages: list[object] = []
    while not messages or not isinstance(messages[-1], Farewell):
        messages.append((await asyncio.wait_for(monitor.receive(), 5))[1])
    assert messages[-1] == Farewell("echo", beat.incarnation)
    await monitor.close()
    await client.close()
    assert os.listdir(run_dir) == []
    assert service.plain == []


@pytest.mark.pipeline
async def test_failures_have_exit_codes_and_reasons(launch: Launch) -> None:
    fails, later, option, returns = [await launch(name) for name in ("fails", "fails-later", "bad-option", "returns")]
    assert await fails.code() == 1
    assert "RuntimeError: it was not meant to be" in (await fails.event("service failed"))["exception"]
    assert await later.code() == 1
    assert "a part of it failed" in (await later.event("service failed"))["exception"]
    assert await option.code() == 2
    event = await option.event("model.path: /nowhere holds no model")
    assert (event["error"], "exception" in event) == ("ConfigError", False)
    assert await returns.code() == 0


@pytest.mark.pipeline
async def test_a_machine_that_contradicts_itself_ends_its_process(launch: Launch) -> None:
    """Also where it was told by a callback, whose errors end nothing."""
    service = await launch("contradicts-itself")
    said = await service.event("the machine contradicts itself, this process ends")
    assert "{'r': 2} are held" in said["assertion"]
    assert (said["events"], said["now_s"]) == (["Tick"], 1.0)
    assert await service.code() == 1
    assert "AssertionError" in (await service.event("service failed"))["exception"]


@pytest.mark.pipeline
async def test_a_worker_without_a_gpu_ends_with_a_status_of_its_own(launch: Launch) -> None:
    service = await launch("no-device")
    assert await service.code() == EXIT_NO_DEVICE == 75
    assert (await service.event("no share of a GPU is left for this worker"))["error"] == "NoDeviceLeft"


@pytest.mark.pipeline
async def test_wrong_configuration_is_one_clear_line(launch: Launch, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text("kv: {blok_size: 16}\n")
    service = await launch("echo", "--config", str(wrong))
    assert await service.code() == 2
    assert service.events == []
    (line,) = service.plain
    assert "wrong.yaml" in line and "kv.blok_size" in line and "block_size" in line


@pytest.mark.pipeline
async def test_drain_deadline_and_second_signal(launch: Launch) -> None:
    stuck, deaf, impatient = [await launch(name) for name in ("stuck", "deaf", "stuck-2")]
    for service in (stuck, deaf, impatient):
        await service.event("started")
    for service in (stuck, deaf, impatient):
        service.process.send_signal(signal.SIGTERM)
    await impatient.event("asked to stop")
    impatient.process.send_signal(signal.SIGINT)
    assert await impatient.code() == 128 + signal.SIGINT
    assert "drain deadline passed, cancelling" not in [event["event"] for event in impatient.events]
    assert await stuck.code() == 0
    passed = await stuck.event("drain deadline passed, cancelling")
    assert passed["deadline_s"] == pytest.approx(0.2 + SHORT_S)
    assert await deaf.code() == 1
    await deaf.event("service does not end when cancelled, leaving it")


@pytest.mark.pipeline
async def test_same_instance_twice_and_taken_metrics_port(launch: Launch) -> None:
    first = await launch("echo")
    await first.event("started")
    second = await launch("echo")
    assert await second.code() == 2
    assert "another process listens" in second.events[-1]["event"]
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        third = await launch("third", "--metrics-port", str(port))
        assert await third.code() == 2
        assert f"--metrics-port: cannot listen on 127.0.0.1:{port}" in third.events[-1]["event"]


@pytest.mark.pipeline
async def test_metrics_on_an_application_of_its_own(launch: Launch, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir(mode=0o700)
    monitor = ZmqBus("monitor", f"ipc://{tmp_path}/run/monitor.sock")
    await launch("own-metrics")
    while True:
        _, beat = await asyncio.wait_for(monitor.receive(), 30)
        if isinstance(beat, Heartbeat) and beat.metrics_url:
            break
    assert (await get(beat.metrics_url))[0] == 200
    await monitor.close()


def test_endpoints() -> None:
    run_dir = Path("/run/cohort")
    config = Config()
    assert endpoint_of(config, "manager", run_dir) == "ipc:///run/cohort/manager.sock"
    assert inbox_of(config, "bucketing_manager", "manager", run_dir) == ("ipc:///run/cohort/manager.sock",) * 2
    assert inbox_of(config, "decode_worker", "decode-3", run_dir) == ("ipc:///run/cohort/decode-3.sock",) * 2
    config = Config(endpoints=EndpointsConfig(manager="tcp://manager:7001", worker="tcp://w1:0", bind_host="0.0.0.0"))
    assert endpoint_of(config, "manager", run_dir) == "tcp://manager:7001"
    assert inbox_of(config, "bucketing_manager", "manager", run_dir) == ("tcp://0.0.0.0:7001", "tcp://manager:7001")
    assert inbox_of(config, "prefill_worker", "prefill-0", run_dir) == ("tcp://0.0.0.0:0", "tcp://w1:0")
    for wrong in ("tcp://manager", "tcp://manager:x", "tcp://manager:99999"):
        with pytest.raises(ConfigError, match="tcp://HOST:PORT"):
            inbox_of(Config(endpoints=EndpointsConfig(manager=wrong)), "bucketing_manager", "manager", run_dir)


def test_endpoints_of_managers_that_stand_by() -> None:
    run_dir, two = Path("/run/cohort"), ManagerConfig(standbys=2)
    here = Config(manager=two)
    assert list(manager_endpoints(here, run_dir)) == ["manager", "manager-1", "manager-2"]
    second = "ipc:///run/cohort/manager-1.sock"
    assert manager_endpoints(here, run_dir)["manager-1"] == second
    assert inbox_of(here, "bucketing_manager", "manager-1", run_dir) == (second, second)
    elsewhere = EndpointsConfig(manager="tcp://a:1", bind_host="0.0.0.0", standby_managers=("tcp://b:1", "tcp://c:1"))
    there = Config(manager=two, endpoints=elsewhere)
    assert inbox_of(there, "bucketing_manager", "manager-2", run_dir) == ("tcp://0.0.0.0:1", "tcp://c:1")
    forgotten = Config(manager=two, endpoints=EndpointsConfig(manager="tcp://a:1", standby_managers=("tcp://b:1",)))
    with pytest.raises(ConfigError, match=r"2 managers stand by .*, 1 have an endpoint"):
        manager_endpoints(forgotten, run_dir)


def test_metrics_ports_do_not_collide() -> None:
    config = Config(workers=(WorkerGroup(Role.PREFILL), WorkerGroup(Role.DECODE, count=2)))
    assert metrics_port(config, "length_predictor", "predictor") == 8010
    assert metrics_port(config, "bucketing_manager", "manager") == 8011
    workers = ("prefill-0", "decode-0", "decode-1")
    assert [metrics_port(config, "decode_worker", name) for name in workers] == [8012, 8013, 8014]
    assert metrics_port(config, "decode_worker", "decode-9") == 0
    assert metrics_port(Config(metrics=MetricsConfig(base_port=0)), "bucketing_manager", "manager") == 0


def test_model_name() -> None:
    assert model_name(Config()) == "SmolLM2-135M-Instruct"


def test_help_is_for_newcomers() -> None:
    import subprocess

    shown = subprocess.run(
        [sys.executable, "-m", PROGRAM, "--help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "COLUMNS": "200"},
        check=True,
    ).stdout
    for option in ("--config FILE", "--instance NAME", "--run-dir DIR", "--metrics-port PORT", "Exit codes"):
        assert option in shown
