"""A comparison as a table: on a terminal, and as Markdown for a page."""

from __future__ import annotations

import msgspec
from rich.table import Table

from cohort.common.comparison.comparison import Row


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
