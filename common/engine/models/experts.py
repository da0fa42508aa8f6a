"""The MLP of a decoder layer: dense, or a mixture of experts (Mixtral, Qwen2-MoE, Qwen3-MoE).

Called by the lean Llama model once per layer and step. A mixture's rows are sorted by expert, every expert with rows
computes one product over all of them, and the outputs return to their tokens' places, where each token's are summed in
ascending order of its experts. No value depends on how many rows stand beside a token's: the products are the project's
panels, and every other step is elementwise or within one row. So a request computes the same bits in every batch, as
with a dense model. Where to route is transformers' rule (softmax over all experts, then the k largest).

Grouping needs the number of rows of each expert on the host, so `Experts` is for a processor; `device_experts` is its
counterpart on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from cohort.common.engine.config.model_config import ExpertsGeometry, ModelGeometry
from cohort.common.engine.config.quantization_config import CodeLayout, keeps_codes
from cohort.common.engine.weights.linear import GatedLinear, Linear
from cohort.common.engine.weights.matrices import CodedWeights, matrix
from cohort.common.engine.weights.quantized import QuantizedWeight
from cohort.common.engine.weights.weights import Weights
from cohort.kernels.cpu.panels import Arena
from cohort.kernels.ops.experts import add_weighted, choose_experts
from cohort.kernels.types import ExpertCodes


class ActivatedProduct(Protocol):
    """The first half of a gated MLP: both products and the activation."""

    @property
    def panel_data(self) -> Tensor | None: ...

    def into(self, x: Tensor, out: Tensor) -> None:
        """out [T, inner] for x [T, hidden]."""


@dataclass(frozen=True, slots=True)
class DenseMlp:
    """x ↦ down(silu(gate(x)) · up(x)), or with another activation."""

    gate_up: ActivatedProduct
    down: Linear

    def add_into(self, x: Tensor, activated: Tensor, residual: Tensor) -> None:
        """residual [T, hidden] += the MLP of x [T, hidden]; `activated` [T, inner] is scratch."""
        self.gate_up.into(x, activated)
        self.down.add_into(activated, residual)


class ExpertBuffers:
    """Scratch that all layers share, since one computes at a time: of as many rows as tokens times experts per token.

    Three tensors: gathered inputs [rows, hidden], activated [rows, inner], outputs [rows, hidden].
    """

    __slots__ = ("_activated", "_gathered", "_outputs")

    def __init__(self, rows: int, hidden: int, inner: int, dtype: torch.dtype) -> None:
        self._gathered = torch.empty((rows, hidden), dtype=dtype)
        self._activated = torch.empty((rows, inner), dtype=dtype)
        self._outputs = torch.empty((rows, hidden), dtype=dtype)

    def of(self, rows: int) -> tuple[Tensor, Tensor, Tensor]:
        """The three, cut to `rows`; larger ones from now on where a step is larger than announced."""
        if rows > len(self._gathered):
            self._gathered = self._gathered.new_empty((rows, self._gathered.shape[1]))
            self._activated = self._activated.new_empty((rows, self._activated.shape[1]))
            self._outputs = self._outputs.new_empty((rows, self._outputs.shape[1]))
        return self._gathered[:rows], self._activated[:rows], self._outputs[:rows]


class Routing(Protocol):
    """Chooses each token's experts and their weights."""

    @property
    def per_token(self) -> int: ...

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """For x [T, hidden]: experts [T, k], ascending in each row, and their weights [T, k]."""


@dataclass(frozen=True, slots=True)
class Router:
    """The k experts of the largest scores, weighted by a softmax over all experts, or over the chosen alone."""

    scores: Linear
    per_token: int
    over_chosen: bool  # the weights sum to one
    rounded: bool  # the weights are rounded to the model's dtype, as in Qwen's code; Mixtral's stay float32

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """See `Routing`."""
        return choose_experts(self.scores(x), self.per_token, self.over_chosen, self.rounded)


