"""Compile every kernel for a GPU that is not here: `python -m cohort.kernels.gpu.compile_offline`.

Triton brings its own assembler, so machine code for any NVIDIA GPU can be made anywhere. Prints, for the models named
below, each variant's registers, spills and shared memory; `--all` adds heads of 64, 128 and 256 in all three types. Of
a rank's part of a mixture it compiles the experts, unless `--model` names it. The interpreter proves what the kernels
compute; this proves that a compiler takes them, as the engine calls them. Runs for people and tests; serving never
calls it.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from cohort.kernels.batch_invariance import FixedProduct
from cohort.kernels.code_dtypes import E2M1, MX_GROUP
from cohort.kernels.gpu.plan import decode_plan, latent_decode_plan, latent_group
from cohort.kernels.gpu.variants import Served, ServedExperts, ServedLatents, compile_only, launches
from cohort.kernels.types import ServedProduct

_MULTIPROCESSORS = 132
_SPILLED_LIMIT = 32
"""Bytes of a thread, eight registers: releases of Triton differ by as many, and a kernel does not notice."""
_SHARED_LIMIT = 227 << 10
_MAX_ROWS = 256
_SOME = frozenset({False, True})  # layers with a window beside others


def _model(
    query_heads: int, kv_heads: int, head_dim: int, hidden: int, inner: int, vocabulary: int, dtype: str, **more: Any
) -> Served:
    kind: torch.dtype = getattr(torch, dtype)
    return Served(query_heads, kv_heads, head_dim, hidden, inner, vocabulary, kind, rotary_half=head_dim // 2, **more)


_LLAMA_3_8B = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))  # the products of its layers


def _codes(codes: torch.dtype, group: int, *, offsets: bool) -> tuple[ServedProduct, ...]:
    return tuple(ServedProduct(outputs, inputs, codes, group, offsets, False) for outputs, inputs in _LLAMA_3_8B)


def _invariant(*shapes: tuple[int, int]) -> dict[str, Any]:
    return {"batch_invariant": True, "fixed": tuple(FixedProduct(*shape, False) for shape in shapes)}


_MIXTRAL = ServedExperts(count=8, per_token=2, inner=14336, shared_inner=0, rounded=False)
_QWEN3_EXPERTS = ServedExperts(count=128, per_token=8, inner=768, shared_inner=0, rounded=True)
_LLAMA = (32, 8, 128, 4096, 14336, 128256, "bfloat16")
_QWEN3 = (32, 4, 128, 2048, 6144, 151936, "bfloat16")
_GEMMA_2: dict[str, Any] = {"windowed": _SOME, "capped": True, "wide_norms": True}
_GPT_OSS_EXPERTS = ServedExperts(count=32, per_token=4, inner=2880, shared_inner=0, rounded=True, clamped=True)
_GPT_OSS_MXFP4 = (
    ServedProduct(5760, 2880, E2M1, MX_GROUP, False, True, 32, gathers=True, clamped=True),
    ServedProduct(2880, 2880, E2M1, MX_GROUP, False, True, 32, clamped=True),
)
_GPT_OSS: dict[str, Any] = {"windowed": _SOME, "sinks": True, "wide_norms": True} | {
    "experts": _GPT_OSS_EXPERTS,
    "products": _GPT_OSS_MXFP4,
}


def _expert_codes(codes: torch.dtype, group: int, *, offsets: bool) -> tuple[ServedProduct, ...]:
    """Return the products of Qwen3-30B-A3B's experts."""
    shapes = ((1536, 2048, True), (2048, 768, False))
    return tuple(ServedProduct(out, inputs, codes, group, offsets, False, 128, first) for out, inputs, first in shapes)


