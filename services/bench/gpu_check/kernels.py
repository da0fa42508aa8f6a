"""Section: every kernel against the torch reference, on random inputs, in every precision that is served."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cohort.kernels import fused, reference, slots
from cohort.kernels.gpu.workspace import Workspace
from cohort.kernels.paged_attention import AttentionMeta, paged_attention, write_kv
from cohort.services.bench.gpu_check.context import Check

_ALLOWED = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-2}
_BLOCK_SIZE = 16
_HEADS = ((32, 8, 128), (40, 8, 128), (9, 3, 64), (16, 16, 256))


def run(check: Check) -> None:
    torch.manual_seed(11)
    heads = _HEADS if check.real else ((4, 2, 16),)
    long, rows = (5000, 40) if check.real else (90, 5)
    mixed = ([long, 50, 9, 71, 1], [40, 50, 3, 1, 1])
    if check.real:
        mixed = ([long, 333, 64, 71, 1], [long // 2, 300, 64, 1, 1])
    for dtype in (torch.bfloat16, torch.float32, torch.float16) if check.real else (torch.float32,):
        name = str(dtype).removeprefix("torch.")
        decode = (_contexts(rows, long), [1] * rows)
        for what, lengths, window in (
            ("decode", decode, 0),
            ("decode, sliding window", decode, 37),
            ("prefill beside decode", mixed, 0),
        ):
            errors = [_attention(check, each, dtype, *lengths, window=window) for each in heads]
            _judge(check, f"attention {name}, {what}", errors, dtype)
        _judge(check, f"write_kv, gather, scatter {name}", _memory(check, dtype), 0.0)
        _judge(check, f"rms_norm, rope, silu_mul {name}", _elementwise(check, dtype), dtype)


def _judge(check: Check, name: str, errors: Sequence[float], allowed: torch.dtype | float) -> None:
    bound = _ALLOWED[allowed] if isinstance(allowed, torch.dtype) else allowed
    worst = max(errors, key=lambda error: float("inf") if error != error else error)
    check.found.checked(name, all(error <= bound for error in errors), f"relative error {worst:.2g}, allowed {bound:g}")


def _error(ours: Tensor, truth: Tensor) -> float:
    """‖ours − truth‖ / ‖truth‖; NaN never passes."""
    return float((ours.double() - truth.double()).norm() / truth.double().norm())


def _contexts(rows: int, longest: int) -> list[int]:
    """Short, long, and everything around a block's border."""
    drawn = torch.randint(1, longest, (rows,)).tolist()
    return [1, longest, _BLOCK_SIZE, _BLOCK_SIZE + 1, *drawn][:rows]


def _attention(
    check: Check,
    heads: tuple[int, int, int],
    dtype: torch.dtype,
    contexts: list[int],
    queries: list[int],
    window: int = 0,
) -> float:
    """Rows over shuffled blocks of random direction, against the reference in float32; the output is poisoned first."""
    query_heads, kv_heads, head_dim = heads
    device = check.device
    blocks = [-(-context // _BLOCK_SIZE) for context in contexts]
    kv = torch.randn(sum(blocks) + 1, 2, 2, kv_heads, _BLOCK_SIZE, head_dim, device=device).to(dtype)
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
            query_heads=query_heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            dtype=dtype,
            device=device,
            staging_tokens=sum(contexts),
        )
    meta = AttentionMeta(
        query_start=torch.tensor([0, *queries]).cumsum(0).to(torch.int32).to(device),
        context_lens=torch.tensor(contexts, dtype=torch.int32, device=device),
        block_tables=tables.to(device),
        directions=directions.to(device),
        block_size=_BLOCK_SIZE,
        max_query_len=max(queries),
        num_prefill_rows=prefill,
        max_context_len=max(contexts),
        prefill_context=sum(contexts[:prefill]),
        workspace=workspace,
    ).as_signed()
    query = torch.randn(sum(queries), query_heads, head_dim, device=device).to(dtype)
    ours, truth = torch.full_like(query, float("nan")), torch.empty(query.shape, device=device)
    scale = head_dim**-0.5
    paged_attention(query, kv, 1, meta, scale, ours, sliding_window=window)
    reference.paged_attention(query.float(), kv.float(), 1, meta, scale, truth, sliding_window=window)
    return _error(ours, truth)


def _memory(check: Check, dtype: torch.dtype) -> list[float]:
    """Writes and copies of tokens; these are exact."""
    kv_heads, dim, tokens, blocks = 8, 64, 50, 12
    shape = (blocks, 3, 2, kv_heads, _BLOCK_SIZE, dim)
    kv = torch.randn(shape, device=check.device).to(dtype)
    slot = torch.randperm(blocks * _BLOCK_SIZE)[:tokens].to(check.device)
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
    return [_error(ours, truth), _error(gathered, expected), _error(back, wanted)]


def _elementwise(check: Check, dtype: torch.dtype) -> list[float]:
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
    return errors
