"""docs/reproduction.md: how many rows agree, then a table of claims for each paper.

Made of our numbers, the figures as they are now, and the claims and reasons of `configs/reproduction/`: every other
word beside a number is computed. Runs nothing.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from cohort.services.simulator.figures.figure import Claim, Figure, Reason, Standing
from cohort.services.simulator.reproduce.page_numbers import PageNumbers
from cohort.services.simulator.reproduce.verdicts import (
    DIRECTION,
    EFFECT,
    MISSED,
    REPRODUCED,
    UNTOLD,
    VERDICTS,
    WITHIN,
    Spread,
    kind_of,
    row_verdict,
    worst,
)

_HEAD = """\
# Do we reproduce the papers?

Written by `cohort reproduce --docs docs/reproduction.md`; nothing here is edited by hand. Every number comes
from the simulator: the policies of the live services under virtual time (docs/guide/simulator.md says what
it models). Ours is the median over seeds, with the lowest and the highest. The figure named in the last column shows
why: `cohort reproduce --figure NAME` measures it."""

_LACKING = """\
## Not measured yet

Their settings are new; `cohort reproduce --paper NAME --docs docs/reproduction.md` adds the rows.
"""

_FOOT = """
## Rows and reasons

`reproduction.json` beside this page keeps the lowest, median and highest number of every row, its seeds, and the
conditions of the figures. `cohort reproduce --list --docs docs/reproduction.md` prints the rows with the papers'
numbers and the verdicts, with `--figure ID` some of them; without `--list` it measures them again. Every row that is
not reproduced has a reason in `configs/reproduction/reasons.yaml`, with the command whose numbers show it.

The authors' engines would decide, or absolute numbers that they do not print: vLLM's time between tokens in
EcoServe, the capacities in DynaServe, the attainments of BROS by model."""

_MEANINGS = f"""
- *{REPRODUCED}*: within {100 * WITHIN:g} % of the paper's number or range; or its bound is kept, or who
  wins (*above*, *below*), where it prints no more than that. A gain has to be one here as well, of
  {100 * EFFECT:g} % at least and with every seed.
- *{DIRECTION}*: a gain on the paper's side with every seed, of another size.
- *{MISSED}*: neither, with any seed. Where a claim has several numbers, the worst of them decides.
- *{UNTOLD}*: the seeds disagree, or it cannot be measured here.
- A *reading* is the same number in another setting: what the paper leaves open read otherwise, a stronger
  baseline, another model. The setting of the row that counts follows from what the paper says or from its
  absolute numbers, never from a ratio (`services/simulator/figures/`). A number of the paper by which a
  parameter that it does not print was chosen does not count either."""

_CLAIMS = """\
| claim | theirs | ours | verdict | why; figure |
|---|---:|---:|---|---|"""


@dataclass(frozen=True, slots=True)
class Row:
    figure: Figure
    ours: Spread
    verdict: str


def markdown(stored: PageNumbers, figures: Sequence[Figure], claims: Sequence[Claim], reasons: Sequence[Reason]) -> str:
    rows = rows_of(stored, figures, claims)
    lines = [_HEAD, *_summary(rows, claims, reasons)]
    if missing := [figure for figure in figures if figure.id not in {row.figure.id for row in rows}]:
        lines += ["", _LACKING]
        for system in sorted({figure.system for figure in missing}):
            ids = [figure.id for figure in missing if figure.system == system]
            lines.append(f"- {system}, {len(ids)}: {', '.join(ids)}")
    return "\n".join([*lines, _FOOT]) + "\n"


def rows_of(stored: PageNumbers, figures: Iterable[Figure], claims: Sequence[Claim]) -> list[Row]:
    spreads = stored.spreads()
    return [
        Row(figure, ours, row_verdict(kind_of(figure, claims), figure.paper, ours, figure.paper_to))
        for figure in figures
        if (ours := spreads.get(figure.id)) is not None
    ]


def _summary(rows: Sequence[Row], claims: Iterable[Claim], reasons: Sequence[Reason]) -> Iterator[str]:
    """Yield a table for each paper, of its claims whose figures all have rows; nothing without any."""
    by_id = {row.figure.id: row for row in rows}
    verdicts: list[str] = []
    tables: dict[str, list[str]] = {}
    for claim in claims:
        if by_id.keys() >= set(claim.ids):
            found = [by_id[name] for name in claim.ids]
            verdicts.append(verdict := worst(row.verdict for row in found))
            tables.setdefault(claim.paper, []).append(_claim_line(claim, found, verdict))
    if not tables:
        return
    yield from ("", "## Summary", "", f"Of {len(verdicts)} claims: {_counted(verdicts)}.")
    yield from _row_counts(rows)
    yield _MEANINGS
    for paper, table in tables.items():
        yield from ("", f"### {paper}", "", *_in_one_line(paper, rows, reasons), _CLAIMS, *table)


def _claim_line(claim: Claim, found: Sequence[Row], verdict: str) -> str:
    unit = found[0].figure.unit
    theirs, ours = _range([row.figure.paper for row in found], unit), _ours([row.ours for row in found], unit)
    shown_by = claim.shown_by.removeprefix("cohort reproduce --figure ")
    why = "" if verdict == REPRODUCED else "; ".join(filter(None, (claim.why, shown_by and f"`{shown_by}`")))
    return f"| {claim.statement} | {theirs} | {ours} | {verdict} | {why} |"


def _row_counts(rows: Sequence[Row]) -> Iterator[str]:
    """Count how many of the papers' numbers agree, with those that cannot be told and without; readings apart."""
    verdicts = {standing: [row.verdict for row in rows if row.figure.standing is standing] for standing in Standing}
    counts, of = Counter(verdicts[Standing.CLAIM]), len(verdicts[Standing.CLAIM])
    reproduced, agree, comparable = counts[REPRODUCED], counts[REPRODUCED] + counts[DIRECTION], of - counts[UNTOLD]
    yield f"Of {of} rows, each a number, bound or direction that a paper prints: {_counted(verdicts[Standing.CLAIM])}."
    yield f"Reproduced are {_percent(reproduced, of)} of these rows, {_percent(reproduced, comparable)} of those that"
    yield f"can be told; with the ones that agree in direction {_percent(agree, of)} and {_percent(agree, comparable)}."
    for standing, what in (
        (Standing.READING, "other readings of the same numbers"),
        (Standing.ANCHOR, "rows that chose a parameter"),
    ):
        if others := verdicts[standing]:
            yield f"Of {len(others)} {what}: {_counted(others)}."
    if uncompared := len(verdicts[Standing.UNCOMPARED]):
        yield f"{uncompared} more rows compare nothing."
    if single := sum(row.ours.seeds == 1 for row in rows):
        yield f"{single} of {len(rows)} rows were measured with one seed: their verdicts say nothing of chance yet."


