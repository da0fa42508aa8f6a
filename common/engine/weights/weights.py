"""Finds and reads a model folder's tensors by name: safetensors or PyTorch files, single or sharded.
Or draws them at random, for measuring the shape of a model that is not here.

Called by the lean models at load. A tensor is read by several threads straight into its final (often fused) place and
dtype (`weight_reader`), so no second copy of the model ever stands in memory. Never interprets a name; never needs
transformers.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol, Self

import torch
from torch import Tensor

from cohort.common.engine.config.quantization_config import Quantization
from cohort.common.engine.config.runner_options import WeightKind as WeightKind
from cohort.common.engine.weights.gguf_files import GgufFiles
from cohort.common.engine.weights.quantized_files import QuantizedFiles
from cohort.common.engine.weights.weight_files import WeightFiles
from cohort.common.paths import GGUF_FILE


class Weights(Protocol):
    """A model's tensors by name. A context manager: on a GPU the bytes that were read are there when it ends."""

    def __enter__(self) -> Self: ...

    def __exit__(self, kind: type[BaseException] | None, /, *error: object) -> None: ...

    def __contains__(self, name: str) -> bool: ...

    def prefix(self, candidates: Sequence[str], probe: str) -> str:
        """Return the first of `candidates` under which `probe` exists."""

    def require(self, names: Iterable[str]) -> None:
        """Raise `ModelError` naming every absent tensor at once."""

    def read(self, name: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return one tensor in the given dtype on the device."""

    def read_rows(
        self, names: Sequence[str], rows: Sequence[int], rest: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Return several tensors stacked along their first dimension."""


def open_weights(model_dir: Path, kind: WeightKind, quantization: Quantization | None = None) -> Weights:
    """Open the folder's files, or draw: "random" measures a model's shape without having the model."""
    if kind != "files":
        return RandomWeights()
    if (model_dir / GGUF_FILE).exists():
        return GgufFiles(model_dir / GGUF_FILE)
    files = WeightFiles(model_dir)
    return files if quantization is None else QuantizedFiles(files, quantization)


class RandomWeights:
    """Tensors generated from their names: workers on devices of one kind generate the same model.

    Norms are ones; matrices have rows of length about one, so that values stay finite through any number of layers.
    """

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        return None

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
