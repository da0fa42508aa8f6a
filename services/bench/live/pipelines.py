"""Pipelines to be compared: started, loaded, asked for their stats, and always stopped.

    with pipeline("bucketserve", overlay, port) as served:
        reports = served.load([ClientCommand("client", ("--rate=5", "--num-requests=80"), after_s=0.0)])
        stats = served.stats()

Runs the `cohort` command as a person would; decides nothing. Called by `measured`, `cohort profile`, and by what breaks
pipelines.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from cohort.common.config import load_config
from cohort.common.paths import run_dir
from cohort.services.bench.child import MeasurementFailed, leaves_when_terminated

Stats = dict[str, float]

UNLEARNED = {"learns": False}
"""Options of a length predictor that never trains: training is processor time that no simulation has."""
_POLL_S = 0.1


def cohort(*arguments: str) -> None:
    """Run it to its end, without its output; Ctrl-C waits for that, too, once. Raises `MeasurementFailed`."""
    process = start_cohort(*arguments)
    try:
        done = process.wait()
    except KeyboardInterrupt:
        process.wait()
        raise
    if done:
        raise MeasurementFailed(f"`cohort {' '.join(arguments)}` ended with {done}")


def start_cohort(*arguments: str) -> subprocess.Popen[bytes]:
    """Start a command out of reach of a signal to the whole group (Ctrl-C, `timeout`): `serve --detach` that dies
    half-way would leave processes that nobody stops. The caller ends what it started."""
    command = [sys.executable, "-m", "cohort.services.cli", *arguments]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)


@dataclass(frozen=True, slots=True)
class ClientCommand:
    """`arguments` of `cohort bench`, without the server and the output; begun `after_s` seconds after the first."""

    name: str
    arguments: tuple[str, ...]
    after_s: float


@dataclass(frozen=True, slots=True)
class Served:
    url: str
    monitor_url: str

    def load(self, clients: Sequence[ClientCommand]) -> dict[str, dict[str, Any]]:
        """Run all clients to their end, each from its `after_s` on; return their reports of all requests, by name.
        Raises `MeasurementFailed`."""
        with tempfile.TemporaryDirectory() as folder:
            reports = {client.name: Path(folder) / f"{number}.json" for number, client in enumerate(clients)}
            running: dict[str, subprocess.Popen[bytes]] = {}
            started_s = time.monotonic()
            try:
                for client in sorted(clients, key=lambda client: client.after_s):
                    time.sleep(max(0.0, started_s + client.after_s - time.monotonic()))
                    written = ("--quiet", "--json", str(reports[client.name]))
                    running[client.name] = start_cohort("bench", "--url", self.url, *client.arguments, *written)
                _wait_for(running)
            finally:
                for process in running.values():
                    process.kill()
                    process.wait()
            return {name: json.loads(report.read_text())["runs"][0]["overall"] for name, report in reports.items()}

    def processes(self) -> list[dict[str, Any]]:
        """Return what the monitor's page shows of every process."""
        found: list[dict[str, Any]] = json.loads(_get(f"{self.monitor_url}/api/state"))["processes"]
        return found

    def stats(self) -> dict[str, Stats]:
        """Return the stats of every process, by instance, as of its last heartbeat."""
        return {process["instance"]: process["stats"] for process in self.processes()}

    def metrics(self) -> str:
        """Return the Prometheus text of all processes."""
        return _get(f"{self.monitor_url}/metrics")


@contextmanager
def pipeline(preset: str, overlay: Mapping[str, Any], port: int, settings: Sequence[str] = ()) -> Iterator[Served]:
    """Run one pipeline of `preset` with `overlay` (a mapping like a configuration file's) and `settings`
    (SECTION.OPTION=VALUE) over it, on `port` of this machine; stopped in the end, also when a measurement fails or is
    interrupted or terminated. Unless `overlay` says otherwise its length predictor begins empty and stores nothing:
    measurements neither depend on each other nor teach the user's own. For the main thread only.

    Raises `MeasurementFailed` when it does not start.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "overlay.yaml"
        state = {"folder": str(Path(folder) / "state"), **overlay.get("state", {})}
        file.write_text(yaml.safe_dump({**overlay, "state": state}), encoding="utf-8")
        assignments = [part for text in settings for part in ("--set", text)]
        with leaves_when_terminated() as begin:
            try:
                cohort(
                    "serve", "--detach", "--preset", preset, "--config", str(file), "--port", str(port), *assignments
                )
            except KeyboardInterrupt:
                cohort("serve", "--stop", "--port", str(port))
                raise
            try:
                begin()
                monitor = load_config([run_dir(port) / "resolved.yaml"]).monitor
                yield Served(f"http://127.0.0.1:{port}", f"http://127.0.0.1:{monitor.port}")
            finally:
                cohort("serve", "--stop", "--port", str(port))


def _wait_for(clients: Mapping[str, subprocess.Popen[bytes]]) -> None:
    """Wait until all are done, or one has failed: the others measure nothing that counts then."""
    waiting = dict(clients)
    while waiting:
        for name, process in list(waiting.items()):
            if (status := process.poll()) is None:
                continue
            if status:
                raise MeasurementFailed(f"the client {name} ended with {status}")
            del waiting[name]
        if waiting:
            time.sleep(_POLL_S)


def _get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return str(answer.read().decode())
