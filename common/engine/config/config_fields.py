"""Parts of a config.json that several model types share: rotary embeddings, context, windows, dtype.

Called by `model_config`. Both spellings of transformers are read: of version 5, and of those before. Pure functions of
the configuration.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cohort.common.engine.config.model_defaults import DEFAULTS


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding: base and scaling. `scaling` holds the numbers of its type as config.json names them."""

    theta: float
    rope_type: str
    scaling: Mapping[str, Any]
    partial: float = 1.0  # of each head's elements, the first ones are rotated


def first_of(config: Mapping[str, Any], *names: str) -> int:
    for name in names:
        if isinstance(config.get(name), int):
            return int(config[name])
    raise KeyError(names[0])


def has_rope(config: Mapping[str, Any]) -> bool:
    parameters = config.get("rope_parameters") or {}
    per_layer_type = any(isinstance(value, dict) for value in parameters.values())
    return not per_layer_type and bool(parameters or config.get("rope_theta") or config.get("rope_scaling"))


def rope_of(config: Mapping[str, Any]) -> RopeConfig:
    """Read both spellings: `rope_parameters` (transformers 5) and `rope_theta` beside `rope_scaling` (before)."""
    parameters = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    theta = parameters.pop("rope_theta", None) or config.get("rope_theta") or 10000.0
    legacy_type = parameters.pop("type", None)
    partial = parameters.pop("partial_rotary_factor", None) or config.get("partial_rotary_factor") or 1.0
    rope_type = parameters.pop("rope_type", None) or legacy_type or "default"
    if config["model_type"] == "phi3" and rope_type in ("su", "yarn"):  # earlier names of the same
        rope_type = "longrope"
    if "original_max_position_embeddings" in config:  # Phi-3 keeps it outside, and it rules there
        parameters["original_max_position_embeddings"] = config["original_max_position_embeddings"]
    if rope_type == "longrope" and parameters.get("factor") is None:
        longest = config["max_position_embeddings"]
        parameters["factor"] = longest / parameters.setdefault("original_max_position_embeddings", longest)
    return RopeConfig(theta=float(theta), rope_type=rope_type, scaling=parameters, partial=float(partial))


def ropes_by_layer_type(config: Mapping[str, Any]) -> tuple[RopeConfig, RopeConfig]:
    """Return the embeddings of layers with full attention and of those with a sliding window: `rope_parameters` has one
    for each; in earlier files `rope_theta` and `rope_scaling` of the full layers, `rope_local_base_freq` of the
    others."""
    parameters = config.get("rope_parameters") or {}
    others = {key: value for key, value in config.items() if not key.startswith("rope_")}
    full = {"rope_theta": config.get("rope_theta", 1e6), **(parameters.get("full_attention") or {})}
    local = {"rope_theta": config.get("rope_local_base_freq", 1e4), **(parameters.get("sliding_attention") or {})}
    full |= config.get("rope_scaling") or {}
    return rope_of({**others, "rope_parameters": full}), rope_of({**others, "rope_parameters": local})


def max_positions(config: Mapping[str, Any], rope: RopeConfig | None) -> int:
    """Return the context served: what the model says, but for LongRoPE only its first range.

    LongRoPE switches all of a request's frequencies at a length, which would change KV already cached (and, in one
    forward, other requests' too); inside the original range the short frequencies hold.
    """
    longest = first_of(config, "max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length")
    if rope is not None and rope.rope_type == "longrope":
        return min(longest, int(rope.scaling.get("original_max_position_embeddings", longest)))
    return longest


def sliding_windows(config: Mapping[str, Any]) -> tuple[int, ...]:
    layers, model_type = range(config["num_hidden_layers"]), config["model_type"]
    window, types = int(config.get("sliding_window") or 0), config.get("layer_types")
    if model_type.startswith("qwen") and not config.get("use_sliding_window", False):
        return (0,) * len(layers)
    match model_type:
        case "mistral" | "mixtral" | "phi3" | "qwen3_moe":
            return (window,) * len(layers)
        case "gemma2" | "gemma3_text" | "gpt_oss" | "qwen2" | "qwen3" | "qwen2_moe" if types:
            slides = [kind == "sliding_attention" for kind in types]
        case "qwen2" | "qwen3":
            slides = [index >= config.get("max_window_layers", 28) for index in layers]
        case "qwen2_moe":
            slides = [index % 2 == 0 and index < config.get("max_window_layers", 28) for index in layers]
        case _:
            return (0,) * len(layers)
    return tuple(window if each else 0 for each in slides)


def checkpoint_dtype(config: Mapping[str, Any]) -> str:
    return str(config.get("dtype") or config.get("torch_dtype") or "").removeprefix("torch.")


def yarn_mscale(factor: float, weight: float = 1.0) -> float:
    """Return what YaRN (Peng et al. 2023) scales attention by, for contexts longer by `factor`."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def text_decoder(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration of the decoder alone of a Gemma 3 checkpoint that also takes images; else none."""
    text = config.get("text_config")
    if config["model_type"] != "gemma3" or not isinstance(text, dict):
        return {}
    outer = {key: config[key] for key in ("tie_word_embeddings", "dtype", "torch_dtype") if key in config}
    return {**text, **outer, "model_type": "gemma3_text"}


def eos_ids(config: Mapping[str, Any], generation: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the end tokens: generation_config.json rules where it names them, as in transformers."""
    default = DEFAULTS.get(config["model_type"], {}).get("eos_token_id")
    eos = generation.get("eos_token_id", config.get("eos_token_id", default))
    if eos is None:
        return ()
    return tuple(eos) if isinstance(eos, list) else (int(eos),)
