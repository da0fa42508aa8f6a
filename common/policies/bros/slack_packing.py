"""The packing of BROS (R4): real-time requests by what their deadlines leave, best-effort ones in the room between.

    1. requests unserved for too long              one of each class, whatever it costs; not in every iteration
    2. real-time, most urgent first                while the iteration ends before the most urgent deadline (t_min)
    3. real-time that is late and samples tokens     as far as that leaves room
    4. best-effort that keeps its blocks           likewise: the oldest, a share of the cache
    5. real-time that is late, prompts             likewise
    6. best-effort, least to bring back first      likewise; in a full batch, instead of real-time that can wait

The preset's `IterationScheduler`. Blocks come from any allocator; with the bidirectional one real-time requests share
best-effort blocks (R8), with another one best-effort requests are dropped for them (R11, `drops.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from itertools import chain

from cohort.common.policies.baselines.batch_builder import IterationLimits
from cohort.common.policies.bros.batch import NO_DEADLINE_S, Batch, DecodeRows, is_decode
from cohort.common.policies.bros.batch_size import AdaptiveBatchSize
from cohort.common.policies.bros.drops import Drops
from cohort.common.policies.bros.iteration_cost import BatchLoad, IterationCost, load_of
from cohort.common.policies.bros.request_queues import BestEffortQueues, RealTimeQueues, UrgentFirst, slots_away
from cohort.common.policies.bros.token_groups import TokenGroups
from cohort.common.policies.interface import IterationPlan, IterationScheduler, News, Ran
from cohort.common.policies.kv_interface import BlockSharing, KvAllocator, goes_beside
from cohort.common.policies.sequences import preempt, resume, start
from cohort.common.policies.settings import BrosSettings
from cohort.common.sequence import Phase, Row, Sequence
from cohort.common.types import Attempt, TrafficClass

_SMALLEST_CUT = 16
"""Tokens of a prompt that are worth a row of their own."""
_CUT_WITHIN = 0.95
"""Share of the time left that a cut prompt fills: what is foreseen is off by some per cent, else half end too late."""
_MARGIN = 0.95
"""Between what an iteration takes and a target: the iteration in flight is still to be learned from (R3)."""


class SlackPacking(IterationScheduler):
    """Differs from the paper:

    - Infeasible requests are those that would be late alone, prompts as a whole, or in an iteration with all decodes.
      Otherwise a request with a few milliseconds left empties the batch, which makes the next ones late, and so on
      for ever. They follow the others, and no request waits beyond the starvation times.
    - The paper computes every prompt whole, in one iteration, and waits with one that does not fit. Here it is cut to
      the room there is (`cut_prompts`): beside decode rows under a TPOT target of 50 ms no prompt of some hundred
      tokens ever fits, all would wait until they are late. After the first request that does not fit no further
      prompt is taken, but rows of one token are, or best-effort rows would run in their stead.
    - Late decode rows still bound prompts: where none is on time, by their TPOT target or by what all of them take.
      By the paper's rule only what is on time counts, and prompts, which have seconds left, would fill iterations as
      long as that, and every decode row would stay late.
    - The batch size (R6) holds back late requests, and best-effort ones that have had their share of the time (below).
    - A request that has not started yet drops no real-time request (R11), and leaves running ones their next block:
      under overload every newcomer on time would make a request late that has been served already.
    - The oldest best-effort requests keep a share of the cache and of the time that is left for prompts
      (`best_effort_share`), and have it before prompts that are late: real-time requests that outnumber what the device
      can do take all there is, and are not helped by it (`BestEffortTime`). Others do not come back while real-time
      requests wait.
    """

    def __init__(
        self, options: BrosSettings, limits: IterationLimits, groups: TokenGroups, cost: IterationCost
    ) -> None:
        self._options, self._limits, self._groups = options, limits, groups
        self._batch_size = AdaptiveBatchSize(first=options.first_batch, step=options.batch_step, most=limits.max_rows)
        self._cost = cost
        self._best_effort_time = BestEffortTime(options.best_effort_share, options.be_starvation_s)
        self._rt = RealTimeQueues(groups)
        self._be = BestEffortQueues()
        self._drops = Drops(self._rt, self._be, groups, options.drops)
        self._average_s = 0.0
        limits_s: dict[TrafficClass, float] = {"rt": options.rt_starvation_s, "be": options.be_starvation_s}
        self._unserved = Unserved(limits_s, every=options.starving_every)
        self._resubmitted: dict[Attempt, Sequence] = {}  # here for a repeated attempt
        # Tokens known of a sequence when it started here, or came back to the device.
        self._known_before: dict[Attempt, int] = {}
        self._had_rows: list[Sequence] = []  # in the last decision: only these have moved on since
        self._slots_beside = 0
        self._sharing: BlockSharing | None = None
        """Of the allocator, where it moves real-time requests into best-effort ones' blocks by itself (R8)."""
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
            self._went_on(news.ran, news.undecided)
        self._sharing = kv.sharing if kv.sharing is not None and kv.sharing.on_demand else None
        self._rt.had_rows(self._had_rows)
        batch = Batch(min(self._batch_size.value, self._limits.max_rows), self._limits.max_tokens)
        self._starving_first(now_s, kv, batch)
        self._resubmitted_first(kv, batch)
        decodes = self._rt.decodes.all_rows(self._cost, self._limits.max_rows)
        self._keep(kv, batch)
        urgent = self._rt.urgent_first(now_s, self._average_s, decodes.least_s)
        self._bind_late(urgent, decodes, kv, batch)
        chosen, infeasible, cut_short = self._pack_real_time(urgent, kv, batch)
        decoding = chain(urgent.past_due_started(), infeasible)
        self._pack_past_due((s for s in decoding if is_decode(s)), kv, batch)
        self._pack_guaranteed(kv, batch, chosen)
        self._pack_past_due(chain(urgent.past_due(), infeasible), kv, batch)
        self._pack_best_effort(kv, batch, chosen)
        if not batch.rows and not batch.slots:
            batch.limit_s = NO_DEADLINE_S  # of a request for which there are no blocks
            self._pack_guaranteed(kv, batch, chosen)
        if not batch.rows and not batch.slots:
            self._force_oldest(kv, batch)
        if batch.rows:
            self._batch_size.decided(cut_short=cut_short)
        self._had_rows = [row.sequence for row in batch.rows.values()]
        self._unserved.served(now_s, self._had_rows)
        return self._finished(batch)

    def _went_on(self, ran: Ran, undecided: int) -> None:
        """What decisions would have noted of iterations that ran without one: all rows went on (`continues`)."""
        self._unserved.repeated(undecided)
        self._unserved.served(ran.ended_s - ran.latency_s, (row.sequence for row in ran.plan.rows))
        self._past_due_rows += undecided * min(self._late_rows, len(ran.plan.rows))
        self._batch_size.repeated(undecided)

    def continues(self, plan: IterationPlan, kv: KvAllocator, leaving: int, undecided: int) -> bool:
        """Every request here has a row, and all of them fit one iteration, as far as its time can be foreseen now."""
        if len(plan.rows) + leaving != len(self._rt) + len(self._be):
            return False
        return goes_on(plan.rows, self._groups, self._cost, self._limits, best_effort_rows=self._batch_size.value)

    def _finished(self, batch: Batch) -> IterationPlan:
        self._dropped, self._past_due_rows = self._dropped + batch.dropped, self._past_due_rows + batch.late
        self._late_rows = batch.late
        self._slots_beside, plan = batch.slots, batch.plan
        prefill = [row for row in batch.rows.values() if row.count > 1]
        plan.rows = prefill + (decode := [row for row in batch.rows.values() if row.count == 1])
        plan.estimated_s = self._cost.iteration_s(batch.load, batch.slots)
        plan.reason = f"{len(prefill)} prefill, {len(decode)} decode, {len(plan.preempted)} preempted"
        return plan

    def _starving_first(self, now_s: float, kv: KvAllocator, batch: Batch) -> None:
        for sequence in self._unserved.turns(now_s):
            count = self._beside_decodes(sequence, batch)
            self._place(sequence, kv, batch, self._droppable(kv, batch, sequence, real_time=False), count)

    def _beside_decodes(self, sequence: Sequence, batch: Batch) -> int:
        """Tokens of a prompt that all decode rows leave time for; where they leave none, as many as there are."""
        count = self._count(sequence, batch.tokens_left)
        if count == 1 or not self._options.cut_prompts:
            return count
        decodes = self._rt.decodes.all_rows(self._cost, self._limits.max_rows)
        load = BatchLoad(batch.prefill_tokens, decodes.rows, decodes.context + batch.context + sequence.computed)
        return self._cut(count, load, batch, decodes.tpot_s) or count

    def _resubmitted_first(self, kv: KvAllocator, batch: Batch) -> None:
        """The oldest request that another worker, or an earlier life of this one, had begun: by the deadlines of its
        first attempt it is late for good, and every newcomer on time would be served before it. One an iteration, and
        only as long as it has to compute what was computed once."""
        behind = (s for s in self._resubmitted.values() if s.phase is not Phase.RUNNING or s.uncomputed > 1)
        sequence = min(behind, key=lambda s: (s.arrived_s, s.key), default=None)
        if sequence is not None and sequence.key not in batch.safe:
            self._place(sequence, kv, batch, self._droppable(kv, batch, sequence, real_time=False))

    def _bind_late(self, urgent: UrgentFirst, decodes: DecodeRows, kv: KvAllocator, batch: Batch) -> None:
        """Where no decode row is on time only shorter iterations help: they go first, and none of the prompts makes the
        iteration longer than the strictest TPOT target or, if that is more, all decode rows."""
        cuts = self._options.cut_prompts  # else no prompt would ever be short enough
        if cuts and decodes.tpot_s < NO_DEADLINE_S and not any(is_decode(s) for s in urgent.started_on_time()):
            batch.limit_s = min(batch.limit_s, max(decodes.least_s, decodes.tpot_s))
            self._pack_past_due((s for s in urgent.past_due_started() if is_decode(s)), kv, batch)

    def _pack_real_time(
        self, urgent: UrgentFirst, kv: KvAllocator, batch: Batch
    ) -> tuple[list[tuple[float, Sequence]], list[Sequence], bool]:
        """Lines 3–15. Requests taken, most urgent first; requests that would be late even alone; whether a deadline cut
        it short (lines 11–12)."""
        cost = self._cost
        # Starting a request moves it between queues: the order is read before any moves.
        pulled: list[tuple[float, Sequence, int]] = []
        infeasible: list[Sequence] = []
        rows, tokens_left, cut_short = len(batch.rows), batch.tokens_left, False
        prefill, decode, context = batch.prefill_tokens, batch.decode_rows, batch.context
        exec_of, chunk, swap_s = cost.exec_of, self._limits.chunk, cost.swap_s(batch.slots)
        most_rows = batch.most_rows if self._options.bound_real_time else self._limits.max_rows
        # Of the time before the deadline; the rest is for best-effort requests that keep their share.
        for_prompts = 1.0 - (self._best_effort_time.kept_back if batch.guaranteed else 0.0)
        for residual_s, key, sequence in urgent:
            if key in batch.safe:
                continue
            computed = sequence.computed
            count = min(sequence.uncomputed, chunk, tokens_left)
            if count == 1 and rows < most_rows:
                # The usual row: a request that keeps its deadline among all of them would keep it alone.
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
        chosen: list[tuple[float, Sequence]] = []
        no_headroom = False
        for residual_s, sequence, count in pulled:
            waiting = sequence.phase is Phase.WAITING
            if waiting and no_headroom:
                continue  # where the one before found no blocks, the next would not either
            if self._place(sequence, kv, batch, self._droppable(kv, batch, sequence, real_time=True), count):
                chosen.append((residual_s, sequence))
            elif waiting:
                no_headroom = True
        return chosen, infeasible, cut_short

    def _cut_on_time(
        self, sequence: Sequence, count: int, load: BatchLoad, batch: Batch, taken: set[Attempt], limit_s: float
    ) -> int:
        """Tokens of a prompt that does not fit; 0 = none. Decode rows behind it keep their place: as there is always a
        prompt to cut, those that are late would have none in any iteration."""
        if not self._options.cut_prompts:
            return 0
        rows, context = self._rt.decodes.without(taken)
        context += load.context + sequence.computed + rows
        return self._cut(count, BatchLoad(load.prefill_tokens, load.decode_rows + rows, context), batch, limit_s)

    def _keep(self, kv: KvAllocator, batch: Batch) -> None:
        """Requests that keep blocks in this iteration, and the blocks they still need."""
        share = self._options.best_effort_share
        most = math.ceil(share * self._limits.max_rows)
        batch.guaranteed = self._be.first_within(most, int(share * kv.total_blocks), kv.geometry.blocks_for)
        # They come on top: with memory for many they would fill the batch, and late real-time requests could not start.
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

    def _pack_guaranteed(self, kv: KvAllocator, batch: Batch, chosen: list[tuple[float, Sequence]]) -> None:
        """The reserve is for them, and the batch's size not; the oldest may also take blocks from the youngest."""
        batch.reserved, size = 0, batch.most_rows
        if self._best_effort_time.kept_back:
            batch.most_rows = self._limits.max_rows
        for sequence in batch.guaranteed:
            slots = slots_away(sequence, self._sharing)
            if slots and batch.rows and self._sharing is not None:
                self._bring_back(sequence, slots, self._sharing, batch)
                continue
            victims = self._droppable(kv, batch, sequence, real_time=False)
            if not self._offer(sequence, kv, batch, chosen, victims):
                break
        batch.most_rows = size
        self._reserve(kv, batch)

    def _pack_past_due(self, late: Iterable[Sequence], kv: KvAllocator, batch: Batch) -> None:
        """Served after feasible requests, within the time those leave."""
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
                return  # the next of them would not find blocks either

    def _pack_best_effort(self, kv: KvAllocator, batch: Batch, chosen: list[tuple[float, Sequence]]) -> None:
        """Lines 17–33."""
        whole, apart = self._be.by_slots(self._sharing)
        guaranteed = {sequence.key for sequence in batch.guaranteed}
        for index, sequence in enumerate(whole):
            # The oldest may take blocks from the youngest, or all could wait for each other's.
            victims = None if index else self._droppable(kv, batch, sequence, real_time=False)
            if not self._offer(sequence, kv, batch, chosen, victims):
                return
        for sequence in self._be.waiting(batch.most_rows):
            if batch.dropped or not self._has_headroom(sequence, kv, batch):
                break  # the next of them would not find blocks either
            if not self._offer(sequence, kv, batch, chosen, None):
                return
        if self._rt.anybody_waits or kv.free_blocks < batch.reserved:
            return
        for slots, sequence in apart:
            if sequence.phase is Phase.WAITING or sequence.key in guaranteed:
                continue  # dropped just now, and nothing of it is there; or had its turn
            if batch.rows and self._sharing is not None:
                if not self._bring_back(sequence, slots, self._sharing, batch):
                    return
            elif not batch.dropped and not self._offer(sequence, kv, batch, chosen, None):
                return

    def _offer(
        self,
        sequence: Sequence,
        kv: KvAllocator,
        batch: Batch,
        chosen: list[tuple[float, Sequence]],
        victims: Iterator[Sequence] | None,
    ) -> bool:
        """A place for a best-effort request, if need be a real-time one's. False: nor for any after it."""
        if sequence.key in batch.safe or sequence.uncomputed < 1:
            return True
        fitting = self._fitting(sequence, batch)
        if fitting == 0 or batch.tokens_left <= 0:
            return False
        if len(batch.rows) >= batch.most_rows and not self._make_way(fitting, sequence, batch, chosen):
            return False
        self._place(sequence, kv, batch, victims, fitting)
        return True

    def _bring_back(self, sequence: Sequence, slots: int, sharing: BlockSharing, batch: Batch) -> bool:
        """R9, R12 · Its slots return while this batch runs, as far as that hides behind it; it runs in the next."""
        hidden = self._cost.swap_s(batch.slots + slots) <= max(self._cost.exec_s(batch.load), self._cost.least_s)
        if not hidden or not sharing.restore(sequence):
            return False
        sequence.phase = Phase.RUNNING
        self._rt.changed(sequence)
        self._known_before[sequence.key] = sequence.known
        batch.slots += slots
        batch.safe.add(sequence.key)
        return True

    def _make_way(self, count: int, sequence: Sequence, batch: Batch, chosen: list[tuple[float, Sequence]]) -> bool:
        """Lines 25–32 · The least urgent real-time request leaves the batch, if it can wait for the next one."""
        while chosen and chosen[-1][1].key not in batch.rows:
            chosen.pop()
        if not chosen:
            return False
        residual_s, last = chosen[-1]
        row = batch.rows[last.key]
        load = batch.load.minus(row.start, row.count).plus(sequence.computed, count)
        iteration_s = self._cost.iteration_s(load, batch.slots)
        own_s = self._cost.iteration_s(BatchLoad().plus(row.start, row.count))
        if iteration_s > batch.limit_s or iteration_s + max(self._average_s, own_s) > residual_s:
            return False
        chosen.pop()
        batch.take_away(last)
        self._replaced += 1
        return True

    def _force_oldest(self, kv: KvAllocator, batch: Batch) -> None:
        """Requests are here and none could run: they hold each other's blocks. The oldest takes what it needs."""
        for queue in (self._rt, self._be):
            for sequence in sorted(queue.pending(), key=lambda s: s.arrived_s):
                victims = self._droppable(kv, batch, sequence, real_time=True, desperate=True)
                if self._place(sequence, kv, batch, victims):
                    return

    # -- rows and blocks ---------------------------------------------------------------------------------------

    def _count(self, sequence: Sequence, tokens_left: int) -> int:
        return min(sequence.uncomputed, self._limits.chunk, tokens_left)

    def _fitting(self, sequence: Sequence, batch: Batch) -> int:
        """Tokens of it that this batch can take in time; 0 = none."""
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
        """Blocks and a row of `count` tokens (0: as many as can be), for which `victims` are dropped in turn."""
        count = min(count, batch.tokens_left) or self._count(sequence, batch.tokens_left)
        if count < 1:
            return False
        if sequence.phase is Phase.SWAPPED and batch.rows and self._sharing is not None:
            return self._bring_back(sequence, self._sharing.checkpointed(sequence.key), self._sharing, batch)
        while not self._take(sequence, kv, batch, count):
            victim = next(victims, None) if victims is not None else None
            if victim is None and not self._drops.gives_up(sequence):
                return False
            preempt(victim or sequence, kv, batch.plan, "recompute" if victim is None else self._limits.preemption)
            self._rt.changed(victim or sequence)
            batch.dropped += 1
            if victim is None:
                return False
        batch.add(sequence, count if count == 1 else min(count, sequence.uncomputed))  # less what a prefix cache had
        return True

    def _take(self, sequence: Sequence, kv: KvAllocator, batch: Batch, count: int) -> bool:
        """Blocks for its next `count` tokens, however it stands."""
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
        return self._drops.victims(
            sequence, kv, batch, self._sharing, self._known_before, real_time=real_time, desperate=desperate
        )

    def _has_headroom(self, sequence: Sequence, kv: KvAllocator, batch: Batch) -> bool:
        """A request starts only where running ones keep their next block, and guaranteed ones theirs."""
        spare = kv.free_blocks + kv.cached_blocks - batch.reserved - kv.geometry.blocks_for(sequence.target)
        if sequence.request.traffic_class == "rt" and self._sharing is not None:
            spare += self._sharing.lendable_blocks
        if spare < 0 or spare >= kv.total_blocks // 50:
            return spare >= 0
        return spare >= sum(1 for queue in (self._rt, self._be) for s in queue.pending() if s.phase is Phase.RUNNING)

    # -- learning ----------------------------------------------------------------------------------------------

    def _learn(self, ran: Ran, kv: KvAllocator) -> None:
        """T_avg and the cost model (R3)."""
        plan, latency_s, block_size = ran.plan, ran.latency_s, kv.geometry.block_size
        if plan.rows:
            for each_s in ran.times_s:
                self._average_s = each_s if self._average_s == 0.0 else 0.9 * self._average_s + 0.1 * each_s
        if len(self._be):
            self._best_effort_time.ran(ran, self._cost)
        first = [copy for copy in plan.copies if not copy.beside]
        if plan.drafted or (first and self._cost.knows_slots and goes_beside(first, kv.geometry)):
            return  # an engine's matter whether it waited for them
        slots = sum(len(copy.device) * (block_size if copy.unit == "block" else 1) for copy in first)
        self._cost.observe(load_of(plan.rows), self._slots_beside, latency_s, slots_before=slots)

    @property
    def learned(self) -> IterationCost:
        """Nothing for placements: the model is of one worker's mixed batches."""
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
    """Whether best-effort requests have had their share of the time lately (`best_effort_share`).

    A share of every iteration would be theirs in a burst of real-time requests too, right after a pause that gave them
    all of it. So what they had beyond the share counts for a while: they keep it over as long as one of them may go
    unserved, not at every moment. Told of every iteration while best-effort requests are here.
    """

    def __init__(self, share: float, window_s: float) -> None:
        """`window_s`: time for which what they had beyond their share stands in for it, at most."""
        self._share, self._most_s = share, share * window_s
        self._ahead_s = 0.0

    def ran(self, ran: Ran, cost: IterationCost) -> None:
        """An iteration is theirs as far as it took longer for their rows. What they did not get is not owed: beside
        lasting overload of real-time requests they have their share of each iteration, as from the start."""
        rows, total_s = ran.plan.rows, sum(ran.times_s)
        if not rows:
            return
        real_time = load_of([row for row in rows if row.sequence.request.traffic_class == "rt"])
        whole_s = cost.exec_s(load_of(rows))
        own = 0.0 if real_time == BatchLoad() else cost.exec_s(real_time) / whole_s if whole_s else 1.0
        ahead_s = self._ahead_s + (1.0 - own - self._share) * total_s
        self._ahead_s = min(max(0.0, ahead_s), self._most_s)

    @property
    def kept_back(self) -> float:
        """Share of the next iteration that real-time prompts leave to them."""
        return 0.0 if self._ahead_s > 0.0 else self._share


