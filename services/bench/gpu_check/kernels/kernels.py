"""Section: every kernel against the torch reference on random inputs; bfloat16 at the shapes that are served first."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cohort.kernels import reference
from cohort.kernels.ops import fused, slots
from cohort.kernels.ops.latent_attention import latent_attention
from cohort.kernels.ops.paged_attention import paged_attention, write_kv
from cohort.services.bench.gpu_check.frame.cases import BLOCK_SIZE, Heads, make_case, random_fp8
from cohort.services.bench.gpu_check.frame.context import Check

_ALLOWED = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-2}
_SERVED = (Heads(32, 8, 128), Heads(40, 8, 128))
_OTHERS = (Heads(9, 3, 64), Heads(16, 16, 256))
_ITEM_S = 20.0


def run(check: Check) -> None:
    """One item per precision, shape and kind of rows: what one throws hides nothing of the others."""
    torch.manual_seed(11)
    if not check.real:  # on a GPU: for tools that slow every access down
        for dtype in (torch.float32, torch.bfloat16) if check.device.type == "cuda" else (torch.float32,):
            _all_of(check, dtype, (Heads(4, 2, 16),))
        return
    _all_of(check, torch.bfloat16, _SERVED)
    _all_of(check, torch.bfloat16, _OTHERS)
    for dtype in (torch.float32, torch.float16):
        _all_of(check, dtype, (*_SERVED, *_OTHERS))


@dataclass(frozen=True, slots=True)
class _Scores:
    """What a model does to its scores."""

    name: str
    heads: Heads
    window: int
    softcap: float = 0.0
    sinks: bool = False


_SCORES = (
    _Scores("sinks (gpt-oss)", Heads(64, 8, 64), 128, sinks=True),
    _Scores("soft caps (Gemma 2)", Heads(16, 8, 256), 4096, softcap=50.0),
    _Scores("both, a low cap", Heads(32, 8, 128), 0, softcap=2.0, sinks=True),
)
_TINY_SCORES = (_Scores("sinks, soft caps", Heads(4, 2, 16), 37, softcap=2.0, sinks=True),)


def _with_scores(check: Check, dtype: torch.dtype, lengths: Mapping[str, tuple[list[int], list[int]]]) -> None:
    for scores in _SCORES if check.real else _TINY_SCORES:
        for what, (contexts, queries) in lengths.items():
            for fp8 in (False, True):
                for window in {0, scores.window}:
                    name = f"attention {scores.name}{', KV in FP8' if fp8 else ''}, {scores.heads}, {what}"
                    measure = partial(
                        attention_error,
                        check,
                        scores.heads,
                        dtype,
                        contexts,
                        queries,
                        window,
                        fp8=fp8,
                        softcap=scores.softcap,
                        sinks=scores.sinks,
                    )
                    _judge(check, f"{name}, window {window}" if window else name, measure, dtype)


def _all_of(check: Check, dtype: torch.dtype, shapes: Sequence[Heads]) -> None:
    long, rows = (5000, 40) if check.real else (90, 5)
    decode = (_contexts(rows, long), [1] * rows)
    mixed = ([long, 50, 9, 71, 1], [40, 50, 3, 1, 1])
    if check.real:
        mixed = ([long, 333, 64, 71, 1], [long // 2, 300, 64, 1, 1])
    name = str(dtype).removeprefix("torch.")
    for heads in shapes:
        for what, lengths, window in (
            ("decode", decode, 0),
            ("decode, sliding window", decode, 37),
            ("prefill beside decode", mixed, 0),
        ):
            measure = partial(attention_error, check, heads, dtype, *lengths, window=window)
            _judge(check, f"attention {name}, {heads}, {what}", measure, dtype)
        if dtype == torch.bfloat16 or not check.real:
            for what, lengths in (("decode", decode), ("prefill beside decode", mixed)):
                measure = partial(attention_error, check, heads, dtype, *lengths, fp8=True)
                _judge(check, f"attention {name}, KV in FP8, {heads}, {what}", measure, dtype)
    if dtype == torch.bfloat16 or not check.real:
        _with_scores(check, dtype, {"decode": decode, "prefill beside decode": mixed})
    if shapes is not _OTHERS and (dtype == torch.bfloat16 or not check.real):
        few, many = (16, 128) if check.real else (6, 10)
        for query_heads, what, lengths in (
            (few, "decode", decode),
            (few, "prefill beside decode", mixed),
            (many, "decode", decode),
        ):
            measure = partial(_latent_error, check, query_heads, dtype, *lengths)
            _judge(check, f"attention over latents (DeepSeek) {name}, {query_heads} heads, {what}", measure, dtype)
    _judge(check, f"write_kv, gather, scatter {name}", partial(_memory, check, dtype), 0.0)
    if dtype == torch.bfloat16 or not check.real:
        _judge(check, f"write_kv, gather, scatter {name}, KV in FP8", partial(_memory_fp8, check, dtype), 0.0)
    _judge(check, f"rms_norm, rope, silu_mul {name}", partial(_elementwise, check, dtype), dtype)


def _judge(check: Check, name: str, measure: Callable[[], float], allowed: torch.dtype | float) -> None:
    bound = _ALLOWED[allowed] if isinstance(allowed, torch.dtype) else allowed
    error = check.guard.item(name, measure, _ITEM_S)
    if error is not None:
        check.found.checked(name, error <= bound, f"relative error {error:.2g}, allowed {bound:g}")


def _error(ours: Tensor, truth: Tensor) -> float:
    """‖ours − truth‖ / ‖truth‖; NaN never passes."""
    return float((ours.double() - truth.double()).norm() / truth.double().norm())


def _worst(errors: Sequence[float]) -> float:
    return max(errors, key=lambda error: float("inf") if error != error else error)


def _contexts(rows: int, longest: int) -> list[int]:
    """Short, long, and everything around a block's border."""
    drawn = torch.randint(1, longest, (rows,)).tolist()
    return [1, longest, BLOCK_SIZE, BLOCK_SIZE + 1, *drawn][:rows]


