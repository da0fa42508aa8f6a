"""Where a sequence goes on that the manager binds to a worker: one that waits parked for it, or one that runs here
while this worker drains.

    parked  ─ BindSegment(here) ──▶ running
    parked  ─ BindSegment(other) ─▶ leaving: its KV is offered
    running ─ BindSegment(other) ─▶ after the iterations in flight: leaving, from where it is
    waiting ─ BindSegment(other) ─▶ given back: nothing of it is computed, the manager places it anew

Part of `WorkerMachine`, which tells it of each message and, between two iterations, of the moment. Never decides where.
"""

from __future__ import annotations

from collections.abc import Callable

from cohort.common.machines.effects import Dial
from cohort.common.machines.worker.adapter_desk import AdapterDesk
from cohort.common.machines.worker.kv_sender import KvSender
from cohort.common.machines.worker.parked_pool import ParkedPool
from cohort.common.machines.worker.worker_state import WorkerState
from cohort.common.messages import BindSegment
from cohort.common.policies.interface import IterationScheduler
from cohort.common.sequence import Phase, Sequence
from cohort.common.types import Attempt, InstanceId


class Onward:
    def __init__(
        self,
        state: WorkerState,
        scheduler: IterationScheduler,
        pool: ParkedPool,
        sender: KvSender,
        adapters: AdapterDesk,
        lost: Callable[[float, Sequence, str], None],
    ) -> None:
        """`lost` gives an attempt back."""
        self._state = state
        self._scheduler = scheduler
        self._pool = pool
        self._sender = sender
        self._adapters = adapters
        self._lost = lost
        self._running: dict[Attempt, BindSegment] = {}
        """Bound to another worker while they run here."""

    @property
    def pending(self) -> bool:
        """Some wait for the end of the iterations in flight; nothing may be planned behind these."""
        return bool(self._running)

    def bound(self, now_s: float, message: BindSegment) -> None:
        held, segment = self._state.held.get(message.attempt), message.segment
        if held is None or segment.instance is None:
            return
        sequence, setup = held.sequence, self._state.setup
        if sequence.phase is not Phase.PARKED:
            if segment.instance != setup.instance:
                self._running[message.attempt] = message
            return
        self._pool.bound(sequence.key)
        if segment.instance == setup.instance:  # what was parked here runs on here
            sequence.end, sequence.batch_id = segment.end, message.batch_id
            sequence.phase = Phase.SWAPPED if held.pooled else Phase.RUNNING
            held.pooled = False
            self._adapters.admit(now_s, sequence)
            return
        self._leave(now_s, sequence, segment.instance, message.next_endpoint, segment.start)

    def between_iterations(self, now_s: float) -> None:
        """Nothing computes: what was bound elsewhere while it ran leaves from where it is."""
        assert self._state.in_flight is None, "a step is in flight"
        running, self._running = self._running, {}
        for key, message in running.items():
            held, peer = self._state.held.get(key), message.segment.instance
            if held is None or held.aborting or peer is None or key in self._sender:
                continue
            sequence = held.sequence
            if sequence.end is not None or sequence.phase not in (Phase.RUNNING, Phase.WAITING):
                continue  # it goes where its own segment ends, or comes back from host memory first
            if sequence.phase is Phase.WAITING or not sequence.computed or sequence.scores_prompt:
                self._lost(now_s, sequence, "the worker drains")
                continue
            self._adapters.withdraw(sequence)
            self._scheduler.remove(now_s, sequence)
            sequence.end = sequence.computed
            self._leave(now_s, sequence, peer, message.next_endpoint, sequence.computed)

    def _leave(self, now_s: float, sequence: Sequence, peer: InstanceId, endpoint: str, positions: int) -> None:
        assert peer != self._state.setup.instance, f"{sequence.key} leaves to where it is"
        self._state.effects.append(Dial(peer, endpoint))
        sequence.phase = Phase.LEAVING
        self._sender.offer(now_s, sequence, peer, positions).computed_at_s = now_s
