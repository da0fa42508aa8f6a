"""DeepSeek-V2 and V3 as one function per step: attention over latents, dense layers, then mixtures of experts.

Called by the model runner. The cache has one vector of a token and layer, for all heads and for keys and values alike
(multi-head latent attention, DeepSeek-V2 §2.1). It is attended to as it lies: the matrix that would make a head's keys
of latents is multiplied into the query before, the one that would make values into what comes out (the absorbed form,
§2.1.2 and appendix C), so no key or value of a head is ever made. Rotated pairs that stand side by side in the files
are moved half a head apart at load, in queries and keys alike, which leaves every product as it was. Order of roundings
is transformers' but for that form. On a processor the heads' small products run one by one, with bits that no batch
changes; on a GPU they are one batched product. Of several ranks each has its heads, and the whole cache. Knows nothing
of requests: it sees tokens, positions and slots.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from cohort.common.engine.config.model_config import ExpertsGeometry, LatentGeometry, ModelGeometry, RoutingGroups
from cohort.common.engine.models.experts import (
    DenseMlp,
    DeviceExperts,
    ExpertBuffers,
    Experts,
    GroupedRouter,
    MixtureReader,
    expert_tensors,
    groups_on_host,
    read_mlp,
)
from cohort.common.engine.models.model_files import Loading, ModelFiles
from cohort.common.engine.models.rope import rope_tables
from cohort.common.engine.models.step_inputs import StepInputs
from cohort.common.engine.ranks.ranks import RankComm
from cohort.common.engine.weights.linear import Linear
from cohort.common.engine.weights.weights import Weights
from cohort.common.errors import ModelError
from cohort.kernels.cpu.panels import Arena
from cohort.kernels.ops.fused import rms_norm, rope_inplace
from cohort.kernels.ops.paged_attention import latent_attention, write_kv

_LATENT_EPS = 1e-6  # of the norms inside attention, whatever the configuration says of the others


@dataclass(slots=True)
class _Query:
    """A product from a layer's input to all heads' queries, perhaps by way of fewer numbers."""

    first: Linear | None
    norm: Tensor | None
    heads: Linear

    def __call__(self, x: Tensor) -> Tensor:
        """Return [T, heads · (plain + rotated)] for x [T, hidden]."""
        if self.first is not None and self.norm is not None:
            x = self.first(x)
            rms_norm(x, self.norm, _LATENT_EPS, x)
        return self.heads(x)


class HeadProducts:
    """x ↦ of each head its own product: x [T, heads, in] into [T, heads, out], both strided views."""

    __slots__ = ("_each", "_together")

    def __init__(self, weights: Tensor, arena: Arena) -> None:
        """`weights`: [heads, out, in]."""
        self._each: list[Linear] = []
        self._together = weights.transpose(1, 2)
        if groups_on_host(weights.device):
            self._each = [Linear(weight.contiguous(), arena=arena) for weight in weights]
            self._together = weights.new_empty(0)

    def into(self, x: Tensor, out: Tensor) -> None:
        if self._each:
            for head, linear in enumerate(self._each):
                linear.into(x[:, head], out[:, head])
        else:
            torch.bmm(x.transpose(0, 1), self._together, out=out.transpose(0, 1))


@dataclass(slots=True)
class LatentLayer:
    attention_norm: Tensor
    query: _Query
    latent: Linear
    latent_norm: Tensor
    into_latent: HeadProducts  # plain queries to what meets latents
    out_of_latent: HeadProducts  # averaged latents to values
    attention_out: Linear
    mlp_norm: Tensor
    mlp: DenseMlp | Experts | DeviceExperts


class LeanDeepseek:
    """The weights of one model and its forward."""

    def __init__(self, load: Loading) -> None:
        """Read the weights. Raises `ModelError` where the files do not hold what the configuration says."""
        self._ranks, self._geometry, self._dtype, self._device = load.ranks, load.own, load.dtype, load.device
        geometry = self._geometry
        if geometry.latent is None:
            raise ModelError(f"{geometry.model_type}: its configuration names no latents")
        self._layer_of = LayerArithmetic(geometry, geometry.latent, load.device, load.ranks)
        with load.open() as files:
            prefix = files.weights.prefix(("model.", ""), "embed_tokens.weight")
            files.weights.require(_tensor_names(files.weights, geometry, prefix))
            self._embedding, self._lm_head = files.outer(prefix, geometry)
            reader = LayerReader(files, geometry, geometry.latent, load.max_step_tokens)
            self._layers = [reader.layer(f"{prefix}layers.{i}.", i) for i in range(geometry.num_layers)]
            self._final_norm = files.vector(prefix + "norm", geometry.hidden_size)

    sampled_states: Tensor | None = None

    def forward(self, step: StepInputs, kv: Tensor) -> Tensor:
        """See `step_inputs.Model`; `kv` is [blocks, layers, 1, 1, block size, latent]."""
        g, tokens = self._geometry, len(step.token_ids)
        residual = torch.empty((tokens, g.hidden_size), dtype=self._dtype, device=self._device)
        if self._ranks is None:
            self._embedding.into(step.token_ids, residual)
        else:
            self._ranks.embed(self._embedding, step.token_ids, residual)
        buffers = self._layer_of.buffers(residual)
        for index, layer in enumerate(self._layers):
            self._layer_of(layer, index, residual, buffers, step, kv)
        if step.state_index is not None:
            step.states = residual[step.state_index]
            rms_norm(step.states, self._final_norm, g.norm_eps, step.states)
        last = residual[step.sample_index]
        rms_norm(last, self._final_norm, g.norm_eps, last)
        self.sampled_states = last
        logits = torch.empty((len(last), g.vocab_size), dtype=torch.float32, device=self._device)
        self._lm_head.into(last, logits)
        return logits if self._ranks is None else self._ranks.gather_logits(logits)


@dataclass(slots=True)
class LayerBuffers:
    """Scratch of a step, for all its layers."""

    normed: Tensor
    activated: Tensor
    query: Tensor
    found: Tensor
    attended: Tensor


class LayerArithmetic:
    """The forward of a layer; of `ranks` one's, with its heads and its columns of MLPs and experts, over whole
    latents."""

    def __init__(
        self, geometry: ModelGeometry, latent: LatentGeometry, device: torch.device, ranks: RankComm | None = None
    ) -> None:
        """`geometry`: of what is here."""
        self._geometry, self._latent, self._ranks = geometry, latent, ranks
        self._cos, self._sin = rope_tables(geometry, device)

    def buffers(self, residual: Tensor) -> LayerBuffers:
        g, sizes, tokens = self._geometry, self._latent, len(residual)
        query = residual.new_empty((tokens, g.num_heads, sizes.width))
        return LayerBuffers(
            normed=torch.empty_like(residual),
            activated=residual.new_empty((tokens, g.intermediate_size)),
            query=query,
            found=torch.empty_like(query),
            attended=residual.new_empty((tokens, g.num_heads * sizes.value)),
        )

    def __call__(
        self, layer: LatentLayer, index: int, residual: Tensor, buffers: LayerBuffers, step: StepInputs, kv: Tensor
    ) -> None:
        """Move the residual [T, hidden] on by the layer whose latents are `kv`'s layer `index`."""
        g, sizes, found = self._geometry, self._latent, buffers.found
        rms_norm(residual, layer.attention_norm, g.norm_eps, buffers.normed)
        self._project(layer, index, buffers.normed, buffers.query, step, kv)
        latent_attention(buffers.query, kv, index, step.meta, g.attention_scale, found, sizes.rank)
        values = buffers.attended.view(len(residual), g.num_heads, sizes.value)
        layer.out_of_latent.into(found[:, :, : sizes.rank], values)
        if (ranks := self._ranks) is None:
            layer.attention_out.add_into(buffers.attended, residual)
        else:
            ranks.allreduce_linear(layer.attention_out, buffers.attended, residual)
        rms_norm(residual, layer.mlp_norm, g.norm_eps, buffers.normed)
        if ranks is None:
            layer.mlp.add_into(buffers.normed, buffers.activated, residual)
        elif isinstance(layer.mlp, DenseMlp):
            layer.mlp.gate_up.into(buffers.normed, buffers.activated)
            ranks.allreduce_linear(layer.mlp.down, buffers.activated, residual)
        else:
            ranks.allreduce_partial(partial(layer.mlp.add_into, buffers.normed, buffers.activated), residual)

    def _project(self, layer: LatentLayer, index: int, x: Tensor, query: Tensor, step: StepInputs, kv: Tensor) -> None:
        """Write the queries of x [T, hidden] as they meet latents to `query`, and its latents to their slots."""
        sizes, tokens = self._latent, len(x)
        own = layer.query(x).view(tokens, self._geometry.num_heads, sizes.plain + sizes.rotated)
        layer.into_latent.into(own[:, :, : sizes.plain], query[:, :, : sizes.rank])
        query[:, :, sizes.rank :] = own[:, :, sizes.plain :]
        latent = layer.latent(x)
        rms_norm(latent[:, : sizes.rank], layer.latent_norm, _LATENT_EPS, latent[:, : sizes.rank])
        latent = latent.view(tokens, 1, sizes.width)
        rope_inplace(query[:, :, sizes.rank :], latent[:, :, sizes.rank :], self._cos, self._sin, step.positions)
        write_kv(latent, latent, kv, index, step.slot_mapping)