MODELS = {
    "Llama-3-8B": _model(*_LLAMA),
    "Qwen2.5-14B": _model(40, 8, 128, 5120, 13824, 152064, "bfloat16"),
    "SmolLM2-135M": _model(9, 3, 64, 576, 1536, 49152, "float32"),
    "Mixtral-8x7B": _model(32, 8, 128, 4096, 14336, 32000, "bfloat16", experts=_MIXTRAL),
    "Qwen3-30B-A3B": _model(*_QWEN3, experts=_QWEN3_EXPERTS),
    "Llama-3-8B in 4 bits": _model(*_LLAMA, products=_codes(torch.uint8, 128, offsets=True)),
    "Llama-3-8B in FP8": _model(*_LLAMA, products=_codes(torch.float8_e4m3fn, 128, offsets=False)),
    "Llama-3-8B, KV in FP8": _model(*_LLAMA, fp8=True),
    "Qwen3-30B-A3B in FP8": _model(*_QWEN3, products=_expert_codes(torch.float8_e4m3fn, 128, offsets=False)),
    "Qwen3-30B-A3B in 4 bits": _model(*_QWEN3, products=_expert_codes(torch.uint8, 128, offsets=True)),
    "Qwen3-30B-A3B in INT8": _model(*_QWEN3, products=_expert_codes(torch.int8, 2048, offsets=False)),
    "gpt-oss-20b": _model(64, 8, 64, 2880, 2880, 201088, "bfloat16", **_GPT_OSS),
    "Gemma-2-9B": _model(16, 8, 256, 3584, 14336, 256000, "bfloat16", **_GEMMA_2),
    "Gemma-2-27B": _model(32, 16, 128, 4608, 36864, 256000, "bfloat16", **_GEMMA_2),
}
_OUTER = (128256, 4096)
MODELS = {name: replace(served, gelu=name.startswith("Gemma")) for name, served in MODELS.items()}
MODELS |= {
    "Llama-3-8B, batch-invariant": replace(MODELS["Llama-3-8B"], **_invariant(*_LLAMA_3_8B, _OUTER)),
    "SmolLM2-135M, batch-invariant": replace(MODELS["SmolLM2-135M"], **_invariant((960, 576), (576, 1536))),
    "Qwen3-30B-A3B, batch-invariant": replace(MODELS["Qwen3-30B-A3B"], **_invariant((128, 2048))),
    "Gemma-2-9B, batch-invariant": replace(MODELS["Gemma-2-9B"], **_invariant((8192, 3584))),
    "gpt-oss-20b, batch-invariant": replace(
        MODELS["gpt-oss-20b"],
        **_invariant((32, 2880)),
        products=tuple(replace(product, fixed=True) for product in _GPT_OSS_MXFP4),
    ),
}
MODELS |= {
    f"{name}, KV in FP8": replace(MODELS[name], fp8=True)
    for name in ("gpt-oss-20b", "Gemma-2-9B", "Llama-3-8B, batch-invariant")
}
MODELS |= {
    f"{name}": replace(
        _model(heads, 1, 576, hidden, inner, vocabulary, "bfloat16", experts=experts),
        latents=ServedLatents(rank=512, rotated=64, query_rank=query_rank),
    )
    for name, heads, hidden, inner, vocabulary, query_rank, experts in (
        ("DeepSeek-V2-Lite", 16, 2048, 10944, 102400, 0, ServedExperts(64, 6, 1408, 2816, rounded=False)),
        ("DeepSeek-V3", 128, 7168, 18432, 129280, 1536, ServedExperts(256, 8, 2048, 2048, rounded=False)),
    )
}
_DEEPSEEK_V3_FP8 = tuple(
    ServedProduct(out, inputs, torch.float8_e4m3fn, 128, False, False, 256, first)
    for out, inputs, first in ((4096, 7168, True), (7168, 2048, False))
)


