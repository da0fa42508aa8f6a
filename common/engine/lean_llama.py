"""Llama-shaped decoders (Llama, Mistral, Qwen2, Qwen2.5, Qwen3, SmolLM2) as one function per step.

Called by the model runner. The mathematics and the order of roundings are transformers'; what differs is the cost: one
product for q, k and v, one for gate and up, no module dispatch, normalisation and rotation in place, and the
vocabulary only for sampled rows. Knows nothing of requests: it sees tokens, positions and slots.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from cohort.common.engine.linear import Linear
from cohort.common.engine.model_config import ModelGeometry
from cohort.common.engine.rope import rope_tables
from cohort.common.engine.step_inputs import StepInputs
from cohort.common.engine.weights import WeightFiles
from cohort.kernels.fused import add_rms_norm, rms_norm, rope_inplace, silu_mul
from cohort.kernels.paged_attention import paged_attention, write_kv


@dataclass(slots=True)
class _Layer:
    input_norm: Tensor
    qkv: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    attention_out: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear
    sliding_window: int


class LeanLlama:
    """The weights of one model and its forward."""

    def __init__(
        self,
        model_dir: Path,
        geometry: ModelGeometry,
        *,
        dtype: torch.dtype,
        device: torch.device,
        max_step_tokens: int,
    ) -> None:
        self._geometry = geometry
        self._eps = geometry.norm_eps
        self._query_size = geometry.num_heads * geometry.head_dim
        self._kv_size = geometry.num_kv_heads * geometry.head_dim
        self._scale = geometry.head_dim**-0.5
        self._cos, self._sin = rope_tables(geometry, device)
        files = WeightFiles(model_dir)
        prefix = files.prefix(("model.", ""), "embed_tokens.weight")
        files.require(_tensor_names(geometry, prefix))
        hidden, vocab = geometry.hidden_size, geometry.vocab_size

        def vector(name: str, size: int) -> Tensor:
            return files.read(prefix + name, (size,), dtype, device)

        self._embedding = files.read(prefix + "embed_tokens.weight", (vocab, hidden), dtype, device)
        self._layers = [
            _read_layer(files, geometry, f"{prefix}layers.{index}.", index, dtype, device)
            for index in range(geometry.num_layers)
        ]
        self._final_norm = vector("norm.weight", hidden)
        tied = geometry.tie_embeddings or "lm_head.weight" not in files
        head = self._embedding if tied else files.read("lm_head.weight", (vocab, hidden), dtype, device)
        self._lm_head = Linear(head)

        def buffer(width: int) -> Tensor:
            return torch.empty((max_step_tokens, width), dtype=dtype, device=device)

        # One step at a time runs, so every layer of every step writes into the same three buffers.
        self._normed = buffer(hidden)
        self._attended = buffer(self._query_size)
        self._activated = buffer(geometry.intermediate_size)

    def forward(self, step: StepInputs, kv: Tensor) -> Tensor:
        """See `step_inputs.Model`."""
        tokens = len(step.token_ids)
        if tokens > len(self._normed):
            self._grow(tokens)
        normed, attended, activated = self._normed[:tokens], self._attended[:tokens], self._activated[:tokens]
        meta, head_dim, eps = step.meta, self._geometry.head_dim, self._eps
        per_head = attended.view(tokens, -1, head_dim)
        key_end = self._query_size + self._kv_size
        residual = F.embedding(step.token_ids, self._embedding)
        rms_norm(residual, self._layers[0].input_norm, eps, normed)
        for index, layer in enumerate(self._layers):
            qkv = layer.qkv(normed)
            query = qkv[:, : self._query_size].view(tokens, -1, head_dim)
            key = qkv[:, self._query_size : key_end].view(tokens, -1, head_dim)
            value = qkv[:, key_end:].view(tokens, -1, head_dim)
            if layer.q_norm is not None and layer.k_norm is not None:
                rms_norm(query, layer.q_norm, eps, query)
                rms_norm(key, layer.k_norm, eps, key)
            rope_inplace(query, key, self._cos, self._sin, step.positions)
            write_kv(key, value, kv, index, step.slot_mapping)
            paged_attention(query, kv, index, meta, self._scale, per_head, sliding_window=layer.sliding_window)
            add_rms_norm(layer.attention_out(attended), residual, layer.mlp_norm, eps, normed)
            silu_mul(layer.gate_up(normed), activated)
            projected = layer.down(activated)
            if index + 1 < len(self._layers):
                add_rms_norm(projected, residual, self._layers[index + 1].input_norm, eps, normed)
            else:  # only the sampled tokens go on
                last = residual[step.sample_index] + projected[step.sample_index]
                rms_norm(last, self._final_norm, eps, last)
        return self._lm_head(last).float()

    def _grow(self, tokens: int) -> None:
        """A step larger than announced (only the profiler makes one): larger buffers from now on."""
        self._normed, self._attended, self._activated = (
            old.new_empty((tokens, old.shape[1])) for old in (self._normed, self._attended, self._activated)
        )


def _tensor_names(geometry: ModelGeometry, prefix: str) -> list[str]:
    """Every tensor the configuration implies (lm_head apart: absent means tied)."""
    names = [f"{prefix}embed_tokens.weight", f"{prefix}norm.weight"]
    per_layer = ["input_layernorm.weight", "post_attention_layernorm.weight"]
    qkv = [f"self_attn.{part}_proj" for part in "qkv"]
    mlp = [f"mlp.{part}_proj" for part in ("gate", "up", "down")]
    per_layer += [f"{module}.weight" for module in (*qkv, "self_attn.o_proj", *mlp)]
    per_layer += [f"{module}.bias" for module in qkv] if geometry.qkv_bias else []
    per_layer += ["self_attn.o_proj.bias"] if geometry.output_bias else []
    per_layer += [f"{module}.bias" for module in mlp] if geometry.mlp_bias else []
    per_layer += ["self_attn.q_norm.weight", "self_attn.k_norm.weight"] if geometry.qk_norm else []
    return names + [f"{prefix}layers.{index}.{name}" for index in range(geometry.num_layers) for name in per_layer]


def _read_layer(
    files: WeightFiles, geometry: ModelGeometry, prefix: str, index: int, dtype: torch.dtype, device: torch.device
) -> _Layer:
    hidden, inner = geometry.hidden_size, geometry.intermediate_size
    query_size = geometry.num_heads * geometry.head_dim
    kv_size = geometry.num_kv_heads * geometry.head_dim

    def linear(modules: list[str], rows: list[int], width: int, bias: bool) -> Linear:
        weight = files.read_rows([f"{prefix}{module}.weight" for module in modules], rows, (width,), dtype, device)
        biases = [f"{prefix}{module}.bias" for module in modules]
        return Linear(weight, files.read_rows(biases, rows, (), dtype, device) if bias else None)

    def vector(name: str, size: int) -> Tensor:
        return files.read(prefix + name, (size,), dtype, device)

    head_norms = geometry.qk_norm
    return _Layer(
        input_norm=vector("input_layernorm.weight", hidden),
        qkv=linear(
            [f"self_attn.{part}_proj" for part in "qkv"], [query_size, kv_size, kv_size], hidden, geometry.qkv_bias
        ),
        q_norm=vector("self_attn.q_norm.weight", geometry.head_dim) if head_norms else None,
        k_norm=vector("self_attn.k_norm.weight", geometry.head_dim) if head_norms else None,
        attention_out=linear(["self_attn.o_proj"], [hidden], query_size, geometry.output_bias),
        mlp_norm=vector("post_attention_layernorm.weight", hidden),
        gate_up=linear(["mlp.gate_proj", "mlp.up_proj"], [inner, inner], hidden, geometry.mlp_bias),
        down=linear(["mlp.down_proj"], [hidden], inner, geometry.mlp_bias),
        sliding_window=geometry.sliding_windows[index],
    )