def _biased(geometry: ModelGeometry, latent: LatentGeometry) -> list[str]:
    """Return the modules with a bias, where attention has any."""
    if not geometry.qkv_bias:
        return []
    first = ["self_attn.q_a_proj"] if latent.query_rank else []
    return [*first, "self_attn.kv_a_proj_with_mqa", "self_attn.o_proj"]


def _tensor_names(files: Weights, geometry: ModelGeometry, prefix: str) -> list[str]:
    """Return every tensor the configuration implies but lm_head, which is tied where it is absent."""
    latent, mixture = geometry.latent, geometry.experts
    assert latent is not None
    queries = ["q_a_proj", "q_b_proj", "q_a_layernorm"] if latent.query_rank else ["q_proj"]
    attention = [*queries, "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj"]
    modules = ["input_layernorm", "post_attention_layernorm", *(f"self_attn.{module}" for module in attention)]
    per_layer = [f"{module}.weight" for module in modules]
    per_layer += [f"{module}.bias" for module in _biased(geometry, latent)]
    names = [f"{prefix}embed_tokens.weight", f"{prefix}norm.weight"]
    for index in range(geometry.num_layers):
        layer = f"{prefix}layers.{index}."
        mlp = [f"mlp.{part}_proj.weight" for part in ("gate", "up", "down")]
        if mixture is not None and mixture.layers[index]:
            shared = [name.replace("mlp.", "mlp.shared_experts.") for name in mlp] if mixture.shared_inner_size else []
            mlp = [*expert_tensors(files, layer, geometry, mixture), *shared]
            if mixture.routing is not None and mixture.routing.scoring == "sigmoid":
                mlp.append("mlp.gate.e_score_correction_bias")
        names += [layer + name for name in (*per_layer, *mlp)]
    return names


