"""docs/reproduction.md: a table of claims for each paper, then every row, then what follows from the rows.

Written from new results and from the page as it is: figures that were not measured anew keep their rows.
Every word beside a number is computed from the rows but claims, reasons (`configs/reproduction/`) and the rows' notes.
Runs nothing.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import assert_never

import msgspec

from cohort.services.simulator.figures.claim import Claim, Reason, Standing, shipped_claims, shipped_reasons
from cohort.services.simulator.figures.figure import Figure
from cohort.services.simulator.reproduce.reproduce import (
    MODULES,
    Reproduced,
    conditions,
    shown_paper,
    shown_ratio,
    shown_spread,
)
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

NOTES = "results/reproduction-notes.md"
"""Written by hand, beside the page: why some differ, and what was tried."""
_HEAD = ("workload", "system", "metric", "paper", "ours", "spread", "ratio", "verdict", "note", "id")
_FORMER = 9
"""Columns of the page before rows had ids."""
_SPREAD = re.compile(r"(\S+) to (\S+), (\d+) seeds")
_NUMBER = re.compile(r"-?[0-9.]+(e-?[0-9]+)?|nan")
_WORDS = "Why, and what was tried"
_CONDITION = "- Lengths: "
_PREFIXES = {Standing.READING: "reading: ", Standing.ANCHOR: "anchor: "}
_NO_VERDICT = "–"
_WIDE = 0.1
"""Lowest to highest over the median: wider ones are named."""


class PageRow(msgspec.Struct, frozen=True):
    """A row of the page. Everything but `ours` is the figure's, as it is now; `said` is computed anew."""

    id: str
    system: str
    figure: str
    workload: str
    baseline: str
    metric: str
    """With its unit."""
    paper: float
    shown_paper: str
    ours: Spread
    shown_ratio: str
    said: str
    standing: Standing
    note: str


def markdown(
    results: Iterable[Reproduced],
    figures: Sequence[Figure],
    before: str = "",
    claims: Iterable[Claim] = shipped_claims(),
    reasons: Sequence[Reason] = shipped_reasons(),
) -> str:
    """The page. Rows that `before`, an earlier page, has of figures that are not among the results stay; those of
    figures that a system no longer has do not."""
    places = {figure.id: place for place, figure in enumerate(figures)}
    named = {figure.id: figure for figure in figures}
    known = {figure.system for figure in figures}
    rows: dict[str, dict[str, PageRow]] = {}
    for row in rows_of(before, figures, claims):
        if row.id in places or row.system not in known:
            rows.setdefault(row.system, {})[row.id] = row
    under = _conditions_on(before)
    for result in results:
        figure = named.get(result.id)
        row = _foreign(result) if figure is None else _row(figure, _as_written(result.spread), claims)
        rows.setdefault(row.system, {})[row.id] = row
        under[row.system] = conditions(row.system)
    order = {name: index for index, name in enumerate(MODULES)}
    ordered = [
        sorted(rows[system].values(), key=lambda row: places.get(row.id, len(places)))
        for system in sorted(rows, key=lambda name: order.get(name, len(order)))
    ]
    lines = [
        "# Do we reproduce the papers?",
        "",
        "Written by `cohort reproduce --docs docs/reproduction.md`; nothing here is edited by hand. Every number comes",
        "from the simulator: the policies of the live services under virtual time (docs/guide/simulator.md says what",
        "it models). Ours is the median over seeds, with the lowest and the highest; `ratio` is ours over the paper's.",
        "`cohort reproduce --figure ID` measures a row again.",
        *summary([row for of_system in ordered for row in of_system], figures, claims, reasons),
    ]
    lines += _lacking([figure for figure in figures if figure.id not in rows.get(figure.system, {})])
    for of_system in ordered:
        lines += [*_tables(of_system), *_remarks(of_system, under.get(of_system[0].system, []), reasons)]
    return "\n".join(lines) + "\n"


def _lacking(figures: Sequence[Figure]) -> Iterator[str]:
    """Figures without a row, by paper."""
    if not figures:
        return
    yield from ("", "## Not measured yet", "")
    yield "Their settings are new; `cohort reproduce --paper NAME --docs docs/reproduction.md` adds the rows."
    yield ""
    for system, group in groupby(sorted(figures, key=lambda figure: figure.system), key=lambda figure: figure.system):
        ids = [figure.id for figure in group]
        yield f"- {system}, {len(ids)}: {', '.join(ids)}"


