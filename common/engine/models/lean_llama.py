"""Llama-shaped decoders as one function per step: Llama, Mistral, Phi-3, Phi-4, Qwen2, Qwen2.5, Qwen3, SmolLM2; Mixtral
and Qwen's mixtures.

Called by the model runner. The mathematics and the order of roundings are transformers'; only the cost differs: one
product for q, k and v, one for gate and up that also activates, no module dispatch, no allocation, normalisation and
rotation in place, and the vocabulary only for sampled rows. Knows nothing of requests: it sees tokens, positions and
slots.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from cohort.common.engine.config.model_config import ModelGeometry
from cohort.common.engine.models.experts import (
    DenseMlp,
    DeviceExperts,
    ExpertBuffers,
    Experts,
    MixtureReader,
    expert_tensors,
    groups_on_host,
)
from cohort.common.engine.models.model_files import Loading, ModelFiles, split_heads
from cohort.common.engine.models.rope import rope_tables
from cohort.common.engine.models.step_inputs import StepInputs
from cohort.common.engine.weights.linear import Embedding, Linear
from cohort.common.engine.weights.weights import Weights
from cohort.common.errors import InvariantViolated
from cohort.kernels.cpu.llama import LayerStack, LayerWeights, StepBuffers
from cohort.kernels.ops.fused import rms_norm, rope_and_write_kv
from cohort.kernels.ops.paged_attention import paged_attention


@dataclass(slots=True)
class Layer:
    input_norm: Tensor
    qkv: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    attention_out: Linear
    mlp_norm: Tensor
    mlp: DenseMlp | Experts | DeviceExperts
    sliding_window: int


class LeanLlama:
    """The weights of one model and its forward."""

    def __init__(self, load: Loading) -> None:
        self._ranks, self._geometry = load.ranks, load.own
        g, hidden = self._geometry, self._geometry.hidden_size
        self._eps, self._scale = g.norm_eps, g.head_dim**-0.5
        self._cos, self._sin = rope_tables(g, load.device)
        with load.open() as files:
            prefix = files.weights.prefix(("model.", ""), "embed_tokens.weight")
            files.weights.require(_tensor_names(files.weights, g, prefix))
            self._embedding, self._lm_head = files.outer(prefix, g)
            scratch = None
            if (mixture := g.experts) is not None and groups_on_host(load.device):
                rows = load.max_step_tokens * mixture.per_token
                scratch = ExpertBuffers(rows, hidden, mixture.inner_size, load.dtype)
            self._layers = [
                read_layer(files, g, f"{prefix}layers.{index}.", index, scratch) for index in range(g.num_layers)
            ]
            self._final_norm = files.vector(prefix + "norm", hidden)
        self._stack = self._layer_stack()

        def buffer(rows: int, width: int, dtype: torch.dtype = load.dtype) -> Tensor:
            return torch.empty((rows, width), dtype=dtype, device=load.device)

        # One step at a time runs, so every layer of every step writes into the same buffers: no step allocates.
        self._residual, self._normed = (buffer(load.max_step_tokens, hidden) for _ in range(2))
        self._qkv = buffer(load.max_step_tokens, (g.num_heads + 2 * g.num_kv_heads) * g.head_dim)
        self._attended = buffer(load.max_step_tokens, g.num_heads * g.head_dim)
        self._activated = buffer(load.max_step_tokens, g.intermediate_size)
        self._logits = buffer(load.max_rows, g.vocab_size, torch.float32)
        self._buffers_frozen = False
        self._states: Tensor | None = None

    sampled_states: Tensor | None = None

    def forward(self, step: StepInputs, kv: Tensor) -> Tensor:
        """See `step_inputs.Model`. The logits are this model's own buffer: they hold until the next step."""
        tokens, sampled = len(step.token_ids), len(step.sample_index)
        self._fit(tokens, sampled)
        residual, normed, qkv = self._residual[:tokens], self._normed[:tokens], self._qkv[:tokens]
        attended, activated = self._attended[:tokens], self._activated[:tokens]
        if self._ranks is None:
            self._embedding.into(step.token_ids, residual)
        else:
            self._ranks.embed(self._embedding, step.token_ids, residual)
        buffers = StepBuffers(residual, normed, qkv, attended, activated)
        if self._stack is not None and step.lora is None and step.places is None:
            self._stack.run(buffers, step.positions, step.slot_mapping, step.meta, kv)
        else:
            self._layer_by_layer(buffers, step, kv)
        if self._states is not None:
            rms_norm(residual, self._final_norm, self._eps, normed)
            self._states.index_copy_(0, step.slot_mapping, normed)
        if step.state_index is not None:
            step.states = residual[step.state_index]
            rms_norm(step.states, self._final_norm, self._eps, step.states)
        # Only the sampled tokens go on.
        last, logits = normed[:sampled], self._logits[:sampled]
        torch.index_select(residual, 0, step.sample_index, out=last)
        rms_norm(last, self._final_norm, self._eps, last)
        self.sampled_states = last
        self._lm_head.into(last, logits)
        return logits if self._ranks is None else self._ranks.gather_logits(logits)

    @property
    def outer(self) -> tuple[Embedding, Linear]:
        """The embedding, and the product that makes logits of final states."""
        return self._embedding, self._lm_head

    def keep_states(self, slots: int) -> Tensor:
        """Return where every step from now on leaves its tokens' final states [slots, hidden], recorded ones too.
        Called before any is recorded."""
        norm = self._final_norm
        self._states = torch.zeros((slots, self._geometry.hidden_size), dtype=norm.dtype, device=norm.device)
        return self._states

    @contextmanager
    def one_by_one(self) -> Iterator[None]:
        """Run the layers as single calls, which clocks can be put around, within this context."""
        stack, self._stack = self._stack, None
        try:
            yield
        finally:
            self._stack = stack

    def freeze_buffers(self) -> None:
        """Make a step that needs larger buffers an error: recorded steps hold the addresses of these."""
        self._buffers_frozen = True

    def _layer_by_layer(self, buffers: StepBuffers, step: StepInputs, kv: Tensor) -> None:
        """Compute what `LayerStack` does in single calls: on a GPU, as one of several ranks, where a weight cannot be
        packed, where rows have adapters, and where layers are in groups."""
        lora = step.lora
        residual, normed, qkv = buffers.residual, buffers.normed, buffers.qkv
        eps, (query, key, value) = self._eps, split_heads(qkv, self._geometry)
        per_head = buffers.attended.view(query.shape)
        for index, layer in enumerate(self._layers):
            rms_norm(residual, layer.input_norm, eps, normed)
            layer.qkv.into(normed, qkv)
            if lora is not None:
                lora.add(index, "qkv", normed, qkv)
            if layer.q_norm is not None and layer.k_norm is not None:
                rms_norm(query, layer.q_norm, eps, query)
                rms_norm(key, layer.k_norm, eps, key)
            place, slots, meta = step.of_layer(index)
            rope_and_write_kv(query, key, value, self._cos, self._sin, step.positions, kv, place, slots)
            paged_attention(query, kv, place, meta, self._scale, per_head, sliding_window=layer.sliding_window)
            if self._ranks is None:
                layer.attention_out.add_into(buffers.attended, residual)
            else:
                self._ranks.allreduce_linear(layer.attention_out, buffers.attended, residual)
            if lora is not None:
                lora.add(index, "attention_out", buffers.attended, residual)
            rms_norm(residual, layer.mlp_norm, eps, normed)
            if lora is not None:
                lora.mlp(index, layer.mlp, normed, buffers.activated, residual)
            elif self._ranks is None:
                layer.mlp.add_into(normed, buffers.activated, residual)
            elif isinstance(layer.mlp, DenseMlp):
                layer.mlp.gate_up.into(normed, buffers.activated)
                self._ranks.allreduce_linear(layer.mlp.down, buffers.activated, residual)
            else:
                self._ranks.allreduce_partial(partial(layer.mlp.add_into, normed, buffers.activated), residual)

    def _layer_stack(self) -> LayerStack | None:
        """Return the layers as one call; None unless the kernels serve all of them and nothing is exchanged between."""
        if self._ranks is not None:
            return None
        weights = [_packed(layer) for layer in self._layers]
        packed = [layer for layer in weights if layer is not None]
        if len(packed) < len(weights):
            return None
        return LayerStack(packed, self._cos, self._sin, eps=self._eps, scale=self._scale)

    def _fit(self, tokens: int, sampled: int) -> None:
        """Make the buffers larger for a step larger than announced; only the profiler makes one.

        Raises `InvariantViolated` where recorded steps would go on writing into the ones that are freed.
        """
        too_large = tokens > len(self._residual) or sampled > len(self._logits)
        if too_large and self._buffers_frozen:
            raise InvariantViolated(
                f"a step of {tokens} tokens, {sampled} of them sampled, needs larger buffers than recorded steps hold: "
                f"{len(self._residual)} tokens, {len(self._logits)} sampled"
            )
        if tokens > len(self._residual):
            for name in ("_residual", "_normed", "_qkv", "_attended", "_activated"):
                old: Tensor = getattr(self, name)
                setattr(self, name, old.new_empty((tokens, old.shape[1])))
        if sampled > len(self._logits):
            self._logits = self._logits.new_empty((sampled, self._logits.shape[1]))


