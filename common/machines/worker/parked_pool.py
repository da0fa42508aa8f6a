"""Sequences parked on a worker: where their KV lies (`ParkedPool`), and where they go on (`Handovers`)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from cohort.common.errors import InvariantViolated
from cohort.common.machines.effects import Dial
from cohort.common.machines.worker.adapter_slots import AdapterSlots
from cohort.common.machines.worker.kv_sender import KvSender
from cohort.common.machines.worker.worker_state import Held, WorkerState
from cohort.common.messages import BindSegment
from cohort.common.policies.interface import IterationScheduler
from cohort.common.sequence import Phase, Sequence
from cohort.common.types import Attempt, InstanceId

_GRACE_S = 0.25
"""Time that parked KV stays on the device unless space is short: under low load it is sent on sooner."""


class ParkedPool:
    """A2, A9 · Parked KV between device and host memory: which of it moves along with the next step. Called once per
    plan. Nothing it moves is in a row of the plan, and freed blocks go to no other sequence until the step has ended.
    With an allocator whose KV cannot be sent from host memory there is no pool: parked KV then stays on the device."""

    def __init__(self, state: WorkerState) -> None:
        self._state = state
        self._on_device: dict[Attempt, Held] = {}
        """Parked sequences with their KV on the device, oldest first."""
        self._buffered: dict[Attempt, Held] = {}
        """Sequences that will be sent on soon and are therefore on the device (A5), oldest first."""
        self._prefetches: deque[Attempt] = deque()
        self._moving: list[Held] = []

    @property
    def is_idle(self) -> bool:
        """Return whether nothing is here that a later plan might move."""
        return not (self._on_device or self._buffered or self._prefetches)

    def park(self, now_s: float, held: Held) -> None:
        key = held.sequence.key
        assert key not in self._on_device and key not in self._buffered, f"{key} is parked a second time"
        assert not held.pooled, f"{key} is parked on the device and lies in host memory"
        held.parked_s = now_s
        self._on_device[held.sequence.key] = held

    def bound(self, key: Attempt) -> None:
        """Forget a sequence that goes on, from wherever its KV lies."""
        self._on_device.pop(key, None)
        self._buffered.pop(key, None)

    def prefetch(self, attempts: list[Attempt]) -> None:
        """Bring these back to the device, in this order, as far as blocks are free. KV that has not left it stays: it
        is requested once, and would be offloaded only to be sent from host memory."""
        held = self._state.held
        for key in attempts:
            on_device = self._on_device.pop(key, None)
            if on_device is not None:
                self._buffered[key] = on_device
            elif key in held and held[key].pooled:
                self._prefetches.append(key)

    def move(self, now_s: float) -> None:
        """Move KV along with the plan that was just decided. Its copies follow the decision's own."""
        if self._state.kv.sends_from_host and not self.is_idle:
            self._bring_back()
            self._offload(now_s)

    def finish_moves(self) -> list[Held]:
        """Return what the step that has ended, well or not, moved; some of it may have been dropped meanwhile."""
        moved, self._moving = self._moving, []
        for held in moved:
            assert held.moving, f"{held.sequence.key} was moved twice by one step"
            held.moving = False
        return moved

    def _bring_back(self) -> None:
        state = self._state
        spare = self._spare_blocks() if self._prefetches else 0
        while self._prefetches:
            key = self._prefetches[0]
            held = state.held.get(key)
            if held is not None and held.sequence.phase is Phase.PARKED and held.pooled:
                spare -= state.kv.geometry.blocks_held(held.sequence.computed)
                if spare < 0 or not state.kv.swap_in(held.sequence, concurrent=True):
                    return
                held.pooled = False
                self._buffered[key] = held
                self._moves(held)
                state.counters.prefetched += 1
            self._prefetches.popleft()

    def _offload(self, now_s: float) -> None:
        """Offload KV parked a while ago; if prompts cannot get blocks, the buffer as well, its last first."""
        kv = self._state.kv
        free = kv.free_blocks + kv.cached_blocks
        # A decode worker sends on what it set aside: that frees its blocks sooner than two copies.
        short = self._state.setup.capacity.role.prefills and free < kv.total_blocks // 4
        for held in list(self._on_device.values()):
            if now_s - held.parked_s < _GRACE_S and not short:
                break
            if not self._to_host(held):
                return
        while short and self._buffered and self._spare_blocks() < 0:
            held = self._buffered[next(reversed(self._buffered))]
            if held.moving or not self._to_host(held):
                return

    def _to_host(self, held: Held) -> bool:
        """Offload one sequence. Return False if the host pool is full: it stays, and prompts wait for its blocks."""
        if not self._state.kv.swap_out(held.sequence, concurrent=True):
            return False
        self.bound(held.sequence.key)
        held.pooled = True
        self._moves(held)
        self._state.counters.pooled += 1
        return True

    def _moves(self, held: Held) -> None:
        assert not held.moving, f"{held.sequence.key} is moved twice by one step"
        assert held.sequence.phase is Phase.PARKED, f"{held.sequence.key} is moved and is {held.sequence.phase}"
        held.moving = True
        self._moving.append(held)

    def check(self) -> None:
        """Raise `InvariantViolated` unless every entry is held, parked, and listed once."""
        if both := self._on_device.keys() & self._buffered.keys():
            raise InvariantViolated(f"parked twice: {sorted(both)}")
        for key, held in (*self._on_device.items(), *self._buffered.items()):
            if self._state.held.get(key) is not held or held.sequence.phase is not Phase.PARKED or held.pooled:
                raise InvariantViolated(f"{key} is parked on the device, and is {held.sequence.phase}")

    def _spare_blocks(self) -> int:
        """Return blocks that KV may be brought back into: a twentieth stays free, and the largest waiting prompt's."""
        kv = self._state.kv
        sequences = (held.sequence for held in self._state.held.values())
        wanted = kv.geometry.blocks_for(max((s.target for s in sequences if s.phase is Phase.WAITING), default=0))
        return kv.free_blocks + kv.cached_blocks - wanted - kv.total_blocks // 20


@dataclass(slots=True, eq=False)
class Handovers:
    """Next step of a sequence that the manager binds to a worker: one that waits parked for it, or one that runs here
    while this worker drains. Never decides where it goes.

        parked  ─ BindSegment(here) ──▶ running
        parked  ─ BindSegment(other) ─▶ leaving: its KV is offered
        running ─ BindSegment(other) ─▶ after the iterations in flight: leaving, from where it is
        waiting ─ BindSegment(other) ─▶ given back: nothing of it is computed, the manager places it anew
    """

    _state: WorkerState
    _scheduler: IterationScheduler
    _pool: ParkedPool
    _sender: KvSender
    _adapters: AdapterSlots
    _lost: Callable[[float, Sequence, str], None]
    _running: dict[Attempt, BindSegment] = field(default_factory=dict)
    """Messages of sequences that still run here and go to another worker after the iterations in flight."""

    @property
    def pending(self) -> bool:
        """Whether some wait for the end of the iterations in flight, after which nothing may be planned."""
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
        """Send on, from where they are, sequences that were bound elsewhere while they ran. Nothing computes now."""
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
