"""E2, E7 · Lending of all unused blocks to all decodes: each takes a block when it reaches it.

KVC pipelining lends what one decode has allocated and does not use yet to another that is done before, by halves.
Paged blocks need not lie together, so all of it can be lent: `Forecast` says whether the predicted lengths of all
running decodes ever need more blocks together than there are.

    prompt ─▶ starts when it and its decode fit ─▶ decode runs at once ─▶ takes a block when it comes to it
                                                     └── none is free, predictions were wrong: the loosest goes to
                                                         host memory and comes back (E8)

The `IterationScheduler` of the preset `ecoserve-forecast`; queues, groups, order and padding are `TimeSynced`'s. Unlike
in the paper an allocation is a reservation instead of blocks, and a prompt starts only if its decode fits.
"""

from __future__ import annotations

from bisect import insort

from cohort.common.policies.baselines.batch_builder import IterationLimits
from cohort.common.policies.ecoserve.task_order import Rank
from cohort.common.policies.ecoserve.time_synced import TimeSynced
from cohort.common.policies.interface import IterationPlan
from cohort.common.policies.kv_interface import KvAllocator
from cohort.common.policies.sequences import resume
from cohort.common.policies.settings import EcoServeSettings
from cohort.common.sequence import Phase, Sequence

_LOOKED_AT = 16
"""Waiting prompts that are tried when the first does not fit: each costs a pass over every running decode."""


