"""Classes of step sizes that are recorded as graphs, and the memory their graphs may take.

Called by `static_decode` and `static_mixed` at start (what to record, in which order, when to stop) and in every step
(which class takes it). Plain arithmetic: no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

_LEAST_PROMPT_TOKENS = 16
_MOST_PROMPT_TOKENS = 1024


class MixedClass(NamedTuple):
    """Steps of up to `rows` rows, prompts included, with up to `prompt_tokens` tokens of prompts."""

    prompt_tokens: int
    rows: int

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.rows


StepClass = int | MixedClass | None
"""Class of a step: a number of decode rows, a class with prompts, or nothing that is recorded."""


class RecordedClasses(NamedTuple):
    decode: tuple[int, ...] = ()
    mixed: tuple[MixedClass, ...] = ()


def batch_classes(max_rows: int) -> tuple[int, ...]:
    """Return the numbers of rows that steps are padded to, ascending; the last is `max_rows`. Every power of two up to
    8, then steps of 8 up to 64 and of an eighth to a quarter of the size beyond: a padded row costs little where the
    weights dominate, while every class costs start-up time."""
    sizes = {1, 2, 4, *range(8, 65, 8), 80, 96, 112, 128, 160, 192, 224, 256}
    size = 256
    while size < max_rows:
        sizes.update(size + size // 4 * part for part in range(1, 5))
        size *= 2
    return tuple(sorted({min(size, max_rows) for size in sizes}))


def class_for(rows: int, classes: Iterable[int]) -> int | None:
    """Return the smallest of `classes` that holds `rows`; None if none does."""
    return min((size for size in classes if size >= rows), default=None)


def mixed_classes(max_rows: int, max_tokens: int, worthwhile: Callable[[int], bool]) -> tuple[MixedClass, ...]:
    """Return sizes of steps with prompts that are recorded, of at most `max_tokens` tokens, ascending. Prompt tokens
    are padded to a power of two, rows to 8, 32, 128 … or `max_rows`: each class is a graph for every combination.
    `worthwhile(tokens)`: whether launching a step's kernels takes longer than the device does."""
    prompts, rows = [_LEAST_PROMPT_TOKENS], [8]
    while prompts[-1] < _MOST_PROMPT_TOKENS:
        prompts.append(2 * prompts[-1])
    while rows[-1] < max_rows:
        rows.append(4 * rows[-1])
    every = [MixedClass(tokens, min(count, max_rows)) for tokens in prompts for count in rows]
    return tuple(sorted({each for each in every if each.tokens <= max_tokens and worthwhile(each.tokens)}))


def mixed_class_for(prompt_tokens: int, rows: int, classes: Iterable[MixedClass]) -> MixedClass | None:
    """Return the class with the fewest tokens of `classes` that hold such a step; None if none does."""
    fitting = [each for each in classes if each.prompt_tokens >= prompt_tokens and each.rows >= rows]
    return min(fitting, key=lambda each: (each.tokens, each), default=None)


def capture_order(classes: Sequence[int]) -> tuple[int, ...]:
    """Return the classes, largest first: its memory pool then serves all smaller ones, and the budget cuts off only
    small classes, whose steps a larger class can take."""
    return tuple(sorted(classes, reverse=True))


class CaptureBudget:
    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.spent_bytes = 0

    def admits(self, estimate_bytes: int) -> bool:
        """Return whether another graph of about this size may be tried."""
        return self.spent_bytes + estimate_bytes <= self.budget_bytes

    def spend(self, cost_bytes: int) -> bool:
        """Account what a graph really took. Return False if that was too much, and it must be dropped again."""
        cost_bytes = max(0, cost_bytes)
        if self.spent_bytes + cost_bytes > self.budget_bytes:
            return False
        self.spent_bytes += cost_bytes
        return True
