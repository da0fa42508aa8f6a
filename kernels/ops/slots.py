"""Gather and scatter of whole tokens (all layers, K and V) from scattered KV slots.

R12 · What the bidirectional cache checkpoints to the host and brings back is a handful of slots of many blocks; one
call moves them as one dense tensor. Called by the engine's KV tensors; never decides which slots.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from cohort.kernels import reference
from cohort.kernels.cpu import native
from cohort.kernels.gpu import available as gpu


def gather_slots(kv: Tensor, slots: Tensor, out: Tensor, *, apart: bool = False) -> None:
    """Copy out[i] = the token in slots[i]; slots int64 [n], out [n, L, 2, Hkv, D]. `apart`: codes and scales of the
    cache lie apart (`fp8_cache`, planes), as those of a GPU's worker do in host memory, too."""
    if out.device == kv.device and (ops := _ops_for(kv, apart)) is not None:
        ops.gather_slots(kv, slots, out)
    else:
        reference.gather_slots(kv, slots, out, apart=apart)


def scatter_slots(src: Tensor, kv: Tensor, slots: Tensor, *, apart: bool = False) -> None:
    """Copy src[i] to slots[i]; the slots must differ from each other. `apart` as above."""
    if src.device == kv.device and (ops := _ops_for(kv, apart)) is not None:
        ops.scatter_slots(src, kv, slots)
    else:
        reference.scatter_slots(src, kv, slots, apart=apart)


def _ops_for(kv: Tensor, apart: bool) -> Any:
    """Return what moves this cache's tokens: a processor's kernels move rows, Triton's take bytes to be in planes."""
    return (None if apart else native.ops_for_cache(kv)) or gpu.ops_for(kv)
