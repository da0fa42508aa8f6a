"""Files of tensors: which tensors they hold, and their elements.

Called by `weights`. A damaged file is named with what is wrong about it, before anything is read where its size and
header tell. Safetensors files are read by offset, so that several threads read one file at once; PyTorch's are mapped.
Never interprets a tensor's name.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from cohort.common.engine.config.safetensors_header import Entry, read_header
from cohort.common.engine.weights.weight_reader import Source
from cohort.common.errors import ModelError

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class StoredTensor(Source, Protocol):
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int: ...

    def check(self) -> None:
        """Raise `ModelError` for elements of a kind that is not served."""


class TensorFile(Protocol):
    @property
    def path(self) -> Path: ...

    @property
    def tensors(self) -> Mapping[str, StoredTensor]: ...


def open_tensor_file(path: Path) -> TensorFile:
    """Open a file of tensors. Raises `ModelError` naming it and what is wrong with it."""
    return _SafetensorsFile(path) if path.suffix == ".safetensors" else _TorchFile(path)


class _Stretch:
    """A tensor in a safetensors file: `num_bytes` from `offset` on."""

    def __init__(self, file: _SafetensorsFile, name: str, entry: Entry) -> None:
        known = _DTYPES.get(entry.dtype)
        self.dtype: torch.dtype = known or torch.uint8
        self.shape, self.num_bytes, self.offset = entry.shape, entry.num_bytes, entry.offset
        self._unknown = "" if known else entry.dtype
        self._file, self._name = file, name

    def check(self) -> None:
        if self._unknown:
            raise ModelError(f"{self._file.path}: tensor {self._name} has dtype {self._unknown}, which is not served")

    def fill(self, target: Tensor, first: int) -> None:
        bytes_ = memoryview(cast(Any, target.view(torch.uint8).numpy()))
        done, offset = 0, self.offset + first * target.itemsize
        while done < len(bytes_):
            try:
                count = os.preadv(self._file.descriptor, [bytes_[done:]], offset + done)
            except OSError as error:
                raise ModelError(f"{self._file.path} cannot be read: {error}") from error
            if count == 0:
                raise ModelError(
                    f"{self._file.path} ends within tensor {self._name}: it was shortened while it was read"
                )
            done += count


class _SafetensorsFile:
    """A file whose header is read when it is opened, and whose tensors by offset."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = path.open("rb", buffering=0)
        except OSError as error:
            raise ModelError(f"{path} cannot be read: {error}") from error
        self.descriptor = self._file.fileno()
        header = read_header(path, self._file)
        self.tensors = {name: _Stretch(self, name, entry) for name, entry in header.items()}


class _Mapped:
    """A tensor of a PyTorch file."""

    def __init__(self, tensor: Tensor) -> None:
        self._flat = tensor.contiguous().view(-1)
        self.dtype, self.shape = tensor.dtype, tuple(tensor.shape)
        self.num_bytes = self._flat.numel() * self.dtype.itemsize

    def check(self) -> None:
        return None

    def fill(self, target: Tensor, first: int) -> None:
        target.copy_(self._flat[first : first + len(target)])


class _TorchFile:
    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            # weights_only: nothing but tensors is unpickled
            state: dict[str, Tensor] = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except Exception as error:  # torch has many error types for a damaged file
            raise ModelError(f"{path} cannot be read: {error}") from error
        self.tensors = {name: _Mapped(tensor) for name, tensor in state.items()}
