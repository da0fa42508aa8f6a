"""One checkpoint as it lies in its files: names, shapes and bytes of tensors, read where they are asked for.

Opened by `weights.open_weights`; `quantized_files` reads codes and scales through it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from cohort.common.engine.config.safetensors_header import read_index
from cohort.common.engine.weights.tensor_files import StoredTensor, TensorFile, open_tensor_file
from cohort.common.engine.weights.weight_reader import Progress, WeightReader, place
from cohort.common.errors import ModelError


class WeightFiles:
    """All tensors of a model folder."""

    def __init__(self, model_dir: Path) -> None:
        """Open the files. Raises `ModelError` naming the file that is missing or damaged, and what is wrong with it."""
        self._model_dir = model_dir
        self._file_of: dict[str, TensorFile] = {}
        self._reader: WeightReader | None = None
        paths, self._index, named = _weight_paths(model_dir)
        files = [open_tensor_file(path) for path in paths]
        for file in files:
            self._file_of.update(dict.fromkeys(file.tensors, file))
        for name, path in named.items():
            if name not in next(file for file in files if file.path == path).tensors:
                raise ModelError(f"{path} lacks tensor {name}, which {self._index} says it holds")
        self._num_bytes = sum(stored.num_bytes for file in files for stored in file.tensors.values())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if self._reader is not None:
            if kind is None:
                self._reader.finish()
            else:
                self._reader.abandon()
            self._reader = None

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def stored(self, name: str) -> StoredTensor:
        """Return one of its tensors as it lies in its file."""
        return self._file_of[name].tensors[name]

    def where(self, name: str) -> Path:
        """Return the file of one of its tensors."""
        return self._file_of[name].path

    def prefix(self, candidates: Sequence[str], probe: str) -> str:
        """Return the first of `candidates` under which `probe` exists: files of bare models lack the outer prefix."""
        for candidate in candidates:
            if candidate + probe in self:
                return candidate
        raise ModelError(f"{self._model_dir} lacks tensor {candidates[0]}{probe}")

    def require(self, names: Iterable[str]) -> None:
        """Raise `ModelError` naming every absent tensor at once."""
        if missing := [name for name in names if name not in self]:
            shown = ", ".join(missing[:8]) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
            where = f"; {self._index} does not name them" if self._index else ""
            raise ModelError(
                f"{self._model_dir} lacks {len(missing)} tensors that its configuration needs: {shown}{where}"
            )

    def read(self, name: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        return self.read_rows([name], [shape[0]], shape[1:], dtype, device)

    def read_rows(
        self, names: Sequence[str], rows: Sequence[int], rest: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Read several tensors stacked along their first dimension (a fused projection), each once into its part.

        On a GPU the bytes are there at the end of the context, elsewhere on return.
        """
        self.require(names)
        fused = place((sum(rows), *rest), dtype, device)
        first, sources = 0, []
        for name, count in zip(names, rows, strict=True):
            stored = self.stored(name)
            stored.check()
            self.check_shape(name, (count, *rest))
            sources.append((stored, fused[first : first + count]))
            first += count
        self._reading(device).read(sources)
        return fused

    def read_stored(self, name: str, device: torch.device) -> Tensor:
        """Read one tensor in its own shape and dtype, there on return."""
        stored = self.stored(name)
        stored.check()
        tensor = place((math.prod(stored.shape),), stored.dtype, device)
        reader = self._reading(device)
        reader.read([(stored, tensor)])
        reader.wait_read()
        return tensor.view(stored.shape)

    def check_shape(self, name: str, shape: Sequence[int]) -> None:
        """Raise `ModelError` where a tensor has another shape."""
        if (found := self.stored(name).shape) != tuple(shape):
            raise ModelError(
                f"{self._model_dir}: tensor {name} has shape {found}, its configuration says {tuple(shape)}"
            )

    def _reading(self, device: torch.device) -> WeightReader:
        if self._reader is None:
            self._reader = WeightReader(device, Progress(self._num_bytes))
        return self._reader


def _weight_paths(model_dir: Path) -> tuple[list[Path], str, dict[str, Path]]:
    """Return the folder's weight files, the name of their index ("" without one), and which file it says holds a
    tensor: safetensors before PyTorch, an index before a single file."""
    for single, index in (
        ("model.safetensors", "model.safetensors.index.json"),
        ("pytorch_model.bin", "pytorch_model.bin.index.json"),
    ):
        if (model_dir / index).is_file():
            named = read_index(model_dir / index)
            shards = sorted(set(named.values()))
            if absent := [shard for shard in shards if not (model_dir / shard).is_file()]:
                raise ModelError(f"{model_dir} lacks {', '.join(absent)}, which {index} names")
            return [model_dir / shard for shard in shards], index, {n: model_dir / s for n, s in named.items()}
        if (model_dir / single).is_file():
            return [model_dir / single], "", {}
    raise ModelError(f"{model_dir} holds neither model.safetensors nor pytorch_model.bin (nor an index of shards)")
