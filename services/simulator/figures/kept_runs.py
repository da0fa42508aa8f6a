"""Reports of the figures' simulations in a folder: a file for each run and seed, written as soon as it has ended.

Under a digest of what names the run, as `reproduction_results` does with the figures' numbers: a folder belongs to one
version of the code. Called by `figure.Lab`.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Hashable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from cohort import __version__
from cohort.services.simulator.core.report import SimReport


class _Kept(msgspec.Struct, frozen=True):
    key: str
    asked: bool
    """The seed had a part in it."""
    report: SimReport


@dataclass(frozen=True, slots=True)
class KeptRuns:
    folder: Path
    seed: int
    scatter: float | None

    def read(self, key: Hashable) -> tuple[SimReport, bool] | None:
        """The report of that run and whether the seed had a part in it. None: not kept, or of an earlier form."""
        try:
            kept = msgspec.msgpack.decode(self._path(key).read_bytes(), type=_Kept)
        except (FileNotFoundError, msgspec.MsgspecError):
            return None
        return (kept.report, kept.asked) if kept.key == repr(key) else None

    def write(self, key: Hashable, report: SimReport, asked: bool) -> None:
        """Whole or not at all: other processes read the folder. Raises `OSError`."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self._path(key)
        partial = path.with_suffix(f".{os.getpid()}")
        partial.write_bytes(msgspec.msgpack.encode(_Kept(repr(key), asked, report)))
        partial.replace(path)

    def _path(self, key: Hashable) -> Path:
        """Traces that are at hand or not make other workloads."""
        parts = [__version__, repr(key), self.seed, self.scatter, bool(os.environ.get("COHORT_TRACES"))]
        return self.folder / f"{hashlib.sha256(msgspec.json.encode(parts)).hexdigest()[:24]}.run"
