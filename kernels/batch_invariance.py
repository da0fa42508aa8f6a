"""Whether layers made now give a row the same bits with any other rows, on a GPU, too (ADR 14).

Read by layers when they are made, and stored there: two models of a process may differ (`engine.batch_invariant` holds
for the one that answers, not for one that drafts). On a processor layers compute so anyway and do not ask.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

_in_force: ContextVar[bool] = ContextVar("batch_invariant", default=False)


@dataclass(frozen=True, slots=True)
class FixedProduct:
    """A product over a plain weight as `gpu.fixed_products` is compiled for it."""

    outputs: int
    inputs: int
    biased: bool


_made: dict[FixedProduct, None] = {}


def in_force() -> bool:
    return _in_force.get()


@contextmanager
def batch_invariant(wanted: bool) -> Iterator[None]:
    """Set whether layers made within the context are batch-invariant."""
    token = _in_force.set(wanted)
    try:
        yield
    finally:
        _in_force.reset(token)


def is_to_be_compiled(product: FixedProduct) -> None:
    """Record a product for `fixed_products_made`."""
    _made[product] = None


def fixed_products_made() -> tuple[FixedProduct, ...]:
    """Return the products of all layers of this process so far, each kind once."""
    return tuple(_made)
