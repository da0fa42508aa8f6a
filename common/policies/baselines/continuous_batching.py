"""Continuous batching with chunked prefill: every iteration admits, every iteration may finish (ORCA, Sarathi, vLLM).

First every decode row, oldest first; then prompts of sequences already running; then, if none was preempted, swapped
and waiting sequences by priority and arrival. When the cache is full the youngest running sequence gives way, so the
oldest always advances and nothing starves. Prompts are computed one after another, each with all that is left: side by
side each would take as long as all of them together.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence as Seq
from typing import Literal

from cohort.common.policies.baselines.arrival_queues import ArrivalQueues, leaves_next_blocks
from cohort.common.policies.baselines.batch_builder import by_arrival, divided
from cohort.common.policies.interface import UNTIL_CHANGED, IterationPlan, News
from cohort.common.policies.kv_interface import KvAllocator
from cohort.common.policies.sequences import preempt, resume, start
from cohort.common.sequence import Phase, Row, Sequence


class ContinuousBatching(ArrivalQueues):
    """Scheduler by arrival. `max_step_tokens`: of any iteration. `prefill_chunk`: of one that has decode rows, these
    included; but half of it is for prompts, however many rows decode. An iteration without decode rows delays no
    sampled token, so its prompts have all of `max_step_tokens`. Without `headroom` a newcomer may take the last free
    block, and a running row's next one is missing."""

    def __init__(
        self,
        *,
        max_rows: int,
        max_step_tokens: int,
        prefill_chunk: int,
        preemption: Literal["swap", "recompute"],
        headroom: bool = True,
    ) -> None:
        super().__init__()
        self._max_rows = max_rows
        self._max_step_tokens = max_step_tokens
        self._prefill_chunk = prefill_chunk
        self._preemption = preemption
        self._headroom = headroom

    def decide(self, now_s: float, kv: KvAllocator, news: News) -> IterationPlan:
        plan = IterationPlan()
        decode_rows: list[Row] = []
        prefill_rows: list[Row] = []
        planned: set[Sequence] = set()
        tokens_left = self._max_step_tokens

        decoding: list[Sequence] = []
        started: list[Sequence] = []
        for sequence in self._running:
            uncomputed = sequence.uncomputed
            if uncomputed:
                (decoding if uncomputed == 1 else started).append(sequence)
        prompts = [*started, *self._swapped, *self._waiting]
        by_block, size = kv.grows_by_block, kv.geometry.block_size
        for sequence in decoding:
            if len(decode_rows) == self._max_rows or tokens_left == 0:
                break
            # An older row may have taken this one's place in the cache meanwhile. Within a block there is headroom.
            computed = sequence.computed
            if sequence.phase is Phase.RUNNING and (
                (by_block and computed % size) or self._make_headroom(sequence, computed + 1, kv, plan, planned)
            ):
                decode_rows.append(Row(sequence, computed, 1))
                planned.add(sequence)
                tokens_left -= 1

        tokens_left = self._for_prompts(len(decode_rows))
        goes_on = admits = True
        for sequence in prompts:
            if tokens_left == 0 or len(planned) == self._max_rows:
                break
            if sequence.phase is Phase.RUNNING:
                end = sequence.computed + self._count(sequence, tokens_left)
                runs = goes_on = goes_on and self._make_headroom(sequence, end, kv, plan, planned)
            else:
                runs = admits = admits and not plan.preempted and self._admit(sequence, kv)
            if runs:
                count = self._count(sequence, tokens_left)
                (decode_rows if count == 1 else prefill_rows).append(Row(sequence, sequence.computed, count))
                planned.add(sequence)
                tokens_left -= count

        plan.rows = prefill_rows + decode_rows
        plan.reason = f"{len(prefill_rows)} prefill, {len(decode_rows)} decode, {len(plan.preempted)} preempted"
        return plan

    def steady_for(self, plan: IterationPlan, kv: KvAllocator) -> int:
        """Return `UNTIL_CHANGED` if all running sequences decode and no other can join, as none waits or there is no
        room."""
        if plan.preempted or plan.copies or any(row.count != 1 for row in plan.rows):
            return 0
        return UNTIL_CHANGED if self.continues(plan, kv, 0, 0) else 0

    def chunks_ahead(self, prompts: Seq[Row], single: int) -> Seq[int] | None:
        if len(prompts) + single > self._max_rows:
            return None
        tokens = self._for_prompts(single)
        return divided(prompts, tokens, tokens)

    def continues(self, plan: IterationPlan, kv: KvAllocator, leaving: int, undecided: int) -> bool:
        rows = len(plan.rows)
        if rows + leaving != len(self._running) or self._swapped:
            return False
        if not self._waiting:
            return True
        prompt_tokens = sum([row.count for row in plan.rows if row.count > 1])
        if prompt_tokens and prompt_tokens >= self._for_prompts(sum([row.count == 1 for row in plan.rows])):
            return True
        if leaving:  # another can join in its place
            return False
        full = rows >= min(self._max_rows, self._max_step_tokens)
        return full or not self._has_room(kv, self._waiting[0])

    def metrics(self) -> dict[str, float]:
        return {"swapped": float(len(self._swapped))}

    def _admit(self, sequence: Sequence, kv: KvAllocator) -> bool:
        """Give a swapped or waiting sequence blocks; it then runs."""
        if sequence.phase is Phase.SWAPPED:
            queue, admitted = self._swapped, resume(sequence, kv)
        else:
            queue, admitted = self._waiting, self._has_room(kv, sequence) and start(sequence, kv)
        if admitted:
            queue.remove(sequence)
            insort(self._running, sequence, key=by_arrival)
        return admitted

    def _has_room(self, kv: KvAllocator, newcomer: Sequence) -> bool:
        if self._headroom or not self._running:
            return leaves_next_blocks(kv, len(self._running), newcomer)
        return kv.free_blocks + kv.cached_blocks >= kv.geometry.blocks_for(newcomer.target)

    def _for_prompts(self, decode_rows: int) -> int:
        """Return the prompt tokens of an iteration with `decode_rows`."""
        remaining = self._max_step_tokens - decode_rows
        return min(remaining, self._chunk_beside(decode_rows)) if decode_rows else remaining

    def _chunk_beside(self, decode_rows: int) -> int:
        return max(self._prefill_chunk - decode_rows, (self._prefill_chunk + 1) // 2)

    def _count(self, sequence: Sequence, tokens_left: int) -> int:
        return min(sequence.uncomputed, tokens_left)

    def _make_headroom(
        self, sequence: Sequence, positions: int, kv: KvAllocator, plan: IterationPlan, planned: set[Sequence]
    ) -> bool:
        """Extend a sequence, preempting younger ones that are not in this plan; as a last resort itself."""
        while not kv.extend(sequence, positions):
            younger = self._running[bisect_left(self._running, by_arrival(sequence), key=by_arrival) :]
            victim = next((s for s in reversed(younger) if s not in planned and not s.pinned), None)
            if victim is None or (victim is sequence and len(younger) > 1):
                return False  # the younger ones run or are being read: wait for them
            self._running.remove(victim)
            preempt(victim, kv, plan, self._preemption)
            insort(self._swapped if victim.phase is Phase.SWAPPED else self._waiting, victim, key=by_arrival)
            if victim is sequence:
                return False
        return True
