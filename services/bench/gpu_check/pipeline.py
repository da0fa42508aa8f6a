"""Section: the whole pipeline on the one device under `cohort bench`: prefill and decode worker, then one unified."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

from cohort.services.bench.gpu_check.context import Check
from cohort.services.bench.gpu_check.shapes import shape_folder

_READY_S, _BENCH_S = 100, 120
_DRY_RUN_S = 500  # for either: nothing is measured, so a busy machine may take its time
_STOP_S = 20


def run(check: Check) -> None:
    model, shape = next(iter(check.shapes().items()))
    folder = shape_folder(check.folder / model, shape)
    for preset in ("disaggregated", "unified"):
        try:
            _measure(check, preset, folder)
        except (OSError, subprocess.SubprocessError, RuntimeError, LookupError, TypeError, ValueError) as error:
            check.found.checked(f"{preset}: serves", False, f"{type(error).__name__}: {error}")


def _measure(check: Check, preset: str, model: Path) -> None:
    port = _free_ports()
    found, real = check.found, check.real
    log = check.folder / f"{preset}.log"
    options = {
        "model.weights": "random",
        "model.dtype": "bfloat16" if real else "float32",
        "engine.device": str(check.device),
        "engine.max_rows": 128 if real else 8,
        "engine.max_step_tokens": 8192 if real else 128,
        "engine.prefill_chunk": 2048 if real else 64,
        "kv.cpu_memory_bytes": 8 << 20,
        "kv.host_memory_bytes": 0,
    }
    assignments = [word for key, value in options.items() for word in ("--set", f"{key}={value}")]
    with log.open("wb") as out:
        server = subprocess.Popen(
            [
                sys.executable,
                "-P",
                "-m",
                "cohort.services.launcher",
                "--model",
                str(model),
                "--preset",
                preset,
                "--port",
                str(port),
                *assignments,
            ],
            stdout=out,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
        )
    try:
        started = time.monotonic()
        _wait_ready(server, port, log, _READY_S if real else _DRY_RUN_S)
        found.measured(f"{preset}: ready", time.monotonic() - started, "s")
        load = ("512", "128", "64", "256") if real else ("24", "6", "2", "4")
        result = _bench(check, preset, port, *load)
        overall = result["runs"][0]["overall"]
        found.checked(
            f"{preset}: every request completed",
            overall["completed"] == int(load[3]),
            f"{overall['completed']} of {load[3]}, {load[2]} users, {load[0]} + {load[1]} tokens",
        )
        found.measured(f"{preset}: output", overall["output_tokens_per_s"], "tokens/s")
        for name, label in (("ttft_ms", "time to first token"), ("tpot_ms", "time per later token")):
            note = f"p99 {overall[name]['p99']:.1f}"
            found.measured(f"{preset}: {label}, median", overall[name]["p50"], "ms", note=note)
        if preset == "disaggregated":
            found.checked(f"{preset}: KV travelled", *_travelled(port))
    finally:
        server.send_signal(signal.SIGTERM)
        try:
            server.wait(timeout=_STOP_S)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


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


def _bench(check: Check, preset: str, port: int, prompt: str, output: str, users: str, requests: str) -> Any:
    report = check.folder / f"bench-{preset}.json"
    subprocess.run(
        [
            sys.executable,
            "-P",
            "-m",
            "cohort.services.bench",
            "--url",
            f"http://127.0.0.1:{port}",
            "--concurrency",
            users,
            "--num-requests",
            requests,
            "--input-len",
            prompt,
            "--output-len",
            output,
            "--warmup",
            users,
            "--quiet",
            "--json",
            str(report),
        ],
        check=True,
        timeout=_BENCH_S if check.real else _DRY_RUN_S,
        stdout=subprocess.DEVNULL,
        stdin=subprocess.DEVNULL,
    )
    return json.loads(report.read_text(encoding="utf-8"))


def _travelled(port: int) -> tuple[bool, str]:
    """Bytes per link, from the metrics of all processes together."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port + 1}/metrics", timeout=5) as answer:
        lines = answer.read().decode().splitlines()
    moved = [line for line in lines if "transfer" in line and "bytes_total" in line and not line.startswith("#")]
    totals = {line.partition("{")[2].partition("}")[0]: float(line.rpartition(" ")[2]) for line in moved}
    return any(totals.values()), "; ".join(f"{labels}: {value / 2**20:.0f} MiB" for labels, value in totals.items())