class Forecast:
    """Peak of the blocks that all decodes will hold together until their predicted ends, in a cache of `blocks`.

        blocks ▲        ╱▏ most blocks are needed just before a decode ends,
               │   ╱▏  ╱ ▏ so only the ends are checked
               │  ╱ ▏ ╱  ▏╲
               │ ╱  ▏╱      ▏
               └────────────────▶ iterations
                 end of 1   end of 2

    Pure arithmetic over lengths; holds no blocks.
    """

    def __init__(self, blocks: int, block_size: int, most_blocks: int = 0) -> None:
        """`most_blocks`: bound of a sequence's blocks by a window; 0 = no bound."""
        self._headroom = blocks
        self._size = block_size
        self._most = most_blocks
        self._members: list[tuple[int, int]] = []
        """(− iterations until the predicted end, positions computed): those that last longest first."""

    def add(self, computed: int, remaining: int) -> None:
        insort(self._members, (-remaining, computed))

    def hold(self, blocks: int) -> None:
        """Take `blocks` out throughout, for waiting sequences; negative gives them back."""
        self._headroom -= blocks

    def fits(self, computed: int, remaining: int, spare: int = 0) -> bool:
        """Return whether there are enough blocks at all times with this decode as well, and `spare` more."""
        insort(self._members, (-remaining, computed))
        fits = self._within(self._headroom - spare)
        self._members.remove((-remaining, computed))
        return fits

    def _within(self, headroom: int) -> bool:
        """Return whether for all ends t:  Σ_{i: left_i ≥ t} ceil((computed_i + t) / block_size) ≤ headroom.

        The sum lies between that of the fractions and one block more for each; it is computed only if that leaves a
        doubt.
        """
        positions = 0
        for alive, (negative, computed) in enumerate(self._members, 1):
            if self._most:
                held = (-(-(other - negative) // self._size) for _, other in self._members[:alive])
                if sum(min(self._most, blocks) for blocks in held) > headroom:
                    return False
                continue
            positions += computed
            least = -(-(positions - alive * negative) // self._size)
            if least > headroom:
                return False
            if least + alive > headroom:
                exact = sum(-(-(other - negative) // self._size) for _, other in self._members[:alive])
                if exact > headroom:
                    return False
        return True


class ByForecast(TimeSynced):
    def __init__(self, options: EcoServeSettings, limits: IterationLimits, *, learn_size: bool = False) -> None:
        super().__init__(options, limits, learn_size=learn_size)
        self._infeasible_until = 0
        """Time on the batch's clock before which no prompt is tried without an event: none fitted. Time frees blocks,
        too: the later a decode starts, the fewer it holds when others end."""

    def add(self, now_s: float, sequence: Sequence) -> None:
        super().add(now_s, sequence)
        self._infeasible_until = 0

    def remove(self, now_s: float, sequence: Sequence) -> None:
        super().remove(now_s, sequence)
        self._infeasible_until = 0
        self._group_over = True  # a waiting decode may fit now

    def _revise(self, now_s: float, sequence: Sequence) -> None:
        super()._revise(now_s, sequence)
        self._infeasible_until = 0

    def steady_for(self, plan: IterationPlan, kv: KvAllocator) -> int:
        steady = super().steady_for(plan, kv)
        return max(0, min(steady, self._infeasible_until - self._batch.clock - 1)) if len(self._prompts) else steady

    # -- the forecast ------------------------------------------------------------------------------------------

    def _forecast(self, kv: KvAllocator) -> Forecast:
        """Return the forecast of running decodes to their groups' ends and of prompts being computed with their
        decodes; all other blocks that are taken (waiting decodes, KV transfers) stay so."""
        geometry = kv.geometry
        most = geometry.blocks_for(geometry.window) + 2 if geometry.window else 0
        found = Forecast(kv.total_blocks, geometry.block_size, most)
        others = kv.total_blocks - kv.free_blocks - kv.cached_blocks
        for sequence in self._batch.sequences:
            found.add(sequence.computed, self._batch.remaining(sequence))
            others -= kv.held(sequence.key)
        for sequence, goal in self._prefilling.items():
            found.add(goal, self._decode_length(sequence))
            others -= kv.held(sequence.key)
        found.hold(max(0, others))
        return found

    def _decode_length(self, sequence: Sequence) -> int:
        """Return the positions that a prompt's decode will have here."""
        return max(1, min(self._length(sequence, 1), sequence.max_positions - sequence.target))

    # -- where TimeSynced allocates ----------------------------------------------------------------------------

    def _continues(self, sequence: Sequence, length: int, kv: KvAllocator) -> bool:
        self._infeasible_until = 0
        if not self._forecast(kv).fits(sequence.computed, length):
            return False
        self._batch.join(sequence, length)
        return True

    def _formation_is_due(self, kv: KvAllocator) -> bool:
        self._freed = 0  # `remove` has set `_group_over`
        return super()._formation_is_due(kv)

    def _nest(self, waiting: list[tuple[Rank, int, Sequence]], kv: KvAllocator) -> None:
        """Skip nesting: no decode has blocks to lend."""

    def _allocate(
        self, now_s: float, waiting: list[tuple[Rank, int, Sequence]], kv: KvAllocator, plan: IterationPlan
    ) -> None:
        """E3, E6 · Run each decode that fits, in order of groups; none after one that is overdue for too long."""
        if not waiting:
            return
        forecast = self._forecast(kv)
        spare = self._reserve(kv) if len(self._batch) else 0
        stands = not self.options.ordered or now_s - self._deadlines.of(waiting[0][2]) > self.options.patience_s
        for _, length, sequence in self._grouped(waiting):
            if self._places() < 1:
                return
            held = kv.held(sequence.key) if sequence.phase is Phase.RUNNING else 0
            forecast.hold(-held)
            if forecast.fits(sequence.computed, length, spare) and self._run(sequence, length, kv, plan):
                forecast.add(sequence.computed, length)
                continue
            forecast.hold(held)
            if stands:
                return

    def _run(self, sequence: Sequence, length: int, kv: KvAllocator, plan: IterationPlan) -> bool:
        if sequence.phase is Phase.SWAPPED and not resume(sequence, kv):
            return False
        if not kv.extend(sequence, sequence.computed + 1):
            return False
        self._decodes.pop(sequence.key, None)
        self._batch.join(sequence, length)
        return True

    def _before_rows(self, now_s: float, kv: KvAllocator, plan: IterationPlan) -> None:
        """Allocate the blocks that the rows reach now. If predictions were wrong and one is missing, evict the decode
        with the latest deadline (E8)."""
        for sequence in list(self._batch.sequences):
            while sequence in self._batch and not kv.extend(sequence, sequence.computed + 1):
                candidates = [s for s in self._batch.sequences if not s.pinned] or [sequence]
                victim = max(candidates, key=lambda s: (self._deadlines.of(s), s.key))
                self._count.late += 1
                self._infeasible_until = 0
                self._evict(now_s, victim, kv, plan, self.limits.preemption)

    def _next_prompt(self, now_s: float, kv: KvAllocator, tokens: int) -> Sequence | None:
        """E1, E6 · Return the first prompt in order that fits with its decode; none after one that is overdue for too
        long."""
        head = self._prompts.head()
        if head is None or self._batch.clock < self._infeasible_until:
            return None
        if not len(self._batch) and not self._prefilling and not self._decodes:
            return head[0]
        forecast, spare = self._forecast(kv), self._reserve(kv)
        headroom = (kv.free_blocks + kv.cached_blocks) * kv.geometry.block_size
        stands = not self.options.ordered or now_s - head[1] > self.options.patience_s
        for prompt in self._prompts.first(1 if stands else _LOOKED_AT):
            if prompt.target <= headroom and forecast.fits(prompt.target, self._decode_length(prompt), spare):
                return prompt
        self._infeasible_until = self._batch.clock + self.options.group_tokens
        return None
