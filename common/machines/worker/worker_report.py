"""A worker's messages about itself: registration, reports and their figures, its leave; and which manager it obeys.

Reports go to the manager that leads, the one of the highest epoch received. The worker registers with those on standby
once a second, so that each knows it and its connection when it takes over. A command of a lower epoch is refused, and
its sender informed.

Called by `WorkerMachine`. Decides nothing about requests.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import islice
from typing import Any

from cohort.common.kv.lease import LeaseTable
from cohort.common.machines.effects import Send
from cohort.common.machines.worker.adapter_slots import AdapterSlots
from cohort.common.machines.worker.worker_state import Held, WorkerState
from cohort.common.messages import (
    BindSegment,
    Cancel,
    Leaving,
    ManagerHello,
    PrefetchKv,
    Registered,
    RegisterWorker,
    StartSegment,
    ToWorker,
    WorkerReport,
)
from cohort.common.policies.interface import Learned
from cohort.common.sequence import Phase
from cohort.common.types import Attempt, InstanceId, QueuedWork, WorkerStats

_REPORTED_QUEUE = 512
"""Entries of the progress list in a report (D4); beyond, an execution predictor sees totals only."""
_WHOLE_EVERY = 5
"""Interval, in reports, of those that name everything held; the others name changes. Repairs a loss within a second."""
_STANDBYS_EVERY = 5
"""Interval, in reports to the leading manager, of registrations with those on standby."""
_Command = StartSegment | BindSegment | PrefetchKv | Cancel


def _queue(everything: Collection[Held], listed: int) -> dict[str, Any]:
    """Return sums over a worker's sequences, by field of `WorkerStats`. `listed`: maximum of the progress list."""
    running = waiting = awaiting_kv = parked = prefill_tokens = 0
    waits, swapped, runs, awaits = Phase.WAITING, Phase.SWAPPED, Phase.RUNNING, Phase.AWAITING_KV
    for held in everything:  # under overload thousands, most of which wait
        sequence = held.sequence
        phase = sequence.phase
        if phase is waits or phase is swapped:
            waiting += 1
        elif phase is runs:
            running += 1
        elif phase is awaits:
            awaiting_kv += 1
            continue
        else:  # parked, or leaving
            parked += 1
            continue
        end, computed, prompt = sequence.end, sequence.computed, held.prompt_known
        remaining = (prompt if end is None or prompt < end else end) - computed
        if remaining > 1:
            prefill_tokens += remaining
    return {
        "running": running,
        "waiting": waiting,
        "awaiting_kv": awaiting_kv,
        "parked": parked,
        "queued_prefill_tokens": prefill_tokens,
        "queue": [_progress(held) for held in islice(everything, listed)],
    }


def _progress(held: Held) -> QueuedWork:
    sequence = held.sequence
    request, computed, known, prompt = sequence.request, sequence.computed, len(sequence.tokens), held.prompt_known
    if sequence.phase is Phase.AWAITING_KV:  # what comes before its segment is another worker's work
        computed = held.segment.segments[held.segment.index].start
        known = max(known, computed)
    end = sequence.end
    prefill_left = max(0, (prompt if end is None or prompt < end else end) - computed)
    # A sequence that has outlived its prediction is expected to sample as many again as it is beyond it (D8).
    sampled = known - request.prompt_tokens
    decode_left, most = abs(round(sequence.predicted) - sampled), request.sampling.max_tokens - sampled
    if decode_left > most:
        decode_left = most
    if decode_left < 1:
        decode_left = 1
    if end is not None:  # the rest is sampled by the next segment's worker
        decode_left = min(decode_left, max(0, end - max(known, prompt)))
    return QueuedWork(request.request_id, prefill_left, computed, decode_left, sequence.cached_ahead)


