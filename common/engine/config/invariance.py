"""Where `engine.batch_invariant` can be promised: a position has the same bits however its step is cut (ADR 14).

Called by the model runner before anything is loaded. On a processor that holds without the option, but not everywhere;
who asks for it is told, here as on a GPU, instead of answered almost always alike.
"""

from __future__ import annotations

import torch

from cohort.common.engine.config.model_config import ModelGeometry
from cohort.common.errors import ConfigError
from cohort.kernels.cpu import native
from cohort.kernels.gpu import available as gpu

_ASKED = "engine.batch_invariant: it cannot be promised"
_HEAD_STEP = 16
"""Heads of a multiple of so many elements begin where loads of 16 bytes can, in every step; others do in some."""


def check_invariant(
    geometry: ModelGeometry, device: torch.device, dtype: str, *, ranks: int, threads: int, model: str
) -> None:
    """Raise `ConfigError` where it cannot be promised, naming why, and what to do. `threads`: of a step on a
    processor."""
    if (reason := _hindrance(geometry, device, dtype, ranks, threads)) is not None:
        raise ConfigError(f"{_ASKED} for {model} on {device}: {reason}; or leave the option off")


def _hindrance(geometry: ModelGeometry, device: torch.device, dtype: str, ranks: int, threads: int) -> str | None:
    if geometry.family == "generic":
        return f"{geometry.model_type} runs through transformers, whose products follow the number of rows"
    if device.type == "cpu":
        return _on_processor(geometry, dtype, threads)
    if ranks > 1:
        return (
            f"NCCL adds the parts of {ranks} GPUs in an order that follows the number of rows; set the workers' "
            "tensor_parallel to 1"
        )
    if gpu.ops_for(torch.empty(0, device=device)) is None:
        return "it needs the kernels in Triton; install triton and unset COHORT_KERNELS"
    if geometry.family == "opt":
        return "torch computes its norms and activations, by kernels that follow their shapes; use engine.device cpu"
    if geometry.family == "deepseek":
        return "its kernels over latents choose parts and tiles by the rows of a step; use engine.device cpu"
    if geometry.head_dim % _HEAD_STEP:
        return f"heads of {geometry.head_dim} elements are no multiple of {_HEAD_STEP}; use engine.device cpu"
    return None


def _on_processor(geometry: ModelGeometry, dtype: str, threads: int) -> str | None:
    if native.implementation() != "native":
        return "it needs the compiled kernels; install a C++ compiler and unset COHORT_KERNELS"
    if dtype == "bfloat16" and not native.operators().panels_multiply_bf16():
        return "this processor has no products of bfloat16, so that torch multiplies; set model.dtype float32"
    by_torch = geometry.family == "gemma" or (geometry.family == "opt" and geometry.activation != "relu")
    if by_torch and threads > 1:
        return "torch computes its activation, in shares of threads that may end inside a row; set engine.threads 1"
    return None
