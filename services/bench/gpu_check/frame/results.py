"""What a run leaves: a folder of four files, whole at every moment.

    report.json     rows, sections, the run's own facts
    report.md       the same as tables, the kernels of every profile below
    profiles.json   the profiles: the kernels that took most of the time
    logs.tar.gz     what the sections and their processes printed, traces included

Written by `runner`: the reports whenever a section has found something, the logs after every section. Each file is
replaced by a rename, so a run that is killed at any moment leaves everything measured so far. Standard library alone.
"""

from __future__ import annotations

import io
import json
import os
import tarfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from cohort.services.bench.gpu_check.frame import report
from cohort.services.bench.gpu_check.frame.report import Row

_LARGEST_LOG = 4 << 20
_LOGS_TOGETHER = 14 << 20


@dataclass(slots=True)
class SectionRun:
    """`state`: running, ended, killed, not run. `seconds` so far."""

    section: str
    limit_s: float
    state: str = "running"
    seconds: float = 0.0
    rows: list[Row] = field(default_factory=list)


class Results:
    """`folder`: for the four files. `logs`: what is packed. `profiles`: folder of the sections' profile files."""

    def __init__(self, folder: Path, logs: Path, profiles: Path, facts: dict[str, Any]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._logs, self._profiles = folder, logs, profiles
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
        """Replace the reports, and with `logs` the packed logs and the profiles."""
        profiles = self._read_profiles()
        content = {
            **self._facts,
            "state": self.state,
            "seconds": self.seconds,
            "sections": [
                {"section": s.section, "limit_s": round(s.limit_s, 1), "seconds": round(s.seconds, 1), "state": s.state}
                for s in self.sections
            ],
            "rows": [{**asdict(row), "off": row.off} for row in self.rows],
        }
        self._replace("report.json", json.dumps(content, indent=1, allow_nan=False).encode())
        self._replace("report.md", self._markdown(profiles).encode())
        if logs:
            self._replace("profiles.json", json.dumps(profiles, indent=1).encode())
            self._replace("logs.tar.gz", self._packed())

    def _markdown(self, profiles: Sequence[dict[str, Any]]) -> str:
        lines = [f"# Check of a GPU: {', '.join(f'{key} {value}' for key, value in self._facts.items())}", ""]
        if self._facts.get("dry_run"):
            lines += ["Dry run on the processor with tiny shapes: no metric below is a measurement.", ""]
        lines += [f"State: {self.state}, {self.seconds} s.", "", "| section | limit, s | took, s | state |"]
        lines += ["|---|---|---|---|"]
        lines += [f"| {s.section} | {s.limit_s:.0f} | {s.seconds:.0f} | {s.state} |" for s in self.sections]
        lines += ["", report.markdown(self.rows)]
        for profile in profiles:
            lines += ["", f"## {profile['name']}", "", profile.get("note", ""), ""]
            lines += ["| kernel | calls | us | share |", "|---|---|---|---|"]
            lines += [
                f"| {str(kernel['name'])[:90].replace('|', '/')} | {kernel['calls']} | {kernel['us']:.1f} "
                f"| {kernel['share']:.1%} |"
                for kernel in profile["kernels"]
            ]
        return "\n".join(lines) + "\n"

    def _read_profiles(self) -> list[dict[str, Any]]:
        found = []
        for file in sorted(self._profiles.glob("*.json")):
            try:
                found.append(json.loads(file.read_text(encoding="utf-8")))
            except ValueError:  # being written
                continue
        return found

    def _packed(self) -> bytes:
        """Of every log the end, where it is long; the oldest fall out when all together are too many."""
        out = io.BytesIO()
        total = 0
        with tarfile.open(fileobj=out, mode="w:gz") as archive:
            files = [file for file in self._logs.rglob("*") if file.is_file()]
            for file in sorted(files, key=lambda each: each.stat().st_mtime, reverse=True):
                data = file.read_bytes()
                if file.suffix == ".gz" and len(data) > _LARGEST_LOG:
                    continue
                data = data[-_LARGEST_LOG:]
                total += len(data)
                if total > _LOGS_TOGETHER:
                    break
                entry = tarfile.TarInfo(str(file.relative_to(self._logs)))
                entry.size = len(data)
                entry.mtime = int(file.stat().st_mtime)
                archive.addfile(entry, io.BytesIO(data))
        return out.getvalue()

    def _replace(self, name: str, content: bytes) -> None:
        part = self._folder / f".{name}.part"
        part.write_bytes(content)
        os.replace(part, self._folder / name)
