"""The form in which a model runs on a device, made of its files: the project's own layers, or transformers'.

Called by the model runner, once. Which form it is follows from the model's configuration and the kind of device alone.
"""

from __future__ import annotations

from typing import assert_never

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
    asked = f"model.quantization: {load.rounding} "
    if (load.folder / GGUF_FILE).exists():
        raise ConfigError(f"{asked}rounds plain weights, and those of {load.folder.name} are codes already")
    if load.device.type != "cpu" or native.implementation() != "native":
        raise ConfigError(f"{asked}is served on a processor by the compiled kernels alone")
    if load.geometry.family != "llama":
        raise ConfigError(f"{asked}is not served for {load.geometry.model_type}; served are models of Llama's form")
