"""When Python looks for garbage in cycles: rarely, and never at what a process was started with.

Called once by a process that has loaded all it serves with. A step of an engine brings each of its streams a few short
objects, none of them in a cycle; by the interpreter's own thresholds these alone have all young objects looked at
several times a step, and all that live at every thousandth. Reference counts free them at once in any case.
"""

from __future__ import annotations

import gc

YOUNG_OBJECTS = 20_000
"""Allocated beyond those freed, until the youngest are looked at: a few megabytes."""
YOUNGER_FIRST = 20
"""Looks at younger objects for each at the next older ones."""


def settle() -> None:
    """What lives now lives on: it is looked at no more."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, YOUNGER_FIRST, YOUNGER_FIRST)
