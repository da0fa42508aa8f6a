"""A comparison as a table: on a terminal, and as Markdown for a page; the columns of live runs as Markdown alone."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import msgspec
from rich.table import Table

from cohort.common.comparison.comparison import CellResult, Row


class Comparison(msgspec.Struct, frozen=True):
    description: str
    rows: list[Row]


def table(found: Comparison) -> Table:
    """Show the % of all requests that kept their SLO: mean (lowest-highest over the seeds), and how many any scheduler
    could have kept at most."""
    systems = _systems(found)
    shown = Table(title=found.description, caption="% of all requests that kept their whole SLO: mean (lowest-highest)")
    shown.add_column("workload")
    shown.add_column("load", justify="right")
    shown.add_column("at most", justify="right")
    for system in systems:
        shown.add_column(system, justify="right")
    for line in _lines(found, systems):
        shown.add_row(*line)
    return shown


def group_tables(found: Comparison) -> list[Table]:
    """Show the same by class, by SLO and by length, each where there are several, and the longest waits."""
    systems = _systems(found)
    tables = []
    for question in dict.fromkeys(question for row in found.rows for question in row.groups):
        shown = Table("workload", "load", question, *systems, title=f"% kept by {question}")
        for row in found.rows:
            groups = row.groups.get(question, {})
            for group, shares in groups.items() if len(groups) > 1 else ():
                cells = [f"{100 * shares[name]:.1f}" if name in shares else "–" for name in systems]
                shown.add_row(row.workload, f"{row.load:g}", group, *cells)
        if shown.row_count:
            tables.append(shown)
    waits = Table("workload", "load", *systems, title="longest wait for a first token, a refusal or the end, s")
    for row in found.rows:
        cells = [f"{row.longest_wait_s[name]:.1f}" if name in row.longest_wait_s else "–" for name in systems]
        waits.add_row(row.workload, f"{row.load:g}", *cells)
    return [*tables, waits]


def markdown(found: Comparison) -> str:
    systems = _systems(found)
    head = ["workload", "load", "at most", *systems]
    title = "% of all requests that kept their whole SLO: mean (lowest-highest over the seeds)\n\n"
    return title + _table([head, ["---", *["---:"] * (len(head) - 1)], *_lines(found, systems)])


def columns(results: Sequence[CellResult], others: Sequence[CellResult] = ()) -> str:
    """Return a line for each column of a workload at a load, with each system's median over the seeds, the lowest and
    the highest. With `others`, theirs come first, then the error of `results` against them."""
    values, theirs = _values(results), _values(others)
    systems = list(dict.fromkeys(result.system for result in results))
    lines = [["workload", "load", "figure", *systems], ["---"] * (3 + len(systems))]
    for workload, load, title in dict.fromkeys(key[:3] for key in values):
        cells = [
            _figure(values.get(key, []), theirs.get(key, []))
            for key in ((workload, load, title, system) for system in systems)
        ]
        lines.append([workload, f"{load:g}", title, *cells])
    return _table(lines)


def _table(lines: Sequence[Sequence[str]]) -> str:
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def _values(results: Sequence[CellResult]) -> dict[tuple[str, float, str, str], list[float]]:
    """Collect values by workload, load, title and system."""
    found: dict[tuple[str, float, str, str], list[float]] = {}
    for one in results:
        for title, value in one.numbers.items():
            found.setdefault((one.workload, one.load, title, one.system), []).append(value)
    return found


def _figure(ours: Sequence[float], theirs: Sequence[float]) -> str:
    if not theirs:
        return _median(ours)
    base = statistics.median(theirs)
    error = f", {statistics.median(ours) / base - 1:+.1%}" if ours and base else ""
    return f"{_median(theirs)}, {_median(ours)}{error}"


def _median(values: Sequence[float]) -> str:
    if not values:
        return "–"
    several = f" ({min(values):.4g} to {max(values):.4g})" if min(values) < max(values) else ""
    return f"{statistics.median(values):.4g}{several}"


def _systems(found: Comparison) -> list[str]:
    return list(dict.fromkeys(system for row in found.rows for system in row.shares))


def _lines(found: Comparison, systems: list[str]) -> list[list[str]]:
    lines = []
    for row in found.rows:
        line = [row.workload, f"{row.load:g}", "–" if row.at_most is None else f"{100 * row.at_most:.1f}"]
        for system in systems:
            spread = row.shares.get(system)
            line.append("–" if spread is None else _cell(*spread))
        lines.append(line)
    return lines


def _cell(mean: float, lowest: float, highest: float) -> str:
    if lowest == highest:
        return f"{100 * mean:.1f}"
    return f"{100 * mean:.1f} ({100 * lowest:.0f}-{100 * highest:.0f})"
