"""The files by which a test and a `held_worker` speak; that one loads the engine, which a test need not."""

from __future__ import annotations

from pathlib import Path

import msgspec


class Hold(msgspec.Struct, frozen=True):
    """`tokens` to be sent from when a step first sees this; `requests` of which each has one then."""

    tokens: int
    requests: int = 0


def hold_file(run_dir: Path, instance: str) -> Path:
    return run_dir / f"{instance}.hold"


def held_file(run_dir: Path, instance: str) -> Path:
    return run_dir / f"{instance}.held"


def content(file: Path) -> bytes:
    """Empty where there is no such file: the other end may take it away at any time."""
    try:
        return file.read_bytes()
    except FileNotFoundError:
        return b""
