"""Digests of the engine's code and kernels, and of a model: a measured profile depends on them beside the machine.

Called where a profile is written, and where one is read that may have outlived them.
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
    """Compute the digest of engine and kernels: it changes with every edit that may change the time of a step."""
    digest = hashlib.sha256()
    for folder, patterns in _PARTS:
        for path in sorted(file for pattern in patterns for file in (_ROOT / folder).rglob(pattern)):
            digest.update(f"{path.relative_to(_ROOT).as_posix()}\0".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()[:_DIGITS]


def model_digest(folder: Path) -> str:
    """Compute the digest of a model's configuration, names and sizes of its weights; "" without such a folder."""
    if not folder.is_dir():
        return ""
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.name == "config.json":
            digest.update(path.read_bytes())
        elif path.suffix in (".safetensors", ".bin", ".gguf"):
            digest.update(f"{path.name}\0{path.stat().st_size}\0".encode())
    return digest.hexdigest()[:_DIGITS]
