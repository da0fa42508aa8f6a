"""The host's part of a step is measured over real decode steps, planned ahead and after one another."""

from __future__ import annotations

import json

import pytest

from cohort.common.policies.bros.slack_packing import SlackPacking
from cohort.common.policies.interface import IterationScheduler
from cohort.services.bench.engine.inside.host_time import measure


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("preset", ["unified", "cohort"])
def test_every_part_takes_time(preset: str, ahead: bool) -> None:
    found = measure(preset, 3, 40, 5, ahead=ahead, temperature=0.8)
    parts = (found.completed_us, found.planned_us, found.built_us, found.filled_us)
    whole_us = found.completed_us + found.planned_us + found.built_us + found.filled_us  # `sum` rounds otherwise
    assert (found.rows, found.steps, found.ahead) == (3, 5, ahead)
    assert all(part > 0 for part in parts) and found.whole_us == whole_us


def test_a_scheduler_that_plans_nothing_ahead_cannot_be_measured_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SlackPacking, "continues", IterationScheduler.continues)
    with pytest.raises(RuntimeError, match="ahead"):
        measure("bros", 3, 40, 5, ahead=True)


def test_the_command_prints_a_table_or_json(capsys: pytest.CaptureFixture[str]) -> None:
    from cohort.services.bench.__main__ import main

    assert main(["host-time", "--rows", "2", "--context", "20", "--steps", "3", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(each["rows"], each["ahead"]) for each in found] == [(2, False), (2, True)]