def rows_of(page: str, figures: Sequence[Figure] = (), claims: Iterable[Claim] = shipped_claims()) -> list[PageRow]:
    """The rows of a page's tables, with what their figures are now; also of a page whose rows had no ids yet."""
    named = {figure.id: figure for figure in figures}
    by_words = {_words_of(figure): figure for figure in figures}
    found: list[PageRow] = []
    heading = system = ""
    for line in page.splitlines():
        if line.startswith("## "):
            heading, _, system = line[3:].removesuffix(")").rpartition(" (")
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if not heading or len(cells) not in (_FORMER, len(_HEAD)) or cells[0] == _HEAD[0] or cells[0].startswith("---"):
            continue
        workload, baseline, metric, paper, ours, spread, ratio, said, note = cells[:_FORMER]
        words = (heading, workload, baseline, metric, note)
        figure = named.get(cells[-1]) if len(cells) > _FORMER else by_words.get(words)
        number = _spread(float(ours), spread)
        if figure is not None:
            found.append(_row(figure, number, claims))
            continue
        standing = next((each for each, prefix in _PREFIXES.items() if said.startswith(prefix)), Standing.CLAIM)
        name = cells[-1] if len(cells) > _FORMER else ", ".join(words)
        printed = _NUMBER.search(paper)
        value = float(printed[0]) if printed else math.nan
        said = said.removeprefix(_PREFIXES.get(standing, ""))
        found.append(
            PageRow(
                name, system, heading, workload, baseline, metric, value, paper, number, ratio, said, standing, note
            )
        )
    return found


def _words_of(figure: Figure) -> tuple[str, str, str, str, str]:
    return figure.figure, figure.workload, figure.baseline, f"{figure.metric}, {figure.unit}", figure.note


def _row(figure: Figure, ours: Spread, claims: Iterable[Claim]) -> PageRow:
    return PageRow(
        figure.id,
        figure.system,
        figure.figure,
        figure.workload,
        figure.baseline,
        f"{figure.metric}, {figure.unit}",
        figure.paper,
        shown_paper(figure),
        ours,
        shown_ratio(figure, ours.median),
        row_verdict(kind_of(figure, claims), figure.paper, ours, figure.paper_to),
        figure.standing,
        figure.note,
    )


def _as_written(found: Spread) -> Spread:
    """With the digits of the page, so that what follows from a number follows from it again when it is read."""
    low, median, high = (float(f"{value:.4g}") for value in (found.low, found.median, found.high))
    return Spread(low, median, high, found.seeds)


def _foreign(result: Reproduced) -> PageRow:
    """Of a figure that is not among those of the page."""
    return PageRow(
        result.id,
        result.system,
        result.figure,
        result.workload,
        result.baseline,
        f"{result.metric}, {result.unit}",
        result.paper,
        result.shown_paper,
        result.spread,
        f"{result.ratio:.2f}",
        result.verdict,
        Standing.CLAIM,
        result.note,
    )


def lacking(page: str, figures: Sequence[Figure], seeds: int) -> list[str]:
    """Ids of the figures that a page has no row of, or one of fewer seeds."""
    enough = {row.id for row in rows_of(page, figures) if not 0 < row.ours.seeds < seeds}
    return [figure.id for figure in figures if figure.id not in enough]


def summary(
    rows: Sequence[PageRow],
    figures: Iterable[Figure],
    claims: Iterable[Claim] = shipped_claims(),
    reasons: Sequence[Reason] = shipped_reasons(),
) -> list[str]:
    """A table for each paper, of its claims whose figures all have rows; nothing without any."""
    by_id = {row.id: row for row in rows}
    known = {figure.id: figure for figure in figures}
    tables: dict[str, list[str]] = {}
    counts: Counter[str] = Counter()
    for claim in claims:
        found = [by_id[name] for name in claim.ids if name in known and name in by_id]
        if len(found) < len(claim.ids):
            continue
        said = worst(row.said for row in found)
        counts[said] += 1
        unit = known[claim.ids[0]].unit
        theirs, ours = _range([row.paper for row in found], unit), _ours([row.ours for row in found], unit)
        why = [claim.why] if claim.why else []
        why += [_beside(by_id[name], found[0]) for name in claim.beside if name in by_id]
        if said != REPRODUCED and claim.shown_by:
            why.append(f"shown by `{claim.shown_by}`")
        tables.setdefault(claim.paper, []).append(f"| {claim.says} | {theirs} | {ours} | {said} | {'; '.join(why)} |")
    if not tables:
        return []
    lines = [
        "",
        "## Summary",
        "",
        f"Of {counts.total()} claims: " + ", ".join(f"{counts[said]} {said}" for said in VERDICTS) + ".",
        *_rows_told(rows),
        *_provisional(rows),
        "",
        f"- *{REPRODUCED}*: within {100 * WITHIN:g} % of the paper's number or range; or its bound is kept, or who",
        "  wins (*above*, *below*), where it prints no more than that. A gain has to be one here as well, of",
        f"  {100 * EFFECT:g} % at least and with every seed; 1.12 for 1.35 counts, as the factors are that near,",
        "  although the gain is a third.",
        f"- *{DIRECTION}*: a gain on the paper's side with every seed, of another size.",
        f"- *{MISSED}*: neither, with any seed. Where a claim has several numbers, the worst of them decides.",
        f"- *{UNTOLD}*: the seeds disagree, or it cannot be measured here.",
        "- A *reading* is a number of the paper once more, in another setting: another reading of what the paper",
        "  leaves open, a stronger baseline, another model, a part of ours. The setting of the row that counts follows",
        "  from what the paper says or from its absolute numbers, never from a ratio (`services/simulator/figures/`).",
        "- An *anchor* is a number of the paper by which a parameter that it does not print was chosen, once for all",
        "  of its figures: it does not count.",
        f"- Rows with {_NO_VERDICT} for a verdict compare nothing: the paper prints no number for them.",
    ]
    for paper, table in tables.items():
        lines += [
            "",
            f"### {paper}",
            "",
            *_in_one_line(paper, rows, reasons),
            "| claim | theirs | ours | verdict | why |",
            "|---|---:|---:|---|---|",
            *table,
        ]
    return lines


