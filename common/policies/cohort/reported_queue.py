"""What a worker's last report lists, summed up; of the next one only what changed is read.

    a report ─▶ entries that left │ that are as they were: nothing │ rows that went on: two sums │ others: read anew
                                    (under overload nearly all)      (of the rest nearly all)

Sums are of integers, so that taking away and adding again is exact. A prompt's rank changes at a moment that is known
when it is ranked (`PromptOrder.place`), or with what the placement knows of its request (`invalidate`).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from cohort.common.policies.baselines.batch_builder import RankKey
from cohort.common.policies.cohort.prompt_order import Ranked
from cohort.common.policies.cohort.request_record import RequestRecord
from cohort.common.policies.interface import InstanceView
from cohort.common.types import KvGeometry, QueuedWork, RequestId

Ranking = Callable[[float, RequestId, RequestRecord | None, int], Ranked]
"""Rank of a prompt from now, its id, what is known of it and the tokens left."""


class Prompt(NamedTuple):
    """Waiting prompt: tokens left, pairs that they attend to, positions that it and its response will need more."""

    rank: RankKey
    tokens: int
    pairs: float
    needed: float


@dataclass(slots=True)
class _Entry:
    """Report entry as it counts. `prompt`: None for a decode row."""

    work: QueuedWork
    tpot_s: float
    variance: int
    prompt: Prompt | None


class ReportedQueue:
    def __init__(self, rank: Ranking) -> None:
        self._rank = rank
        self.effort: set[RequestId] = set()
        """Best-effort requests."""
        self._unjudged: dict[RequestId, RequestRecord] = {}
        """Decode rows whose forecast first token was not compared yet."""
        self._invalidated: set[RequestId] = set()
        self._clear()

    def _clear(self) -> None:
        self.works: dict[RequestId, QueuedWork] = {}
        """Requests that the report lists."""
        self._entries: dict[RequestId, _Entry] = {}
        self._moves: list[tuple[float, RequestId, RankKey]] = []
        """Times at which a rank changes; void if the prompt has another one by then."""
        self.rows = self.context = 0
        self.needed = self.variance = 0
        self.prompts = self.prompt_tokens = 0
        self.bound_s = self.bound_to_come_s = inf
        """Strictest TPOT of rows, and of prompts."""
        self._bounds: dict[float, int] = {}
        self._bounds_to_come: dict[float, int] = {}
        self.effort.clear()
        self._unjudged.clear()

    def invalidate(self, request_id: RequestId) -> None:
        """Mark a request to be read anew with the next report, even if unchanged."""
        if request_id in self.works:
            self._invalidated.add(request_id)

    def read(
        self, now_s: float, view: InstanceView, records: Mapping[RequestId, RequestRecord], *, anew: bool
    ) -> tuple[list[Prompt], list[Prompt], bool]:
        """Read a report. Return prompts that left or changed, prompts that came, whether anything is new. `anew`:
        forget all."""
        queue, removed, added = view.stats.queue, list[Prompt](), list[Prompt]()
        if anew:
            removed = [entry.prompt for entry in self._entries.values() if entry.prompt is not None]
            self._clear()
        if not queue and not self.works:
            return removed, added, anew
        works, entries, again = self.works, self._entries, self._invalidated
        while self._moves and self._moves[0][0] <= now_s:
            _, name, rank = heapq.heappop(self._moves)
            entry = entries.get(name)
            if entry is not None and entry.prompt is not None and entry.prompt.rank == rank:
                again.add(name)
        listed = {work.request_id: work for work in queue}
        ended = works.keys() - listed.keys() if works else ()
        changed = [work for name, work in listed.items() if works.get(name) != work]
        if again:
            changed += [listed[name] for name in sorted(again) if name in listed and works.get(name) == listed[name]]
        self.works = listed
        geometry = view.capacity.geometry
        for name in ended:
            if (prompt := self._take(name, geometry)) is not None:
                removed.append(prompt)
        for work in changed:
            name = work.request_id
            entry = entries.get(name)
            if entry is not None:
                if entry.prompt is None and name not in again and self._continues(entry, work, geometry):
                    continue
                if (prompt := self._take(name, geometry)) is not None:
                    removed.append(prompt)
            if (prompt := self._add(now_s, work, records.get(name), geometry)) is not None:
                added.append(prompt)
        self.bound_s = min(self._bounds, default=inf)
        self.bound_to_come_s = min(self._bounds_to_come, default=inf)
        updated = anew or bool(ended or changed)
        again.clear()
        return removed, added, updated

    def take_new_decodes(self) -> list[tuple[QueuedWork, RequestRecord]]:
        """Return decode rows that are beyond their prompts for the first time, if their first token was forecast."""
        started = [
            (self.works[name], request)
            for name, request in self._unjudged.items()
            if self.works[name].context >= request.tokens
        ]
        for work, _ in started:
            del self._unjudged[work.request_id]
        return started

    def _continues(self, entry: _Entry, work: QueuedWork, geometry: KvGeometry) -> bool:
        """Update a decode row that has more tokens, or fewer to come; False if it is something else now."""
        former = entry.work
        if work.prefill_left or not (work.decode_left and former.decode_left):
            return False
        self.context += work.context - former.context
        if geometry.frees_behind_window:
            growth = geometry.growth
            self.needed += growth(work.context, 0, work.decode_left) - growth(former.context, 0, former.decode_left)
        else:
            self.needed += work.decode_left - former.decode_left
        entry.work = work
        return True

    def _add(self, now_s: float, work: QueuedWork, record: RequestRecord | None, geometry: KvGeometry) -> Prompt | None:
        name, tokens, computed, decode = work.request_id, work.prefill_left, work.context, work.decode_left
        self.needed += geometry.growth(computed, tokens, decode)
        entry = self._entries[name] = _Entry(work, 0.0, 0, None)
        if record is not None:
            entry.tpot_s = record.tpot_s if decode else 0.0
            entry.variance = round(record.variance)
            self.variance += entry.variance
            if record.best_effort:
                self.effort.add(name)
        if tokens == 0:
            if decode:
                self.rows += 1
                self.context += computed
                _count(self._bounds, entry.tpot_s, 1)
            if record is not None and record.predicted_s is not None:
                self._unjudged[name] = record
            return None
        _count(self._bounds_to_come, entry.tpot_s, 1)
        if computed == 0:
            found = work.cached if work.cached >= 0 else record.cached if record is not None else 0
            computed = min(found, tokens - 1)
            tokens -= computed
        rank, moves_s = self._rank(now_s, name, record, tokens)
        if moves_s < inf:
            heapq.heappush(self._moves, (moves_s, name, rank))
        prompt = Prompt(rank, tokens, tokens * (computed + 0.5 * tokens), geometry.growth(computed, tokens, decode))
        self.prompts += 1
        self.prompt_tokens += tokens
        entry.prompt = prompt
        return prompt

    def _take(self, name: RequestId, geometry: KvGeometry) -> Prompt | None:
        """Undo `_add`."""
        entry = self._entries.pop(name)
        work, prompt = entry.work, entry.prompt
        self.needed -= geometry.growth(work.context, work.prefill_left, work.decode_left)
        self.variance -= entry.variance
        self.effort.discard(name)
        self._unjudged.pop(name, None)
        if prompt is not None:
            self.prompts -= 1
            self.prompt_tokens -= prompt.tokens
            _count(self._bounds_to_come, entry.tpot_s, -1)
        elif work.decode_left:
            self.rows -= 1
            self.context -= work.context
            _count(self._bounds, entry.tpot_s, -1)
        return prompt


def _count(counts: dict[float, int], tpot_s: float, by: int) -> None:
    if tpot_s:
        counts[tpot_s] = counts.get(tpot_s, 0) + by
        if not counts[tpot_s]:
            del counts[tpot_s]
