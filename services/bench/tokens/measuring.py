"""One measurement: processes up, streams running, processor time before and after a stretch of it.

Called by `command.py`. Gateways, manager and predictor are the product's; workers have a free engine (`worker.py`).
Clients count as cheaply as Python can: one protocol per connection, no parsing; an event is counted where `data: `
begins one, which texts never hold (the engine says words). A token that no client was sent costs the others.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from cohort.common.config import Config, dump_config, load_config, nested
from cohort.common.http.ports import free_port
from cohort.common.hub.model_source import find
from cohort.common.paths import default_model_dir
from cohort.services.bench.child import MeasurementFailed, leaves_when_terminated
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


_EVENT = b"data: {"
KEEP = "x-cohort-resume: keep\r\n"
_OK = b"HTTP/1.1 200"


class Stream(asyncio.Protocol):
    """One request: sent when the connection is there, its events counted until it closes."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self._tail = b""
        self._head = b""
        self.events = 0
        self.reads = 0
        self.bytes = 0
        self.ended = ""
        """Reason why there is nothing more; "" while it runs."""
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self.reads += 1
        self.bytes += len(data)
        if len(self._head) < len(_OK):
            self._head += data[: len(_OK)]
            if len(self._head) >= len(_OK) and not self._head.startswith(_OK):
                self.ended = data.decode(errors="replace")
        self.events += (self._tail + data).count(_EVENT)
        self._tail = data[-len(_EVENT) + 1 :]

    def connection_lost(self, error: Exception | None) -> None:
        self.ended = self.ended or f"connection lost: {error}"


class Clients:
    def __init__(self, streams: Sequence[Stream]) -> None:
        self._streams = streams

    @classmethod
    async def open(
        cls, host: str, port: int, model: str, count: int, output_tokens: int, *, resumable: bool = False
    ) -> Clients:
        """Connect `count` clients, each with a prompt of its own. `resumable`: they request streams to go on with."""
        loop = asyncio.get_running_loop()
        streams = []
        for index in range(count):
            request = _request(host, port, model, f"Stream {index} says", output_tokens, resumable=resumable)
            _, stream = await loop.create_connection(lambda request=request: Stream(request), host, port)  # type: ignore[misc]
            streams.append(stream)
        return cls(streams)

    async def all_running(self, timeout_s: float) -> None:
        """Wait until every stream has had two events. Raises `MeasurementFailed`."""
        try:
            async with asyncio.timeout(timeout_s):
                while min(stream.events for stream in self._streams) < 2:
                    self.check()
                    await asyncio.sleep(0.05)
        except TimeoutError:
            waiting = sum(stream.events < 2 for stream in self._streams)
            raise MeasurementFailed(f"{waiting} of {len(self._streams)} streams have not begun") from None

    def check(self) -> None:
        """Raise `MeasurementFailed` where a stream has ended."""
        for stream in self._streams:
            if stream.ended:
                raise MeasurementFailed(f"a stream ended early: {stream.ended[:500]}")

    def counts(self) -> tuple[int, int, int]:
        events, reads, sizes = zip(*((each.events, each.reads, each.bytes) for each in self._streams), strict=True)
        return sum(events), sum(reads), sum(sizes)

    def close(self) -> None:
        for stream in self._streams:
            if stream.transport is not None:
                stream.transport.abort()


def _request(host: str, port: int, model: str, prompt: str, output_tokens: int, *, resumable: bool) -> bytes:
    body = json.dumps(
        {
            "model": model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": output_tokens,
            "ignore_eos": True,
            "stream": True,
            "temperature": 0,
        }
    ).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}:{port}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        f"{KEEP if resumable else ''}\r\n"
    )
    return head.encode() + body


_SETTLE_S = 1.0
"""Time between the last stream's first tokens and the first reading of the clocks."""
_BEGIN_TIMEOUT_S = 120.0


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
    """Microseconds of processor time per token, of all processes of a kind together."""

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

    @property
    def path_us(self) -> float:
        """Time of every token in worker loop, bus and gateway."""
        return self.gateway_us + self.worker_us + self.bus_us


def measure(preset: str, settings: Sequence[str], model: str, load: Load) -> Cost:
    """Raise `MeasurementFailed`, `ConfigError`."""
    with tempfile.TemporaryDirectory(prefix="cohort-bench-") as name:
        folder = Path(name)
        config = configured(preset, settings, model, load, folder)
        with started(config, folder, load.step_s) as processes:
            processes.wait_ready()
            return asyncio.run(_measured(config, processes, load))


async def _measured(config: Config, processes: Processes, load: Load) -> Cost:
    name = config.model.served_name or Path(config.model.path).name
    clients = await Clients.open(
        "127.0.0.1", config.gateway.port, name, load.streams, load.output_tokens, resumable=load.resumable
    )
    try:
        await clients.all_running(_BEGIN_TIMEOUT_S)
        await asyncio.sleep(_SETTLE_S)
        loop = asyncio.get_running_loop()
        before, began_s = processes.times(), loop.time()
        counted = clients.counts()
        await asyncio.sleep(load.seconds)
        after, ended_s = processes.times(), loop.time()
        clients.check()
        tokens, reads, nbytes = (now - then for now, then in zip(clients.counts(), counted, strict=True))
    finally:
        clients.close()
    spent = {instance: times.since(before[instance]) for instance, times in after.items()}

    workers = [times for name, times in spent.items() if name in config.instance_roles]
    gateways = [times for name, times in spent.items() if name.startswith("gateway")]

    def us(seconds: Iterable[float]) -> float:
        return 1e6 * sum(seconds) / tokens

    return Cost(
        streams=load.streams,
        workers=load.workers,
        gateways=load.gateways,
        resumable=load.resumable,
        tokens=tokens,
        tokens_per_s=tokens / (ended_s - began_s),
        tokens_per_read=tokens / max(1, reads),
        bytes_per_token=nbytes / tokens,
        gateway_us=us(times.loop_s + times.other_s for times in gateways),
        worker_us=us(times.loop_s for times in workers),
        bus_us=us(times.bus_s for times in (*workers, *gateways)),
        manager_us=us([spent["manager"].whole_s]),
        predictor_us=us([spent["predictor"].whole_s]),
        engine_us=us(times.other_s for times in workers),
    )


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
