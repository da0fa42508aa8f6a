"""A head for a model of Llama's form (EAGLE, Li et al. 2024): one decoder layer over [embedding ; state].

Made by `draft_loading`, asked by `states_drafter`. Knows the published checkpoints' tensors; embedding and last product
are the model's, unless the head brings the rows of the last product that it drafts from (`draft_vocab_size`, with
`d2t` as published EAGLE-3 heads have it): of a small model the product over all tokens costs more than the head.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor

from cohort.common.engine.config.model_config import ModelGeometry
from cohort.common.engine.models.lean_llama import read_layer
from cohort.common.engine.models.rope import rope_tables
from cohort.common.engine.models.step_inputs import StepInputs
from cohort.common.engine.weights.linear import Linear
from cohort.common.engine.weights.matrices import RoundedWeights, Rounding, matrix
from cohort.common.engine.weights.weights import WeightKind, open_weights
from cohort.common.errors import ModelError
from cohort.kernels.cpu.panels import Arena
from cohort.kernels.ops.fused import rms_norm, rope_and_write_kv
from cohort.kernels.ops.paged_attention import paged_attention


class EagleHead:
    """Its weights and their forward: a `StatesHead`."""

    last_product: Linear | None = None
    drafted: Tensor | None = None

    def __init__(
        self,
        folder: Path,
        geometry: ModelGeometry,
        dtype: torch.dtype,
        rounding: Rounding | None,
        device: torch.device,
        weights: WeightKind = "files",
    ) -> None:
        """Reads fc (with or without a bias) and the layer `layers.0`, which needs no first norm; embedding and last
        product are the model's, or of some tokens the head's. Raises `ModelError`."""
        self._geometry = geometry
        hidden = geometry.hidden_size
        opened = open_weights(folder, weights, geometry.quantization)
        with opened if rounding is None else RoundedWeights(opened, rounding, dtype) as files:
            prefix = files.prefix(("", "model."), "layers.0.self_attn.o_proj.weight")
            outer = files.prefix((prefix, ""), "fc.weight")
            arena = Arena()
            weight = matrix(files, [outer + "fc.weight"], [hidden], 2 * hidden, dtype, device)
            biased = outer + "fc.bias" in files
            bias = files.read(outer + "fc.bias", (hidden,), dtype, device) if biased else None
            self._fc = Linear(weight, bias, arena=arena, dtype=dtype)
            normed = f"{prefix}layers.0.input_layernorm.weight" in files
            self._layer = read_layer(files, geometry, f"{prefix}layers.0.", 0, dtype, device, arena, input_norm=normed)
            self._normed = normed
            if count := draft_vocabulary(folder):
                weight = matrix(files, ["lm_head.weight"], [count], hidden, dtype, device)
                self.last_product = Linear(weight, arena=arena, dtype=dtype)
                offsets = files.read("d2t", (count,), torch.int64, device)
        if self.last_product is not None:
            self.drafted = offsets + torch.arange(len(offsets), device=device)
            if not bool(((self.drafted >= 0) & (self.drafted < geometry.vocab_size)).all()):
                raise ModelError(f"{folder}: d2t names tokens beyond the model's {geometry.vocab_size}")
        self._cos, self._sin = rope_tables(geometry, device)

    def forward(self, step: StepInputs, embedded: Tensor, states: Tensor, kv: Tensor) -> Tensor:
        """See `StatesHead`."""
        g, layer = self._geometry, self._layer
        residual = self._fc(torch.cat([embedded, states], dim=1))
        normed = torch.empty_like(residual)
        if self._normed:
            rms_norm(residual, layer.input_norm, g.norm_eps, normed)
        qkv = layer.qkv(normed if self._normed else residual)
        key_begin, key_end = g.num_heads * g.head_dim, (g.num_heads + g.num_kv_heads) * g.head_dim
        query = qkv[:, :key_begin].view(len(qkv), -1, g.head_dim)
        key = qkv[:, key_begin:key_end].view(len(qkv), -1, g.head_dim)
        value = qkv[:, key_end:].view(len(qkv), -1, g.head_dim)
        rope_and_write_kv(query, key, value, self._cos, self._sin, step.positions, kv, 0, step.slot_mapping)
        attended = residual.new_empty((len(qkv), g.num_heads, g.head_dim))
        paged_attention(query, kv, 0, step.meta, g.head_dim**-0.5, attended)
        layer.attention_out.add_into(attended.view(len(qkv), -1), residual)
        rms_norm(residual, layer.mlp_norm, g.norm_eps, normed)
        activated = residual.new_empty((len(qkv), g.intermediate_size))
        layer.mlp.add_into(normed, activated, residual)
        return residual


def draft_vocabulary(folder: Path) -> int:
    """Tokens that a head drafts from, as its configuration says; 0 = from all of the model's."""
    read = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    count = int(read.get("draft_vocab_size") or 0)
    return count if count < int(read["vocab_size"]) else 0
