"""Shapes that lately lost to the present one, so that a round does not pay for them again under the same load.

While a load rises, fewer workers and other roles lose round after round, and each of their replays costs as much as
that of the shape which is wanted next. Kept by `machine.py`; pure.
"""

from __future__ import annotations

from collections.abc import Iterable

from cohort.common.planning.shape import Shape

_LASTS_S = 300.0
"""After so long a shape is tried again in any case: other things than the load may have changed."""
_LESS = 0.85
"""Of the load under which it lost: it is tried again."""


class Beaten:
    def __init__(self) -> None:
        self._lost: dict[Shape, tuple[float, float]] = {}
        """When, and under what load."""

    def note(self, now_s: float, load: float, shapes: Iterable[Shape]) -> None:
        self._lost |= {shape: (now_s, load) for shape in shapes}

    def others(self, now_s: float, load: float, shapes: Iterable[Shape]) -> list[Shape]:
        """Those that may win. `load` in tokens a second."""
        self._lost = {
            shape: (lost_s, then)
            for shape, (lost_s, then) in self._lost.items()
            if now_s < lost_s + _LASTS_S and load > _LESS * then
        }
        return [shape for shape in shapes if shape not in self._lost]

    def forget(self) -> None:
        """Another shape is the present one."""
        self._lost.clear()
