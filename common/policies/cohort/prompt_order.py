"""Which prompt is computed next: the order that decides how many requests keep their promises.

    real-time ┬ can still make its first token ── as many as possible in time, of these the shortest first, and one
              │                                   of many choices is as long as all, and last
              │                                   (or all of them shortest first, or earliest due)
              └ cannot any more ──────────────── by due time, behind all that can
    best-effort ──────────────────────────────── behind all real-time ones, as they came
    (interrupted amid its output by the loss of its worker: before all others of its class)

Whatever the order, what has waited longest gets a share of the time (`PromptQueue.longest_waiting`), so that nothing
starves.

`PromptOrder` is that rule, a function of class, due time, remaining work and price. `PromptQueue` keeps prompts in this
order: a prompt changes its place at two moments that are known when it comes, so no decision sorts what waits; only a
bounded number of those that can still make it are planned anew (`feasible_set`).
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from dataclasses import dataclass
from math import inf
from typing import Literal

from cohort.common.policies.baselines.batch_builder import RankKey
from cohort.common.policies.cohort.feasible_set import cheapest_in_time, most_in_time
from cohort.common.policies.cohort.promise import due_s, is_interrupted
from cohort.common.policies.cohort.row_sharing import is_one_of_many
from cohort.common.policies.settings import CohortSettings
from cohort.common.sequence import Sequence
from cohort.common.types import Attempt

_BEFORE, _FEASIBLE, _LATE = 0, 1, 2
_QUICK = 0.25
"""Share of the longest step: a prompt that takes no more never waits for a longer one, whoever is late for its sake."""
_PLANNED = 128
"""Prompts of a priority that are planned together, the shortest: this bounds a decision's cost."""
_REPRICED = 0.1
"""Change of the price after which all are ranked anew: other prompts can then still make it."""


Ranked = tuple[RankKey, float]
"""Rank of a prompt, and the time from which on it has another one; infinite if none is foreseen."""
_Entry = tuple[RankKey, Sequence]


@dataclass(frozen=True, slots=True)
class PromptOrder:
    """Order of prompts. `first`, of those that can make it: `most_in_time` ranks them by length as `shortest` does, and
    the queue plans them (`PromptQueue.plan`). `patience_s`: wait after which a request has a part in the share of those
    that waited longest. `caution`: time of a prompt beside decode rows, relative to alone; and what a plan allows for
    the unforeseen. `quick_s`: prompts of so little work go first in every plan, however soon a long one is due."""

    first: Literal["most_in_time", "shortest", "earliest_due", "fcfs"] = "shortest"
    patience_s: float = 60.0
    caution: float = 1.3
    quick_s: float = 0.0

    @classmethod
    def of(cls, options: CohortSettings) -> PromptOrder:
        """Return the one order of a pipeline: schedulers compute by it, the placement forecasts by it."""
        return cls(
            first=options.prompt_order if options.ordered else "fcfs",
            patience_s=options.patience_s,
            quick_s=_QUICK * options.longest_step_s,
        )

    def rank(self, now_s: float, sequence: Sequence, token_s: float) -> Ranked:
        """Rank a sequence. `token_s`: seconds per prompt token."""
        request = sequence.request
        best_effort = request.traffic_class != "rt"
        if is_interrupted(sequence):
            return (best_effort, request.priority, _BEFORE, sequence.arrived_s, sequence.arrived_s, sequence.key), inf
        due, work = due_s(sequence), sequence.to_compute
        return self.place(
            now_s,
            best_effort,
            request.priority,
            sequence.arrived_s,
            due,
            work,
            token_s,
            key=sequence.key,
            choices=request.choices,
        )

    def place(
        self,
        now_s: float,
        best_effort: bool,
        priority: int,
        arrived_s: float,
        due_s: float,
        work: int,
        token_s: float,
        *,
        key: Attempt,
        choices: int = 1,
    ) -> Ranked:
        """Rank a prompt with `work` tokens left, also one on another machine. `due_s`: when its next token is due,
        infinite if nothing was promised; `key` tells equals apart. `choices`: prompts of its request: together they are
        one job, or a hundred short ones would all go before a newcomer."""
        if self.first == "fcfs":
            return (best_effort, priority, _BEFORE, arrived_s, arrived_s, key), inf
        start_s = due_s - work * token_s * self.caution
        if due_s == inf or now_s >= start_s:
            return (best_effort, priority, _LATE, due_s, arrived_s, key), inf
        first = due_s if self.first == "earliest_due" else float(work * choices)
        return (best_effort, priority, _FEASIBLE, first, arrived_s, key), start_s


