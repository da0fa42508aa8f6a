"""Timelines of a pipeline's workers under load, each kept with the logs, and how much of it the GPU computed.

Called by `pipeline`, under a load of its own: a profiled step is slower. Workers write them (`timeline.py`).
"""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from cohort.common.engine.worker.timeline import timeline_file
from cohort.common.paths import run_dir
from cohort.services.bench.gpu_check.engine.load import Load
from cohort.services.bench.gpu_check.frame.context import Check
from cohort.services.bench.live.pipelines import ClientCommand, Served

_KEPT_BYTES = 4 << 20
_WRITTEN_S = 15.0
_POLL_S = 0.1
_ON_DEVICE = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})


def run(check: Check, preset: str, served: Served, load: Load) -> None:
    """Add a row for each worker."""
    folder = run_dir(urlsplit(served.url).port or 0)
    workers = {each["instance"]: each["pid"] for each in served.processes() if each["role"].endswith("_worker")}
    name, done = f"{preset}, timeline", threading.Event()
    asking = threading.Thread(target=_ask, args=(served, workers.values(), load.users // 2, done))
    asking.start()
    try:
        served.load([ClientCommand(name, replace(load, requests=load.users).words("{}"), 0.0)])
    finally:
        done.set()
        asking.join()
    until_s = time.monotonic() + _WRITTEN_S * (1 if check.real else 10)
    for worker in workers:
        _take(check, f"{name} of {worker}", timeline_file(folder, worker), until_s)


def _ask(served: Served, pids: Iterable[int], busy: int, done: threading.Event) -> None:
    """Signal the workers once so many requests run; not behind the end of the load."""
    while not done.wait(_POLL_S):
        with contextlib.suppress(OSError):
            if sum(stats.get("running", 0.0) for stats in served.stats().values()) < busy:
                continue
            for pid in pids:
                os.kill(pid, signal.SIGUSR1)
            return


def _take(check: Check, name: str, file: Path, until_s: float) -> None:
    while not file.is_file() and time.monotonic() < until_s:
        time.sleep(_POLL_S)
    if not file.is_file():
        check.found.checked(name, False, "the worker wrote none: its log says why")
        return
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    kept = check.logs / f"{name.replace(', ', '-').replace(' ', '-')}.json.gz"
    if file.stat().st_size <= _KEPT_BYTES:
        shutil.copyfile(file, kept)
    note = f"{len(events)} events; {kept.name}"
    busy = busy_share(events)
    if busy is None:
        check.found.checked(name, check.device.type != "cuda", f"no kernels; {note}")
    else:
        check.found.measured(f"{name}: GPU busy", busy, "of the time", note=note)


def busy_share(events: Iterable[Mapping[str, Any]]) -> float | None:
    """Return the share of the time from the first kernel or copy to the end of the last in which one ran; None: there
    are none."""
    spans = sorted((each["ts"], each["ts"] + each["dur"]) for each in events if each.get("cat") in _ON_DEVICE)
    if not spans:
        return None
    busy, until = 0.0, spans[0][0]
    for begin, end in spans:
        busy += max(0.0, end - max(begin, until))
        until = max(until, end)
    return float(busy / (until - spans[0][0])) if until > spans[0][0] else 1.0
