"""The peak of what one worker's cache will have to hold, if every response ends where it is predicted.

Called by the worker's scheduler before it admits a prompt: one that is preempted later is computed twice, with a gap
between two of its tokens that no bound on iterations prevents. Pure arithmetic.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from cohort.common.policies.baselines.arrival_queues import leaves_next_blocks
from cohort.common.policies.kv_interface import KvAllocator
from cohort.common.sequence import Sequence


def peak_growth(holders: Iterable[tuple[int, int]]) -> int:
    """Return the most positions that will be needed on top of what is held now. `holders`: (positions held, positions
    to come) of each request; all sample one token a pass, and a request without a token to come frees what it holds.
    D5 · DynaServe §3.1 ("respect the HBM limit"), for which the paper has no rule."""
    by_end = sorted(holders, key=lambda holder: holder[1])
    peak = freed = 0
    remaining = len(by_end)
    for held, coming in by_end:
        # Just before this one ends, every remaining request has grown by `coming`.
        peak = max(peak, remaining * coming - freed)
        remaining -= 1
        freed += held
    return peak


def holding(sequence: Sequence) -> tuple[int, int]:
    """Return the positions that it holds once its known tokens are computed, and those still to come here."""
    request = sequence.request
    end = request.prompt_tokens + min(round(sequence.predicted), request.sampling.max_tokens) - 1
    if sequence.end is not None:
        end = min(end, sequence.end)
    return sequence.target, max(0, end - sequence.target)


def fits(kv: KvAllocator, running: Collection[Sequence], newcomer: Sequence, *, freed_blocks: int = 0) -> bool:
    """Return whether there are blocks for it and for the predicted peak of all sequences. `freed_blocks`: blocks of
    sequences that give theirs up for it."""
    if not running or not leaves_next_blocks(kv, len(running), newcomer, freed_blocks=freed_blocks):
        return not running
    geometry = kv.geometry
    holders = [holding(s) for s in (*running, newcomer)]
    if geometry.frees_behind_window:
        holders = [(geometry.most_held(held), geometry.growth(held, 0, coming)) for held, coming in holders]
    # In positions; the rest of every last block is included.
    stored = sum(
        geometry.blocks_held(s.computed) if s.uncomputed == 1 else geometry.blocks_for(s.target) for s in running
    )
    held = sum(held for held, _ in holders)
    free = geometry.positions(kv.free_blocks + kv.cached_blocks + freed_blocks + stored) - held
    return sum(coming for _, coming in holders) <= free or peak_growth(holders) <= free