def _in_one_line(paper: str, rows: Iterable[Row], reasons: Sequence[Reason]) -> list[str]:
    """Summarize how many of a paper's rows are reproduced, and the reason of most of the others. A row is of the paper
    that its id begins with: a table of baselines alone has its paper's rows, too."""
    ours = [row for row in rows if row.figure.id.startswith(f"{paper.lower()}-")]
    counted = [row for row in ours if row.figure.standing is Standing.CLAIM]
    if not counted:
        return []
    others = [row for row in counted if row.verdict != REPRODUCED]
    agree = len(counted) - len(others)
    line = f"{agree} of {len(counted)} rows reproduced ({_percent(agree, len(counted))})"
    under = Counter(reason.why for row in others if (reason := reason_of(row.figure.id, reasons)) is not None)
    for why, of_them in under.most_common(1):
        most = "most" if 2 * of_them > len(others) else "the largest part"
        line += f"; of the other {len(others)}, {most} ({of_them}) have one reason: {_lowered(why)}"
    return [f"{line}.", ""]


def _lowered(sentence: str) -> str:
    """Lower the first letter, for use within a sentence; a name in capitals (ORCA, KV) stays."""
    first = sentence.split()[0]
    return sentence if first.isupper() and len(first) > 1 else sentence[0].lower() + sentence[1:]


def reason_of(name: str, reasons: Iterable[Reason]) -> Reason | None:
    """Return the reason with the longest beginning of a row's id."""
    fitting = [(len(begin), reason) for reason in reasons for begin in reason.begins if name.startswith(begin)]
    return max(fitting, key=lambda found: found[0])[1] if fitting else None


def _counted(verdicts: Iterable[str]) -> str:
    counts = Counter(verdicts)
    return ", ".join(f"{counts[each]} {each}" for each in VERDICTS)


def _percent(part: int, whole: int) -> str:
    return f"{100.0 * part / max(1, whole):.0f} %"


def _ours(spreads: Sequence[Spread], unit: str) -> str:
    """Format medians, with the range over seeds in brackets."""
    shown = _range([spread.median for spread in spreads], unit)
    if any(spread.seeds == 1 for spread in spreads):
        return f"{shown} (one seed)"
    low, high = min(spread.low for spread in spreads), max(spread.high for spread in spreads)
    return shown if low == high else f"{shown} ({low:.3g} to {high:.3g})"


def _range(values: Iterable[float], unit: str) -> str:
    numbers = [float(f"{value:.3g}") for value in values]
    if all(map(math.isnan, numbers)):
        return "–"
    low, high = min(numbers), max(numbers)
    return f"{low:g} {unit}" if low == high else f"{low:g} to {high:g} {unit}"
