"""The results of a section: rows of metrics against targets, written as they are found, so that a deadline loses none.

Written by the sections, read by `runner`, which runs before anything is installed: standard library alone. Pure but for
the file that rows are appended to.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

Verdict = Literal["pass", "miss", "fail", "info", "not run"]
Bound = Literal["at least", "at most", "equal", "none"]


@dataclass(frozen=True, slots=True)
class Prediction:
    """What the design expects of a metric, in its unit, and in words how that was derived (`predictions`)."""

    value: float
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One metric. `miss`: correct but slower than wanted; `fail`: wrong, or it broke; `info`: no target. `predicted` is
    what the design expects there, in the metric's unit; `why` says how that was derived."""

    section: str
    name: str
    figure: float | None = None
    unit: str = ""
    target: float | None = None
    bound: Bound = "none"
    predicted: float | None = None
    why: str = ""
    verdict: Verdict = "info"
    note: str = ""

    @property
    def off(self) -> float | None:
        """How far the metric is from its prediction, as a share of that."""
        if self.figure is None or not self.predicted:
            return None
        return self.figure / self.predicted - 1


def measured(
    section: str,
    name: str,
    figure: float,
    unit: str,
    *,
    at_least: float | None = None,
    at_most: float | None = None,
    expect: Prediction | None = None,
    note: str = "",
) -> Row:
    """A metric, its target and its prediction, if any."""
    bound: Bound = "none"
    verdict: Verdict = "info"
    if at_least is not None:
        bound, verdict = "at least", "pass" if figure >= at_least else "miss"
    elif at_most is not None:
        bound, verdict = "at most", "pass" if figure <= at_most else "miss"
    if not math.isfinite(figure):
        note = f"{figure}; {note}" if note else str(figure)
    return Row(
        section=section,
        name=name,
        figure=figure if math.isfinite(figure) else None,
        unit=unit,
        target=at_least if at_least is not None else at_most,
        bound=bound,
        predicted=None if expect is None else expect.value,
        why="" if expect is None else expect.why,
        verdict=verdict,
        note=note,
    )


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
                out.write(json.dumps(asdict(row)).encode() + b"\n")

    def measured(
        self,
        name: str,
        figure: float,
        unit: str,
        *,
        at_least: float | None = None,
        at_most: float | None = None,
        expect: Prediction | None = None,
        note: str = "",
    ) -> None:
        self.add(
            measured(self.section, name, figure, unit, at_least=at_least, at_most=at_most, expect=expect, note=note)
        )

    def checked(self, name: str, holds: bool, note: str = "") -> None:
        self.add(checked(self.section, name, holds, note))

    def said(self, name: str, note: str, verdict: Verdict = "info") -> None:
        """Words without a number."""
        self.add(Row(section=self.section, name=name, verdict=verdict, note=note))


_NAMES = {field.name for field in fields(Row)}


def read_rows(file: Path) -> list[Row]:
    """The rows that a section wrote before it ended, however it ended."""
    if not file.is_file():
        return []
    rows = []
    for line in file.read_bytes().splitlines():
        try:
            found: dict[str, Any] = json.loads(line)
            rows.append(Row(**{name: value for name, value in found.items() if name in _NAMES}))
        except (ValueError, TypeError, AttributeError):  # the line it was killed in
            continue
    return rows


_HEADER = ("section", "what", "metric", "target", "expected", "off", "", "note")


def _cells(row: Row) -> tuple[str, ...]:
    off = "" if row.off is None else f"{row.off:+.0%}"
    expected = _number(row.predicted, row.unit)
    return (row.section, row.name, _number(row.figure, row.unit), _target(row), expected, off, row.verdict, row.note)


def table(rows: Iterable[Row]) -> str:
    """The rows as text, in columns."""
    cells = [_HEADER, *map(_cells, rows)]
    last = len(_HEADER) - 1
    widths = [max(len(cell[column]) for cell in cells) for column in range(last)]
    return "\n".join(
        "  ".join([*(cell[column].ljust(widths[column]) for column in range(last)), cell[last]]).rstrip()
        for cell in cells
    )


def markdown(rows: Iterable[Row]) -> str:
    """The rows as a Markdown table, and below it how each prediction was derived."""
    rows = list(rows)
    lines = [f"| {' | '.join(_HEADER)} |", "|" + "---|" * len(_HEADER)]
    lines += ["| " + " | ".join(cell.replace("|", "/") for cell in _cells(row)) + " |" for row in rows]
    derived = dict.fromkeys(row.why for row in rows if row.why)
    if derived:
        lines += ["", "Expected:", "", *(f"- {why}" for why in derived)]
    return "\n".join(lines)


def exit_status(rows: Iterable[Row]) -> int:
    """0 everything passed, 1 something was missed, failed or not run."""
    return int(any(row.verdict in ("miss", "fail", "not run") for row in rows))


def _number(value: float | None, unit: str) -> str:
    if value is None:
        return ""
    number = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f"{number} {unit}".rstrip()


def _target(row: Row) -> str:
    if row.target is None:
        return ""
    sign = {"at least": "≥", "at most": "≤"}.get(row.bound, "=")
    return f"{sign} {_number(row.target, row.unit)}"
