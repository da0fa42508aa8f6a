"""Scored prompts take turns: one at a time is a worker's scheduler's to plan, and of that one a slice an iteration.

Every position of a scored prompt goes through the head of the model, its softmax and a selection of the likeliest
tokens: several times the work of a position that is only computed, which schedulers, planning by tokens, do not see.
`Sequence.uncomputed` shows them a slice (`Sequence.scored_slice`); this file keeps the number of such sequences at one,
so that a hundred scored prompts take no more of an iteration than one. Called by `WorkerMachine`; pure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from cohort.common.sequence import Phase, Sequence

_HERE = (Phase.WAITING, Phase.RUNNING, Phase.SWAPPED)


class ScoringTurns:
    def __init__(self, is_held: Callable[[Sequence], bool]) -> None:
        self._is_held = is_held
        self._current: Sequence | None = None
        self._waiting: deque[Sequence] = deque()

    def must_wait(self, sequence: Sequence) -> bool:
        """Whether a sequence that came in is kept from the scheduler until `next` names it."""
        if not sequence.scores_prompt:
            return False
        if self._current is None and not self._waiting:
            self._current = sequence
            return False
        self._waiting.append(sequence)
        return True

    @property
    def pending(self) -> bool:
        """`next` may have something to say."""
        return bool(self._waiting)

    def next(self) -> Sequence | None:
        """Before every decision: the sequence whose turn has come, to be added to the scheduler. First come, first
        served."""
        current = self._current
        if current is not None:
            if self._is_held(current) and current.scores_prompt and current.phase in _HERE:
                return None
            self._current = None
        while self._waiting:
            sequence = self._waiting.popleft()
            if self._is_held(sequence):
                self._current = sequence
                return sequence
        return None
