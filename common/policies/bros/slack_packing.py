"""The packing of BROS (R4): real-time requests by what their deadlines leave, best-effort ones in the room between.

    1. requests unserved for too long              one of each class, whatever it costs; not in every iteration
    2. real-time, most urgent first                while the iteration ends before the most urgent deadline (t_min)
    3. real-time that is late and samples tokens   as far as that leaves room
    4. best-effort that keeps its blocks           likewise: the oldest, a share of the cache
    5. real-time that is late, prompts             likewise
    6. best-effort, least to bring back first      likewise; in a full batch, instead of real-time that can wait

The preset's `IterationScheduler`. With the bidirectional allocator real-time requests share best-effort blocks (R8),
with others best-effort requests are dropped for them (R11, `drops.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain

from cohort.common.policies.baselines.batch_builder import IterationLimits
from cohort.common.policies.bros.batch import NO_DEADLINE_S, AdaptiveBatchSize, Batch, DecodeRows, is_decode
from cohort.common.policies.bros.drops import Drops
from cohort.common.policies.bros.iteration_cost import BatchLoad, IterationCost, load_of
from cohort.common.policies.bros.request_queues import BestEffortQueues, RealTimeQueues, UrgentFirst, slots_away
from cohort.common.policies.bros.token_groups import TokenGroups
from cohort.common.policies.interface import IterationPlan, IterationScheduler, News, Ran
from cohort.common.policies.kv_interface import BlockSharing, KvAllocator, can_overlap
from cohort.common.policies.sequences import preempt, resume, start
from cohort.common.policies.settings import BrosSettings
from cohort.common.sequence import Phase, Sequence
from cohort.common.types import Attempt, TrafficClass

_SMALLEST_CUT = 16
"""Least tokens of a prompt that are worth a row."""
_CUT_WITHIN = 0.95
"""Share of the time left that a cut prompt fills: forecasts are off by some per cent, or half would end too late."""
_MARGIN = 0.95
"""Factor between an iteration's time and a target: the iteration in flight is still to be learned from (R3)."""
_TURN_EVERY = 10
"""Least number of iterations between two starving requests of a class."""


