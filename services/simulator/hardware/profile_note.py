"""What a device file that `cohort profile --save` wrote says of its own making, and whether that still holds.

A profile is of one machine, one model and one version of engine and kernels. Asked by the commands that simulate on
such a device; only warns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import msgspec

from cohort import __version__
from cohort.common.code_fingerprint import engine_digest, model_digest

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
        """The fields that say which code and model were measured."""
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
