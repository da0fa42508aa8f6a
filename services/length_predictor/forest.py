"""Boosted trees as flat arrays: what scikit-learn fits, evaluated for one row in microseconds without it.

Called by `model.py` for every prediction; built by `training.py`. Plain arrays also persist without pickle.
Never trains. scikit-learn's own `predict` takes about a millisecond per model and row; this walks all trees of all
models side by side, one NumPy step per level.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Forest:
    """Several ensembles ("outputs") over the same features.

    Node i of a tree goes to `left[i]` if `features[feature[i]] <= threshold[i]`, else to `right[i]`; a leaf points
    to itself and holds `value[i]`. `roots[k]` starts tree k, which adds to output `output[k]`; `base` is each
    output's constant. `depth` levels reach every leaf.
    """

    feature: NDArray[np.int32]
    threshold: NDArray[np.float64]
    left: NDArray[np.int32]
    right: NDArray[np.int32]
    value: NDArray[np.float64]
    roots: NDArray[np.int32]
    output: NDArray[np.int32]
    base: NDArray[np.float64]
    depth: int

    @classmethod
    def of(cls, arrays: Mapping[str, NDArray[Any]], depth: int) -> Forest:
        """Make a forest from arrays of any width. Raises `KeyError` if one is missing."""
        columns: dict[str, Any] = {
            name: arrays[name].astype(np.float64 if name in ("threshold", "value", "base") else np.int32)
            for name in cls.__dataclass_fields__
            if name != "depth"
        }
        return cls(**columns, depth=depth)

    def evaluate(self, row: NDArray[np.float32]) -> NDArray[np.float64]:
        """Return the raw score of every output for one row."""
        node = self.roots
        for _ in range(self.depth):
            goes_left = row[self.feature[node]] <= self.threshold[node]
            node = np.where(goes_left, self.left[node], self.right[node])
        return self.base + np.bincount(self.output, weights=self.value[node], minlength=len(self.base))

    def check(self) -> None:
        """Raise `ValueError` if the arrays cannot be a forest; for state that comes from a file."""
        nodes = len(self.feature)
        if not all(len(a) == nodes for a in (self.threshold, self.left, self.right, self.value)):
            raise ValueError("node arrays differ in length")
        if len(self.roots) != len(self.output) or not 0 <= self.depth <= 64 or not np.isfinite(self.base).all():
            raise ValueError("trees do not fit the outputs")
        for name, array, limit in (
            ("left", self.left, nodes),
            ("right", self.right, nodes),
            ("roots", self.roots, nodes),
            ("output", self.output, len(self.base)),
        ):
            if array.size and not (array.min() >= 0 and array.max() < limit):
                raise ValueError(f"{name} points outside")
        if self.feature.size and self.feature.min() < 0:
            raise ValueError("negative feature index")
        if not np.isfinite(self.value).all():
            raise ValueError("leaf values are not finite")