def _packed(layer: Layer) -> LayerWeights | None:
    """Return a layer as the compiled stack takes it; None if it cannot."""
    if not isinstance(layer.mlp, DenseMlp):
        return None
    qkv, out = layer.qkv.panel_data, layer.attention_out.panel_data
    gate_up, down = layer.mlp.gate_up.panel_data, layer.mlp.down.panel_data
    if qkv is None or out is None or gate_up is None or down is None:
        return None
    if layer.attention_out.bias is not None or layer.mlp.down.bias is not None:
        return None
    return LayerWeights(
        layer.input_norm,
        qkv,
        layer.qkv.bias,
        layer.q_norm,
        layer.k_norm,
        out,
        layer.mlp_norm,
        gate_up,
        down,
        layer.sliding_window,
    )


def _tensor_names(files: Weights, geometry: ModelGeometry, prefix: str) -> list[str]:
    """Return every tensor the configuration implies but lm_head, which is tied where it is absent."""
    names = [f"{prefix}embed_tokens.weight", f"{prefix}norm.weight"]
    per_layer = ["input_layernorm.weight", "post_attention_layernorm.weight"]
    qkv, gate_up = _input_modules(geometry)
    mlp = [*gate_up, "mlp.down_proj"]
    per_layer += [f"{module}.weight" for module in (*qkv, "self_attn.o_proj")]
    per_layer += [f"{module}.bias" for module in qkv] if geometry.qkv_bias else []
    per_layer += ["self_attn.o_proj.bias"] if geometry.output_bias else []
    dense = [f"{module}.weight" for module in mlp]
    dense += [f"{module}.bias" for module in mlp] if geometry.mlp_bias else []
    per_layer += ["self_attn.q_norm.weight", "self_attn.k_norm.weight"] if geometry.qk_norm else []
    mixture = geometry.experts
    for index in range(geometry.num_layers):
        layer = f"{prefix}layers.{index}."
        of_mlp = dense
        if mixture is not None and mixture.layers[index]:
            of_mlp = expert_tensors(files, layer, geometry, mixture)
        names += [layer + name for name in (*per_layer, *of_mlp)]
    return names


