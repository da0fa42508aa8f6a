"""vLLM's first scheduler (Kwon et al., SOSP 2023): batches of whole prompts first, else one decode step for all.

The vLLM baseline of BROS and EcoServe: blocks on demand, first come first served. While a sequence is swapped out no
new prompt is admitted. When a decoding sequence finds no block the latest gives way, by swap or recomputation. The
earliest always advances, so nothing starves; but prompts that keep coming stall the tokens of running responses.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from cohort.common.policies.baselines.batch_builder import BatchBuilder, IterationLimits, by_arrival, chunks_by_arrival
from cohort.common.policies.baselines.phase_queues import PhaseQueues
from cohort.common.policies.interface import UNTIL_CHANGED, IterationPlan, IterationScheduler, News
from cohort.common.policies.kv_interface import KvAllocator
from cohort.common.sequence import Phase, Row, Sequence

WATERMARK = 0.01
"""Share of the cache that a newcomer must leave free, or it would preempt another at once."""


class PrefillFirst(IterationScheduler):
    """`limits.max_rows` bounds all running sequences, `limits.max_tokens` the prompts of one prefill batch. Differs
    from vLLM: a prompt of more tokens than an iteration may have is computed in several (vLLM refuses it), and
    sequences that came by KV transfer run with the others. Without `headroom` a newcomer may take the last block."""

    reads_runs = True  # of which it needs none

    def __init__(self, limits: IterationLimits, *, headroom: bool = True) -> None:
        self._limits = limits
        self._watermark = WATERMARK if headroom else 0.0
        self._queues = PhaseQueues()

    def add(self, now_s: float, sequence: Sequence) -> None:
        self._queues.add(sequence)

    def remove(self, now_s: float, sequence: Sequence) -> None:
        self._queues.remove(sequence)

    def decide(self, now_s: float, kv: KvAllocator, news: News) -> IterationPlan:
        running, swapped = self._queues.of(Phase.RUNNING), self._queues.of(Phase.SWAPPED)
        builder = BatchBuilder(self._limits, kv, running, by_arrival)
        self._prefill(builder, kv, running, swapped)
        if not builder.rows:
            for sequence in running:
                builder.continue_row(sequence)
            for sequence in () if builder.preempted else swapped:
                if not self._leaves_headroom(sequence, kv, len(running)) or not builder.admit(sequence):
                    break
        plan = builder.finish()
        self._queues.decided(plan)
        return plan

    def _prefill(self, builder: BatchBuilder, kv: KvAllocator, running: Seq[Sequence], swapped: Seq[Sequence]) -> None:
        """Add prompts begun in an earlier iteration, then waiting ones as a whole, as many as fit."""
        for sequence in running:
            if sequence.uncomputed > 1:
                builder.continue_row(sequence)
        if swapped or builder.preempted:
            return
        alive = len(running)
        for sequence in self._queues.of(Phase.WAITING):
            whole = sequence.target <= builder.tokens_left or builder.rows == 0
            if alive >= self._limits.max_rows or not whole or not self._leaves_headroom(sequence, kv, alive):
                return
            if not builder.admit(sequence):
                return
            alive += 1

    def _leaves_headroom(self, sequence: Sequence, kv: KvAllocator, alive: int) -> bool:
        spare = kv.free_blocks + kv.cached_blocks - kv.geometry.blocks_for(sequence.target)
        return alive == 0 or spare >= int(self._watermark * kv.total_blocks)

    def steady_for(self, plan: IterationPlan, kv: KvAllocator) -> int:
        """Return `UNTIL_CHANGED` if all running sequences decode and the first waiting one finds no place."""
        if plan.preempted or plan.copies or any(row.count != 1 for row in plan.rows):
            return 0
        running, waiting = self._queues.of(Phase.RUNNING), self._queues.of(Phase.WAITING)
        if len(running) != len(plan.rows) or len(running) + len(waiting) != len(self._queues):
            return 0
        if any(row.sequence.phase is not Phase.RUNNING for row in plan.rows):
            return 0
        full = len(running) >= self._limits.max_rows
        stands = not waiting or full or not self._leaves_headroom(waiting[0], kv, len(running))
        return UNTIL_CHANGED if stands else 0

    def chunks_ahead(self, prompts: Seq[Row], single: int) -> Seq[int] | None:
        """Return chunks of prompts alone: rows of one token wait until these have ended."""
        return None if single else chunks_by_arrival(self._limits, prompts, single)

    def continues(self, plan: IterationPlan, kv: KvAllocator, leaving: int, undecided: int) -> bool:
        if len(plan.rows) + leaving == len(self._queues):
            return True
        return not leaving and self.steady_for(plan, kv) > 0

    def metrics(self) -> dict[str, float]:
        return {"swapped": float(len(self._queues.of(Phase.SWAPPED)))}