class PromptQueue:
    """Sequences with a prompt to compute, in order. `changed` must follow every partial computation."""

    def __init__(self, order: PromptOrder) -> None:
        self._order = order
        self._token_s = 0.0
        self._ranked: list[_Entry] = []
        self._keys: dict[Attempt, RankKey] = {}
        self._moves: list[tuple[float, RankKey, Sequence]] = []
        """Times at which a place changes; void if the sequence has another key by then."""
        self._by_arrival: list[tuple[float, Attempt]] = []
        """Heap, void entries included."""

    def __len__(self) -> int:
        return len(self._ranked)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence.key in self._keys

    def __iter__(self) -> Iterator[Sequence]:
        return (sequence for _, sequence in self._ranked)

    def plan(self, now_s: float, pace_s: float, row_s: float = 0.0, *, ahead: Sequence | None = None) -> PromptPlan:
        """Return the order in which most make it, behind `ahead`. `pace_s`: seconds per prompt token here at present.
        `row_s`: seconds between free rows, where prompts wait for these and not for time; 0 = they do not."""
        token_s, row_s = max(pace_s, self._token_s) * self._order.caution, row_s * self._order.caution
        planned = self._order.first == "most_in_time"
        return PromptPlan(self._ranked, now_s, token_s, self._order.quick_s if planned else None, row_s, ahead)

    def in_rank_order(self, ahead: Sequence | None = None) -> PromptPlan:
        """Return all prompts by rank behind `ahead`, none of them planned."""
        return PromptPlan(self._ranked, 0.0, 0.0, None, ahead=ahead)

    def longest_waiting(self, now_s: float) -> Sequence | None:
        """Return the prompt that came first, of whatever class and priority, if it has waited for `patience_s`."""
        if self._order.first == "fcfs":
            return None
        oldest = self._by_arrival
        while oldest and oldest[0][1] not in self._keys:
            heapq.heappop(oldest)
        if not oldest or now_s < oldest[0][0] + self._order.patience_s:
            return None
        return self._ranked[bisect_left(self._ranked, self._keys[oldest[0][1]], key=_key)][1]

    def is_any_late(self, now_s: float) -> bool:
        """Return whether a first token was due before the last `advance`. Best-effort requests have no due time, those
        that can make it are not late, and of those that cannot the first was due first."""
        at = 0
        while at < len(self._ranked):
            group, end = _group(self._ranked, at)
            first_due = group[2] == _LATE and now_s > due_s(self._ranked[at][1])
            if first_due or (group[2] == _BEFORE and any(now_s > due_s(s) for _, s in self._ranked[at:end])):
                return True
            at = end
        return False

    def tokens(self, most: int) -> int:
        """Return the tokens left of all prompts, max `most`."""
        tokens = 0
        for _, sequence in self._ranked:
            tokens += sequence.to_compute
            if tokens >= most:
                return most
        return tokens

    def add(self, now_s: float, sequence: Sequence) -> None:
        heapq.heappush(self._by_arrival, (sequence.arrived_s, sequence.key))
        self._insert(now_s, sequence)

    def _insert(self, now_s: float, sequence: Sequence) -> None:
        key, moves_s = self._order.rank(now_s, sequence, self._token_s)
        insort(self._ranked, (key, sequence), key=_key)
        self._keys[sequence.key] = key
        if moves_s < inf:
            heapq.heappush(self._moves, (moves_s, key, sequence))

    def remove(self, sequence: Sequence) -> bool:
        """Return whether it was in the queue."""
        key = self._keys.pop(sequence.key, None)
        if key is None:
            return False
        del self._ranked[bisect_left(self._ranked, key, key=_key)]
        return True

    def changed(self, now_s: float, sequence: Sequence) -> None:
        """Rank a sequence anew, of which more or less is left."""
        if self.remove(sequence):
            self._insert(now_s, sequence)

    def advance(self, now_s: float, token_s: float) -> None:
        """Rank by the time and the price of now."""
        if abs(token_s - self._token_s) > _REPRICED * self._token_s:
            self._token_s = token_s
            everything, self._ranked, self._moves = list(self), [], []
            self._keys.clear()
            for sequence in everything:
                self._insert(now_s, sequence)
            return
        while self._moves and self._moves[0][0] <= now_s:
            _, key, sequence = heapq.heappop(self._moves)
            if self._keys.get(sequence.key) == key:
                self.changed(now_s, sequence)


