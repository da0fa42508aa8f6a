"""What a live worker's recording says of drafts: how often each request's were right, and what a draft model took.

For `cohort simulate --acceptance FILE`. Reads the worker's `StepEnded` events; nothing is replayed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import NamedTuple

import msgspec

from cohort.common.errors import ConfigError
from cohort.common.machines.events import StepEnded, WorkerEvent
from cohort.common.machines.recorder import Call, Header, WorkerHeader
from cohort.services.simulator.hardware.acceptance import DraftRates

_PRIOR = 2.0
"""Judged tokens that all requests together count for, of a request of which few were judged; as the policy has it."""


class RecordedDrafts(NamedTuple):
    rates: tuple[DraftRates, ...]
    """Of the requests in the order in which they sampled their first token there; at least one."""
    draft_s: float
    """What one draft of each row takes a draft model, the median of iterations; 0 = none drafted."""


@dataclass(slots=True)
class _Tally:
    sampled: int = 0
    """Steps that sampled a token of it."""
    judged: int = 0
    """Of these, how many had expected something."""
    looked_at: int = 0
    right: int = 0


def recorded_drafts(path: Path) -> RecordedDrafts:
    """Raises `ConfigError` for a file that is no worker's recording, or of one that drafted nothing."""
    tallies: dict[str, _Tally] = {}
    drafts_s: list[float] = []
    for event in _steps(path):
        deepest = max([each.proposed for each in event.drafts if each.computed], default=0)
        if deepest and event.drafting_s:
            drafts_s.append(event.drafting_s / deepest)
        for name in dict.fromkeys([each.attempt.request_id for each in event.sampled]):
            tallies.setdefault(name, _Tally()).sampled += 1
        for each in event.drafts:
            tally = tallies.setdefault(each.attempt.request_id, _Tally())
            tally.judged += 1
            tally.looked_at += min(each.right + 1, each.proposed)
            tally.right += each.right
    looked_at = sum(each.looked_at for each in tallies.values())
    if not looked_at:
        raise ConfigError(f"--acceptance {path}: nothing was drafted or expected in this recording")
    common = sum(each.right for each in tallies.values()) / looked_at
    rates = [
        DraftRates(min(1.0, each.judged / each.sampled), (each.right + _PRIOR * common) / (each.looked_at + _PRIOR))
        for each in tallies.values()
        if each.sampled
    ]
    return RecordedDrafts(tuple(rates), median(drafts_s) if drafts_s else 0.0)


def _steps(path: Path) -> Iterator[StepEnded]:
    calls, events = msgspec.json.Decoder(Call), msgspec.json.Decoder(list[WorkerEvent])
    try:
        with path.open("rb") as file:
            if not isinstance(msgspec.json.decode(file.readline(), type=Header), WorkerHeader):
                raise ConfigError(f"--acceptance {path}: the recording of another process than a worker")
            for line in file:
                if not line.endswith(b"\n"):
                    return  # a killed process's last line may be half written
                for event in events.decode(calls.decode(line).events):
                    if isinstance(event, StepEnded):
                        yield event
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"--acceptance {path}: not a number, and not a recording: {error}") from error