@dataclass(frozen=True, slots=True)
class GroupedRouter:
    """DeepSeek: the k best experts of the best groups of them. V2 scores by a softmax over all experts, and a group by
    its best one; V3 by each score's sigmoid, corrected for the choice alone, and a group by its two best."""

    scores: Linear  # in float32
    correction: Tensor | None  # [experts]; None = V2
    per_token: int
    groups: int
    chosen_groups: int
    normalised: bool
    scale: float

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """See `Routing`."""
        logits = self.scores(x.float())
        if self.correction is None:
            likelihood = ranked = torch.softmax(logits, dim=-1)
        else:  # a sigmoid, of which no bit depends on its place (see `SharedExpert`)
            likelihood = torch.softmax(torch.stack((logits, torch.zeros_like(logits)), dim=-1), dim=-1)[..., 0]
            ranked = likelihood + self.correction
        if self.groups > 1:
            ranked = self._of_best_groups(ranked)
        experts, _ = torch.sort(torch.topk(ranked, self.per_token, dim=-1).indices, dim=-1)
        weights = torch.gather(likelihood, 1, experts)
        if self.normalised:
            total = weights[:, 0]
            for column in range(1, self.per_token):
                total = total + weights[:, column]
            weights = weights / (total + 1e-20).unsqueeze(1)
        return experts, weights * self.scale

    def _of_best_groups(self, ranked: Tensor) -> Tensor:
        members = ranked.view(len(ranked), self.groups, -1)
        if self.correction is None:
            best = members.max(dim=-1).values
        else:
            two = members.topk(2, dim=-1).values
            best = two[..., 0] + two[..., 1]
        chosen = torch.zeros_like(best, dtype=torch.bool)
        chosen.scatter_(1, torch.topk(best, self.chosen_groups, dim=-1).indices, True)
        # V2 leaves the others a score of zero, which still loses against any that is chosen.
        return members.masked_fill(~chosen.unsqueeze(-1), float("-inf")).view(ranked.shape)


@dataclass(frozen=True, slots=True)
class PlainSharedExpert:
    """DeepSeek: an MLP that every token takes as it is."""

    mlp: DenseMlp

    def __call__(self, x: Tensor) -> Tensor:
        """[T, hidden] for x [T, hidden]."""
        activated = x.new_empty((len(x), self.mlp.down.in_features))
        self.mlp.gate_up.into(x, activated)
        return self.mlp.down(activated)


@dataclass(frozen=True, slots=True)
class SharedExpert:
    """Qwen2-MoE: an MLP that every token takes, weighted by a gate of its own."""

    mlp: DenseMlp
    gate: Linear

    def __call__(self, x: Tensor) -> Tensor:
        """[T, hidden] for x [T, hidden]."""
        out = self.mlp.down(self._activated(x))
        score = self.gate(x).float()
        # A softmax over (score, 0) is the score's sigmoid and computed row by row; torch's sigmoid of the last few
        # elements is another function than that of a full vector, so a token's bits would depend on its place.
        weight = torch.softmax(torch.cat([score, torch.zeros_like(score)], dim=1), dim=1)[:, :1]
        return out.mul_(weight.to(x.dtype))

    def _activated(self, x: Tensor) -> Tensor:
        activated = x.new_empty((len(x), self.mlp.down.in_features))
        self.mlp.gate_up.into(x, activated)
        return activated


