"""Sections: whole pipelines on the one device under `cohort bench`.

pipeline    one unified worker, 64 users: greedy, then sampled; the figure to hold against another server
pipelines   prefill and decode worker sharing the device: `disaggregated`, `cohort`. KV must travel; the two workers'
            kernels take turns, so their speed says nothing about two devices
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from cohort.common.http.ports import free_port
from cohort.common.paths import run_dir
from cohort.services.bench.gpu_check.frame.context import Check, shape_folder
from cohort.services.bench.live.pipelines import ClientCommand, Served

_MODEL = "Llama-3-8B"
_STOP_S = 12.0
_METRICS_S = 6.0
_SAMPLED = '{"temperature": 0.8, "top_p": 0.95}'


@dataclass(frozen=True, slots=True)
class Load:
    """Users who wait for their responses, and what they send."""

    users: int
    requests: int
    prompt: int
    output: int

    def words(self, body: str) -> tuple[str, ...]:
        """Return the options of `cohort bench`."""
        lengths = (f"--input-len={self.prompt}", f"--output-len={self.output}")
        users = (f"--concurrency={self.users}", f"--num-requests={self.requests}", f"--warmup={self.users}")
        return (*users, *lengths, f"--extra-body={body}")


def run(check: Check) -> None:
    load = Load(64, 256, 512, 128) if check.real else Load(2, 4, 24, 6)
    check.guard.item("unified", lambda: _pipeline(check, "unified", load, sampled=True), 115)


def run_others(check: Check) -> None:
    load = Load(32, 96, 512, 64) if check.real else Load(2, 4, 24, 6)
    for preset in ("disaggregated", "cohort"):
        check.guard.item(preset, partial(_pipeline, check, preset, load, sampled=False), 60)


def _pipeline(check: Check, preset: str, load: Load, *, sampled: bool) -> None:
    folder = shape_folder(check.folder / _MODEL, check.shape(_MODEL))
    kinds = [("greedy", "{}")] + ([("temperature 0.8, top-p 0.95", _SAMPLED)] if sampled else [])
    with _served(check, preset, folder) as (served, ready_s):
        check.found.measured(f"{preset}: ready", ready_s, "s", note="all batch sizes recorded")
        compiled = _compiled_kernels()
        for label, body in kinds:
            name = f"{preset}, {label}"
            before = _metrics(served)
            _add_findings(check, name, load, served.load([ClientCommand(name, load.words(body), 0.0)])[name])
            _idle(check, name, before, _metrics(served))
        if preset != "unified":
            _travelled(check, preset, served)
        if check.device.type == "cuda":
            new = _compiled_kernels() - compiled
            note = "new kernels in Triton's cache folder since the workers were ready"
            check.found.measured(f"{preset}: kernels compiled while serving", new, "kernels", at_most=0, note=note)


@contextmanager
def _served(check: Check, preset: str, model: Path) -> Iterator[tuple[Served, float]]:
    """Run a pipeline; yield it when ready, with the seconds it took."""
    port, real = free_port(), check.real
    log = check.logs / f"pipeline-{preset}.log"
    options = {
        "model.weights": "random",
        "model.dtype": check.dtype_name,
        "engine.device": str(check.device),
        "engine.max_rows": 128 if real else 8,
        "engine.max_step_tokens": 8192 if real else 128,
        "engine.prefill_chunk": 2048 if real else 64,
        "kv.memory_bytes": 0 if real else 8 << 20,
        "kv.host_memory_bytes": 0,
    }
    assignments = [word for key, value in options.items() for word in ("--set", f"{key}={value}")]
    command = ["-m", "cohort.services.launcher", "--model", str(model), "--preset", preset, "--port", str(port)]
    started = time.monotonic()
    with log.open("wb") as out:
        server = subprocess.Popen(
            [sys.executable, "-P", *command, *assignments],
            stdout=out,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
        )
    try:
        _wait_ready(server, port, log, check.guard.remaining_s - 5)
        yield Served(f"http://127.0.0.1:{port}", f"http://127.0.0.1:{port + 1}"), time.monotonic() - started
    finally:
        server.send_signal(signal.SIGTERM)
        try:
            server.wait(timeout=_STOP_S)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()
        for part in (run_dir(port) / "logs").glob("*.log"):  # what each process said, classes recorded included
            shutil.copyfile(part, check.logs / f"pipeline-{preset}-{part.name}")


def _add_findings(check: Check, name: str, load: Load, overall: dict[str, Any]) -> None:
    found = check.found
    found.checked(
        f"{name}: every request completed",
        overall["completed"] == load.requests,
        f"{overall['completed']} of {load.requests}, {load.users} users, {load.prompt} + {load.output} tokens",
    )
    found.measured(
        f"{name}: output",
        overall["output_tokens_per_s"],
        "tokens/s",
        note=f"{load.users} users, {load.prompt} + {load.output} tokens, {check.dtype_name}: for other servers too",
    )
    for key, label in (("ttft_ms", "time to first token"), ("tpot_ms", "time per later token")):
        if overall[key] is not None:
            note = f"p99 {overall[key]['p99']:.1f}"
            found.measured(f"{name}: {label}, median", overall[key]["p50"], "ms", note=note)


def _idle(check: Check, name: str, before: str, after: str) -> None:
    """Measure the share of a busy worker's time without a step: gaps between steps, of gaps and steps together."""
    gaps, steps = (_total(after, what) - _total(before, what) for what in ("iteration_gap_seconds", "step_seconds"))
    if not before or not steps:
        check.found.add_note(f"{name}: idle between steps", "the workers' metrics do not tell")
        return
    note = f"by the workers' metrics: {gaps:.2f} s of gaps, {steps:.2f} s of steps; the warm-up requests are in it"
    check.found.measured(f"{name}: idle between steps", gaps / (gaps + steps), "of the time", note=note)


