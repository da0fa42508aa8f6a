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

from cohort.common.engine.models.lean_llama import read_layer
from cohort.common.engine.models.model_files import Loading, split_heads
from cohort.common.engine.models.rope import rope_tables
from cohort.common.engine.models.step_inputs import StepInputs
from cohort.common.engine.weights.linear import Linear
from cohort.common.errors import ModelError
from cohort.kernels.ops.fused import rms_norm, rope_and_write_kv
from cohort.kernels.ops.paged_attention import paged_attention


class EagleHead:
    """The weights of a head and their forward: a `StatesHead`."""

    last_product: Linear | None = None
    drafted: Tensor | None = None

    def __init__(self, load: Loading) -> None:
        """Read fc (with or without a bias) and the layer `layers.0`, which needs no first norm. Raises `ModelError`."""
        self._geometry = geometry = load.geometry
        hidden = geometry.hidden_size
        with load.open() as files:
            names = files.weights
            prefix = names.prefix(("", "model."), "layers.0.self_attn.o_proj.weight")
            fc = names.prefix((prefix, ""), "fc.weight") + "fc"
            self._fc = files.linear([fc], [hidden], 2 * hidden, bias=f"{fc}.bias" in names)
            self._normed = f"{prefix}layers.0.input_layernorm.weight" in names
            self._layer = read_layer(files, geometry, f"{prefix}layers.0.", 0, input_norm=self._normed)
            if count := draft_vocabulary(load.folder):
                self.last_product = files.linear(["lm_head"], [count], hidden)
                offsets = names.read("d2t", (count,), torch.int64, load.device)
        if self.last_product is not None:
            self.drafted = offsets + torch.arange(len(offsets), device=load.device)
            if not bool(((self.drafted >= 0) & (self.drafted < geometry.vocab_size)).all()):
                raise ModelError(f"{load.folder}: d2t names tokens beyond the model's {geometry.vocab_size}")
        self._cos, self._sin = rope_tables(geometry, load.device)

    def forward(self, step: StepInputs, embedded: Tensor, states: Tensor, kv: Tensor) -> Tensor:
        """See `StatesHead`."""
        g, layer = self._geometry, self._layer
        residual = self._fc(torch.cat([embedded, states], dim=1))
        normed = torch.empty_like(residual)
        if self._normed:
            rms_norm(residual, layer.input_norm, g.norm_eps, normed)
        qkv = layer.qkv(normed if self._normed else residual)
        query, key, value = split_heads(qkv, g)
        rope_and_write_kv(query, key, value, self._cos, self._sin, step.positions, kv, 0, step.slot_mapping)
        attended = residual.new_empty((len(qkv), g.num_heads, g.head_dim))
        paged_attention(query, kv, 0, step.meta, g.head_dim**-0.5, attended)
        layer.attention_out.add_into(attended.view(len(qkv), -1), residual)
        rms_norm(residual, layer.mlp_norm, g.norm_eps, normed)
        activated = residual.new_empty((len(qkv), g.intermediate_size))
        layer.mlp.add_into(normed, activated, residual)
        return residual


def draft_vocabulary(folder: Path) -> int:
    """Return the number of tokens that a head drafts from, as its configuration says; 0 = all of the model's."""
    read = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    count = int(read.get("draft_vocab_size") or 0)
    return count if count < int(read["vocab_size"]) else 0