def of_rank(served: Served, degree: int, columns: int = 0) -> Served:
    """Return the part of one of `degree` ranks; `columns`: of each expert, where they do not divide evenly."""
    experts, divided = served.experts, []
    if experts is not None:
        columns = columns or experts.inner // degree
        experts = replace(experts, inner=columns, shared_inner=experts.shared_inner // degree)
    for product in served.products:
        if not product.experts:
            raise ValueError("of products over codes those of experts alone are divided here")
        own = columns or (product.outputs // 2 if product.gathers else product.inputs) // degree
        divided.append(replace(product, outputs=2 * own) if product.gathers else replace(product, inputs=own))
    return replace(
        served,
        query_heads=served.query_heads // degree,
        kv_heads=max(1, served.kv_heads // degree),
        inner=served.inner // degree,
        experts=experts,
        products=tuple(divided),
    )


_RANKS = (
    ("Mixtral-8x7B", (2, 4, 8)),
    ("Qwen3-30B-A3B", (2, 4)),
    ("DeepSeek-V2-Lite", (2, 4)),
    ("DeepSeek-V3", (8, 16)),
    ("DeepSeek-V3 in FP8", (8, 16)),
)
_UNEVEN = (  # columns of the first rank and of the last
    ("gpt-oss-20b", 2, (1440,)),
    ("gpt-oss-20b", 4, (736, 704)),
    ("gpt-oss-20b", 8, (384, 352)),
    ("Qwen3-30B-A3B in FP8", 2, (384,)),
    ("Qwen3-30B-A3B in FP8", 4, (256, 128)),
    ("Qwen3-30B-A3B in 4 bits", 4, (256, 128)),
)
_WHOLE = MODELS | {"DeepSeek-V3 in FP8": replace(MODELS["DeepSeek-V3"], experts=None, products=_DEEPSEEK_V3_FP8)}
RANKS = {f"{name}, {degree} ranks": of_rank(_WHOLE[name], degree) for name, degrees in _RANKS for degree in degrees}
"""One rank's part of mixtures, for its experts: attention of so few heads is that of other models."""
RANKS |= {
    f"{name}, {degree} ranks, {columns} columns": of_rank(_WHOLE[name], degree, columns)
    for name, degree, every in _UNEVEN
    for columns in every
}
OF_EXPERTS = ("expert",)
"""Word in the names of their launches."""
SHAPES = (
    MODELS
    | RANKS
    | {
        f"heads of {head_dim}, {dtype}": _model(16, 4, head_dim, 16 * head_dim, 4096, 32000, dtype)
        for head_dim in (64, 128, 256)
        for dtype in ("bfloat16", "float16", "float32")
    }
)
SHAPES |= {f"{name}, KV in FP8": replace(SHAPES[name], fp8=True) for name in list(SHAPES) if name.startswith("heads")}


@dataclass(frozen=True, slots=True)
class Compiled:
    """One variant as the assembler left it. `launch` names the call that it was compiled for."""

    name: str
    launch: str
    registers: int
    spilled_bytes: int
    shared_bytes: int
    wide_loads: int  # instructions that load 16 bytes a thread

    @property
    def fits(self) -> bool:
        return self.spilled_bytes <= _SPILLED_LIMIT and self.shared_bytes <= _SHARED_LIMIT


class AbsentGpu:
    """Triton driver with the three methods that compiling calls."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_all(
    served: Served, capability: int = 90, max_rows: int = _MAX_ROWS, named: Sequence[str] = ("",)
) -> Iterator[Compiled]:
    """Compile every variant that steps of up to `max_rows` rows launch, for compute capability `capability` (90 =
    Hopper); `named`: only launches whose names contain one of these."""
    element_bytes = served.dtype.itemsize
    plan = decode_plan(
        head_dim=served.head_dim, element_bytes=element_bytes, multiprocessors=_MULTIPROCESSORS, fp8=served.fp8
    )
    if served.latents is not None:
        group = latent_group(served.query_heads, element_bytes)
        plan = latent_decode_plan(group=group, element_bytes=element_bytes, multiprocessors=_MULTIPROCESSORS)
    before = driver._active
    driver.set_active(AbsentGpu(capability))
    seen: set[int] = set()
    try:
        for name, launch in launches(served, max_rows, torch.device("cpu"), plan):
            if not any(part in name for part in named):
                continue
            compiled: list[Any] = []
            with compile_only(compiled):
                launch()
            for kernel in compiled:
                if id(kernel) not in seen:
                    seen.add(id(kernel))
                    yield _read(kernel, name)
    finally:
        driver._active = before


def _read(kernel: Any, launch: str) -> Compiled:
    cubin = next(Path(path) for name, path in kernel.metadata_group.items() if name.endswith(".cubin"))
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    usage = subprocess.run([tool, "--dump-resource-usage", cubin], capture_output=True, text=True, check=True).stdout
    found = {name: int(number) for name, number in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    return Compiled(
        kernel.metadata.name,
        launch,
        found["REG"],
        found["STACK"] + found["LOCAL"],
        kernel.metadata.shared,
        len(re.findall(r"ld.global[^;]*v4.b32|cp.async.*0x10", kernel.asm["ptx"])),
    )


def main() -> int:
    """Print one line per variant; return 1 when one spills more than a few registers or does not fit."""
    parser = argparse.ArgumentParser(prog="python -m cohort.kernels.gpu.compile_offline", description=__doc__)
    parser.add_argument("--capability", type=int, default=90, help="compute capability × 10 (default: %(default)s)")
    parser.add_argument("--model", choices=list(SHAPES), action="append", help="only this one's shapes; repeatable")
    parser.add_argument("--all", action="store_true", help="heads of 64, 128 and 256 in three types too")
    parser.add_argument("--max-rows", type=int, default=_MAX_ROWS, help="steps of up to this many rows (default: 256)")
    parser.add_argument("--launch", action="append", help="only launches with this in their names; repeatable")
    arguments = parser.parse_args()
    fit = True
    for shape in arguments.model or (SHAPES if arguments.all else {**MODELS, **RANKS}):
        named = arguments.launch or (OF_EXPERTS if shape in RANKS and not arguments.model else ("",))
        for each in compile_all(SHAPES[shape], arguments.capability, arguments.max_rows, named):
            fit &= each.fits
            print(
                f"{shape:>12} {each.name:<12} {each.launch:<28} {each.registers:3} registers, "
                f"{each.spilled_bytes:3} bytes spilled, {each.shared_bytes / 1024:5.1f} KiB shared; "
                f"loads of 16 bytes: {each.wide_loads}",
                flush=True,
            )
    return 0 if fit else 1


if __name__ == "__main__":
    sys.exit(main())
