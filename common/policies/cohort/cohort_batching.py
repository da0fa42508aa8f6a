"""The worker's scheduler of `cohort`: every decode, then prompts in the order that keeps most promises, as far as the
strictest promise among the decodes leaves time.

    decide ─▶ learn what the last iteration took (D5's profile table)
           ─▶ the next prompt is on time and blocks lack: best-effort sequences give way to it
           ─▶ a row for every decode, or for those due first where a prompt on time may start although rows lack
              (`row_sharing`); `RunningTable` ranks the victims that free a block for it; those of many choices take
              turns where all would exceed the longest iteration, or the rest of the time that the next prompt waits
           ─▶ aim: the strictest TPOT among these rows, and a little of the time that its row has won (`mixing`, where
              prompts beside decodes have a price: all of that)
           ─▶ prompts in `PromptQueue`'s plan, behind the one that has waited longest where its share is due, each as
              much as still fits the aim; behind one that gets its first token
              now, only as much as fits the rest of the time that newcomers wait; none of best-effort requests while
              real-time sequences hold most of the rows or blocks

So a request delays the tokens of others by `longest_step_s` at most, however much of it there is to compute.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from functools import partial
from itertools import takewhile
from math import inf

from cohort.common.policies.baselines.batch_builder import BatchBuilder, IterationLimits
from cohort.common.policies.cohort.mixing import FREE, HEADROOM, LEAST_PREFILL, best_chunk
from cohort.common.policies.cohort.promise import due_s, is_interrupted, is_promised, tpot_s
from cohort.common.policies.cohort.prompt_order import PromptOrder, PromptPlan, PromptQueue
from cohort.common.policies.cohort.row_sharing import (
    MANY,
    admissible_rows,
    in_turn,
    is_one_of_many,
    lasting_shape,
    longest_shared_s,
)
from cohort.common.policies.cohort.running_table import Indices, RunningTable
from cohort.common.policies.interface import UNTIL_CHANGED, IterationPlan, IterationScheduler, News, Ran
from cohort.common.policies.kv_interface import KvAllocator
from cohort.common.policies.settings import CohortSettings
from cohort.common.policies.step_times.learned_times import LearnedTimes, plan_shape
from cohort.common.policies.step_times.step_cost import BatchShape
from cohort.common.sequence import Phase, Row, Sequence
from cohort.common.types import Attempt

_PRESSED = 0.6
"""Share of rows or blocks held by real-time sequences from which on best-effort prompts wait: they would make
iterations longer, so that more and more real-time sequences overlap."""
_LENT = 8
"""Divisor: at most one of so many shared rows goes to a prompt in an iteration."""
_FIRST_CHUNK = 128
"""Prompt tokens of the first iteration of an unknown machine: a tenth of a second on two cores."""
_SPARE = 0.04
"""Share of an iteration's aim left free where it is planned while the one before runs."""
_UNDECIDED = 8
"""Iterations with prompts, or beside prompts that wait for blocks, between two decisions at most."""
_DECAY = 0.9
"""Weight that an iteration keeps after each later one."""
_ROW_DECAY = 0.98
"""Weight that an iteration keeps for rows: in most none comes free."""
_KNOWN_ROWS = 5
"""Rows seen before their pace is known."""