class PromptPlan(Iterator[Sequence]):
    """Prompts of a queue in order, to be read before the queue changes. Only those asked for are looked at, and of a
    priority the `_PLANNED` shortest that can still make it."""

    def __init__(
        self,
        ranked: list[_Entry],
        now_s: float,
        token_s: float,
        quick_s: float | None,
        row_s: float = 0.0,
        ahead: Sequence | None = None,
    ) -> None:
        """`quick_s`: see `PromptOrder`; None: all by rank. `row_s`, `ahead`: see `PromptQueue.plan`."""
        self._ahead, self._waits_ahead = ahead, ahead is not None
        self._ranked = ranked
        self._at_s, self._token_s, self._quick_s, self._row_s = now_s, token_s, quick_s, row_s
        self._group: RankKey = ()
        self._next = self._end = 0
        """Index of the first unplanned prompt of the group, and of the next group."""
        self._planned: list[Sequence] = []
        """Planned prompts of the group in reverse order: the next one is the last element."""

    @property
    def first(self) -> Sequence | None:
        """Next prompt, which stays in the plan; None at its end."""
        if self._waits_ahead:
            return self._ahead
        while True:
            if not self._planned and self._next == self._end:
                if self._end == len(self._ranked):
                    return None
                self._enter()
                continue
            sequence = self._planned[-1] if self._planned else self._ranked[self._next][1]
            if sequence is not self._ahead:
                return sequence
            self._take()

    def __next__(self) -> Sequence:
        sequence = self.first
        if sequence is None:
            raise StopIteration
        if self._waits_ahead:
            self._waits_ahead = False
        else:
            if self._planned or self._group[2] != _BEFORE:
                self._take()
                return sequence
            self._take()
        self._at_s += self._row_s or sequence.to_compute * self._token_s
        return sequence

    def _take(self) -> None:
        if self._planned:
            self._planned.pop()
        else:
            self._next += 1

    def skip(self) -> None:
        """Leave out the rest of this class and priority, but for those that were interrupted."""
        if self._group and self._group[2] != _BEFORE:
            self._next = self._end
            self._planned.clear()

    def _enter(self) -> None:
        self._group, self._end = _group(self._ranked, self._next)
        best_effort, _, standing = self._group
        if self._quick_s is None or best_effort or standing != _FEASIBLE:
            return
        some = [sequence for _, sequence in self._ranked[self._next : min(self._end, self._next + _PLANNED)]]
        self._next += len(some)
        if self._row_s:
            costs = [max(0.0, sequence.predicted - sequence.output_tokens) for sequence in some]
            jobs = [(due_s(s), cost) for s, cost in zip(some, costs, strict=True)]
            chosen, rest = cheapest_in_time(jobs, self._row_s, self._at_s)
            self._planned = [some[index] for index in (*chosen, *rest)]
            self._planned.reverse()
            self._at_s += len(chosen) * self._row_s
            return
        works_s = [sequence.to_compute * self._token_s for sequence in some]
        jobs = [(due_s(s), work_s) for s, work_s in zip(some, works_s, strict=True)]
        sizes_s = [work_s * s.request.choices for s, work_s in zip(some, works_s, strict=True)]
        chosen, rest = most_in_time(jobs, self._at_s, sizes_s)
        chosen.sort(key=lambda index: self._turn(some[index], sizes_s[index]))
        self._planned = [some[index] for index in (*chosen, *sorted(rest))]
        self._planned.reverse()
        self._at_s += sum([some[index].to_compute for index in chosen]) * self._token_s

    def _turn(self, sequence: Sequence, size_s: float) -> int:
        """Return 0 for quick prompts, 2 for those of many choices. `size_s`: work of all choices."""
        if size_s <= (self._quick_s or 0.0):
            return 0
        return 2 if is_one_of_many(sequence) else 1


def _group(ranked: list[_Entry], at: int) -> tuple[RankKey, int]:
    """Return class, priority and standing of the prompt at `at`, and where the next such group begins."""
    group = ranked[at][0][:3]
    return group, bisect_right(ranked, group, lo=at, key=lambda entry: entry[0][:3])


def _key(entry: _Entry) -> RankKey:
    return entry[0]
