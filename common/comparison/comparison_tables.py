"""A comparison as a table: on a terminal, and as Markdown for a page; the columns of live runs as Markdown alone."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import msgspec
from rich.table import Table

from cohort.common.comparison.comparison import CellResult, Row


class Comparison(msgspec.Struct, frozen=True):
    """`sustained`: workload → system → load; {} where it was not asked for."""

    description: str
    rows: list[Row]
    sustained: dict[str, dict[str, float]]


def table(found: Comparison) -> Table:
    """% of all requests that kept their SLO: mean (lowest-highest over the seeds)."""
    systems = _systems(found)
    shown = Table(title=found.description, caption="% of all requests that kept their whole SLO: mean (lowest-highest)")
    shown.add_column("workload")
    shown.add_column("load", justify="right")
    for system in systems:
        shown.add_column(system, justify="right")
    for line in _lines(found, systems):
        shown.add_row(*line)
    return shown


def markdown(found: Comparison) -> str:
    systems = _systems(found)
    head = ["workload", "load", *systems]
    lines = [
        "% of all requests that kept their whole SLO: mean (lowest-highest over the seeds)",
        "",
        "| " + " | ".join(head) + " |",
        "|---|" + "---:|" * (len(head) - 1),
        *("| " + " | ".join(line) + " |" for line in _lines(found, systems)),
    ]
    if found.sustained:
        lines += [
            "",
            "load sustained",
            "",
            "| workload | " + " | ".join(systems) + " |",
            "|---|" + "---:|" * len(systems),
        ]
        for workload, loads in found.sustained.items():
            cells = [f"{loads[system]:.2f}" if system in loads else "–" for system in systems]
            lines.append("| " + " | ".join([workload, *cells]) + " |")
    return "\n".join(lines) + "\n"


def columns(results: Sequence[CellResult]) -> str:
    """Of each workload, load and system the median over the seeds, with the lowest and the highest of several."""
    titles = _titles(results)
    lines = [
        [workload, f"{load:g}", system, str(len(of)), *(_median(_values(of, title)) for title in titles)]
        for (workload, load, system), of in _grouped(results).items()
    ]
    return _page(["workload", "load", "system", "seeds", *titles], lines)


def beside(results: Sequence[CellResult], others: Sequence[CellResult]) -> str:
    """The same columns of both where both have them: median of `results`, of `others`, and the error of these."""
    titles = [title for title in _titles(results) if title in _titles(others)]
    other = _grouped(others)
    lines = []
    for (workload, load, system), of in _grouped(results).items():
        line = [workload, f"{load:g}", system]
        for title in titles:
            ours, theirs = _values(of, title), _values(other.get((workload, load, system), []), title)
            error = f", {statistics.median(theirs) / statistics.median(ours) - 1:+.1%}" if ours and theirs else ""
            line.append(f"{_median(ours)}, {_median(theirs)}{error}")
        lines.append(line)
    return _page(["workload", "load", "system", *titles], lines)


def _grouped(results: Sequence[CellResult]) -> dict[tuple[str, float, str], list[CellResult]]:
    found: dict[tuple[str, float, str], list[CellResult]] = {}
    for result in results:
        found.setdefault((result.workload, result.load, result.system), []).append(result)
    return found


def _titles(results: Sequence[CellResult]) -> list[str]:
    return list(dict.fromkeys(title for result in results for title in result.numbers))


def _values(results: Sequence[CellResult], title: str) -> list[float]:
    return [result.numbers[title] for result in results if title in result.numbers]


def _median(values: Sequence[float]) -> str:
    if not values:
        return "–"
    several = f" ({min(values):.4g} to {max(values):.4g})" if min(values) < max(values) else ""
    return f"{statistics.median(values):.4g}{several}"


def _page(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rows = [head, ["---"] * len(head), *lines]
    return "".join("| " + " | ".join(row) + " |\n" for row in rows)


def _systems(found: Comparison) -> list[str]:
    return list(dict.fromkeys(system for row in found.rows for system in row.shares))


def _lines(found: Comparison, systems: list[str]) -> list[list[str]]:
    lines = []
    for row in found.rows:
        line = [row.workload, f"{row.load:g}"]
        for system in systems:
            spread = row.shares.get(system)
            line.append("–" if spread is None else _cell(*spread))
        lines.append(line)
    return lines


def _cell(mean: float, lowest: float, highest: float) -> str:
    if lowest == highest:
        return f"{100 * mean:.1f}"
    return f"{100 * mean:.1f} ({100 * lowest:.0f}-{100 * highest:.0f})"
