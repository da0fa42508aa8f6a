"""The form in which a model runs on a device, made of its files: the project's own layers, or transformers'.

Called by the model runner, once. Which form it is follows from the model's configuration and the kind of device alone.
Before that, `check_invariant` decides where `engine.batch_invariant` can be promised: a position has the same bits
however its step is cut (ADR 14). On a processor that holds without the option, but not everywhere; who requests it is
told, here as on a GPU, instead of answered almost always alike.
"""

from __future__ import annotations

from typing import assert_never

import torch

from cohort.common.engine.config.model_config import ModelGeometry
from cohort.common.engine.models.generic import GenericModel
from cohort.common.engine.models.lean_deepseek import LeanDeepseek
from cohort.common.engine.models.lean_gemma import LeanGemma
from cohort.common.engine.models.lean_gpt_oss import LeanGptOss
from cohort.common.engine.models.lean_llama import LeanLlama
from cohort.common.engine.models.lean_opt import LeanOpt
from cohort.common.engine.models.model_files import Loading
from cohort.common.engine.models.step_inputs import Model
from cohort.common.errors import ConfigError
from cohort.common.paths import GGUF_FILE
from cohort.kernels.cpu import native
from cohort.kernels.gpu import available as gpu

_NOT_INVARIANT = "engine.batch_invariant: it cannot be promised"
_HEAD_STEP = 16
"""Heads of a multiple of so many elements begin where loads of 16 bytes can, in every step; others do in some."""


def load_model(load: Loading) -> Model:
    """Load the weights with their forward. Raises `ModelError` or `ConfigError`."""
    geometry = load.geometry
    if load.rounding is not None:
        _check_rounding(load)
    match family := geometry.family:
        case "llama" | "moe":
            return LeanLlama(load)
        case "gemma":
            return LeanGemma(load)
        case "gpt_oss":
            return LeanGptOss(load)
        case "deepseek":
            return LeanDeepseek(load)
        case "opt":
            return LeanOpt(load)
        case "generic":
            if load.weights != "files":
                raise ConfigError(f"model.weights: {geometry.model_type} can only be served from its files")
            if geometry.quantization is not None:
                raise ConfigError(
                    f"engine.device: on {load.device} {geometry.model_type} runs through transformers, and "
                    f"only the project's own forms read quantised weights ({geometry.quantization.method})"
                )
            return GenericModel(load.folder, geometry, dtype=load.dtype, device=load.device)
        case _:
            assert_never(family)


def _check_rounding(load: Loading) -> None:
    """Raise `ConfigError` where weights would not be rounded although the configuration asks for it."""
    option = f"model.quantization: {load.rounding} "
    if (load.folder / GGUF_FILE).exists():
        raise ConfigError(f"{option}rounds plain weights, and those of {load.folder.name} are codes already")
    if load.device.type != "cpu" or native.implementation() != "native":
        raise ConfigError(f"{option}is served on a processor by the compiled kernels alone")
    if load.geometry.family != "llama":
        raise ConfigError(f"{option}is not served for {load.geometry.model_type}; served are models of Llama's form")


def check_invariant(
    geometry: ModelGeometry, device: torch.device, dtype: str, *, ranks: int, threads: int, model: str
) -> None:
    """Raise `ConfigError` where it cannot be promised, naming why, and what to do. `threads`: of a step on a
    processor."""
    if (reason := _why_not_invariant(geometry, device, dtype, ranks, threads)) is not None:
        raise ConfigError(f"{_NOT_INVARIANT} for {model} on {device}: {reason}; or leave the option off")


def _why_not_invariant(
    geometry: ModelGeometry, device: torch.device, dtype: str, ranks: int, threads: int
) -> str | None:
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