def _input_modules(geometry: ModelGeometry) -> tuple[list[str], list[str]]:
    """Return the files' names of the projections into attention and into the MLP: each fused, or by its parts."""
    if geometry.fused_weights:
        return ["self_attn.qkv_proj"], ["mlp.gate_up_proj"]
    return [f"self_attn.{part}_proj" for part in "qkv"], ["mlp.gate_proj", "mlp.up_proj"]


def read_layer(
    files: ModelFiles,
    geometry: ModelGeometry,
    prefix: str,
    index: int,
    scratch: ExpertBuffers | None = None,
    *,
    input_norm: bool = True,
) -> Layer:
    """Read a layer. `scratch`: of a mixture on a processor. `input_norm`: false = there is none, its place is empty."""
    g, hidden, inner = geometry, geometry.hidden_size, geometry.intermediate_size
    qkv, gate_up = ([prefix + module for module in modules] for modules in _input_modules(g))
    query_size, kv_size = g.num_heads * g.head_dim, g.num_kv_heads * g.head_dim
    qkv_rows, gate_up_rows = [query_size, kv_size, kv_size], [inner, inner]
    if g.fused_weights:
        qkv_rows, gate_up_rows = [sum(qkv_rows)], [sum(gate_up_rows)]

    def mlp() -> DenseMlp | Experts | DeviceExperts:
        if (mixture := g.experts) is not None and mixture.layers[index]:
            reader = MixtureReader(files, prefix, g, mixture)
            return reader.on_device() if scratch is None else reader.on_host(scratch)
        into = files.gated(gate_up, gate_up_rows, hidden, bias=g.mlp_bias)
        return DenseMlp(into, files.linear([f"{prefix}mlp.down_proj"], [hidden], inner, bias=g.mlp_bias))

    return Layer(
        input_norm=files.vector(f"{prefix}input_layernorm", hidden) if input_norm else torch.empty(0),
        qkv=files.linear(qkv, qkv_rows, hidden, bias=g.qkv_bias),
        q_norm=files.vector(f"{prefix}self_attn.q_norm", g.head_dim) if g.qk_norm else None,
        k_norm=files.vector(f"{prefix}self_attn.k_norm", g.head_dim) if g.qk_norm else None,
        attention_out=files.linear([f"{prefix}self_attn.o_proj"], [hidden], query_size, bias=g.output_bias),
        mlp_norm=files.vector(f"{prefix}post_attention_layernorm", hidden),
        mlp=mlp(),
        sliding_window=g.sliding_windows[index],
    )
