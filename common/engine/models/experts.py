"""The MLP of a decoder layer: dense, or a mixture of experts (Mixtral, Qwen2-MoE, Qwen3-MoE).

Called by the lean Llama model once per layer and step. A mixture's rows are sorted by expert, every expert with rows
computes one product over all of them, and the outputs return to their tokens' places, where each token's are summed in
ascending order of its experts. No value depends on how many rows stand beside a token's: the products are the project's
panels, and every other step is elementwise or within one row. So a request computes the same bits in every batch, as
with a dense model. Where to route is transformers' rule (softmax over all experts, then the k largest).

Grouping needs the number of rows of each expert on the host, so `Experts` is for a processor. `DeviceExperts` is its
counterpart on a GPU: routed, sorted and multiplied on the device, with all experts' weights in two tensors. The host
never learns how many rows an expert has, so a recorded step serves any routing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from cohort.common.engine.config.model_config import ExpertsGeometry, ModelGeometry
from cohort.common.engine.config.quantization_config import CodeLayout, keeps_codes
from cohort.common.engine.models.model_files import ModelFiles
from cohort.common.engine.weights.linear import GatedLinear, Linear
from cohort.common.engine.weights.matrices import CodedWeights
from cohort.common.engine.weights.quantized import QuantizedWeight
from cohort.common.engine.weights.weights import Weights
from cohort.kernels.batch_invariance import in_force
from cohort.kernels.ops.experts import add_weighted, choose_experts, expert_outputs
from cohort.kernels.types import ClampedSwiglu, ExpertCodes


class ActivatedProduct(Protocol):
    """The first half of a gated MLP: both products and the activation."""

    @property
    def panel_data(self) -> Tensor | None: ...

    def into(self, x: Tensor, out: Tensor) -> None:
        """Compute out [T, inner] of x [T, hidden]."""


@dataclass(frozen=True, slots=True)
class DenseMlp:
    """x ↦ down(silu(gate(x)) · up(x)), or with another activation."""

    gate_up: ActivatedProduct
    down: Linear

    def __call__(self, x: Tensor) -> Tensor:
        """Return [T, hidden] for x [T, hidden]."""
        activated = x.new_empty((len(x), self.down.in_features))
        self.gate_up.into(x, activated)
        return self.down(activated)

    def add_into(self, x: Tensor, activated: Tensor, residual: Tensor) -> None:
        """Add the MLP of x [T, hidden] to residual [T, hidden]; `activated` [T, inner] is scratch."""
        self.gate_up.into(x, activated)
        self.down.add_into(activated, residual)


class ExpertBuffers:
    """Scratch that all layers share, of as many rows as tokens times experts per token: gathered inputs [rows, hidden],
    activated [rows, inner], outputs [rows, hidden]."""

    __slots__ = ("_tensors",)

    def __init__(self, rows: int, hidden: int, inner: int, dtype: torch.dtype) -> None:
        self._tensors = [torch.empty((rows, width), dtype=dtype) for width in (hidden, inner, hidden)]

    def of(self, rows: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the three, cut to `rows`; they grow where a step is larger than announced."""
        if rows > len(self._tensors[0]):
            self._tensors = [each.new_empty((rows, each.shape[1])) for each in self._tensors]
        gathered, activated, outputs = (each[:rows] for each in self._tensors)
        return gathered, activated, outputs


class Routing(Protocol):
    """A choice of each token's experts and their weights."""

    @property
    def per_token(self) -> int: ...

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the experts [T, k] of x [T, hidden], ascending in each row, and their weights [T, k]."""


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
    """The k best experts of the best groups of them (DeepSeek). V2 scores by a softmax over all experts, and a group by
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
class SharedExpert:
    """An MLP that every token takes, weighted by a gate of its own (Qwen2-MoE)."""

    mlp: DenseMlp
    gate: Linear

    def __call__(self, x: Tensor) -> Tensor:
        """Return [T, hidden] for x [T, hidden]."""
        out = self.mlp(x)
        score = self.gate(x).float()
        # A softmax over (score, 0) is the score's sigmoid and computed row by row; torch's sigmoid of the last few
        # elements is another function than that of a full vector, so a token's bits would depend on its place.
        weight = torch.softmax(torch.cat([score, torch.zeros_like(score)], dim=1), dim=1)[:, :1]
        return out.mul_(weight.to(x.dtype))


