"""The step after the one in flight, planned from counts: which rows go on is known before their tokens are.

    step n in flight ── PlanAhead ──▶ a decode row for every sequence that samples a token in n and goes on,
                                      the next chunk of every prompt that goes on
                                      └▶ step n+1 begins right behind n; its tokens are taken where n samples them

Called by `WorkerMachine`. The scheduler promises that it could decide nothing else, the allocator that every slot is
the row's own. Nothing of a sequence moves before step n has ended; only slots are reserved, which a decision would
reserve for the same rows. So a refusal leaves nothing to undo. A row that turns out to have ended is computed in vain:
its token is dropped, and its blocks are freed once its step is over.

Whatever may need a decision, or the host between two tokens, is refused (`NotAhead`); the machine then decides when the
step ends.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from cohort.common.machines.worker.kv_receiver import KvReceiver
from cohort.common.machines.worker.parked_pool import ParkedPool
from cohort.common.machines.worker.worker_state import NotAhead, WorkerState
from cohort.common.policies.interface import IterationPlan, IterationScheduler
from cohort.common.policies.step_times.learned_times import LearnedTimes, plan_shape
from cohort.common.sequence import Phase, Row

_LEAD_S = 0.0025
"""Time to plan a step, build its arrays and hand it to the engine thread, with the timer's own delay."""
_MEAN, _DEVIATION = 1 / 8, 1 / 4
"""Weights of the last step in the moving averages: those of TCP's round-trip estimate (RFC 6298)."""


def same_rows(plan: IterationPlan, following: IterationPlan) -> bool:
    """Return whether `following` has the rows of `plan`, each one position on and decoding."""
    first, then = plan.rows, following.rows
    return len(first) == len(then) and (not first or first[0].count == then[0].count == 1)  # prompts stand first


