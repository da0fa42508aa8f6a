"""Groups of layers with the same sliding window, whose KV blocks are given back together.

Asked by the model runner and the simulator, once per model: which layers share a block follows from their windows
alone. Where all layers see equally far there are no groups, and a block is of all layers. Knows no block.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from cohort.common.types import KvGeometry

_EMPTY = 12
"""Bound: one of this many places may be empty. Larger groups mean fewer tables and runs of blocks."""


@dataclass(frozen=True, slots=True)
class LayerGroups:
    """`windows` of the groups, full attention first. `places` of each layer: its group, and its index among a block's
    layers. `layers`: places of a block, equal in every group."""

    windows: tuple[int, ...]
    places: tuple[tuple[int, int], ...]
    layers: int


def layer_groups(windows: Sequence[int]) -> LayerGroups | None:
    """Find the largest groups for layers with these windows (0 = full attention) that leave few places empty; None
    where all windows are equal.

    Gemma 3 1B has 4 full layers and 22 with a window: groups of 4, one and six of them, with two empty places.
    """
    kinds = Counter(windows)
    if len(kinds) < 2:
        return None
    size = next(
        size
        for size in range(max(kinds.values()), 0, -1)
        if all(-count % size * _EMPTY <= count + -count % size for count in kinds.values())
    )
    first, groups = {}, list[int]()
    for window in sorted(kinds, key=lambda window: (window > 0, -window)):
        first[window] = len(groups)
        groups += [window] * -(-kinds[window] // size)
    seen = Counter[int]()
    places = []
    for window in windows:
        group, place = divmod(seen[window], size)
        places.append((first[window] + group, place))
        seen[window] += 1
    return LayerGroups(tuple(groups), tuple(places), size)


def in_groups(geometry: KvGeometry, windows: Sequence[int]) -> KvGeometry:
    """Return the geometry with blocks of layer groups where the windows differ, else as it is."""
    groups = layer_groups(windows)
    if groups is None:
        return geometry
    return replace(geometry, num_layers=groups.layers * len(groups.windows), window=0, groups=groups.windows)
