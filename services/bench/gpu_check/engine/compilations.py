"""How many kernels Triton makes ready after the moment from which none should be: each is a standstill while serving.

Counts what the process meets for the first time, also where the disk's cache has it: a fresh machine has no such cache.
Called by the sections that serve a mixed workload after the warm-up. On a processor nothing is counted.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


class Compilations:
    """`names` of the kernels, one for each new variant; `countable` False: this Triton tells nothing."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.countable = False

    def note(self, **told: Any) -> None:
        """Triton's hook; its arguments differ between versions."""
        described = told.get("fn")
        self.names.append(str(getattr(described, "name", None) or told.get("repr", "a kernel"))[:120])

    def words(self) -> str:
        counts = {name: self.names.count(name) for name in dict.fromkeys(self.names)}
        return ", ".join(f"{name} x {count}" for name, count in counts.items()) or "none"


@contextlib.contextmanager
def counted() -> Iterator[Compilations]:
    """Within, Triton tells of every variant that it makes ready."""
    compilations = Compilations()
    try:
        from triton import knobs

        runtime: Any = knobs.runtime
        before = runtime.jit_post_compile_hook
    except (ImportError, AttributeError):
        yield compilations
        return
    compilations.countable = True

    def hook(*_: Any, **told: Any) -> None:
        compilations.note(**told)

    runtime.jit_post_compile_hook = hook
    try:
        yield compilations
    finally:
        runtime.jit_post_compile_hook = before