def attention_error(
    check: Check,
    heads: Heads,
    dtype: torch.dtype,
    contexts: list[int],
    queries: list[int],
    window: int = 0,
    *,
    fp8: bool = False,
    softcap: float = 0.0,
    sinks: bool = False,
) -> float:
    """Rows over shuffled blocks of random direction, against the reference in float32; the output is poisoned first."""
    case = make_case(check.device, dtype, heads, contexts, queries, fp8=fp8)
    ours = torch.full_like(case.query, float("nan"))
    truth = torch.empty(case.query.shape, device=check.device)
    beside = torch.linspace(-3.0, 6.0, heads.query, device=check.device) if sinks else None
    options: dict[str, Any] = {"sliding_window": window, "softcap": softcap, "sinks": beside}
    paged_attention(case.query, case.kv, 1, case.meta, case.scale, ours, **options)
    kv = case.kv if fp8 else case.kv.float()
    reference.paged_attention(case.query.float(), kv, 1, case.meta, case.scale, truth, **options)
    return _error(ours, truth)


def _latent_error(check: Check, heads: int, dtype: torch.dtype, contexts: list[int], queries: list[int]) -> float:
    """As `attention_error`, of rows whose key is their value: DeepSeek's 512 + 64 numbers."""
    rank, width = (512, 576) if check.real else (24, 32)
    case = make_case(check.device, dtype, Heads(heads, 1, width), contexts, queries)
    kv = case.kv[:, :, :1].contiguous()
    ours, truth = torch.full_like(case.query, float("nan")), torch.empty(case.query.shape, device=check.device)
    latent_attention(case.query, kv, 1, case.meta, case.scale, ours, rank)
    reference.paged_attention(case.query.float(), kv.float(), 1, case.meta, case.scale, truth)
    return _error(ours[..., :rank], truth[..., :rank])