class SlackPacking(IterationScheduler):
    """Differs from the paper in which requests count as late, in cutting prompts, in the reach of the batch size (R6),
    and under overload: starvation, shares, newcomers (docs/papers/bros.md)."""

    def __init__(
        self, options: BrosSettings, limits: IterationLimits, groups: TokenGroups, cost: IterationCost
    ) -> None:
        self._options, self._limits, self._groups = options, limits, groups
        self._batch_size = AdaptiveBatchSize(first=options.first_batch, step=options.batch_step, most=limits.max_rows)
        self._cost = cost
        self._best_effort_time = BestEffortTime(options.best_effort_share, options.be_starvation_s)
        self._rt = RealTimeQueues(groups)
        self._be = BestEffortQueues()
        self._known_before: dict[Attempt, int] = {}
        """Tokens known of a sequence when it started here, or came back to the device."""
        self._drops = Drops(self._rt, self._be, groups, self._known_before, options.drops)
        self._average_s = 0.0
        limits_s: dict[TrafficClass, float] = {"rt": options.rt_starvation_s, "be": options.be_starvation_s}
        self._unserved = Unserved(limits_s, every=_TURN_EVERY)
        self._resubmitted: dict[Attempt, Sequence] = {}  # here for a repeated attempt
        self._had_rows: list[Sequence] = []  # in the last decision: only these have moved on since
        self._slots_copied = 0
        self._sharing: BlockSharing | None = None
        """Block sharing of an allocator that moves real-time requests into best-effort blocks by itself (R8)."""
        self._replaced = self._past_due_rows = self._dropped = self._late_rows = 0

    reads_runs = True

    def add(self, now_s: float, sequence: Sequence) -> None:
        (self._rt if sequence.request.traffic_class == "rt" else self._be).add(sequence)
        self._unserved.add(now_s, sequence)
        if sequence.request.waited_s:
            self._resubmitted[sequence.key] = sequence

    def remove(self, now_s: float, sequence: Sequence) -> None:
        (self._rt if sequence.request.traffic_class == "rt" else self._be).remove(sequence)
        self._unserved.remove(sequence)
        self._resubmitted.pop(sequence.key, None)
        self._known_before.pop(sequence.key, None)

    # -- Algorithm 1 -------------------------------------------------------------------------------------------

    def decide(self, now_s: float, kv: KvAllocator, news: News) -> IterationPlan:
        for ran in news.runs:
            self._learn(ran, kv)
        if news.ran is not None and news.undecided:
            self._note_undecided(news.ran, news.undecided)
        self._sharing = kv.sharing if kv.sharing is not None and kv.sharing.on_demand else None
        self._rt.had_rows(self._had_rows)
        batch = Batch(min(self._batch_size.value, self._limits.max_rows), self._limits.max_tokens)
        self._starving_first(now_s, kv, batch)
        self._resubmitted_first(kv, batch)
        decodes = self._rt.decodes.all_rows(self._cost, self._limits.max_rows)
        self._reserve_running(kv, batch)
        urgent = self._rt.urgent_first(now_s, self._average_s, decodes.least_s)
        self._bind_late(urgent, decodes, kv, batch)
        infeasible, cut_short = self._pack_real_time(urgent, kv, batch)
        decoding = chain(urgent.past_due_started(), infeasible)
        self._pack_past_due((s for s in decoding if is_decode(s)), kv, batch)
        self._pack_guaranteed(kv, batch)
        self._pack_past_due(chain(urgent.past_due(), infeasible), kv, batch)
        self._pack_best_effort(kv, batch)
        if not batch.rows and not batch.slots:
            batch.limit_s = NO_DEADLINE_S  # of a request for which there are no blocks
            self._pack_guaranteed(kv, batch)
        if not batch.rows and not batch.slots:
            self._force_oldest(kv, batch)
        if batch.rows:
            self._batch_size.decided(cut_short=cut_short)
        self._had_rows = [row.sequence for row in batch.rows.values()]
        self._unserved.served(now_s, self._had_rows)
        return self._finished(batch)

    def _note_undecided(self, ran: Ran, undecided: int) -> None:
        """Count iterations that ran without a decision as decisions would have: all rows went on (`continues`)."""
        self._unserved.repeated(undecided)
        self._unserved.served(ran.ended_s - ran.latency_s, (row.sequence for row in ran.plan.rows))
        self._past_due_rows += undecided * min(self._late_rows, len(ran.plan.rows))
        self._batch_size.repeated(undecided)

    def continues(self, plan: IterationPlan, kv: KvAllocator, leaving: int, undecided: int) -> bool:
        """Return whether the packing could only take the same rows again (R4): every request here has a row of one
        token, and either every real-time one is on time, or there are only real-time rows and every one is late.

        Each row samples a token when the iteration ends, so every real-time one then has its whole TPOT target left,
        and time itself decides nothing. With more rows than the batch size best-effort ones would wait (R6)."""
        rows, groups, limits = plan.rows, self._groups, self._limits
        if len(rows) + leaving != len(self._rt) + len(self._be):
            return False
        if not groups.single or len(rows) > min(limits.max_rows, limits.max_tokens):
            return False
        tpots_s = [groups.tpot_s(row.sequence) for row in rows if row.sequence.request.traffic_class == "rt"]
        best_effort = len(rows) - len(tpots_s)
        if best_effort and len(rows) > self._batch_size.value:
            return False
        takes_s = self._cost.exec_of(0, len(rows), sum(row.start + 1 for row in rows))
        on_time = takes_s <= _MARGIN * min(tpots_s, default=NO_DEADLINE_S)
        return on_time or (not best_effort and _MARGIN * takes_s >= max(tpots_s, default=0.0))

    def _finished(self, batch: Batch) -> IterationPlan:
        self._dropped, self._past_due_rows = self._dropped + batch.dropped, self._past_due_rows + batch.late
        self._late_rows = batch.late
        self._slots_copied, plan = batch.slots, batch.plan
        prefill = [row for row in batch.rows.values() if row.count > 1]
        plan.rows = prefill + (decode := [row for row in batch.rows.values() if row.count == 1])
        plan.estimated_s = self._cost.iteration_s(batch.load, batch.slots)
        plan.reason = f"{len(prefill)} prefill, {len(decode)} decode, {len(plan.preempted)} preempted"
        return plan

    def _starving_first(self, now_s: float, kv: KvAllocator, batch: Batch) -> None:
        """Place starving requests. A prompt is cut to the time that all decode rows leave, if they leave any."""
        for sequence in self._unserved.turns(now_s):
            count = self._count(sequence, batch.tokens_left)
            if count != 1 and self._options.cut_prompts:
                decodes = self._rt.decodes.all_rows(self._cost, self._limits.max_rows)
                context = decodes.context + batch.context + sequence.computed
                load = BatchLoad(batch.prefill_tokens, decodes.rows, context)
                count = self._cut(count, load, batch, decodes.tpot_s) or count
            self._place(sequence, kv, batch, self._droppable(kv, batch, sequence, real_time=False), count)

    def _resubmitted_first(self, kv: KvAllocator, batch: Batch) -> None:
        """Place the oldest request that another worker, or this one before a restart, had started, as long as it
        computes what was computed once: every newcomer on time would be served before it."""
        unfinished = (s for s in self._resubmitted.values() if s.phase is not Phase.RUNNING or s.uncomputed > 1)
        sequence = min(unfinished, key=lambda s: (s.arrived_s, s.key), default=None)
        if sequence is not None and sequence.key not in batch.safe:
            self._place(sequence, kv, batch, self._droppable(kv, batch, sequence, real_time=False))

    def _bind_late(self, urgent: UrgentFirst, decodes: DecodeRows, kv: KvAllocator, batch: Batch) -> None:
        """Place late decode rows first if none is on time, and bound prompts: the iteration lasts as long as the
        strictest TPOT target or, if that is longer, all decode rows."""
        cuts = self._options.cut_prompts  # else no prompt would ever be short enough
        if cuts and decodes.tpot_s < NO_DEADLINE_S and not any(is_decode(s) for s in urgent.started_on_time()):
            batch.limit_s = min(batch.limit_s, max(decodes.least_s, decodes.tpot_s))
            self._pack_past_due((s for s in urgent.past_due_started() if is_decode(s)), kv, batch)

    def _pack_real_time(self, urgent: UrgentFirst, kv: KvAllocator, batch: Batch) -> tuple[list[Sequence], bool]:
        """Pack real-time requests (lines 3–15). Return those that would be late even alone, and whether a deadline cut
        the packing short (lines 11–12)."""
        cost = self._cost
        # Starting a request moves it between queues: the order is read before any moves.
        pulled: list[tuple[float, Sequence, int]] = []
        infeasible: list[Sequence] = []
        rows, tokens_left, cut_short = len(batch.rows), batch.tokens_left, False
        prefill, decode, context = batch.prefill_tokens, batch.decode_rows, batch.context
        exec_of, chunk, swap_s = cost.exec_of, self._limits.chunk, cost.swap_s(batch.slots)
        most_rows = self._limits.max_rows
        # Share of the time before the deadline; the rest is for best-effort requests that keep their share.
        for_prompts = 1.0 - (self._best_effort_time.reserved_share if batch.guaranteed else 0.0)
        for residual_s, key, sequence in urgent:
            if key in batch.safe:
                continue
            computed = sequence.computed
            count = min(sequence.uncomputed, chunk, tokens_left)
            if count == 1 and rows < most_rows:
                # The usual row: a request that keeps its deadline in the batch would keep it alone.
                limit_s = residual_s if residual_s < batch.limit_s else batch.limit_s
                if exec_of(prefill, decode + 1, context + computed + 1) <= limit_s >= swap_s:
                    batch.limit_s = limit_s
                    pulled.append((residual_s, sequence, 1))
                    decode, context = decode + 1, context + computed + 1
                    rows, tokens_left = rows + 1, tokens_left - 1
                    continue
            alone_s = exec_of(0, 1, computed + 1) if count <= 1 else exec_of(sequence.uncomputed, 0, computed)
            if residual_s < alone_s:
                infeasible.append(sequence)
                continue
            batch.limit_s = min(batch.limit_s, residual_s)
            if rows >= most_rows or count < 1:
                break
            if count == 1:
                grown = prefill, decode + 1, context + computed + 1
            elif cut_short:
                continue
            else:
                grown = prefill + count, decode, context + computed
            limit_s = batch.limit_s if count == 1 else for_prompts * batch.limit_s
            if max(exec_of(*grown), swap_s) > limit_s:
                # No further prompt is taken, but rows of one token are, or best-effort rows would run instead.
                cut_short = True
                urgent.skip_waiting()
                if count == 1:
                    break
                load, taken = BatchLoad(prefill, decode, context), batch.safe | {row.key for _, row, _ in pulled}
                count = self._cut_on_time(sequence, count, load, batch, taken, limit_s)
                if count == 0:
                    continue
                grown = prefill + count, decode, context + computed
            pulled.append((residual_s, sequence, count))
            prefill, decode, context = grown
            rows, tokens_left = rows + 1, tokens_left - count
        no_headroom = False
        for residual_s, sequence, count in pulled:
            waiting = sequence.phase is Phase.WAITING
            if waiting and no_headroom:
                continue  # where the one before found no blocks, the next would not either
            if self._place(sequence, kv, batch, self._droppable(kv, batch, sequence, real_time=True), count):
                batch.chosen.append((residual_s, sequence))
            elif waiting:
                no_headroom = True
        return infeasible, cut_short

    def _cut_on_time(
        self, sequence: Sequence, count: int, load: BatchLoad, batch: Batch, taken: set[Attempt], limit_s: float
    ) -> int:
        """Return how many tokens of a prompt that does not fit are taken; 0 = none. Late decode rows after it keep
        their place: there is always a prompt to cut, and they would have none in any iteration."""
        if not self._options.cut_prompts:
            return 0
        rows, context = self._rt.decodes.without(taken)
        context += load.context + sequence.computed + rows
        return self._cut(count, BatchLoad(load.prefill_tokens, load.decode_rows + rows, context), batch, limit_s)

    def _reserve_running(self, kv: KvAllocator, batch: Batch) -> None:
        """Choose the best-effort requests that keep blocks in this iteration, and reserve the blocks they need."""
        share = self._options.best_effort_share
        most = math.ceil(share * self._limits.max_rows)
        batch.guaranteed = self._be.first_within(most, int(share * kv.total_blocks), kv.geometry.blocks_for)
        # They come on top: else, with memory for many, they would fill the batch, and no late real-time request start.
        batch.most_rows = min(self._limits.max_rows, batch.most_rows + len(batch.guaranteed))
        if self._sharing is not None:
            self._sharing.spare(sequence.key for sequence in batch.guaranteed)
        self._reserve(kv, batch)

    def _reserve(self, kv: KvAllocator, batch: Batch) -> None:
        batch.reserved = sum(
            kv.geometry.blocks_for(sequence.target + 1)
            - (len(kv.blocks(sequence.key)) if sequence.phase is Phase.RUNNING else 0)
            for sequence in batch.guaranteed
        )

    def _pack_guaranteed(self, kv: KvAllocator, batch: Batch) -> None:
        """Pack the guaranteed best-effort requests. The reserve is theirs, and the batch's size does not hold them back
        until they had their share; the oldest may also take blocks from the youngest."""
        batch.reserved, size = 0, batch.most_rows
        if self._best_effort_time.reserved_share:
            batch.most_rows = self._limits.max_rows
        for sequence in batch.guaranteed:
            slots = slots_away(sequence, self._sharing)
            if slots and batch.rows and self._sharing is not None:
                self._bring_back(sequence, slots, self._sharing, batch)
                continue
            if not self._offer(sequence, kv, batch, self._droppable(kv, batch, sequence, real_time=False)):
                break
        batch.most_rows = size
        self._reserve(kv, batch)

    def _pack_past_due(self, late: Iterable[Sequence], kv: KvAllocator, batch: Batch) -> None:
        """Pack late requests after feasible ones, within the time that those leave."""
        for sequence in late:
            if batch.tokens_left <= 0 or len(batch.rows) >= self._limits.max_rows:
                return
            if batch.full and sequence.phase is Phase.WAITING:
                return
            if sequence.key in batch.safe or (batch.full and sequence.uncomputed > 1):
                continue
            fitting = self._fitting(sequence, batch)
            if fitting == 0:
                return
            waiting = sequence.phase is Phase.WAITING
            if self._place(sequence, kv, batch, self._droppable(kv, batch, sequence, real_time=False), fitting):
                batch.late += 1
            elif waiting:
                return  # the next would not find blocks either

    def _pack_best_effort(self, kv: KvAllocator, batch: Batch) -> None:
        """Pack best-effort requests (lines 17–33)."""
        whole, apart = self._be.by_slots(self._sharing)
        guaranteed = {sequence.key for sequence in batch.guaranteed}
        for index, sequence in enumerate(whole):
            # The oldest may take blocks from the youngest, or all could wait for each other's.
            victims = None if index else self._droppable(kv, batch, sequence, real_time=False)
            if not self._offer(sequence, kv, batch, victims):
                return
        for sequence in self._be.waiting(batch.most_rows):
            if batch.dropped or not self._has_headroom(sequence, kv, batch):
                break  # the next would not find blocks either
            if not self._offer(sequence, kv, batch, None):
                return
        if self._rt.has_waiting or kv.free_blocks < batch.reserved:
            return
        for slots, sequence in apart:
            if sequence.phase is Phase.WAITING or sequence.key in guaranteed:
                continue  # dropped just now, or had its turn
            if batch.rows and self._sharing is not None:
                if not self._bring_back(sequence, slots, self._sharing, batch):
                    return
            elif not batch.dropped and not self._offer(sequence, kv, batch, None):
                return

    def _offer(self, sequence: Sequence, kv: KvAllocator, batch: Batch, victims: Iterator[Sequence] | None) -> bool:
        """Place a best-effort request, in place of a real-time one if need be. Return False if none after it fits
        either."""
        if sequence.key in batch.safe or sequence.uncomputed < 1:
            return True
        fitting = self._fitting(sequence, batch)
        if fitting == 0 or batch.tokens_left <= 0:
            return False
        if len(batch.rows) >= batch.most_rows and not self._make_way(fitting, sequence, batch):
            return False
        self._place(sequence, kv, batch, victims, fitting)
        return True

    def _bring_back(self, sequence: Sequence, slots: int, sharing: BlockSharing, batch: Batch) -> bool:
        """R9, R12 · Restore a request's slots while this batch runs, if that takes no longer than the batch; the
        request runs in the next."""
        hidden = self._cost.swap_s(batch.slots + slots) <= max(self._cost.exec_s(batch.load), self._cost.least_s)
        if not hidden or not sharing.restore(sequence):
            return False
        sequence.phase = Phase.RUNNING
        self._rt.changed(sequence)
        self._known_before[sequence.key] = sequence.known
        batch.slots += slots
        batch.safe.add(sequence.key)
        return True

    def _make_way(self, count: int, sequence: Sequence, batch: Batch) -> bool:
        """Take the least urgent real-time request out of the batch if it can wait for the next (lines 25–32)."""
        while batch.chosen and batch.chosen[-1][1].key not in batch.rows:
            batch.chosen.pop()
        if not batch.chosen:
            return False
        residual_s, last = batch.chosen[-1]
        row = batch.rows[last.key]
        load = batch.load.minus(row.start, row.count).plus(sequence.computed, count)
        iteration_s = self._cost.iteration_s(load, batch.slots)
        own_s = self._cost.iteration_s(BatchLoad().plus(row.start, row.count))
        if iteration_s > batch.limit_s or iteration_s + max(self._average_s, own_s) > residual_s:
            return False
        batch.chosen.pop()
        batch.take_away(last)
        self._replaced += 1
        return True

    def _force_oldest(self, kv: KvAllocator, batch: Batch) -> None:
        """Give the oldest request the blocks that it needs: requests hold each other's, and none could run."""
        for queue in (self._rt, self._be):
            for sequence in sorted(queue.pending(), key=lambda s: s.arrived_s):
                victims = self._droppable(kv, batch, sequence, real_time=True, desperate=True)
                if self._place(sequence, kv, batch, victims):
                    return

    # -- rows and blocks ---------------------------------------------------------------------------------------

    def _count(self, sequence: Sequence, tokens_left: int) -> int:
        return min(sequence.uncomputed, self._limits.chunk, tokens_left)

    def _fitting(self, sequence: Sequence, batch: Batch) -> int:
        """Return how many of its tokens this batch can take in time; 0 = none."""
        count = self._count(sequence, batch.tokens_left)
        if count < 1 or self._cost.iteration_s(batch.load.plus(sequence.computed, count), batch.slots) <= batch.limit_s:
            return max(0, count)
        if count == 1 or not self._options.cut_prompts:
            return 0
        return self._cut(count, batch.load, batch, batch.limit_s)

    def _cut(self, count: int, load: BatchLoad, batch: Batch, limit_s: float) -> int:
        cut = min(count, self._cost.tokens_within(load, _CUT_WITHIN * limit_s))
        return cut if cut >= _SMALLEST_CUT and self._cost.swap_s(batch.slots) <= limit_s else 0

    def _place(
        self, sequence: Sequence, kv: KvAllocator, batch: Batch, victims: Iterator[Sequence] | None, count: int = 0
    ) -> bool:
        """Add a row of `count` tokens (0: as many as possible), dropping `victims` in turn until it has its blocks."""
        count = min(count, batch.tokens_left) or self._count(sequence, batch.tokens_left)
        if count < 1:
            return False
        if sequence.phase is Phase.SWAPPED and batch.rows and self._sharing is not None:
            return self._bring_back(sequence, self._sharing.checkpointed(sequence.key), self._sharing, batch)
        while not self._take(sequence, kv, batch, count):
            victim = next(victims, None) if victims is not None else None
            if victim is None and not self._drops.drops_itself(sequence):
                return False
            preempt(victim or sequence, kv, batch.plan, "recompute" if victim is None else self._limits.preemption)
            self._rt.changed(victim or sequence)
            batch.dropped += 1
            if victim is None:
                return False
        batch.add(sequence, count if count == 1 else min(count, sequence.uncomputed))  # less what a prefix cache had
        return True

    def _take(self, sequence: Sequence, kv: KvAllocator, batch: Batch, count: int) -> bool:
        """Allocate blocks for its next `count` tokens, in any phase."""
        if sequence.phase is Phase.RUNNING:
            return kv.extend(sequence, sequence.computed + count)
        if sequence.phase is Phase.SWAPPED:
            self._known_before[sequence.key] = sequence.known
            if not resume(sequence, kv):
                return False
            self._rt.changed(sequence)
            return True
        if not self._has_headroom(sequence, kv, batch) or not start(sequence, kv):
            return False
        self._known_before[sequence.key] = sequence.known
        (self._rt if sequence.request.traffic_class == "rt" else self._be).started(sequence)
        return True

    def _droppable(
        self, kv: KvAllocator, batch: Batch, sequence: Sequence, *, real_time: bool, desperate: bool = False
    ) -> Iterator[Sequence]:
        return self._drops.victims(sequence, kv, batch, self._sharing, real_time=real_time, desperate=desperate)

    def _has_headroom(self, sequence: Sequence, kv: KvAllocator, batch: Batch) -> bool:
        """Return whether running requests keep their next block, and guaranteed ones theirs, if this one starts."""
        spare = kv.free_blocks + kv.cached_blocks - batch.reserved - kv.geometry.blocks_for(sequence.target)
        if sequence.request.traffic_class == "rt" and self._sharing is not None:
            spare += self._sharing.lendable_blocks
        if spare < 0 or spare >= kv.total_blocks // 50:
            return spare >= 0
        return spare >= sum(1 for queue in (self._rt, self._be) for s in queue.pending() if s.phase is Phase.RUNNING)

    # -- learning ----------------------------------------------------------------------------------------------

    def _learn(self, ran: Ran, kv: KvAllocator) -> None:
        """Update T_avg and the cost model (R3)."""
        plan, latency_s, block_size = ran.plan, ran.latency_s, kv.geometry.block_size
        if plan.rows and not plan.has_grammars:
            for each_s in ran.times_s:
                self._average_s = each_s if self._average_s == 0.0 else 0.9 * self._average_s + 0.1 * each_s
        if len(self._be):
            self._best_effort_time.ran(ran, self._cost)
        first = [copy for copy in plan.copies if not copy.concurrent]
        if plan.drafted or plan.has_grammars or (first and self._cost.knows_slots and can_overlap(first, kv.geometry)):
            return  # the engine may or may not have waited for them
        slots = sum(len(copy.device) * (block_size if copy.unit == "block" else 1) for copy in first)
        self._cost.observe(load_of(plan.rows), self._slots_copied, latency_s, slots_before=slots)

    @property
    def learned(self) -> IterationCost:
        return self._cost

    def metrics(self) -> dict[str, float]:
        return {
            "batch_limit": float(self._batch_size.value),
            "batch_backoffs_total": float(self._batch_size.backoffs),
            "replaced_total": float(self._replaced),
            "past_due_rows_total": float(self._past_due_rows),
            "dropped_total": float(self._dropped),
            **self._cost.metrics(),
        }