def _in_one_line(paper: str, rows: Iterable[PageRow], reasons: Sequence[Reason]) -> list[str]:
    """How many of a paper's rows are reproduced, and the reason that stands under most of the others. A row is of the
    paper that its id begins with: a table of baselines alone has its paper's rows, too."""
    counted = [row for row in rows if row.standing is Standing.CLAIM and row.id.startswith(f"{paper.lower()}-")]
    if not counted:
        return []
    others = [row for row in counted if row.said != REPRODUCED]
    agree = len(counted) - len(others)
    line = f"{agree} of {len(counted)} rows reproduced ({_percent(agree, len(counted))})."
    under = Counter(reason.why for row in others if (reason := reason_of(row.id, reasons)) is not None)
    for why, of_them in under.most_common(1):
        most = "most" if 2 * of_them > len(others) else "the largest part"
        line = f"{line[:-1]}; of the other {len(others)}, {most} ({of_them}) have one reason: {_lowered(why)}."
    return [line, ""]


def _lowered(sentence: str) -> str:
    """As it goes on within another; a name in capitals (ORCA, KV) stays one."""
    first = sentence.split()[0]
    return sentence if first.isupper() and len(first) > 1 else sentence[0].lower() + sentence[1:]


def _beside(row: PageRow, of: PageRow) -> str:
    """Another row's number, named by what it has else than the claim's first row, with the paper's if that differs."""
    mine, theirs = ((one.workload, one.baseline, one.metric, one.note) for one in (row, of))
    named = [word for word, other in zip(mine, theirs, strict=True) if word and word != other]
    paper = "" if row.paper == of.paper else f", theirs {row.paper:g}"
    return f"{', '.join(named)}: {row.ours.median:.3g}{paper}"


def _rows_told(rows: Sequence[PageRow]) -> list[str]:
    """How many of the papers' numbers agree, with those that cannot be told and without; readings apart."""
    claims = _standing(rows, Standing.CLAIM)
    readings, anchors = _standing(rows, Standing.READING), _standing(rows, Standing.ANCHOR)
    counts = Counter(row.said for row in claims)
    agree, told = counts[REPRODUCED] + counts[DIRECTION], len(claims) - counts[UNTOLD]
    reproduced, all_rows = counts[REPRODUCED], len(claims)
    lines = [
        f"Of {all_rows} rows, each a number, bound or direction that a paper prints: {_counted(claims)}.",
        f"Reproduced are {_percent(reproduced, all_rows)} of these rows, {_percent(reproduced, told)} of those that",
        f"can be told; with the ones that agree in direction {_percent(agree, all_rows)} and {_percent(agree, told)}.",
    ]
    if readings:
        lines.append(f"Of {len(readings)} other readings of the same numbers: {_counted(readings)}.")
    if anchors:
        lines.append(f"Of {len(anchors)} rows that chose a parameter: {_counted(anchors)}.")
    if beside := len(_standing(rows, Standing.BESIDE)):
        lines.append(f"{beside} more rows compare nothing.")
    return lines


def _standing(rows: Iterable[PageRow], standing: Standing) -> list[PageRow]:
    return [row for row in rows if row.standing is standing]


def _counted(rows: Iterable[PageRow]) -> str:
    counts = Counter(row.said for row in rows)
    return ", ".join(f"{counts[said]} {said}" for said in VERDICTS)


def _percent(part: int, whole: int) -> str:
    return f"{100.0 * part / max(1, whole):.0f} %"


