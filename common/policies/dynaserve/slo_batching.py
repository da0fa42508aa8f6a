"""The worker's scheduler: every decode first, then as much prefill as the bound on the time between tokens allows.

An `IterationScheduler`. Its profile table says how much prefill an iteration may hold beside the decodes, and learns
from every iteration. Knows one worker; the placement decides where segments begin and end.
"""

from __future__ import annotations

from collections.abc import Iterable

from cohort.common.policies.baselines.arrival_queues import ArrivalQueues, leaves_next_blocks
from cohort.common.policies.baselines.batch_builder import BatchBuilder, IterationLimits, by_arrival
from cohort.common.policies.dynaserve.kv_forecast import fits
from cohort.common.policies.interface import UNTIL_CHANGED, IterationPlan, News, Ran
from cohort.common.policies.kv_interface import KvAllocator
from cohort.common.policies.settings import DynaServeSettings
from cohort.common.policies.step_times.learned_times import LearnedTimes, decode_shape, plan_shape
from cohort.common.policies.step_times.step_cost import BatchShape
from cohort.common.sequence import Phase, Sequence


class SloBatching(ArrivalQueues):
    """D5 · DynaServe Alg. 2.

    `tbt_slo_s` holds for rows without an SLO of their own; the strictest row of an iteration rules. Iterations leave
    at least the share `headroom` of it free, more where they were late (`Lateness`). `least_prefill` tokens of a
    waiting prompt go into every iteration, whatever the decodes take: prompts must progress.

    Differs from the paper: while decoding requests are on their way here, an iteration aims at half the bound, because
    between two tokens they wait for the rest of one iteration and for a whole one. Prefill rows leave the cache for
    older ones as in the baselines.
    """

    wants_arriving = True

    def __init__(self, options: DynaServeSettings, limits: IterationLimits, *, cold_chunk: int) -> None:
        """`cold_chunk`: prompt tokens of an iteration while nothing is learned."""
        super().__init__()
        self._options, self._limits = options, limits
        self._cold_chunk = cold_chunk
        self._times = LearnedTimes()
        self.table = self._times.table
        self._arriving = 0
        self._decodes_over = self._late = 0
        self._budget = 0
        self._bound_s = self._aim_s = options.tbt_slo_s

    # -- the policy interface --------------------------------------------------------------------------------------

    def decide(self, now_s: float, kv: KvAllocator, news: News) -> IterationPlan:
        """Alg. 2 · Record the executed batches in the table, then form the next one."""
        self._arriving = news.arriving
        for ran in news.runs:
            self._learn(ran, kv)
        prompts = [*(s for s in self._running if s.uncomputed > 1), *self._swapped, *self._waiting]
        builder = BatchBuilder(self._limits, kv, self._running, by_arrival)
        # 1. Every decode.
        decodes = [s for s in self._running if s.uncomputed == 1]
        for sequence in decodes:
            builder.continue_row(sequence)
        batch = decode_shape(builder.decode_rows)
        self._bound_s = self._bound(row.sequence for row in builder.decode_rows)
        self._decodes_over += batch.decodes > 0 and (self.table.estimate(batch) or 0.0) > self._bound_s
        self._aim_s = self._target_s(batch)
        # 2. Prefill chunks in arrival order while the table says that the batch stays within the bound.
        self._budget = 0
        least = self._options.least_prefill
        admits = True
        for sequence in prompts:
            if builder.tokens_left <= 0:
                break
            if sequence.phase is Phase.RUNNING:
                batch, least = self._chunk(builder, batch, sequence, least, admitted=True)
            elif admits and not builder.preempted:
                before = builder.rows
                if not builder.full and fits(kv, self._running, sequence):
                    batch, least = self._chunk(builder, batch, sequence, least, admitted=False)
                admits = builder.rows > before
        self._sort_out()
        plan = builder.finish()
        plan.estimated_s = self.table.estimate(plan_shape(plan)) or 0.0
        return plan

    def _learn(self, ran: Ran, kv: KvAllocator) -> None:
        shape = self._times.learn(ran, kv.geometry)
        if shape is not None:
            self._late += shape.decodes > 0 and ran.latency_s > self._bound(row.sequence for row in ran.plan.rows)

    def steady_for(self, plan: IterationPlan, kv: KvAllocator) -> int:
        """Return no bound if every sequence decodes, none can join, and the composition is in the table already."""
        if plan.preempted or plan.copies or any(row.count != 1 for row in plan.rows) or self._arriving:
            return 0
        return UNTIL_CHANGED if self._times.knows(plan) and self.continues(plan, kv, 0, 0) else 0

    def continues(self, plan: IterationPlan, kv: KvAllocator, leaving: int, undecided: int) -> bool:
        """Return whether the same rows go on. A composition that is new to the table is recorded by `decide`."""
        if len(plan.rows) + leaving != len(self._running) or self._swapped:
            return False
        if not self._waiting:
            return True
        if leaving:  # another can join in its place
            return False
        full = len(plan.rows) >= min(self._limits.max_rows, self._limits.max_tokens)
        # The forecast changes from one iteration to the next; a lack of blocks does not.
        return full or not leaves_next_blocks(kv, len(self._running), self._waiting[0])

    @property
    def learned(self) -> LearnedTimes:
        return self._times

    def metrics(self) -> dict[str, float]:
        return {
            "swapped": float(len(self._swapped)),
            "prefill_budget_tokens": float(self._budget),
            "tbt_bound_ms": 1e3 * self._bound_s,
            "decodes_over_slo_total": float(self._decodes_over),
            "late_iterations_total": float(self._late),
            "profile_cells": float(len(self.table)),
            "profile_error": self.table.error,
            "lateness_ratio": self._times.lateness.ratio,
        }

    # -- one iteration -----------------------------------------------------------------------------------------

    def _bound(self, decoding: Iterable[Sequence]) -> float:
        """Return the strictest SLO of the decode rows in this iteration."""
        bounds_s = [s.request.slo.tpot_s or self._options.tbt_slo_s for s in decoding]
        return min(bounds_s, default=self._options.tbt_slo_s)

    def _target_s(self, decodes: BatchShape) -> float:
        """Return the duration that an iteration aims at: the bound, or half of it while decodes arrive. Then prompts
        have a quarter of it whatever the decodes take, or they would not progress."""
        whole_s = self._bound_s * min(1.0 - self._options.headroom, 1.0 / self._times.lateness.ratio)
        if not self._arriving:
            return whole_s
        decode_s = self.table.estimate(decodes) or 0.0
        return min(whole_s, max(whole_s / 2, decode_s + whole_s / 4))

    def _chunk(
        self, builder: BatchBuilder, batch: BatchShape, sequence: Sequence, least: int, *, admitted: bool
    ) -> tuple[BatchShape, int]:
        """Add the next prompt's share of the budget; a prompt without one ends the traversal (`tokens_left` 0). Return
        the batch's shape and the tokens left of `least`."""
        wanted = min(sequence.uncomputed, builder.tokens_left)
        if self.table.step_times is None:
            count = min(wanted, max(0, self._cold_chunk - batch.prefill_tokens))
        else:
            count = self.table.prefill_budget(batch, sequence.computed, wanted, self._aim_s)
        count = max(count, min(least, wanted))
        remaining, builder.tokens_left = builder.tokens_left, count
        added = count > 0 and (builder.continue_row(sequence) if admitted else builder.admit(sequence))
        if not added:
            builder.tokens_left = remaining if count else 0
            return batch, least
        row = builder.last_row
        # A prompt that the cache held almost wholly, or a scored one, leaves the rest of the budget to the next.
        builder.tokens_left = remaining - row.count if row.count == row.sequence.uncomputed else 0
        self._budget += row.count
        return batch.with_prefill(row.start, row.count), max(0, least - row.count)

    def _sort_out(self) -> None:
        """Move every sequence to the queue of its phase, in arrival order."""
        queues = {Phase.RUNNING: self._running, Phase.WAITING: self._waiting, Phase.SWAPPED: self._swapped}
        if any(s.phase is not phase for phase, queue in queues.items() for s in queue):
            sequences = sorted([*self._running, *self._waiting, *self._swapped], key=by_arrival)
            self._running, self._waiting, self._swapped = ([s for s in sequences if s.phase is p] for p in queues)
