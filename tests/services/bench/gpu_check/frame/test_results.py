"""The output folder: whole at every moment, few files."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

from cohort.services.bench.gpu_check.frame.report import Findings, Results, Row, SectionRun


def made(folder: Path) -> Results:
    (folder / "logs").mkdir()
    return Results(folder / "out", folder / "logs", {"plan": "A", "dry_run": True})


def test_reports_are_rewritten_whole(tmp_path: Path) -> None:
    results = made(tmp_path)
    section = SectionRun("kernels", 70.0)
    results.sections.append(section)
    results.write()
    found = Findings("kernels", None)
    found.measured("first | of all", 2.0, "ms", at_most=3.0, note="a")
    section.rows += found.rows
    results.write()
    content = json.loads((tmp_path / "out" / "report.json").read_text())
    assert [row["name"] for row in content["rows"]] == ["first | of all"] and content["state"] == "running"
    text = (tmp_path / "out" / "report.md").read_text()
    assert "kernels  first | of all  2 ms    ≤ 3 ms  pass  a" in text and "Dry run" in text
    assert {file.name for file in (tmp_path / "out").iterdir()} == {"report.json", "report.md"}


def test_logs_are_packed(tmp_path: Path) -> None:
    results = made(tmp_path)
    (tmp_path / "logs" / "kernels.log").write_text("words")
    results.write(logs=True)
    out = tmp_path / "out"
    with tarfile.open(out / "logs.tar.gz") as archive:
        member = archive.extractfile("kernels.log")
        assert member is not None and member.read() == b"words"


def test_a_number_that_is_none_is_valid_json(tmp_path: Path) -> None:
    results = made(tmp_path)
    found = Findings("s", None)
    found.measured("n", float("nan"), "x", at_most=1.0)
    results.sections.append(SectionRun("s", 1.0, rows=[*found.rows, Row(section="s", name="words")]))
    results.write()
    rows = json.loads((tmp_path / "out" / "report.json").read_text())["rows"]
    assert rows[0]["figure"] is None and rows[0]["verdict"] == "miss" and "nan" in rows[0]["note"]