def _total(metrics: str, name: str) -> float:
    """Return the total of a histogram's sums, over all processes."""
    return sum(float(value) for value in re.findall(rf"^\w*{name}_sum(?:{{.*}})? (\S+)$", metrics, re.MULTILINE))


def _travelled(check: Check, preset: str, served: Served) -> None:
    """Check the bytes per link, of all processes together; the monitor may not have polled them all yet."""
    until = time.monotonic() + (_METRICS_S if check.real else 10 * _METRICS_S)
    while not any((totals := _moved(_metrics(served))).values()) and time.monotonic() < until:
        time.sleep(0.5)
    note = "; ".join(f"{link}: {value / 2**20:.1f} MiB" for link, value in totals.items())
    if preset == "disaggregated":
        check.found.checked(f"{preset}: KV travelled", any(totals.values()), note)
    else:  # where the first token comes soonest may be where the request is
        check.found.add_note(f"{preset}: KV travelled", note or "the metrics name no bytes")


def _moved(metrics: str) -> dict[str, float]:
    """Return the bytes by link."""
    totals: dict[str, float] = {}
    for link, value in re.findall(r'^\w*transfer\w*bytes_total{.*link="(\w+)".*} (\S+)$', metrics, re.MULTILINE):
        totals[link] = totals.get(link, 0.0) + float(value)
    return totals


def _metrics(served: Served) -> str:
    """Return the metrics of all processes; empty where they cannot be read yet."""
    try:
        return served.metrics()
    except OSError:
        return ""


def _compiled_kernels() -> int:
    """Count the kernels in the folder that all processes of this run share."""
    folder = Path(os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache")
    return sum(1 for _ in folder.rglob("*.cubin")) if folder.is_dir() else 0


def _wait_ready(server: subprocess.Popen[bytes], port: int, log: Path, seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until and server.poll() is None:
        try:  # an answer that is no 200 is an OSError, too
            urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=2).close()
            return
        except OSError:
            time.sleep(0.3)
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    raise RuntimeError(f"not ready: {' / '.join(lines[-4:])}")
