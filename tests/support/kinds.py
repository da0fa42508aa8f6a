"""Values of a test's parameters, of which the default tier tries some."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from tests.examples import another_of_its_kind


def by_default(values: Iterable[Any], *kept: Any) -> list[Any]:
    """All of them for `parametrize`, a tuple for several parameters. Those not `kept` are nightly: of a kind with
    these."""
    return [value if value in kept else _nightly(value) for value in values]


def in_turn(values: Iterable[Any], of: int) -> list[Any]:
    """As `by_default`, of a product whose innermost factor has `of` values: one of these for each of the rest."""
    every = list(values)
    return by_default(every, *(value for place, value in enumerate(every) if place % of == place // of % of))


def _nightly(value: Any) -> Any:
    return pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=another_of_its_kind())