class CohortBatching(IterationScheduler):
    """Worker's scheduler. `limits.chunk` is ignored: a prompt's share of an iteration follows from time alone."""

    wants_arriving = True
    reads_runs = True

    def __init__(
        self,
        options: CohortSettings,
        limits: IterationLimits,
        *,
        cold_chunk: int,
        headroom: float = HEADROOM,
        least_prefill: int = LEAST_PREFILL,
    ) -> None:
        """`cold_chunk`: max prompt tokens of an iteration while nothing is learned."""
        self._options, self._limits = options, limits
        self._headroom, self._least_prefill = headroom, least_prefill
        self._longest_cold_chunk = cold_chunk
        self._cold_chunk = min(cold_chunk, _FIRST_CHUNK)
        self._times = LearnedTimes()
        self.table = self._times.table
        self._by_slack = options.victims == "slack"
        self._prompts = PromptQueue(PromptOrder.of(options))
        """Sequences with more than their last token to compute, whether they hold KV or not."""
        self._running = RunningTable()
        """Sequences that hold KV on the device."""
        self._ranked: Indices = self._running.ranked()
        """Places of these in the order in which they keep it."""
        self._started: dict[Sequence, int] = {}
        """Sequences of these with a prompt to compute still, and their computed positions when they were ranked last;
        -1 = never since they hold blocks."""
        self._swapped: set[Attempt] = set()
        self._unasked: list[Sequence] = []
        """Prompts of which the prefix cache was not asked yet."""
        self._ahead: Sequence | None = None
        """Prompt that has waited longest, and goes before all others in this iteration."""
        self._owed_s = 0.0
        """Share of prompts' time since one has waited too long, less what such prompts took."""
        self._arriving, self._decided_s = 0, 0.0
        self._came = False
        """Flag: a sequence has come since the last decision."""
        self._budget = 0
        self._aim_s, self._bound_s = 0.0, inf
        """Seconds that the iteration in flight may take, and the strictest TPOT in it."""
        self._late = 0
        self._shared_s = inf
        self._token_pace, self._row_pace = _Pace(_DECAY), _Pace(_ROW_DECAY, _KNOWN_ROWS)
        self._ended = 0
        """Sequences that held KV and left since the last iteration."""
        self._rowless = False
        """Flag: a prompt waits for a row."""
        self._waits = False
        """Flag: a prompt got nothing, or not all, of the last iteration."""
        self._crowded = False
        """Flag: a prompt waits for blocks."""
        self._are_late = False
        """Flag: a waiting prompt's first token is overdue; computed only if a decoding response has a deadline."""

    def add(self, now_s: float, sequence: Sequence) -> None:
        if sequence.phase is Phase.RUNNING:
            self._running.add(sequence)
            if sequence.uncomputed > 1:
                self._started[sequence] = sequence.computed
        elif sequence.phase is Phase.SWAPPED:
            self._swapped.add(sequence.key)
        if sequence.phase is not Phase.RUNNING or sequence.uncomputed > 1:
            self._prompts.add(now_s, sequence)
        if sequence.phase is Phase.WAITING:
            self._unasked.append(sequence)
        self._came = True

    def remove(self, now_s: float, sequence: Sequence) -> None:
        self._ended += self._running.remove(sequence)
        self._started.pop(sequence, None)
        self._swapped.discard(sequence.key)
        self._prompts.remove(sequence)

    def decide(self, now_s: float, kv: KvAllocator, news: News) -> IterationPlan:
        self._arriving, self._decided_s, self._came = news.arriving, now_s, False
        for ran in news.runs:
            paced, tokens = not ran.plan.has_grammars, _prompt_tokens(ran)  # what masks take is up to their requests
            if self._waits and paced:
                self._token_pace.note(ran.latency_s, tokens)
            if self._rowless and paced:
                self._row_pace.note(ran.latency_s, self._ended)
            self._ended = 0
            self._earn(ran, tokens)
            self._learn(ran, tokens, kv)
        for sequence in news.revised:
            self._running.changed(sequence)
        if news.runs:
            self._computed(now_s)
        times = self.table.step_times
        self._prompts.advance(now_s, times.token_s if times is not None else 0.0)

        for sequence in self._unasked:
            self._ask(now_s, kv, sequence)
        self._unasked.clear()
        prompts = self._plan_prompts(now_s)
        if prompts.first is not None and self._ask(now_s, kv, prompts.first):
            prompts = self._plan_prompts(now_s)
        first = prompts.first
        builder = BatchBuilder(self._limits, kv, partial(self._holders, now_s))
        decoding = self._running.decoding(self._ranked)
        yielded = first is not None and self._make_way(now_s, builder, kv, first)
        if yielded:
            decoding = self._running.places([s for s in self._running.at(decoding) if not builder.evicted(s)])
        decoding, paused = self._add_decodes(now_s, builder, decoding, first)
        batch = BatchShape.of_decodes(len(decoding), self._running.context(decoding))
        self._are_late = self._running.has_deadlines(decoding) and self._prompts.is_any_late(now_s)
        self._aim_s = min(self._aim(now_s, batch, decoding, first), self._shared_s)
        least = self._mix(now_s, batch, decoding, first)
        shape = self._add_prompts(now_s, builder, batch, kv, least, prompts, yielded=yielded)
        if self._ahead is not None and times is not None:
            self._owed_s -= times.token_s * sum([r.count for r in builder.prompt_rows if r.sequence is self._ahead])
        builder.tokens_left = self._limits.max_tokens - self._budget - len(builder.decode_rows)
        left = max(0, min(self._limits.max_rows - builder.rows, builder.tokens_left))
        if builder.preempted or not builder.continue_all(paused[:left]):  # into rows that no prompt took
            for sequence in paused:
                builder.continue_row(sequence)
        plan = builder.finish()
        self._sort_out(now_s, plan)
        if len(builder.decode_rows) > len(decoding):  # paused ones, or prompts with a token left
            shape = plan_shape(plan)
        plan.estimated_s = self.table.estimate(shape) or 0.0
        return plan

    def _holders(self, now_s: float) -> list[Sequence]:
        """Return the sequences that hold KV, those first that keep it longest."""
        self._running.read(now_s)
        self._ranked = self._running.ranked(by_slack=self._by_slack)
        return self._running.at(self._ranked)

    def _ask(self, now_s: float, kv: KvAllocator, sequence: Sequence) -> bool:
        """Ask the prefix cache what it would save a prompt that has not started; return whether that has changed."""
        if sequence.phase is not Phase.WAITING or sequence not in self._prompts:
            return False
        former, sequence.cached_ahead = max(0, sequence.cached_ahead), kv.cached_ahead(sequence)
        if sequence.cached_ahead == former:
            return False
        self._prompts.changed(now_s, sequence)
        return True

    def _earn(self, ran: Ran, tokens: int) -> None:
        """Add to what is owed to prompts that have waited too long: a share of the time of prompts, or of all time
        where none was computed. `tokens`: of prompts."""
        times = self.table.step_times
        shared_s = times.token_s * tokens if times is not None and tokens else sum(ran.times_s)
        self._owed_s = min(self._owed_s + self._options.patience_share * shared_s, self._options.longest_step_s)

    def _plan_prompts(self, now_s: float) -> PromptPlan:
        waiting = self._prompts.longest_waiting(now_s)
        if waiting is None:
            self._owed_s = 0.0
        self._ahead = waiting if self._owed_s >= 0.0 else None
        if self._crowded:
            return self._prompts.in_rank_order(self._ahead)
        return self._plan_order(now_s)

    def _plan_order(self, now_s: float) -> PromptPlan:
        row_s = self._row_pace.each_s if self._rowless else 0.0
        return self._prompts.plan(now_s, self._token_pace.each_s, row_s, ahead=self._ahead)

    def steady_for(self, plan: IterationPlan, kv: KvAllocator) -> int:
        """Return `UNTIL_CHANGED` if all sequences decode, no prompt waits and the composition is in the table."""
        if plan.preempted or plan.copies or self._arriving or any(row.count != 1 for row in plan.rows):
            return 0
        return UNTIL_CHANGED if self._times.knows(plan) and self.continues(plan, kv, 0, _UNDECIDED) else 0

    def chunks_ahead(self, prompts: Seq[Row], single: int) -> Seq[int] | None:
        """Size the next chunk of a prompt that goes on, if it is the next as of the last decision: by that decision's
        aim and the strictest TPOT, with `_SPARE` of it to spare, as the times that it follows from lie an iteration
        back. With a price for mixing, or where it is another one's turn, `decide` does."""
        row, times = prompts[0], self.table.step_times
        if len(prompts) > 1 or times is None or times.mixed_share >= FREE or self._ahead is not None:
            return None
        if row.sequence.request.traffic_class != "rt" and self._running.real_time:
            return None
        order = self._plan_order(self._decided_s)
        if next((s for s in order if s is row.sequence or s not in self._started), None) is not row.sequence:
            return None
        ending = [tpot_s(s) for s in self._started if s is not row.sequence and is_promised(s)]
        bound_s = min([self._bound_s, *(each_s for each_s in ending if each_s)])  # with those that decode by then
        within_s = min(self._aim_s, bound_s / self._times.lateness.ratio) * (1.0 - _SPARE)
        batch = BatchShape.of_decodes(single, self._running.known - row.sequence.known + single)
        count = self._fitting(batch, row.sequence, min(row.count, self._limits.max_tokens - single), within_s)
        return [count] if count >= self._least_prefill or count == row.count else None

    def continues(self, plan: IterationPlan, kv: KvAllocator, leaving: int, undecided: int) -> bool:
        """Return whether `plan` could go on. A composition of rows that is new to the table is recorded by `decide`.
        Prompts that wait behind one that goes on get nothing while it does not end; those for which blocks lack wait
        until a sequence ends, or for the next decision."""
        rows = len(plan.rows)
        if rows + leaving != len(self._running):
            return False
        waiting = len(self._prompts)
        if waiting:  # those that end with the iteration in flight are decode rows by then
            waiting -= sum([row.sequence in self._started for row in plan.rows])
        if not waiting:
            return True
        if undecided < _UNDECIDED and (first := plan.rows[0]).count > 1:
            return first.start + first.count < first.sequence.target
        if undecided < _UNDECIDED and self._crowded and not leaving and not self._came:
            return True
        return not leaving and rows >= min(self._limits.max_rows, self._limits.max_tokens) and not self._newcomers()

    @property
    def learned(self) -> LearnedTimes:
        return self._times

    def metrics(self) -> dict[str, float]:
        return {
            "swapped": float(len(self._swapped)),
            "prompts": float(len(self._prompts)),
            "prefill_budget_tokens": float(self._budget),
            "iteration_aim_ms": 1e3 * self._aim_s,
            "late_iterations_total": float(self._late),
            "profile_cells": float(len(self.table)),
            "profile_error": self.table.error,
            "lateness_ratio": self._times.lateness.ratio,
        }

    def _learn(self, ran: Ran, tokens: int, kv: KvAllocator) -> None:
        """Record an iteration with so many prompt `tokens`."""
        if self._times.learn(ran, kv.geometry) is not None:
            self._late += ran.latency_s > self._bound_s
        if self.table.step_times is None:
            self._search_chunk(ran, tokens)

    def _search_chunk(self, ran: Ran, tokens: int) -> None:
        """Double the prompts' share, while there is no curve, below half the aim; halve it when an iteration exceeds
        that, unless the masks of grammars may be why. They cannot be why one is short: where all answers are bound, the
        share grows still."""
        if tokens >= self._cold_chunk and 2 * ran.latency_s < self._aim_s:
            self._cold_chunk = min(2 * self._cold_chunk, self._longest_cold_chunk)
        elif tokens and ran.latency_s > self._aim_s and not ran.plan.has_grammars:
            self._cold_chunk = max(self._least_prefill, tokens // 2)

    def _add_decodes(
        self, now_s: float, builder: BatchBuilder, decoding: Indices, first: Sequence | None
    ) -> tuple[Indices, list[Sequence]]:
        """Give each decode a row; if `first` and others that may start lack one, only those whose next token is due
        first (`row_sharing`). Return the places of those with a row, and the others, most urgent first."""
        table = self._running
        started = len(builder.holders) - len(decoding)
        within_s = self._options.longest_step_s
        if first is not None:
            within_s = min(within_s, self._rest_s(now_s, first))
        if table.most_choices > MANY:
            decoding = table.places(in_turn(table.at(decoding), self.table.estimate, within_s))
        rows, waiting = self._limits.max_rows, len(self._prompts)
        self._shared_s, count = inf, len(decoding)
        if count + waiting > rows or count > rows:
            step_s = self.table.estimate(lasting_shape(table, rows)) or 0.0
            more = rows - count
            if first is not None and not self._crowded and self._may_share(now_s, first):
                more = admissible_rows(table, rows, step_s, self._headroom)
            most = max(started, more, rows - count)
            count = min(count, rows - min(waiting, most, max(1, rows // _LENT)))
            if count < len(decoding):
                decoding = table.due_first(now_s, decoding, step_s)
            if len(table) > rows:
                self._shared_s = longest_shared_s(table, rows, step_s, self._headroom)
        chosen, paused = table.at(decoding[:count]), table.at(decoding[count:])
        if builder.continue_all(chosen):
            return decoding[:count], paused
        return table.places([sequence for sequence in chosen if builder.continue_row(sequence)]), paused

    def _newcomers(self) -> int:
        """Return how many sequences can start although rows lack."""
        rows = self._limits.max_rows
        step_s = self.table.estimate(lasting_shape(self._running, rows)) or 0.0
        return admissible_rows(self._running, rows, step_s, self._headroom)

    def _may_share(self, now_s: float, prompt: Sequence) -> bool:
        """Return whether a prompt may start where that leaves fewer rows than sequences: late ones wait for a row."""
        if is_interrupted(prompt) or prompt is self._ahead:
            return True
        return is_promised(prompt) and now_s < due_s(prompt)

    def _computed(self, now_s: float) -> None:
        """Take the progress of prompts that have started over into their queue; finished ones leave it."""
        for sequence, ranked in list(self._started.items()):
            if sequence.uncomputed <= 1:
                self._prompts.remove(sequence)
                del self._started[sequence]
            elif sequence.computed != ranked:
                self._prompts.changed(now_s, sequence)
                self._started[sequence] = sequence.computed

    def _aim(self, now_s: float, decodes: BatchShape, decoding: Indices, first: Sequence | None) -> float:
        """Return the seconds that this iteration may take: what keeps the mean TPOT of all that can still keep it.
        Sequences that lost their worker wait all at once: until the last goes on, iterations are as long as any may be.
        While decoding requests are on their way here it is half of that, or what leaves prompts a quarter of it:
        between two of their tokens they wait for the rest of one iteration and a whole one (D5)."""
        self._bound_s = self._running.strictest_s(decoding, late=self._are_late)
        if self._bound_s == inf or (first is not None and is_interrupted(first)):
            return self._options.longest_step_s
        headroom, longest_s = self._headroom, self._options.longest_step_s
        aim_s = min(self._bound_s, longest_s) * min(1.0 - headroom, 1.0 / self._times.lateness.ratio)
        alone_s = self.table.estimate(decodes) or 0.0
        if self._options.stretched and not self._crowded:
            stretched = self._running.stretched_s(now_s, decoding, alone_s, headroom=headroom, late=self._are_late)
            aim_s = min(stretched, longest_s) if stretched < inf else aim_s
        if not self._arriving:
            return aim_s
        return min(aim_s, max(aim_s / 2, alone_s + aim_s / 4))

    def _mix(self, now_s: float, decodes: BatchShape, decoding: Indices, first: Sequence | None) -> int:
        """Return the min prompt tokens of this iteration. Where mixing has a price and the size that pays does not fit
        the aim but the longest iteration, prompts get that size as soon as the decodes can spare the time, and nothing
        before."""
        least, times = self._least_prefill, self.table.step_times
        if times is None or times.mixed_share < FREE or not decodes.decodes or first is None:
            return least
        most = self._prompts.tokens(self._limits.max_tokens - decodes.decodes)
        if most <= 0:
            return least
        chunk = best_chunk(times, decodes, first.begins, most)
        mixed_s = self.table.estimate(decodes.with_prefill(first.begins, chunk)) or 0.0
        if mixed_s <= self._aim_s or mixed_s > self._options.longest_step_s:
            return least
        alone_s = self.table.estimate(decodes) or 0.0
        spare = self._running.spare_s(now_s, decoding, alone_s, headroom=self._headroom)
        self._aim_s = mixed_s if mixed_s * self._times.lateness.ratio <= spare else 0.0
        return 0

    def _make_way(self, now_s: float, builder: BatchBuilder, kv: KvAllocator, first: Sequence) -> bool:
        """Return whether best-effort sequences gave blocks or a row to the next prompt: it can still keep its TTFT, and
        finds no room beside them. They give nothing if that would not be enough."""
        if not self._options.yielding or first.phase is Phase.RUNNING:
            return False
        if not is_promised(first) or now_s >= due_s(first):
            return False
        if self._running.real_time == len(self._running):
            return False
        effort = [s for s in reversed(builder.holders) if s.request.traffic_class != "rt" and not s.pinned]
        fits = partial(self._running.fits, kv, first, real_time=True)
        needed, freed = kv.geometry.blocks_for(first.target), sum([kv.held(s.key) for s in effort])
        if kv.free_blocks + kv.cached_blocks + freed < needed or not fits(freed_blocks=freed):
            return False
        for given, victim in enumerate(effort):
            enough = kv.free_blocks + kv.cached_blocks >= needed and fits()
            if enough and len(self._running) - given < self._limits.max_rows:
                break
            builder.displace(victim)
        return builder.preempted

    def _add_prompts(
        self,
        now_s: float,
        builder: BatchBuilder,
        batch: BatchShape,
        kv: KvAllocator,
        least: int,
        prompts: PromptPlan,
        *,
        yielded: bool,
    ) -> BatchShape:
        """Add prompts in order while time, tokens and rows last. One that does not fit the cache waits, and those
        behind it too, or large prompts would wait for ever; those that hold blocks go on. For prompts on time only what
        real-time responses will need counts: best-effort ones give way first. `yielded`: some did. Return the shape of
        the iteration with them."""
        self._budget, self._waits, self._crowded, skipped = 0, True, False, False
        self._rowless = False
        rest_s = self._aim_s  # for prompts that get no first token now, are not new, or one of many choices
        admits = yielded or not builder.preempted
        tokens_left = builder.tokens_left
        pressed: bool | None = None
        if builder.preempted:
            self._running.read(now_s)
        started = sum([s.phase is Phase.RUNNING for s in self._started])
        for sequence in prompts:
            held = sequence.phase is Phase.RUNNING
            started -= held
            if tokens_left <= 0 or builder.rows >= self._limits.max_rows:
                self._rowless = tokens_left > 0
                return batch
            if sequence.request.traffic_class != "rt" and sequence is not self._ahead:
                pressed = self._pressed(kv) if pressed is None else pressed
                if pressed:
                    skipped = True
                    prompts.skip()
                    continue
            full = len(self._running) >= self._limits.max_rows
            if not held and (not admits or (full and not self._may_share(now_s, sequence))):
                skipped = True
                if not started:  # none of those behind holds blocks
                    break
                continue
            wanted = min(sequence.to_compute, tokens_left)
            within_s, fitting = self._aim_s, -1
            if not held and not is_one_of_many(sequence):
                fitting = self._fitting(batch, sequence, wanted, within_s)
            if fitting < wanted and (fitting < 0 or rest_s != within_s):
                within_s, fitting = rest_s, self._fitting(batch, sequence, wanted, rest_s)
            share = partial(self._share, batch, sequence, within_s, least)
            count = max(fitting, min(least, wanted))
            if count <= 0:
                return batch
            if not held and not self._running.fits(kv, sequence, real_time=self._goes_first(now_s, sequence)):
                admits, skipped, self._crowded = False, True, True
                continue
            builder.tokens_left = count
            if not (builder.continue_row(sequence) if held else builder.admit(sequence, share)):
                admits, skipped = admits and held, True
                continue
            row = builder.last_row
            if not held:
                self._running.add(sequence)
                self._started[sequence] = -1
            tokens_left -= row.count
            least = max(0, least - row.count)
            self._budget += row.count
            batch = batch.with_prefill(row.start, row.count)
            if row.count < sequence.uncomputed:  # cut: no time is left for another one
                return batch
            rest_s = min(rest_s, self._rest_s(now_s, sequence))
        self._waits = skipped
        return batch

    def _pressed(self, kv: KvAllocator) -> bool:
        """Return whether real-time sequences hold most of the rows, or of the blocks."""
        if not self._options.yielding:
            return False
        if self._running.real_time > _PRESSED * self._limits.max_rows:
            return True
        real_time = [s for s in self._running.sequences if s.request.traffic_class == "rt"]
        return sum([kv.held(s.key) for s in real_time]) > _PRESSED * kv.total_blocks

    def _goes_first(self, now_s: float, newcomer: Sequence) -> bool:
        """Return whether a newcomer need not leave blocks for the growth of best-effort sequences."""
        return is_promised(newcomer) and now_s < due_s(newcomer) and self._options.yielding

    def _rest_s(self, now_s: float, sequence: Sequence) -> float:
        """Return how long the iteration with this sequence's first token may take for the sake of others: the rest of
        the longest step. Infinite after more than two steps of queueing: full iterations then serve it soonest; and
        for one of many choices."""
        longest_s, waited_s = self._options.longest_step_s, now_s - sequence.arrived_s
        if sequence.output_tokens or not is_promised(sequence) or waited_s > 2 * longest_s or is_one_of_many(sequence):
            return inf
        return max(0.0, longest_s - waited_s)

    def _share(self, batch: BatchShape, sequence: Sequence, aim_s: float, least: int, wanted: int) -> int:
        """Return the tokens of this prompt in the iteration: what fits, and `least` if it does not."""
        return max(self._fitting(batch, sequence, wanted, aim_s), min(least, wanted))

    def _fitting(self, batch: BatchShape, sequence: Sequence, wanted: int, aim_s: float) -> int:
        """Return the tokens of this prompt with which the iteration stays within `aim_s`."""
        if not self._options.bounded:
            return min(wanted, max(0, self._longest_cold_chunk - batch.prefill_tokens))
        if self.table.step_times is None:
            chunk = int(self._cold_chunk * min(1.0, aim_s / self._options.longest_step_s))
            return min(wanted, max(0, chunk - batch.prefill_tokens))
        return self.table.prefill_budget(batch, sequence.begins, wanted, aim_s)

    def _sort_out(self, now_s: float, plan: IterationPlan) -> None:
        """Move preempted sequences to the prompts: they compute again or wait in host memory. Rows hold blocks."""
        for preempt in plan.preempted:
            sequence = preempt.sequence
            self._running.remove(sequence)
            self._started.pop(sequence, None)
            if sequence.phase is Phase.SWAPPED:
                self._swapped.add(sequence.key)
            self._prompts.remove(sequence)
            self._prompts.add(now_s, sequence)
            self._unasked.append(sequence)
        if self._swapped:
            self._swapped.difference_update([row.sequence.key for row in plan.rows])


def _prompt_tokens(ran: Ran) -> int:
    """Return the tokens of prompts in an iteration: their rows stand before those of one token."""
    return sum([row.count for row in takewhile(lambda row: row.count > 1, ran.plan.rows)])


class _Pace:
    """Seconds per unit of work that a waiting prompt needs, a prompt token or a free row: a fading sum of iterations'
    times over that of their units. It includes decode rows, weights and iterations that lacked blocks or ended no row,
    so it says when the prompts in front will be done. Only iterations behind which a prompt waited are noted."""

    def __init__(self, decay: float, least: int = 0) -> None:
        """`decay`: weight that an iteration keeps after each later one. `least`: units before the pace is known."""
        self._decay, self._least = decay, least
        self._seconds = self._units = 0.0

    def note(self, seconds: float, units: int) -> None:
        self._seconds = self._decay * self._seconds + seconds
        self._units = self._decay * self._units + units

    @property
    def each_s(self) -> float:
        """Seconds per unit; 0 = unknown."""
        return self._seconds / max(1.0, self._units) if self._units >= self._least else 0.0
