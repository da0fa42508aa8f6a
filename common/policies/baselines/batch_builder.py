"""One iteration in the making: rows, budgets, and which sequence gives way when the cache is full.

Shared by schedulers, which decide whom to offer a place and in which order. Knows nothing of queues.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable, Set
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Literal

from cohort.common.policies.interface import IterationPlan
from cohort.common.policies.kv_interface import KvAllocator
from cohort.common.policies.sequences import preempt, resume, start
from cohort.common.sequence import Phase, Row, Sequence
from cohort.common.types import Attempt

RankKey = tuple[int | float | Attempt, ...]
Rank = Callable[[Sequence], RankKey]
"""Lower goes first; must tell any two sequences apart."""
RankedHolders = Callable[[], list[Sequence]]


def by_arrival(sequence: Sequence) -> RankKey:
    """Rank by priority, then arrival."""
    return (sequence.request.priority, sequence.arrived_s, sequence.key)


@dataclass(frozen=True, slots=True)
class IterationLimits:
    """Max rows, tokens, and tokens of one prompt (`chunk`). `padded`: prompt rows count as the longest beside them."""

    max_rows: int
    max_tokens: int
    chunk: int
    preemption: Literal["swap", "recompute"]
    padded: bool = False


def whole_chunks(limits: IterationLimits, prompts: Seq[Row], single: int) -> list[int] | None:
    """Return `IterationScheduler.chunks_ahead` where all rows fit one iteration, whatever their order."""
    counts = [min(row.count, limits.chunk) for row in prompts]
    fit = sum(counts) + single <= limits.max_tokens and len(prompts) + single <= limits.max_rows
    return counts if fit and not limits.padded else None


def chunks_by_arrival(limits: IterationLimits, prompts: Seq[Row], single: int) -> list[int] | None:
    """Return `chunks_ahead` where rows of one token come first, then prompts by arrival, each as much as is left."""
    if limits.padded or len(prompts) + single > limits.max_rows:
        return None
    return divided(prompts, limits.max_tokens - single, limits.chunk)


def divided(prompts: Seq[Row], tokens: int, chunk: int) -> list[int] | None:
    """Divide `tokens` over prompts by arrival, max `chunk` for each; None if one gets nothing."""
    counts = dict[Sequence, int]()
    for row in sorted(prompts, key=lambda row: by_arrival(row.sequence)):
        counts[row.sequence] = min(row.count, chunk, tokens)
        tokens -= counts[row.sequence]
    return [counts[row.sequence] for row in prompts] if min(counts.values(), default=0) > 0 else None


class BatchBuilder:
    """Iteration in the making. `running`: every sequence that holds KV here and may be planned or preempted."""

    def __init__(
        self,
        limits: IterationLimits,
        kv: KvAllocator,
        running: Iterable[Sequence] | RankedHolders,
        rank: Rank = by_arrival,
    ) -> None:
        """`running` may be a function that returns them ranked: it is asked again once one was admitted."""
        self._limits = limits
        self._kv = kv
        self._rank = rank
        self._ranked = running if callable(running) else None
        self._holders = running() if callable(running) else sorted(running, key=rank)
        self._joined = False
        """Flag: `_holders` lack those that were admitted."""
        self._prefill: list[Row] = []
        self._decode: list[Row] = []
        self._rows: list[Row] = []
        """Rows of both kinds, in the order in which they were added."""
        self._planned: set[Sequence] = set()
        self._evicted: set[Sequence] = set()
        self._plan = IterationPlan()
        self.tokens_left = limits.max_tokens

    @property
    def full(self) -> bool:
        return self.tokens_left <= 0 or len(self._planned) >= self._limits.max_rows

    @property
    def rows(self) -> int:
        return len(self._planned)

    @property
    def decode_rows(self) -> list[Row]:
        """Rows of one token so far."""
        return list(self._decode)

    @property
    def prompt_rows(self) -> list[Row]:
        """Rows of several tokens so far."""
        return list(self._prefill)

    @property
    def holders(self) -> list[Sequence]:
        """Sequences with KV on the device, safest rank first."""
        return list(self._holders)

    @property
    def last_row(self) -> Row:
        """Row added last. Raises `IndexError` before the first."""
        return self._rows[-1]

    @property
    def preempted(self) -> bool:
        """Flag: a sequence lost its place in the cache in this iteration."""
        return bool(self._evicted)

    def evicted(self, sequence: Sequence) -> bool:
        return sequence in self._evicted

    def continue_row(self, sequence: Sequence) -> bool:
        """Add a row for a running sequence. Without a free block, lower ranks give way, at last the sequence itself."""
        if self.full or sequence.phase is not Phase.RUNNING or sequence in self._planned or sequence.uncomputed < 1:
            return False
        count = self._count(sequence)
        if not self._fits(count):
            return False
        while not self._kv.extend(sequence, sequence.computed + count):
            if self._joined and self._ranked is not None:
                self._holders, self._joined = [s for s in self._ranked() if s not in self._evicted], False
            lower = self._holders[self._holders.index(sequence) :]
            victim = next((s for s in reversed(lower) if s not in self._planned and not s.pinned), None)
            # Lower ranks that run or are being read are waited for; the lowest of all makes room for the others.
            if victim is None or (victim is sequence and len(lower) > 1):
                return False
            self._evict(victim)
            if victim is sequence:
                return False
        self._add(sequence, count)
        return True

    def continue_all(self, decoding: list[Sequence]) -> bool:
        """Add a row for each of these, which run, have one position to compute and no row. False: time to ask for each
        (`continue_row`), as tokens, rows or blocks may lack; nothing has changed."""
        kv, limits = self._kv, self._limits
        if len(decoding) > min(self.tokens_left, limits.max_rows - len(self._planned)):
            return False
        if limits.padded or not kv.grows_by_block:
            return False
        rows = [Row(sequence, sequence.computed, 1) for sequence in decoding]
        if kv.extend_ahead(rows) is not None:
            return False
        self._rows += rows
        self._decode += rows
        self._planned.update(decoding)
        self.tokens_left -= len(rows)
        return True

    def admit(self, sequence: Sequence, cut: Callable[[int], int] | None = None) -> bool:
        """Give a waiting or swapped sequence blocks and a row, if there is room. `cut`: how much of so many tokens it
        gets behind a cached prefix, which is known only now."""
        if self.full or sequence in self._evicted or not self._fits(self._count(sequence)):
            return False
        if sequence.phase is Phase.WAITING:
            admitted = start(sequence, self._kv)
        elif sequence.phase is Phase.SWAPPED:
            admitted = resume(sequence, self._kv)
        else:
            return False
        if admitted:
            if self._ranked is None:
                insort(self._holders, sequence, key=self._rank)
            self._joined = True
            count = self._count(sequence)
            self._add(sequence, max(1, cut(count)) if cut and sequence.computed else count)
        return admitted

    def displace(self, sequence: Sequence) -> None:
        """Take the blocks of a sequence that has no row in this iteration."""
        self._evict(sequence)

    def admit_by_force(self, sequence: Sequence, blocks: int, protected: Set[Attempt]) -> bool:
        """Admit a sequence; if there is no room lower ranks give way, as long as they hold enough for `blocks`.
        `protected` sequences do not. If these are all without a sampled token since they came in, a token lies between
        any two evictions: however ranks change, work that is thrown away is paid for by progress."""
        if self.full or sequence in self._evicted:
            return False
        if self.admit(sequence):
            return True
        key = self._rank(sequence)
        victims = [
            s
            for s in self._holders
            if self._rank(s) > key and s not in self._planned and not s.pinned and s.key not in protected
        ]
        held = self._kv.owners()
        if self._kv.free_blocks + self._kv.cached_blocks + sum(held.get(s.key, 0) for s in victims) < blocks:
            return False
        for victim in reversed(victims):
            self._evict(victim)
            if self.admit(sequence):
                return True
        return False

    def finish(self) -> IterationPlan:
        plan = self._plan
        plan.rows = self._prefill + self._decode
        if self._limits.padded and self._prefill:
            plan.padded_to = max(row.count for row in self._prefill)
        plan.reason = f"{len(self._prefill)} prefill, {len(self._decode)} decode, {len(plan.preempted)} preempted"
        return plan

    def _count(self, sequence: Sequence) -> int:
        return min(sequence.uncomputed, self._limits.chunk, self.tokens_left)

    def _fits(self, count: int) -> bool:
        """Return whether a row fits: padded prompts are a rectangle, which `max_tokens` bounds with the other rows."""
        if not self._limits.padded:
            return True
        prompts = [row.count for row in self._prefill] + ([count] if count > 1 else [])
        tokens = len(prompts) * max(prompts, default=0) + len(self._decode) + (count == 1)
        return tokens <= self._limits.max_tokens

    def _add(self, sequence: Sequence, count: int) -> None:
        row = Row(sequence, sequence.computed, count)
        self._rows.append(row)
        (self._decode if count == 1 else self._prefill).append(row)
        self._planned.add(sequence)
        self.tokens_left -= count

    def _evict(self, victim: Sequence) -> None:
        self._holders.remove(victim)
        self._evicted.add(victim)
        preempt(victim, self._kv, self._plan, self._limits.preemption)
