"""The queues of R1 and the order in which requests are taken from them (R5), for real-time and best-effort requests.

Waiting = nothing computed yet. Pending = started, and not in the current batch: most hold KV here. Owned by the
packing; decides only the order.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import chain
from operator import itemgetter
from typing import Any

from cohort.common.policies.bros.batch import NO_DEADLINE_S, DecodeRows, is_decode
from cohort.common.policies.bros.iteration_cost import IterationCost
from cohort.common.policies.bros.token_groups import TokenGroups
from cohort.common.policies.kv_interface import BlockSharing
from cohort.common.sequence import Phase, Sequence
from cohort.common.types import Attempt

Candidate = tuple[float, Attempt, Sequence]
"""Residual time, deadline or arrival; key, sequence. The least goes first."""


def _place(queue: list[Candidate], time_s: float, key: Attempt) -> int:
    before: Any = time_s, key  # of what begins alike the shorter tuple is the lesser
    return bisect_left(queue, before)


class UrgentFirst:
    """Fig. 8 · Two ordered queues, merged lazily. No request may start or leave meanwhile.

    Both are by time: `zero_s` of the pending ones is now if they are by deadline, and 0 if by residual time. Those
    before `place` and `at` are late already; `past_due` may be read after others have started.
    """

    def __init__(
        self, now_s: float, pending: list[Candidate], zero_s: float, place: int, waiting: list[Candidate], at: int
    ) -> None:
        self._now_s, self._zero_s = now_s, zero_s
        self._pending, self._place, self._late = pending, place, place
        self._waiting, self._at, self._end = waiting, at, len(waiting)
        self._late_waiting = at

    def past_due_started(self) -> Iterator[Sequence]:
        """Return the requests of `past_due` that had started before this decision."""
        return (item[2] for item in self._pending[: self._late])

    def past_due(self) -> Iterator[Sequence]:
        """Yield requests that miss their deadline in any case: started ones first, each by deadline. A yielded request
        may start meanwhile."""
        yield from self.past_due_started()
        yield from (item[2] for item in self._waiting[: self._late_waiting])

    def started_on_time(self) -> Iterator[Sequence]:
        return (item[2] for item in self._pending[self._late :])

    def skip_waiting(self) -> None:
        """Skip all further requests that have not started."""
        self._end = self._at

    def __iter__(self) -> Iterator[Candidate]:
        pending, waiting, zero_s = self._pending, self._waiting, self._zero_s
        while self._at < self._end:
            due_s, key, sequence = waiting[self._at]
            residual_s = due_s - self._now_s
            if self._place < len(pending) and (started_s := pending[self._place][0] - zero_s) <= residual_s:
                self._place += 1
                yield (started_s, *pending[self._place - 1][1:])
            else:
                self._at += 1
                yield (residual_s, key, sequence)
        while self._place < len(pending):
            self._place += 1
            due_s, key, sequence = pending[self._place - 1]
            yield (due_s - zero_s, key, sequence)


class _Queues:
    """Waiting requests by a fixed time of theirs, and pending ones in the order in which they started."""

    def __init__(self, waits_by: Callable[[Sequence], float]) -> None:
        self._waits_by = waits_by
        self._waiting: list[Candidate] = []
        self._place: dict[Attempt, float] = {}
        """Sort key of each waiting request."""
        self._pending: dict[Attempt, Sequence] = {}

    def __len__(self) -> int:
        return len(self._waiting) + len(self._pending)

    def add(self, sequence: Sequence) -> None:
        if sequence.phase is Phase.WAITING and sequence.output_tokens == 0:
            place = self._place[sequence.key] = self._waits_by(sequence)
            insort(self._waiting, (place, sequence.key, sequence))
        else:
            self._pend(sequence)

    def remove(self, sequence: Sequence) -> None:
        if self._pending.pop(sequence.key, None) is None:
            self._leave(sequence)

    def _pend(self, sequence: Sequence) -> None:
        self._pending[sequence.key] = sequence

    def started(self, sequence: Sequence) -> None:
        """Move a request that got its first blocks from waiting to pending."""
        self._leave(sequence)
        self._pend(sequence)

    def _leave(self, sequence: Sequence) -> None:
        place = self._place.pop(sequence.key, None)
        if place is not None:
            del self._waiting[_place(self._waiting, place, sequence.key)]

    def pending(self) -> Collection[Sequence]:
        return self._pending.values()


class RealTimeQueues(_Queues):
    """R5 · The waiting queue is in order of deadline; only the pending ones are sorted, and the two are merged lazily.

    Differs from the paper: waiting requests are by deadline, which is arrival order if all have one target. If every
    token has its own deadline, so are the pending ones: a deadline moves only when a token comes, so a decision sorts
    those that have had a row since the last one (`changed`).
    """

    def __init__(self, groups: TokenGroups) -> None:
        super().__init__(groups.due_s)
        self._groups = groups
        self.decodes = DecodeSet(groups)
        self._by_due: list[Candidate] = []
        self._due: dict[Attempt, float] = {}
        """Sort key of each request in `_by_due`; both are empty if tokens share deadlines."""

    def remove(self, sequence: Sequence) -> None:
        self._groups.forget(sequence)
        if sequence.key in self._pending:
            self._unfile(sequence.key)
        super().remove(sequence)

    def _pend(self, sequence: Sequence) -> None:
        self._unfile(sequence.key)
        super()._pend(sequence)
        self.changed(sequence)

    def changed(self, sequence: Sequence) -> None:
        """Update a request that had a row in the last iteration, or whose KV came or went; ignore one that is not
        here."""
        key = sequence.key
        if self._pending.get(key) is not sequence:
            return
        self.decodes.note(sequence)
        if self._groups.single:
            due_s = self._groups.due_s(sequence)
            if due_s != self._due.get(key):
                self._take_out(key)
                self._due[key] = due_s
                insort(self._by_due, (due_s, key, sequence))

    def had_rows(self, sequences: Iterable[Sequence]) -> None:
        """Update all rows of an iteration (`changed`): their new deadlines are sorted together."""
        if not self._groups.single:
            for sequence in sequences:
                self.changed(sequence)
            return
        moved: dict[Attempt, Candidate] = {}
        for sequence in sequences:
            key = sequence.key
            if self._pending.get(key) is sequence:
                self.decodes.note(sequence)
                due_s = self._groups.due_s(sequence)
                if due_s != self._due.get(key):
                    self._due[key] = due_s
                    moved[key] = (due_s, key, sequence)
        if moved:
            self._by_due = [item for item in self._by_due if item[1] not in moved]
            self._by_due += moved.values()
            self._by_due.sort()

    def _unfile(self, key: Attempt) -> None:
        self.decodes.forget(key)
        self._take_out(key)

    def _take_out(self, key: Attempt) -> None:
        due_s = self._due.pop(key, None)
        if due_s is not None:
            del self._by_due[_place(self._by_due, due_s, key)]

    @property
    def has_waiting(self) -> bool:
        return bool(self._waiting)

    def urgent_first(self, now_s: float, average_s: float, least_s: float) -> UrgentFirst:
        """Order all requests with at least `least_s` left, most urgent first (R4, lines 3–4)."""
        groups, zero_s = self._groups, now_s if self._groups.single else 0.0
        if groups.single:
            pending = self._by_due.copy()
        else:
            pending = sorted((groups.residual_s(now_s, one, average_s), key, one) for key, one in self._pending.items())
        place = bisect_left(pending, least_s, key=lambda item: item[0] - zero_s)
        at = bisect_left(self._waiting, now_s + least_s, key=itemgetter(0))
        return UrgentFirst(now_s, pending, zero_s, place, self._waiting, at)


class BestEffortQueues(_Queues):
    """R4, line 17 · Best-effort requests by the slots that would have to come back, then by arrival."""

    def __init__(self) -> None:
        super().__init__(lambda sequence: sequence.arrived_s)

    def first_within(self, most: int, blocks: int, blocks_for: Callable[[int], int]) -> list[Sequence]:
        """Return at most `most` requests, started ones first, then by arrival, as long as their KV with a next token
        fits `blocks`."""
        first: list[Sequence] = []
        for sequence in chain(self._pending.values(), (item[2] for item in self._waiting)):
            blocks -= blocks_for(sequence.target + 1)
            if blocks < 0 or len(first) == most:
                break
            first.append(sequence)
        return first

    def waiting(self, most: int) -> list[Sequence]:
        """Return at most `most` waiting requests, by arrival: they have no KV on any worker."""
        return [item[2] for item in self._waiting[:most]]

    def by_slots(self, sharing: BlockSharing | None) -> tuple[list[Sequence], list[tuple[int, Sequence]]]:
        """Return the pending requests whose KV is all on the device, by arrival; and the others with the slots that
        have to come back, fewest first. Waiting requests belong between the two."""
        whole: list[Candidate] = []
        apart: list[tuple[int, float, Attempt, Sequence]] = []
        for key, sequence in self._pending.items():
            slots = slots_away(sequence, sharing)
            if slots:
                apart.append((slots, sequence.arrived_s, key, sequence))
            else:
                whole.append((sequence.arrived_s, key, sequence))
        whole.sort()
        apart.sort()
        return [item[2] for item in whole], [(item[0], item[3]) for item in apart]


def slots_away(sequence: Sequence, sharing: BlockSharing | None) -> int:
    """R10 · Return the slots that have to come from host memory before the sequence can run."""
    if sharing is not None:
        return sharing.checkpointed(sequence.key)
    return sequence.computed if sequence.phase is Phase.SWAPPED else 0


class DecodeSet:
    """The real-time sequences that decode: `rows` sequences with `context` positions computed, and the strictest TPOT
    that one of them could keep. Updated as sequences change: thousands may decode."""

    def __init__(self, groups: TokenGroups) -> None:
        self._groups = groups
        self._noted: dict[Attempt, tuple[float, int]] = {}
        """TPOT target and computed positions of each."""
        self._by_tpot: dict[float, dict[Attempt, int]] = {}
        self.context = 0

    @property
    def rows(self) -> int:
        return len(self._noted)

    def note(self, sequence: Sequence) -> None:
        key, noted = sequence.key, self._noted.get(sequence.key)
        if noted is not None and is_decode(sequence) and noted[0] == self._groups.tpot_s(sequence):  # nearly always
            tpot_s, before = noted
            self._noted[key] = tpot_s, sequence.computed
            self._by_tpot[tpot_s][key] = sequence.computed
            self.context += sequence.computed - before
            return
        self.forget(key)
        if is_decode(sequence):
            tpot_s, computed = self._groups.tpot_s(sequence), sequence.computed
            self._noted[key] = tpot_s, computed
            self._by_tpot.setdefault(tpot_s, {})[key] = computed
            self.context += computed

    def forget(self, key: Attempt) -> None:
        tpot_s, computed = self._noted.pop(key, (0.0, -1))
        if computed >= 0:
            self.context -= computed
            alike = self._by_tpot[tpot_s]
            del alike[key]
            if not alike:
                del self._by_tpot[tpot_s]

    def without(self, keys: Iterable[Attempt]) -> tuple[int, int]:
        """Return rows and context of all but `keys`."""
        taken = [self._noted[key][1] for key in keys if key in self._noted]
        return self.rows - len(taken), self.context - sum(taken)

    def all_rows(self, cost: IterationCost, most_rows: int) -> DecodeRows:
        """Return an iteration of as many of them as it can hold."""
        rows, context = min(self.rows, most_rows), self.context
        least_s = max(cost.least_s, cost.exec_of(0, rows, context + rows))
        return DecodeRows(rows, context + rows, least_s, self._strictest_s(cost))

    def _strictest_s(self, cost: IterationCost) -> float:
        """Return the strictest TPOT target that one of them could keep alone; infinite if there is none."""
        for tpot_s in sorted(self._by_tpot):
            if any(tpot_s >= cost.exec_of(0, 1, computed + 1) for computed in self._by_tpot[tpot_s].values()):
                return tpot_s
        return NO_DEADLINE_S
