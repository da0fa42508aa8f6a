"""Whether drafted tokens are right, of a simulation: rates of requests about a mean, or those of a recorded worker.

A live worker's counters say the mean (`cohort_accepted_tokens_total` over `cohort_drafted_tokens_total`, read as the
chance of one token); its recording (`recorded_drafts`) says each request's. Requests differ: some quote their prompt,
most do not. What a request's drafts do depends on the seed, the request's number and the position alone. Asked by the
clients, who play the model; decides nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from random import Random
from statistics import median
from typing import NamedTuple

import msgspec

from cohort.common.errors import ConfigError
from cohort.common.machines.events import StepEnded, WorkerEvent
from cohort.common.machines.recorder import Call, Header, WorkerHeader, decoder_of_events

_SPREAD = 1.0
"""Sum of both parameters of the rates' beta distribution. One: most rates lie near 0 or near 1."""
_PRIOR = 2.0
"""Weight of all requests together, in judged tokens, for a request of which few were judged; as the policy has it."""


class DraftRates(NamedTuple):
    """Rates of a request. `expected`: share of its tokens after which something was expected; `right`: chance that an
    expected token comes, if those before it did."""

    expected: float
    right: float


class Acceptance:
    def __init__(self, mean: float, seed: int, recorded: Sequence[DraftRates] = ()) -> None:
        """`mean` 0: nothing is drafted. `recorded` replaces a mean; requests take them in order, over and over."""
        self._mean, self._seed, self._recorded = mean, seed, recorded
        self.rates = lru_cache(maxsize=65536)(self._rates)
        """Rates by a request's number."""

    def __bool__(self) -> bool:
        return self._mean > 0.0 or any(each.expected * each.right > 0.0 for each in self._recorded)

    def expects(self, request: int, position: int) -> bool:
        share = self.rates(request).expected
        return share >= 1.0 or Random(f"{self._seed} {request} {position}").random() < share

    def right(self, request: int, position: int, drafts: int) -> int:
        """Return how many of `drafts` tokens from this position on are right."""
        chances, rate = Random(self._seed * 1_000_003 + request * 10_007 + position), self.rates(request).right
        for count in range(drafts):
            if chances.random() >= rate:
                return count
        return drafts

    def _rates(self, request: int) -> DraftRates:
        if self._recorded:
            return self._recorded[request % len(self._recorded)]
        if self._mean >= 1.0:
            return DraftRates(1.0, 1.0)
        drawn = Random(f"{self._seed} {request}")
        return DraftRates(1.0, drawn.betavariate(_SPREAD * self._mean, _SPREAD * (1.0 - self._mean)))


class RecordedDrafts(NamedTuple):
    rates: tuple[DraftRates, ...]
    """Rates of the requests, in the order of their first tokens in the recording; at least one."""
    draft_s: float
    """Time of one draft of each row, the median of iterations; 0 = none was drafted."""


@dataclass(slots=True)
class _Tally:
    sampled: int = 0
    """Steps that sampled a token of the request."""
    judged: int = 0
    """Steps among `sampled` that had expected something."""
    looked_at: int = 0
    right: int = 0


def recorded_drafts(path: Path) -> RecordedDrafts:
    """Read the rates of a worker's recording. Raises `ConfigError` for another file, or one that drafted nothing."""
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
    calls, events = msgspec.json.Decoder(Call), decoder_of_events(WorkerEvent)
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
