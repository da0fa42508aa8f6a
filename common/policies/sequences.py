"""State changes of a sequence that a scheduler may make while it decides: start, preempt, resume.

Each keeps the sequence and the allocator in step, so that a scheduler cannot forget half of a change.
"""

from __future__ import annotations

from typing import Literal

from cohort.common.policies.interface import IterationPlan, Preempt
from cohort.common.policies.kv_interface import KvAllocator
from cohort.common.sequence import Phase, Sequence


def start(sequence: Sequence, kv: KvAllocator) -> bool:
    """Move a sequence from WAITING to RUNNING, with its first blocks and the cached prefix. False: no room, nothing
    changed."""
    cached = kv.admit(sequence)
    if cached is None:
        return False
    sequence.phase = Phase.RUNNING
    sequence.computed = cached
    sequence.cached_tokens = max(sequence.cached_tokens, cached if sequence.preemptions == 0 else 0)
    return True


def preempt(sequence: Sequence, kv: KvAllocator, plan: IterationPlan, how: Literal["swap", "recompute"]) -> None:
    """Move a sequence from RUNNING to SWAPPED if asked and the host pool has room, else to WAITING with nothing
    computed."""
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
