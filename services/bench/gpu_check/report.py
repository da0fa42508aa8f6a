"""The results of a section: rows of figures against targets, written as they are found, so that a deadline loses none.

Written by the sections, read by `scripts/gpu_check`. Pure but for the file it appends to.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import msgspec

Verdict = Literal["pass", "miss", "fail", "info", "not run"]
Bound = Literal["at least", "at most", "equal", "none"]


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One figure. `miss`: correct but slower than wanted; `fail`: wrong, or it broke; `info`: no target."""

    section: str
    name: str
    figure: float | None = None
    unit: str = ""
    target: float | None = None
    bound: Bound = "none"
    verdict: Verdict = "info"
    note: str = ""


def measured(
    section: str,
    name: str,
    figure: float,
    unit: str,
    *,
    at_least: float | None = None,
    at_most: float | None = None,
    note: str = "",
) -> Row:
    """A figure and its target, if any."""
    if at_least is not None:
        verdict: Verdict = "pass" if figure >= at_least else "miss"
        return Row(
            section=section,
            name=name,
            figure=figure,
            unit=unit,
            target=at_least,
            bound="at least",
            verdict=verdict,
            note=note,
        )
    if at_most is not None:
        verdict = "pass" if figure <= at_most else "miss"
        return Row(
            section=section,
            name=name,
            figure=figure,
            unit=unit,
            target=at_most,
            bound="at most",
            verdict=verdict,
            note=note,
        )
    return Row(section=section, name=name, figure=figure, unit=unit, note=note)


def checked(section: str, name: str, holds: bool, note: str = "") -> Row:
    """Something that is right or wrong."""
    return Row(section=section, name=name, bound="equal", verdict="pass" if holds else "fail", note=note)


class Findings:
    """Rows of one section, appended to a file as they are found."""

    def __init__(self, section: str, file: Path | None) -> None:
        self.section = section
        self.rows: list[Row] = []
        self._file = file

    def add(self, row: Row) -> None:
        self.rows.append(row)
        if self._file is not None:
            with self._file.open("ab") as out:
                out.write(msgspec.json.encode(row) + b"\n")

    def measured(
        self,
        name: str,
        figure: float,
        unit: str,
        *,
        at_least: float | None = None,
        at_most: float | None = None,
        note: str = "",
    ) -> None:
        self.add(measured(self.section, name, figure, unit, at_least=at_least, at_most=at_most, note=note))

    def checked(self, name: str, holds: bool, note: str = "") -> None:
        self.add(checked(self.section, name, holds, note))


def read_rows(file: Path) -> list[Row]:
    """The rows that a section wrote before it ended, however it ended."""
    if not file.is_file():
        return []
    rows = []
    for line in file.read_bytes().splitlines():
        try:
            rows.append(msgspec.json.decode(line, type=Row))
        except msgspec.DecodeError:  # the line it was killed in
            continue
    return rows


def table(rows: Iterable[Row]) -> str:
    """The rows as text, in columns."""
    cells = [("section", "what", "figure", "target", "", "note")]
    cells += [
        (row.section, row.name, _figure(row.figure, row.unit), _target(row), row.verdict, row.note) for row in rows
    ]
    widths = [max(len(cell[column]) for cell in cells) for column in range(5)]
    return "\n".join(
        "  ".join([*(cell[column].ljust(widths[column]) for column in range(5)), cell[5]]).rstrip() for cell in cells
    )


def markdown(rows: Iterable[Row]) -> str:
    """The rows as a Markdown table, for docs/benchmarks-gpu.md."""
    lines = ["| section | what | figure | target | | note |", "|---|---|---|---|---|---|"]
    for row in rows:
        cells = (row.section, row.name, _figure(row.figure, row.unit), _target(row), row.verdict, row.note)
        lines.append("| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |")
    return "\n".join(lines)


def exit_status(rows: Iterable[Row]) -> int:
    """0 everything passed, 1 something was missed, failed or not run."""
    return int(any(row.verdict in ("miss", "fail", "not run") for row in rows))


def _figure(value: float | None, unit: str) -> str:
    if value is None:
        return ""
    number = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f"{number} {unit}".rstrip()


def _target(row: Row) -> str:
    if row.target is None:
        return ""
    sign = {"at least": "≥", "at most": "≤"}.get(row.bound, "=")
    return f"{sign} {_figure(row.target, row.unit)}"