@dataclass(frozen=True, slots=True)
class Experts:
    """x ↦ Σ weight · expert(x) over a token's experts, and the shared expert's part where there is one."""

    router: Routing
    experts: Sequence[DenseMlp]
    shared: SharedExpert | DenseMlp | None
    buffers: ExpertBuffers

    def add_into(self, x: Tensor, activated: Tensor, residual: Tensor) -> None:
        """Add the mixture of x [T, hidden] to residual [T, hidden]; `activated` is not used."""
        chosen, weights = self.router.route(x)
        # A single token's experts are in order already.
        outputs = self._of_one(x, chosen[0].tolist()) if len(x) == 1 else self._of_many(x, chosen.view(-1))
        add_weighted(outputs, weights, None if self.shared is None else self.shared(x), residual)

    def _of_one(self, x: Tensor, chosen: Sequence[int]) -> Tensor:
        """Compute the outputs [k, hidden] of a single token's experts."""
        _, activated, outputs = self.buffers.of(len(chosen))
        for row, expert in enumerate(chosen):
            mlp = self.experts[expert]
            mlp.gate_up.into(x, activated[row : row + 1])
            mlp.down.into(activated[row : row + 1], outputs[row : row + 1])
        return outputs

    def _of_many(self, x: Tensor, chosen: Tensor) -> Tensor:
        """Compute the outputs [T · k, hidden], token by token, of `chosen` [T · k], each expert's rows together."""
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
class DeviceExperts:
    """x ↦ Σ weight · expert(x) on a GPU; `shared` as of `Experts`."""

    router: Routing
    gate_up: Tensor | ExpertCodes  # [experts, 2 · inner, hidden]
    down: Tensor | ExpertCodes  # [experts, hidden, inner]
    shared: SharedExpert | DenseMlp | None = None
    biases: tuple[Tensor, Tensor] | None = None  # [experts, 2 · inner], [experts, hidden]
    clamped: ClampedSwiglu | None = None  # the activation, of gates and ups in turn; None = SiLU, gates over ups
    fixed: bool = field(default_factory=in_force)  # tiles do not follow the number of rows

    def __post_init__(self) -> None:
        for weight, gathers in ((self.gate_up, True), (self.down, False)):
            if isinstance(weight, ExpertCodes):
                weight.is_to_be_compiled(
                    gathers=gathers, biased=self.biases is not None, clamped=self.clamped is not None
                )

    def add_into(self, x: Tensor, activated: Tensor, residual: Tensor) -> None:
        """Add the mixture of x [T, hidden] to residual [T, hidden]; `activated` is not used."""
        chosen, weights = self.router.route(x)
        parts = expert_outputs(x, chosen, self.gate_up, self.down, self.biases, self.clamped, fixed=self.fixed)
        add_weighted(parts, weights, None if self.shared is None else self.shared(x), residual)


def groups_on_host(device: torch.device) -> bool:
    """Return whether a mixture's rows are grouped by the host (`Experts`) or on the device (`DeviceExperts`)."""
    return device.type == "cpu"


@dataclass(frozen=True, slots=True)
class _Names:
    """A checkpoint's names of a layer's mixture. `fused`: all experts in one tensor of each kind."""

    block: str
    gate: str
    up: str
    down: str
    fused: bool = False

    def of_expert(self, part: str, expert: int) -> str:
        return f"{self.block}.experts.{expert}.{part}.weight"


_MIXTRAL = _Names("block_sparse_moe", "w1", "w3", "w2")
_QWEN = _Names("mlp", "gate_proj", "up_proj", "down_proj")
_FUSED = _Names("mlp", "gate_up_proj", "gate_up_proj", "down_proj", fused=True)
_SHARED = ("gate_proj", "up_proj", "down_proj")


def _names(files: Weights, prefix: str, geometry: ModelGeometry) -> _Names:
    """Return the names that a checkpoint uses: published ones have a tensor per expert, and so has what transformers
    saves; what version 5 saves without its conversion has all experts in one tensor."""
    separate = _MIXTRAL if geometry.model_type == "mixtral" else _QWEN
    fused = f"{prefix}{_FUSED.block}.experts.{_FUSED.gate}"
    return _FUSED if prefix + separate.of_expert(separate.gate, 0) not in files and fused in files else separate


def expert_tensors(files: Weights, prefix: str, geometry: ModelGeometry, mixture: ExpertsGeometry) -> list[str]:
    """Return every tensor of a layer's mixture, without the layer's prefix."""
    names = _names(files, prefix, geometry)
    if names.fused:
        tensors = [f"{names.block}.experts.{part}" for part in (names.gate, names.down)]
    else:
        parts = (names.gate, names.up, names.down)
        tensors = [names.of_expert(part, expert) for expert in range(mixture.count) for part in parts]
    if mixture.shared_inner_size and geometry.family == "moe":
        tensors += [f"mlp.shared_expert.{part}.weight" for part in _SHARED] + ["mlp.shared_expert_gate.weight"]
    return [f"{names.block}.gate.weight", *tensors]


