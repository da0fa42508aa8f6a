"""gpt-oss as one function per step: a mixture of experts whose attention has sinks.

Called by the model runner. Every head of every layer has a learned score, its sink, that takes part of the weight and
gives no value; every second layer has a sliding window; all projections have biases; experts are gated by a clamped
SwiGLU. Published checkpoints hold the experts in MXFP4: on a GPU they stay so, on a processor they are dequantised as
they are read, so in memory a weight has 16 bits (32 in float32). The mathematics and the order of roundings are
transformers'. Knows nothing of requests: it sees tokens, positions and slots.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from cohort.common.engine.config.model_config import ModelGeometry
from cohort.common.engine.config.quantization_config import keeps_codes, mxfp4_codes
from cohort.common.engine.models.experts import DenseMlp, DeviceExperts, ExpertBuffers, Experts, Router, groups_on_host
from cohort.common.engine.models.model_files import Loading, ModelFiles, WideNorm, split_heads
from cohort.common.engine.models.rope import rope_tables
from cohort.common.engine.models.step_inputs import StepInputs
from cohort.common.engine.weights.linear import Linear
from cohort.common.engine.weights.weights import Weights
from cohort.common.errors import ModelError
from cohort.kernels import reference
from cohort.kernels.code_dtypes import E2M1, E8M0, MX_GROUP
from cohort.kernels.ops.fused import clamped_swiglu, rope_and_write_kv
from cohort.kernels.ops.paged_attention import paged_attention
from cohort.kernels.types import ClampedSwiglu, ExpertCodes

_QKV = [f"self_attn.{part}_proj" for part in "qkv"]
_OUT = "self_attn.o_proj"
_NORMS = ("input_layernorm", "post_attention_layernorm")
_EXPERTS = "mlp.experts."
_PARTS = ("gate_up_proj", "down_proj")
GROUP = MX_GROUP
"""Inputs that share a scale in MXFP4: OCP Microscaling Formats v1.0, elements E2M1, scales E8M0."""


@dataclass(frozen=True, slots=True)
class ClampedGatedLinear:
    """x ↦ (up(x) + 1) · gate(x) · sigmoid(alpha · gate(x)), both clamped."""

    both: Linear
    alpha: float
    limit: float

    @property
    def panel_data(self) -> Tensor | None:
        """No packed weight: the compiled layers of a Llama do not activate so."""
        return None

    def into(self, x: Tensor, out: Tensor) -> None:
        """Compute out [T, inner] of x [T, hidden]."""
        clamped_swiglu(self.both(x), self.alpha, self.limit, out)


@dataclass(slots=True)
class _Layer:
    attention_norm: WideNorm
    qkv: Linear
    sinks: Tensor
    attention_out: Linear
    mlp_norm: WideNorm
    experts: Experts | DeviceExperts
    sliding_window: int


class LeanGptOss:
    """The weights of one model and its forward."""

    def __init__(self, load: Loading) -> None:
        """Read the weights. Raises `ModelError` where the files do not hold what the configuration says."""
        self._ranks, self._geometry, self._dtype = load.ranks, load.own, load.dtype
        geometry = self._geometry
        self._scale = geometry.head_dim**-0.5
        self._cos, self._sin = rope_tables(geometry, load.device)
        with load.open() as files:
            prefix = files.weights.prefix(("model.", ""), "embed_tokens.weight")
            files.weights.require(_tensor_names(files.weights, geometry, prefix))
            self._embedding, self._lm_head = files.outer(prefix, geometry)
            reader = _Reader(files, geometry, load.max_step_tokens)
            read = [
                reader.layer(f"{prefix}layers.{index}.", window)
                for index, window in enumerate(geometry.sliding_windows)
            ]
            self._final_norm = reader.norm(prefix + "norm")
        self._layers = [layer() for layer in read]

    sampled_states: Tensor | None = None

    def forward(self, step: StepInputs, kv: Tensor) -> Tensor:
        """See `step_inputs.Model`."""
        g, tokens = self._geometry, len(step.token_ids)
        query_size, kv_size = g.num_heads * g.head_dim, g.num_kv_heads * g.head_dim
        residual = torch.empty((tokens, g.hidden_size), dtype=self._dtype, device=step.token_ids.device)
        if (ranks := self._ranks) is None:
            self._embedding.into(step.token_ids, residual)
        else:
            ranks.embed(self._embedding, step.token_ids, residual)
        normed = torch.empty_like(residual)
        qkv = residual.new_empty((tokens, query_size + 2 * kv_size))
        query, key, value = split_heads(qkv, g)
        attended = residual.new_empty((tokens, query_size))
        for index, layer in enumerate(self._layers):
            layer.attention_norm.into(residual, normed)
            layer.qkv.into(normed, qkv)
            place, slots, meta = step.of_layer(index)
            rope_and_write_kv(query, key, value, self._cos, self._sin, step.positions, kv, place, slots)
            paged_attention(
                query,
                kv,
                place,
                meta,
                self._scale,
                attended.view(tokens, -1, g.head_dim),
                sliding_window=layer.sliding_window,
                sinks=layer.sinks,
            )
            if ranks is None:
                layer.attention_out.add_into(attended, residual)
            else:
                ranks.allreduce_linear(layer.attention_out, attended, residual)
            layer.mlp_norm.into(residual, normed)
            if ranks is None:
                layer.experts.add_into(normed, normed, residual)
            else:
                ranks.allreduce_partial(partial(layer.experts.add_into, normed, normed), residual)
        if step.state_index is not None:
            step.states = residual[step.state_index]
            self._final_norm.into(step.states, step.states)
        last = residual[step.sample_index]
        self._final_norm.into(last, last)
        self.sampled_states = last
        logits = torch.empty((len(last), g.vocab_size), dtype=torch.float32, device=last.device)
        self._lm_head.into(last, logits)
        return logits if ranks is None else ranks.gather_logits(logits)


def _tensor_names(files: Weights, geometry: ModelGeometry, prefix: str) -> list[str]:
    """Return every tensor the configuration implies but lm_head, which is tied where it is absent."""
    modules = [*_QKV, _OUT] if geometry.qkv_bias else []
    per_layer = [f"{module}.weight" for module in (*_NORMS, *_QKV, _OUT, "mlp.router")]
    per_layer += [f"{module}.bias" for module in (*modules, "mlp.router")]
    per_layer += ["self_attn.sinks", *(f"{_EXPERTS}{part}_bias" for part in _PARTS)]
    names = [f"{prefix}embed_tokens.weight", f"{prefix}norm.weight"]
    for index in range(geometry.num_layers):
        layer = f"{prefix}layers.{index}."
        names += [layer + name for name in per_layer]
        for part in _PARTS:
            whole = f"{layer}{_EXPERTS}{part}"
            names += [whole] if whole in files else [f"{whole}_blocks", f"{whole}_scales"]
    return names


class _Reader:
    """A reader of layers, with what all of them share."""

    def __init__(self, files: ModelFiles, geometry: ModelGeometry, max_step_tokens: int) -> None:
        if geometry.experts is None:
            raise ModelError(f"{geometry.model_type}: its configuration names no experts")
        self._files, self._geometry, self._mixture = files, geometry, geometry.experts
        self._buffers: ExpertBuffers | None = None
        if groups_on_host(files.device):
            rows = max_step_tokens * self._mixture.per_token
            self._buffers = ExpertBuffers(rows, geometry.hidden_size, self._mixture.inner_size, files.dtype)

    def layer(self, prefix: str, sliding_window: int) -> Callable[[], _Layer]:
        """Return what makes the layer once the files are read: on a GPU their bytes are not there before."""
        g, files = self._geometry, self._files
        query_size, kv_size = g.num_heads * g.head_dim, g.num_kv_heads * g.head_dim
        qkv = [prefix + name for name in _QKV]
        attention_norm, mlp_norm = (self.norm(prefix + name) for name in _NORMS)
        qkv_linear = self._linear(qkv, [query_size, kv_size, kv_size], g.hidden_size, g.qkv_bias)
        sinks = files.weights.read(f"{prefix}self_attn.sinks", (g.num_heads,), torch.float32, files.device)
        attention_out = self._linear([prefix + _OUT], [g.hidden_size], query_size, g.qkv_bias)
        experts = self._experts(prefix)
        return lambda: _Layer(
            attention_norm, qkv_linear, sinks, attention_out, mlp_norm, experts(), sliding_window=sliding_window
        )

    def norm(self, module: str) -> WideNorm:
        return self._files.wide_norm(module, self._geometry.hidden_size, self._geometry.norm_eps)

    def _linear(self, modules: list[str], rows: list[int], width: int, bias: bool) -> Linear:
        files, weights = self._files, [f"{name}.weight" for name in modules]
        weight = files.weights.read_rows(weights, rows, (width,), files.dtype, files.device)
        return Linear(weight, files.bias(modules, rows) if bias else None, arena=files.arena)

    def _experts(self, prefix: str) -> Callable[[], Experts | DeviceExperts]:
        g, mixture = self._geometry, self._mixture
        inner, count = mixture.inner_size, mixture.count
        into, out = (
            _ExpertWeights(self._files, f"{prefix}{_EXPERTS}{part}", (count, *shape))
            for part, shape in zip(_PARTS, ((2 * inner, g.hidden_size), (g.hidden_size, inner)), strict=True)
        )
        scores = self._linear([f"{prefix}mlp.router"], [count], g.hidden_size, True)
        router = Router(scores, mixture.per_token, over_chosen=True, rounded=True)
        if self._buffers is not None:
            packed = Experts(router, self._packed(into, out), None, self._buffers)
            return lambda: packed
        clamped = ClampedSwiglu(mixture.swiglu_alpha, mixture.swiglu_limit)
        return lambda: DeviceExperts(
            router, into.together(), out.together(), biases=(into.bias, out.bias), clamped=clamped
        )

    def _packed(self, into: _ExpertWeights, out: _ExpertWeights) -> list[DenseMlp]:
        mixture, experts, arena = self._mixture, [], self._files.arena
        for expert in range(mixture.count):
            # In the files a gate and its up stand side by side; these products have all gates before all ups.
            both = Linear(_gates_first(into.of(expert)), _gates_first(into.bias[expert]), arena=arena)
            gated = ClampedGatedLinear(both, mixture.swiglu_alpha, mixture.swiglu_limit)
            experts.append(DenseMlp(gated, Linear(out.of(expert), out.bias[expert], arena=arena)))
        return experts


class _ExpertWeights:
    """One projection of all experts of a layer, as the files have it: numbers [experts, inputs, outputs], or
    MXFP4 blocks and scales [experts, outputs, inputs / 32]. On a GPU its bytes are there when all of the files are."""

    def __init__(self, files: ModelFiles, name: str, shape: tuple[int, int, int]) -> None:
        """`shape`: experts, outputs, inputs."""
        self._shape, self._dtype, self._device = shape, files.dtype, files.device
        count, outputs, inputs = shape

        def read(name: str, *shape: int, dtype: torch.dtype = files.dtype) -> Tensor:
            return files.weights.read(name, shape, dtype, files.device)

        self.bias = read(f"{name}_bias", count, outputs)
        self._whole = self._blocks = self._scales = None
        if name in files.weights:
            self._whole = read(name, count, inputs, outputs)
        else:
            groups = inputs // GROUP
            self._blocks = read(f"{name}_blocks", count, outputs, groups, GROUP // 2, dtype=torch.uint8)
            self._scales = read(f"{name}_scales", count, outputs, groups, dtype=torch.uint8)

    def of(self, expert: int) -> Tensor:
        """Return the weight [outputs, inputs] of one expert."""
        if self._blocks is not None and self._scales is not None:
            return dequantized(self._blocks[expert], self._scales[expert], self._dtype)
        assert self._whole is not None
        return self._whole[expert].t()

    def together(self) -> Tensor | ExpertCodes:
        """Return the weights of all experts as a GPU multiplies them: MXFP4 where it is kept, else numbers [experts,
        outputs, inputs]. Called once: what was read is given up."""
        blocks, scales, number = self._blocks, self._scales, str(self._dtype).removeprefix("torch.")
        if blocks is not None and scales is not None and keeps_codes("cuda", number, mxfp4_codes(self._shape[2])):
            return ExpertCodes(blocks.flatten(2).view(E2M1), scales.view(E8M0), None, GROUP)
        numbers = torch.empty(self._shape, dtype=self._dtype, device=self._device)
        for expert in range(len(numbers)):
            numbers[expert] = self.of(expert)
        self._whole = self._blocks = self._scales = None
        return numbers


def _gates_first(both: Tensor) -> Tensor:
    """Return [2 · inner, …] of gates and ups in turn as all gates, then all ups."""
    return torch.cat([both[::2], both[1::2]])


def dequantized(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return [outputs, inputs] of blocks uint8 [outputs, inputs / 32, 16], two codes a byte, and scales uint8 [outputs,
    inputs / 32]: exact in bfloat16 and float32 but for numbers below 2^-126."""
    codes = blocks.flatten(1).view(E2M1)
    return reference.coded_numbers(codes, scales.view(E8M0), None, GROUP).to(dtype)
