"""Section: the bandwidth that decode attention reaches: every shape, with directions and without, in a cache of one
layer and of thirty-two, and with other tiles, stages and warps than it chooses by itself."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from cohort.kernels.ops.paged_attention import paged_attention
from cohort.services.bench.gpu_check.frame import rates
from cohort.services.bench.gpu_check.frame.cases import Case, Heads, make_case
from cohort.services.bench.gpu_check.frame.context import Check
from cohort.services.bench.gpu_check.frame.guard import DoesNotFit, NotThere

WANTED = 0.75
_LONG = 8192
_LLAMA, _QWEN, _TINY = Heads(32, 8, 128), Heads(40, 8, 128), Heads(4, 2, 16)
_SHAPES = ((64, 8192), (256, 2048), (64, 1024), (16, 32768), (1, 131072), (64, 512))
_LAYERS = 4  # in turn, so that no input is still in the second-level cache
_SWEEP = [(tile, stages, warps) for tile in (32, 64, 128) for stages in (3, 5) for warps in (4, 8)]


def run(check: Check) -> None:
    models = {"Llama-3-8B": _LLAMA, "Qwen2.5-14B": _QWEN} if check.real else {"tiny": _TINY}
    shapes = _SHAPES if check.real else ((3, 40),)
    for model, heads in models.items():
        for rows, context in shapes:
            name = f"{model} {rows} x {context}"
            check.guard.item(name, partial(_shape, check, name, heads, rows, context), 12)
    heads = next(iter(models.values()))
    for rows, context in ((64, 8192), (64, 1024)) if check.real else ((3, 40),):
        name = f"{rows} x {context}: KV in FP8"
        check.guard.item(name, partial(_fp8, check, name, heads, rows, context), 8)
    for kind, (own, options) in _scores(check).items():
        for rows, context in ((64, 2048), (16, 8192)) if check.real else ((3, 40),):
            name = f"{rows} x {context}: {kind} over none, {own}"
            check.guard.item(name, partial(_with_scores, check, name, kind, own, options, rows, context), 8)
        tokens = 2048 if check.real else 20
        name = f"a prompt of {tokens} over the paged cache: {kind}, {own}"
        check.guard.item(name, partial(_prompt, check, name, kind, own, options, tokens), 6)
    for rows, context in ((64, 4096), (256, 1024)) if check.real else ((3, 40),):
        name = f"{rows} x {context}: 32 layers in a block against 1"
        check.guard.item(name, partial(_stride, check, name, heads, rows, context), 15)
    for rows, context in ((64, 8192), (256, 1024), (1, 32768)) if check.real else ((2, 20),):
        for tile, stages, warps in _SWEEP if check.real else [(16, 2, 4)]:
            name = f"{rows} x {context}: tile {tile}, {stages} stages, {warps} warps"
            check.guard.item(name, partial(_chosen, check, name, heads, rows, context, tile, stages, warps), 8)


def _shape(check: Check, name: str, heads: Heads, rows: int, context: int) -> None:
    """Without directions and with; the latter is what recorded steps run."""
    ceilings = check.ceilings()
    times = {}
    for directed in (False, True):
        case = make_case(
            check.device, check.dtype, heads, *_rows(rows, context), layers=_layers(check), directed=directed
        )
        taken_s = times[directed] = _time(check, case)
        long = context >= _LONG
        check.found.measured(
            f"{name}{', directed' if directed else ''}",
            case.read_bytes / taken_s / ceilings.bandwidth,
            "of bandwidth",
            at_least=WANTED if check.real and long else None,
            note=f"{taken_s * 1e6:.0f} us a layer, {case.read_bytes / taken_s / 1e12:.2f} TB/s",
        )
        del case
    check.found.measured(f"{name}: directed over not", times[True] / times[False], "x")


def _stride(check: Check, name: str, heads: Heads, rows: int, context: int) -> None:
    """As many bytes from blocks of 32 layers as from blocks of one: the former touch 32 times the memory's pages."""
    layers = 32 if check.real else 4
    wide = _time(check, make_case(check.device, check.dtype, heads, *_rows(rows, context), layers=layers))
    dense = _time(check, make_case(check.device, check.dtype, heads, *_rows(rows, context), layers=1))
    check.found.measured(name, wide / dense, "x", note=f"{wide * 1e6:.0f} and {dense * 1e6:.0f} us a layer")


