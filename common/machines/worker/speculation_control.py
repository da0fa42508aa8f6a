"""Drafts of a worker's decode rows: how many a plan's rows may carry, and what came of them.

    plan made ──▶ allotted: `Row.drafts`, with blocks ──▶ the engine proposes, computes, keeps what is right
    StepEnded ──▶ one token after the other, as if a step had ended for each ──▶ learned: chances, prices

Called by `WorkerMachine`. Rows carry drafts in iterations of decode rows alone: beside prompts each position costs its
full share of time. None where KV is copied, or where the cache is nearly full: the blocks would be taken from another.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from collections.abc import Sequence as Seq

from cohort.common.errors import InvariantViolated
from cohort.common.machines.events import Sampled, StepEnded
from cohort.common.machines.worker.worker_state import WorkerState
from cohort.common.policies.interface import IterationPlan
from cohort.common.policies.speculation import Speculation
from cohort.common.policies.step_times.learned_times import LearnedTimes, decode_shape
from cohort.common.sequence import Phase, Row, Sequence
from cohort.common.types import Attempt, StepTimes

_MOST_ROWS = 8
"""Maximum rows of an iteration with drafts. With more, computing them takes the time, and each row costs the host."""


class SpeculationControl:
    def __init__(self, state: WorkerState, times: LearnedTimes | None) -> None:
        """`times`: learned iteration times, if anything here learns them."""
        speculation = state.settings.speculation
        self._state = state
        self._times = times
        self._most = speculation.max_drafts
        self.policy: Speculation | None = None
        if speculation.drafts:
            self.policy = Speculation(speculation.max_drafts, uses_draft_model=speculation.mode == "model")

    def allot(self, plan: IterationPlan) -> None:
        policy, kv = self.policy, self._state.kv
        self.watch(plan)
        if policy is None or not plan.watched or kv.free_blocks + kv.cached_blocks <= 2 * len(plan.rows):
            return
        candidates, most, within_s = self._candidates(plan.rows)
        shape = decode_shape(plan.rows)
        allotted = policy.allot(self._step_times(), shape, candidates, most=most, within_s=within_s)
        for index, count in enumerate(allotted):
            row = plan.rows[index]
            # Slots that are its own by now or free, and nothing copied: as for a step that is planned ahead.
            if count and kv.extend_ahead([Row(row.sequence, row.start + 1, count)]) is None:
                plan.rows[index] = Row(row.sequence, row.start, 1, count)

    def watch(self, plan: IterationPlan) -> None:
        """Decide whether the engine is to look for drafts for these rows."""
        policy = self.policy
        if policy is not None and self._suits(plan):
            lately = policy.lately(len(plan.rows))
            plan.watched = (
                policy.is_worthwhile(self._step_times(), decode_shape(plan.rows)) if lately is None else lately
            )

    def prefers_drafts(self, expected: Seq[Attempt]) -> bool:
        """Return whether one of these sequences in the step in flight is better drafted for than planned ahead of."""
        policy, plan = self.policy, self._state.in_flight
        if policy is None or plan is None or not expected or not plan.watched:
            return False
        candidates, most, within_s = self._candidates(plan.rows, frozenset(expected))
        shape = decode_shape(plan.rows)
        return policy.worth_waiting(self._step_times(), shape, candidates, most=most, within_s=within_s)

    def on_step_ended(self, plan: IterationPlan, event: StepEnded) -> None:
        """Learn from the step of this plan, before its tokens are taken."""
        policy = self.policy
        if policy is None:
            return
        if event.drafts:
            plan.drafted = sum([each.proposed for each in event.drafts if each.computed])
        if plan.drafted and self._state.in_flight is not None:  # by now the one that was queued after it
            raise InvariantViolated("a step was planned behind one with drafts")
        counters, held_of = self._state.counters, self._state.held
        for each in event.drafts:
            held = held_of.get(each.attempt)
            if held is None or not 0 <= each.right <= each.proposed:
                raise InvariantViolated(f"{each.attempt} has no {each.right} right ones of {each.proposed} drafts")
            policy.judged(held.sequence, each.proposed, each.right)
            if each.computed:
                of_class = held.sequence.request.traffic_class
                counters.drafted_rows[of_class] += 1
                counters.drafted_tokens[of_class] += each.proposed
                counters.accepted_tokens[of_class] += each.right
                counters.drafts_of[each.source] = counters.drafts_of.get(each.source, 0) + each.proposed
                counters.right_of[each.source] = counters.right_of.get(each.source, 0) + each.right
        if plan.drafted:
            policy.drafted(max([each.proposed for each in event.drafts if each.computed]), event.drafting_s)
        if plan.watched and policy.uses_draft_model:
            judged = {each.attempt for each in event.drafts}
            for row in plan.rows:
                if row.sequence.key not in judged:
                    policy.unjudged(row.sequence)
        if plan.watched or self._suits(plan):
            policy.ran(self._step_times(), decode_shape(plan.rows), plan.drafted, event.latency_s)

    def one_by_one(self, sampled: Seq[Sampled]) -> Iterator[Sampled]:
        """Yield the tokens of a step with drafts. Before each but a row's first, the row's position before it counts as
        computed; those after the end of a request are left out."""
        state, last = self._state, None
        size, by_block = state.kv.geometry.block_size, state.kv.grows_by_block
        for each in sampled:
            if each.attempt == last:
                held = state.held.get(each.attempt)
                if held is None or held.aborting:
                    continue
                sequence = held.sequence
                sequence.computed += 1
                state.counters.decode_tokens += 1
                if sequence.computed % size == 0 or not by_block:
                    state.kv.committed(sequence)
            last = each.attempt
            yield each

    def metrics(self) -> dict[str, float]:
        return {} if self.policy is None else self.policy.metrics()

    def _suits(self, plan: IterationPlan) -> bool:
        rows = plan.rows
        if not rows or len(rows) > _MOST_ROWS or plan.copies or plan.padded_to or plan.ended_rows:
            return False
        return all([row.count == 1 and row.sequence.output_tokens > 0 for row in rows])

    def _candidates(
        self, rows: Seq[Row], only: frozenset[Attempt] = frozenset()
    ) -> tuple[list[tuple[Sequence, int]], int, float]:
        """Return each row's sequence and the most drafts it may have, the most of all rows, and the most time for the
        iteration. `only`: none for others; empty = for any."""
        candidates, bound_s = list[tuple[Sequence, int]](), math.inf
        for row in rows:
            sequence = row.sequence
            # A request's last token is not computed, and behind a segment's end another worker computes.
            limit = sequence.max_positions - row.start - 1
            if sequence.phase is not Phase.RUNNING or (only and sequence.key not in only):
                limit = 0
            candidates.append((sequence, max(0, limit)))
            if (tpot_s := sequence.request.slo.tpot_s) > 0.0:
                bound_s = min(bound_s, tpot_s)
        capacity = self._state.setup.capacity
        most = min(capacity.max_rows, capacity.max_step_tokens) - len(rows)
        return candidates, most, bound_s

    def _step_times(self) -> StepTimes | None:
        return None if self._times is None else self._times.step_times()
