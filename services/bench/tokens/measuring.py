"""One measurement: processes up, streams running, processor time before and after a stretch of it.

Called by `command.py`. Gateways, manager and predictor are the product's; workers have a free engine (`worker.py`).
A token that no client was sent costs the others. After the gateway a bare server sends the same bytes to the same
clients (`bare.py`).
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from cohort.common.addresses import model_name
from cohort.common.config import Config, dump_config, load_config, nested
from cohort.common.http.ports import free_port
from cohort.common.hub.model_source import find
from cohort.common.paths import default_model_dir
from cohort.services.bench.child import MeasurementFailed, leaves_when_terminated
from cohort.services.bench.tokens.clients import Client, Clients, Stream, User, chat
from cohort.services.launcher.options import assigned_by
from cohort.services.launcher.plan import ProcessPlan, StopStage, plan, resolve

START_TIMEOUT_S = 60.0
STEP_VARIABLE = "COHORT_BENCH_STEP_S"
"""Variable in a worker's environment: seconds of a step of its engine."""
_STOP_S = 5.0
_BUS_THREADS = "ZMQbg/"


@dataclass(frozen=True, slots=True)
class ThreadTimes:
    """Seconds of processor time of one process: of its event loop, of libzmq's threads, of all other threads. Those of
    a worker are its engine's."""

    loop_s: float = 0.0
    bus_s: float = 0.0
    other_s: float = 0.0

    @property
    def whole_s(self) -> float:
        return self.loop_s + self.bus_s + self.other_s

    def since(self, before: ThreadTimes) -> ThreadTimes:
        return ThreadTimes(self.loop_s - before.loop_s, self.bus_s - before.bus_s, self.other_s - before.other_s)


class Processes:
    def __init__(self, running: Mapping[str, tuple[ProcessPlan, subprocess.Popen[bytes]]], folder: Path) -> None:
        self._running = running
        self._folder = folder

    def wait_ready(self) -> None:
        """Raise `MeasurementFailed` with the end of the log of what ended instead."""
        deadline_s = time.monotonic() + START_TIMEOUT_S
        for instance, (planned, _) in self._running.items():
            while not _answers(planned.ready_url):
                ended = [name for name, (_, process) in self._running.items() if process.poll() is not None]
                if ended or time.monotonic() > deadline_s:
                    late = ended[0] if ended else instance
                    raise MeasurementFailed(f"{late} did not become ready:\n{self._tail(late)}")
                time.sleep(0.05)

    def times(self) -> dict[str, ThreadTimes]:
        """Return the thread times by instance, now."""
        return {instance: thread_times(process.pid) for instance, (_, process) in self._running.items()}

    def _tail(self, instance: str) -> str:
        lines = (self._folder / f"{instance}.log").read_text(errors="replace").splitlines()
        return "\n".join(lines[-8:])


@contextmanager
def started(config: Config, folder: Path, step_s: float) -> Iterator[Processes]:
    """Start all processes but the monitor, over a resolved configuration; ended with the block."""
    file = folder / "config.yaml"
    file.write_text(dump_config(config), encoding="utf-8")
    running: dict[str, tuple[ProcessPlan, subprocess.Popen[bytes]]] = {}
    with leaves_when_terminated() as begin:
        try:
            begin()
            for planned in plan(config):
                if planned.instance != "monitor":
                    running[planned.instance] = planned, _start(planned, file, folder, step_s)
            yield Processes(running, folder)
        finally:
            for _, process in running.values():
                process.terminate()
            for _, process in running.values():
                try:
                    process.wait(_STOP_S)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()


def _start(planned: ProcessPlan, file: Path, folder: Path, step_s: float) -> subprocess.Popen[bytes]:
    command = planned.command(sys.executable, file, folder / "run")
    if planned.stage is StopStage.WORKERS:
        command[command.index(f"cohort.services.{planned.folder}")] = "cohort.services.bench.tokens.worker"
    environment = {**os.environ, **planned.environment, STEP_VARIABLE: str(step_s), "TOKENIZERS_PARALLELISM": "false"}
    with (folder / f"{planned.instance}.log").open("wb") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=environment)


def thread_times(pid: int) -> ThreadTimes:
    """Return the times of a live process. A thread that has ended takes its time along."""
    loop_s = bus_s = other_s = 0.0
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            name = (task / "comm").read_text()
            spent_s = int((task / "schedstat").read_text().split()[0]) / 1e9
        except (FileNotFoundError, ProcessLookupError):
            continue
        if task.name == str(pid):
            loop_s += spent_s
        elif name.startswith(_BUS_THREADS):
            bus_s += spent_s
        else:
            other_s += spent_s
    return ThreadTimes(loop_s, bus_s, other_s)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2.0) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


