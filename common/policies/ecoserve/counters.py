"""What EcoServe's scheduler counts. Kept by `TimeSynced`, told in its metrics."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    iterations: int = 0
    formations: int = 0
    quiet: int = 0
    borrowed: int = 0
    late: int = 0
    stopped: int = 0
    continued: int = 0
    forced: int = 0