def _provisional(rows: Sequence[PageRow]) -> list[str]:
    single = sum(row.ours.seeds == 1 for row in rows)
    if not single:
        return []
    return [f"{single} of {len(rows)} rows were measured with one seed: their verdicts say nothing of chance yet."]


def _tables(rows: Iterable[PageRow]) -> Iterator[str]:
    for (system, figure), group in groupby(rows, key=lambda row: (row.system, row.figure)):
        yield from ("", f"## {figure} ({system})", "")
        yield "| " + " | ".join(_HEAD) + " |"
        yield "|---|---|---|---:|---:|---:|---:|---|---|---|"
        for row in sorted(group, key=lambda row: row.standing.value):
            yield (
                f"| {row.workload} | {row.baseline} | {row.metric} | {row.shown_paper} | {row.ours.median:.4g} "
                f"| {shown_spread(row.ours)} | {row.shown_ratio} | {_verdict_cell(row)} | {row.note} | {row.id} |"
            )


def _verdict_cell(row: PageRow) -> str:
    match row.standing:
        case Standing.CLAIM:
            return row.said
        case Standing.READING | Standing.ANCHOR:
            return _PREFIXES[row.standing] + row.said
        case Standing.BESIDE:
            return _NO_VERDICT
        case _:
            assert_never(row.standing)


def _conditions_on(page: str) -> dict[str, list[str]]:
    """System → the conditions that an earlier page names."""
    found: dict[str, list[str]] = {}
    system = ""
    for line in page.splitlines():
        if line.startswith("## "):
            system = line.removesuffix(")").rpartition(" (")[2]
        elif line.startswith(_CONDITION):
            found.setdefault(system, []).append(line.removeprefix("- "))
    return found


def _remarks(rows: Sequence[PageRow], under: Sequence[str], reasons: Sequence[Reason]) -> list[str]:
    """What follows from a system's rows as a whole, under which conditions they were measured, and why some differ."""
    claims = _standing(rows, Standing.CLAIM)
    readings, anchors = _standing(rows, Standing.READING), _standing(rows, Standing.ANCHOR)
    lines = [*under]
    for what, counted in (("rows", claims), ("readings", readings), ("anchors", anchors)):
        said = Counter(row.said for row in counted)
        if counted:
            of_them = ", ".join(f"{said[each]} {each}" for each in VERDICTS if said[each])
            lines.append(f"{of_them}, of {len(counted)} {what}.")
    judged = [row for row in rows if row.standing is not Standing.BESIDE]
    drawn = [row for row in judged if row.ours.seeds > 1 and not math.isnan(row.ours.median) and row.ours.median]
    wide = sorted((row for row in drawn if _width(row.ours) > _WIDE), key=lambda row: -_width(row.ours))[:5]
    if wide:
        named = "; ".join(f"{_name(row)} ({shown_spread(row.ours)})" for row in wide)
        lines.append(f"Widest spread over the seeds: {named}.")
    lines += _reasoned(judged, reasons)
    lines.append(f"More, and what was tried, is written by hand: [{NOTES}]({NOTES}).")
    return ["", f"## {_WORDS} ({rows[0].system})", "", *(f"- {line}" for line in lines)] if rows else []


def _reasoned(rows: Iterable[PageRow], reasons: Sequence[Reason]) -> Iterator[str]:
    """Rows that are not reproduced, under the reason for it and the command that shows it."""
    others = [row for row in rows if row.said != REPRODUCED]
    for reason in reasons:
        ids = [row.id for row in others if reason_of(row.id, reasons) is reason]
        if ids:
            yield f"{reason.why}; shown by `{reason.shown_by}`: {', '.join(ids)}."
    if bare := [row.id for row in others if reason_of(row.id, reasons) is None]:
        yield f"Not explained: {', '.join(bare)}."


def reason_of(name: str, reasons: Sequence[Reason] = shipped_reasons()) -> Reason | None:
    """The reason with the longest beginning of a row's id."""
    fitting = [(len(begin), reason) for reason in reasons for begin in reason.begins if name.startswith(begin)]
    return max(fitting, key=lambda found: found[0])[1] if fitting else None


def _name(row: PageRow) -> str:
    return f"{row.figure}, {row.workload}, {row.baseline}, {row.metric}"


def _spread(ours: float, text: str) -> Spread:
    found = _SPREAD.fullmatch(text)
    if found is not None:
        return Spread(float(found[1]), ours, float(found[2]), int(found[3]))
    return Spread(ours, ours, ours, 1 if text == "one seed" else int(text.split()[0]) if "seeds" in text else 0)


def _width(ours: Spread) -> float:
    return (ours.high - ours.low) / abs(ours.median)


def _ours(spreads: Sequence[Spread], unit: str) -> str:
    """Medians, and in brackets how far the seeds go."""
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