@dataclass(frozen=True, slots=True)
class Experts:
    """x ↦ Σ weight · expert(x) over a token's experts, and the shared expert's part where there is one."""

    router: Routing
    experts: Sequence[DenseMlp]
    shared: SharedExpert | PlainSharedExpert | None
    buffers: ExpertBuffers

    def add_into(self, x: Tensor, activated: Tensor, residual: Tensor) -> None:
        """residual [T, hidden] += the mixture of x [T, hidden]; has scratch of its own instead of `activated`."""
        chosen, weights = self.router.route(x)
        # A single token's experts are in order already.
        outputs = self._of_one(x, chosen[0].tolist()) if len(x) == 1 else self._of_many(x, chosen.view(-1))
        add_weighted(outputs, weights, None if self.shared is None else self.shared(x), residual)

    def _of_one(self, x: Tensor, chosen: Sequence[int]) -> Tensor:
        """Outputs [k, hidden] of a single token's experts."""
        _, activated, outputs = self.buffers.of(len(chosen))
        for row, expert in enumerate(chosen):
            mlp = self.experts[expert]
            mlp.gate_up.into(x, activated[row : row + 1])
            mlp.down.into(activated[row : row + 1], outputs[row : row + 1])
        return outputs

    def _of_many(self, x: Tensor, chosen: Tensor) -> Tensor:
        """Outputs [T · k, hidden], token by token, for `chosen` [T · k]: every expert computes its rows together."""
        gathered, activated, outputs = self.buffers.of(len(chosen))
        order = torch.argsort(chosen, stable=True)
        torch.index_select(x, 0, order // self.router.per_token, out=gathered)
        begin = 0
        for expert, rows in enumerate(torch.bincount(chosen).tolist()):
            if rows:
                mlp, end = self.experts[expert], begin + rows
                mlp.gate_up.into(gathered[begin:end], activated[begin:end])
                mlp.down.into(activated[begin:end], outputs[begin:end])
                begin = end
        return gathered.index_copy_(0, order, outputs)  # the inputs are read, so their memory takes the outputs


@dataclass(frozen=True, slots=True)
class _Names:
    """How a checkpoint names a layer's mixture. `fused`: all experts in one tensor of each kind."""

    block: str
    gate: str
    up: str
    down: str
    fused: bool = False

    def of_expert(self, part: str, expert: int) -> str:
        return f"{self.block}.experts.{expert}.{part}.weight"

    @property
    def router(self) -> str:
        return f"{self.block}.gate.weight"


_MIXTRAL = _Names("block_sparse_moe", "w1", "w3", "w2")
_QWEN = _Names("mlp", "gate_proj", "up_proj", "down_proj")
_FUSED = _Names("mlp", "gate_up_proj", "gate_up_proj", "down_proj", fused=True)
_SHARED = ("gate_proj", "up_proj", "down_proj")
_CPU = torch.device("cpu")


def _names(files: Weights, prefix: str, geometry: ModelGeometry) -> _Names:
    """Published checkpoints have a tensor per expert, and so has what transformers saves; in memory, and in what is
    saved without its conversion, version 5 has all experts in one tensor."""
    separate = _MIXTRAL if geometry.model_type == "mixtral" else _QWEN
    fused = f"{prefix}{_FUSED.block}.experts.{_FUSED.gate}"
    return _FUSED if prefix + separate.of_expert(separate.gate, 0) not in files and fused in files else separate


def expert_tensors(files: Weights, prefix: str, geometry: ModelGeometry, mixture: ExpertsGeometry) -> list[str]:
    """Every tensor of a layer's mixture, without the layer's prefix."""
    names = _names(files, prefix, geometry)
    if names.fused:
        tensors = [f"{names.block}.experts.{part}" for part in (names.gate, names.down)]
    else:
        parts = (names.gate, names.up, names.down)
        tensors = [names.of_expert(part, expert) for expert in range(mixture.count) for part in parts]
    if mixture.shared_inner_size and geometry.family == "moe":
        tensors += [f"mlp.shared_expert.{part}.weight" for part in _SHARED] + ["mlp.shared_expert_gate.weight"]
    return [names.router, *tensors]


def read_experts(
    files: Weights,
    prefix: str,
    geometry: ModelGeometry,
    mixture: ExpertsGeometry,
    dtype: torch.dtype,
    arena: Arena,
    buffers: ExpertBuffers,
) -> Experts:
    """A layer's mixture from its tensors, packed into `arena` for the processor's products."""
    router, shared = read_beside(files, prefix, geometry, mixture, dtype, arena, _CPU)
    mlps = read_expert_mlps(files, prefix, geometry, mixture, dtype, arena)
    return Experts(router, mlps, shared, buffers)


def groups_on_host(device: torch.device) -> bool:
    """Whether a mixture's rows are grouped by the host (`Experts`) or on the device (`DeviceExperts`)."""
    return device.type == "cpu"


def read_beside(
    files: Weights,
    prefix: str,
    geometry: ModelGeometry,
    mixture: ExpertsGeometry,
    dtype: torch.dtype,
    arena: Arena,
    device: torch.device,
) -> tuple[Router, SharedExpert | None]:
    """What a layer's mixture has beside its experts, on either kind of device."""
    scores = Linear(router_weight(files, prefix, geometry, mixture, dtype, device), arena=arena)
    router = Router(scores, mixture.per_token, mixture.normalised, rounded=geometry.model_type != "mixtral")
    hidden, inner = geometry.hidden_size, mixture.shared_inner_size
    if not inner:
        return router, None
    mlp = read_mlp(files, f"{prefix}mlp.shared_expert", hidden, inner, dtype, arena, device=device)
    gate = files.read(f"{prefix}mlp.shared_expert_gate.weight", (1, hidden), dtype, device)
    return router, SharedExpert(mlp, Linear(gate, arena=arena))


def _of_all(
    files: Weights,
    prefix: str,
    names: _Names,
    geometry: ModelGeometry,
    mixture: ExpertsGeometry,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    """As `read_device_weights`, where the files have them so."""
    hidden, inner, block = geometry.hidden_size, mixture.inner_size, f"{prefix}{names.block}.experts."
    gate_up = files.read(block + names.gate, (mixture.count, 2 * inner, hidden), dtype, device)
    return gate_up, files.read(block + names.down, (mixture.count, hidden, inner), dtype, device)


def read_device_weights(
    files: Weights,
    prefix: str,
    geometry: ModelGeometry,
    mixture: ExpertsGeometry,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    """All experts in two tensors: [experts, 2 · inner, hidden], gates over ups, and [experts, hidden, inner]."""
    names, hidden, inner, count = (
        _names(files, prefix, geometry),
        geometry.hidden_size,
        mixture.inner_size,
        mixture.count,
    )
    if names.fused:
        return _of_all(files, prefix, names, geometry, mixture, dtype, device)
    both = [prefix + names.of_expert(part, expert) for expert in range(count) for part in (names.gate, names.up)]
    downs = [prefix + names.of_expert(names.down, expert) for expert in range(count)]
    gate_up = files.read_rows(both, [inner] * (2 * count), (hidden,), dtype, device)
    down = files.read_rows(downs, [hidden] * count, (inner,), dtype, device)
    return gate_up.view(count, 2 * inner, hidden), down.view(count, hidden, inner)


def read_expert_codes(
    files: Weights,
    prefix: str,
    geometry: ModelGeometry,
    mixture: ExpertsGeometry,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[ExpertCodes, ExpertCodes] | None:
    """All experts' gates over ups, and downs, in codes; None where one of them is plain, or is not kept in codes."""
    names, hidden, inner = _names(files, prefix, geometry), geometry.hidden_size, mixture.inner_size
    if names.fused or not isinstance(files, CodedWeights):
        return None
    number = str(dtype).removeprefix("torch.")

    def stack(parts: tuple[str, ...], outputs: int, inputs: int) -> ExpertCodes | None:
        place: ExpertCodes | None = None
        first: CodeLayout | None = None
        for expert in range(mixture.count):
            for index, part in enumerate(parts):
                weight = files.read_quantized(prefix + names.of_expert(part, expert), outputs, inputs, device)
                if not isinstance(weight, QuantizedWeight):
                    return None
                if place is None or first is None:
                    first = weight.layout
                    if not keeps_codes("cuda", number, first):
                        return None
                    shape = (mixture.count, len(parts) * outputs)
                    scales = torch.zeros((*shape, weight.scales.shape[1]), device=device)
                    codes = torch.empty((*shape, weight.codes.shape[1]), dtype=weight.codes.dtype, device=device)
                    place = ExpertCodes(
                        codes, scales, torch.zeros_like(scales) if first.offsets else None, weight.group
                    )
                if weight.layout != first:
                    return None
                rows = slice(index * outputs, (index + 1) * outputs)
                place.codes[expert, rows], place.scales[expert, rows] = weight.codes, weight.scales
                if place.offsets is not None and weight.offsets is not None:
                    place.offsets[expert, rows] = weight.offsets
        return place

    gate_up = stack((names.gate, names.up), inner, hidden)
    down = None if gate_up is None else stack((names.down,), hidden, inner)
    return None if gate_up is None or down is None else (gate_up, down)


def router_weight(
    files: Weights,
    prefix: str,
    geometry: ModelGeometry,
    mixture: ExpertsGeometry,
    dtype: torch.dtype,
    device: torch.device = _CPU,
) -> Tensor:
    """[experts, hidden]."""
    name = prefix + _names(files, prefix, geometry).router
    return files.read(name, (mixture.count, geometry.hidden_size), dtype, device)


def read_expert_mlps(
    files: Weights, prefix: str, geometry: ModelGeometry, mixture: ExpertsGeometry, dtype: torch.dtype, arena: Arena
) -> list[DenseMlp]:
    """The experts themselves, in either form of the files."""
    names, hidden, inner = _names(files, prefix, geometry), geometry.hidden_size, mixture.inner_size
    if not names.fused:
        parts, block = (names.gate, names.up, names.down), f"{prefix}{names.block}.experts."
        return [
            read_mlp(files, f"{block}{expert}", hidden, inner, dtype, arena, parts) for expert in range(mixture.count)
        ]
    both, downs = _of_all(files, prefix, names, geometry, mixture, dtype, _CPU)
    return [
        DenseMlp(GatedLinear(gate_up, arena=arena), Linear(down, arena=arena))
        for gate_up, down in zip(both, downs, strict=True)
    ]


def read_mlp(
    files: Weights,
    module: str,
    hidden: int,
    inner: int,
    dtype: torch.dtype,
    arena: Arena,
    parts: Sequence[str] = _SHARED,
    device: torch.device = _CPU,
) -> DenseMlp:
    """A gated MLP without biases; `parts`: how the files name gate, up and down."""
    gate, up, down = (f"{module}.{part}.weight" for part in parts)
    gate_up = matrix(files, [gate, up], [inner, inner], hidden, dtype, device)
    return DenseMlp(
        GatedLinear(gate_up, arena=arena, dtype=dtype),
        Linear(matrix(files, [down], [hidden], inner, dtype, device), arena=arena, dtype=dtype),
    )
