"""Gemma-shaped decoders (Gemma 2, Gemma 3 text) as one function per step.

Called by the model runner; beside `lean_llama` for what differs in every layer: norms before and after attention and
MLP, weights of norms kept as their distance from one, a GELU in the gated MLP, soft-capped scores and logits, and
layers of two kinds, with a sliding window and without, each with its own rotary base. The mathematics and the order of
roundings are transformers'. Knows nothing of requests: it sees tokens, positions and slots.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from cohort.common.engine.config.model_config import ModelGeometry
from cohort.common.engine.models.rope import rope_tables
from cohort.common.engine.models.step_inputs import StepInputs
from cohort.common.engine.models.wide_norm import WideNorm
from cohort.common.engine.weights.linear import Linear
from cohort.common.engine.weights.matrices import matrix, read_outer
from cohort.common.engine.weights.weights import WeightKind, Weights, open_weights
from cohort.kernels.batch_invariance import in_force
from cohort.kernels.cpu.panels import Arena
from cohort.kernels.ops.fused import gelu_mul, rope_and_write_kv, soft_cap
from cohort.kernels.ops.paged_attention import paged_attention

_PREFIXES = ("model.", "model.language_model.", "language_model.model.", "")  # beside images' layers, now and before
_QKV = [f"self_attn.{part}_proj" for part in "qkv"]
_GATE_UP = ["mlp.gate_proj", "mlp.up_proj"]
_NORMS = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")


@dataclass(slots=True)
class _Layer:
    attention_norm: WideNorm
    qkv: Linear
    q_norm: WideNorm | None
    k_norm: WideNorm | None
    attention_out: Linear
    attended_norm: WideNorm
    mlp_norm: WideNorm
    gate_up: Linear
    down: Linear
    mlp_out_norm: WideNorm
    sliding_window: int
    cos: Tensor
    sin: Tensor


class LeanGemma:
    """The weights of one model and its forward."""

    def __init__(
        self,
        model_dir: Path,
        geometry: ModelGeometry,
        *,
        dtype: torch.dtype,
        device: torch.device,
        weights: WeightKind = "files",
    ) -> None:
        self._geometry, self._dtype, self._fixed = geometry, dtype, in_force()
        self._scale = geometry.attention_scale or geometry.head_dim**-0.5
        self._embedding_scale = float(torch.tensor(geometry.hidden_size**0.5).to(dtype))  # rounded as the weights are
        tables = rope_tables(geometry, device)
        local_tables = tables if geometry.local_rope is None else rope_tables(geometry, device, geometry.local_rope)
        with open_weights(model_dir, weights, geometry.quantization) as files:
            prefix = files.prefix(_PREFIXES, "embed_tokens.weight")
            files.require(_tensor_names(geometry, prefix))
            arena = Arena()
            self._embedding, self._lm_head = read_outer(files, prefix, geometry, dtype, device, arena)
            norms: list[WideNorm] = []
            self._layers: list[_Layer] = []
            for index, window in enumerate(geometry.sliding_windows):
                reader = _LayerReader(files, geometry, f"{prefix}layers.{index}.", dtype, device, arena, norms)
                self._layers.append(reader.read(window, *(local_tables if window else tables)))
            reader = _LayerReader(files, geometry, prefix, dtype, device, arena, norms)
            self._final_norm = reader.norm("norm", geometry.hidden_size)
        for norm in norms:
            norm.prepare()

    sampled_states: Tensor | None = None

    def forward(self, step: StepInputs, kv: Tensor) -> Tensor:
        """See `step_inputs.Model`."""
        g, tokens = self._geometry, len(step.token_ids)
        query_size, key_end = g.num_heads * g.head_dim, (g.num_heads + g.num_kv_heads) * g.head_dim
        residual = torch.empty((tokens, g.hidden_size), dtype=self._dtype, device=step.token_ids.device)
        self._embedding.into(step.token_ids, residual)
        residual.mul_(self._embedding_scale)
        normed = torch.empty_like(residual)
        qkv = residual.new_empty((tokens, key_end + g.num_kv_heads * g.head_dim))
        query = qkv[:, :query_size].view(tokens, -1, g.head_dim)
        key = qkv[:, query_size:key_end].view(tokens, -1, g.head_dim)
        value = qkv[:, key_end:].view(tokens, -1, g.head_dim)
        attended = residual.new_empty((tokens, query_size))
        both = residual.new_empty((tokens, 2 * g.intermediate_size))
        gate, up = both.chunk(2, dim=-1)
        inner = residual.new_empty((tokens, g.intermediate_size) if self._fixed else 0)
        for index, layer in enumerate(self._layers):
            layer.attention_norm.into(residual, normed)
            layer.qkv.into(normed, qkv)
            if layer.q_norm is not None and layer.k_norm is not None:
                layer.q_norm.into(query, query)
                layer.k_norm.into(key, key)
            place, slots, meta = step.of_layer(index)
            rope_and_write_kv(query, key, value, layer.cos, layer.sin, step.positions, kv, place, slots)
            paged_attention(
                query,
                kv,
                place,
                meta,
                self._scale,
                attended.view(tokens, -1, g.head_dim),
                sliding_window=layer.sliding_window,
                softcap=g.attention_softcap,
            )
            layer.attention_out.into(attended, normed)
            layer.attended_norm.into(normed, normed)
            residual.add_(normed)
            layer.mlp_norm.into(residual, normed)
            layer.gate_up.into(normed, both)
            if self._fixed:
                gelu_mul(both, inner)
            else:
                inner = F.gelu(gate, approximate="tanh").mul_(up)
            layer.down.into(inner, normed)
            layer.mlp_out_norm.into(normed, normed)
            residual.add_(normed)
        return self._logits(residual[step.sample_index])

    def _logits(self, last: Tensor) -> Tensor:
        """float32 [S, vocabulary] of the last layer's sums [S, hidden], of the sampled tokens only."""
        self._final_norm.into(last, last)
        self.sampled_states = last
        logits = torch.empty((len(last), self._geometry.vocab_size), dtype=torch.float32, device=last.device)
        self._lm_head.into(last, logits)
        cap = self._geometry.logit_softcap
        if cap and self._fixed:
            soft_cap(logits, cap)
        elif cap:
            logits.div_(cap).tanh_().mul_(cap)
        return logits