class WorkerReports:
    """Messages to the managers about this worker as a whole: registration, reports, leave."""

    def __init__(self, state: WorkerState, leases: LeaseTable, learned: Learned | None, adapters: AdapterSlots) -> None:
        self._state = state
        self._adapters = adapters
        self._leases = leases
        self._learned = learned
        self._sequence = 0
        self._reported: dict[Attempt, None] | None = None
        """Attempts in the last report; None: the next one names everything."""
        setup = state.setup
        self.managers = (setup.manager, *setup.standbys)
        self.manager = setup.manager
        """Manager that leads, as far as is known."""
        self._epoch = 0
        self._registered = False
        self.draining = False

    def on_manager_hello(self, sender: InstanceId, message: ManagerHello | Registered) -> None:
        """Handle a manager's message that it knows this worker, or that it does not: it restarted or took over."""
        if message.leads and message.epoch >= self._epoch:
            self._follow(sender, message.epoch)
        leads = message.leads and message.epoch == self._epoch
        if sender == self.manager:
            self._registered = leads and isinstance(message, Registered)
            self._reported = None
        if isinstance(message, ManagerHello) or (message.leads and not leads):
            self._register_with(sender)

    def refuses(self, sender: InstanceId, message: ToWorker) -> bool:
        """Return whether this is the command of a manager that was replaced. One of a higher epoch is followed."""
        if not isinstance(message, _Command) or sender not in self.managers:
            return False
        if message.epoch < self._epoch:
            self._state.counters.fenced += 1
            self._register_with(sender)  # and so informs it
            return True
        self._follow(sender, message.epoch)
        return False

    def _follow(self, manager: InstanceId, epoch: int) -> None:
        if (manager, epoch) == (self.manager, self._epoch):
            return
        assert epoch >= self._epoch, f"epoch {epoch} is followed after {self._epoch}"
        former, self.manager, self._epoch, self._registered = self.manager, manager, epoch, False
        self._reported = None
        if former != manager:  # it learns at once that it was replaced, if anything reaches it
            self._register_with(former)

    def due(self, memory_free_bytes: int, quiet_s: float) -> None:
        """Report; register as long as the manager does not know this worker. It takes silence for death."""
        if not self._registered:
            for manager in self.managers:
                self._register_with(manager)
            return
        self._sequence += 1
        setup, stats = self._state.setup, self.stats(memory_free_bytes)
        # Nearly always none waits for another process: under overload thousands need not be looked at twice.
        apart = stats.awaiting_kv or stats.parked
        held, awaiting = self._attempts() if apart else (list(self._state.held), [])
        number, since, removed = self._sequence, 0, list[Attempt]()
        if self._reported is not None and number % _WHOLE_EVERY:
            current, since = self._state.held, number - 1
            removed = sorted(self._reported.keys() - current.keys())
            new = current.keys() - self._reported.keys()
            held = [key for key in current if key in new] if new else []
        if not since or held or removed:
            self._reported = dict.fromkeys(self._state.held)
        report = WorkerReport(
            setup.instance,
            setup.incarnation,
            number,
            stats,
            held,
            awaiting,
            self.draining,
            self._epoch,
            since,
            removed,
            quiet_s,
        )
        self._send(self.manager, report)
        if quiet_s or number % _STANDBYS_EVERY == 0:
            for manager in self.managers:
                if manager != self.manager:
                    self._register_with(manager, quiet_s)

    def leave(self) -> None:
        for manager in self.managers:
            self._send(manager, Leaving(self._state.setup.instance, self._state.setup.incarnation))

    def stats(self, memory_free_bytes: int) -> WorkerStats:
        kv, averages = self._state.kv, self._state.averages
        queries, hits = kv.prefix_lookups
        return WorkerStats(
            total_blocks=kv.total_blocks,
            free_blocks=kv.free_blocks,
            cached_blocks=kv.cached_blocks,
            host_blocks=kv.host_blocks,
            host_free_blocks=kv.host_free_blocks,
            memory_free_bytes=memory_free_bytes,
            step_s=averages.step_s,
            prefill_tokens_per_s=averages.prefill_tokens_per_s,
            decode_step_s=averages.decode_step_s,
            preemptions=self._state.counters.preemptions,
            prefix_queries=queries,
            prefix_hits=hits,
            leases=len(self._leases),
            expired_leases=self._leases.expired,
            step_times=None if self._learned is None else self._learned.step_times(),
            link_rates=dict(self._state.link_rates),
            adapters=self._adapters.adapters,
            free_adapter_slots=self._adapters.free_slots,
            adapter_load_s=self._adapters.load_s,
            **_queue(self._state.held.values(), _REPORTED_QUEUE if self._state.settings.lists_queue else 0),
        )

    def _attempts(self) -> tuple[list[Attempt], list[Attempt]]:
        """Return attempts computed here or on their way from here, and those that wait for another process: for the
        worker that hands over their state or, parked, for a manager that binds them, or has them placed anew."""
        awaiting = [
            key
            for key, held in self._state.held.items()
            if (phase := held.sequence.phase) is Phase.AWAITING_KV or phase is Phase.PARKED
        ]
        waits = set(awaiting)
        return [key for key in self._state.held if key not in waits], awaiting

    def _register_with(self, manager: InstanceId, quiet_s: float = 0.0) -> None:
        setup, (held, awaiting) = self._state.setup, self._attempts()
        place, capacity = (setup.instance, setup.incarnation, setup.endpoint), setup.capacity
        self._send(manager, RegisterWorker(*place, capacity, held, awaiting, self._epoch, quiet_s))

    def _send(self, manager: InstanceId, message: RegisterWorker | WorkerReport | Leaving) -> None:
        self._state.effects.append(Send(manager, message))
