"""The head of a GGUF file, walked and checked against the file's size before the gguf package reads it.

The package believes every count: an array of 2^60 elements in a file of 80 bytes fills all memory, and each element
costs it an object. Called by `gguf_files` and by the process that makes a folder around a file
(`services/launcher/models/gguf_folder.py`), neither of which reads a file that fails here. No torch.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import Any

from cohort.common.errors import ModelError

MOST_TENSORS = 1 << 16  # Llama 3.1 405B has 1,138; DeepSeek-V3 about as many
MOST_FIELDS = 1 << 12  # files have 20 to 60
MOST_ELEMENTS = 1 << 21
"""Elements of all arrays together: Gemma 3's vocabulary of 262,144 tokens, the largest, has 1.3 million in its lists of
tokens, scores, types and merges. Each costs the package some 500 bytes and 15 us."""
MOST_DIMENSIONS = 4  # ggml's
MOST_NAME_BYTES = 1 << 16  # the format's, of a field's name
MOST_ALIGNMENT = 1 << 20
_VERSIONS = (2, 3)
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY, _UINT32 = 8, 9, 4


def open_gguf(path: Path) -> Any:
    """Return the package's reader of a file whose head is sound. Raises `ModelError` naming file and fault."""
    try:
        with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
            _Head(data).check()
        from gguf import GGUFReader

        return GGUFReader(path)
    except (OSError, ValueError, LookupError, TypeError, ArithmeticError, RecursionError, MemoryError) as error:
        why = str(error)[:500] or type(error).__name__  # names may be long
        raise ModelError(f"{path}: not a complete GGUF file: {why}") from error


class _Head:
    """A place in the file's head. Every method raises ValueError for what goes beyond its end."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data, self._size, self._at = data, len(data), 0
        self._elements = 0

    def check(self) -> None:
        if self._take(4, "its magic") != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        version = self._number("I", "its version")
        if version not in _VERSIONS:
            order = " (of the other byte order)" if version & 0xFFFF == 0 else ""
            raise ValueError(f"version {version}{order} is not served; served are 2 and 3")
        tensors, fields = self._number("Q", "its counts"), self._number("Q", "its counts")
        for count, most, least_bytes, what in (
            (tensors, MOST_TENSORS, 32, "tensors"),
            (fields, MOST_FIELDS, 13, "fields of metadata"),
        ):
            if count > most or count * least_bytes > self._size - self._at:
                raise ValueError(f"{count} {what} in a file of {self._size} bytes; at most {most} are served")
        names, alignment = set[str](), 32
        for _ in range(fields):
            name = self._name("a field", names)
            kind, begin = self._number("I", name), self._at
            self._value(name, kind)
            if name == "general.alignment":
                (alignment,) = struct.unpack_from("<I", self._data, begin) if kind == _UINT32 else (0,)
                if not 0 < alignment <= MOST_ALIGNMENT or alignment & (alignment - 1):
                    raise ValueError(f"general.alignment is {alignment}, no power of two up to {MOST_ALIGNMENT}")
        names = set()
        stretches = [self._tensor(names, alignment) for _ in range(tensors)]
        first = -(-self._at // alignment) * alignment
        last_end, last = 0, ""
        for begin, num_bytes, name in sorted(stretches):
            if begin < last_end:
                raise ValueError(f"tensors {last} and {name} overlap")
            last_end, last = begin + num_bytes, name
            if first + last_end > self._size:
                raise ValueError(f"tensor {name} ends at byte {first + last_end}, and it has {self._size}")

    def _value(self, name: str, kind: int) -> None:
        if kind == _STRING:
            self._text(name)
        elif kind == _ARRAY:
            inner, count = self._number("I", name), self._number("Q", name)
            width = 8 if inner == _STRING else struct.calcsize(_SCALARS.get(inner, "x"))
            if inner not in _SCALARS and inner != _STRING:
                raise ValueError(f"{name} is an array of type {inner}, which is not served")
            self._elements += count
            if count * width > self._size - self._at or self._elements > MOST_ELEMENTS:
                raise ValueError(
                    f"{name} is an array of {count} elements in a file of {self._size} bytes; at most {MOST_ELEMENTS} "
                    "in all are served"
                )
            if inner != _STRING:
                self._at += count * width
                return
            for _ in range(count):
                self._skip(self._number("Q", name), name)
        elif kind in _SCALARS:
            self._skip(struct.calcsize(_SCALARS[kind]), name)
        else:
            raise ValueError(f"{name} has type {kind}, which is unknown")

    def _tensor(self, names: set[str], alignment: int) -> tuple[int, int, str]:
        """Return the tensor's place after the head, its bytes and its name."""
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        name = self._name("a tensor", names)
        dimensions = self._number("I", name)
        if not 1 <= dimensions <= MOST_DIMENSIONS:
            raise ValueError(f"tensor {name} has {dimensions} dimensions; served are 1 to {MOST_DIMENSIONS}")
        shape = [self._number("Q", name) for _ in range(dimensions)]
        kind, begin = self._number("I", name), self._number("Q", name)
        block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]  # a ValueError where it is none
        elements = 1
        for size in shape:
            elements *= size
        if not elements or shape[0] % block or begin % alignment:
            raise ValueError(f"tensor {name} of type {kind} has shape {shape} at byte {begin}, which cannot be")
        return begin, elements // block * block_bytes, name

    def _name(self, what: str, names: set[str]) -> str:
        name = self._text(f"the name of {what}", MOST_NAME_BYTES)
        if name in names:
            raise ValueError(f"{name} occurs twice")
        names.add(name)
        return name

    def _text(self, what: str, most: int | None = None) -> str:
        length = self._number("Q", what)
        if most is not None and length > most:
            raise ValueError(f"{what} has {length} bytes; at most {most} are served")
        try:
            return self._take(length, what).decode("utf-8")
        except UnicodeDecodeError:
            raise ValueError(f"{what} is no UTF-8") from None

    def _number(self, kind: str, what: str) -> int:
        (number,) = struct.unpack("<" + kind, self._take(struct.calcsize(kind), what))
        return int(number)

    def _take(self, count: int, what: str) -> bytes:
        begin = self._at
        self._skip(count, what)
        return self._data[begin : self._at]

    def _skip(self, count: int, what: str) -> None:
        if count > self._size - self._at:
            raise ValueError(f"{what} goes {count - (self._size - self._at)} bytes beyond its end at {self._size}")
        self._at += count
