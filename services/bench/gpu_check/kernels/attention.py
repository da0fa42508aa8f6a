"""Section: the bandwidth that decode attention reaches: every shape, with directions and without, in a cache of one
layer and of thirty-two. Its rows over a shuffled cache are also what the tests of served shapes take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cohort.kernels.fp8_cache import PLANE_SCALE_BYTES, SCALE_BYTES, planes
from cohort.kernels.gpu.workspace import Workspace
from cohort.kernels.ops.paged_attention import AttentionMeta, paged_attention
from cohort.services.bench.gpu_check.frame import rates
from cohort.services.bench.gpu_check.frame.context import Check

WANTED = 0.75
_LONG = 8192
BLOCK_SIZE = 16
_SCALE_OF_A_64TH = 114  # of a row: 2^(byte - 120)
_SHAPES = ((64, 8192), (256, 2048), (64, 1024), (16, 32768), (1, 131072), (64, 512))
_LAYERS = 4  # in turn, so that no input is still in the second-level cache


@dataclass(frozen=True, slots=True)
class Heads:
    query: int
    kv: int
    dim: int

    def __str__(self) -> str:
        return f"{self.query}/{self.kv} heads of {self.dim}"


@dataclass(slots=True)
class Case:
    """One call of attention; `kv` [blocks, layers, 2, kv heads, block size, dim]."""

    query: Tensor
    kv: Tensor
    meta: AttentionMeta
    scale: float
    read_bytes: int
    """Keys and values that one layer reads."""


def make_case(
    device: torch.device,
    dtype: torch.dtype,
    heads: Heads,
    contexts: Sequence[int],
    queries: Sequence[int],
    *,
    layers: int = 2,
    directed: bool = True,
    fp8: bool = False,
    staged: bool = True,
) -> Case:
    """Return rows of these contexts, of which the last `queries` tokens are computed, over random keys in shuffled
    blocks; `fp8`: kept so, as this device does; `staged`: with the memory that flash attention gathers prompts in."""
    blocks = [-(-context // BLOCK_SIZE) for context in contexts]
    shape = (sum(blocks) + 1, layers, 2, heads.kv, BLOCK_SIZE)
    kv = random_fp8(shape, heads.dim, device) if fp8 else torch.empty((*shape, heads.dim), device=device, dtype=dtype)
    if not fp8:
        kv.normal_()
    order = torch.randperm(sum(blocks), dtype=torch.int32)
    tables = torch.zeros(len(blocks), max(blocks), dtype=torch.int32)
    for row, part in enumerate(torch.split(order, blocks)):
        tables[row, : len(part)] = part
    directions = torch.randint(0, 2, tables.shape, dtype=torch.uint8)
    prefill = sum(count > 1 for count in queries)
    workspace = None
    if device.type == "cuda":
        workspace = Workspace(
            max_rows=len(contexts),
            query_heads=heads.query,
            kv_heads=heads.kv,
            head_dim=heads.dim,
            dtype=dtype,
            device=device,
            staging_tokens=max(1, sum(contexts[:prefill])) if staged else 1,
        )
    meta = AttentionMeta(
        query_start=torch.tensor([0, *queries]).cumsum(0).to(torch.int32).to(device),
        context_lens=torch.tensor(list(contexts), dtype=torch.int32, device=device),
        block_tables=tables.to(device),
        directions=directions.to(device) if directed else None,
        block_size=BLOCK_SIZE,
        max_query_len=max(queries),
        num_prefill_rows=prefill,
        max_context_len=max(contexts),
        prefill_context=sum(contexts[:prefill]),
        workspace=workspace,
    ).as_signed()
    query = torch.randn(sum(queries), heads.query, heads.dim, device=device).to(dtype)
    read = 2 * sum(contexts) * heads.kv * kv.shape[5] * kv.element_size()
    return Case(query, kv, meta, heads.dim**-0.5, read)


def random_fp8(shape: Sequence[int], head_dim: int, device: torch.device) -> Tensor:
    """Return a cache [*shape, row] in FP8 of numbers from -4 to 4: in planes on a GPU, in rows on a processor."""
    apart = device.type == "cuda"
    kv = torch.empty(
        (*shape, head_dim + (PLANE_SCALE_BYTES if apart else SCALE_BYTES)), device=device, dtype=torch.uint8
    )
    codes, scales = planes(kv) if apart else (kv[..., :head_dim], kv[..., head_dim])
    codes.random_(0, 256).bitwise_and_(0xF7).bitwise_or_(0x40)  # neither zero nor NaN
    scales.fill_(2.0**-6 if apart else _SCALE_OF_A_64TH)
    return kv


LLAMA, _QWEN, TINY = Heads(32, 8, 128), Heads(40, 8, 128), Heads(4, 2, 16)


def run(check: Check) -> None:
    models = {"Llama-3-8B": LLAMA, "Qwen2.5-14B": _QWEN} if check.real else {"tiny": TINY}
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


def _shape(check: Check, name: str, heads: Heads, rows: int, context: int) -> None:
    """Measure without directions and with; the latter is what recorded steps run."""
    ceilings = check.ceilings()
    times = {}
    for directed in (False, True):
        case = _case(check, heads, rows, context, directed=directed)
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
    """Compare as many bytes from blocks of 32 layers as of one: the former touch 32 times the memory's pages."""
    layers = 32 if check.real else 4
    wide = _time(check, _case(check, heads, rows, context, layers=layers))
    dense = _time(check, _case(check, heads, rows, context, layers=1))
    check.found.measured(name, wide / dense, "x", note=f"{wide * 1e6:.0f} and {dense * 1e6:.0f} us a layer")


