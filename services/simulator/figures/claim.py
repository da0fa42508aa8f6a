"""A claim of a paper: the figures that answer it, and how its numbers are compared with ours.

Filled in by `claims.py`, judged by `verdicts.py`. Measures nothing.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Kind(enum.Enum):
    """How the paper's number and ours are compared."""

    OVER = enum.auto()
    """A factor against another system: 1 = no effect."""
    CHANGE = enum.auto()
    """A change in per cent: 0 = no effect."""
    VALUE = enum.auto()
    """A measured value."""
    AT_MOST = enum.auto()
    AT_LEAST = enum.auto()
    MORE = enum.auto()
    """The paper says who wins, without a number: ours is above the given value."""
    LESS = enum.auto()
    UNTOLD = enum.auto()
    """The paper defines it otherwise than we can measure it."""


class Standing(enum.Enum):
    """What a row is."""

    CLAIM = enum.auto()
    """A number, a bound or a direction that the paper prints, in the setting chosen for it."""
    READING = enum.auto()
    """The same in another setting: another reading of what the paper leaves open, a stronger baseline, another model,
    a part of ours."""
    ANCHOR = enum.auto()
    """A number that the paper prints, by which a parameter that it does not print was chosen: whether ours is near says
    how well that could be done, and nothing of what was claimed."""
    BESIDE = enum.auto()
    """The paper prints nothing to compare it with."""


@dataclass(frozen=True, slots=True)
class Reason:
    """Why rows whose ids begin so are not reproduced, and the command whose numbers show it. The longest beginning
    counts."""

    begins: tuple[str, ...]
    why: str
    shown_by: str


@dataclass(frozen=True, slots=True)
class Claim:
    """`ids` are ids of figures; `why` says in at most eight words what explains the verdict. `beside`: figures whose
    numbers the page tells there: anchors of the parameters that were chosen, other readings, other cases.
    `shown_by`: the command whose numbers show that reason, told where the verdict is another than reproduced."""

    paper: str
    says: str
    kind: Kind
    ids: tuple[str, ...]
    why: str = ""
    beside: tuple[str, ...] = ()
    shown_by: str = ""
