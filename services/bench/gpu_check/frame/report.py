"""The rows of a check, and the folder of three files that a run leaves, whole at every moment.

    report.json     rows, sections, the run's own facts
    report.md       the same as tables
    logs.tar.gz     what the sections and their processes printed; of every profile the trace and the longest kernels

A section appends its rows to a file as it finds them (`Findings`); `runner` reads them (`read_rows`) and writes the
folder (`Results`): the reports whenever a section has found something, the logs after every section. Each file is
replaced by a rename, so a run that is killed at any moment leaves everything found so far. Standard library alone:
`runner` works before anything is installed.
"""

from __future__ import annotations

import io
import json
import math
import os
import tarfile
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

Verdict = Literal["pass", "miss", "fail", "info", "not run"]
Bound = Literal["at least", "at most", "equal", "none"]
_LARGEST_LOG = 4 << 20
_LOGS_TOGETHER = 14 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One metric. `miss`: correct but slower than wanted; `fail`: wrong, or it broke; `info`: no target."""

    section: str
    name: str
    figure: float | None = None
    unit: str = ""
    target: float | None = None
    bound: Bound = "none"
    verdict: Verdict = "info"
    note: str = ""


class Findings:
    """Rows of one section, appended to a file as they are found. `alone`: nothing runs beside the section."""

    def __init__(self, section: str, file: Path | None, *, alone: bool = True) -> None:
        self.section = section
        self._alone = alone
        self.rows: list[Row] = []
        self._file = file

    def _add(self, name: str, note: str, verdict: Verdict, **more: Any) -> None:
        self.rows.append(row := Row(section=self.section, name=name, note=note, verdict=verdict, **more))
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
        note: str = "",
        speed: bool = True,
    ) -> None:
        """Add a metric and its target, if any. `speed`: it is slower, and means nothing, where others run beside it."""
        if speed and not self._alone:
            at_least = at_most = None
            note = f"not a speed; {note}".removesuffix("; ")
        verdict: Verdict = "info"
        target, bound = (at_most, "at most") if at_least is None else (at_least, "at least")
        if target is not None:
            verdict = "pass" if (figure <= target if at_least is None else figure >= target) else "miss"
        known = math.isfinite(figure)
        note = note if known else f"{figure}; {note}".removesuffix("; ")
        bound = "none" if target is None else bound
        self._add(name, note, verdict, figure=figure if known else None, unit=unit, target=target, bound=bound)

    def checked(self, name: str, holds: bool, note: str = "") -> None:
        """Add something that is right or wrong."""
        self._add(name, note, "pass" if holds else "fail", bound="equal")

    def add_note(self, name: str, note: str, verdict: Verdict = "info") -> None:
        """Add words without a number."""
        self._add(name, note, verdict)


def read_rows(file: Path) -> list[Row]:
    """Return the rows that a section wrote before it ended, however it ended."""
    rows = []
    for line in file.read_bytes().splitlines() if file.is_file() else ():
        try:
            rows.append(Row(**json.loads(line)))
        except (ValueError, TypeError):  # the line it was killed in
            continue
    return rows


_HEADER = ("section", "what", "metric", "target", "", "note")


def _cells(row: Row) -> tuple[str, ...]:
    sign = {"at least": "≥ ", "at most": "≤ "}.get(row.bound, "")
    target = _number(row.target, row.unit)
    return (row.section, row.name, _number(row.figure, row.unit), sign + target, row.verdict, row.note)


def _number(value: float | None, unit: str) -> str:
    if value is None:
        return ""
    number = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f"{number} {unit}".rstrip()


def table(rows: Iterable[Row]) -> str:
    """Return the rows as text, in columns; cases of one test that passed are one line."""
    cells = [_HEADER, *map(_cells, _together(rows))]
    widths = [max(len(cell[column]) for cell in cells) for column in range(len(_HEADER) - 1)]
    return "\n".join(
        "  ".join([*(text.ljust(width) for text, width in zip(cell, widths, strict=False)), cell[-1]]).rstrip()
        for cell in cells
    )


def _together(rows: Iterable[Row]) -> list[Row]:
    """Join `test[a]`, `test[b]` that passed to `test` with the number of cases."""
    found: dict[object, list[Row]] = {}
    for number, row in enumerate(rows):
        case = row.verdict == "pass" and "[" in row.name and row.figure is None
        found.setdefault((row.section, row.name.partition("[")[0]) if case else number, []).append(row)
    return [
        Row(section=key[0], name=key[1], bound="equal", verdict="pass", note=f"{len(each)} cases")
        if isinstance(key, tuple)
        else each[0]
        for key, each in found.items()
    ]


def exit_status(rows: Iterable[Row]) -> int:
    """Return 0 if everything passed, 1 if something was missed, failed or not run."""
    return int(any(row.verdict in ("miss", "fail", "not run") for row in rows))


@dataclass(slots=True)
class SectionRun:
    """`state`: running, ended, killed, not run. `seconds` so far."""

    section: str
    limit_s: float
    state: str = "running"
    seconds: float = 0.0
    rows: list[Row] = field(default_factory=list)


class Results:
    """`folder`: for the three files. `logs`: what is packed."""

    def __init__(self, folder: Path, logs: Path, facts: dict[str, Any]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._logs = folder, logs
        self._facts = {"date": time.strftime("%Y-%m-%d %H:%M:%S %z"), **facts}
        self._started_s = time.monotonic()
        self.sections: list[SectionRun] = []
        self.state = "running"

    @property
    def rows(self) -> list[Row]:
        return [row for section in self.sections for row in section.rows]

    @property
    def seconds(self) -> float:
        return round(time.monotonic() - self._started_s, 1)

    def write(self, *, logs: bool = False) -> None:
        """Replace the reports, and with `logs` the packed logs."""
        sections = [
            {"section": s.section, "limit_s": round(s.limit_s, 1), "seconds": round(s.seconds, 1), "state": s.state}
            for s in self.sections
        ]
        rows = [asdict(row) for row in self.rows]
        content = {**self._facts, "state": self.state, "seconds": self.seconds, "sections": sections, "rows": rows}
        self._replace("report.json", json.dumps(content, indent=1, allow_nan=False).encode())
        self._replace("report.md", self._markdown().encode())
        if logs:
            self._replace("logs.tar.gz", self._packed())

    def _markdown(self) -> str:
        lines = [f"# Check of a GPU: {', '.join(f'{key} {value}' for key, value in self._facts.items())}", ""]
        if self._facts.get("dry_run"):
            lines += ["Dry run on the processor with tiny shapes: no metric below is a measurement.", ""]
        lines += [f"State: {self.state}, {self.seconds} s.", "", "```"]
        lines += [f"{s.section:<24}{s.state}, {s.seconds:.0f} of {s.limit_s:.0f} s" for s in self.sections]
        return "\n".join([*lines, "", table(self.rows), "```", ""])

    def _packed(self) -> bytes:
        """Pack the end of every log; the oldest fall out when all together are too large."""
        out = io.BytesIO()
        remaining = _LOGS_TOGETHER
        with tarfile.open(fileobj=out, mode="w:gz") as archive:
            files = [file for file in self._logs.rglob("*") if file.is_file()]
            for file in sorted(files, key=lambda each: each.stat().st_mtime, reverse=True):
                data = file.read_bytes()[-_LARGEST_LOG:]
                remaining -= len(data)
                if remaining < 0:
                    break
                entry = tarfile.TarInfo(str(file.relative_to(self._logs)))
                entry.size, entry.mtime = len(data), int(file.stat().st_mtime)
                archive.addfile(entry, io.BytesIO(data))
        return out.getvalue()

    def _replace(self, name: str, content: bytes) -> None:
        part = self._folder / f".{name}.part"
        part.write_bytes(content)
        os.replace(part, self._folder / name)
