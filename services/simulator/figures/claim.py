"""What the papers claim and why rows differ, as `configs/reproduction/` says it, and how numbers are compared.

Judged by `verdicts.py`. Measures nothing.
"""

from __future__ import annotations

import enum
import itertools
import re
from dataclasses import dataclass
from functools import cache

import msgspec

from cohort.common.config import CONFIGS_DIR

FOLDER = CONFIGS_DIR / "reproduction"


class Kind(enum.Enum):
    OVER = "over"
    """A factor against another system: 1 = no effect."""
    CHANGE = "change"
    """A change in per cent: 0 = no effect."""
    VALUE = "value"
    """A measured value."""
    AT_MOST = "at_most"
    AT_LEAST = "at_least"
    MORE = "more"
    """The paper says who wins, without a number: ours is above the given value."""
    LESS = "less"
    UNTOLD = "untold"
    """The paper defines it otherwise than we can measure it."""


class Standing(enum.Enum):
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
    """`ids` are ids of figures; `why` says in at most eight words what explains the verdict, `shown_by` is the command
    whose numbers show it: both stand where the verdict is another than reproduced."""

    paper: str
    says: str
    kind: Kind
    ids: tuple[str, ...]
    why: str = ""
    shown_by: str = ""


@cache
def shipped_claims() -> tuple[Claim, ...]:
    papers = msgspec.yaml.decode((FOLDER / "claims.yaml").read_bytes(), type=dict[str, list[dict[str, str]]])
    return tuple(_claim(paper, entry) for paper, entries in papers.items() for entry in entries)


@cache
def shipped_reasons() -> tuple[Reason, ...]:
    entries = msgspec.yaml.decode((FOLDER / "reasons.yaml").read_bytes(), type=list[dict[str, str]])
    return tuple(Reason(expanded(entry.pop("begins")), **entry) for entry in entries)


def _claim(paper: str, entry: dict[str, str]) -> Claim:
    """The entry's key for its ids says how they are compared."""
    kind = next(kind for kind in Kind if kind.value in entry)
    return Claim(paper, kind=kind, ids=expanded(entry.pop(kind.value)), **entry)


def expanded(patterns: str) -> tuple[str, ...]:
    """Names with spaces between them, each expanded as a shell does: `a-{b,c}` is a-b and a-c."""
    parts = [[part.split(",") for part in re.split("[{}]", pattern)] for pattern in patterns.split()]
    return tuple("".join(chosen) for of_pattern in parts for chosen in itertools.product(*of_pattern))
