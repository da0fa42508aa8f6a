"""Starts the process that times steps of this machine's engine: for `cohort profile`, and for checks of a profile.

The process loads the model as a worker does and writes a file of points; nothing here loads torch. What comes of the
points is decided by the callers.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from cohort.common.config import Config, dump_config, load_config
from cohort.common.errors import ConfigError
from cohort.services.simulator.hardware.profile_note import MOVED, CheckPoint, ProfileNote, moved

_CHECK_REPEATS = 7


class _Point(msgspec.Struct, frozen=True):
    median_s: float


class _Points(msgspec.Struct, frozen=True):
    """The part of a profile that a check reads."""

    points: list[_Point]


def run_engine(
    config: Config,
    output: Path,
    *,
    threads: int,
    repeats: int,
    max_context: int,
    model_name: str,
    budget_s: float = float("inf"),
    shapes: Sequence[dict[str, Any]] = (),
) -> int:
    """Writes the points to `output`; the exit status of the process, which says itself what was wrong. `shapes`: these
    alone instead of the usual grid."""
    with tempfile.TemporaryDirectory() as folder:
        merged = Path(folder) / "config.yaml"
        merged.write_text(dump_config(config), encoding="utf-8")
        options = {
            "config": merged,
            "threads": threads,
            "repeats": repeats,
            "max-context": max_context,
            "budget": budget_s,
            "model-name": model_name,
            "output": output.absolute(),
        }
        command = [sys.executable, "-P", "-m", "cohort.common.engine.worker.profile_process"]
        command += [part for name, value in options.items() for part in (f"--{name}", str(value))]
        if shapes:
            command += ["--shapes", msgspec.json.encode(list(shapes)).decode()]
        return subprocess.run(command, check=False).returncode


def measured_again(note: ProfileNote) -> list[float]:
    """Seconds of the profile's own check points, now. Raises `ConfigError` where they cannot be measured."""
    folder = Path(note.model_folder)
    if not folder.is_dir():
        raise ConfigError(f"--check-profile: the profiled model is not here: {folder}")
    shapes = [
        {"rows": point.rows, "tokens_per_row": point.tokens_per_row, "context": point.context} for point in note.points
    ]
    with tempfile.TemporaryDirectory() as place:
        output = Path(place) / "points.json"
        status = run_engine(
            load_config(overrides={"model": {"path": str(folder)}}),
            output,
            threads=note.threads,
            repeats=_CHECK_REPEATS,
            max_context=max(point.context for point in note.points),
            model_name=note.model,
            shapes=shapes,
        )
        if status:
            raise ConfigError(f"--check-profile: the engine ended with {status}")
        return [point.median_s for point in msgspec.json.decode(output.read_bytes(), type=_Points).points]


def check(
    device: str, note: ProfileNote | None, measure: Callable[[ProfileNote], Sequence[float]] = measured_again
) -> str:
    """A line on how fast this machine is beside its profile. Raises `ConfigError` for a device without check points."""
    points: tuple[CheckPoint, ...] = note.points if note is not None else ()
    if note is None or not points:
        raise ConfigError(f"--check-profile: {device} is no profile of `cohort profile --save`")
    change = moved([point.seconds for point in points], measure(note))
    said = (
        f"{device}: steps take {100 * abs(change):.0f} % {'more' if change > 0 else 'less'} than when it was profiled"
    )
    if abs(change) > MOVED:
        return f"warning: {said} on {note.measured_on}; `cohort profile --save {device}` measures again"
    return said
