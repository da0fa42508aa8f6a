"""Memory that attention on a GPU needs beside its tensors, made once per model.

Made by the engine at load, handed down in `AttentionMeta.workspace`. A captured CUDA graph keeps the addresses it was
captured with, so it must outlive every graph. One step at a time may use it.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from cohort.kernels.gpu.plan import decode_plan

POSITION_ROOM = 4096
"""Parts of contexts, one a query, that batch-invariant attention has memory for; rows that find none are computed whole
by one program a kv head, with the same bits. So this bounds memory, about as much as gathered keys and values take."""


class Workspace:
    """Partial results of rows in parts, and room for the gathered keys and values of one layer's prefill rows."""

    __slots__ = ("batch_invariant", "lse", "partial", "staging", "starts", "unstaged_of", "unstaged_rows")

    def __init__(
        self,
        *,
        max_rows: int,
        query_heads: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        staging_tokens: int,
        batch_invariant: bool = False,
    ) -> None:
        """`staging_tokens`: how many positions, over all prefill rows of a step, may be gathered for flash attention; a
        step with more goes to the kernel that reads the paged cache, so this bounds memory, not what can be served.
        `batch_invariant`: attention is `positions`', and nothing is gathered."""
        self.batch_invariant = batch_invariant
        if batch_invariant:
            parts, levels, staging_tokens, starts = POSITION_ROOM, 2 * POSITION_ROOM, 0, 0
        else:
            plan = decode_plan(head_dim=head_dim, element_bytes=dtype.itemsize, multiprocessors=multiprocessors(device))
            parts = levels = plan.parts(max_rows, kv_heads)
            starts = max_rows + 1
        self.partial = torch.empty(parts * query_heads * head_dim, dtype=torch.float32, device=device)
        self.lse = torch.empty(levels * query_heads, dtype=torch.float32, device=device)
        self.staging = torch.empty((2, staging_tokens, kv_heads, head_dim), dtype=dtype, device=device)
        self.starts = torch.empty(starts, dtype=torch.int32, device=device)
        self.unstaged_rows = 0
        """Prefill rows that flash attention would have taken, had there been room to gather their contexts."""
        self.unstaged_of: Tensor | None = None

    def count_unstaged(self, rows: int, context_lens: Tensor) -> None:
        """Count a step's prefill rows without room, once for all its layers: they share `context_lens`."""
        if self.unstaged_of is not context_lens:
            self.unstaged_of = context_lens
            self.unstaged_rows += rows


@cache
def multiprocessors(device: torch.device) -> int:
    """Return a GPU's multiprocessors; elsewhere (the interpreter) 1, so that the plan stays small."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
