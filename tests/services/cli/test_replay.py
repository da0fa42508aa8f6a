"""`cohort replay`: what it prints of a recording, what of a wrong one, and a call to read."""

from __future__ import annotations

from pathlib import Path

import pytest

from cohort.services.cli import __main__ as cli
from tests.common.machines.test_recorder import record


def test_an_equal_replay_is_a_line_and_exit_0(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record(tmp_path / "a.jsonl")
    record(tmp_path / "b.jsonl")
    assert cli.main(["replay", str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")]) == 0
    line = "worker prefill: 7 calls, 1 steps with 1 rows, 10 effects: all equal"
    assert capsys.readouterr().out.splitlines() == [line, line]


def test_a_difference_is_named_with_its_line_and_exit_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(record(path)).replace("[0, 12)", "[0, 11)"))
    assert cli.main(["replay", str(path)]) == 1
    assert ": line 4: recorded [" in capsys.readouterr().out
    assert cli.main(["replay", "--show", "4", "--around", "0", str(path)]) == 0
    out = capsys.readouterr().out
    assert "recorded StartStep r#1 [0, 11); padded to 0" in out
    assert "replayed StartStep r#1 [0, 12); padded to 0" in out


def test_calls_are_shown_for_a_person_to_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.jsonl"
    record(path)
    assert cli.main(["replay", str(path), "--show", "3", "--around", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("line")] == [
        "line 2, +0.000000 s",
        "line 3, +0.100000 s",
        "line 4, +0.200000 s",
    ]
    assert "    told     ReportDue memory_free_bytes=7" in lines
    assert "    told     Received Registered from manager: incarnation=1" in lines
    assert "    answered StartStep r#1 [0, 12); padded to 0" in lines
    assert any(line.startswith("    answered Send KvOffer to decode: ") for line in lines)
    assert any("… 12 in all" in line for line in lines), "a long list is counted"


def test_a_line_that_is_no_call_and_a_file_that_is_no_recording(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.jsonl"
    record(path)
    assert cli.main(["replay", str(path), "--show", "99"]) == 2
    assert "are lines 2 to 8" in capsys.readouterr().err
    (tmp_path / "b.jsonl").write_text("{}\n")
    assert cli.main(["replay", str(tmp_path / "b.jsonl")]) == 2
    assert "not a recording" in capsys.readouterr().err
