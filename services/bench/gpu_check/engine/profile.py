"""Which kernels take the time: torch's profiler around some repetitions, as a table of the longest.

Called by the sections that measure a model. The profiler slows the host down, so nothing else is measured within.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from cohort.services.bench.gpu_check.frame.context import Check

TOP = 15
_TRACE_BYTES = 4 << 20


def by_kernel(check: Check, name: str, call: Callable[[], object], repeats: int = 3) -> None:
    """Profile `call` and keep the table; on a GPU also the trace, and a row for the share that is idle within."""
    call()
    real = check.device.type == "cuda"
    if real:
        torch.cuda.synchronize(check.device)
    activities = [ProfilerActivity.CUDA, ProfilerActivity.CPU] if real else [ProfilerActivity.CPU]
    with profile(activities=activities) as found:
        for _ in range(repeats):
            call()
        if real:
            torch.cuda.synchronize(check.device)
    kernels = longest(found.key_averages(), repeats, device=real)
    total = sum(kernel["us"] for kernel in kernels)
    for kernel in kernels:
        kernel["share"] = kernel["us"] / total if total else 0.0
    kept = kernels[:TOP]
    words = f"{total / 1e3:.3f} ms of kernels a call, {sum(kernel['calls'] for kernel in kernels):.0f} launches"
    check.keep_profile(name, words, kept)
    leading = ", ".join(f"{kernel['name'][:40]} {kernel['share']:.0%}" for kernel in kept[:3])
    check.found.said(f"{name}: by kernel", f"{words}; {leading}")
    if real:
        _keep_trace(check, name, found)


def longest(averages: Any, repeats: int, *, device: bool) -> list[dict[str, Any]]:
    """Per kernel and call: name, launches, microseconds; the longest first."""
    kernels = []
    for event in averages:
        if device and str(getattr(event, "device_type", "")).endswith("CPU"):
            continue
        us = event.self_device_time_total if device else event.self_cpu_time_total
        if us > 0:
            kernels.append({"name": event.key, "calls": event.count / repeats, "us": us / repeats})
    return sorted(kernels, key=lambda kernel: float(kernel["us"]), reverse=True)


def _keep_trace(check: Check, name: str, found: Any) -> None:
    file = check.logs / f"{name.replace(' ', '-').replace(',', '').replace(':', '')}.trace.json.gz"
    with contextlib.suppress(OSError, RuntimeError):
        found.export_chrome_trace(str(file))
        if file.stat().st_size > _TRACE_BYTES:
            file.unlink()
