"""What a device file that `cohort profile --save` wrote says of its own making, and whether that still holds.

A profile is of one machine, one model and one version of engine and kernels. Asked by the commands that simulate on
such a device; only warns. `run_engine` starts the process that times steps of this machine's engine, for a check of a
profile and for `cohort profile`: it loads the model as a worker does and writes a file of points; nothing here loads
torch.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import msgspec

from cohort import __version__
from cohort.common.code_fingerprint import engine_digest, model_digest
from cohort.common.config import Config, dump_config, load_config
from cohort.common.errors import ConfigError

_CHECK_REPEATS = 7
MOVED = 0.15
"""Of the profiled time: a machine whose steps take that much more or less is another one."""


class CheckPoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A step that is measured again where it is asked for; the fields are those of a profile's shape."""

    rows: int
    tokens_per_row: int
    context: int
    seconds: Annotated[float, msgspec.Meta(gt=0)]


class ProfileNote(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`engine`, `model_digest`: `common/code_fingerprint.py`. `points`: what a check measures again."""

    version: str
    engine: str
    model: str
    model_folder: str
    model_digest: str
    threads: int
    measured_on: str
    machine: str
    points: tuple[CheckPoint, ...] = ()

    @staticmethod
    def fingerprint(folder: Path) -> dict[str, Any]:
        return {
            "version": __version__,
            "engine": engine_digest(),
            "model_folder": str(folder),
            "model_digest": model_digest(folder),
        }

    def outdated(self) -> Iterator[str]:
        """What has changed since, each as the end of a sentence. A model folder that is not here is no change."""
        now = self.fingerprint(Path(self.model_folder))
        if now["version"] != self.version:
            yield f"version {self.version} made it, this is {now['version']}"
        if now["engine"] != self.engine:
            yield "engine or kernels have changed since"
        if now["model_digest"] and now["model_digest"] != self.model_digest:
            yield f"the model in {self.model_folder} has changed since"


def warnings(device: str, note: ProfileNote | None) -> list[str]:
    """Lines for a person; empty where a profile is as new as the code, or the device is none of a profile."""
    if note is None:
        return []
    return [
        f"{device}, profiled on {note.measured_on}: {reason}; `cohort profile --save {device}` measures again"
        for reason in note.outdated()
    ]


def moved(profiled_s: Sequence[float], measured_s: Sequence[float]) -> float:
    """How much longer steps take than when they were profiled: the median over the points, 0.1 = a tenth longer."""
    return median(now_s / before_s for before_s, now_s in zip(profiled_s, measured_s, strict=True)) - 1.0


class _Point(msgspec.Struct, frozen=True):
    median_s: float


class _Points(msgspec.Struct, frozen=True):
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