def _fp8(check: Check, name: str, heads: Heads, rows: int, context: int) -> None:
    """Of its own bytes, codes and scales; and how much sooner it is done than 16 bits are."""
    layers, at = _layers(check), _rows(rows, context)
    fp8 = make_case(check.device, check.dtype, heads, *at, layers=layers, fp8=True)
    taken_s, read_bytes = _time(check, fp8), fp8.read_bytes
    del fp8
    plain_s = _time(check, make_case(check.device, check.dtype, heads, *at, layers=layers))
    ceilings = check.ceilings()
    check.found.measured(
        name,
        read_bytes / taken_s / ceilings.bandwidth,
        "of bandwidth",
        note=f"{taken_s * 1e6:.0f} us a layer; 16 bits take {plain_s * 1e6:.0f} us, {plain_s / taken_s:.2f} times that",
    )


def _scores(check: Check) -> dict[str, tuple[Heads, dict[str, Any]]]:
    """By kind: heads of gpt-oss and of Gemma 2 9B, and what their attention is asked for."""
    oss, gemma = (Heads(64, 8, 64), Heads(16, 8, 256)) if check.real else (_TINY, _TINY)
    return {
        "sinks": (oss, {"sinks": torch.linspace(-3.0, 6.0, oss.query, device=check.device)}),
        "caps": (gemma, {"softcap": 50.0}),
    }


def _with_scores(
    check: Check, name: str, kind: str, heads: Heads, options: dict[str, Any], rows: int, context: int
) -> None:
    case = make_case(check.device, check.dtype, heads, *_rows(rows, context), layers=_layers(check))
    with_s, without_s = _time(check, case, **options), _time(check, case)
    check.found.measured(name, with_s / without_s, "x", note=f"{with_s * 1e6:.0f} and {without_s * 1e6:.0f} us a layer")


def _prompt(check: Check, name: str, kind: str, heads: Heads, options: dict[str, Any], tokens: int) -> None:
    """Flash attention is given neither, so all prompts of such a model run so."""
    case = make_case(check.device, check.dtype, heads, [tokens], [tokens], layers=_layers(check))
    taken_s = _time(check, case, **options)
    operations = 2.0 * heads.query * heads.dim * tokens * (tokens + 1)
    check.found.measured(
        name,
        operations / taken_s / check.ceilings().matrix,
        "of the matrix rate",
        note=f"{taken_s * 1e6:.0f} us a layer",
    )


def _chosen(check: Check, name: str, heads: Heads, rows: int, context: int, tile: int, stages: int, warps: int) -> None:
    """Another plan than the kernel's own; `MIN_PART_KEYS` stays, and a tile never spans parts."""
    try:
        from triton.runtime.errors import OutOfResources

        from cohort.kernels.gpu.attention import attention as own
        from cohort.kernels.gpu.plan import decode_plan
        from cohort.kernels.gpu.workspace import multiprocessors
    except ImportError as error:
        raise NotThere(str(error)) from None
    if check.device.type != "cuda" and not own.WIDEN_PRODUCTS:
        raise NotThere("Triton needs a GPU, or its interpreter (TRITON_INTERPRET=1)")
    plan = decode_plan(
        head_dim=heads.dim, element_bytes=check.dtype.itemsize, multiprocessors=multiprocessors(check.device)
    )
    chosen = replace(plan, tile_keys=tile, stages=stages, warps=warps, min_part_keys=max(plan.min_part_keys, tile))
    case = make_case(check.device, check.dtype, heads, *_rows(rows, context), layers=_layers(check))
    out = torch.empty_like(case.query)
    layers = case.kv.shape[1]

    def every_layer() -> None:
        for layer in range(layers):
            own.decode(case.query, case.kv, layer, case.meta, case.scale, out, plan=chosen)

    repeats = 20 if check.real else 1
    try:
        taken_s = rates.seconds(rates.replayed(every_layer, check.device), check.device, repeats=repeats, warm_ups=1)
    except OutOfResources as error:
        raise DoesNotFit(f"a multiprocessor's shared memory: {error}") from None
    taken_s /= layers
    chosen_here = (plan.tile_keys, plan.stages, plan.warps) == (tile, stages, warps)
    check.found.measured(
        name,
        case.read_bytes / taken_s / check.ceilings().bandwidth,
        "of bandwidth",
        note=f"{taken_s * 1e6:.0f} us a layer{'; the plan chooses this' if chosen_here else ''}",
    )


def _layers(check: Check) -> int:
    return _LAYERS if check.real else 2


def _rows(rows: int, context: int) -> tuple[list[int], list[int]]:
    return [context] * rows, [1] * rows


def _time(check: Check, case: Case, **options: Any) -> float:
    """Seconds a layer. `options`: of `paged_attention`."""
    out = torch.empty_like(case.query)
    layers = case.kv.shape[1]

    def every_layer() -> None:
        for layer in range(layers):
            paged_attention(case.query, case.kv, layer, case.meta, case.scale, out, **options)

    return rates.seconds(rates.replayed(every_layer, check.device), check.device) / layers
