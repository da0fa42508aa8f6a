"""Section: how much of the memory's bandwidth decode attention reaches."""

from __future__ import annotations

import torch

from cohort.kernels.gpu.workspace import Workspace
from cohort.kernels.paged_attention import AttentionMeta, paged_attention
from cohort.services.bench.gpu_check import rates
from cohort.services.bench.gpu_check.context import Check

_BLOCK_SIZE = 16
_LAYERS = 4  # in turn, so that no input is still in the second-level cache
_LONG = 8192
WANTED = 0.75


def run(check: Check) -> None:
    found, device = check.found, check.device
    copy = rates.copy_bytes_per_s(device, (4 << 30) if check.real else 1 << 20)
    heads = {"Llama-3-8B": (32, 8, 128), "Qwen2.5-14B": (40, 8, 128)} if check.real else {"tiny": (4, 2, 16)}
    shapes = ((64, 8192), (16, 32768), (1, 131072), (256, 2048), (64, 512)) if check.real else ((3, 40),)
    for model, (query_heads, kv_heads, head_dim) in heads.items():
        for rows, context in shapes:
            for directed in (False, True) if (rows, context) == shapes[0] else (False,):
                taken, read = _time(check, query_heads, kv_heads, head_dim, rows, context, directed)
                share = read / taken / copy
                found.measured(
                    f"{model} {rows} x {context}{', both directions' if directed else ''}",
                    share,
                    "of copy bandwidth",
                    at_least=WANTED if check.real and context >= _LONG else None,
                    note=f"{taken * 1e6:.0f} us a layer, {read / taken / 1e12:.2f} TB/s",
                )


def _time(
    check: Check, query_heads: int, kv_heads: int, head_dim: int, rows: int, context: int, directed: bool
) -> tuple[float, int]:
    """Seconds a layer, and bytes of keys and values that it reads."""
    device, dtype = check.device, check.dtype
    per_row = -(-context // _BLOCK_SIZE)
    kv = torch.empty(rows * per_row, _LAYERS, 2, kv_heads, _BLOCK_SIZE, head_dim, device=device, dtype=dtype)
    kv.normal_()
    tables = torch.randperm(rows * per_row, device=device).to(torch.int32).view(rows, per_row)
    directions = torch.randint(0, 2, tables.shape, device=device).to(torch.uint8)
    workspace = None
    if device.type == "cuda":
        workspace = Workspace(
            max_rows=rows,
            query_heads=query_heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            dtype=dtype,
            device=device,
            staging_tokens=1,
        )
    meta = AttentionMeta(
        query_start=torch.arange(rows + 1, dtype=torch.int32, device=device),
        context_lens=torch.full((rows,), context, dtype=torch.int32, device=device),
        block_tables=tables,
        directions=directions if directed else None,
        block_size=_BLOCK_SIZE,
        max_query_len=1,
        num_prefill_rows=0,
        max_context_len=context,
        workspace=workspace,
    ).as_signed()
    query = torch.randn(rows, query_heads, head_dim, device=device).to(dtype)
    out = torch.empty_like(query)

    def layers() -> None:
        for layer in range(_LAYERS):
            paged_attention(query, kv, layer, meta, head_dim**-0.5, out)

    taken = rates.seconds(rates.replayed(layers, device), device) / _LAYERS
    return taken, 2 * rows * context * kv_heads * head_dim * dtype.itemsize
