"""Whether a paper's number is reproduced: by rule, from our numbers of several seeds.

Called by `reproduce` for every row and by `reproduction_page` for docs/reproduction.md. The reason beside a row is
written in `configs/reproduction/reasons.yaml`, the verdict nowhere. Runs no simulation.

    factor, change   the effect is its logarithm: reproduced is half to double of the printed one
    value            within a quarter of the printed one
    range            inside it, or as near as that to both of its ends
    bound            kept, without slack
    who wins         a class of its own: no size is compared

Every seed has a verdict of its own, and the row's is theirs where they agree. Between *reproduced* and *direction* the
median decides; wherever else seeds disagree the row is unclear: a gain that chance may give or take is none.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import assert_never

from cohort.services.simulator.figures.figure import Claim, Figure, Kind, Standing, shipped_claims

WITHIN = 0.25
"""Share of a printed value: that near counts as reproduced."""
TIMES = 2.0
"""Factor between our effect and the printed one within which it counts as reproduced, either way."""
EFFECT = 0.05
"""A factor nearer to 1 than this, or a change nearer to 0 %, is no effect."""
EXERCISED = 1.0
"""Percentage of requests that have to use a mechanism: a number of a mechanism that hardly any uses says nothing."""
REPRODUCED, WON, DIRECTION, MISSED = "reproduced", "wins", "direction", "not"
UNTOLD, UNEXERCISED = "unclear", "unexercised"
VERDICTS = (REPRODUCED, WON, DIRECTION, MISSED, UNTOLD, UNEXERCISED)


@dataclass(frozen=True, slots=True)
class Spread:
    """Range of our number: its lowest, median and highest value of `seeds` seeds; 0 seeds: chance has no part in it.
    `exercised`: median percentage of requests that used the mechanism it is about; None: of none in particular."""

    low: float
    median: float
    high: float
    seeds: int
    exercised: float | None = None

    @staticmethod
    def of(values: Sequence[float], *, deterministic: bool = False, exercised: Sequence[float] = ()) -> Spread:
        """Summarize values; NaN unless all are finite. Raises `statistics.StatisticsError` without values."""
        used = statistics.median(exercised) if exercised else None
        if not all(map(math.isfinite, values)):
            return Spread(math.nan, math.nan, math.nan, len(values), used)
        seeds = 0 if deterministic else len(values)
        return Spread(min(values), statistics.median(values), max(values), seeds, used)


def worst(verdicts: Iterable[str]) -> str:
    """Return the worst verdict: all rows have to hold."""
    found = set(verdicts)
    return next(each for each in (MISSED, UNTOLD, UNEXERCISED, DIRECTION, WON, REPRODUCED) if each in found)


def row_verdict(kind: Kind, paper: float, ours: Spread, paper_to: float | None = None) -> str:
    """Judge one row. The extremes stand for all seeds: what holds for both holds between them."""
    if math.isnan(ours.median) or math.isnan(paper):
        return UNTOLD
    if ours.exercised is not None and ours.exercised < EXERCISED and kind is not Kind.NOT_COMPARABLE:
        return UNEXERCISED
    printed = (paper, paper if paper_to is None else paper_to)
    of_seeds = [_one(kind, printed, value) for value in (ours.low, ours.median, ours.high)]
    if set(of_seeds) <= {REPRODUCED, DIRECTION} or len(set(of_seeds)) == 1:
        return of_seeds[1]
    return UNTOLD


def kind_of(figure: Figure, claims: Iterable[Claim] | None = None) -> Kind:
    """Return how a row's numbers are compared: as the figure, the claim that names it (None: of the shipped ones) or
    its unit says. A factor of 1, or a change of nothing, is no effect that could be reproduced."""
    if figure.standing is Standing.UNCOMPARED:
        return Kind.NOT_COMPARABLE
    if figure.kind is not None:
        return figure.kind
    for claim in shipped_claims() if claims is None else claims:
        if figure.id in claim.ids:
            return claim.kind
    if figure.unit == "x":
        return Kind.OVER if abs(figure.paper - 1.0) >= EFFECT else Kind.NOT_COMPARABLE
    return Kind.CHANGE if figure.unit == "%" and "change" in figure.metric else Kind.VALUE


def _one(kind: Kind, printed: tuple[float, float], ours: float) -> str:
    """Judge one number. `printed`: what the paper prints, from the end nearer to no effect on."""
    paper = printed[0]
    match kind:
        case Kind.OVER | Kind.CHANGE:
            neutral, least = (1.0, EFFECT) if kind is Kind.OVER else (0.0, 100 * EFFECT)
            if (ours - neutral if paper > neutral else neutral - ours) < least:
                return MISSED
            return REPRODUCED if _alike([_effect(kind, end) for end in printed], _effect(kind, ours)) else DIRECTION
        case Kind.VALUE:
            low, high = min(printed), max(printed)
            slack = [(end - WITHIN * abs(end), end + WITHIN * abs(end)) for end in printed]
            near = all(least <= ours <= most for least, most in slack)
            return REPRODUCED if near or low <= ours <= high else MISSED
        case Kind.AT_MOST:
            return REPRODUCED if ours <= paper else MISSED
        case Kind.AT_LEAST:
            return REPRODUCED if ours >= paper else MISSED
        case Kind.MORE | Kind.LESS:
            won = ours - paper if kind is Kind.MORE else paper - ours
            return WON if won >= EFFECT * (abs(paper) or 100.0) else MISSED
        case Kind.NOT_COMPARABLE:
            return UNTOLD
        case _:
            assert_never(kind)


def _effect(kind: Kind, number: float) -> float:
    """Return the logarithm of a factor, or of the factor that a change in per cent is."""
    factor = number if kind is Kind.OVER else 1.0 + number / 100.0
    return math.log(factor) if factor > 0.0 else -math.inf


def _alike(printed: Sequence[float], ours: float) -> bool:
    """Return whether an effect, of the sign of the printed ones, lies between them or within `TIMES` of both."""
    sizes = sorted(map(abs, printed))
    return sizes[0] <= abs(ours) <= sizes[-1] or sizes[-1] / TIMES <= abs(ours) <= sizes[0] * TIMES
