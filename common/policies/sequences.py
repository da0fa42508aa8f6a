"""State changes of a sequence that a scheduler may make while it decides: start, preempt, resume."""

from __future__ import annotations

from typing import Literal

from cohort.common.policies.interface import IterationPlan, Preempt
from cohort.common.policies.kv_interface import KvAllocator
from cohort.common.sequence import Phase, Sequence


def start(sequence: Sequence, kv: KvAllocator) -> bool:
    """Move a sequence from WAITING to RUNNING, with first blocks and cached prefix. False: no room, no change."""
    cached = kv.admit(sequence)
    if cached is None:
        return False
    sequence.phase = Phase.RUNNING
    sequence.computed = cached
    sequence.cached_ahead, sequence.prefix_hashes = -1, None
    sequence.cached_tokens = max(sequence.cached_tokens, cached if sequence.preemptions == 0 else 0)
    return True


def preempt(sequence: Sequence, kv: KvAllocator, plan: IterationPlan, how: Literal["swap", "recompute"]) -> None:
    """Move a sequence from RUNNING to SWAPPED if asked and the host pool has room, else to WAITING."""
    sequence.preemptions += 1
    if how == "swap" and kv.swap_out(sequence):
        plan.preempted.append(Preempt(sequence, "swap"))
        sequence.phase = Phase.SWAPPED
        return
    kv.release(sequence.key)
    sequence.phase = Phase.WAITING
    sequence.computed = 0
    plan.preempted.append(Preempt(sequence, "recompute"))


def resume(sequence: Sequence, kv: KvAllocator) -> bool:
    """Move a sequence from SWAPPED to RUNNING. False: no blocks on the device, nothing changed."""
    if not kv.swap_in(sequence):
        return False
    sequence.phase = Phase.RUNNING
    return True
