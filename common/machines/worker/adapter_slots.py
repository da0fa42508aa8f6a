"""LoRA adapters that a worker holds, and sequences that wait for theirs.

    sequence ── its adapter is held, or it has none ──────────────▶ enters the scheduler
        └─ waits, FCFS ─ LoadAdapter ▶ host ▶ AdapterLoaded ───────▶ enters the scheduler
                             │                AdapterFailed ───────▶ its request ends with that error
                             └ where all slots are taken, instead of the adapter unused for longest that no sequence
                               in the scheduler, and no row under way, computes with

Called by `WorkerMachine`. The scheduler sees only sequences whose adapter is held, so no scheduler knows of adapters.
KV that waits, parked or under way, keeps no adapter: workers cannot wait for each other's. Sequences that keep coming
for held adapters overtake one without a slot; after `_STARVATION_S` they wait behind it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from cohort.common.errors import InvariantViolated
from cohort.common.machines.effects import LoadAdapter
from cohort.common.machines.events import AdapterFailed, AdapterLoaded
from cohort.common.machines.worker.worker_state import WorkerState, mix
from cohort.common.sequence import Phase, Sequence
from cohort.common.types import Request

_STARVATION_S = 2.0
_COMPUTES = (Phase.WAITING, Phase.RUNNING, Phase.SWAPPED)


@dataclass(slots=True, eq=False)
class AdapterSlots:
    _state: WorkerState
    _admit_to_scheduler: Callable[[float, Sequence], None]
    _refuse: Callable[[float, Sequence, str], None]
    _held: dict[str, None] = field(default_factory=dict)
    """Adapters held, least recently used first."""
    _loading: dict[str, float] = field(default_factory=dict)
    """Adapters under way, and since when."""
    _waiting: dict[Sequence, float] = field(default_factory=dict)
    """Sequences that wait, oldest first, and since when."""
    load_s: float = 0.0

    @property
    def adapters(self) -> list[str]:
        return [*self._held, *self._loading]

    @property
    def free_slots(self) -> int:
        return self._state.settings.max_loras - len(self._held) - len(self._loading)

    def stuck(self) -> list[Sequence]:
        """Return the sequences that hold KV and wait for a slot, oldest first."""
        return [
            sequence
            for sequence in self._waiting
            if sequence.phase is not Phase.WAITING and not self._is_known(sequence.request.adapter)
        ]

    def admit(self, now_s: float, sequence: Sequence) -> None:
        """Let a sequence be computed, now or when its adapter is loaded."""
        adapter = sequence.request.adapter
        if adapter and (adapter not in self._held or self._is_starving(now_s)):
            self._waiting[sequence] = now_s
            self.move(now_s)
        else:
            self._enqueue_load(adapter)
            self._admit_to_scheduler(now_s, sequence)

    def withdraw(self, sequence: Sequence) -> None:
        """Stop waiting for a sequence's adapter: the sequence leaves for another worker."""
        self._waiting.pop(sequence, None)

    def expect(self, now_s: float, sequence: Sequence) -> None:
        """Load the adapter while a sequence's KV is under way, if nothing waits for one."""
        adapter = sequence.request.adapter
        if adapter and not self._waiting:
            self._load(now_s, sequence.request)

    def on_load_ended(self, now_s: float, event: AdapterLoaded | AdapterFailed) -> None:
        assert event.adapter in self._loading, f"adapter {event.adapter} was never to be loaded"
        since_s = self._loading.pop(event.adapter)
        counters = self._state.counters
        match event:
            case AdapterLoaded(adapter=adapter):
                counters.adapter_loads += 1
                self.load_s = mix(self.load_s, now_s - since_s)
                self._held[adapter] = None
                self._state.moved_s = now_s
            case AdapterFailed(adapter=adapter, reason=reason):
                counters.adapter_failures += 1
                for sequence in [each for each in self._waiting if each.request.adapter == adapter]:
                    del self._waiting[sequence]
                    if self._state.holds(sequence):
                        self._refuse(now_s, sequence, f"LoRA adapter {adapter}: {reason}")
        self.move(now_s)

    def move(self, now_s: float) -> None:
        """Load adapters that are waited for, and admit sequences whose adapter is held."""
        if not self._waiting:
            return
        passes, slots = True, True
        for sequence, since_s in list(self._waiting.items()):
            adapter = sequence.request.adapter
            if not self._state.holds(sequence):
                del self._waiting[sequence]
            elif adapter not in self._held:
                if slots:  # where one finds none, none behind it does
                    self._load(now_s, sequence.request)
                    slots = self._is_known(adapter)
                passes &= self._is_known(adapter) or now_s - since_s <= _STARVATION_S
            elif passes:  # else it waits behind one that has found no slot for long
                assert sequence.phase in _COMPUTES, f"{sequence.key} waits for its adapter and is {sequence.phase}"
                del self._waiting[sequence]
                self._enqueue_load(adapter)
                self._admit_to_scheduler(now_s, sequence)

    def check(self) -> None:
        """Raise `InvariantViolated` if more are held than there are slots, or one in use is not."""
        most, held = self._state.settings.max_loras, self.adapters
        if len(held) > most or not self._used() <= self._held.keys():
            raise InvariantViolated(f"adapters {held} in {most} slots, {sorted(self._used())} are computed with")

    def _load(self, now_s: float, request: Request) -> None:
        adapter = request.adapter
        if self._is_known(adapter):
            return
        instead_of = ""
        if self.free_slots <= 0:
            used = self._used()
            instead_of = next((held for held in self._held if held not in used), "")
            if not instead_of:
                return
            del self._held[instead_of]
        assert self.free_slots > 0, f"no slot for adapter {adapter}: {self.adapters}"
        self._loading[adapter] = now_s
        self._state.effects.append(LoadAdapter(adapter, instead_of, request.adapter_folder))

    def _used(self) -> set[str]:
        """Return adapters of sequences that compute here, or of which a step under way computes a row."""
        return {
            held.sequence.request.adapter
            for held in self._state.held.values()
            if held.sequence.request.adapter
            and held.sequence not in self._waiting
            and (held.aborting or held.sequence.phase in _COMPUTES)
        }

    def _is_starving(self, now_s: float) -> bool:
        return any(
            now_s - since_s > _STARVATION_S and not self._is_known(sequence.request.adapter)
            for sequence, since_s in self._waiting.items()
        )

    def _enqueue_load(self, adapter: str) -> None:
        if adapter:
            del self._held[adapter]
            self._held[adapter] = None

    def _is_known(self, adapter: str) -> bool:
        return adapter in self._held or adapter in self._loading
