"""The runner: a section that outlasts its deadline is ended and keeps its rows."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cohort.services.bench.gpu_check.frame import runner
from cohort.services.bench.gpu_check.frame.report import Findings, Results


def made(folder: Path, *, total_s: float) -> tuple[runner.Run, Results]:
    (folder / "logs").mkdir()
    run = runner.Run(folder, folder / "logs", {}, False, time.monotonic(), total_s)
    return run, Results(folder / "out", run.logs, {"plan": "A"})


def start_as(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """Sections run this Python instead of themselves, after two findings."""

    def start(section: str, run: runner.Run, rows: Path, log: Path, seconds: float) -> subprocess.Popen[bytes]:
        found = Findings(section, rows)
        found.checked("first", True)
        found.measured("second", 2.0, "ms")
        log.write_text("some words\nthe last words\n")
        return subprocess.Popen([sys.executable, "-c", code], start_new_session=True)

    monkeypatch.setattr(runner, "_start", start)
    monkeypatch.setattr(runner, "_LEAST_S", 0.1)


def test_a_section_past_its_deadline_keeps_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start_as(monkeypatch, "import time; time.sleep(600)")
    run, results = made(tmp_path, total_s=1.5)
    runner._section("kernels", 1.5, run, results)
    (section,) = results.sections
    assert section.state == "killed"
    assert [(row.name, row.verdict) for row in section.rows] == [
        ("first", "pass"),
        ("second", "info"),
        ("runs", "fail"),
    ]
    assert "the last words" in section.rows[-1].note
    assert len(json.loads((tmp_path / "out" / "report.json").read_text())["rows"]) == 3


def test_a_section_that_breaks_is_a_failure_with_its_last_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start_as(monkeypatch, "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    run, results = made(tmp_path, total_s=600)
    runner._section("kernels", 600, run, results)
    (section,) = results.sections
    assert (section.state, section.rows[-1].verdict) == ("ended", "fail")
    assert "status -11" in section.rows[-1].note and "the last words" in section.rows[-1].note


def test_a_section_without_time_is_not_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start_as(monkeypatch, "raise SystemExit")
    run, results = made(tmp_path, total_s=0.0)
    runner._section("golden", 0.0, run, results)
    assert [row.verdict for row in results.rows] == ["not run"] and results.sections[0].state == "not run"
