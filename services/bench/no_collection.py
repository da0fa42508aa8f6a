"""Measuring without garbage collection: it would hit one call in hundreds. Called by measurements of single calls."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collection() -> Iterator[None]:
    """Collects first; nothing is collected within."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
