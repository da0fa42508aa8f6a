"""OPT decoders as one function per step: learned positions, LayerNorm before or after, ReLU.

Called by the model runner; the counterpart of `lean_llama` for the other shape that matters. Covers the variants of the
family: 350m normalises after attention and MLP and embeds in a narrower space (project_in, project_out).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from cohort.common.engine.config.model_config import ModelGeometry
from cohort.common.engine.models.model_files import Loading, ModelFiles, split_heads
from cohort.common.engine.models.step_inputs import StepInputs
from cohort.common.engine.weights.linear import Linear
from cohort.common.errors import ModelError
from cohort.kernels.ops.paged_attention import paged_attention, write_kv

_POSITION_OFFSET = 2  # OPT's position table starts with two unused rows

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"relu": F.relu_, "gelu": F.gelu, "silu": F.silu}


@dataclass(slots=True)
class _Norm:
    weight: Tensor | None
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, (x.shape[-1],), self.weight, self.bias, 1e-5)


@dataclass(slots=True)
class _Layer:
    attention_norm: _Norm
    qkv: Linear
    attention_out: Linear
    mlp_norm: _Norm
    fc1: Linear
    fc2: Linear


class LeanOpt:
    """The weights of one model and its forward."""

    def __init__(self, load: Loading) -> None:
        geometry = load.geometry
        if geometry.activation not in _ACTIVATIONS:
            raise ModelError(
                f"{load.folder}: OPT with activation {geometry.activation!r}; known: {sorted(_ACTIVATIONS)}"
            )
        self._geometry = geometry
        self._activation = _ACTIVATIONS[geometry.activation]
        self._scale = geometry.head_dim**-0.5
        with load.open() as files:
            prefix = files.weights.prefix(("model.decoder.", "decoder.", ""), "embed_tokens.weight")
            hidden, vocab, narrow = geometry.hidden_size, geometry.vocab_size, geometry.word_embedding_size
            projected = narrow != hidden
            files.weights.require(_tensor_names(geometry, prefix))

            def read(name: str, *shape: int) -> Tensor:
                return files.weights.read(f"{name}.weight", shape, load.dtype, load.device)

            self._tokens = read(f"{prefix}embed_tokens", vocab, narrow)
            self._positions = read(f"{prefix}embed_positions", geometry.max_positions + _POSITION_OFFSET, hidden)
            self._project_in = Linear(read(f"{prefix}project_in", hidden, narrow)) if projected else None
            self._project_out = Linear(read(f"{prefix}project_out", narrow, hidden)) if projected else None
            layers = range(geometry.num_layers)
            self._layers = [_read_layer(files, geometry, f"{prefix}layers.{index}.") for index in layers]
            self._final_norm = _read_norm(files, geometry, f"{prefix}final_layer_norm") if geometry.final_norm else None
            tied = geometry.tie_embeddings or "lm_head.weight" not in files.weights
            self._lm_head = Linear(self._tokens if tied else read("lm_head", vocab, narrow))

    sampled_states: Tensor | None = None

    def forward(self, step: StepInputs, kv: Tensor) -> Tensor:
        """See `step_inputs.Model`."""
        tokens, hidden = len(step.token_ids), self._geometry.hidden_size
        before = self._geometry.norm_before
        x = F.embedding(step.token_ids, self._tokens)
        if self._project_in is not None:
            x = self._project_in(x)
        x = x + F.embedding(step.positions + _POSITION_OFFSET, self._positions)
        attended = x.new_empty((tokens, hidden))
        for index, layer in enumerate(self._layers):
            qkv = layer.qkv(layer.attention_norm(x) if before else x)
            query, key, value = split_heads(qkv, self._geometry)
            # OPT scales the query itself, not the scores: the roundings differ
            query.mul_(self._scale)
            write_kv(key, value, kv, index, step.slot_mapping)
            paged_attention(query, kv, index, step.meta, 1.0, attended.view(query.shape))
            x = x + layer.attention_out(attended)
            if not before:
                x = layer.attention_norm(x)
            inner = self._activation(layer.fc1(layer.mlp_norm(x) if before else x))
            x = x + layer.fc2(inner)
            if not before:
                x = layer.mlp_norm(x)
        if step.state_index is not None:
            step.states = self._final(x[step.state_index])
        self.sampled_states = x = self._final(x[step.sample_index])
        return self._lm_head(x).float()

    def _final(self, x: Tensor) -> Tensor:
        """Return final states of what the last layer left."""
        if self._final_norm is not None:
            x = self._final_norm(x)
        return x if self._project_out is None else self._project_out(x)


def _tensor_names(geometry: ModelGeometry, prefix: str) -> list[str]:
    """Return every tensor the configuration implies but lm_head, which is tied where it is absent."""
    names = ["embed_tokens.weight", "embed_positions.weight"]
    if geometry.word_embedding_size != geometry.hidden_size:
        names += ["project_in.weight", "project_out.weight"]
    norms = ["self_attn_layer_norm", "final_layer_norm"]
    modules = [*(f"self_attn.{part}_proj" for part in ("q", "k", "v", "out")), "fc1", "fc2"]
    per_layer = [f"{module}.weight" for module in modules]
    per_layer += [f"{module}.bias" for module in modules] if geometry.qkv_bias else []
    if geometry.norm_affine:
        per_layer += [f"{norm}.{part}" for norm in norms for part in ("weight", "bias")]
        names += ["final_layer_norm.weight", "final_layer_norm.bias"] if geometry.final_norm else []
    names += [f"layers.{index}.{name}" for index in range(geometry.num_layers) for name in per_layer]
    return [prefix + name for name in names]


def _read_norm(files: ModelFiles, geometry: ModelGeometry, name: str) -> _Norm:
    if not geometry.norm_affine:
        return _Norm(None, None)
    return _Norm(files.vector(name, geometry.hidden_size), files.bias([name], [geometry.hidden_size]))


def _read_layer(files: ModelFiles, geometry: ModelGeometry, prefix: str) -> _Layer:
    hidden, inner = geometry.hidden_size, geometry.intermediate_size

    def linear(modules: list[str], outputs: int, inputs: int) -> Linear:
        names, rows = [prefix + module for module in modules], [outputs] * len(modules)
        return files.linear(names, rows, inputs, bias=geometry.qkv_bias)

    return _Layer(
        attention_norm=_read_norm(files, geometry, f"{prefix}self_attn_layer_norm"),
        qkv=linear([f"self_attn.{part}_proj" for part in "qkv"], hidden, hidden),
        attention_out=linear(["self_attn.out_proj"], hidden, hidden),
        mlp_norm=_read_norm(files, geometry, f"{prefix}final_layer_norm"),
        fc1=linear(["fc1"], inner, hidden),
        fc2=linear(["fc2"], hidden, inner),
    )
