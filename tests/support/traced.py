"""Which functions of the product run: their calls in order, on every thread that starts behind `recording`.

A profile function of the interpreter's, so it sees compiled calls of Python alone; what is made of a class without a
function of its own (records, tuples) is no call.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PARTS = tuple(f"{ROOT}/{part}/" for part in ("common", "services", "kernels"))


@dataclass
class Trace:
    """`on`: calls count. `calls`: of each function, by its file below the root and its qualified name, in the order of
    the first calls."""

    on: bool = False
    calls: dict[tuple[str, str], int] = field(default_factory=dict)

    @property
    def files(self) -> list[str]:
        return list(dict.fromkeys(file for file, _ in self.calls))

    def note(self, frame: FrameType, event: str, _: Any) -> None:
        if self.on and event == "call" and (function := _function(frame.f_code)) is not None:
            self.calls[function] = self.calls.get(function, 0) + 1


@contextmanager
def recording() -> Iterator[Trace]:
    """Opened before what is to be seen starts its threads; nothing counts until `on`."""
    trace, before = Trace(), sys.getprofile()
    threading.setprofile(trace.note)
    sys.setprofile(trace.note)
    try:
        yield trace
    finally:
        sys.setprofile(before)
        threading.setprofile(None)  # type: ignore[arg-type]


@cache
def _function(code: CodeType) -> tuple[str, str] | None:
    """None: not the product's, or none that has a name (a module's own lines, a comprehension)."""
    file = os.path.realpath(code.co_filename)
    if not file.startswith(PARTS) or code.co_name.startswith("<"):
        return None
    return str(Path(file).relative_to(ROOT)), code.co_qualname
