"""UELLM-like: batches of requests with similar predicted outputs, each run to its end before the next begins.

The colocated baseline of BucketServe (§V-A). The oldest waiting request opens a batch, so nothing starves; those
predicted nearest to it join, as many as rows and, by exact allocation, memory allow.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from cohort.common.policies.baselines.batch_builder import BatchBuilder, IterationLimits, by_arrival, chunks_by_arrival
from cohort.common.policies.baselines.reserved_allocation import Reservation
from cohort.common.policies.bucketserve.safe_batch import batch_kv_blocks
from cohort.common.policies.interface import IterationPlan, IterationScheduler, News
from cohort.common.policies.kv_interface import KvAllocator
from cohort.common.sequence import Phase, Row, Sequence
from cohort.common.types import Attempt

SPREAD = 1.5
"""Factor within which outputs are similar: a row that ends early leaves its place empty until the batch ends."""


class PredictedBatches(IterationScheduler):
    """Batches of similar predicted outputs. With `limits.padded` prompts are
    computed as rectangles, as without variable-length kernels. With `rectangular_kv` a batch is as large as one
    contiguous cache allows, every row as long as the longest prompt and the longest response together (BucketServe Eq.
    1), as without paged attention; the rows themselves still take blocks.

    First all prompts, then all tokens; finished requests leave, none joins. With `static` ended rows count as padding
    until the batch ends, and every row attends to as many positions as the longest, as UELLM's. Differs from UELLM: its
    device mapping and fine-tuned predictor belong to other policies, and its latency term is left out of the grouping.
    Sequences that came by KV transfer join the batch that runs.
    """

    reads_runs = True  # of which it needs none

    def __init__(
        self, limits: IterationLimits, *, reservation: Reservation, rectangular_kv: bool = False, static: bool = False
    ) -> None:
        self._limits = limits
        self._rectangular_kv = rectangular_kv
        self._reservation = reservation
        self._sequences: dict[Attempt, Sequence] = {}
        self._batch: set[Attempt] = set()
        self._batches = 0
        self._static = static
        self._ended = 0
        """Rows of this batch that have ended."""

    def add(self, now_s: float, sequence: Sequence) -> None:
        self._sequences[sequence.key] = sequence
        if sequence.phase is Phase.RUNNING:
            self._batch.add(sequence.key)

    def remove(self, now_s: float, sequence: Sequence) -> None:
        self._sequences.pop(sequence.key, None)
        if sequence.key in self._batch:
            self._batch.remove(sequence.key)
            self._ended += 1

    def decide(self, now_s: float, kv: KvAllocator, news: News) -> IterationPlan:
        if not self._batch and self._sequences:
            self._batch = self._next_batch(kv)
            self._batches += 1
            self._ended = 0
        members = sorted((self._sequences[key] for key in self._batch), key=by_arrival)
        builder = BatchBuilder(self._limits, kv, (s for s in members if s.phase is Phase.RUNNING), by_arrival)
        for sequence in members:
            if sequence.uncomputed > 1:
                builder.continue_row(sequence)
        self._admit(members, Phase.WAITING, builder)
        if builder.rows:
            return builder.finish()
        for sequence in members:
            builder.continue_row(sequence)
        self._admit(members, Phase.SWAPPED, builder)
        plan = builder.finish()
        if self._static and plan.rows:
            contexts = [row.start + 1 for row in plan.rows]
            plan.ended_rows = self._ended
            plan.ended_context = (len(contexts) + self._ended) * max(contexts) - sum(contexts)
        return plan

    def _admit(self, members: list[Sequence], phase: Phase, builder: BatchBuilder) -> None:
        for sequence in members:
            if sequence.phase is phase and (builder.preempted or not builder.admit(sequence)):
                return

    def _next_batch(self, kv: KvAllocator) -> set[Attempt]:
        waiting = sorted(self._sequences.values(), key=by_arrival)
        oldest = waiting[0]
        wanted = max(1.0, oldest.predicted)
        similar = [
            s
            for s in waiting[1:]
            if s.request.priority == oldest.request.priority
            and wanted / SPREAD <= max(1.0, s.predicted) <= wanted * SPREAD
        ]
        similar.sort(key=lambda s: abs(s.predicted - wanted))  # stable: of equals the earliest
        headroom = kv.free_blocks + kv.cached_blocks
        batch: set[Attempt] = set()
        taken = prompt = output = 0
        for sequence in [oldest, *similar]:
            positions, own = self._reservation(sequence), sequence.request.prompt_tokens
            prompt, output = max(prompt, own), max(output, positions - own)
            if self._rectangular_kv:
                taken = batch_kv_blocks(prompt + output, len(batch) + 1, kv.geometry)
            else:
                taken += kv.geometry.blocks_for(positions)
            if batch and (taken > headroom or len(batch) >= self._limits.max_rows):
                break
            batch.add(sequence.key)
        return batch

    def chunks_ahead(self, prompts: Seq[Row], single: int) -> Seq[int] | None:
        """Return chunks of prompts alone: rows of one token wait until these have ended."""
        return None if single else chunks_by_arrival(self._limits, prompts, single)

    def continues(self, plan: IterationPlan, kv: KvAllocator, leaving: int, undecided: int) -> bool:
        """Return whether all members have rows: none joins before the last has ended."""
        return len(plan.rows) + leaving == len(self._batch)

    def metrics(self) -> dict[str, float]:
        return {
            "batch": float(len(self._batch)),
            "batches_total": float(self._batches),
            "swapped": float(sum(1 for s in self._sequences.values() if s.phase is Phase.SWAPPED)),
        }
