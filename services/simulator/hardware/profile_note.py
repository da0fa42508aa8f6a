"""What a device file that `cohort profile --save` wrote says of its own making, and whether that still holds.

A profile is of one machine, one model and one version of engine and kernels. Asked by the commands that simulate on
such a device; only warns.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from cohort import __version__
from cohort.common.code_fingerprint import engine_digest, model_digest


class ProfileNote(msgspec.Struct, frozen=True):
    """`engine`, `model_digest`: `common/code_fingerprint.py`."""

    version: str
    engine: str
    model: str
    model_folder: str
    model_digest: str
    threads: int
    measured_on: str
    machine: str

    @staticmethod
    def fingerprint(folder: Path) -> dict[str, Any]:
        return {
            "version": __version__,
            "engine": engine_digest(),
            "model_folder": str(folder),
            "model_digest": model_digest(folder),
        }

    def outdated(self) -> Iterator[str]:
        """Yield what has changed since, each as the end of a sentence. A model folder that is not here is no change."""
        now = self.fingerprint(Path(self.model_folder))
        if now["version"] != self.version:
            yield f"version {self.version} made it, this is {now['version']}"
        if now["engine"] != self.engine:
            yield "engine or kernels have changed since"
        if now["model_digest"] and now["model_digest"] != self.model_digest:
            yield f"the model in {self.model_folder} has changed since"


def warnings(device: str, note: ProfileNote | None) -> list[str]:
    """Return lines for a person; empty where a profile is as new as the code, or the device has none."""
    if note is None:
        return []
    return [
        f"{device}, profiled on {note.measured_on}: {reason}; `cohort profile --save {device}` measures again"
        for reason in note.outdated()
    ]
