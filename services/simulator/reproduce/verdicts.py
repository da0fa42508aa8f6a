"""Whether a paper's number is reproduced: by rule, from our numbers of several seeds.

Called by `reproduce` for every row and by `reproduction_page` for the claims at the head of docs/reproduction.md. The
reason beside a claim is written in `configs/reproduction/claims.yaml`, the verdict nowhere. Runs no simulation.

Every seed has a verdict of its own, and the row's is theirs where they agree. Between *reproduced* and *direction* the
median decides; wherever else seeds disagree the row cannot be told: a gain that chance may give or take is none.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import assert_never

from cohort.services.simulator.figures.figure import Claim, Figure, Kind, Standing, shipped_claims

WITHIN = 0.25
"""Share of the paper's number: that near counts as reproduced."""
EFFECT = 0.05
"""A factor nearer to 1 than this, or a change nearer to 0 %, is no effect."""
REPRODUCED, DIRECTION, MISSED, UNTOLD = "reproduced", "direction", "not", "cannot be told"
VERDICTS = (REPRODUCED, DIRECTION, MISSED, UNTOLD)


@dataclass(frozen=True, slots=True)
class Spread:
    """Range of our number: its lowest, median and highest value of `seeds` seeds; 0 seeds: chance has no part in it."""

    low: float
    median: float
    high: float
    seeds: int

    @staticmethod
    def of(values: Sequence[float], *, deterministic: bool = False) -> Spread:
        """Summarize values; NaN unless all are finite. Raises `statistics.StatisticsError` without values."""
        if not all(map(math.isfinite, values)):
            return Spread(math.nan, math.nan, math.nan, len(values))
        seeds = 0 if deterministic else len(values)
        return Spread(min(values), statistics.median(values), max(values), seeds)


def worst(verdicts: Iterable[str]) -> str:
    """Return the worst verdict: all rows have to hold."""
    found = set(verdicts)
    return next(each for each in (MISSED, UNTOLD, DIRECTION, REPRODUCED) if each in found)


def row_verdict(kind: Kind, paper: float, ours: Spread, paper_to: float | None = None) -> str:
    """Judge one row. The extremes stand for all seeds: what holds for both holds between them."""
    if math.isnan(ours.median) or math.isnan(paper):
        return UNTOLD
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
    change = figure.unit == "%" and any(word in figure.metric for word in ("change", "lost"))
    if figure.unit == "x":
        return Kind.OVER if abs(figure.paper - 1.0) >= EFFECT else Kind.NOT_COMPARABLE
    return Kind.CHANGE if change else Kind.VALUE


def _one(kind: Kind, printed: tuple[float, float], ours: float) -> str:
    """Judge one number. `printed`: what the paper prints, from the end nearer to no effect on."""
    paper, low, high = printed[0], min(printed), max(printed)
    least_near, most_near = low - WITHIN * abs(low), high + WITHIN * abs(high)
    near = least_near <= ours <= most_near
    match kind:
        case Kind.OVER | Kind.CHANGE:
            neutral, least = (1.0, EFFECT) if kind is Kind.OVER else (0.0, 100 * EFFECT)
            effect = ours - neutral if paper > neutral else neutral - ours
            if effect < least:
                return MISSED
            return REPRODUCED if near else DIRECTION
        case Kind.VALUE:
            return REPRODUCED if near else MISSED
        case Kind.AT_MOST:
            return REPRODUCED if ours <= most_near else MISSED
        case Kind.AT_LEAST:
            return REPRODUCED if ours >= least_near else MISSED
        case Kind.MORE | Kind.LESS:
            won = ours - paper if kind is Kind.MORE else paper - ours
            return REPRODUCED if won >= EFFECT * (abs(paper) or 100.0) else MISSED
        case Kind.NOT_COMPARABLE:
            return UNTOLD
        case _:
            assert_never(kind)