class BestEffortTime:
    """Time that best-effort requests have had beyond their share of it (`best_effort_share`).

    It counts as their share for up to `window_s`: in a burst of real-time requests after a pause they need no share of
    every iteration. Fed with every iteration while best-effort requests are here.
    """

    def __init__(self, share: float, window_s: float) -> None:
        self._share, self._most_s = share, share * window_s
        self._ahead_s = 0.0

    def ran(self, ran: Ran, cost: IterationCost) -> None:
        """Count the part of an iteration by which their rows made it longer. Time that they did not get is not owed:
        under lasting overload they have their share of each iteration."""
        rows, total_s = ran.plan.rows, sum(ran.times_s)
        if not rows:
            return
        real_time = load_of([row for row in rows if row.sequence.request.traffic_class == "rt"])
        whole_s = cost.exec_s(load_of(rows))
        own = 0.0 if real_time == BatchLoad() else cost.exec_s(real_time) / whole_s if whole_s else 1.0
        ahead_s = self._ahead_s + (1.0 - own - self._share) * total_s
        self._ahead_s = min(max(0.0, ahead_s), self._most_s)

    @property
    def reserved_share(self) -> float:
        """Share of the next iteration that real-time prompts leave to them."""
        return 0.0 if self._ahead_s > 0.0 else self._share


