"""The runner: a section that outlasts its deadline is ended and keeps its rows; side by side each has its own."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cohort.services.bench.gpu_check.frame import runner
from cohort.services.bench.gpu_check.frame.report import Findings, Results


def made(folder: Path, *, total_s: float, width: int = 1) -> tuple[runner.Run, Results]:
    (folder / "logs").mkdir()
    run = runner.Run(folder, folder / "logs", folder / "kernels", {}, False, time.monotonic(), total_s, width)
    return run, Results(folder / "out", run.logs, {"plan": "A"})


def start_as(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """Sections run this Python instead of themselves, after two findings; `name` is the section's."""

    def start(
        section: str, together: bool, run: runner.Run, rows: Path, log: Path, seconds: float
    ) -> subprocess.Popen[bytes]:
        found = Findings(section, rows)
        found.checked("first", True)
        found.measured("second", 2.0, "ms")
        log.write_text("some words\nthe last words\n")
        words = [sys.executable, "-c", f"name, folder = {section!r}, {str(run.work)!r}\n{code}"]
        return subprocess.Popen(words, start_new_session=True)

    monkeypatch.setattr(runner, "_start", start)
    monkeypatch.setattr(runner, "_LEAST_S", 0.1)
    monkeypatch.setattr(runner, "_POLL_S", 0.05)


def test_a_section_past_its_deadline_keeps_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start_as(monkeypatch, "import time; time.sleep(600)")
    run, results = made(tmp_path, total_s=1.5)
    runner._run_sections([("kernels", 1.5)], False, run, results)
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
    runner._run_sections([("kernels", 600)], False, run, results)
    (section,) = results.sections
    assert (section.state, section.rows[-1].verdict) == ("ended", "fail")
    assert "status -11" in section.rows[-1].note and "the last words" in section.rows[-1].note


def test_a_section_without_time_is_not_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start_as(monkeypatch, "raise SystemExit")
    run, results = made(tmp_path, total_s=0.0)
    runner._run_sections([("golden", 0.0)], False, run, results)
    assert [row.verdict for row in results.rows] == ["not run"] and results.sections[0].state == "not run"


MEET = """
import pathlib, time
mine, other = (pathlib.Path(folder) / each for each in (name, {"kernels": "golden", "golden": "kernels"}.get(name, "")))
mine.touch()
while not other.exists():
    time.sleep(0.01)
"""


def test_sections_side_by_side_wait_for_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two that end only when both run; a third has its turn when a place is free."""
    start_as(monkeypatch, MEET)
    run, results = made(tmp_path, total_s=60, width=2)
    runner._run_sections([("kernels", 60), ("golden", 60), ("device", 60)], True, run, results)
    assert [(each.section, each.state) for each in results.sections] == [
        ("kernels", "ended"),
        ("golden", "ended"),
        ("device", "ended"),
    ]


def test_one_past_its_deadline_leaves_the_others_theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start_as(monkeypatch, "import time; time.sleep(600 if name == 'kernels' else 1)")
    run, results = made(tmp_path, total_s=60, width=2)
    runner._run_sections([("kernels", 0.5), ("golden", 60)], True, run, results)
    assert {each.section: each.state for each in results.sections} == {"kernels": "killed", "golden": "ended"}


def test_together_no_figure_is_a_speed(tmp_path: Path) -> None:
    found = Findings("pipeline", None, alone=False)
    found.measured("output", 10.0, "tokens/s", at_least=100.0, note="64 users")
    found.measured("compiled", 3.0, "kernels", at_most=0, speed=False)
    assert [(row.verdict, row.note) for row in found.rows] == [("info", "not a speed; 64 users"), ("miss", "")]
