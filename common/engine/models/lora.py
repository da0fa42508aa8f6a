"""LoRA adapters in memory, and what they add to the products of a step: y += scale · (x Aᵀ) Bᵀ for an adapter's rows.

    StepBatch.adapters ─▶ LoraStore.step ─▶ LoraStep: tokens by adapter ─▶ hooks of the lean Llama model

A store belongs to a model runner. `load` reads an adapter on a thread of its own while steps run; the worker loop lets
steps use it (`hold`) and lets it go (`drop`) as the worker's machine says. A step's rows are grouped by adapter, one
after the other, without a wait for the device. On a processor the two small products are panels as the model's own: a
row gets the same bits whatever rows stand beside it. Nothing here changes the base weights, so rows without an
adapter compute what they always do.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cohort.common.engine.config.lora_checkpoint import Checkpoint, Part, Slot, projections, read_added, stamp_of
from cohort.common.engine.config.model_config import ModelGeometry
from cohort.common.engine.models.experts import DenseMlp, DeviceExperts, Experts
from cohort.common.engine.step.batch import StepBatch
from cohort.common.engine.weights.linear import GatedLinear, Linear
from cohort.common.engine.weights.tensor_files import TensorFile, open_tensor_file
from cohort.common.errors import InvariantViolated, ModelError
from cohort.kernels.batch_invariance import FixedProduct, batch_invariant, is_to_be_compiled
from cohort.kernels.cpu.panels import Arena
from cohort.kernels.ops.fused import silu_mul

Put = Callable[[Sequence[npt.NDArray[np.generic]]], list[Tensor]]
"""Host arrays to the device."""


@dataclass(frozen=True, slots=True)
class Delta:
    """An adapter's part in one product of a layer. The projections fused there stand beside each other in `a` and in
    blocks in `b`, zeros elsewhere; `b` holds the scale."""

    a: Linear
    b: Linear

    def add_into(self, x: Tensor, out: Tensor) -> None:
        """Add its product with x [T, inputs] to out [T, outputs]."""
        self.b.add_into(self.a(x), out)


@dataclass(frozen=True, slots=True)
class Adapter:
    """A loaded adapter: by layer, its part in the products that it changes."""

    name: str
    layers: tuple[Mapping[Slot, Delta], ...]


@dataclass(frozen=True, slots=True)
class _Group:
    """The tokens of a step that have this adapter: a stretch of them, or their places."""

    layers: tuple[Mapping[Slot, Delta], ...]
    tokens: slice | Tensor


@dataclass(frozen=True, slots=True)
class LoraStep:
    """Additions of adapters to the products of one step."""

    _groups: list[_Group]

    def add(self, layer: int, slot: Slot, x: Tensor, out: Tensor) -> None:
        """Add to out [T, outputs] what the adapters of its rows add to this product of x [T, inputs]."""
        for group in self._groups:
            delta = group.layers[layer].get(slot)
            if delta is None:
                continue
            tokens = group.tokens
            if isinstance(tokens, slice):
                delta.add_into(x[tokens], out[tokens])
            else:
                rows = out.index_select(0, tokens)
                delta.add_into(x.index_select(0, tokens), rows)
                out.index_copy_(0, tokens, rows)

    def mlp(
        self, layer: int, mlp: DenseMlp | Experts | DeviceExperts, x: Tensor, activated: Tensor, residual: Tensor
    ) -> None:
        """Add the MLP of x [T, hidden] to residual [T, hidden]; `activated` [T, inner] is scratch. What adapters add to
        gates and ups comes before the activation, which the base product does at once: where there is any, the step
        takes it apart. That gives rows without it the same bits, as `gated_product` rounds and activates alike."""
        if not isinstance(mlp, DenseMlp) or not isinstance(mlp.gate_up, GatedLinear):
            mlp.add_into(x, activated, residual)
            return
        if any("gate_up" in group.layers[layer] for group in self._groups):
            both = mlp.gate_up.unactivated(x)
            self.add(layer, "gate_up", x, both)
            silu_mul(both, activated)
        else:
            mlp.gate_up.into(x, activated)
        mlp.down.add_into(activated, residual)
        self.add(layer, "down", activated, residual)


class LoraStore:
    """The adapters that a runner's steps may use."""

    def __init__(
        self,
        checkpoints: Iterable[Checkpoint],
        geometry: ModelGeometry,
        dtype: torch.dtype,
        device: torch.device,
        *,
        fixed: bool = False,
    ) -> None:
        """`fixed`: a row's bits do not follow the number of rows on a GPU either (`batch_invariance`)."""
        self._fixed = fixed
        self._checkpoints = {each.name: each for each in checkpoints}
        self._geometry, self._dtype, self._device = geometry, dtype, device
        self._held: dict[str, Adapter] = {}
        if fixed and device.type == "cuda":  # compiled at start, as the model's own, not when a request has one
            for checkpoint in self._checkpoints.values():
                for inputs, outputs, rank in self._shapes(checkpoint):
                    is_to_be_compiled(FixedProduct(rank, inputs, False))
                    is_to_be_compiled(FixedProduct(outputs, rank, False))

    @property
    def held(self) -> list[str]:
        return list(self._held)

    def most_bytes(self, count: int) -> int:
        """Return the max memory that any `count` of the adapters take."""
        return sum(sorted(map(self._bytes, self._checkpoints.values()), reverse=True)[:count])

    def _bytes(self, checkpoint: Checkpoint) -> int:
        numbers = sum(rank * (into + out) for into, out, rank in self._shapes(checkpoint))
        return numbers * self._dtype.itemsize

    def load(self, name: str, folder: str = "") -> Adapter:
        """Read an adapter, for `hold`. On any thread. `folder`: of one that was added since the start. Raises
        `ModelError` where its file is not what it was then: what the prefix cache and other workers know of this name
        would be another adapter's."""
        checkpoint = self._added(name, folder) if folder else self._checkpoints.get(name)
        if checkpoint is None:
            raise ModelError(f"no LoRA adapter {name!r} is configured (model.lora)")
        if stamp_of(checkpoint.file) != checkpoint.stamp:
            raise ModelError(f"{checkpoint.file} has changed since the start; restart to serve it under this name")
        with torch.inference_mode(), batch_invariant(self._fixed):
            file, arena = open_tensor_file(checkpoint.file), Arena()
            layers: list[dict[Slot, Delta]] = [{} for _ in range(self._geometry.num_layers)]
            for (layer, slot), parts in itertools.groupby(
                sorted(checkpoint.parts, key=_place), key=lambda part: (part.layer, part.projection.slot)
            ):
                layers[layer][slot] = self._delta(file, layer, slot, list(parts), arena)
            if self._device.type == "cuda":
                torch.cuda.current_stream(self._device).synchronize()  # of this thread: steps run on another
        return Adapter(name, tuple(layers))

    def _added(self, name: str, folder: str) -> Checkpoint:
        """Read what an added adapter's folder says; on a GPU it may take no more than memory was set aside for."""
        found = read_added(name, Path(folder), self._geometry)
        if self._device.type == "cuda" and self._bytes(found) > self.most_bytes(1):
            raise ModelError(f"{found.file} is larger than every adapter of the start, for which memory was set aside")
        return found

    def hold(self, adapter: Adapter) -> None:
        """Let later steps name the adapter."""
        self._held[adapter.name] = adapter

    def drop(self, name: str) -> None:
        """Forget an adapter that no later step names. Its memory is free once no step under way reads it."""
        self._held.pop(name, None)

    def step(self, batch: StepBatch, put: Put) -> LoraStep | None:
        """Group a step's tokens by adapter; None where no row has one. Raises `InvariantViolated` for one that is not
        held."""
        if not any(batch.adapters):
            return None
        starts, names = batch.query_start.tolist(), batch.adapters
        groups: list[_Group] = []
        for name in dict.fromkeys(filter(None, names)):
            adapter = self._held.get(name)
            if adapter is None:
                raise InvariantViolated(f"a row has the adapter {name!r}, which is not held here")
            rows = [row for row, other in enumerate(names) if other == name]
            first, end = starts[rows[0]], starts[rows[-1] + 1]
            places = np.concatenate([np.arange(starts[row], starts[row + 1], dtype=np.int64) for row in rows])
            if len(places) == end - first:
                groups.append(_Group(adapter.layers, slice(first, end)))
            else:
                (tokens,) = put([places])
                groups.append(_Group(adapter.layers, tokens))
        return LoraStep(groups)

    def _delta(self, file: TensorFile, layer: int, slot: Slot, parts: list[Part], arena: Arena) -> Delta:
        """Compute in float32 on the host, then round once to the model's dtype."""
        inputs, outputs = parts[0].projection.inputs, self._outputs(layer, slot)
        ranks = _even(sum(part.rank for part in parts))
        a, b, first = torch.zeros((ranks, inputs)), torch.zeros((outputs, ranks)), 0
        for part in parts:
            place, end = part.projection, first + part.rank
            a[first:end] = _read(file, part.a)
            b[place.first : place.first + place.outputs, first:end] = _read(file, part.b) * part.scale
            first = end
        a, b = (half.to(device=self._device, dtype=self._dtype) for half in (a, b))
        return Delta(Linear(a, arena=arena), Linear(b, arena=arena))

    def _outputs(self, layer: int, slot: Slot) -> int:
        places = projections(self._geometry, layer).values()
        return max(place.first + place.outputs for place in places if place.slot == slot)

    def _shapes(self, checkpoint: Checkpoint) -> list[tuple[int, int, int]]:
        """Return inputs, outputs, and the rank over all parts, of each product that an adapter changes."""
        ranks: dict[tuple[int, Slot], list[Part]] = {}
        for part in checkpoint.parts:
            ranks.setdefault((part.layer, part.projection.slot), []).append(part)
        return [
            (parts[0].projection.inputs, self._outputs(layer, slot), _even(sum(part.rank for part in parts)))
            for (layer, slot), parts in ranks.items()
        ]


def host_put(device: torch.device) -> Put:
    """Return a `Put` that copies array by array, without page-locked memory."""
    return lambda arrays: [torch.from_numpy(np.ascontiguousarray(array)).to(device) for array in arrays]


def _place(part: Part) -> tuple[int, Slot, int]:
    return part.layer, part.projection.slot, part.projection.first


def _even(rank: int) -> int:
    """Return the next even rank: products in bfloat16 take their inputs in pairs."""
    return rank + rank % 2


def _read(file: TensorFile, name: str) -> Tensor:
    stored = file.tensors[name]
    stored.check()
    values = torch.empty(stored.shape, dtype=stored.dtype)
    stored.fill(values.view(-1), 0)
    return values.float()
