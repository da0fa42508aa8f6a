"""Prefill batches on the padded path: one of the manager's batches per iteration, every row as long as the longest.

The worker's `IterationScheduler` for engines whose prefill wants rectangular batches (captured graphs, kernels without
variable lengths), and for measurements: it makes the waste of Eq. 2 a real cost.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Literal

from cohort.common.policies.baselines.continuous_batching import ContinuousBatching
from cohort.common.policies.interface import IterationPlan, News
from cohort.common.policies.kv_interface import KvAllocator
from cohort.common.policies.padding import row_padding
from cohort.common.sequence import Row, Sequence


class PaddedPrefill(ContinuousBatching):
    """B2, B8 · BucketServe §II-B, §III: first come first served batches that stay together, decode rows beside them.

    Differs from the paper: blocks are paged, so a row is padded only as far as there are blocks. Padding follows a
    row's tokens and is never attended to: answers do not change.
    """

    def __init__(
        self, *, max_rows: int, max_step_tokens: int, prefill_chunk: int, preemption: Literal["swap", "recompute"]
    ) -> None:
        super().__init__(
            max_rows=max_rows, max_step_tokens=max_step_tokens, prefill_chunk=prefill_chunk, preemption=preemption
        )
        self._step_tokens = max_step_tokens
        self._chunk = prefill_chunk
        self._prompt_tokens = 0
        self._padding_tokens = 0

    def decide(self, now_s: float, kv: KvAllocator, news: News) -> IterationPlan:
        plan = super().decide(now_s, kv, news)
        prefill = [row for row in plan.rows if row.count > 1]
        if not prefill:
            return plan
        decode = [row for row in plan.rows if row.count == 1]
        batch = self._rectangle(prefill, self._step_tokens - len(decode))
        longest = max(row.count for row in batch)
        # No further than the batch's last real position: positions beyond the context's end do not exist.
        end = max(row.start + row.count for row in batch)
        for row in batch:
            kv.extend(row.sequence, min(row.start + longest, end))
        plan.rows = batch + decode
        plan.padded_to = longest
        self._prompt_tokens += sum(row.count for row in batch)
        self._padding_tokens += sum(row_padding(batch, longest, kv))
        plan.reason = f"{len(batch)} prefill padded to {longest}, {len(decode)} decode"
        return plan

    def chunks_ahead(self, prompts: Seq[Row], single: int) -> Seq[int] | None:
        """Return None: the decision makes the rectangle."""
        return None

    def _chunk_beside(self, decode_rows: int) -> int:
        return self._step_tokens

    def _count(self, sequence: Sequence, tokens_left: int) -> int:
        return min(sequence.uncomputed, self._chunk, tokens_left)

    @staticmethod
    def _rectangle(rows: list[Row], tokens: int) -> list[Row]:
        """Return the oldest row and those of its batch that fit a rectangle of `tokens`; the others keep their blocks
        and run in a later iteration."""
        oldest = min(rows, key=lambda row: (row.sequence.arrived_s, row.sequence.batch_id, row.sequence.key))
        batch, longest = [oldest], oldest.count
        for row in rows:
            widest = max(longest, row.count)
            together = row is not oldest and row.sequence.batch_id == oldest.sequence.batch_id
            if together and (len(batch) + 1) * widest <= tokens:
                batch.append(row)
                longest = widest
        return batch

    def metrics(self) -> dict[str, float]:
        computed = self._prompt_tokens + self._padding_tokens
        return {
            **super().metrics(),
            "padding_tokens_total": float(self._padding_tokens),
            "padding_share": self._padding_tokens / computed if computed else 0.0,
        }
