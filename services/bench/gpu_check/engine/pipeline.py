"""Sections: whole pipelines on the one device under `cohort bench`, each with a timeline of its workers under load.

pipeline                 the default preset, one worker, 64 users: greedy, then sampled; what to hold against others
pipeline-unified         greedy alone, under the simplest preset
pipeline-disaggregated   prefill and decode worker sharing the device, a model of four layers. KV must travel; the two
                         workers' kernels take turns, so their speed says nothing about two devices

KV has a fixed size each, so that all of plan A lies side by side in 78 GiB.
"""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cohort.common.http.ports import free_port
from cohort.common.paths import run_dir
from cohort.services.bench.gpu_check.engine import timelines
from cohort.services.bench.gpu_check.engine.load import Load
from cohort.services.bench.gpu_check.frame.context import Check, shape_folder
from cohort.services.bench.live.pipelines import ClientCommand, Served

_MODEL = "Llama-3-8B"
_KV_BYTES = 12 << 30  # 64 rows of 640 tokens of an 8B model take 5
_SMALL_KV_BYTES = 2 << 30  # each: 32 rows of 576 tokens take 0.3
_COMPILED = re.compile(r"^cohort_kernel_compilations_total(?:{.*})? (\S+)$", re.MULTILINE)
_STOP_S = 12.0
_METRICS_S = 6.0
_SAMPLED = '{"temperature": 0.8, "top_p": 0.95}'


def run_default(check: Check) -> None:
    check.guard.item("cohort", lambda: _one_worker(check, "cohort", sampled=True), 150)


def run_unified(check: Check) -> None:
    check.guard.item("unified", lambda: _one_worker(check, "unified", sampled=False), 150)


def _one_worker(check: Check, preset: str, *, sampled: bool) -> None:
    load = Load(64, 256 if check.alone else 128, 512, 128) if check.real else Load(2, 4, 24, 6)
    model = shape_folder(check.folder / _MODEL, check.shape(_MODEL))
    _pipeline(check, preset, model, load, kv_bytes=_KV_BYTES, sampled=sampled)


def run_disaggregated(check: Check) -> None:
    load = Load(32, 96 if check.alone else 64, 512, 64) if check.real else Load(2, 4, 24, 6)
    shape = check.shape(_MODEL)
    shape = {**shape, "num_hidden_layers": min(4, shape["num_hidden_layers"])}
    model = shape_folder(check.folder / "four-layers", shape)
    name = "disaggregated"
    check.guard.item(name, lambda: _pipeline(check, name, model, load, kv_bytes=_SMALL_KV_BYTES, sampled=False), 150)


def _pipeline(check: Check, preset: str, model: Path, load: Load, *, kv_bytes: int, sampled: bool) -> None:
    kinds = [("greedy", "{}")] + ([("temperature 0.8, top-p 0.95", _SAMPLED)] if sampled else [])
    with _served(check, preset, model, kv_bytes) as (served, ready_s):
        check.found.measured(f"{preset}: ready", ready_s, "s", note="all batch sizes recorded")
        for label, body in kinds:
            name = f"{preset}, {label}"
            before = _metrics(served)
            _add_findings(check, name, load, served.load([ClientCommand(name, load.words(body), 0.0)])[name])
            _idle(check, name, before, _metrics(served))
        if preset == "disaggregated":
            _travelled(check, preset, served)
        timelines.run(check, preset, served, load)
        if check.device.type == "cuda":
            new = sum(map(float, _COMPILED.findall(_metrics(served))))
            name = f"{preset}: kernels compiled while serving"
            check.found.measured(name, new, "kernels", at_most=0, note="by the workers' metrics", speed=False)


@contextmanager
def _served(check: Check, preset: str, model: Path, kv_bytes: int) -> Iterator[tuple[Served, float]]:
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
        "engine.claim_dir": check.folder / "claims",  # sections side by side share the device, too
        "kv.memory_bytes": kv_bytes if real else 8 << 20,
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
    check.found.checked(f"{preset}: KV travelled", any(totals.values()), note or "the metrics name no bytes")


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