class Unserved:
    """Requests of each class by how long they have waited for a row, and the starving ones whose turn it is (R4)."""

    def __init__(self, limits_s: Mapping[TrafficClass, float], *, every: int) -> None:
        """`limits_s`: longest wait of a class; `every`: least number of iterations between two turns of a class."""
        self._limits_s = limits_s
        self._every = every
        # Insertion order = the longest unserved first, per class.
        self._since: dict[TrafficClass, dict[Attempt, tuple[float, Sequence]]] = {each: {} for each in limits_s}
        self._iterations: dict[TrafficClass, int] = dict.fromkeys(limits_s, 0)

    def add(self, now_s: float, sequence: Sequence) -> None:
        self._since[sequence.request.traffic_class][sequence.key] = (now_s, sequence)

    def remove(self, sequence: Sequence) -> None:
        self._since[sequence.request.traffic_class].pop(sequence.key, None)

    def served(self, now_s: float, sequences: Iterable[Sequence]) -> None:
        """Note requests that have rows in the iteration that starts now."""
        for sequence in sequences:
            since = self._since[sequence.request.traffic_class]
            if since.pop(sequence.key, None) is not None:
                since[sequence.key] = (now_s, sequence)

    def repeated(self, iterations: int) -> None:
        """Count iterations that ran without a decision."""
        for traffic_class in self._iterations:
            self._iterations[traffic_class] += iterations

    def turns(self, now_s: float) -> Iterator[Sequence]:
        """Yield the longest unserved request of each class, if that is too long. Called once a decision."""
        for traffic_class, after_s in self._limits_s.items():
            since = self._since[traffic_class]
            key = next(iter(since), None)
            self._iterations[traffic_class] += 1
            if self._iterations[traffic_class] < self._every:
                continue
            if key is not None and now_s - since[key][0] > after_s:
                self._iterations[traffic_class] = 0
                yield since[key][1]
