"""A rank's share of a model's tensors: read from the files, and no byte of the others' shares but in short rows.

Called by the lean model of a tensor-parallel rank in place of `weights.open_weights`; `rank_shares` defines a share.
Requested shapes are the rank's own. A quantised module is read whole and its codes are cut, one module at a time: its
layouts pack outputs or inputs into words, and scales follow codes only when both are unpacked.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from cohort.common.engine.config.quantization_config import Quantization
from cohort.common.engine.config.rank_shares import Part, RankShare
from cohort.common.engine.weights.quantized_files import QuantizedFiles
from cohort.common.engine.weights.quantized_formats import StoredWeight, columns_of, rows_of, together
from cohort.common.engine.weights.tensor_files import StoredTensor
from cohort.common.engine.weights.weight_files import WeightFiles
from cohort.common.engine.weights.weights import RandomWeights, WeightKind, Weights
from cohort.common.errors import ModelError

SHORT_ROW_BYTES = 16 << 10
"""Length up to which a row is read whole and cut: a call for each part takes longer than its neighbours' bytes."""
_PIECE_BYTES = 1 << 20


def open_sharded(model_dir: Path, kind: WeightKind, share: RankShare) -> Weights:
    """Return the share of the folder's files, or of drawn weights: see `weights.open_weights`."""
    if kind != "files":
        return ShardedRandom(share)
    if (quantization := share.geometry.quantization) is not None:
        return ShardedCodes(model_dir, share, quantization)
    return ShardedWeights(model_dir, share)


class ShardedWeights(WeightFiles):
    def __init__(self, model_dir: Path, share: RankShare) -> None:
        super().__init__(model_dir)
        self._share = share

    def stored(self, name: str) -> StoredTensor:
        stored = super().stored(name)
        if self._share.adds_nothing(name):
            return _Zeros(stored)
        part = self._share.part(name)
        return stored if part is None else _Slice(stored, name, part)


class ShardedCodes(QuantizedFiles):
    """Share of one rank of a quantised checkpoint: codes with their scales, and plain tensors."""

    def __init__(self, model_dir: Path, share: RankShare, quantization: Quantization) -> None:
        super().__init__(ShardedWeights(model_dir, share), quantization)
        self._share = share
        self._whole = QuantizedFiles(WeightFiles(model_dir), quantization)

    def __enter__(self) -> Self:
        self._whole.__enter__()
        return super().__enter__()

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        super().__exit__(kind, *error)
        self._whole.__exit__(kind, *error)

    def read_quantized(self, name: str, outputs: int, inputs: int, device: torch.device) -> StoredWeight | None:
        part = self._share.part(name)
        if part is None:
            return self._whole.read_quantized(name, outputs, inputs, device)
        shape = (part.of, inputs) if part.axis == 0 else (outputs, part.of)
        weight = self._whole.read_quantized(name, *shape, device)
        if weight is None:
            return None
        try:
            if part.axis == 1:
                ((first, end),) = part.ranges
                return columns_of(weight, first, end)
            return together([rows_of(weight, first, end - first) for first, end in part.ranges])
        except ModelError as error:
            raise ModelError(f"{name}, rank {self._share.rank} of {self._share.degree}: {error}") from error


class ShardedRandom(RandomWeights):
    """Share of one rank of the model that `RandomWeights` draws."""

    def __init__(self, share: RankShare) -> None:
        self._share = share

    def read_rows(
        self, names: Sequence[str], rows: Sequence[int], rest: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        found = []
        for name, count in zip(names, rows, strict=True):
            part = self._share.part(name)
            shape = [count, *rest]
            if part is not None:
                shape[part.axis] = part.of
            whole = super().read_rows([name], [shape[0]], shape[1:], dtype, device)
            if self._share.adds_nothing(name):
                whole.zero_()
            spans = ((0, shape[0]),) if part is None else part.ranges
            axis = 0 if part is None else part.axis
            found.append(torch.cat([whole.narrow(axis, first, end - first) for first, end in spans], dim=axis))
        return torch.cat(found)


class _Slice:
    """Part of a stored tensor along one of its dimensions, as a tensor of its own."""

    def __init__(self, stored: StoredTensor, name: str, part: Part) -> None:
        self._stored, self._name, self._part = stored, name, part
        self.dtype = stored.dtype
        extents = list(stored.shape)
        extents[part.axis : part.axis + 1] = [part.extent]
        self.shape: tuple[int, ...] = tuple(extents)

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def check(self) -> None:
        self._stored.check()
        found = self._stored.shape
        if len(found) <= self._part.axis or found[self._part.axis] != self._part.of:
            raise ModelError(
                f"tensor {self._name} has shape {found}, its configuration says {self._part.of} along dimension "
                f"{self._part.axis}"
            )

    def fill(self, target: Tensor, first: int) -> None:
        axis, shape = self._part.axis, self._stored.shape
        if axis and math.prod(shape[axis:]) * self.dtype.itemsize <= SHORT_ROW_BYTES:
            self._cut(target, first, math.prod(shape[axis + 1 :]))
            return
        done = 0
        while done < len(target):
            source, neighbours = self._at(first + done)
            count = min(neighbours, len(target) - done)
            self._stored.fill(target[done : done + count], source)
            done += count

    def _cut(self, target: Tensor, first: int, width: int) -> None:
        """Fill by whole rows: what lies along the axis of the part and behind it, `width` elements a place."""
        size, row = self.dtype.itemsize, self._part.of * width
        own, at_once = self._part.extent * width, max(1, _PIECE_BYTES // (row * self.dtype.itemsize))
        place, done = target.view(torch.uint8), 0
        while done < len(target):
            index, within = divmod(first + done, own)
            rows = min(at_once, -(-(within + len(target) - done) // own))
            piece = torch.empty(rows * row, dtype=self.dtype)
            self._stored.fill(piece, index * row)
            whole = piece.view(torch.uint8).view(rows, self._part.of, width * size)
            parts = torch.cat([whole[:, begin:end] for begin, end in self._part.ranges], dim=1).view(-1)
            count = min(rows * own - within, len(target) - done)
            place[done * size : (done + count) * size] = parts[within * size : (within + count) * size]
            done += count

    def _at(self, index: int) -> tuple[int, int]:
        """Return where the element of this index is in the stored tensor, and how many follow without a gap."""
        whole = self._stored.shape
        width = math.prod(whole[self._part.axis + 1 :])
        before, index = divmod(index, self._part.extent * width)
        start = before * self._part.of * width
        for begin, end in self._part.ranges:
            if index < (end - begin) * width:
                return start + begin * width + index, (end - begin) * width - index
            index -= (end - begin) * width
        raise IndexError(f"{self._name} has no element behind its last one")


class _Zeros:
    """Zeros in place of a tensor that another rank adds."""

    def __init__(self, stored: StoredTensor) -> None:
        self.dtype, self.shape = stored.dtype, stored.shape
        self._stored = stored

    @property
    def num_bytes(self) -> int:
        return self._stored.num_bytes

    def check(self) -> None:
        self._stored.check()

    def fill(self, target: Tensor, first: int) -> None:
        target.zero_()
