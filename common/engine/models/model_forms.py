"""The form in which a model runs on a device, made of its files: the project's own layers, or transformers'.

Called by the model runner, once. Which form it is follows from the model's configuration and the kind of device alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import assert_never

import torch

from cohort.common.engine.config.model_config import ModelGeometry
from cohort.common.engine.models.generic import GenericModel
from cohort.common.engine.models.lean_deepseek import LeanDeepseek
from cohort.common.engine.models.lean_gemma import LeanGemma
from cohort.common.engine.models.lean_gpt_oss import LeanGptOss
from cohort.common.engine.models.lean_llama import LeanLlama
from cohort.common.engine.models.lean_opt import LeanOpt
from cohort.common.engine.models.step_inputs import Model
from cohort.common.engine.ranks.ranks import Ranks
from cohort.common.engine.weights.matrices import Rounding
from cohort.common.engine.weights.weights import WeightKind
from cohort.common.errors import ConfigError
from cohort.common.paths import GGUF_FILE
from cohort.kernels.cpu import native


def load_model(
    model_dir: Path,
    geometry: ModelGeometry,
    *,
    device: torch.device,
    dtype: torch.dtype,
    max_rows: int,
    max_step_tokens: int,
    weights: WeightKind = "files",
    ranks: Ranks | None = None,
    rounding: Rounding | None = None,
) -> Model:
    """The weights and their forward. `ranks`, `rounding`: see `LeanLlama`. Raises `ModelError` or `ConfigError`."""
    if rounding is not None:
        _check_rounding(rounding, model_dir, geometry, device)
    match family := geometry.family:
        case "llama" | "moe":
            return LeanLlama(
                model_dir,
                geometry,
                dtype=dtype,
                device=device,
                max_rows=max_rows,
                max_step_tokens=max_step_tokens,
                weights=weights,
                ranks=ranks,
                rounding=rounding,
            )
        case "gemma":
            return LeanGemma(model_dir, geometry, dtype=dtype, device=device, weights=weights)
        case "gpt_oss" | "deepseek":
            form = LeanGptOss if geometry.family == "gpt_oss" else LeanDeepseek
            return form(
                model_dir,
                geometry,
                dtype=dtype,
                device=device,
                max_step_tokens=max_step_tokens,
                weights=weights,
                ranks=ranks,
            )
        case "opt":
            return LeanOpt(model_dir, geometry, dtype=dtype, device=device, weights=weights)
        case "generic":
            if weights != "files":
                raise ConfigError(f"model.weights: {geometry.model_type} can only be served from its files")
            if geometry.quantization is not None:
                raise ConfigError(
                    f"engine.device: on {device} {geometry.model_type} runs through transformers, and "
                    f"only the project's own forms read quantised weights ({geometry.quantization.method})"
                )
            return GenericModel(model_dir, geometry, dtype=dtype, device=device)
        case _:
            assert_never(family)


def _check_rounding(rounding: Rounding, model_dir: Path, geometry: ModelGeometry, device: torch.device) -> None:
    """Raises `ConfigError` where weights would not be rounded although the configuration asks for it."""
    asked = f"model.quantization: {rounding} "
    if (model_dir / GGUF_FILE).exists():
        raise ConfigError(f"{asked}rounds plain weights, and those of {model_dir.name} are codes already")
    if device.type != "cpu" or native.implementation() != "native":
        raise ConfigError(f"{asked}is served on a processor by the compiled kernels alone")
    if geometry.family != "llama":
        raise ConfigError(f"{asked}is not served for {geometry.model_type}; served are models of Llama's form")
