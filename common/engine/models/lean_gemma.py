"""Gemma-shaped decoders (Gemma 2, Gemma 3 text) as one function per step.

Called by the model runner; beside `lean_llama` for what differs in every layer: norms before and after attention and
MLP, weights of norms kept as their distance from one, a GELU in the gated MLP, soft-capped scores and logits, and
layers of two kinds, with a sliding window and without, each with its own rotary base. The mathematics and the order of
roundings are transformers'. Knows nothing of requests: it sees tokens, positions and slots.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from cohort.common.engine.config.model_config import ModelGeometry
from cohort.common.engine.models.model_files import Loading, ModelFiles, WideNorm, split_heads
from cohort.common.engine.models.rope import rope_tables
from cohort.common.engine.models.step_inputs import StepInputs
from cohort.common.engine.weights.linear import Linear
from cohort.kernels.batch_invariance import in_force
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

    def __init__(self, load: Loading) -> None:
        geometry, device = load.geometry, load.device
        self._geometry, self._dtype, self._fixed = geometry, load.dtype, in_force()
        self._scale = geometry.attention_scale or geometry.head_dim**-0.5
        self._embedding_scale = float(torch.tensor(geometry.hidden_size**0.5).to(load.dtype))  # rounded as weights are
        tables = rope_tables(geometry, device)
        local_tables = tables if geometry.local_rope is None else rope_tables(geometry, device, geometry.local_rope)
        with load.open() as files:
            prefix = files.weights.prefix(_PREFIXES, "embed_tokens.weight")
            files.weights.require(_tensor_names(geometry, prefix))
            self._embedding, self._lm_head = files.outer(prefix, geometry)
            self._layers = [
                _read_layer(files, geometry, f"{prefix}layers.{index}.", window, *(local_tables if window else tables))
                for index, window in enumerate(geometry.sliding_windows)
            ]
            self._final_norm = files.wide_norm(f"{prefix}norm", geometry.hidden_size, geometry.norm_eps, shift=1.0)

    sampled_states: Tensor | None = None

    def forward(self, step: StepInputs, kv: Tensor) -> Tensor:
        """See `step_inputs.Model`."""
        g, tokens = self._geometry, len(step.token_ids)
        query_size, kv_size = g.num_heads * g.head_dim, g.num_kv_heads * g.head_dim
        residual = torch.empty((tokens, g.hidden_size), dtype=self._dtype, device=step.token_ids.device)
        self._embedding.into(step.token_ids, residual)
        residual.mul_(self._embedding_scale)
        normed = torch.empty_like(residual)
        qkv = residual.new_empty((tokens, query_size + 2 * kv_size))
        query, key, value = split_heads(qkv, g)
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
        if step.state_index is not None:
            step.states = residual[step.state_index]
            self._final_norm.into(step.states, step.states)
        last = residual[step.sample_index]
        self._final_norm.into(last, last)
        self.sampled_states = last
        logits = torch.empty((len(last), g.vocab_size), dtype=torch.float32, device=last.device)
        self._lm_head.into(last, logits)
        cap = g.logit_softcap
        if cap and self._fixed:
            soft_cap(logits, cap)
        elif cap:
            logits.div_(cap).tanh_().mul_(cap)
        return logits


def _tensor_names(geometry: ModelGeometry, prefix: str) -> list[str]:
    """Return every tensor the configuration implies but lm_head, which is tied where it is absent."""
    projections = [*_QKV, "self_attn.o_proj"]
    per_layer = [f"{module}.weight" for module in (*_NORMS, *projections, *_GATE_UP, "mlp.down_proj")]
    per_layer += [f"{module}.bias" for module in projections] if geometry.qkv_bias else []
    per_layer += ["self_attn.q_norm.weight", "self_attn.k_norm.weight"] if geometry.qk_norm else []
    names = [f"{prefix}layers.{index}.{name}" for index in range(geometry.num_layers) for name in per_layer]
    return [f"{prefix}embed_tokens.weight", f"{prefix}norm.weight", *names]


def _read_layer(
    files: ModelFiles, geometry: ModelGeometry, prefix: str, sliding_window: int, cos: Tensor, sin: Tensor
) -> _Layer:
    g, query_size, kv_size = geometry, geometry.num_heads * geometry.head_dim, geometry.num_kv_heads * geometry.head_dim

    def norm(module: str, width: int) -> WideNorm:
        return files.wide_norm(prefix + module, width, g.norm_eps, shift=1.0)

    def linear(modules: list[str], rows: list[int], width: int, bias: bool) -> Linear:
        return files.linear([prefix + module for module in modules], rows, width, bias=bias)

    attention_norm, attended_norm, mlp_norm, mlp_out_norm = (norm(name, g.hidden_size) for name in _NORMS)
    return _Layer(
        attention_norm=attention_norm,
        qkv=linear(_QKV, [query_size, kv_size, kv_size], g.hidden_size, g.qkv_bias),
        q_norm=norm("self_attn.q_norm", g.head_dim) if g.qk_norm else None,
        k_norm=norm("self_attn.k_norm", g.head_dim) if g.qk_norm else None,
        attention_out=linear(["self_attn.o_proj"], [g.hidden_size], query_size, g.output_bias),
        attended_norm=attended_norm,
        mlp_norm=mlp_norm,
        gate_up=linear(_GATE_UP, [g.intermediate_size] * 2, g.hidden_size, False),
        down=linear(["mlp.down_proj"], [g.hidden_size], g.intermediate_size, False),
        mlp_out_norm=mlp_out_norm,
        sliding_window=sliding_window,
        cos=cos,
        sin=sin,
    )
