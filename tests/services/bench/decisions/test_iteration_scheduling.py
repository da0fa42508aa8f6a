"""The command that measures decisions runs and says what it should; how fast is not tested."""

from __future__ import annotations

import json

import pytest

from cohort.services.bench.__main__ import main


def test_decisions_are_measured_under_load(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--queued", "40", "--blocks", "200", "--decisions", "40", "--json"]
    arguments = ["--preset", "bros", "baseline-vllm", *small]
    assert main(["decisions", "iteration", *arguments]) == 0
    ours, theirs = json.loads(capsys.readouterr().out)
    assert (ours["preset"], theirs["preset"], ours["queued"]) == ("bros", "baseline-vllm", 40)
    assert ours["rows"] > 1 and ours["shared_blocks"] > 0 and theirs["shared_blocks"] == 0
    assert 0.0 < ours["median_us"] <= ours["p99_us"]


def test_as_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["decisions", "iteration", "--preset", "bros", "--queued", "5", "--decisions", "8"]) == 0
    assert "µs/decision" in capsys.readouterr().out
