"""The learned state on disk: one npz file, written atomically, read with suspicion.

Called by `trainer_process.py` only. A file of another version or feature layout, or a damaged one, is set aside as
`*.unreadable` and learning starts afresh; a prediction service must never fail to start over its memory. No pickle.
"""

from __future__ import annotations

import io
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cohort.common.errors import CohortError
from cohort.common.keys.private_files import private_folder, write_private
from cohort.services.length_predictor.buffer import Dataset
from cohort.services.length_predictor.features import layout
from cohort.services.length_predictor.model import Arrays, LengthModel

FORMAT = 1
_DAMAGED = (ValueError, LookupError, TypeError, OSError, EOFError, NotImplementedError, zipfile.BadZipFile, zlib.error)


class StateUnreadable(CohortError):
    """The state file is damaged or was written under another format or feature layout."""


@dataclass(frozen=True, slots=True)
class State:
    """State that a restart needs: the newest requests and the model fitted to them (None before the first)."""

    data: Dataset
    model: LengthModel | None


def save(path: Path, state: State) -> None:
    """Save atomically: a reader of `path` sees the old file or the new one."""
    arrays = state.data.to_arrays()
    if state.model is not None:
        arrays |= state.model.to_arrays()
    private_folder(path.parent)
    write_private(path, pack(arrays))


def load(path: Path) -> State | None:
    """Load the state; None if there is none yet. Raises `StateUnreadable`, having moved the file out of the way."""
    if not path.is_file():
        return None
    try:
        arrays = unpack(path.read_bytes())
        data = Dataset.from_arrays(arrays)
        return State(data, LengthModel.from_arrays(arrays) if "weights" in arrays else None)
    except _DAMAGED as error:
        aside = path.with_name(f"{path.name}.unreadable")
        path.replace(aside)
        raise StateUnreadable(f"{path}: {error}; kept as {aside.name}") from error


def pack(arrays: Mapping[str, NDArray[Any]]) -> bytes:
    """Pack arrays into npz bytes with format and feature layout; they also cross the pipe to the serving process."""
    stream = io.BytesIO()
    everything: dict[str, Any] = {"format": np.asarray(FORMAT), "layout": np.asarray(layout()), **arrays}
    np.savez(stream, **everything)
    return stream.getvalue()


def unpack(data: bytes) -> Arrays:
    with np.load(io.BytesIO(data), allow_pickle=False) as archive:
        arrays: Arrays = {name: archive[name] for name in archive.files}
    if int(arrays.pop("format").item()) != FORMAT:
        raise ValueError("written by another version")
    if str(arrays.pop("layout").item()) != layout():
        raise ValueError("learned from other features")
    return arrays
