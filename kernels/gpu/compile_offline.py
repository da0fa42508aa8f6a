"""Compile every kernel for a GPU that is not here: `python -m cohort.kernels.gpu.compile_offline`.

Triton brings its own assembler, so machine code for any NVIDIA GPU can be made anywhere. Prints, for the models named
below, each kernel's registers, spills and shared memory. The interpreter proves what the kernels compute; this proves
that a compiler takes them, as the engine calls them. Runs for people and tests; serving never calls it.
"""

import argparse
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from cohort.kernels.attention_meta import AttentionMeta
from cohort.kernels.gpu import attention, elementwise, prefill, slots
from cohort.kernels.gpu.plan import decode_plan

_MULTIPROCESSORS = 132
_SHARED_LIMIT = 227 << 10


@dataclass(frozen=True, slots=True)
class Shape:
    """A model as the kernels see it."""

    name: str
    query_heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    inner: int
    dtype: torch.dtype


SHAPES = (
    Shape("Llama-3-8B", 32, 8, 128, 4096, 14336, torch.bfloat16),
    Shape("Qwen2.5-14B", 40, 8, 128, 5120, 13824, torch.bfloat16),
    Shape("SmolLM2-135M", 9, 3, 64, 576, 1536, torch.float32),
)


@dataclass(frozen=True, slots=True)
class Compiled:
    """One kernel as the assembler left it."""

    name: str
    registers: int
    spilled_bytes: int
    shared_bytes: int
    ptx: str

    @property
    def fits(self) -> bool:
        return self.spilled_bytes == 0 and self.shared_bytes <= _SHARED_LIMIT


class _AbsentGpu:
    """As much of a Triton driver as compiling asks for."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_all(shape: Shape, capability: int = 90) -> Iterator[Compiled]:
    """Every kernel as a step of `shape` launches it, for compute capability `capability` (90 = Hopper)."""
    launch = JITFunction.run
    compiled: list[Any] = []

    def compile_only(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        compiled.append(launch(kernel, *args, grid=grid, warmup=True, **options))

    before = driver._active
    driver.set_active(_AbsentGpu(capability))
    JITFunction.run = compile_only
    try:
        _launch_everything(shape)
    finally:
        JITFunction.run = launch
        driver._active = before
    for kernel in compiled:
        yield _read(kernel)


def _launch_everything(shape: Shape) -> None:
    """The launches of one decode step and one prefill step, on tensors that are not read."""
    rows, width, block_size, heads = 16, 64, 16, shape.query_heads
    kv = torch.empty(4, 2, 2, shape.kv_heads, block_size, shape.head_dim, dtype=shape.dtype)
    numbers = torch.zeros(rows + 1, dtype=torch.int32)
    tables = torch.zeros(rows, width, dtype=torch.int32)
    fused = torch.empty(rows, heads + 2 * shape.kv_heads, shape.head_dim, dtype=shape.dtype)
    query, key, value = torch.split(fused, [heads, shape.kv_heads, shape.kv_heads], dim=1)
    out = torch.empty(rows, heads, shape.head_dim, dtype=shape.dtype)
    cos = torch.empty(64, shape.head_dim // 2)
    positions = torch.zeros(rows, dtype=torch.int64)
    meta = AttentionMeta(numbers, numbers[1:], tables, None, block_size, 1, 0)
    plan = decode_plan(head_dim=shape.head_dim, element_bytes=kv.element_size(), multiprocessors=_MULTIPROCESSORS)
    attention.decode(query, kv, 1, meta, 1.0, out, 0, plan)
    meta = AttentionMeta(numbers, numbers[1:], tables, None, block_size, 512, rows, 0, 1024)
    attention.prefill(query, kv, 1, meta, 1.0, out)
    prefill.stage(kv, 1, meta, torch.empty(2, 1024, shape.kv_heads, shape.head_dim, dtype=shape.dtype), numbers)
    tokens = torch.empty(rows, 2, 2, shape.kv_heads, shape.head_dim, dtype=shape.dtype)
    slots.gather_slots(kv, positions, tokens)
    slots.scatter_slots(tokens, kv, positions)
    elementwise.rope_and_write_kv(query, key, value, cos, cos, positions, kv, 1, positions)
    elementwise.write_kv(key, value, kv, 1, positions)
    elementwise.rope_inplace(query, key, cos, cos, positions)
    hidden = torch.empty(rows, shape.hidden, dtype=shape.dtype)
    elementwise.rms_norm(hidden, hidden[0], 1e-5, hidden)
    elementwise.rms_norm(query, query[0, 0], 1e-5, query)
    inner = torch.empty(rows, 2 * shape.inner, dtype=shape.dtype)
    elementwise.silu_mul(inner, inner[:, : shape.inner].clone())


def _read(kernel: Any) -> Compiled:
    cubin = next(Path(path) for name, path in kernel.metadata_group.items() if name.endswith(".cubin"))
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    usage = subprocess.run([tool, "--dump-resource-usage", cubin], capture_output=True, text=True, check=True).stdout
    found = {name: int(number) for name, number in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    return Compiled(
        kernel.metadata.name, found["REG"], found["STACK"] + found["LOCAL"], kernel.metadata.shared, kernel.asm["ptx"]
    )


def main() -> int:
    """One line per kernel; 1 when one spills or does not fit."""
    parser = argparse.ArgumentParser(prog="python -m cohort.kernels.gpu.compile_offline", description=__doc__)
    parser.add_argument("--capability", type=int, default=90, help="compute capability × 10 (default: %(default)s)")
    parser.add_argument("--model", choices=[shape.name for shape in SHAPES], help="only this one's shapes")
    arguments = parser.parse_args()
    fit = True
    for shape in SHAPES:
        if arguments.model not in (None, shape.name):
            continue
        for kernel in compile_all(shape, arguments.capability):
            fit &= kernel.fits
            print(
                f"{shape.name:>12} {kernel.name:<18} {kernel.registers:3} registers, {kernel.spilled_bytes:3} bytes "
                f"spilled, {kernel.shared_bytes / 1024:5.1f} KiB shared; loads of 16 bytes: "
                f"{len(re.findall(r'ld.global[^;]*v4.b32|cp.async.*0x10', kernel.ptx))}"
            )
    return 0 if fit else 1


if __name__ == "__main__":
    sys.exit(main())
