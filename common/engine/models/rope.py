"""Rotary tables: cos and sin of every position, computed once at load.

Called by the lean models. Follows transformers' order of operations in float32, so that the tables are bit-equal
to what its models multiply with. Two types have other frequencies for requests beyond a length (dynamic, longrope);
no longer request is served (`model_config`), so those within it are all that is needed.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from cohort.common.engine.config.model_config import ModelGeometry, RopeConfig, yarn_mscale
from cohort.common.errors import ModelError


def rope_tables(geometry: ModelGeometry, device: torch.device, rope: RopeConfig | None = None) -> tuple[Tensor, Tensor]:
    """Compute cos and sin, float32 [max_positions, rotary_dim / 2], for the rotate-half convention. `rope`: instead of
    the model's main one."""
    rope = rope or geometry.rope
    if rope is None:
        raise ModelError(f"{geometry.model_type}: no rotary embedding in its configuration")
    inverse, attention_factor = _inverse_frequencies(rope, geometry.rotary_dim, geometry.max_positions)
    angles = torch.arange(geometry.max_positions, dtype=torch.float32)[:, None] * inverse[None, :]
    return (angles.cos() * attention_factor).to(device), (angles.sin() * attention_factor).to(device)


def _inverse_frequencies(rope: RopeConfig, dim: int, max_positions: int) -> tuple[Tensor, float]:
    """Return the inverse frequencies [dim / 2] and the factor that multiplies cos and sin."""
    inverse = 1.0 / (rope.theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))
    match rope.rope_type:
        case "default" | "dynamic":  # dynamic NTK: up to max_positions the base is not moved
            return inverse, 1.0
        case "linear":
            return inverse / rope.scaling["factor"], 1.0
        case "llama3":
            return _llama3(inverse, rope, max_positions), 1.0
        case "yarn":
            return _yarn(rope, dim, max_positions)
        case "longrope":
            return _longrope(rope, dim)
        case other:
            raise ModelError(f"rope type {other!r} is not one of the lean models' types")


def _llama3(inverse: Tensor, rope: RopeConfig, max_positions: int) -> Tensor:
    """Multiply long wavelengths by `factor`, keep short ones, interpolate those between (Llama 3.1)."""
    scaling = rope.scaling
    factor, low, high = scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"]
    original = scaling.get("original_max_position_embeddings", max_positions)
    wavelength = 2 * math.pi / inverse
    scaled = torch.where(wavelength > original / low, inverse / factor, inverse)
    smooth = (original / wavelength - low) / (high - low)
    smoothed = (1 - smooth) * scaled / factor + smooth * scaled
    between = ~(wavelength < original / high) & ~(wavelength > original / low)
    return torch.where(between, smoothed, scaled)


def _yarn(rope: RopeConfig, dim: int, max_positions: int) -> tuple[Tensor, float]:
    """Interpolate slow dimensions, extrapolate fast ones, ramp between; scale attention (YaRN, Peng et al. 2023)."""
    scaling = rope.scaling
    original = scaling.get("original_max_position_embeddings", max_positions)
    factor = scaling.get("factor") or max_positions / original
    attention_factor = scaling.get("attention_factor")
    if attention_factor is None:
        weight, weight_all = scaling.get("mscale"), scaling.get("mscale_all_dim")
        if weight and weight_all:
            attention_factor = yarn_mscale(factor, weight) / yarn_mscale(factor, weight_all)
        else:
            attention_factor = yarn_mscale(factor)

    def correction_dim(rotations: float) -> float:
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = correction_dim(scaling.get("beta_fast") or 32), correction_dim(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001  # no division by zero
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    position_frequencies = rope.theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    extrapolation, interpolation = 1.0 / position_frequencies, 1.0 / (factor * position_frequencies)
    keep = 1 - ramp
    return interpolation * (1 - keep) + extrapolation * keep, float(attention_factor)


def _longrope(rope: RopeConfig, dim: int) -> tuple[Tensor, float]:
    """Apply a factor to each frequency, scale cos and sin: LongRoPE (Ding et al. 2024) in its first range."""
    scaling = rope.scaling
    short = scaling.get("short_factor") or ()
    if len(short) != dim // 2:
        raise ModelError(f"rope type longrope: {len(short)} factors in short_factor, {dim // 2} frequencies")
    factor, original = scaling["factor"], scaling["original_max_position_embeddings"]
    attention_factor = scaling.get("attention_factor")
    if attention_factor is None:
        attention_factor = 1.0 if factor <= 1.0 else math.sqrt(1 + math.log(factor) / math.log(original))
    exponents = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
    inverse = 1.0 / (torch.tensor(short, dtype=torch.float32) * rope.theta**exponents)
    return inverse, float(attention_factor)