_SETTLE_S = 1.0
"""Time between the last stream's first tokens and the first reading of the clocks."""
_BEGIN_TIMEOUT_S = 120.0
_SHORT_TOKENS = 4
"""Tokens of the answer to a short request."""


@dataclass(frozen=True, slots=True)
class Load:
    """`tokens_per_s` is what the engines make of it together: a step of a worker lasts as long as that needs."""

    streams: int
    tokens_per_s: float
    seconds: float
    workers: int
    gateways: int
    resumable: bool = False

    @property
    def step_s(self) -> float:
        return self.streams / self.tokens_per_s

    @property
    def output_tokens(self) -> int:
        """Tokens requested: more than any stream is sent before the measurement ends."""
        return int((_BEGIN_TIMEOUT_S + _SETTLE_S + self.seconds) / self.step_s) + 16


@dataclass(frozen=True, slots=True)
class Cost:
    """Microseconds of processor time per token, of all processes of a kind together; `bare_us` of a bare server that
    sends the same bytes, `write_us` of the writes to its sockets alone."""

    streams: int
    workers: int
    gateways: int
    resumable: bool
    tokens: int
    tokens_per_s: float
    tokens_per_read: float
    bytes_per_token: float
    gateway_us: float
    worker_us: float
    bus_us: float
    manager_us: float
    predictor_us: float
    engine_us: float
    bare_us: float
    write_us: float

    @property
    def path_us(self) -> float:
        """Time of every token in worker loop, bus and gateway."""
        return self.gateway_us + self.worker_us + self.bus_us

    @property
    def over_bare(self) -> float:
        return self.gateway_us / self.bare_us


