"""Iterations of a live worker, read back from its recording (`recording.folder`): when each ran, and of which rows.

Called by `live_cycles` and `contention`.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cohort.common.policies.cost_model import StepWork, prefill_pairs

_ROW = re.compile(r"\[(\d+), (\d+)\)(?:;| \+|$)")
AT_ONCE_S = 0.005
"""No process waited for a plan that follows an iteration by less."""


@dataclass(frozen=True)
class Iteration:
    planned_s: float
    ended_s: float
    rows: tuple[tuple[int, int], ...]

    def work(self) -> StepWork:
        decodes = [start + 1 for start, end in self.rows if end - start == 1]
        prompts = [(start, end) for start, end in self.rows if end - start > 1]
        return StepWork(
            sum(end - start for start, end in self.rows),
            len(self.rows),
            len(self.rows),
            sum(prefill_pairs(start, end - start) for start, end in prompts),
            sum(end for _, end in prompts),
            len(decodes),
            sum(decodes),
            max(decodes, default=0),
        )


def iterations(path: Path) -> Iterator[Iteration]:
    """A step that was begun behind another (`StartStep.ahead`) counts from the end of that one, when it runs."""
    begun: deque[tuple[float, tuple[tuple[int, int], ...]]] = deque()
    free_s = 0.0
    with path.open(encoding="utf-8") as lines:
        next(lines)  # the recorded machine's parts
        for call in map(json.loads, lines):
            for event in call["events"]:
                if event["event"] == "StepEnded":
                    planned_s, rows = begun.popleft()
                    yield Iteration(max(planned_s, free_s), call["now_s"], rows)
                    free_s = call["now_s"]
                elif event["event"] == "StepFailed":
                    begun.clear()
            begun.extend((call["now_s"], rows) for rows in _started(call))


def _started(call: dict[str, Any]) -> Iterator[tuple[tuple[int, int], ...]]:
    for effect in call["effects"]:
        if effect.startswith("StartStep "):
            yield tuple((int(start), int(end)) for start, end in _ROW.findall(effect))


def overlap(iteration: Iteration, others: Sequence[Iteration], starts: Sequence[float]) -> float:
    """Share of the iteration during which another engine ran."""
    at = max(0, bisect_right(starts, iteration.planned_s) - 1)
    shared_s = 0.0
    while at < len(others) and others[at].planned_s < iteration.ended_s:
        other = others[at]
        shared_s += max(0.0, min(iteration.ended_s, other.ended_s) - max(iteration.planned_s, other.planned_s))
        at += 1
    return shared_s / (iteration.ended_s - iteration.planned_s)
