"""Pipelines for the comparisons in `scripts/bench_*`: started, loaded, asked for their figures, and always stopped.

    with pipeline("bucketserve", overlay, port) as served:
        run = served.bench("--rate", "5", "--num-requests", "80")
        figures = served.figures()

Runs the `cohort` command as a person would; decides nothing.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from cohort.common.config import load_config
from cohort.common.paths import run_dir

Figures = dict[str, float]


def cohort(*arguments: str) -> None:
    """Run it to its end, without its output. Raises `subprocess.CalledProcessError` when it fails."""
    subprocess.run([sys.executable, "-m", "cohort.services.cli", *arguments], check=True, stdout=subprocess.DEVNULL)


@dataclass(frozen=True, slots=True)
class Served:
    """A running pipeline, seen from outside."""

    url: str
    monitor_url: str

    def bench(self, *arguments: str) -> dict[str, Any]:
        """What `cohort bench` with these arguments reports of its run."""
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / "report.json"
            cohort("bench", "--url", self.url, *arguments, "--quiet", "--json", str(report))
            run: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))["runs"][0]
        return run

    def figures(self) -> dict[str, Figures]:
        """Every process's own figures by instance, as of its last heartbeat."""
        processes = json.loads(_get(f"{self.monitor_url}/api/state"))["processes"]
        return {process["instance"]: process["figures"] for process in processes}

    def metrics(self) -> str:
        """The Prometheus text of all processes."""
        return _get(f"{self.monitor_url}/metrics")


@contextmanager
def pipeline(preset: str, overlay: Mapping[str, Any], port: int, settings: Sequence[str] = ()) -> Iterator[Served]:
    """One pipeline of `preset` with `overlay` (a mapping like a configuration file's) and `settings`
    (SECTION.OPTION=VALUE) over it, on `port` of this machine; stopped in the end, also when a measurement fails or is
    interrupted or terminated. For the main thread only.

    Raises `subprocess.CalledProcessError` when it does not start.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "overlay.yaml"
        file.write_text(yaml.safe_dump(dict(overlay)), encoding="utf-8")
        assignments = [part for text in settings for part in ("--set", text)]
        cohort("serve", "--detach", "--preset", preset, "--config", str(file), "--port", str(port), *assignments)
        before = signal.signal(signal.SIGTERM, _leave)  # by default it would end us and leave the pipeline running
        try:
            monitor = load_config([run_dir(port) / "resolved.yaml"]).monitor
            yield Served(f"http://127.0.0.1:{port}", f"http://127.0.0.1:{monitor.port}")
        finally:
            signal.signal(signal.SIGTERM, before)
            cohort("serve", "--stop", "--port", str(port))


def _leave(*_: object) -> None:
    raise SystemExit(128 + signal.SIGTERM)


def _get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return str(answer.read().decode())