def _fp8(check: Check, name: str, heads: Heads, rows: int, context: int) -> None:
    """Measure FP8 by its own bytes, codes and scales; and its speed relative to 16 bits."""
    fp8 = _case(check, heads, rows, context, fp8=True)
    taken_s, read_bytes = _time(check, fp8), fp8.read_bytes
    del fp8
    plain_s = _time(check, _case(check, heads, rows, context))
    ceilings = check.ceilings()
    check.found.measured(
        name,
        read_bytes / taken_s / ceilings.bandwidth,
        "of bandwidth",
        note=f"{taken_s * 1e6:.0f} us a layer; 16 bits take {plain_s * 1e6:.0f} us, {plain_s / taken_s:.2f} times that",
    )


def _scores(check: Check) -> dict[str, tuple[Heads, dict[str, Any]]]:
    """Return heads and options of attention by kind, of gpt-oss and of Gemma 2 9B."""
    oss, gemma = (Heads(64, 8, 64), Heads(16, 8, 256)) if check.real else (TINY, TINY)
    return {
        "sinks": (oss, {"sinks": torch.linspace(-3.0, 6.0, oss.query, device=check.device)}),
        "caps": (gemma, {"softcap": 50.0}),
    }


def _with_scores(
    check: Check, name: str, kind: str, heads: Heads, options: dict[str, Any], rows: int, context: int
) -> None:
    case = _case(check, heads, rows, context)
    with_s, without_s = _time(check, case, **options), _time(check, case)
    check.found.measured(name, with_s / without_s, "x", note=f"{with_s * 1e6:.0f} and {without_s * 1e6:.0f} us a layer")


def _prompt(check: Check, name: str, kind: str, heads: Heads, options: dict[str, Any], tokens: int) -> None:
    """Measure our prefill: flash attention takes neither sinks nor caps, so all prompts of such a model run so."""
    case = make_case(check.device, check.dtype, heads, [tokens], [tokens], layers=_layers(check))
    taken_s = _time(check, case, **options)
    operations = 2.0 * heads.query * heads.dim * tokens * (tokens + 1)
    check.found.measured(
        name,
        operations / taken_s / check.ceilings().matrix,
        "of the matrix rate",
        note=f"{taken_s * 1e6:.0f} us a layer",
    )


def _layers(check: Check) -> int:
    return _LAYERS if check.real else 2


def _case(check: Check, heads: Heads, rows: int, context: int, **more: Any) -> Case:
    given = {"layers": _layers(check), **more}
    return make_case(check.device, check.dtype, heads, [context] * rows, [1] * rows, **given)


def _time(check: Check, case: Case, **options: Any) -> float:
    """Return seconds a layer. `options`: of `paged_attention`."""
    out = torch.empty_like(case.query)
    layers = case.kv.shape[1]

    def every_layer() -> None:
        for layer in range(layers):
            paged_attention(case.query, case.kv, layer, case.meta, case.scale, out, **options)

    return rates.seconds(rates.replayed(every_layer, check.device), check.device) / layers