@dataclass(slots=True)
class LayerReader:
    files: ModelFiles
    geometry: ModelGeometry
    latent: LatentGeometry
    max_step_tokens: int
    buffers: ExpertBuffers | None = None

    def layer(self, prefix: str, index: int) -> LatentLayer:
        g, sizes = self.geometry, self.latent
        into_latent, out_of_latent = self._heads(prefix)
        return LatentLayer(
            attention_norm=self.files.vector(f"{prefix}input_layernorm", g.hidden_size),
            query=self._query(prefix),
            latent=self._linear(
                f"{prefix}self_attn.kv_a_proj_with_mqa", sizes.width, g.hidden_size, _Rotated(1, sizes.rank)
            ),
            latent_norm=self.files.vector(f"{prefix}self_attn.kv_a_layernorm", sizes.rank),
            into_latent=into_latent,
            out_of_latent=out_of_latent,
            attention_out=self._linear(f"{prefix}self_attn.o_proj", g.hidden_size, g.num_heads * sizes.value),
            mlp_norm=self.files.vector(f"{prefix}post_attention_layernorm", g.hidden_size),
            mlp=self._mlp(prefix, index),
        )

    def _query(self, prefix: str) -> _Query:
        g, sizes = self.geometry, self.latent
        rows, rotated = g.num_heads * (sizes.plain + sizes.rotated), _Rotated(g.num_heads, sizes.plain)
        if not sizes.query_rank:
            return _Query(None, None, self._linear(f"{prefix}self_attn.q_proj", rows, g.hidden_size, rotated))
        return _Query(
            self._linear(f"{prefix}self_attn.q_a_proj", sizes.query_rank, g.hidden_size),
            self.files.vector(f"{prefix}self_attn.q_a_layernorm", sizes.query_rank),
            self._linear(f"{prefix}self_attn.q_b_proj", rows, sizes.query_rank, rotated),
        )

    def _heads(self, prefix: str) -> tuple[HeadProducts, HeadProducts]:
        """Read for each head the transposed matrix that would make its keys, and the one that makes its values."""
        g, sizes, arena = self.geometry, self.latent, self.files.arena
        each = sizes.plain + sizes.value
        weight = self._weight(f"{prefix}self_attn.kv_b_proj", g.num_heads * each, sizes.rank)
        heads = weight.view(g.num_heads, each, sizes.rank)
        into_latent = HeadProducts(heads[:, : sizes.plain].transpose(1, 2), arena)
        return into_latent, HeadProducts(heads[:, sizes.plain :], arena)

    def _weight(self, module: str, outputs: int, inputs: int) -> Tensor:
        files = self.files
        return files.weights.read(f"{module}.weight", (outputs, inputs), files.dtype, files.device)

    def _linear(self, module: str, outputs: int, inputs: int, rotated: _Rotated | None = None) -> Linear:
        weight = self._weight(module, outputs, inputs)
        biased = any(module.endswith(name) for name in _biased(self.geometry, self.latent))
        bias = self.files.bias([module], [outputs]) if biased else None
        if rotated is not None and self.latent.interleaved:
            weight = rotated.apart(weight, self.latent.rotated)
            bias = None if bias is None else rotated.apart(bias, self.latent.rotated)
        return Linear(weight, bias, arena=self.files.arena)

    def _mlp(self, prefix: str, index: int) -> DenseMlp | Experts | DeviceExperts:
        g, mixture, files = self.geometry, self.geometry.experts, self.files
        if mixture is None or mixture.routing is None or not mixture.layers[index]:
            return read_mlp(files, f"{prefix}mlp", g.hidden_size, g.intermediate_size)
        shared = None
        if inner := mixture.shared_inner_size:
            shared = read_mlp(files, f"{prefix}mlp.shared_experts", g.hidden_size, inner)
        reader = MixtureReader(files, prefix, g, mixture)
        router = self._router(prefix, mixture, mixture.routing, reader.router_weight())
        if not groups_on_host(files.device):
            gate_up, down = reader.products()
            return DeviceExperts(router, gate_up, down, shared)
        if self.buffers is None:
            rows = self.max_step_tokens * mixture.per_token
            self.buffers = ExpertBuffers(rows, g.hidden_size, mixture.inner_size, files.dtype)
        return Experts(router, reader.mlps(), shared, self.buffers)

    def _router(self, prefix: str, mixture: ExpertsGeometry, routing: RoutingGroups, weight: Tensor) -> GroupedRouter:
        files, correction = self.files, None
        if routing.scoring == "sigmoid":
            name = f"{prefix}mlp.gate.e_score_correction_bias"
            correction = files.weights.read(name, (mixture.count,), torch.float32, files.device)
        return GroupedRouter(
            Linear(weight.float(), arena=files.arena),
            correction,
            mixture.per_token,
            routing.groups,
            routing.chosen,
            mixture.normalised,
            routing.scale,
        )


@dataclass(frozen=True, slots=True)
class _Rotated:
    """The place of the rotated rows of a projection: in each of `heads` equal parts after the first `before`."""

    heads: int
    before: int

    def apart(self, rows: Tensor, width: int) -> Tensor:
        """Return the rows, of each rotated pair the first ones first: as `rope_inplace` takes them."""
        parts = rows.view(self.heads, -1, *rows.shape[1:]).clone()
        pairs = parts[:, self.before :]
        if pairs.shape[1] != width:
            raise ModelError(f"{pairs.shape[1]} rotated rows, {width} expected")
        parts[:, self.before :] = torch.cat((pairs[:, ::2], pairs[:, 1::2]), dim=1)
        return parts.view(rows.shape)
