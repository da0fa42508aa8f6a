"""The nouns: `WorkItem` (one request to come), `ClosedLoopPart` (users who ask again when answered), `Workload`.

Made by the readers and generators beside this file, consumed by the simulator. Never changed in place: every step
(arrivals, clipping, classes, SLOs, mixing) returns a new workload and adds to its facts. `ClosedLoopUsers` keeps count
of a closed loop while a run goes on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from cohort.common.errors import ConfigError
from cohort.common.types import Slo, TrafficClass

NO_SLO = Slo()


@dataclass(frozen=True, slots=True)
class WorkItem:
    """One request.

    `arrival_s`: seconds from the workload's start. `prompt_tokens`, `output_tokens`: both at least 1; the output is
    the true length, which policies see only through a prediction. `hash_ids`: block i names the content of prompt
    tokens [i·`hash_block`, (i + 1)·`hash_block`) together with everything before, so equal leading ids are a shared
    prefix; empty = shares nothing. `session` "" = a single request; turns of one session have equal prefixes as far as
    the shorter prompt reaches. `adapter`: the LoRA adapter that answers it, "" = the base model alone.
    """

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    traffic_class: TrafficClass = "rt"
    slo: Slo = NO_SLO
    hash_ids: tuple[int, ...] = ()
    hash_block: int = 0
    session: str = ""
    adapter: str = ""


@dataclass(frozen=True, slots=True)
class ClosedLoopPart:
    """`concurrency` users who each ask, wait for the whole answer and ask again at once.

    With `in_batches` they ask together: the next `concurrency` questions come when the last answer of the batch before
    is complete (BROS §7.1, its best-effort class). The users share `items` in order (their `arrival_s` means nothing)
    and begin at `start_s`. With `until_s` finite the list is cycled and no user asks at or after that second; infinite,
    the part ends with its list.
    """

    concurrency: int
    items: tuple[WorkItem, ...]
    start_s: float = 0.0
    until_s: float = math.inf
    in_batches: bool = False


class ClosedLoopUsers:
    """The running side of a `ClosedLoopPart`: which user asks next when a response ends.

    Pure bookkeeping: the host calls `start` at the part's `start_s` and `answered` whenever a request of this part
    ended (finished, failed or refused alike, or its user would wait forever), and sends the requests it returns at
    once."""

    def __init__(self, part: ClosedLoopPart) -> None:
        self._part = part
        self._taken = 0
        self._open = 0

    @property
    def open_requests(self) -> int:
        """Questions without an answer yet; never above the part's concurrency."""
        return self._open

    def start(self, now_s: float) -> list[WorkItem]:
        """Return the first question of every user, arriving now."""
        return self._take(now_s, self._part.concurrency)

    def answered(self, now_s: float) -> list[WorkItem]:
        """Note a complete answer. Return the next requests: none in the middle of a batch or at the end of the part."""
        if self._open == 0:
            raise ValueError("an answer to a question that was not asked")
        self._open -= 1
        if not self._part.in_batches:
            return self._take(now_s, 1)
        return [] if self._open else self._take(now_s, self._part.concurrency)

    def _take(self, now_s: float, count: int) -> list[WorkItem]:
        part, questions = self._part, []
        for _ in range(count):
            cycling = part.until_s != float("inf")
            if now_s >= part.until_s or (self._taken >= len(part.items) and not cycling):
                break
            questions.append(replace(part.items[self._taken % len(part.items)], arrival_s=now_s))
            self._taken += 1
        self._open += len(questions)
        return questions


@dataclass(frozen=True, slots=True)
class WorkloadFacts:
    """Facts that a reader of a result must know of its workload: its source, and every change.

    `skipped_rows` had no prompt or no output (failed requests of the source). `notes` state assumptions, such as a
    distribution a paper names without its parameters.
    """

    source: str = ""
    arrivals: str = ""
    seed: int | None = None
    skipped_rows: int = 0
    clipped_prompts: int = 0
    clipped_outputs: int = 0
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Workload:
    """`items` in order of arrival; `closed_loop` parts run beside them."""

    name: str
    items: tuple[WorkItem, ...]
    facts: WorkloadFacts = field(default_factory=WorkloadFacts)
    closed_loop: tuple[ClosedLoopPart, ...] = ()

    @property
    def span_s(self) -> float:
        """Seconds from the first to the last arrival; 0 for fewer than two items."""
        return self.items[-1].arrival_s - self.items[0].arrival_s if self.items else 0.0

    @property
    def rate_per_s(self) -> float | None:
        """Mean arrivals a second, by gaps; None when nothing can be said (fewer than two, or all at once)."""
        return (len(self.items) - 1) / self.span_s if self.span_s > 0 else None

    def check(self) -> None:
        """Raise `ConfigError`, naming item and field, unless every item can be served and arrivals are in order."""
        check_items(self.name, self.items)
        for number, part in enumerate(self.closed_loop):
            where = f"{self.name}: closed loop {number}"
            if part.concurrency < 1 or not part.items:
                raise ConfigError(f"{where}: needs a concurrency of at least 1 and at least one item")
            check_items(where, part.items, ordered=False)


def check_items(where: str, items: Sequence[WorkItem], *, ordered: bool = True) -> None:
    before = -math.inf
    for index, item in enumerate(items):
        if item.prompt_tokens < 1:
            raise ConfigError(f"{where}: item {index}: prompt_tokens is {item.prompt_tokens}, must be at least 1")
        if item.output_tokens < 1:
            raise ConfigError(f"{where}: item {index}: output_tokens is {item.output_tokens}, must be at least 1")
        if not math.isfinite(item.arrival_s) or item.arrival_s < 0:
            raise ConfigError(f"{where}: item {index}: arrival_s is {item.arrival_s}, must be a time from 0 on")
        if ordered and item.arrival_s < before:
            raise ConfigError(f"{where}: item {index}: arrival_s {item.arrival_s} is before {before} of the one before")
        if item.hash_ids and item.hash_block < 1:
            raise ConfigError(f"{where}: item {index}: hash_ids without hash_block (tokens per id)")
        before = item.arrival_s
