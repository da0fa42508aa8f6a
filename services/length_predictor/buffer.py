"""The newest finished requests, as training sees them: a bounded first-in-first-out buffer and its array form.

Owned by the training process; filled from the pipe or from the state file. Holds features and lengths only, never
prompts: a person's words cannot be read back from it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cohort.services.length_predictor.features import COMPACT, HASH_DIMS, FeatureVector
from cohort.services.length_predictor.model import Arrays


@dataclass(frozen=True, slots=True)
class Observation:
    """One finished request. `truncated`: cut off at max_tokens, so `output_tokens` is only a lower bound."""

    vector: FeatureVector
    output_tokens: int
    max_tokens: int
    truncated: bool


@dataclass(frozen=True, slots=True)
class Dataset:
    """The buffer as arrays, oldest row first. N-grams in CSR form: row i owns `buckets[offsets[i]:offsets[i + 1]]`."""

    compact: NDArray[np.float32]
    buckets: NDArray[np.uint16]
    counts: NDArray[np.uint8]
    offsets: NDArray[np.int64]
    output_tokens: NDArray[np.int64]
    max_tokens: NDArray[np.int64]
    truncated: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.output_tokens)

    def to_arrays(self) -> Arrays:
        return {f"data_{name}": getattr(self, name) for name in self.__dataclass_fields__}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, NDArray[np.generic]]) -> Dataset:
        """Restore a data set. Raises `ValueError` or `KeyError` if the arrays cannot be one."""
        kinds = (np.float32, np.uint16, np.uint8, np.int64, np.int64, np.int64, np.bool_)
        fields = zip(cls.__dataclass_fields__, kinds, strict=True)
        data = cls(*(arrays[f"data_{name}"].astype(kind) for name, kind in fields))
        data.check()
        return data

    def check(self) -> None:
        rows = len(self.output_tokens)
        if self.compact.shape != (rows, len(COMPACT)) or not np.isfinite(self.compact).all():
            raise ValueError("compact features do not fit")
        if self.max_tokens.shape != (rows,) or self.truncated.shape != (rows,):
            raise ValueError("columns differ in length")
        if (
            self.offsets.shape != (rows + 1,)
            or self.offsets[0] != 0
            or self.offsets[-1] != len(self.buckets)
            or (np.diff(self.offsets) < 0).any()
            or len(self.counts) != len(self.buckets)
        ):
            raise ValueError("n-gram rows do not fit")
        if self.buckets.size and self.buckets.max() >= HASH_DIMS:
            raise ValueError("n-gram bucket outside the table")
        if rows and self.output_tokens.min() < 1:
            raise ValueError("an answer without tokens")


class ObservationBuffer:
    """Bounded buffer; the newest row replaces the oldest."""

    def __init__(self, capacity: int) -> None:
        self._rows: deque[Observation] = deque(maxlen=capacity)

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, row: Observation) -> None:
        self._rows.append(row)

    def dataset(self) -> Dataset:
        rows = self._rows
        sizes = np.fromiter((len(r.vector.buckets) for r in rows), np.int64, len(rows))
        return Dataset(
            compact=np.stack([r.vector.compact for r in rows]) if rows else np.zeros((0, len(COMPACT)), np.float32),
            buckets=np.concatenate([r.vector.buckets for r in rows]) if rows else np.zeros(0, np.uint16),
            counts=np.concatenate([r.vector.counts for r in rows]) if rows else np.zeros(0, np.uint8),
            offsets=np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)]),
            output_tokens=np.fromiter((r.output_tokens for r in rows), np.int64, len(rows)),
            max_tokens=np.fromiter((r.max_tokens for r in rows), np.int64, len(rows)),
            truncated=np.fromiter((r.truncated for r in rows), np.bool_, len(rows)),
        )

    def restore(self, data: Dataset) -> None:
        """Append the rows of a saved data set."""
        for i in range(len(data)):
            owned = slice(int(data.offsets[i]), int(data.offsets[i + 1]))
            vector = FeatureVector(data.compact[i].copy(), data.buckets[owned].copy(), data.counts[owned].copy())
            self.add(Observation(vector, int(data.output_tokens[i]), int(data.max_tokens[i]), bool(data.truncated[i])))
