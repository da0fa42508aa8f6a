"""When Python looks for garbage in cycles: rarely, and never at what a process was started with.

`freeze_heap` is called once by a process that has loaded all it serves with. A step of an engine brings each of its
streams a few short objects, none of them in a cycle; by the interpreter's own thresholds these alone have all young
objects looked at several times a step, and all that live at every thousandth. Reference counts free them at once in any
case.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

YOUNG_OBJECTS = 20_000
"""Allocations beyond those freed, until the youngest objects are examined: a few megabytes."""
YOUNGER_FIRST = 20
"""Examinations of younger objects for each of the next older ones."""


def freeze_heap() -> None:
    """Exclude everything alive now from garbage collection, and collect rarely from now on."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, YOUNGER_FIRST, YOUNGER_FIRST)


@contextmanager
def seldom() -> Iterator[None]:
    """Collect as rarely as after `freeze_heap` within the block: a simulation makes and drops objects by the
    hundred."""
    before = gc.get_threshold()
    gc.set_threshold(YOUNG_OBJECTS, YOUNGER_FIRST, YOUNGER_FIRST)
    try:
        yield
    finally:
        gc.set_threshold(*before)
