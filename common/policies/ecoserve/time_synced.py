"""E10 · EcoServe's iteration: prompts fill the device, decodes fill the KV cache, groups run in step (Alg. 1).

    WAITING ─▶ prompt queue (E6) ─▶ prefilling ─▶ decode queue (E6) ─▶ batch: groups in step (E3) ─▶ done
                 │ up to the target                 ▲      │ whole predicted length at once (E2),
                 │ forward size (E1)                │      │ or inside another's second half (E7)
                 │                                  └──────┴─ group over and not done: stop, KV stays (E5)
                 └◀──────── evicted: late borrowers (E8), or no sequence could run

The `IterationScheduler` of the preset `ecoserve`. Between two ends of groups only prompts are chosen. A decode that
outlives its prediction waits with its KV and continues.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from cohort.common.policies.baselines.batch_builder import IterationLimits
from cohort.common.policies.ecoserve.batch import SyncedBatch
from cohort.common.policies.ecoserve.deadlines import Deadlines
from cohort.common.policies.ecoserve.forward_size import LearnedForwardSize
from cohort.common.policies.ecoserve.loans import Candidate, LendingRule
from cohort.common.policies.ecoserve.padding_ratio import PaddingRatio
from cohort.common.policies.ecoserve.task_order import PromptQueue, Ranges, Rank, rank
from cohort.common.policies.interface import IterationPlan, IterationScheduler, News
from cohort.common.policies.kv_interface import BlockSharing, KvAllocator
from cohort.common.policies.sequences import preempt, resume, start
from cohort.common.policies.settings import EcoServeSettings
from cohort.common.policies.step_times.learned_times import LearnedTimes
from cohort.common.sequence import Phase, Row, Sequence
from cohort.common.types import Attempt


@dataclass(slots=True)
class Counters:
    iterations: int = 0
    formations: int = 0
    quiet: int = 0
    borrowed: int = 0
    late: int = 0
    stopped: int = 0
    continued: int = 0
    forced: int = 0


class TimeSynced(IterationScheduler):
    def __init__(self, options: EcoServeSettings, limits: IterationLimits, *, learn_size: bool = False) -> None:
        """`limits.max_tokens`: E1's target forward size, or its bound if it is learned."""
        self.options, self.limits = options, limits
        self._padding = PaddingRatio(options.padding, tuned=self.options.tune_padding)
        self._times = LearnedTimes()
        self._deadlines = Deadlines(self._times.table)
        self._size = LearnedForwardSize(limits.max_tokens) if learn_size else None
        self._ranges = Ranges()
        self._prompts = PromptQueue(self._ranges, ordered=self.options.ordered)
        self._prefilling: dict[Sequence, int] = {}
        """Started prompts, with the position at which each becomes a decode."""
        self._decodes: dict[Attempt, Sequence] = {}
        """Decodes that wait, with KV on the device or swapped out."""
        self._stopped: set[Attempt] = set()
        """Decodes that had to wait because they outlived their predictions."""
        self._batch = SyncedBatch()
        self._loans = LendingRule(self._batch, options.buffer)
        self._drained = True
        self._group_over = False
        self._freed = self._available = 0
        self._stepping = False
        """Whether decodes are in the plan, so that the batch's clock counts its iterations."""
        self._forms_always = False
        """Whether decodes waited after the last decision, so that each iteration would form a batch again."""
        self._changed = False
        """Whether a sequence came or was removed since the last decision."""
        self._sharing: BlockSharing | None = None
        self._count = Counters()

    # -- the policy interface --------------------------------------------------------------------------------------

    def add(self, now_s: float, sequence: Sequence) -> None:
        self._changed = True
        self._deadlines.meet(sequence)
        if sequence.phase is Phase.WAITING:
            self._prompts.add(now_s, sequence, self._deadlines.of(sequence))
        elif sequence.uncomputed > 1:
            self._prefilling[sequence] = sequence.target
        else:
            self._decodes[sequence.key] = sequence

    def remove(self, now_s: float, sequence: Sequence) -> None:
        self._changed = True
        known = self._prompts.remove(sequence) or self._batch.leave(sequence)
        known = self._decodes.pop(sequence.key, None) is not None or known
        known = self._prefilling.pop(sequence, None) is not None or known
        stopped = sequence.key in self._stopped
        self._stopped.discard(sequence.key)
        if known and _has_ended(sequence):
            self._padding.observe(sequence.predicted, sequence.output_tokens, stopped=stopped)

    def decide(self, now_s: float, kv: KvAllocator, news: News) -> IterationPlan:
        """E10 · Plan the next iteration (EcoServe Algorithm 1)."""
        self._take_in(now_s, kv, news)
        self._changed = False
        plan = IterationPlan()
        self._end_groups(kv)
        self._take_back(now_s, kv, plan)
        formed = self._formation_is_due(kv)
        if formed:  # lines 1 to 4
            self._form(now_s, kv, plan)
            self._take_back(now_s, kv, plan)
        prompts = self._choose_prompts(now_s, kv, formed)  # line 5
        if not prompts and not len(self._batch):
            prompts = self._force(now_s, kv, plan)
            self._take_back(now_s, kv, plan)
        self._before_rows(now_s, kv, plan)
        decodes = [Row(sequence, sequence.computed, 1) for sequence in self._batch.sequences]
        plan.rows = sorted(prompts, key=lambda row: row.count == 1) + decodes
        self._stepping = bool(decodes)
        plan.reason = f"{len(prompts)} prompts, {len(decodes)} decodes in {self._batch.groups} groups"
        self._available = kv.free_blocks + kv.cached_blocks
        if plan.rows:
            self._count.iterations += 1
            self._count.quiet += not formed and not prompts
        self._forms_always = bool(self._decodes) and not self.options.synced
        return plan

    def _take_in(self, now_s: float, kv: KvAllocator, news: News) -> None:
        """Take in predictions, iterations and freed blocks since the last decision."""
        for sequence in news.revised:
            self._revise(now_s, sequence)
        for ran in news.runs:
            self._times.learn(ran, kv.geometry)
        self._deadlines.refresh()
        if self._size is not None:
            self._size.refresh(self._times.table.step_times)
        if news.ran is not None:
            skipped = news.ran.iterations - 1
            self._count.iterations += skipped
            if self._forms_always:
                self._count.formations += skipped
            else:
                self._count.quiet += skipped
            if self._stepping:
                self._batch.clock += news.ran.iterations
        available = kv.free_blocks + kv.cached_blocks
        self._freed += max(0, available - self._available)
        for sequence, goal in list(self._prefilling.items()):
            if sequence.computed >= goal:  # line 7: generated from prompts
                del self._prefilling[sequence]
                self._decodes[sequence.key] = sequence
        self._prompts.refresh(now_s)
        self._sharing = kv.sharing
        if news.ran is not None and (news.ran.plan.drafted or news.ran.plan.has_grammars):
            self._advance(news.ran.plan, kv)

    def _advance(self, plan: IterationPlan, kv: KvAllocator) -> None:
        """E2, E8 · Bring forward the ends of members whose drafts were right: they reach the end of their blocks, and
        the blocks that they lent, earlier. Put off those of members whose rows sat the step out. The paper's rows yield
        one token an iteration."""
        for row in plan.rows:
            sequence, ahead = row.sequence, row.sequence.computed - row.start - row.count
            if ahead and sequence in self._batch:
                self._batch.advance(sequence, ahead)
                if ahead > 0 and self._sharing is not None:
                    self._loans.resume(sequence, kv, self._sharing)

    def _revise(self, now_s: float, sequence: Sequence) -> None:
        """E4 · Reorder a waiting prompt whose prediction changed. Waiting decodes are grouped by their prediction when
        the batch is formed; a running one keeps its blocks, and leaves a group that it outlives (E5)."""
        if self._prompts.remove(sequence):
            self._prompts.add(now_s, sequence, self._deadlines.of(sequence))

    def steady_for(self, plan: IterationPlan, kv: KvAllocator) -> int:
        """Return the iterations until the next end of a group or of a loan; 0 unless only decodes run, none waits to
        join, and the composition is in the table already."""
        if plan.preempted or plan.copies or len(plan.rows) != len(self._batch) or self._prefilling:
            return 0
        # Unsynced, the second halves of lenders change with every iteration.
        if self._decodes and (self._drained or (not self.options.synced and self.options.pipelined)):
            return 0
        if not self._times.knows(plan):
            return 0
        return self._next_change() or 0

    def continues(self, plan: IterationPlan, kv: KvAllocator, leaving: int, undecided: int) -> bool:
        """Return whether the same rows go on: if one leaves and another could join, `decide` is needed."""
        if not self._decodes and not self._prefilling and not len(self._prompts):
            end = self._next_change()
            return len(plan.rows) + leaving == len(self._batch) and end is not None and end > undecided
        return not leaving and not self._changed and self.steady_for(plan, kv) > undecided

    def _next_change(self) -> int | None:
        """Return the iterations before the next end of a group or of a loan; None: no group runs."""
        ends = [end for end in (self._batch.next_end, self._loans.next_due) if end is not None]
        return max(0, min(ends) - self._batch.clock - 1) if ends else None

    @property
    def learned(self) -> LearnedTimes:
        return self._times

    def metrics(self) -> dict[str, float]:
        count = self._count
        return {
            "target_forward_tokens": float(self._target),
            "undisturbed_prompt_ms": 1e3 * self._deadlines.prompt_s,
            "undisturbed_token_ms": 1e3 * self._deadlines.token_s,
            "prompt_queue": float(len(self._prompts)),
            "decode_queue": float(len(self._decodes)),
            "groups": float(self._batch.groups),
            "groups_total": float(self._batch.groups_ended),
            "iterations_total": float(count.iterations),
            "formations_total": float(count.formations),
            "iterations_undecided_total": float(count.quiet),
            "borrowers_total": float(count.borrowed),
            "borrowers_late_total": float(count.late),
            "underpredictions_continued_total": float(count.continued),
            "underpredictions_stopped_total": float(count.stopped),
            "forced_total": float(count.forced),
            "padding_ratio": self._padding.ratio,
            "overpredicted_total": float(self._padding.over),
            "underpredicted_total": float(self._padding.under),
        }

    @property
    def _target(self) -> int:
        return self.limits.max_tokens if self._size is None else self._size.tokens

    # -- lengths -----------------------------------------------------------------------------------------------

    def _length(self, sequence: Sequence, sampled: int = 0) -> int:
        """E2, E3, E5 · Return the tokens to allocate for a decode that runs now, or after `sampled` more tokens: what
        is left of its padded prediction, in whole `group_tokens`, at most what it can need. Beyond its prediction
        L_new is the padding again, of what exists."""
        made, quantum = sequence.output_tokens + sampled, self.options.group_tokens
        remaining = math.ceil(sequence.predicted * (1.0 + self._padding.ratio)) - made
        if remaining < 1:
            remaining = math.ceil(made * self._padding.ratio)
        length = max(1, math.ceil(remaining / quantum)) * quantum
        return max(1, min(length, sequence.max_positions - sequence.computed))

    def _reserve(self, kv: KvAllocator) -> int:
        return math.ceil(self.options.reserve * kv.total_blocks)

    def _headroom(self, kv: KvAllocator) -> int:
        """Return the blocks for decodes that are to run."""
        return kv.free_blocks + kv.cached_blocks - (self._reserve(kv) if len(self._batch) else 0)

    @staticmethod
    def _lacks(sequence: Sequence, length: int, kv: KvAllocator) -> int:
        """Return the blocks that a decode lacks to run for `length` positions."""
        held = len(kv.blocks(sequence.key)) if sequence.phase is Phase.RUNNING else 0
        return max(0, kv.geometry.blocks_for(sequence.computed + length) - held)

    def _before_rows(self, now_s: float, kv: KvAllocator, plan: IterationPlan) -> None:
        """Skip allocation: every member of the batch has the blocks of its whole predicted length."""

    # -- ends --------------------------------------------------------------------------------------------------

    def _end_groups(self, kv: KvAllocator) -> None:
        """E5 · Continue decodes that are not done when their group ends with the reserve, or with the rest of their
        last block; else they stop and wait, their KV where it is (offload-free)."""
        for sequence in self._batch.ended():
            if self._continues(sequence, self._length(sequence), kv):
                self._count.continued += 1
                continue
            self._decodes[sequence.key] = sequence
            self._stopped.add(sequence.key)
            self._count.stopped += 1
        self._group_over |= self._batch.group_over
        self._batch.group_over = False

    def _continues(self, sequence: Sequence, length: int, kv: KvAllocator) -> bool:
        """Let a decode join again, beyond its prediction, if there is room."""
        slack = len(kv.blocks(sequence.key)) * kv.geometry.block_size - sequence.computed
        if self._claim(kv, sequence, sequence.computed + length):
            self._join(sequence, length, kv)
        elif slack >= 1:
            self._join(sequence, min(slack, length), kv)
        else:
            return False
        return True

    def _take_back(self, now_s: float, kv: KvAllocator, plan: IterationPlan) -> None:
        """E8 · Move borrowers to host memory that are still in a block which its lender needs."""
        if self._sharing is None:
            return
        for lender, index in self._loans.due(kv, self._sharing):
            for borrower in self._sharing.borrowers(lender, index):
                self._stopped.add(borrower.key)
                self._count.late += 1
                self._evict(now_s, borrower, kv, plan, "swap")

    def _evict(
        self, now_s: float, sequence: Sequence, kv: KvAllocator, plan: IterationPlan, how: Literal["swap", "recompute"]
    ) -> None:
        self._batch.leave(sequence)
        self._decodes.pop(sequence.key, None)
        self._prefilling.pop(sequence, None)
        preempt(sequence, kv, plan, how)
        if sequence.phase is Phase.SWAPPED:
            self._decodes[sequence.key] = sequence
            self._group_over = True
        else:
            self._prompts.add(now_s, sequence, self._deadlines.of(sequence))

    # -- the batch of decodes ----------------------------------------------------------------------------------

    def _formation_is_due(self, kv: KvAllocator) -> bool:
        due = self._group_over or self._drained or not len(self._batch) or not self.options.synced
        return bool(self._decodes) and (due or self._freed >= max(1, self._reserve(kv)))

    def _form(self, now_s: float, kv: KvAllocator, plan: IterationPlan) -> None:
        """E3, E7 · Form groups until the cache is allocated, then add borrowers (Alg. 1, lines 2 and 3)."""
        self._count.formations += 1
        self._group_over, self._freed = False, 0
        lengths = [(self._length(s), s) for s in self._decodes.values()]
        waiting = sorted((self._rank(now_s, s, length), length, s) for length, s in lengths)
        if len(self._prompts) or sum(self._lacks(s, length, kv) for _, length, s in waiting) > self._headroom(kv):
            self._nest(waiting, kv)  # a loan may have to be given back: none while there are blocks for all
        self._allocate(now_s, [task for task in waiting if task[2].key in self._decodes], kv, plan)
        self._nest(waiting, kv)
        self._drained = not self._decodes

    def _nest(self, waiting: list[tuple[Rank, int, Sequence]], kv: KvAllocator) -> None:
        """E7 · Find borrowers among the waiting decodes."""
        if not self.options.pipelined or self._sharing is None or not self._decodes:
            return
        # A sequence that another worker continues does not borrow: it keeps its blocks until they are sent.
        candidates = [
            Candidate(length, self._deadlines.of(s), s.key, self._lacks(s, length, kv), s)
            for _, length, s in waiting
            if s.phase is Phase.RUNNING and s.end is None and s.key in self._decodes
        ]
        for chosen in self._loans.arrange(candidates, kv, self._sharing, self._places()):
            del self._decodes[chosen.sequence.key]
            self._loans.resume(chosen.sequence, kv, self._sharing)
            self._count.borrowed += 1

    def _rank(self, now_s: float, sequence: Sequence, length: int) -> Rank:
        if self.options.ordered:
            return rank(self._ranges, now_s, self._deadlines.of(sequence), sequence, length)
        return (sequence.request.priority, 0, 0, 0, 0.0, sequence.arrived_s, sequence.key)

    def _allocate(
        self, now_s: float, waiting: list[tuple[Rank, int, Sequence]], kv: KvAllocator, plan: IterationPlan
    ) -> None:
        """E3 · Run whole groups in order of their first member; split the one that does not fit; then (E6) take the
        decodes that come closest to the blocks left."""
        headroom = self._headroom(kv)
        if not waiting:
            return
        for _, length, sequence in self._grouped(waiting):
            lacks = self._lacks(sequence, length, kv)
            if lacks > headroom or self._places() < 1 or not self._run(sequence, length, kv, plan):
                break
            headroom -= lacks
        else:
            return
        head = waiting[0][2]
        stands = head.key in self._decodes and now_s - self._deadlines.of(head) > self.options.patience_s
        if not self.options.ordered or stands:
            return
        decodes = [(length, sequence) for _, length, sequence in waiting if sequence.key in self._decodes]
        decodes.sort(key=lambda task: (-task[0], task[1].arrived_s, task[1].key))
        for length, sequence in decodes:  # longest first: each is the closest to what is left that fits
            if self._places() < 1 or headroom < 0:
                return
            lacks = self._lacks(sequence, length, kv)
            if lacks <= headroom and self._run(sequence, length, kv, plan):
                headroom -= lacks

    def _grouped(self, waiting: list[tuple[Rank, int, Sequence]]) -> list[tuple[Rank, int, Sequence]]:
        if not self.options.synced:
            return waiting
        groups: dict[int, list[tuple[Rank, int, Sequence]]] = {}
        for task in waiting:
            groups.setdefault(task[1], []).append(task)
        return [task for group in groups.values() for task in group]

    def _places(self) -> int:
        return min(self.limits.max_rows, self.limits.max_tokens) - len(self._batch)

    def _run(self, sequence: Sequence, length: int, kv: KvAllocator, plan: IterationPlan) -> bool:
        """Allocate a decode's blocks and let it join the batch; return False if there are none."""
        if sequence.phase is Phase.SWAPPED and not resume(sequence, kv):
            return False
        if not self._claim(kv, sequence, sequence.computed + length):
            return False
        self._decodes.pop(sequence.key, None)
        self._join(sequence, length, kv)
        return True

    def _join(self, sequence: Sequence, length: int, kv: KvAllocator) -> None:
        self._batch.join(sequence, length)
        if self._sharing is not None:
            self._loans.resume(sequence, kv, self._sharing)

    def _claim(self, kv: KvAllocator, sequence: Sequence, positions: int) -> bool:
        """E2 · Allocate the blocks for everything that a sequence is predicted to need."""
        sharing = self._sharing
        return kv.extend(sequence, positions) if sharing is None else sharing.claim(sequence, positions)

    # -- prompts -----------------------------------------------------------------------------------------------

    def _choose_prompts(self, now_s: float, kv: KvAllocator, formed: bool) -> list[Row]:
        """E1 · Choose prompts until the iteration has as many tokens as the device can use (Alg. 1, line 5)."""
        rows: list[Row] = []
        tokens = self._target - len(self._batch)
        places = self.limits.max_rows - len(self._batch)
        for sequence in sorted(self._prefilling, key=lambda s: (-s.computed, s.arrived_s, s.key)):
            count = min(sequence.uncomputed, tokens)
            if len(rows) >= places or count < 1:
                break
            if kv.extend(sequence, sequence.computed + count):
                rows.append(Row(sequence, sequence.computed, count))
                tokens -= count
        if not self.options.decoupled and len(self._batch) and not formed:
            return rows  # SyncCoupled: a decode joins with a group only
        while tokens > 0 and len(rows) < places:
            chosen = self._next_prompt(now_s, kv, tokens)
            if chosen is None or not start(chosen, kv):
                break
            self._prompts.remove(chosen)
            self._prefilling[chosen] = chosen.target
            if not self.options.decoupled:
                self._claim(kv, chosen, chosen.target + self._length(chosen, 1))
            count = min(chosen.uncomputed, tokens)
            rows.append(Row(chosen, chosen.computed, count))
            tokens -= count
        return rows

    def _next_prompt(self, now_s: float, kv: KvAllocator, tokens: int) -> Sequence | None:
        """Return the first prompt in order that fits the iteration and the cache; an overdue one, and one that fits no
        iteration, is started in part."""
        head = self._prompts.head()
        if head is None:
            return None
        blocks = kv.free_blocks + kv.cached_blocks
        waiting = [s for s in self._decodes.values() if s.phase is Phase.RUNNING]
        if waiting:
            held = sum(kv.held(s.key) for s in (*waiting, *self._prefilling))
            limit = max(self._reserve(kv), math.floor(self.options.waiting_share * kv.total_blocks))
            blocks = min(blocks, limit - held)
        headroom = blocks * kv.geometry.block_size
        first, deadline_s = head
        if not self.options.decoupled:
            needed = kv.geometry.blocks_for(first.target + self._length(first, 1))
            return first if needed <= blocks or (needed > kv.total_blocks and not len(self._batch)) else None
        if first.target <= headroom and now_s > deadline_s:
            return first
        if now_s - deadline_s > self.options.patience_s:
            return None
        return self._prompts.fitting(min(tokens, headroom)) or self._prompts.fitting(headroom)

    # -- when no sequence can run ---------------------------------------------------------------------------------

    def _force(self, now_s: float, kv: KvAllocator, plan: IterationPlan) -> list[Row]:
        """Evict the last in order for the first: decodes and started prompts hold all blocks, and none has enough to go
        on. Every eviction yields a token, so this ends."""
        tasks = [*self._decodes.values(), *self._prefilling]
        tasks.sort(key=lambda s: self._rank(now_s, s, self._length(s)))
        for task in tasks:
            if task.phase not in (Phase.RUNNING, Phase.SWAPPED):
                continue
            length = self._prefilling[task] - task.computed if task in self._prefilling else self._length(task)
            victims = [s for s in tasks if s is not task and s.phase is Phase.RUNNING and not s.pinned]
            while self._lacks(task, length, kv) > kv.free_blocks + kv.cached_blocks and victims:
                self._evict(now_s, victims.pop(), kv, plan, self.limits.preemption)
            held = len(kv.blocks(task.key)) if task.phase is Phase.RUNNING else 0
            room = (held + kv.free_blocks + kv.cached_blocks) * kv.geometry.block_size
            length = min(length, room - task.computed)
            if length < 1:
                continue
            self._count.forced += 1
            if task in self._prefilling:
                count = min(length, self.limits.max_tokens)
                if kv.extend(task, task.computed + count):
                    return [Row(task, task.computed, count)]
            elif self._run(task, length, kv, plan):
                return []
        return []


def _has_ended(sequence: Sequence) -> bool:
    """Return whether a removed sequence sampled its last token, instead of leaving for another worker."""
    sampling = sequence.request.sampling
    return sequence.output_tokens > 0 and (
        sequence.tokens[-1] in sampling.stop_token_ids or sequence.output_tokens >= sampling.max_tokens
    )