def _tensor_names(geometry: ModelGeometry, prefix: str) -> list[str]:
    """Every tensor the configuration implies (lm_head apart: absent means tied)."""
    projections = [*_QKV, "self_attn.o_proj"]
    per_layer = [f"{module}.weight" for module in (*_NORMS, *projections, *_GATE_UP, "mlp.down_proj")]
    per_layer += [f"{module}.bias" for module in projections] if geometry.qkv_bias else []
    per_layer += ["self_attn.q_norm.weight", "self_attn.k_norm.weight"] if geometry.qk_norm else []
    names = [f"{prefix}layers.{index}.{name}" for index in range(geometry.num_layers) for name in per_layer]
    return [f"{prefix}embed_tokens.weight", f"{prefix}norm.weight", *names]


@dataclass(slots=True)
class _LayerReader:
    files: Weights
    geometry: ModelGeometry
    prefix: str
    dtype: torch.dtype
    device: torch.device
    arena: Arena
    norms: list[WideNorm]  # all that were read

    def read(self, sliding_window: int, cos: Tensor, sin: Tensor) -> _Layer:
        g = self.geometry
        query_size, kv_size = g.num_heads * g.head_dim, g.num_kv_heads * g.head_dim
        attention_norm, attended_norm, mlp_norm, mlp_out_norm = (self.norm(name, g.hidden_size) for name in _NORMS)
        return _Layer(
            attention_norm=attention_norm,
            qkv=self._linear(_QKV, [query_size, kv_size, kv_size], g.hidden_size, g.qkv_bias),
            q_norm=self.norm("self_attn.q_norm", g.head_dim) if g.qk_norm else None,
            k_norm=self.norm("self_attn.k_norm", g.head_dim) if g.qk_norm else None,
            attention_out=self._linear(["self_attn.o_proj"], [g.hidden_size], query_size, g.output_bias),
            attended_norm=attended_norm,
            mlp_norm=mlp_norm,
            gate_up=self._linear(_GATE_UP, [g.intermediate_size] * 2, g.hidden_size, False),
            down=self._linear(["mlp.down_proj"], [g.hidden_size], g.intermediate_size, False),
            mlp_out_norm=mlp_out_norm,
            sliding_window=sliding_window,
            cos=cos,
            sin=sin,
        )

    def norm(self, module: str, width: int) -> WideNorm:
        weight = self.files.read(f"{self.prefix}{module}.weight", (width,), self.dtype, self.device)
        self.norms.append(WideNorm(weight, self.geometry.norm_eps, shift=1.0))
        return self.norms[-1]

    def _linear(self, modules: list[str], rows: list[int], width: int, bias: bool) -> Linear:
        names = [f"{self.prefix}{module}" for module in modules]
        weight = matrix(self.files, [f"{name}.weight" for name in names], rows, width, self.dtype, self.device)
        biases = [f"{name}.bias" for name in names]
        added = self.files.read_rows(biases, rows, (), self.dtype, self.device) if bias else None
        return Linear(weight, added, arena=self.arena, dtype=self.dtype)
