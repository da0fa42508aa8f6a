"""Whether a paper's headlines are reproduced: the table at the head of docs/reproduction.md.

Called by `reproduce.markdown` with the rows that stand on the page, new ones and those of earlier runs alike. A verdict
follows from the rows; the reason beside it is typed in `figures/claims.py`. Runs no simulation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import assert_never

from cohort.services.simulator.figures.claims import CLAIMS, Claim, Kind
from cohort.services.simulator.figures.figure import Figure

Row = tuple[float, float]
"""The paper's number and ours."""
Key = tuple[str, str, str, str, str]
"""Figure, workload, system, metric with unit, note: what names a row on the page."""

WITHIN = 0.25
"""Of the paper's number: that near counts as reproduced."""
EFFECT = 0.05
"""A factor nearer to 1 than this, or a change nearer to 0 %, is no effect."""
REPRODUCED, DIRECTION, MISSED, UNTOLD = "reproduced", "direction", "not", "cannot be told"


def summary(lines: Iterable[str], figures: Iterable[Figure], claims: Iterable[Claim] = CLAIMS) -> list[str]:
    """The lines of the table, one per claim whose figures all have rows among `lines`; none without any."""
    rows = rows_of(lines)
    units = {figure.id: figure.unit for figure in figures}
    keys = {figure.id: _key(figure) for figure in figures}
    table: list[str] = []
    counts: Counter[str] = Counter()
    for claim in claims:
        found = [rows[keys[name]] for name in claim.ids if name in keys and keys[name] in rows]
        if len(found) < len(claim.ids):
            continue
        said = verdict(claim.kind, found)
        counts[said] += 1
        unit = units[claim.ids[0]]
        theirs, ours = (_range(values, unit) for values in zip(*found, strict=True))
        table.append(f"| {claim.paper} | {claim.says} | {theirs} | {ours} | {said} | {claim.why} |")
    if not table:
        return []
    order = (REPRODUCED, DIRECTION, MISSED, UNTOLD)
    return [
        "",
        "## Summary",
        "",
        f"Of {len(table)} claims: " + ", ".join(f"{counts[said]} {said}" for said in order) + ".",
        "",
        f"- *reproduced*: within {100 * WITHIN:g} % of the paper's number, or its bound is kept. A gain has to be one",
        "  here as well; 1.12 for 1.35 counts, as the factors are that near, although the gain is a third.",
        "- *direction*: a gain on the paper's side, of another size.",
        "- *not*: neither. Where a claim has several numbers, the worst of them decides.",
        "- *cannot be told*: the paper prints no number, or it cannot be measured here.",
        "",
        "| paper | claim | theirs | ours | verdict | why |",
        "|---|---|---:|---:|---|---|",
        *table,
    ]


def verdict(kind: Kind, rows: Iterable[Row]) -> str:
    """All rows have to hold: one that fails decides."""
    said = {_row_verdict(kind, paper, ours) for paper, ours in rows}
    return next(each for each in (UNTOLD, MISSED, DIRECTION, REPRODUCED) if each in said)


def _row_verdict(kind: Kind, paper: float, ours: float) -> str:
    tolerance = WITHIN * abs(paper)
    near = abs(ours - paper) <= tolerance
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
            return REPRODUCED if ours <= paper + tolerance else MISSED
        case Kind.AT_LEAST:
            return REPRODUCED if ours >= paper - tolerance else MISSED
        case Kind.UNTOLD:
            return UNTOLD
        case _:
            assert_never(kind)


def rows_of(lines: Iterable[str]) -> Mapping[Key, Row]:
    """Rows of the page's tables by what names them."""
    rows: dict[Key, Row] = {}
    figure = ""
    for line in lines:
        if line.startswith("## "):
            figure = line[3:].rpartition(" (")[0]
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if figure and len(cells) == 7 and cells[0] != "workload" and not cells[0].startswith("---"):
            workload, system, metric, paper, ours, _, note = cells
            rows[figure, workload, system, metric, note] = float(paper), float(ours)
    return rows


def _key(figure: Figure) -> Key:
    return figure.figure, figure.workload, figure.baseline, f"{figure.metric}, {figure.unit}", figure.note


def _range(values: Iterable[float], unit: str) -> str:
    numbers = [float(f"{value:.3g}") for value in values]
    low, high = min(numbers), max(numbers)
    return f"{low:g} {unit}" if low == high else f"{low:g} to {high:g} {unit}"
