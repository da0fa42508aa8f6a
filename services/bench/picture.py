"""The frame of every picture of the measuring wing; matplotlib is imported only when one is asked for."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cohort.common.errors import ConfigError

COLOURS = ("#1f6feb", "#d1571b", "#2b8a3e", "#8e44ad", "#b8860b", "#c2255c")


@contextlib.contextmanager
def picture(path: Path, rows: int, columns: int, title: str) -> Iterator[Any]:
    """Axes [rows][columns] to draw into; written when the body ends. Raises `ConfigError` for an unknown suffix."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with pyplot.rc_context(
        {"axes.grid": True, "grid.alpha": 0.3, "axes.spines.top": False, "axes.spines.right": False, "font.size": 9}
    ):
        size = (5.5 * columns, 3.75 * rows)
        figure, axes = pyplot.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False)
        try:
            yield axes
            figure.suptitle(title, fontsize=10)
            figure.savefig(path, dpi=130)
        except ValueError as error:
            raise ConfigError(f"--plot {path}: {error}") from error
        finally:
            pyplot.close(figure)
