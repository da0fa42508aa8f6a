"""The processes of a measurement, and the processor time that each of their threads has used.

Gateways, manager and predictor are the product's; workers have a free engine (`worker.py`).
Called by `measuring.py`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from cohort.common.config import Config, dump_config
from cohort.services.bench.child import MeasurementFailed, leaves_when_terminated
from cohort.services.launcher.plan import ProcessPlan, StopStage, plan

START_TIMEOUT_S = 60.0
STEP_VARIABLE = "COHORT_BENCH_STEP_S"
"""In a worker's environment: seconds of a step of its engine."""
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
        """Raises `MeasurementFailed` with the end of the log of what ended instead."""
        deadline_s = time.monotonic() + START_TIMEOUT_S
        for instance, (planned, _) in self._running.items():
            while not _answers(planned.ready_url):
                ended = [name for name, (_, process) in self._running.items() if process.poll() is not None]
                if ended or time.monotonic() > deadline_s:
                    late = ended[0] if ended else instance
                    raise MeasurementFailed(f"{late} did not become ready:\n{self._tail(late)}")
                time.sleep(0.05)

    def times(self) -> dict[str, ThreadTimes]:
        """By instance, now."""
        return {instance: thread_times(process.pid) for instance, (_, process) in self._running.items()}

    def _tail(self, instance: str) -> str:
        lines = (self._folder / f"{instance}.log").read_text(errors="replace").splitlines()
        return "\n".join(lines[-8:])


@contextmanager
def started(config: Config, folder: Path, step_s: float) -> Iterator[Processes]:
    """All but the monitor, over a resolved configuration; ended with the block."""
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
    """Of a live process. A thread that has ended takes its time along."""
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
