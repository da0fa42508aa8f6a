"""Files of tensors: which tensors they hold, and their elements.

Called by `weights`. A damaged file is named with what is wrong about it, before anything is read where its size and
header tell. Safetensors files are read by offset, so that several threads read one file at once; PyTorch's are mapped.
Never interprets a tensor's name.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from cohort.common.engine.weights.weight_reader import Source
from cohort.common.errors import ModelError

_LENGTH_BYTES = 8
_LONGEST_HEADER = 100_000_000  # as the format says
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

    def __init__(self, file: _SafetensorsFile, name: str, entry: Any, data_offset: int) -> None:
        """`entry`: what the header says of it. Raises ValueError, KeyError or TypeError where that is no tensor."""
        begin, end = entry["data_offsets"]
        known = _DTYPES.get(entry["dtype"])
        self.dtype: torch.dtype = known or torch.uint8
        self.shape: tuple[int, ...] = tuple(entry["shape"])
        if not 0 <= begin <= end or not all(isinstance(extent, int) and extent >= 0 for extent in self.shape):
            raise ValueError("its place or shape is no such thing")
        self.num_bytes: int = end - begin
        if known is not None and math.prod(self.shape) * known.itemsize != self.num_bytes:
            raise ValueError(f"it has {self.num_bytes} bytes, shape {self.shape} of {entry['dtype']} needs others")
        self._unknown = "" if known else str(entry["dtype"])
        self.offset = data_offset + begin
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
    """Eight bytes with the header's length, the header as JSON, then the tensors' bytes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = path.open("rb", buffering=0)
            self.descriptor = self._file.fileno()
            size = os.fstat(self.descriptor).st_size
            header, data_offset = self._header(size)
        except (OSError, ValueError) as error:
            raise ModelError(f"{path} cannot be read: {error}") from error
        self.tensors: dict[str, _Stretch] = {}
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            try:
                self.tensors[name] = _Stretch(self, name, entry, data_offset)
            except (KeyError, TypeError, ValueError) as error:
                raise ModelError(f"{path} cannot be read: tensor {name} in its header: {error!r}") from error
        end = max((stretch.offset + stretch.num_bytes for stretch in self.tensors.values()), default=data_offset)
        if end > size:
            raise ModelError(f"{path} cannot be read: it is truncated, its header names {end} bytes and it has {size}")

    def _header(self, size: int) -> tuple[dict[str, Any], int]:
        """Read the header; return it, and where the tensors' bytes begin."""
        length = int.from_bytes(self._file.read(_LENGTH_BYTES), "little")
        if size < _LENGTH_BYTES or length > min(size - _LENGTH_BYTES, _LONGEST_HEADER):
            raise ValueError(f"it is truncated or no safetensors file: a header of {length} bytes in a file of {size}")
        raw = b""
        while len(raw) < length and (more := self._file.read(length - len(raw))):
            raw += more
        header = json.loads(raw)  # a ValueError where it is none
        if not isinstance(header, dict):
            raise ValueError("its header is no JSON object")
        return header, _LENGTH_BYTES + length


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
