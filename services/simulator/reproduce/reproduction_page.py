"""docs/reproduction.md: how many rows agree, then a table of claims for each paper, the constants, and what is missing.

Made of judged rows and of what `configs/reproduction/` says: every verdict and number is computed. Runs nothing.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from cohort.services.simulator.figures.figure import Claim, Constant, Figure, Kind
from cohort.services.simulator.reproduce.judged_rows import Row, Rules
from cohort.services.simulator.reproduce.verdicts import (
    DIRECTION,
    EFFECT,
    EXERCISED,
    MISSED,
    REPRODUCED,
    UNEXERCISED,
    UNTOLD,
    WITHIN,
    WON,
    worst,
)

_HEAD = """\
# Do we reproduce the papers?

Written by `cohort reproduce --docs docs/reproduction.md`, by rule; nothing is edited by hand. Numbers are medians over
seeds, with the extremes in brackets, of [simulations](guide/simulator.md). `reproduction.json` beside this page has
every row: class, verdict, the constants it rests on, and why it is not reproduced, with the command that shows it.
"""

_CLASSES = f"""
## Classes

- *{REPRODUCED}*: a factor, or a change as a factor, whose logarithm is half to double of the printed one's, and a gain
  of {100 * EFFECT:g} % at least with every seed; a value within {100 * WITHIN:g} %; a range where ours is inside,
  or as near as that to both ends; a bound that is kept, without slack.
- *{WON}*: the paper says who wins, without a number, and it does. One claim and group of models counts once.
- *{DIRECTION}*: a gain on the paper's side with every seed, of another size. *{MISSED}*: neither, with any seed.
- *{UNTOLD}*: the seeds disagree, or it cannot be measured here.
- *{UNEXERCISED}*: fewer than {EXERCISED:g} % of the requests were split, or borrowed KV: the mechanism was
  not exercised, and the number says nothing of it.
