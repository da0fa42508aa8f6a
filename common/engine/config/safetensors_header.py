"""The header of a safetensors file and the index of shards, checked against the file before anything is read by them.

Read by `weights/tensor_files.py`, by `lora_checkpoint`, and by the sums of what fits. Knows no tensor: hence no torch.
"""

from __future__ import annotations

import math
import os
from pathlib import Path, PurePath
from typing import Any, BinaryIO, NamedTuple

from cohort.common.errors import ModelError
from cohort.common.json_files import MOST_INDEX_BYTES, parsed, read_json_object

_LENGTH_BYTES = 8
_MOST_DIMENSIONS = 64  # torch's and numpy's
_MOST_EXTENT = 1 << 48  # elements: more than any disk has
_ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1}
_ITEM_BYTES |= {"I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}


class Entry(NamedTuple):
    """A tensor: `num_bytes` from `offset` of the file on. A dtype that is not known has any number of bytes."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


def read_header(path: Path, stream: BinaryIO) -> dict[str, Entry]:
    """Return all tensors by name: eight bytes with the header's length, the header as JSON, then the tensors' bytes.

    Raises `ModelError` naming the file and the tensor that is beyond its end, overlaps another, or is malformed."""
    try:
        size = os.fstat(stream.fileno()).st_size
        length = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
        if size < _LENGTH_BYTES or length > min(size - _LENGTH_BYTES, MOST_INDEX_BYTES):
            raise ValueError(f"it is truncated or no safetensors file: a header of {length} bytes in a file of {size}")
        raw = b""
        while len(raw) < length and (more := stream.read(length - len(raw))):
            raw += more
        header = parsed(raw, "its header", unique=True)
        header.pop("__metadata__", None)
        first = _LENGTH_BYTES + length
        found = {name: _entry(name, entry, first) for name, entry in header.items()}
        end = max((entry.offset + entry.num_bytes for entry in found.values()), default=first)
        if end > size:
            raise ValueError(f"it is truncated, its header names {end} bytes and it has {size}")
        last_end, last = first, ""
        for name, entry in sorted(found.items(), key=lambda item: item[1].offset):
            if entry.num_bytes and entry.offset < last_end:
                raise ValueError(f"tensors {last} and {name} in its header overlap")
            last_end, last = max(last_end, entry.offset + entry.num_bytes), name
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from None
    return found


def _entry(name: str, entry: Any, first: int) -> Entry:
    """Read one tensor's entry. Raises ValueError."""
    try:
        (begin, end), dtype, shape = entry["data_offsets"], entry["dtype"], entry["shape"]
        numbers = (begin, end, *shape)
        if not isinstance(dtype, str) or not isinstance(shape, list) or not all(type(each) is int for each in numbers):
            raise ValueError("its dtype, place or shape is no such thing")
        if (
            not 0 <= begin <= end
            or len(shape) > _MOST_DIMENSIONS
            or not all(0 <= size <= _MOST_EXTENT for size in shape)
        ):
            raise ValueError("its place or shape cannot be")
        needed = math.prod(shape) * _ITEM_BYTES.get(dtype, 0)
        if dtype in _ITEM_BYTES and needed != end - begin:
            raise ValueError(f"it has {end - begin} bytes, shape {tuple(shape)} of {dtype} needs others")
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"tensor {name[:200]} in its header: {error!r}") from None
    return Entry(dtype, tuple(shape), first + begin, end - begin)


def read_index(path: Path) -> dict[str, str]:
    """Read from an index which file holds each tensor. Raises `ModelError`, also for a file outside of the folder."""
    try:
        named = read_json_object(path, MOST_INDEX_BYTES)["weight_map"]
        for shard in named.values():
            if not isinstance(shard, str) or PurePath(shard).name != shard or "\0" in shard:
                raise ValueError(f"{str(shard)[:80]!r} is no name of a file beside it")
        return dict(named)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{path} cannot be read: {error!r}") from None
