"""`scripts/gpu_check` as a person runs it on a machine without a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
SCRIPT = ROOT / "scripts" / "gpu_check"


def gpu_check(*options: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *options],
        capture_output=True,
        text=True,
        timeout=620,
        check=False,
        cwd=cwd,
        stdin=subprocess.DEVNULL,
    )


def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    told = gpu_check("--json", str(tmp_path / "out.json"), cwd=tmp_path)
    if told.returncode != 2:  # there is one: nothing to see here
        return
    assert "no CUDA device" in told.stderr and "--dry-run" in told.stderr
    assert not (tmp_path / "out.json").exists()


def test_wrong_options(tmp_path: Path) -> None:
    assert gpu_check("--only", "everything", cwd=tmp_path).returncode == 2
    missing = gpu_check("--dry-run", "--wheels", "absent", cwd=tmp_path)
    assert missing.returncode == 2 and "absent" in missing.stderr
    (tmp_path / "empty").mkdir()
    empty = gpu_check("--dry-run", "--wheels", "empty", cwd=tmp_path)
    assert empty.returncode == 2 and "no wheels" in empty.stderr


def test_a_dry_run_of_a_section(tmp_path: Path) -> None:
    """Table and JSON, and a section for which no time is left."""
    told = gpu_check("--dry-run", "--only", "attention", "--json", "out.json", "--markdown", "t.md", cwd=tmp_path)
    result = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    assert (told.returncode, result["dry_run"]) == (0, True), told.stdout + told.stderr
    assert {row["section"] for row in result["rows"]} == {"attention"}
    assert "no figure below is a measurement" in told.stdout and (tmp_path / "t.md").read_text().startswith("| section")
    late = gpu_check("--dry-run", "--only", "kernels", "--json", "late.json", "--total-s", "3", cwd=tmp_path)
    assert late.returncode == 1 and "not run" in late.stdout
