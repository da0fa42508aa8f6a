"""Sections: whole pipelines on the one device under `cohort bench`.

pipeline    one unified worker, 64 users: greedy, then sampled; the figure to hold against another server
pipelines   prefill and decode worker sharing the device: `disaggregated`, `cohort`. KV must travel; the two workers'
            kernels take turns, so their speed says nothing about two devices
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
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

from cohort.common.paths import run_dir
from cohort.services.bench.gpu_check.frame.context import Check
from cohort.services.bench.gpu_check.frame.shapes import shape_folder

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
    with _served(check, preset, folder) as (port, ready_s):
        check.found.measured(f"{preset}: ready", ready_s, "s", note="all batch sizes recorded")
        compiled = _compiled_kernels()
        for label, body in kinds:
            name = f"{preset}, {label}"
            before = _metrics(port)
            started = time.monotonic()
            overall = _bench(check, name, port, load, body)
            _tell(check, name, load, overall)
            _idle(check, name, before, _metrics(port), time.monotonic() - started)
        if preset != "unified":
            _travelled(check, preset, port)
        if check.device.type == "cuda":
            new = _compiled_kernels() - compiled
            note = "new kernels in Triton's cache folder since the workers were ready"
            check.found.measured(f"{preset}: kernels compiled while serving", new, "kernels", at_most=0, note=note)


@contextmanager
def _served(check: Check, preset: str, model: Path) -> Iterator[tuple[int, float]]:
    """A pipeline that is ready: its port, and the seconds it took. Ended on leaving."""
    port, real = _free_ports(), check.real
    log = check.logs / f"pipeline-{preset}.log"
    options = {
        "model.weights": "random",
        "model.dtype": check.dtype_name,
        "engine.device": str(check.device),
        "engine.max_rows": 128 if real else 8,
        "engine.max_step_tokens": 8192 if real else 128,
        "engine.prefill_chunk": 2048 if real else 64,
        "kv.cpu_memory_bytes": 8 << 20,
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
        _wait_ready(server, port, log, check.guard.left_s - 5)
        yield port, time.monotonic() - started
    finally:
        server.send_signal(signal.SIGTERM)
        try:
            server.wait(timeout=_STOP_S)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()
        for part in (run_dir(port) / "logs").glob("*.log"):  # what each process said, classes recorded included
            shutil.copyfile(part, check.logs / f"pipeline-{preset}-{part.name}")


def _tell(check: Check, name: str, load: Load, overall: dict[str, Any]) -> None:
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


def _idle(check: Check, name: str, before: dict[str, float], after: dict[str, float], window_s: float) -> None:
    """The share of a busy worker's time in which no step runs: gaps between steps, of gaps and steps together."""
    gaps, steps = (_grown(before, after, what) for what in ("iteration_gap_seconds_sum", "step_seconds_sum"))
    if not before or not steps:
        check.found.said(f"{name}: idle between steps", "the workers' metrics do not tell")
        return
    check.found.measured(
        f"{name}: idle between steps",
        gaps / (gaps + steps),
        "of the time",
        note=f"by the workers' metrics: {gaps:.2f} s of gaps, {steps:.2f} s of steps in {window_s:.1f} s; the warm-up "
        "requests are in it",
    )


def _grown(before: dict[str, float], after: dict[str, float], name: str) -> float:
    return sum(value - before.get(key, 0.0) for key, value in after.items() if key.partition("{")[0].endswith(name))


def _travelled(check: Check, preset: str, port: int) -> None:
    """Bytes per link and direction, of all processes together; the monitor may not have asked them all yet."""
    until = time.monotonic() + (_METRICS_S if check.real else 10 * _METRICS_S)
    while not any((totals := _moved(_metrics(port))).values()) and time.monotonic() < until:
        time.sleep(0.5)
    words = (
        "; ".join(f"{link}: {value / 2**20:.1f} MiB" for link, value in totals.items()) or "the metrics name no bytes"
    )
    if preset == "disaggregated":
        check.found.checked(f"{preset}: KV travelled", any(totals.values()), words)
    else:  # where the first token comes soonest may be where the request is
        check.found.said(f"{preset}: KV travelled", words)


def _moved(metrics: dict[str, float]) -> dict[str, float]:
    """Bytes by link."""
    totals: dict[str, float] = {}
    for key, value in metrics.items():
        if "transfer" in key and "bytes_total" in key:
            found = re.search(r'link="(\w+)"', key)
            link = found.group(1) if found else "?"
            totals[link] = totals.get(link, 0.0) + value
    return totals


def _metrics(port: int) -> dict[str, float]:
    """Samples by name and labels, of all processes together; empty where they cannot be read."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port + 1}/metrics", timeout=5) as answer:
            lines = answer.read().decode().splitlines()
    except OSError:
        return {}
    found = {}
    for line in lines:
        key, _, value = line.rpartition(" ")
        if key and not line.startswith("#"):
            try:
                found[key] = float(value)
            except ValueError:
                continue
    return found


def _compiled_kernels() -> int:
    """In the folder that all processes of this run share."""
    folder = Path(os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache")
    return sum(1 for _ in folder.rglob("*.cubin")) if folder.is_dir() else 0


def _free_ports() -> int:
    """A port whose neighbours, which the pipeline's other processes take, are free too."""
    for port in range(18700, 28700, 100):
        if all(_is_free(port + offset) for offset in (0, 1, *range(10, 18))):
            return port
    raise RuntimeError("no free ports from 18700 on")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _wait_ready(server: subprocess.Popen[bytes], port: int, log: Path, seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if server.poll() is not None:
            break
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=2) as answer:
                if answer.status == 200:
                    return
        except OSError:
            time.sleep(0.3)
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    raise RuntimeError(f"not ready: {' / '.join(lines[-4:])}")


def _bench(check: Check, name: str, port: int, load: Load, body: str) -> dict[str, Any]:
    report = check.folder / f"bench-{name.replace(' ', '-').replace(',', '')}.json"
    options = {
        "--url": f"http://127.0.0.1:{port}",
        "--concurrency": load.users,
        "--num-requests": load.requests,
        "--input-len": load.prompt,
        "--output-len": load.output,
        "--warmup": load.users,
        "--extra-body": body,
        "--json": report,
    }
    words = [str(word) for pair in options.items() for word in pair]
    subprocess.run(
        [sys.executable, "-P", "-m", "cohort.services.bench", *words, "--quiet"],
        check=True,
        timeout=max(5.0, check.guard.left_s),
        stdout=subprocess.DEVNULL,
        stdin=subprocess.DEVNULL,
    )
    overall: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))["runs"][0]["overall"]
    return overall