class MixtureReader:
    """A layer's mixture in its files, in whichever form they have it."""

    def __init__(self, files: ModelFiles, prefix: str, geometry: ModelGeometry, mixture: ExpertsGeometry) -> None:
        self._files, self._prefix, self._geometry, self._mixture = files, prefix, geometry, mixture
        self._hidden, self._inner = geometry.hidden_size, mixture.inner_size
        self._names = _names(files.weights, prefix, geometry)

    def on_host(self, buffers: ExpertBuffers) -> Experts:
        """Read the mixture packed for the processor's products."""
        return Experts(self._router(), self.mlps(), self._shared(), buffers)

    def on_device(self) -> DeviceExperts:
        """Read the mixture, each tensor straight into its place."""
        gate_up, down = self.products()
        return DeviceExperts(self._router(), gate_up, down, self._shared())

    def router_weight(self) -> Tensor:
        """Read [experts, hidden]."""
        return self._read(f"{self._names.block}.gate.weight", self._mixture.count, self._hidden)

    def mlps(self) -> list[DenseMlp]:
        """Read the experts alone, for the processor's products."""
        names, hidden, inner, arena = self._names, self._hidden, self._inner, self._files.arena
        if not names.fused:
            parts, block = (names.gate, names.up, names.down), f"{self._prefix}{names.block}.experts."
            return [
                read_mlp(self._files, f"{block}{expert}", hidden, inner, parts) for expert in range(self._mixture.count)
            ]
        return [
            DenseMlp(GatedLinear(gate_up, arena=arena), Linear(down, arena=arena))
            for gate_up, down in zip(*self._fused(), strict=True)
        ]

    def products(self) -> tuple[Tensor, Tensor] | tuple[ExpertCodes, ExpertCodes]:
        """Read the two weights of `DeviceExperts`; codes stay codes where all experts' are kept."""
        names, hidden, inner, count = self._names, self._hidden, self._inner, self._mixture.count
        if names.fused:
            return self._fused()
        gate_up_codes = self._codes((names.gate, names.up), inner, hidden)
        down_codes = None if gate_up_codes is None else self._codes((names.down,), hidden, inner)
        if gate_up_codes is not None and down_codes is not None:
            return gate_up_codes, down_codes
        gate_up, down = self._rows((names.gate, names.up), inner, hidden), self._rows((names.down,), hidden, inner)
        return gate_up.view(count, 2 * inner, hidden), down.view(count, hidden, inner)

    def _router(self) -> Router:
        mixture, rounded = self._mixture, self._geometry.model_type != "mixtral"
        scores = Linear(self.router_weight(), arena=self._files.arena)
        return Router(scores, mixture.per_token, mixture.normalised, rounded=rounded)

    def _shared(self) -> SharedExpert | None:
        if not self._mixture.shared_inner_size:
            return None
        module, inner = f"{self._prefix}mlp.shared_expert", self._mixture.shared_inner_size
        gate = self._read("mlp.shared_expert_gate.weight", 1, self._hidden)
        return SharedExpert(read_mlp(self._files, module, self._hidden, inner), Linear(gate, arena=self._files.arena))

    def _read(self, name: str, *shape: int) -> Tensor:
        return self._files.weights.read(self._prefix + name, shape, self._files.dtype, self._files.device)

    def _fused(self) -> tuple[Tensor, Tensor]:
        """Read [experts, 2 · inner, hidden], gates over ups, and [experts, hidden, inner]."""
        block, count = f"{self._names.block}.experts.", self._mixture.count
        gate_up = self._read(block + self._names.gate, count, 2 * self._inner, self._hidden)
        return gate_up, self._read(block + self._names.down, count, self._hidden, self._inner)

    def _rows(self, parts: tuple[str, ...], outputs: int, inputs: int) -> Tensor:
        """Read these parts of each expert, outputs one after the other."""
        experts = range(self._mixture.count)
        names = [self._prefix + self._names.of_expert(part, expert) for expert in experts for part in parts]
        files = self._files
        return files.weights.read_rows(names, [outputs] * len(names), (inputs,), files.dtype, files.device)

    def _codes(self, parts: tuple[str, ...], outputs: int, inputs: int) -> ExpertCodes | None:
        """Read these parts of all experts in codes; None where one is plain, or is not kept in codes."""
        files, device = self._files.weights, self._files.device
        if not isinstance(files, CodedWeights):
            return None
        place: ExpertCodes | None = None
        first: CodeLayout | None = None
        for expert in range(self._mixture.count):
            for index, part in enumerate(parts):
                name = self._prefix + self._names.of_expert(part, expert)
                weight = files.read_quantized(name, outputs, inputs, device)
                if not isinstance(weight, QuantizedWeight):
                    return None
                if place is None or first is None:
                    first = weight.layout
                    if not keeps_codes("cuda", str(self._files.dtype).removeprefix("torch."), first):
                        return None
                    shape = (self._mixture.count, len(parts) * outputs)
                    scales = torch.zeros((*shape, weight.scales.shape[1]), device=device)
                    codes = torch.empty((*shape, weight.codes.shape[1]), dtype=weight.codes.dtype, device=device)
                    offsets = torch.zeros_like(scales) if first.offsets else None
                    place = ExpertCodes(codes, scales, offsets, weight.group)
                if weight.layout != first:
                    return None
                rows = slice(index * outputs, (index + 1) * outputs)
                place.codes[expert, rows], place.scales[expert, rows] = weight.codes, weight.scales
                if place.offsets is not None and weight.offsets is not None:
                    place.offsets[expert, rows] = weight.offsets
        return place


def read_mlp(
    files: ModelFiles, module: str, hidden: int, inner: int, parts: tuple[str, str, str] = _SHARED
) -> DenseMlp:
    """Read a gated MLP without biases; `parts`: the files' names of gate, up and down."""
    gate, up, down = (f"{module}.{part}" for part in parts)
    return DenseMlp(files.gated([gate, up], [inner, inner], hidden), files.linear([down], [hidden], inner))
