"""Which implementation runs: the compiled extension or the torch reference. Decided once per process, at first use.

Called by the dispatching modules on every call, so the decided case is a few attribute reads. The caller says
first where built kernels are stored (`keep_in`). A missing compiler, a failed build or a wrong result is one warning,
and the reference takes over; only a wrong `COHORT_KERNELS` is an error.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import structlog
import torch
from torch import Tensor

from cohort.kernels.cpu.build import build
from cohort.kernels.cpu.self_check import first_difference
from cohort.kernels.errors import KernelBuildError, KernelChoiceError

ENVIRONMENT = "COHORT_KERNELS"
_DTYPES = frozenset({torch.float32, torch.bfloat16})
_OPERATORS = (
    "paged_attention",
    "write_kv",
    "gather_slots",
    "scatter_slots",
    "rms_norm",
    "rope_inplace",
    "silu_mul",
    "clamped_swiglu",
    "choose_experts",
    "add_weighted",
    "sample_tokens",
    "pack_panels",
    "pack_quantized",
    "pack_e4m3",
    "quantized_bytes",
    "panel_outputs",
    "panel_product",
    "panel_product_added",
    "panel_product_gated",
    "panel_rows",
    "panels_multiply_bf16",
    "huge_zeros",
    "llama_layers",
)
_log = structlog.get_logger(__name__)


class Operators:
    """The extension's operators, each bound to its one overload: that spares torch a lookup per call."""

    __slots__ = _OPERATORS

    def __init__(self) -> None:
        for name in _OPERATORS:
            setattr(self, name, getattr(torch.ops.cohort, name).default)


_cache: Path | None = None
_decided = False
_operators: Any = None
_deciding = threading.Lock()


def keep_in(cache: Path) -> None:
    """Set the folder of built kernels; to be called before the first use. Nothing is built yet.

    Raises `KernelChoiceError` for a wrong `COHORT_KERNELS`.
    """
    global _cache
    _mode()
    _cache = cache


def _mode() -> Literal["auto", "reference"]:
    match os.environ.get(ENVIRONMENT, "auto"):
        case "auto":
            return "auto"
        case "reference":
            return "reference"
        case other:
            raise KernelChoiceError(f"{ENVIRONMENT}={other!r}: must be 'auto' or 'reference'")


def load(report: Callable[[str], None] | None = None) -> Operators | None:
    """Return the extension's operators, built if need be; None (and the reason logged) when the reference must do.

    `report` gets a few words at each step of a build. Raises `KernelChoiceError` for a wrong `COHORT_KERNELS`, and
    where `keep_in` was not called.
    """
    if _mode() == "reference":
        _log.info("kernels", implementation="reference", reason=f"{ENVIRONMENT}=reference")
        return None
    if _cache is None:
        raise KernelChoiceError("no folder for built kernels: native.keep_in(FOLDER) comes before the first use")
    try:
        path = build(_cache) if report is None else build(_cache, report)
        torch.ops.load_library(path)  # type: ignore[no-untyped-call]
        if not torch.ops.cohort.processor_suffices():
            raise KernelBuildError(f"{path} was built for another processor")
        operators = Operators()
        if (difference := first_difference(operators)) is not None:
            raise KernelBuildError(f"{path} disagrees with the reference: {difference}")
    except (KernelBuildError, OSError, RuntimeError) as error:
        _log.warning("kernels", implementation="reference", reason=str(error))
        return None
    return operators


def _decide(report: Callable[[str], None] | None = None) -> None:
    global _decided, _operators
    with _deciding:
        if not _decided:
            _operators = load(report)
            _decided = True


def prepare(report: Callable[[str], None]) -> Literal["native", "reference"]:
    """Load the kernels now, so that no later call compiles; see `load`. Calls on other threads wait meanwhile."""
    _decide(report)
    return implementation()


def implementation() -> Literal["native", "reference"]:
    """Return the implementation for float32 and bfloat16 on the CPU; decide if nothing was called yet."""
    return "reference" if operators() is None else "native"


def operators() -> Any:
    """Return the compiled operators, or None where the reference must do; decide if nothing was called yet."""
    if not _decided:
        _decide()
    return _operators


def ops_for(tensor: Tensor) -> Any:
    """Return the compiled operators when they serve this tensor's device and dtype, else None."""
    if not tensor.is_cpu or tensor.dtype not in _DTYPES:
        return None
    if not _decided:
        _decide()
    return _operators


def ops_for_cache(kv: Tensor) -> Any:
    """Return the compiled operators when they move this cache's tokens, else None; bytes are moved as they are."""
    return operators() if kv.is_cpu and kv.dtype == torch.uint8 else ops_for(kv)