@dataclass(slots=True, eq=False)
class AheadPlanner:
    _state: WorkerState
    _scheduler: IterationScheduler
    _receiver: KvReceiver
    _pool: ParkedPool
    _undecided: int = 0
    _last: IterationPlan | None = None
    """Last plan made: what does not change in its rows is known to hold."""
    _steps_left: int = 0
    """Minimum over its sequences of the tokens they may still sample after it."""
    _is_late: bool = False
    """Whether a row gave no token since the last decision: what is planned behind it would have nothing to go on."""

    def decided(self) -> None:
        self._undecided, self._is_late = 0, False

    def late(self) -> None:
        self._is_late = True

    def plan(self, *, news: bool, prompt_step: int, drafts: bool = False) -> IterationPlan | None:
        """Return the step after the one in flight, its blocks reserved. None: it must be decided when that has ended,
        or is planned already. `news`: something waits for a decision. `prompt_step`: as `chunk` of
        `KvReceiver.arriving`. `drafts`: the next step is to have some."""
        state = self._state
        if state.in_flight is None or state.ahead is not None:
            return None
        plan = IterationPlan(reason="repeats")
        why: NotAhead | None = "drafts" if drafts else self._refusal(state.in_flight, plan, news, prompt_step)
        counters = state.counters
        if why is not None:
            counters.not_ahead[why] = counters.not_ahead.get(why, 0) + 1
            return None
        assert plan.rows, "a step without rows was planned ahead"
        counters.planned_ahead += 1
        self._undecided += 1
        self._last = plan
        return plan

    def _refusal(self, before: IterationPlan, plan: IterationPlan, news: bool, prompt_step: int) -> NotAhead | None:
        """Fill `plan` with its rows and reserve their slots. Return why it cannot have these, or None."""
        if news:
            return "news"
        if self._is_late:
            return "grammars"
        if before.copies or self._receiver.offers or not self._pool.is_idle:
            return "kv_transfer"
        if self._scheduler.wants_arriving and self._receiver.arriving(prompt_step):
            return "kv_transfer"
        state, leaving = self._state, 0
        if before is self._last and self._steps_left > 0 and not state.aborting:
            self._steps_left -= 1
            plan.rows = [Row(row.sequence, row.start + 1, 1) for row in before.rows]
        else:
            why, leaving = self._go_on(before.rows, plan)
            if why is not None:
                return why
        plan.estimated_s = before.estimated_s if same_rows(before, plan) else 0.0
        if not self._scheduler.continues(plan, state.kv, leaving, self._undecided):
            return "policy"
        return state.kv.extend_ahead(plan.rows)

    def _go_on(self, before: list[Row], plan: IterationPlan) -> tuple[NotAhead | None, int]:
        """Fill `plan` with a row for every sequence in the step in flight that samples a token in it and goes on: those
        of prompts after the others, as a decision has them, and before all the chunks of prompts that go on. Return why
        it cannot have these, or None, and how many sequences leave with that step."""
        aborting = {held.sequence for held in self._state.aborting} if self._state.aborting else ()
        rows, ending, prompts = plan.rows, list[Row](), list[Row]()
        leaving, fewest = 0, sys.maxsize
        for row in before:
            sequence, following = row.sequence, row.start + row.count
            if sequence in aborting:
                continue
            if sequence.phase is not Phase.RUNNING:
                return "request", 0
            # A request's last token is not computed, and behind a segment's end another worker computes.
            if row.count > 1 and not self._scheduler.reads_runs:
                return "policy", 0
            remaining = sequence.max_positions - following
            if remaining <= 0:
                leaving += 1
                continue
            if (known := sequence.target - following) > 0:  # the step in flight samples no token of it
                # Sampled tokens are taken by their rows' places, which a row of one token without one would shift; and
                # what a scored prompt computes next is no matter of counts. A step that pools wants its tokens known.
                if row.count == 1 or sequence.scores_prompt or sequence.request.sampling.pooling:
                    return "prompts", 0
                (ending if known == 1 else prompts).append(Row(sequence, following, known))
            else:
                (rows if row.count == 1 else ending).append(Row(sequence, following, 1))
            fewest = min(fewest, remaining)
        rows += ending
        assert fewest > 0, f"a row behind a request's last position: {fewest} left"
        self._steps_left = 0 if prompts else fewest - 1
        if prompts:
            counts = self._scheduler.chunks_ahead(prompts, len(rows))
            if counts is None:
                return "prompts", 0
            chunks = [Row(row.sequence, row.start, count) for row, count in zip(prompts, counts, strict=True)]
            plan.rows = [row for row in chunks if row.count > 1] + rows + [row for row in chunks if row.count == 1]
        return (None if plan.rows else "ended"), leaving


class StepEndForecast:
    """Forecast of when a step ends: a moving average for decode steps, learned times for steps with prompts. Used by
    the worker loop, and by the simulator's engine when it runs iterations one by one. What arrives after the next step
    was planned waits for that step, too; a step that is planned too late begins late. So the moment lies before the
    expected end by what planning takes and by how far steps stray."""

    def __init__(self) -> None:
        self._mean_s = self._deviation_s = 0.0

    def note(self, plan: IterationPlan, latency_s: float) -> None:
        """Record how long a step took. Steps with prompts are ignored."""
        if not plan.rows or not _decodes(plan):
            return
        if self._mean_s == 0.0:
            self._mean_s, self._deviation_s = latency_s, latency_s / 2
            return
        self._deviation_s += _DEVIATION * (abs(latency_s - self._mean_s) - self._deviation_s)
        self._mean_s += _MEAN * (latency_s - self._mean_s)

    def plan_after_s(self, plan: IterationPlan, times: LearnedTimes | None) -> float | None:
        """Return the time from this step's start until its successor is to be planned; 0 = at once, also while no
        decode was measured. None: when a step with prompts ends is unknown. Such steps stray too far for an allowance:
        one that ends before the forecast is followed by a step that is decided."""
        if _decodes(plan):
            return max(0.0, self._mean_s - 2 * self._deviation_s - _LEAD_S)
        foreseen_s = None if times is None else times.table.estimate(plan_shape(plan))
        return None if foreseen_s is None else max(0.0, foreseen_s - _LEAD_S)


def _decodes(plan: IterationPlan) -> bool:
    return all([row.count == 1 for row in plan.rows])
