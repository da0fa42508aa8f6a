"""The most that the cache of one worker will have to hold, if every request's response ends where it is predicted.

Asked by the worker's scheduler before it lets a prompt in: a prompt that is admitted and preempted again is computed
twice, and between two of its tokens lies a gap that no bound on iterations prevents. Pure arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterable


def peak_growth(holders: Iterable[tuple[int, int]]) -> int:
    """The most positions that will be needed on top of what is held now. `holders`: (positions held, positions still to
    come) of each request; all sample one token a pass, and a request without a token to come frees what it holds.

    D5 · DynaServe §3.1 ("respect the HBM limit"). Differs from the paper: it names no rule for that and leaves memory
    to vLLM, which lets in what fits now.
    """
    by_end = sorted(holders, key=lambda holder: holder[1])
    peak = freed = 0
    left = len(by_end)
    for held, coming in by_end:
        # Just before this one ends every remaining request has grown by as much.
        peak = max(peak, left * coming - freed)
        left -= 1
        freed += held
    return peak
