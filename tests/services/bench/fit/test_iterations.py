"""Iterations read back from a worker's recording: when each ran, and of which rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from cohort.services.bench.fit.live_cycles import Iteration, iterations


def recording(folder: Path, *calls: tuple[float, list[str], list[str]]) -> Path:
    """Of calls: when, the events' names, the effects."""
    lines: list[dict[str, Any]] = [{"setup": {}}]
    lines += [
        {"now_s": now_s, "events": [{"event": name} for name in events], "effects": effects}
        for now_s, events, effects in calls
    ]
    path = folder / "unified-0-1.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def test_a_step_that_was_begun_ahead_runs_from_the_end_of_the_one_before(tmp_path: Path) -> None:
    path = recording(
        tmp_path,
        (1.0, ["StartSegment"], ["StartStep a [0, 64); padded to None"]),
        (1.5, ["PlanAhead"], ["StartStep a [64, 65); padded to None; ahead"]),
        (2.0, ["StepEnded"], []),
        (2.2, ["PlanAhead"], ["StartStep a [65, 66); padded to None; ahead"]),
        (3.0, ["StepEnded"], ["Send {}"]),
        (5.0, ["StepEnded"], []),
        (6.0, ["StartSegment"], ["StartStep b [0, 4); c [9, 12) + [5, 6]; padded to None"]),
        (6.5, ["StepEnded"], []),
    )
    assert list(iterations(path)) == [
        Iteration(1.0, 2.0, ((0, 64),)),
        Iteration(2.0, 3.0, ((64, 65),)),
        Iteration(3.0, 5.0, ((65, 66),)),
        Iteration(6.0, 6.5, ((0, 4), (9, 12))),
    ]


def test_a_failed_step_ends_the_one_behind_it_too(tmp_path: Path) -> None:
    path = recording(
        tmp_path,
        (1.0, ["StartSegment"], ["StartStep a [0, 64); padded to None"]),
        (1.5, ["PlanAhead"], ["StartStep a [64, 65); padded to None; ahead"]),
        (2.0, ["StepFailed"], ["StartStep b [0, 8); padded to None"]),
        (2.5, ["StepEnded"], []),
    )
    assert list(iterations(path)) == [Iteration(2.0, 2.5, ((0, 8),))]
