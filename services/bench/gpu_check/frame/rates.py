"""The rates of the device itself: copy bandwidth, matrix rate; and the time of a call on it.

Called by the sections for the ceilings that their figures are held against, each in its own process. Random data
throughout: zeros run faster.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from cohort.services.bench.gpu_check.frame.bounds import Ceilings


def seconds(call: Callable[[], object], device: torch.device, *, repeats: int = 20, warm_ups: int = 3) -> float:
    """Median time of `call` on the device; every repetition is timed by itself, with events on a GPU."""
    for _ in range(warm_ups):
        call()
    if device.type != "cuda":
        times = []
        for _ in range(repeats):
            started = time.perf_counter()
            call()
            times.append(time.perf_counter() - started)
        return statistics.median(times)
    torch.cuda.synchronize(device)
    pairs = []
    for _ in range(repeats):
        begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        begin.record()  # type: ignore[no-untyped-call]
        call()
        end.record()  # type: ignore[no-untyped-call]
        pairs.append((begin, end))
    torch.cuda.synchronize(device)
    return float(statistics.median(begin.elapsed_time(end) for begin, end in pairs)) / 1000


def replayed(call: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """`call` as one launch, so that short kernels are not measured by the gaps between their launches."""
    if device.type != "cuda":
        return call
    side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream(device))  # its inputs may still be written there
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    side.synchronize()
    graph = torch.cuda.CUDAGraph()  # type: ignore[no-untyped-call]
    with torch.cuda.graph(graph, stream=side):
        call()
    replay: Callable[[], object] = graph.replay
    return replay


def random_bytes(size: int, device: torch.device) -> torch.Tensor:
    """uint8 [size], drawn on the device."""
    return torch.randint(0, 256, (size,), dtype=torch.uint8, device=device)


def copy_bytes_per_s(device: torch.device, size: int) -> float:
    """Bytes read plus bytes written per second of a copy of `size` bytes on the device."""
    source = random_bytes(size, device)
    target = torch.empty_like(source)
    return 2 * size / seconds(lambda: target.copy_(source), device)


def read_bytes_per_s(device: torch.device, size: int) -> float:
    """Bytes per second that the best of torch's reductions over `size` bytes reads."""
    whole = random_bytes(size, device).view(torch.int32).to(torch.float32)
    calls: tuple[Callable[[], object], ...] = (whole.sum, whole.amax, lambda: whole.view(1024, -1).sum(dim=1))
    return whole.nbytes / min(seconds(call, device, repeats=10) for call in calls)


def ceilings(device: torch.device, dtype: torch.dtype, *, real: bool) -> Ceilings:
    """The device's rates as bounds; on a processor (`real` False) of tiny data, to run the same code."""
    size, side = (4 << 30, 8192) if real else (1 << 20, 128)
    found = Ceilings(
        copy=copy_bytes_per_s(device, size),
        read=read_bytes_per_s(device, size),
        matrix=matrix_operations_per_s(device, side, dtype),
    )
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return found


def matrix_operations_per_s(device: torch.device, size: int, dtype: torch.dtype) -> float:
    """Of a product of two random square matrices."""
    first = torch.randn(size, size, device=device).to(dtype)
    second = torch.randn(size, size, device=device).to(dtype)
    out = torch.empty_like(first)
    return 2 * size**3 / seconds(lambda: torch.mm(first, second, out=out), device)
