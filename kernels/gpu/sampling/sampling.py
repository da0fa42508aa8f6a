"""Sampling on a GPU: the launch of `sampling_kernel`, one program per row.

Called by `ops.sampling`. A CUDA graph may capture it: nothing is allocated, and nothing is asked of the device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor
from triton import knobs

from cohort.kernels.gpu.sampling.sampling_kernel import sample_rows as _sample_rows

if TYPE_CHECKING:
    from cohort.kernels.types import SampledRows, SamplingTables

# The interpreter has none of the device's library functions.
INTERPRETED = bool(knobs.runtime.interpret)
LANES, VEC, SLOTS, EDITS, WARPS = 512, 4, 24, 1024, 16


def sample_rows(
    logits: Tensor,
    tables: SamplingTables,
    out: SampledRows,
    *,
    lanes: int = LANES,
    vec: int = VEC,
    slots: int = SLOTS,
    edits: int = EDITS,
) -> None:
    """See `ops.sampling.sample_rows`. The shape of a tile changes the cost, never a token."""
    rows, vocabulary = logits.shape
    if logits.stride(1) != 1 or logits.dtype.itemsize != 4:
        raise ValueError("logits must be float32, and a row's must lie side by side")
    if len(tables.seeds) < rows or len(out.tokens) < rows or out.scratch.stride(0) < lanes * slots:
        raise ValueError(f"tables for {len(tables.seeds)} rows and results for {len(out.tokens)}, of {rows} rows")
    if rows == 0:
        return
    _sample_rows[(rows,)](
        logits,
        tables.seeds,
        tables.positions,
        tables.top_ps,
        tables.temperatures,
        tables.min_ps,
        tables.top_ks,
        tables.wants,
        tables.edit_starts,
        tables.edit_ids,
        tables.edit_values,
        tables.saved,
        out.scratch,
        out.tokens,
        out.logprobs,
        out.top_ids,
        out.top_logprobs,
        vocabulary,
        logits.stride(0),
        out.top_ids.shape[1],
        LANES=lanes,
        VEC=vec,
        SLOTS=slots,
        EDITS=edits,
        INTERPRETED=INTERPRETED,
        num_warps=WARPS,
    )