def _memory(check: Check, dtype: torch.dtype) -> float:
    """Writes and copies of tokens; these are exact."""
    kv_heads, dim, tokens, blocks = 8, 64, 50, 12
    shape = (blocks, 3, 2, kv_heads, BLOCK_SIZE, dim)
    kv = torch.randn(shape, device=check.device).to(dtype)
    slot = torch.randperm(blocks * BLOCK_SIZE)[:tokens].to(check.device)
    key, value = (torch.randn(tokens, kv_heads, dim, device=check.device).to(dtype) for _ in range(2))
    ours, truth = kv.clone(), kv.clone()
    write_kv(key, value, ours, 1, slot)
    reference.write_kv(key, value, truth, 1, slot)
    gathered = torch.full((tokens, 3, 2, kv_heads, dim), float("nan"), device=check.device, dtype=dtype)
    expected = torch.empty_like(gathered)
    slots.gather_slots(truth, slot, gathered)
    reference.gather_slots(truth, slot, expected)
    back = torch.zeros_like(kv)
    slots.scatter_slots(gathered, back, slot)
    wanted = torch.zeros_like(kv)
    reference.scatter_slots(expected, wanted, slot)
    return _worst([_error(ours, truth), _error(gathered, expected), _error(back, wanted)])


def _memory_fp8(check: Check, dtype: torch.dtype) -> float:
    """The same of a cache in FP8: the share of bytes that differ."""
    kv_heads, dim, tokens, blocks = 8, 64, 50, 12
    apart = check.device.type == "cuda"
    ours = random_fp8((blocks, 3, 2, kv_heads, BLOCK_SIZE), dim, check.device)
    truth = ours.clone()
    slot = torch.randperm(blocks * BLOCK_SIZE)[:tokens].to(check.device)
    key, value = (torch.randn(tokens, kv_heads, dim, device=check.device).to(dtype) for _ in range(2))
    write_kv(key, value, ours, 1, slot)
    reference.write_kv(key, value, truth, 1, slot)
    gathered = torch.zeros((tokens, 3, 2, kv_heads, ours.shape[5]), device=check.device, dtype=torch.uint8)
    expected, back, wanted = torch.zeros_like(gathered), torch.zeros_like(ours), torch.zeros_like(ours)
    slots.gather_slots(truth, slot, gathered, apart=apart)
    reference.gather_slots(truth, slot, expected, apart=apart)
    slots.scatter_slots(gathered, back, slot, apart=apart)
    reference.scatter_slots(expected, wanted, slot, apart=apart)
    pairs = ((ours, truth), (gathered, expected), (back, wanted))
    return max(float((found != right).float().mean()) for found, right in pairs)


def _elementwise(check: Check, dtype: torch.dtype) -> float:
    tokens, width, heads, kv_heads, dim = 70, 4096 if check.real else 64, 6, 2, 128 if check.real else 16
    x, weight = (torch.randn(size, device=check.device).to(dtype) for size in ((tokens, width), (width,)))
    ours, truth = torch.full_like(x, float("nan")), torch.empty_like(x)
    fused.rms_norm(x, weight, 1e-5, ours)
    reference.rms_norm(x, weight, 1e-5, truth)
    errors = [_error(ours, truth)]
    half = torch.full((tokens, width // 2), float("nan"), device=check.device, dtype=dtype)
    wanted = torch.empty_like(half)
    fused.silu_mul(x, half)
    reference.silu_mul(x, wanted)
    errors.append(_error(half, wanted))
    both = [torch.randn(tokens, heads + kv_heads, dim, device=check.device).to(dtype)]
    both.append(both[0].clone())
    angle = torch.rand(300, dim // 2, device=check.device)
    positions = torch.randint(0, 300, (tokens,), device=check.device)
    for implementation, qk in zip((fused, reference), both, strict=True):
        implementation.rope_inplace(qk[:, :heads], qk[:, heads:], angle.cos(), angle.sin(), positions)
    errors.append(_error(both[0], both[1]))
    return _worst(errors)
