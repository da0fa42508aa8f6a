"""What a measurement of this machine depends on beside the machine: the engine's code and kernels, and the model.

Asked where a profile is written, and where one is read that may have outlived them. Reads files; decides nothing.
"""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

_ROOT = Path(__file__).parents[1]
_PARTS = (("common/engine", ("*.py",)), ("kernels", ("*.py", "*.cpp", "*.h", "*.hpp", "*.cu")))
_DIGITS = 16


@cache
def engine_digest() -> str:
    """Of the source of engine and kernels: it changes with every edit that may change what a step takes."""
    digest = hashlib.sha256()
    for folder, patterns in _PARTS:
        for path in sorted(file for pattern in patterns for file in (_ROOT / folder).rglob(pattern)):
            digest.update(f"{path.relative_to(_ROOT).as_posix()}\0".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()[:_DIGITS]


def model_digest(folder: Path) -> str:
    """Of a model folder: its configuration, names and sizes of its weights. "" where there is no such folder."""
    if not folder.is_dir():
        return ""
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.name == "config.json":
            digest.update(path.read_bytes())
        elif path.suffix in (".safetensors", ".bin", ".gguf"):
            digest.update(f"{path.name}\0{path.stat().st_size}\0".encode())
    return digest.hexdigest()[:_DIGITS]