class Unserved:
    """Which request of a class has waited longest for a row, and whether its turn has come whatever it costs (R4)."""

    def __init__(self, limits_s: Mapping[TrafficClass, float], *, every: int) -> None:
        """`limits_s`: the longest that a request of a class waits; `every`: iterations between two turns of a class, at
        least."""
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
        """These have rows in the iteration that begins now."""
        for sequence in sequences:
            since = self._since[sequence.request.traffic_class]
            if since.pop(sequence.key, None) is not None:
                since[sequence.key] = (now_s, sequence)

    def repeated(self, iterations: int) -> None:
        """So many iterations ran without a decision."""
        for traffic_class in self._iterations:
            self._iterations[traffic_class] += iterations

    def turns(self, now_s: float) -> Iterator[Sequence]:
        """The longest unserved of each class, if that is too long; once a decision."""
        for traffic_class, after_s in self._limits_s.items():
            since = self._since[traffic_class]
            key = next(iter(since), None)
            self._iterations[traffic_class] += 1
            if self._iterations[traffic_class] < self._every:
                continue
            if key is not None and now_s - since[key][0] > after_s:
                self._iterations[traffic_class] = 0
                yield since[key][1]


def goes_on(
    rows: Seq[Row], groups: TokenGroups, cost: IterationCost, limits: IterationLimits, *, best_effort_rows: int
) -> bool:
    """Whether the packing could only take the same rows again (R4): asked while an iteration runs. Each row samples a
    token when it ends, so at that moment every real-time one has its whole TPOT target left, and time itself decides
    nothing.

    `rows` are of one token each, one position on; the worker has no other request. `best_effort_rows`: with more
    rows best-effort ones would wait (R6). True where every real-time row is on time, best-effort ones beside them; or
    where there are only real-time rows and every one is late, as none of them can wait for another then."""
    if not groups.single or len(rows) > min(limits.max_rows, limits.max_tokens):
        return False
    context = best_effort = 0
    strictest_s, loosest_s = NO_DEADLINE_S, 0.0
    for row in rows:
        context += row.start + 1
        if row.sequence.request.traffic_class == "rt":
            tpot_s = groups.tpot_s(row.sequence)
            strictest_s, loosest_s = min(strictest_s, tpot_s), max(loosest_s, tpot_s)
        else:
            best_effort += 1
    takes_s = cost.exec_of(0, len(rows), context)
    if best_effort and len(rows) > best_effort_rows:
        return False
    return takes_s <= _MARGIN * strictest_s or (not best_effort and _MARGIN * takes_s >= loosest_s)
