"""The rates of the device itself, the time of a call on it, and the least time that it can take: bytes over its
bandwidth or operations over its matrix rate, the larger.

The rates are those that the same process has measured, so an H100 is held against an H100. Called by the sections.
Random data throughout: zeros run faster.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from cohort.common.engine.config.model_config import DTYPE_BYTES, ModelGeometry


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Rates that a device reached: bytes a second of a copy (read and written) and of reading alone, operations a
    second of a large product in the model's precision."""

    copy: float
    read: float
    matrix: float

    @property
    def bandwidth(self) -> float:
        """Bytes per second of a kernel that mostly reads, at best."""
        return max(self.copy, self.read)

    def least_s(self, moved_bytes: float, operations: float) -> float:
        """Return the least time of one launch."""
        return max(moved_bytes / self.bandwidth, operations / self.matrix)


@dataclass(frozen=True, slots=True)
class Product:
    """A weight matrix [outputs, inputs] and how many of them a step multiplies with."""

    name: str
    outputs: int
    inputs: int
    count: int

    def least_s(self, rows: int, element_bytes: int, ceilings: Ceilings) -> float:
        """Return the least time of one product with `rows` rows: weights and rows read, results written."""
        elements = self.outputs * self.inputs + rows * (self.outputs + self.inputs)
        return ceilings.least_s(elements * element_bytes, 2.0 * rows * self.outputs * self.inputs)


def products(geometry: ModelGeometry) -> list[Product]:
    """Return a Llama-shaped model's five products; gate and up are one, as q, k and v are."""
    g = geometry
    heads = (g.num_heads + 2 * g.num_kv_heads) * g.head_dim
    return [
        Product("qkv", heads, g.hidden_size, g.num_layers),
        Product("attention out", g.hidden_size, g.num_heads * g.head_dim, g.num_layers),
        Product("gate and up", 2 * g.intermediate_size, g.hidden_size, g.num_layers),
        Product("down", g.hidden_size, g.intermediate_size, g.num_layers),
        Product("head", g.vocab_size, g.hidden_size, 1),
    ]


def products_s(geometry: ModelGeometry, dtype: str, rows: int, ceilings: Ceilings) -> float:
    """Return all products of a step of `rows` tokens, each of which gets logits."""
    size = DTYPE_BYTES[dtype]
    return sum(each.count * each.least_s(rows, size, ceilings) for each in products(geometry))


def decode_s(geometry: ModelGeometry, dtype: str, rows: int, context: int, ceilings: Ceilings) -> float:
    """Return the least a decode step takes: products, and decode attention of all layers (every row's keys and values
    once), one after the other, each at its own bound."""
    operations = 4.0 * geometry.num_heads * geometry.head_dim * rows * context * geometry.num_layers
    attention_s = ceilings.least_s(rows * context * geometry.kv_token_bytes(dtype), operations)
    return products_s(geometry, dtype, rows, ceilings) + attention_s


def matrix_elements(geometry: ModelGeometry) -> int:
    """Return weights of all layers' matrix products; without embedding and vocabulary."""
    return sum(each.count * each.outputs * each.inputs for each in products(geometry) if each.name != "head")


def prefill_operations(geometry: ModelGeometry, tokens: int) -> int:
    """Return multiplications and additions of one prompt: layers' products, and half the square of causal attention."""
    attention = 2 * 2 * geometry.num_heads * geometry.head_dim * tokens * (tokens + 1) // 2 * geometry.num_layers
    return 2 * matrix_elements(geometry) * tokens + attention


def seconds(call: Callable[[], object], device: torch.device, *, repeats: int = 20, warm_ups: int = 3) -> float:
    """Return median time of `call` on the device; every repetition is timed by itself, with events on a GPU."""
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
    """Return `call` as one launch, so that short kernels are not measured by the gaps between their launches."""
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
    """Return uint8 [size], drawn on the device."""
    return torch.randint(0, 256, (size,), dtype=torch.uint8, device=device)


def copy_bytes_per_s(device: torch.device, size: int) -> float:
    """Return bytes read plus bytes written per second of a copy of `size` bytes on the device."""
    source = random_bytes(size, device)
    target = torch.empty_like(source)
    return 2 * size / seconds(lambda: target.copy_(source), device)


def read_bytes_per_s(device: torch.device, size: int) -> float:
    """Return bytes per second that the best of torch's reductions over `size` bytes reads."""
    whole = random_bytes(size, device).view(torch.int32).to(torch.float32)
    calls: tuple[Callable[[], object], ...] = (whole.sum, whole.amax, lambda: whole.view(1024, -1).sum(dim=1))
    return whole.nbytes / min(seconds(call, device, repeats=10) for call in calls)


def ceilings(device: torch.device, dtype: torch.dtype, *, real: bool) -> Ceilings:
    """Return the device's rates as bounds; on a processor (`real` False) of tiny data, to run the same code."""
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
    """Measure a product of two random square matrices."""
    first = torch.randn(size, size, device=device).to(dtype)
    second = torch.randn(size, size, device=device).to(dtype)
    out = torch.empty_like(first)
    return 2 * size**3 / seconds(lambda: torch.mm(first, second, out=out), device)
