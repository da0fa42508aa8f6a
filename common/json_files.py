"""JSON of a model's folder, which a stranger wrote: an object, of bounded length, or one clear sentence.

Called wherever a file of a model folder or of an adapter is read. What the object says is judged by its reader.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from cohort.common.errors import ModelError

MOST_BYTES = 16 << 20
"""Bytes of a configuration; the longest known, with lists of modules that are not quantised, have 2 MB. Python's
objects take up to twenty times that."""
MOST_INDEX_BYTES = 100_000_000
"""Bytes of an index of shards or a header of a safetensors file, as that format says; 200,000 tensors take 20 MB."""


def parsed(raw: bytes, what: str = "it", *, unique: bool = False) -> dict[str, Any]:
    """Return the object. `what`: the text's name in errors; `unique`: a key that occurs twice is one.

    Raises ValueError."""
    try:
        data = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique if unique else None)
    except RecursionError:
        raise ValueError(f"{what} has values that are nested too deeply") from None
    if not isinstance(data, dict):
        raise ValueError(f"{what} is no JSON object but a {type(data).__name__}")
    return data


def read_json_object(file: Path, most_bytes: int = MOST_BYTES) -> dict[str, Any]:
    """Read a file that holds one JSON object. Raises `ModelError` naming it, FileNotFoundError where it is absent."""
    try:
        if not file.is_file():
            raise FileNotFoundError(file) if not file.exists() else ValueError("it is no regular file")
        with file.open("rb") as stream:
            raw = stream.read(most_bytes + 1)
        if len(raw) > most_bytes:
            raise ValueError(f"it is longer than {most_bytes} bytes")
        return parsed(raw)
    except FileNotFoundError:
        raise
    except json.JSONDecodeError as error:
        raise ModelError(f"{file} cannot be read: not valid JSON: {error}") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{file} cannot be read: {error}") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} occurs twice")
    return found
