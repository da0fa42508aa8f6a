"""Iterations that provably repeat each other, run as one: for hosts with virtual time. Live hosts never ask.

A host calls `repeatable` once a step is in flight, foresees as many iterations as `fitting_repetitions` allows, and
applies those that have ended with `repeat`; before an event that is not `is_unaffected_by` it voids the rest.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from cohort.common.errors import InvariantViolated
from cohort.common.machines.worker.worker import WorkerMachine
from cohort.common.messages import KvChunk, KvHandoff, KvOffer, KvRenew, Message, StartSegment
from cohort.common.sequence import Phase, Row


class FastForward:
    """Repetition of iterations of one machine, between its `handle` calls."""

    def __init__(self, machine: WorkerMachine) -> None:
        self._machine = machine
        self._state = machine.state
        self._receiver = machine.receiver
        self._scheduler = machine.scheduler
        self._steady = 0
        """Number of times that the plan in flight will repeat, as far as the scheduler knows."""

    def repeatable(self) -> bool:
        """Return whether the plan in flight will repeat itself, row by row one position on, until something happens."""
        plan = self._state.in_flight
        if not self._state.kv.grows_by_block or plan is None or not plan.rows:
            return False
        if self._machine.drafts.policy is not None:  # each iteration teaches it, and may be given drafts
            return False
        if self._receiver.offers or self._state.aborting or not self._machine.pool.is_idle:
            return False
        for row in plan.rows:
            sequence = row.sequence
            if (
                row.count != 1
                or sequence.end is not None
                or sequence.last_token_s is None
                or sequence.repeat_from is not None
                or row.start != len(sequence.tokens) - 1
                or sequence.phase is not Phase.RUNNING
            ):
                return False
        self._steady = self._scheduler.steady_for(plan, self._state.kv)
        return self._steady > 0

    def is_unaffected_by(self, message: Message) -> bool:
        """Return whether this message neither needs nor changes what iterations depend on: sequences in them, the
        scheduler, free blocks. Iterations that a host foresaw (`repeatable`) then hold, and need not be applied first.
        Peers must keep to the protocol, as those of a virtual-time host do."""
        match message:
            case StartSegment(index=index):  # another worker computes first
                return index > 0 and not self._receiver.offers
            case KvChunk():  # how far a transfer has come is what some schedulers expect by
                return not self._scheduler.wants_arriving
            case KvHandoff(lease_id=lease_id):
                incoming = self._receiver.lease_of(lease_id)
                return incoming is not None and incoming.in_flight > 0
            case KvRenew():
                return True
            case _:
                return False

    def shows_in_state(self, message: Message) -> bool:
        """Return whether all that this message can change shows in `repeatable` and `fitting_repetitions`: a host that
        has applied the iterations before it may call them again afterwards, and keep what they still foresee."""
        return isinstance(message, KvOffer) and not self._scheduler.wants_arriving  # it takes blocks, or waits for some

    def is_unaffected_by_runs(self, lease_id: int, runs: int) -> bool:
        """Return the same for `runs` runs received well, of a transfer with others still to come."""
        incoming = self._receiver.lease_of(lease_id)
        return incoming is not None and (incoming.handoff is None or incoming.in_flight > runs)

    def fitting_repetitions(self, wanted: int) -> int:
        """Return how many of `wanted` iterations repeat the one in flight and find blocks. Only after `repeatable`."""
        plan, kv = self._machine.plan_in_flight, self._state.kv
        size = kv.geometry.block_size
        available = (kv.free_blocks + kv.cached_blocks) // kv.geometry.num_groups  # a row takes one of each group
        wanted = min(wanted, self._steady)
        if wanted // size + 1 <= available // len(plan.rows):
            return wanted  # enough even if no row had blocks left
        tables = [(row.start, len(kv.blocks(row.sequence.key))) for row in plan.rows]
        low, high = 0, wanted
        while low < high:
            middle = (low + high + 1) // 2
            # Blocks beyond those that were allocated ahead.
            if sum(max(0, (start + middle) // size + 1 - held) for start, held in tables) <= available:
                low = middle
            else:
                high = middle - 1
        return low

    def repeat(self, ends_s: Seq[float], latencies_s: Seq[float], token: int) -> None:
        """Act as if a step had ended and the next one started once for each of `ends_s`, every row sampling `token`
        each time; the plan in flight is then the one that follows. Only after `repeatable`, for no more than
        `fitting_repetitions`, and short of every row's last token. The host sends the token updates."""
        plan, state = self._machine.plan_in_flight, self._state
        count, size, kv = len(ends_s), state.kv.geometry.block_size, state.kv
        averages, counters = state.averages, state.counters
        if self._machine.observed is not None:  # the first of them; those after it teach nothing
            self._machine.observed.note(plan, latencies_s[0], kv.geometry)
        state.skipped_s += latencies_s
        averages.note_decodes(latencies_s)
        # Blocks change in the order of the iterations: after each, full blocks are committed; then the
        # next one reserves. So the same blocks go to the same rows.
        touched: list[tuple[int, bool, int]] = []
        last_s = ends_s[-1]
        state.moved_s = max(state.moved_s, last_s)
        sampled = [token] * count
        for index, row in enumerate(plan.rows):
            start = row.start
            to_boundary = size - start % size
            if to_boundary <= count:
                touched += [(step - 1, False, index) for step in range(to_boundary, count + 1, size)]
                touched += [(step, True, index) for step in range(to_boundary, count + 1, size)]
            row.sequence.tokens += sampled
        touched.sort()
        rows = plan.rows
        for step, reserves, index in touched:
            row = rows[index]
            if reserves:
                if not kv.extend(row.sequence, row.start + step + 1):
                    raise InvariantViolated(f"no block for {row.sequence.key} in a repeated iteration")
            else:
                row.sequence.computed = row.start + step + 1
                kv.committed(row.sequence)
        plan.rows = following = []
        for row in rows:
            sequence, start = row.sequence, row.start + count
            sequence.computed = start
            sequence.delivered += count
            sequence.last_token_s = last_s
            following.append(Row(sequence, start, 1))
        counters.steps += count
        counters.decode_tokens += count * len(rows)