@dataclass(frozen=True, slots=True)
class RequestCost:
    """Short requests over an instant engine, and over a bare server that sends the same answers: requests a second, and
    microseconds of processor time per request."""

    users: int
    requests_per_s: float
    gateway_us: float
    others_us: float
    bare_per_s: float
    bare_us: float

    @property
    def over_bare(self) -> float:
        return self.requests_per_s / self.bare_per_s


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Counts of what clients received, and times that processes spent, in `elapsed_s`."""

    elapsed_s: float
    events: int
    reads: int
    bytes: int
    spent: dict[str, ThreadTimes]

    def us(self, seconds: Iterable[float]) -> float:
        """Return microseconds per event."""
        return 1e6 * sum(seconds) / self.events


async def _stretch(clients: Clients, times: Callable[[], dict[str, ThreadTimes]], seconds: float) -> _Stretch:
    """Measure clients once all of them run. Raises `MeasurementFailed`."""
    await clients.all_running(_BEGIN_TIMEOUT_S)
    await asyncio.sleep(_SETTLE_S)
    loop = asyncio.get_running_loop()
    before, began_s, counted = times(), loop.time(), clients.counts()
    await asyncio.sleep(seconds)
    after, ended_s = times(), loop.time()
    clients.check()
    events, reads, nbytes = (now - then for now, then in zip(clients.counts(), counted, strict=True))
    if not events:
        raise MeasurementFailed(f"nothing was sent in {seconds:g} s")
    spent = {instance: found.since(before[instance]) for instance, found in after.items()}
    return _Stretch(ended_s - began_s, events, reads, nbytes, spent)


def measure(preset: str, settings: Sequence[str], model: str, load: Load) -> Cost:
    """Raise `MeasurementFailed`, `ConfigError`."""
    with tempfile.TemporaryDirectory(prefix="cohort-bench-") as name:
        folder = Path(name)
        config = configured(preset, settings, model, load, folder)
        requests = [
            chat(model_name(config), f"Stream {index} says", load.output_tokens, stream=True, resumable=load.resumable)
            for index in range(load.streams)
        ]
        with started(config, folder, load.step_s) as processes:
            processes.wait_ready()
            found, client = asyncio.run(_measured(Stream, config.gateway.port, requests, processes.times, load.seconds))
        assert isinstance(client, Stream)
        bare = _bare(Stream, requests, client.event, load.step_s, load.seconds, folder)
    workers = [times for name, times in found.spent.items() if name in config.instance_roles]
    gateways = [times for name, times in found.spent.items() if name.startswith("gateway")]
    return Cost(
        streams=load.streams,
        workers=load.workers,
        gateways=load.gateways,
        resumable=load.resumable,
        tokens=found.events,
        tokens_per_s=found.events / found.elapsed_s,
        tokens_per_read=found.events / max(1, found.reads),
        bytes_per_token=found.bytes / found.events,
        gateway_us=found.us(times.loop_s + times.other_s for times in gateways),
        worker_us=found.us(times.loop_s for times in workers),
        bus_us=found.us(times.bus_s for times in (*workers, *gateways)),
        manager_us=found.us([found.spent["manager"].whole_s]),
        predictor_us=found.us([found.spent["predictor"].whole_s]),
        engine_us=found.us(times.other_s for times in workers),
        bare_us=bare.us([bare.spent["bare"].whole_s]),
        write_us=write_us(client.sample, load),
    )


def measure_requests(preset: str, settings: Sequence[str], model: str, users: int, seconds: float) -> RequestCost:
    """Raise `MeasurementFailed`, `ConfigError`."""
    with tempfile.TemporaryDirectory(prefix="cohort-bench-") as name:
        folder = Path(name)
        config = configured(preset, settings, model, Load(users, 1.0, seconds, 1, 1), folder)
        requests = [
            chat(model_name(config), f"User {index} says", _SHORT_TOKENS, stream=False) for index in range(users)
        ]
        with started(config, folder, 0.0) as processes:
            processes.wait_ready()
            found, client = asyncio.run(_measured(User, config.gateway.port, requests, processes.times, seconds))
        bare = _bare(User, requests, client.sample, 0.0, seconds, folder)
    gateway = found.spent.pop("gateway")
    return RequestCost(
        users=users,
        requests_per_s=found.events / found.elapsed_s,
        gateway_us=found.us([gateway.whole_s]),
        others_us=found.us(times.whole_s for times in found.spent.values()),
        bare_per_s=bare.events / bare.elapsed_s,
        bare_us=bare.us([bare.spent["bare"].whole_s]),
    )


async def _measured(
    kind: type[Client],
    port: int,
    requests: Sequence[bytes],
    times: Callable[[], dict[str, ThreadTimes]],
    seconds: float,
) -> tuple[_Stretch, Client]:
    """Return what one client for each request had, and one of the clients."""
    clients = await Clients.open(kind, port, requests)
    try:
        return await _stretch(clients, times, seconds), clients.clients[0]
    finally:
        clients.close()


def _bare(
    kind: type[Client], requests: Sequence[bytes], sent: bytes, step_s: float, seconds: float, folder: Path
) -> _Stretch:
    """Measure a bare server that sends these bytes. Raises `MeasurementFailed`."""
    port, file = free_port(), folder / "sent"
    file.write_bytes(sent)
    command = [sys.executable, "-m", "cohort.services.bench.tokens.bare", str(port), str(step_s), str(file)]
    with leaves_when_terminated() as begin:
        begin()
        server = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            deadline_s = time.monotonic() + START_TIMEOUT_S
            while not _listens(port):
                if server.poll() is not None or time.monotonic() > deadline_s:
                    raise MeasurementFailed("the bare server did not start")
                time.sleep(0.05)
            found, _ = asyncio.run(_measured(kind, port, requests, lambda: {"bare": thread_times(server.pid)}, seconds))
            return found
        finally:
            server.kill()
            server.wait()


def _listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=2.0).close()
    except OSError:
        return False
    return True


def write_us(data: bytes, load: Load) -> float:
    """Return the processor time of one write to a connection on this machine, in the steps of a load."""
    pairs, spent_s, steps = list[tuple[socket.socket, socket.socket]](), 0.0, max(4, int(2.0 / load.step_s))
    try:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            for _ in range(load.streams):
                client = socket.create_connection(listener.getsockname())
                pairs.append((client, listener.accept()[0]))
                pairs[-1][1].setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(steps):
            time.sleep(load.step_s)
            began_s = time.thread_time()
            for _, writer in pairs:
                writer.send(data)
            spent_s += time.thread_time() - began_s
            for client, _ in pairs:
                client.recv(len(data))
    finally:
        for pair in pairs:
            for each in pair:
                each.close()
    return 1e6 * spent_s / (steps * load.streams)


def configured(preset: str, settings: Sequence[str], model: str, load: Load, folder: Path) -> Config:
    """Return a configuration with rows for all streams on any worker; nothing of it is written outside of `folder`."""
    flat = {
        "gateway.port": 0,
        "monitor.port": 0,
        "metrics.base_port": 0,
        "state.folder": str(folder),
        "engine.max_rows": max(64, load.streams),
        "drain_s": 0.1,
        "workers": [{"role": "unified", "count": load.workers, "threads": 1}],
    }
    if load.gateways > 1:
        flat["gateway.processes"] = load.gateways
    config = load_config(preset=preset, overrides=nested({**flat, **assigned_by(settings)}, "--set"))
    path = find(model).path if model else default_model_dir()
    return resolve(config, model=path, cores=1, free_port=free_port)
