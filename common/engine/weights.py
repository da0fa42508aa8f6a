"""Finds and reads a model folder's tensors by name: safetensors or PyTorch files, single or sharded, memory-mapped.
Or draws them at random, for measuring the shape of a model that is not here.

Called by the lean models at load. A tensor is read from the mapped file straight into its final (often fused) place and
dtype, so no second copy of the model ever stands in memory. Never interprets a name; never needs transformers.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from safetensors import safe_open
from torch import Tensor

from cohort.common.errors import ModelError

WeightKind = Literal["files", "random"]


class Weights(Protocol):
    """A model's tensors by name."""

    def __contains__(self, name: str) -> bool: ...

    def prefix(self, candidates: Sequence[str], probe: str) -> str:
        """The first of `candidates` under which `probe` exists."""

    def require(self, names: Iterable[str]) -> None:
        """Raise `ModelError` naming every absent tensor at once."""

    def read(self, name: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """One tensor in the given dtype on the device."""

    def read_rows(
        self, names: Sequence[str], rows: Sequence[int], rest: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Several tensors stacked along their first dimension."""


def open_weights(model_dir: Path, kind: WeightKind) -> Weights:
    """Of the folder's files, or drawn: "random" measures a model's shape without having the model."""
    return WeightFiles(model_dir) if kind == "files" else RandomWeights()


class _File(Protocol):
    """An open weight file."""

    def names(self) -> Iterable[str]: ...
    def tensor(self, name: str) -> Tensor: ...


class _SafetensorsFile:
    def __init__(self, path: Path) -> None:
        self._handle: Any = safe_open(str(path), framework="pt", device="cpu")

    def names(self) -> Iterable[str]:
        names: Iterable[str] = self._handle.keys()
        return names

    def tensor(self, name: str) -> Tensor:
        tensor: Tensor = self._handle.get_tensor(name)
        return tensor


class _TorchFile:
    def __init__(self, path: Path) -> None:
        # weights_only: nothing but tensors is unpickled
        self._state: dict[str, Tensor] = torch.load(path, map_location="cpu", weights_only=True, mmap=True)

    def names(self) -> Iterable[str]:
        return self._state.keys()

    def tensor(self, name: str) -> Tensor:
        return self._state[name]


class WeightFiles:
    """All tensors of a model folder."""

    def __init__(self, model_dir: Path) -> None:
        self._model_dir = model_dir
        self._file_of: dict[str, _File] = {}
        for path in _weight_paths(model_dir):
            try:
                file: _File = _SafetensorsFile(path) if path.suffix == ".safetensors" else _TorchFile(path)
            except Exception as error:  # each library has its own error types for a damaged file
                raise ModelError(f"{path} cannot be read: {error}") from error
            for name in file.names():
                self._file_of[name] = file

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def prefix(self, candidates: Sequence[str], probe: str) -> str:
        """The first of `candidates` under which `probe` exists: checkpoints of bare models lack the outer prefix."""
        for candidate in candidates:
            if candidate + probe in self:
                return candidate
        raise ModelError(f"{self._model_dir} lacks tensor {candidates[0]}{probe}")

    def require(self, names: Iterable[str]) -> None:
        """Raise `ModelError` naming every absent tensor at once."""
        if missing := [name for name in names if name not in self]:
            shown = ", ".join(missing[:8]) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
            raise ModelError(f"{self._model_dir} lacks {len(missing)} tensors that its configuration needs: {shown}")

    def read(self, name: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """One tensor in the given dtype on the device."""
        return self.read_rows([name], [shape[0]], shape[1:], dtype, device)

    def read_rows(
        self, names: Sequence[str], rows: Sequence[int], rest: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Several tensors stacked along their first dimension (a fused projection), each copied once into its part."""
        self.require(names)
        fused = torch.empty((sum(rows), *rest), dtype=dtype, device=device)
        first = 0
        for name, count in zip(names, rows, strict=True):
            tensor = self._file_of[name].tensor(name)
            if tuple(tensor.shape) != (count, *rest):
                raise ModelError(
                    f"{self._model_dir}: tensor {name} has shape {tuple(tensor.shape)}, "
                    f"its configuration says {(count, *rest)}"
                )
            fused[first : first + count].copy_(tensor)
            first += count
        return fused


class RandomWeights:
    """Every tensor that is asked for, generated from its name: workers on devices of one kind generate the same model.

    Norms are ones; matrices have rows of length about one, so that values stay finite through any number of layers.
    """

    def __contains__(self, name: str) -> bool:
        return True

    def prefix(self, candidates: Sequence[str], probe: str) -> str:
        return candidates[0]

    def require(self, names: Iterable[str]) -> None:
        return None

    def read(self, name: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        return self.read_rows([name], [shape[0]], shape[1:], dtype, device)

    def read_rows(
        self, names: Sequence[str], rows: Sequence[int], rest: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        fused = torch.empty((sum(rows), *rest), dtype=dtype, device=device)
        first = 0
        for name, count in zip(names, rows, strict=True):
            part = fused[first : first + count]
            generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
            if rest:
                part.normal_(0.0, rest[-1] ** -0.5, generator=generator)
            elif "norm" in name and name.endswith("weight"):
                part.fill_(1.0)
            else:
                part.normal_(0.0, 0.02, generator=generator)
            first += count
        return fused


def _weight_paths(model_dir: Path) -> list[Path]:
    """The folder's weight files: safetensors before PyTorch, an index before a single file."""
    for single, index in (
        ("model.safetensors", "model.safetensors.index.json"),
        ("pytorch_model.bin", "pytorch_model.bin.index.json"),
    ):
        if (model_dir / index).is_file():
            shards = sorted(set(json.loads((model_dir / index).read_text(encoding="utf-8"))["weight_map"].values()))
            if absent := [shard for shard in shards if not (model_dir / shard).is_file()]:
                raise ModelError(f"{model_dir} lacks {', '.join(absent)}, which {index} names")
            return [model_dir / shard for shard in shards]
        if (model_dir / single).is_file():
            return [model_dir / single]
    raise ModelError(f"{model_dir} holds neither model.safetensors nor pytorch_model.bin (nor an index of shards)")
