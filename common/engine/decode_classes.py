"""Which decode steps are kept ready as recorded graphs: batch-size classes, and the memory their graphs may take.

Called by `static_decode` at start (what to record, in which order, when to stop) and in every step (which class takes
the step). Plain arithmetic: no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def batch_classes(max_rows: int) -> tuple[int, ...]:
    """Numbers of rows that steps are padded to, ascending; the last is `max_rows`.

    Every power of two up to 8, then steps of 8 up to 64 and of an eighth to a quarter of the size beyond: a padded row
    costs little where the weights dominate, while every class costs start-up time.
    """
    sizes = {1, 2, 4, *range(8, 65, 8), 80, 96, 112, 128, 160, 192, 224, 256}
    size = 256
    while size < max_rows:
        sizes.update(size + size // 4 * part for part in range(1, 5))
        size *= 2
    return tuple(sorted({min(size, max_rows) for size in sizes}))


def class_for(rows: int, classes: Iterable[int]) -> int | None:
    """The smallest of `classes` that holds `rows`; None when none does."""
    return min((size for size in classes if size >= rows), default=None)


def capture_order(classes: Sequence[int]) -> tuple[int, ...]:
    """Largest first: its memory pool then serves all smaller ones, and the budget cuts off only small classes,
    whose steps a larger class can take."""
    return tuple(sorted(classes, reverse=True))


class CaptureBudget:
    """Device memory that recorded graphs may take together."""

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.spent_bytes = 0

    def admits(self, estimate_bytes: int) -> bool:
        """Whether another graph of about this size may be tried."""
        return self.spent_bytes + estimate_bytes <= self.budget_bytes

    def spend(self, cost_bytes: int) -> bool:
        """Account what a graph really took; False when that was too much, and it has to be given up again."""
        cost_bytes = max(0, cost_bytes)
        if self.spent_bytes + cost_bytes > self.budget_bytes:
            return False
        self.spent_bytes += cost_bytes
        return True
