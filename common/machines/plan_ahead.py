"""The step after the one in flight, planned from counts: which rows go on is known before their tokens are.

    step n in flight ── PlanAhead ──▶ rows of n that go on, one position further, if nothing else could be decided
                                      └▶ step n+1 begins right behind n; its tokens are taken where n samples them

Called by `WorkerMachine`. Nothing of a sequence moves before step n has ended; only blocks are reserved, which a
decision would reserve for the same rows. So a refusal, and a row that turns out to have ended, leave nothing to undo:
such a row is computed in vain, its token is dropped, and its blocks are freed once its step is over.

Whatever may need a decision, or the host between two tokens, is refused, and the machine decides as ever when the step
ends. The reasons are counted (`NotAhead`).
"""

from __future__ import annotations

import sys

from cohort.common.machines.kv_receiver import KvReceiver
from cohort.common.machines.parked_pool import ParkedPool
from cohort.common.machines.worker_counters import NotAhead
from cohort.common.machines.worker_state import WorkerState
from cohort.common.policies.interface import IterationPlan, IterationScheduler, Row
from cohort.common.sequence import Phase


class AheadPlanner:
    def __init__(
        self, state: WorkerState, scheduler: IterationScheduler, receiver: KvReceiver, pool: ParkedPool
    ) -> None:
        self._state = state
        self._scheduler = scheduler
        self._receiver = receiver
        self._pool = pool
        self._undecided = 0
        self._last: IterationPlan | None = None
        """The plan that was made last: of its rows all that does not change is known to be well."""
        self._left = 0
        """Tokens that the one of its sequences with the fewest may still sample after it."""

    def decided(self) -> None:
        """The step that begins now was chosen by the scheduler."""
        self._undecided = 0

    def plan(self, *, news: bool, prompt_step: int) -> IterationPlan | None:
        """What follows the step in flight, with its blocks reserved; None: that must be decided when it has ended, or
        is planned already. `news`: something waits for a decision. `prompt_step`: as of `KvReceiver.arriving`."""
        state = self._state
        if state.in_flight is None or state.ahead is not None:
            return None
        plan = IterationPlan(reason="repeats")
        why = self._refusal(state.in_flight, plan, news, prompt_step)
        counters = state.counters
        if why is not None:
            counters.not_ahead[why] = counters.not_ahead.get(why, 0) + 1
            return None
        counters.planned_ahead += 1
        self._undecided += 1
        self._last = plan
        return plan

    def _refusal(self, before: IterationPlan, plan: IterationPlan, news: bool, prompt_step: int) -> NotAhead | None:
        """Why not; None: `plan` has its rows, and their blocks."""
        if news:
            return "news"
        if before.copies or self._receiver.offers or not self._pool.quiet:
            return "kv_transfer"
        if self._scheduler.wants_arriving and self._receiver.arriving(prompt_step):
            return "kv_transfer"
        state = self._state
        if before is self._last and self._left > 0 and not state.aborting:
            self._left -= 1
            plan.rows = [Row(row.sequence, row.start + 1, 1) for row in before.rows]
            plan.estimated_s = before.estimated_s
            if not self._scheduler.continues(plan, state.kv, 0, self._undecided):
                return "policy"
            return None if self._reserve(plan.rows) else "memory"
        rows, leaving, fewest = plan.rows, 0, sys.maxsize
        aborting = {held.sequence for held in state.aborting} if state.aborting else ()
        for row in before.rows:
            sequence, following = row.sequence, row.start + 1
            request = sequence.request
            outputs = following - request.prompt_tokens
            if row.count != 1 or outputs < 1:
                return "prompts"
            if sequence in aborting:
                continue
            if (
                sequence.end is not None  # another worker may continue it
                or sequence.needs_tokens_before_next_step
                or sequence.phase is not Phase.RUNNING
                or len(sequence.tokens) != following
            ):
                return "request"
            # The step in flight samples the token at `following`; a request's last one is not computed.
            left = request.sampling.max_tokens - outputs - 1
            if left > 0:
                rows.append(Row(sequence, following, 1))
                fewest = min(fewest, left)
            else:
                leaving += 1
        if not rows:
            return "ended"
        self._left = fewest - 1
        plan.estimated_s = before.estimated_s
        if not self._scheduler.continues(plan, state.kv, leaving, self._undecided):
            return "policy"
        return None if self._reserve(rows) else "memory"

    def _reserve(self, rows: list[Row]) -> bool:
        """Blocks for the rows; False and no change where they lack."""
        kv = self._state.kv
        if not kv.grows_by_block:
            return False  # shared and lent blocks: only a decision knows whether the next slot is still the row's own
        size = kv.geometry.block_size
        growing = [row for row in rows if row.start % size == 0]
        growing = [row for row in growing if row.start >= len(kv.blocks(row.sequence.key)) * size]
        if not growing:
            return True
        if len(growing) > kv.free_blocks + kv.cached_blocks:
            return False
        return all([kv.extend(row.sequence, row.start + 1) for row in growing])
