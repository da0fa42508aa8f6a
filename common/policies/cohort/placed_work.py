"""What is on a worker, as the placement knows it: the last report, and what was placed there since.

A report says how much of every prompt is left and how long its context is; promises and cached tokens are known from
`RequestRecord`s only. From both follow the prompts before a newcomer, in the worker's order, and their pace.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from itertools import accumulate
from math import ceil, inf
from typing import NamedTuple

from cohort.common.policies.baselines.batch_builder import RankKey
from cohort.common.policies.cohort.arriving_prompts import slowdown
from cohort.common.policies.cohort.block_wait import BlockWait
from cohort.common.policies.cohort.mixing import HEADROOM, LEAST_PREFILL
from cohort.common.policies.cohort.prompt_order import PromptOrder, Ranked
from cohort.common.policies.cohort.reported_queue import Prompt, ReportedQueue
from cohort.common.policies.cohort.request_record import RequestRecord
from cohort.common.policies.cohort.ttft_forecast import Pace, prompt_pace
from cohort.common.policies.interface import InstanceView
from cohort.common.policies.settings import CohortSettings
from cohort.common.policies.step_times.reported_times import COLD, reported_times
from cohort.common.policies.step_times.step_cost import BatchShape, step_seconds
from cohort.common.types import Attempt, RequestId, StepTimes, WorkerCapacity, WorkerStats

_DISTANT_S = 1e9
_REPRICED = 0.1
"""Change of a prompt token's price after which all prompts are ranked anew, as in a worker's `PromptQueue`."""
_FEW = 32
"""Prompts per report up to which they are inserted one by one; more are sorted with the others."""
_UNSEEN_S = 2.0
"""Age at which a request that is in no report has ended between two of them."""


class InTransit(NamedTuple):
    """Prompt or decode row that was placed and is in no report yet."""

    since_s: float
    rank: RankKey | None
    tokens: int
    pairs: float
    decode_context: int
    needed: float
    record: RequestRecord


class PlacedWork:
    """Work on one worker. `own_order`: prompts in the order of `options`, within the strictest TPOT; else as they
    come."""

    def __init__(self, options: CohortSettings, *, own_order: bool) -> None:
        self._options, self._own_order = options, own_order
        self._order = PromptOrder.of(options)
        self._stats: WorkerStats | None = None
        self._view: InstanceView | None = None
        self.times = COLD
        self._in_transit: dict[RequestId, InTransit] = {}
        self.token_s = COLD.token_s
        """Seconds per prompt token, by which prompts are ranked."""
        self.reported_s = -inf
        self.reported = ReportedQueue(self._ranking)
        self._prompts: list[Prompt] = []
        """Prompts here, in order. `_ranks` are theirs, and the next lists the sums up to each."""
        self._ranks: list[RankKey] = []
        self._tokens: list[int] = []
        self._pairs: list[float] = []
        self._needs: list[float] = []
        self._block_waits: dict[bool, BlockWait] = {}
        self._blocked_requested: set[bool] = set()
        """Keys of `_block_waits` used since the last report: these are made with the next one."""
        self._decodes_in_transit = 0, 0
        self._in_transit_sums: tuple[float, float] | None = None
        """Positions that `_in_transit` needs, and their variance."""
        self._strictest: float | None = None
        self._pace: Pace | None = None
        self._paced_by: tuple[StepTimes, int, int, float, WorkerCapacity] | None = None
        self._memory: tuple[float, float, float] | None = None
        self._max_step: tuple[int, float] | None = None
        self._slowed: dict[float, float] = {}

    def refresh(self, now_s: float, view: InstanceView, records: Mapping[RequestId, RequestRecord]) -> bool:
        """Read the newest report, best when it comes; True if there was one. Costs what changed with it."""
        stats = view.stats
        if stats is self._stats:
            return False
        times, anew = reported_times(stats), view is not self._view
        if abs(times.token_s - self.token_s) > _REPRICED * self.token_s:
            self.token_s, anew = times.token_s, True
        self._stats, self._view, self.reported_s = stats, view, now_s
        removed, added, updated = self.reported.read(now_s, view, records, anew=anew)
        self._memory = None
        if anew or times != self.times:
            self._max_step = None  # else as long as any iteration that can come: also of fewer rows
        if updated or times != self.times:
            self._strictest = None
            self._slowed.clear()
        self.times = times
        if self._in_transit:
            works = self.reported.works
            for name, coming in list(self._in_transit.items()):
                if name in works or now_s - coming.since_s >= _UNSEEN_S:
                    removed += self._arrived(name)
        self._replace(removed, added)
        if updated:
            self._block_waits = {alike: self._block_wait(alike) for alike in sorted(self._blocked_requested)}
        self._blocked_requested.clear()
        if self._pace is not None:
            self.pace()  # now, not when a decision asks
        return True

    @property
    def stats(self) -> WorkerStats:
        """Statistics of the last report."""
        assert self._stats is not None
        return self._stats

    def invalidate(self, request_id: RequestId) -> None:
        """Mark a request, of which more is known now, to be read anew with the next report."""
        self.reported.invalidate(request_id)

    def place(self, now_s: float, request: RequestRecord, *, prompt: bool, decode: bool, output: float) -> None:
        """Record what was sent here: the request's prompt, its decode row, or both."""
        rest = request.tokens - request.cached
        rank = self.rank(now_s, request, request.cached) if prompt else None
        name = request.attempt.request_id
        removed = self._arrived(name) if name in self._in_transit else []
        tokens, context = rest if prompt else 0, request.tokens if decode else 0
        pairs, needed = tokens * (request.cached + 0.5 * tokens), self._growth(request, rest, output if decode else 0.0)
        coming = self._in_transit[name] = InTransit(now_s, rank, tokens, pairs, context, needed, request)
        self.invalidate(name)
        self._memory = None
        self._slowed.clear()
        if decode:
            if self._strictest is not None and request.tpot_s:
                self._strictest = min(self._strictest, request.tpot_s)
            self._decodes_in_transit = self._decodes_in_transit[0] + 1, self._decodes_in_transit[1] + request.tokens
        if self._in_transit_sums is not None:
            needed, variance = self._in_transit_sums
            self._in_transit_sums = needed + coming.needed, variance + request.variance
        self._replace(removed, _prompts_of(coming))

    def _growth(self, request: RequestRecord, tokens: int, output: float) -> float:
        """Return the positions that a newcomer will need."""
        if self._view is None or not (geometry := self._view.capacity.geometry).frees_behind_window:
            return tokens + output
        return geometry.growth(request.cached, tokens, ceil(output))

    def forget(self, request_id: RequestId) -> None:
        self.invalidate(request_id)
        if request_id in self._in_transit:
            self._replace(self._arrived(request_id), [])

    def _arrived(self, request_id: RequestId) -> list[Prompt]:
        """Remove a request that is no longer on its way. Return its prompt, if that was to come here."""
        coming = self._in_transit.pop(request_id)
        self._in_transit_sums = self._strictest = self._memory = None
        self._slowed.clear()
        if coming.decode_context:
            self._decodes_in_transit = (
                self._decodes_in_transit[0] - 1,
                self._decodes_in_transit[1] - coming.decode_context,
            )
        return _prompts_of(coming)

    def _replace(self, removed: list[Prompt], added: list[Prompt]) -> None:
        """Replace prompts; the sums are made anew from the first that changed."""
        prompts, ranks = self._prompts, self._ranks
        first = len(prompts)
        if removed and len(removed) == len(prompts):
            prompts.clear()
            ranks.clear()
            removed, first = [], 0
        for prompt in removed:
            at = bisect_left(prompts, prompt)
            del prompts[at], ranks[at]
            first = min(first, at)
        if len(added) > _FEW:
            prompts += added
            prompts.sort()
            ranks[:] = [prompt.rank for prompt in prompts]
            added, first = [], 0
        for prompt in added:
            at = bisect_left(prompts, prompt)
            prompts.insert(at, prompt)
            ranks.insert(at, prompt.rank)
            first = min(first, at)
        if first < max(len(prompts), len(self._tokens)):
            rest = prompts[first:]  # summed up in the order in which all of them would be added
            _go_on(self._tokens, first, [prompt.tokens for prompt in rest])
            _go_on(self._pairs, first, [prompt.pairs for prompt in rest])
            _go_on(self._needs, first, [prompt.needed for prompt in rest])

    def rank(self, now_s: float, request: RequestRecord, cached: int) -> RankKey:
        """Return the place of a newcomer among the prompts here. `cached`: prompt tokens in this worker's cache."""
        return self._rank(now_s, request, request.tokens - cached)[0]

    def before(self, rank: RankKey, done: float) -> tuple[int, float]:
        """Return tokens and pairs of the prompts before this rank, less `done` tokens computed since the report."""
        at = bisect_left(self._ranks, rank)
        if not at:
            return 0, 0.0
        tokens, pairs = self._tokens[at - 1], self._pairs[at - 1]
        if done <= 0.0:
            return tokens, pairs
        rest = max(0.0, tokens - done)
        return int(rest), pairs * rest / tokens

    def blocked_s(self, rank: RankKey, needed: float, overtaking: float, *, best_effort: bool) -> float:
        """Return the seconds until a newcomer of this rank finds blocks for `needed` positions beside earlier prompts
        and decode rows; unless it is best-effort, beside real-time ones only. `overtaking`: positions per second needed
        by prompts that come later and go first."""
        at = bisect_left(self._ranks, rank)
        self._blocked_requested.add(best_effort)
        wait = self._block_waits.get(best_effort)
        if wait is None:
            wait = self._block_waits[best_effort] = self._block_wait(best_effort)
        assert self._stats is not None
        iterations = wait.iterations(needed + (self._needs[at - 1] if at else 0.0))
        return iterations * self._stats.step_s * slowdown(overtaking * self._stats.step_s, wait.turnover)

    def pace(self, companions: Iterable[PlacedWork] = ()) -> Pace:
        """Return the worker's pace, counting the decode rows of the workers on the same device."""
        assert self._view is not None
        capacity, options = self._view.capacity, self._options
        rows, context, bound_s = self.reported.rows, self.reported.context, self.reported.bound_s
        paced_by = (self.times, rows, context, bound_s, capacity)
        if self._pace is not None and not companions and paced_by == self._paced_by:
            return self._pace  # also of a new report that says the same
        for other in companions:
            queue = other.reported
            rows, context, bound_s = rows + queue.rows, context + queue.context, min(bound_s, queue.bound_s)
        decodes = BatchShape.of_decodes(rows, context)
        most = max(1, capacity.max_step_tokens - rows)
        if not self._own_order:
            pace = prompt_pace(self.times, decodes, inf, most=most, least=1)
        else:
            target_step_s = min(options.longest_step_s, bound_s * (1.0 - HEADROOM))
            pace = prompt_pace(self.times, decodes, target_step_s, most=most, least=LEAST_PREFILL)
        self._pace, self._paced_by = None if companions else pace, paced_by
        return pace

    def lost_pace_share(self, bound_s: float, pace: Pace) -> float:
        """Return the share of `pace` that prompts lose to a decode row of this bound; 0 if no row here is less
        strict."""
        strictest_s = self.strictest_s
        if strictest_s == inf or bound_s >= min(pace.target_step_s, strictest_s * (1.0 - HEADROOM)) or pace.rate <= 0.0:
            return 0.0
        lost = self._slowed.get(bound_s)
        if lost is None:
            stricter = prompt_pace(self.times, pace.decodes, bound_s, most=pace.most, least=pace.least)
            lost = self._slowed[bound_s] = max(0.0, 1.0 - stricter.rate / pace.rate)
        return lost

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts here, whatever their rank."""
        return self._tokens[-1] if self._tokens else 0

    def done(self, now_s: float, pace: Pace) -> float:
        """Return the prompt tokens of the report that were computed since."""
        if not self.reported.prompts:
            return 0.0
        return min(pace.rate * max(0.0, now_s - self.reported_s), float(self.reported.prompt_tokens))

    @property
    def strictest_s(self) -> float:
        """Strictest TPOT of all that decode here or will; infinite if nothing was promised."""
        if self._strictest is not None:
            return self._strictest
        strictest_s = min(self.reported.bound_s, self.reported.bound_to_come_s)
        for coming in self._in_transit.values():
            if coming.decode_context and coming.record.tpot_s and coming.record.tpot_s < strictest_s:
                strictest_s = coming.record.tpot_s
        self._strictest = strictest_s
        return strictest_s

    @property
    def busy(self) -> bool:
        return bool(self.reported.rows or self.reported.prompts or self._in_transit)

    @property
    def rows(self) -> int:
        """Decode rows here, and those on their way."""
        return self.reported.rows + self._decodes_in_transit[0]

    @property
    def context(self) -> int:
        """Positions that `rows` attend to together."""
        return self.reported.context + self._decodes_in_transit[1]

    def max_step_s(self, chunk: int, rows: int) -> float:
        """Return an upper bound on an iteration of these decodes and a prompt chunk: if short, no closer look is
        needed."""
        rows = max(rows, self.rows) + 1
        if self._max_step is None or self._max_step[0] < rows:
            assert self._view is not None
            capacity = self._view.capacity
            rows += 4  # for the next ones, too
            positions = min(rows * capacity.max_model_len, capacity.positions)
            self._max_step = rows, step_seconds(self.times, BatchShape(chunk, 1, 0, rows, positions))
        return self._max_step[1]

    @property
    def memory(self) -> tuple[float, float, float]:
        """Positions that everything here will still need, the variance of that, and free positions."""
        if self._memory is None:
            assert self._view is not None
            view, coming = self._view, self._in_transit.values()
            if self._in_transit_sums is None:
                self._in_transit_sums = sum([c.needed for c in coming]), sum([c.record.variance for c in coming])
            needed = self.reported.needed + self._in_transit_sums[0]
            variance = self.reported.variance + self._in_transit_sums[1]
            blocks = view.free_blocks if view.stats.total_blocks else view.capacity.num_blocks  # no report yet
            self._memory = needed, variance, float(view.capacity.geometry.positions(blocks))
        return self._memory

    def _rank(self, now_s: float, request: RequestRecord, rest: int) -> Ranked:
        """Return a prompt's rank. Where prompts run in arrival order, the rank is the arrival."""
        if not self._own_order:
            return (request.arrived_s, request.attempt), inf
        effort, priority, key = request.best_effort, request.priority, request.attempt
        return self._order.place(now_s, effort, priority, request.arrived_s, request.due_s, rest, self.token_s, key=key)

    def _ranking(self, now_s: float, request_id: RequestId, request: RequestRecord | None, rest: int) -> Ranked:
        """Return a reported prompt's rank; one that a former manager placed counts as able to keep its TTFT."""
        if request is not None:
            return self._rank(now_s, request, rest)
        key = Attempt(request_id, 0)
        if not self._own_order:
            return (0.0, key), inf
        return self._order.place(0.0, False, 0, 0.0, _DISTANT_S, rest, 0.0, key=key)[0], inf

    def _block_wait(self, best_effort: bool) -> BlockWait:
        assert self._view is not None
        rows, held, geometry, effort = [], 0, self._view.capacity.geometry, self.reported.effort
        for work in self._view.stats.queue:
            if not best_effort and work.request_id in effort:
                continue
            context = geometry.most_held(work.context)
            if work.prefill_left:
                held += context
            else:
                rows.append((geometry.growth(work.context, 0, work.decode_left), context))
        return BlockWait(rows, held, self._view.capacity.positions)


def _prompts_of(coming: InTransit) -> list[Prompt]:
    return [Prompt(coming.rank, coming.tokens, coming.pairs, coming.needed)] if coming.rank is not None else []


def _go_on(sums: list[float] | list[int], at: int, values: list[float] | list[int]) -> None:
    """Extend the sums before `at` by these values."""
    del sums[at:]
    if at:
        values = [sums[-1], *values]  # type: ignore[assignment]
        sums.pop()
    sums.extend(accumulate(values))  # type: ignore[arg-type]
