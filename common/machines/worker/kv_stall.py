"""Which sequence gives way when caches wait for each other's blocks.

Asked by `WorkerMachine` at every tick; says so once nothing has moved for `stall_timeout_s`.
"""

from __future__ import annotations

from cohort.common.machines.worker.adapter_desk import AdapterDesk
from cohort.common.machines.worker.kv_receiver import KvReceiver
from cohort.common.machines.worker.kv_sender import KvSender
from cohort.common.machines.worker.worker_state import WorkerState
from cohort.common.sequence import Phase, Sequence

_RUNNABLE = (Phase.WAITING, Phase.SWAPPED, Phase.RUNNING)


def given_back(
    now_s: float, state: WorkerState, sender: KvSender, receiver: KvReceiver, adapters: AdapterDesk
) -> Sequence | None:
    """The sequence to be given back now; one at a time, as its blocks may be what all others waited for."""
    if now_s - state.moved_s < state.settings.stall_timeout_s:
        return None
    state.moved_s = now_s
    stalled = holds_up(state, sender, receiver, adapters)
    state.counters.stalls += stalled is not None
    return stalled


def holds_up(state: WorkerState, sender: KvSender, receiver: KvReceiver, adapters: AdapterDesk) -> Sequence | None:
    """Nothing has moved here for long although blocks are wanted: they are held for KV that waits, directly or in a
    ring of workers, for what is held here. The youngest grant goes back, or else the youngest of those that could
    leave, or that wait for an adapter's slot; its request is placed anew. (A prefill worker whose decode worker is
    merely full waits on.)"""
    offers = receiver.offers
    if not offers and not any(held.sequence.phase in _RUNNABLE for held in state.held.values()):
        return None
    holding = receiver.unfinished()
    if not holding and offers:
        holding = sender.ungranted()
    if not holding:  # what only wants to wait here (A6 eviction) may hold up where it is what we wait for
        wanted = [state.held[offer.attempt].sequence for offer in offers if offer.attempt in state.held]
        holding = [sequence for sequence in wanted if sequence.end is not None]
    holding = holding or adapters.stuck()
    return holding[-1] if holding else None
