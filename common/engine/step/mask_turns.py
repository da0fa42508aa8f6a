"""Masks that steps have no time for, in the order in which one thread computes them: grammars share it fairly.

    end         a mask goes next if it would end first: its grammar's start, and the time that it is expected to take
    start       where the grammar's last mask ended; the virtual time, if none of its masks waited
    virtual     grows by the time of each mask, divided by the grammars that wait

Fair queueing by ends (Demers, Keshav and Shenker, SIGCOMM 1989). A cheap mask waits for the costly one that is computed
already, and at most for another one, however many wait; a costly one waits no longer than its grammar's share of the
thread is small. Masks of one grammar, those of a request's choices say, go in the order of their arrival.

Owned by `GrammarMasks`: its engine thread adds, its helper's thread computes.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from threading import Lock

from cohort.common.engine.step.batch import Int32Array

Mask = tuple[Int32Array, float]
"""Bits, and the processor time that an answer's account is charged for them."""


@dataclass(slots=True, eq=False)
class _Turn:
    expected_s: float
    compute: Callable[[], Mask]
    mask: Future[Mask] = field(default_factory=Future)


@dataclass(slots=True, eq=False)
class _Grammar:
    start_s: float
    waiting: deque[_Turn] = field(default_factory=deque)

    @property
    def end_s(self) -> float:
        return self.start_s + self.waiting[0].expected_s


class MaskTurns:
    def __init__(self, clock: Callable[[], float] = time.thread_time) -> None:
        """`clock`: processor seconds of the calling thread."""
        self._clock = clock
        self._lock = Lock()
        self._grammars: dict[str, _Grammar] = {}
        """Grammars whose masks wait, the one that is computed, and those that have had more than their share."""
        self._virtual_s = 0.0

    def add(self, grammar: str, expected_s: float, compute: Callable[[], Mask]) -> Future[Mask]:
        """Add a mask, which `compute` finds or raises why there is none."""
        turn = _Turn(expected_s, compute)
        with self._lock:
            known = self._grammars.get(grammar)
            if known is None:
                known = self._grammars[grammar] = _Grammar(self._virtual_s)
            elif not known.waiting:
                known.start_s = max(known.start_s, self._virtual_s)
            known.waiting.append(turn)
        return turn.mask

    def compute_next(self) -> None:
        """Compute the mask whose turn it is: once for each that was added."""
        with self._lock:
            waiting = [each for each in self._grammars.values() if each.waiting]
            assert waiting, "no mask waits"
            grammar = min(waiting, key=lambda each: each.end_s)
            turn = grammar.waiting.popleft()
            grammar.start_s += turn.expected_s
        began_s, mask, failure = self._clock(), None, None
        try:
            mask = turn.compute()
        except Exception as error:
            failure = error
        with self._lock:
            spent_s = self._clock() - began_s
            grammar.start_s += spent_s - turn.expected_s
            self._virtual_s += spent_s / len(waiting)
            self._grammars = {
                text: each for text, each in self._grammars.items() if each.waiting or each.start_s > self._virtual_s
            }
        if mask is None:
            turn.mask.set_exception(failure)
        else:
            turn.mask.set_result(mask)
