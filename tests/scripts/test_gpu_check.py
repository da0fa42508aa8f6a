"""`scripts/gpu_check` as a person runs it on a machine without a GPU."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.examples import another_of_its_kind, nightly

ROOT = Path(__file__).resolve().parent.parent.parent
SCRIPT = ROOT / "scripts" / "gpu_check"
LIMIT_S = 620


def gpu_check(*options: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *options],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
        cwd=cwd,
        stdin=subprocess.DEVNULL,
    )


def report_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    return found


def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    told = gpu_check("--out", str(tmp_path / "out"), cwd=tmp_path)
    if told.returncode != 2:  # there is one: nothing to see here
        return
    assert "no CUDA device" in told.stderr and "--dry-run" in told.stderr
    assert not (tmp_path / "out").exists()


def test_wrong_options(tmp_path: Path) -> None:
    assert gpu_check("--only", "everything", cwd=tmp_path).returncode == 2
    assert gpu_check("--plan", "D", cwd=tmp_path).returncode == 2
    missing = gpu_check("--dry-run", "--wheels", "absent", cwd=tmp_path)
    assert missing.returncode == 2 and "absent" in missing.stderr
    (tmp_path / "empty").mkdir()
    empty = gpu_check("--dry-run", "--wheels", "empty", cwd=tmp_path)
    assert empty.returncode == 2 and "no wheels" in empty.stderr


def test_a_dry_run_of_sections(tmp_path: Path) -> None:
    """Three files and a table."""
    told = gpu_check("--dry-run", "--only", "products", "--out", "out", cwd=tmp_path)
    result = report_of(tmp_path / "out")
    assert (told.returncode, result["dry_run"], result["state"]) == (0, True, "complete"), told.stdout + told.stderr
    assert [section["section"] for section in result["sections"]] == ["products"]
    assert {row["section"] for row in result["rows"]} == {"products"}
    three = {"report.json", "report.md", "logs.tar.gz"}
    assert {file.name for file in (tmp_path / "out").iterdir()} == three
    assert "no metric below is a measurement" in told.stdout


@another_of_its_kind()
def test_a_dry_run_of_tests(tmp_path: Path) -> None:
    """They lie beside Cohort in this checkout, and none that runs without a GPU fails."""
    told = gpu_check("--dry-run", "--only", "smoke", "golden", "--out", "out", cwd=tmp_path)
    result = report_of(tmp_path / "out")
    assert (told.returncode, result["state"]) == (0, "complete"), told.stdout + told.stderr
    passed = [row for row in result["rows"] if row["verdict"] == "pass"]
    names = {"test_recorded_steps.py", "test_sampling.py", "test_presets.py"}
    assert {row["name"].partition("::")[0].removeprefix("sampling/") for row in passed} == names


@pytest.mark.skipif(not nightly(), reason="a minute of compiling: scripts/test --nightly")
def test_a_killed_run_leaves_what_it_had(tmp_path: Path) -> None:
    """kill -9 in the middle of the plan's second section: the reports are whole, and no process of the run stays."""
    out = tmp_path / "out"
    with (tmp_path / "log").open("wb") as log:
        running = subprocess.Popen(
            [sys.executable, str(SCRIPT), "--dry-run", "--only", "golden", "device", "--out", str(out)],
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=tmp_path,
            env={**os.environ, "TMPDIR": str(tmp_path)},
        )
    try:
        until = time.monotonic() + LIMIT_S
        while time.monotonic() < until:
            if (out / "report.json").is_file() and len(report_of(out)["sections"]) == 2:
                break
            assert running.poll() is None, (tmp_path / "log").read_text()
            time.sleep(0.1)
        assert running.poll() is None
    finally:
        running.send_signal(signal.SIGKILL)
        running.wait()
    result = report_of(out)
    assert [section["section"] for section in result["sections"]] == ["device", "golden"]
    assert result["state"] == "running" and result["sections"][0]["state"] == "ended"
    assert any(row["name"] == "read alone" for row in result["rows"])
    assert (out / "report.md").read_text().startswith("# Check of a GPU")
    assert (out / "logs.tar.gz").is_file()
    until = time.monotonic() + 120
    while left := _started_from(tmp_path):
        assert time.monotonic() < until, left
        time.sleep(0.1)


def _started_from(folder: Path) -> list[str]:
    """Command lines of living processes that name this folder."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                words = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if str(folder) in words and "gpu_check" in words:
                found.append(words)
    return found