- \\*: rests on a constant that a figure chose ([below](#constants-chosen-by-figures)), and does not count.
- A *reading* is a number in another setting; rows that chose a constant count nowhere.

The worst row decides a claim of several. The {{count}} rows are fixed by id in `configs/reproduction/denominator.yaml`.
"""

_FOOT = """
A paper's page ([index](papers.md)) has its settings and differences. `cohort reproduce --list --docs
docs/reproduction.md` prints all rows; without `--list` it measures them."""


def markdown(
    rows: Sequence[Row], figures: Sequence[Figure], rules: Rules, unmapped: Mapping[str, str] | None = None
) -> str:
    lines = [_HEAD, *_headline(rows, rules), _CLASSES.format(count=len(rules.denominator))]
    by_id = {row.figure.id: row for row in rows}
    for paper in dict.fromkeys(claim.paper for claim in rules.claims):
        told = [claim for claim in rules.claims if claim.paper == paper and by_id.keys() >= set(claim.ids)]
        table = [_claim_line(claim, [by_id[name] for name in claim.ids]) for claim in told]
        head = (
            ["|claim|theirs|ours|verdict|", "|---|---:|---:|---|"] if table else ["No claim has all of its rows yet."]
        )
        lines += [f"## {paper}", "", *_most_common_reason(paper, rows), *head, *table, ""]
    lines += _constants(rules.constants)
    lines += _missing([figure for figure in figures if figure.id not in by_id], unmapped or {})
    return "\n".join([*lines, _FOOT]) + "\n"


def _headline(rows: Sequence[Row], rules: Rules) -> Iterator[str]:
    """Yield how many of the papers' numbers are reproduced: of all that were laid down, measured or not."""
    counted = [row for row in rows if row.figure.id in rules.denominator]
    of, mine = len(rules.denominator), sum(_counts(row) for row in counted)
    yield f"**Of {of} rows that compare a printed number or range, {mine} are reproduced ({_percent(mine, of)}).**"
    resting = sum(row.verdict == REPRODUCED for row in counted) - mine
    yield f"{resting} more agree but rest on a constant that a figure chose (\\*), so they do not count."
    yield from ("", "|paper|rows|reproduced|\\*|direction|not|unclear|unexercised|no number|")
    yield "|---|" + "---:|" * 8
    for paper in dict.fromkeys(claim.paper for claim in rules.claims):
        ids = [name for name in rules.denominator if name.startswith(f"{paper.lower()}-")]
        of_paper = [row for row in counted if row.figure.id in ids]
        verdicts, own = Counter(row.verdict for row in of_paper), sum(map(_counts, of_paper))
        others = (verdicts[each] for each in (DIRECTION, MISSED, UNTOLD, UNEXERCISED))
        cells = (len(ids), own, verdicts[REPRODUCED] - own, *others, len(ids) - len(of_paper))
        yield f"|{paper}|{'|'.join(map(str, cells))}|"
    yield ""
    yield from _other_classes(rows, rules)


def _other_classes(rows: Sequence[Row], rules: Rules) -> Iterator[str]:
    """Yield the classes that are no part of the headline, in one sentence each."""
    by_id = {row.figure.id: row for row in rows}
    bounds = [row for row in rows if row.class_ == "bound"]
    yield f"Bounds: {_shares(bounds)}."
    wins = [claim for claim in rules.claims if claim.kind in (Kind.MORE, Kind.LESS) and by_id.keys() >= set(claim.ids)]
    found = [worst(by_id[name].verdict for name in claim.ids) for claim in wins]
    resting = sum(
        verdict == WON and any(by_id[name].rests_on for name in claim.ids)
        for claim, verdict in zip(wins, found, strict=True)
    )
    yield f"Who wins: {found.count(WON)} of {len(wins)} claims hold, {resting} of them \\*."
    for class_, what in (("added", "Rows added since"), ("reading", "Other readings")):
        if others := [row for row in rows if row.class_ == class_]:
            yield f"{what}: {_shares(others)}."
    if single := sum(row.ours.seeds == 1 for row in rows):
        yield f"{single} of {len(rows)} rows were measured with one seed: their verdicts say nothing of chance yet."


def _shares(rows: Sequence[Row]) -> str:
    agree = sum(row.verdict in (REPRODUCED, WON) for row in rows)
    return f"{agree} of {len(rows)} agree, {agree - sum(map(_counts, rows))} of them \\*"


def _counts(row: Row) -> bool:
    return row.verdict in (REPRODUCED, WON) and not row.rests_on


def _most_common_reason(paper: str, rows: Iterable[Row]) -> list[str]:
    """Return why most of a paper's rows of the denominator that are not reproduced are not."""
    others = [row for row in rows if row.class_ == "counted" and row.figure.id.startswith(f"{paper.lower()}-")]
    reasons = [row.reason.why for row in others if row.reason is not None]
    return [f"{count} of {len(reasons)} that do not agree: {why}.\n" for why, count in Counter(reasons).most_common(1)]


def _claim_line(claim: Claim, found: Sequence[Row]) -> str:
    unit = found[0].figure.unit
    papers = [end for row in found for end in (row.figure.paper, row.figure.paper_to) if end is not None]
    verdict = worst(row.verdict for row in found)
    shown = next((row.shown_verdict for row in found if row.verdict == verdict and row.rests_on), verdict)
    bound = {Kind.AT_MOST: "≤ ", Kind.AT_LEAST: "≥ "}.get(claim.kind, "")
    theirs = "" if claim.kind in (Kind.MORE, Kind.LESS) else bound + _range(papers, unit)
    ours = _range([row.ours.median for row in found], unit)
    ends = _range([end for row in found for end in (row.ours.low, row.ours.high)])
    spread = "" if ours == f"{ends} {unit}" else f" ({ends})"
    return f"|{claim.statement}|{theirs}|{ours}{spread}|{shown}|"


def _constants(constants: Sequence[Constant]) -> Iterator[str]:
    yield from ("## Constants chosen by figures", "")
    yield from ("|constant|value|chosen by|rows on it|", "|---|---:|---|---|")
    for each in constants:
        under = f"`{each.rows}`" + (f" without `{each.without}`" if each.without else "") if each.rows else "none"
        file = "/".join(each.file.split("/")[-2:])
        yield f"|{each.what}, `{each.name}` in {file}|{each.value}|{each.chosen_by}|{under}|"


def _missing(lacking: Sequence[Figure], unmapped: Mapping[str, str]) -> Iterator[str]:
    yield from ("", "## Not measured", "", "Printed, and compared by no row:", "")
    yield from (f"- **{paper}**: {numbers}" for paper, numbers in unmapped.items())
    if lacking:
        systems = Counter(figure.system for figure in lacking)
        counts = ", ".join(f"{system} {count}" for system, count in sorted(systems.items()))
        yield from ("", f"Rows without a number yet, as their settings are new (`--lacking` measures them): {counts}.")


def _percent(part: int, whole: int) -> str:
    return f"{100.0 * part / max(1, whole):.0f} %"


def _range(values: Iterable[float], unit: str = "") -> str:
    numbers = [float(f"{value:.3g}") for value in values]
    if all(map(math.isnan, numbers)):
        return "–"
    low, high = min(numbers), max(numbers)
    return (f"{low:g}" if low == high else f"{low:g}…{high:g}") + (f" {unit}" if unit else "")
