"""Which flash attention computes prefill rows: FlashAttention-3, -4 or -2, or the one inside PyTorch.

Called by `prefill`. Decided once per process, at the first prefill rows (a worker's warm-up has some), and logged with
the reason. One that is installed is taken only where it serves this GPU and agrees with plain attention on a small
trial: a library built for another torch or another GPU must cost speed, not answers. Needs no Triton to be imported.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import structlog
import torch
from torch import Tensor

log = structlog.get_logger(__name__)

PrefillAttention = Literal["flash_attn_3", "flash_attn_4", "flash_attn_2", "torch"]

# query, keys, values, where rows begin in either, most queries, most keys, scale, window → [T, Hq, D]
Flash = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, int, int, float, int], Tensor]

_INTERFACES: dict[PrefillAttention, tuple[str, ...]] = {
    "flash_attn_3": ("flash_attn_interface", "flash_attn_3.flash_attn_interface"),
    "flash_attn_4": ("flash_attn.cute",),
    "flash_attn_2": ("flash_attn",),
}
"""Modules with the function, in the order in which they are tried. Beside version 4 alone `flash_attn` is a folder."""
_HOPPER = 9
_TOLERANCE = 2e-2  # of values about 1, rounded to bfloat16


@dataclass(frozen=True, slots=True)
class Choice:
    name: PrefillAttention
    function: Flash
    reason: str


class _Unfit(Exception):
    """Reason why an installed flash attention is not taken."""


def flash_function() -> Flash:
    """Return this process's flash attention; a row's last query sees its last key, and query heads share keys."""
    return chosen().function


def prefill_attention_name() -> PrefillAttention:
    """Return the name of what computes this process's prefill rows; decide if no prefill row was computed yet."""
    return chosen().name


@cache
def chosen() -> Choice:
    choice, broken = _choose(_gpu())
    (log.warning if broken else log.info)("prefill attention", implementation=choice.name, reason=choice.reason)
    return choice


def _choose(gpu: tuple[torch.device, int] | None) -> tuple[Choice, bool]:
    """Choose for `gpu`, a device and its major compute capability; return also whether a library is broken."""
    if gpu is None:
        return Choice("torch", _torch_flash, "no GPU"), False
    reasons: list[str] = []
    broken = False
    for name in _INTERFACES:
        try:
            function = _fit(name, *gpu)
        except ModuleNotFoundError:
            reasons.append(f"{name} is not installed")
        except Exception as error:  # a library for another torch, or another GPU, fails in ways of its own
            reasons.append(f"{name}: {error}")
            broken |= not isinstance(error, _Unfit)
        else:
            return Choice(name, function, "; ".join([*reasons, "agrees with plain attention"])), broken
    return Choice("torch", _torch_flash, "; ".join(reasons)), broken


def _gpu() -> tuple[torch.device, int] | None:
    if not torch.cuda.is_available():
        return None
    device = torch.device("cuda", torch.cuda.current_device())
    return device, torch.cuda.get_device_capability(device)[0]


def _fit(name: PrefillAttention, device: torch.device, capability: int) -> Flash:
    """Return the library's function. Raise `ModuleNotFoundError` if not installed, other errors if it fails here."""
    interface = _interface(_INTERFACES[name])
    if name == "flash_attn_3" and capability != _HOPPER:
        raise _Unfit(f"needs a Hopper GPU (compute capability 9), this one has {capability}")
    function = _calling(interface, None if name == "flash_attn_4" else -1)
    if (difference := _difference(function, device)) > _TOLERANCE:
        raise ValueError(f"differs from plain attention by {difference:.3g}")
    return function


def _interface(modules: tuple[str, ...]) -> Callable[..., Any]:
    missing = ModuleNotFoundError(modules[0])
    for module in modules:
        try:
            found = importlib.import_module(module)
            if found.__spec__ is not None and found.__spec__.origin is None:  # a folder of other modules
                continue
            function: Callable[..., Any] = found.flash_attn_varlen_func
        except ModuleNotFoundError as error:
            if error.name not in (module, module.partition(".")[0]):
                raise ImportError(f"{module} lacks {error.name}") from error  # it is there, what it needs is not
        else:
            return function
    raise missing


def _calling(varlen: Callable[..., Any], unbounded: int | None) -> Flash:
    """Wrap a version; all name these arguments alike. `unbounded`: its word for a side without a window. Version 4 and
    early versions of 3 also return the scores' logarithms."""

    def flash(
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        query_starts: Tensor,
        key_starts: Tensor,
        max_queries: int,
        max_keys: int,
        scale: float,
        window: int,
    ) -> Tensor:
        found = varlen(
            query,
            keys,
            values,
            cu_seqlens_q=query_starts,
            cu_seqlens_k=key_starts,
            max_seqlen_q=max_queries,
            max_seqlen_k=max_keys,
            softmax_scale=scale,
            causal=True,
            window_size=(window - 1, 0) if window else (unbounded, unbounded),
        )
        out: Tensor = found[0] if isinstance(found, tuple) else found
        return out

    return flash


def _difference(flash: Flash, device: torch.device) -> float:
    """Return the largest distance from plain attention on two rows with a prefix, with and without window."""
    generator = torch.Generator().manual_seed(7)

    def values(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(torch.bfloat16).to(device)

    query, keys, content = values(9, 4, 64), values(33, 2, 64), values(33, 2, 64)
    query_starts = torch.tensor([0, 4, 9], dtype=torch.int32, device=device)
    key_starts = torch.tensor([0, 21, 33], dtype=torch.int32, device=device)
    largest = 0.0
    for window in (0, 6):
        found = flash(query, keys, content, query_starts, key_starts, 5, 21, 0.125, window).float()
        rows = [((0, 4), (0, 21)), ((4, 9), (21, 33))]
        expected = [_plain(query[q:r], keys[k:m], content[k:m], 0.125, window) for (q, r), (k, m) in rows]
        distance = (found - torch.cat(expected)).abs().max()
        largest = max(largest, float(distance)) if bool(distance.isfinite()) else float("inf")
    return largest


def _plain(query: Tensor, keys: Tensor, values: Tensor, scale: float, window: int) -> Tensor:
    """Return attention of one row's last queries [n, Hq, D] over its keys [m, Hkv, D], in float32."""
    group = query.shape[1] // keys.shape[1]
    wide_keys, wide_values = (part.float().repeat_interleave(group, dim=1) for part in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", query.float(), wide_keys) * scale
    key = torch.arange(len(keys), device=query.device)[None, :]
    own = torch.arange(len(keys) - len(query), len(keys), device=query.device)[:, None]
    hidden = (key > own) | ((key <= own - window) if window else (key < 0))
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(dim=-1), wide_values)


def _torch_flash(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    query_starts: Tensor,
    key_starts: Tensor,
    max_queries: int,
    max_keys: int,
    scale: float,
    window: int,
) -> Tensor:
    found: Tensor = torch.ops.aten._flash_attention_forward(
        query,
        keys,
        values,
        query_starts,
        key_starts,
        max_queries,
        max_keys,
        0.0,
        True,
        False,
        scale=scale,
        window_size_left=window - 1 if window else None,
        window_size_right=0 if window else None,
    )[0]
    return found
