"""The engine's masks of grammars in virtual time: the accounts are real, processor time is what a grammar's text names.

Used by `neighbours.py`. The text of a grammar is the seconds that its masks take, in turn: "0.001 0.08". Threads go on
while a step runs and no longer, so that what is late does not depend on the machine that runs this.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Tokens
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np

from cohort.common.engine.step.batch import SamplingRow
from cohort.common.engine.step.grammar_masks import GrammarMasks, TokenMasks
from cohort.common.grammar import ACCOUNT_S, GrammarTokens
from cohort.common.policies.interface import IterationPlan
from cohort.common.sampling_inputs import GrammarInputs
from cohort.common.sequence import Sequence

VOCABULARY = 32


class Processor:
    """Processor time of whichever thread computes."""

    spent_s = 0.0


class CountedMatcher:
    def __init__(self, processor: Processor, costs_s: Tokens[float]) -> None:
        self._processor = processor
        self._costs_s = costs_s
        self.taken = 0
        self.broken = False

    def copy(self) -> CountedMatcher:
        return CountedMatcher(self._processor, self._costs_s)

    def take(self, tokens: Tokens[int]) -> None:
        self.taken += len(tokens)

    def mask(self, into: Any) -> None:
        self._processor.spent_s += self._costs_s[self.taken % len(self._costs_s)]
        into[:] = -1

    @contextmanager
    def ahead(self, tokens: Tokens[int]) -> Iterator[None]:
        assert not tokens, "no drafts here"
        yield


class CountedTokens:
    words = VOCABULARY // 32
    ends: tuple[int, ...] = ()
    account_s = ACCOUNT_S
    check_account = GrammarTokens.check_account

    def __init__(self, processor: Processor) -> None:
        self._processor = processor

    def compile(self, text: str) -> CountedMatcher:
        return CountedMatcher(self._processor, [float(cost_s) for cost_s in text.split()])


class VirtualThread:
    """A thread that computes one job after the other in the time that it is given."""

    def __init__(self, processor: Processor) -> None:
        self._processor = processor
        self._jobs: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._left_s = 0.0

    def submit(self, work: Callable[..., Any], *arguments: Any) -> Future[Any]:
        self._jobs.append((Future(), partial(work, *arguments)))
        return self._jobs[-1][0]

    def go_on(self, seconds: float) -> None:
        self._left_s += seconds
        while self._jobs and self._left_s > 0.0:
            job, work = self._jobs.popleft()
            before_s = self._processor.spent_s
            try:
                job.set_result(work())
            except Exception as error:  # as an executor does
                job.set_exception(error)
            self._left_s -= self._processor.spent_s - before_s
        self._left_s = min(self._left_s, 0.0)  # idle time is not for later


class VirtualMasks(GrammarMasks):
    """`spent_s`: of each step with grammars, the processor time of its masks, for which all its rows wait."""

    def __init__(self) -> None:
        self._processor = processor = Processor()
        super().__init__(CountedTokens(processor), VOCABULARY, clock=lambda: processor.spent_s)  # type: ignore[arg-type]
        self._compiler, self._helper = VirtualThread(processor), VirtualThread(processor)  # type: ignore[assignment]
        self._of_request: dict[str, GrammarInputs] = {}
        self._waited_s = 0.0
        self.spent_s: list[float] = []

    def step(self, plan: IterationPlan, forward_s: float) -> tuple[TokenMasks, float]:
        """Return the masks of those of a step's rows that yield a token, and how much longer the step takes by them."""
        rows = [
            SamplingRow(0, row.start, grammar=self._inputs(row.sequence))
            for row in plan.rows
            if row.start + row.count == row.sequence.known
        ]
        self.prepare([inputs for row in plan.rows if (inputs := self._inputs(row.sequence)) is not None], rows)
        self._go_on(forward_s)
        before_s, self._waited_s = self._processor.spent_s, 0.0
        found = self.of(rows)
        self.spent_s.append(self._processor.spent_s - before_s)
        for index, row in enumerate(rows):
            if row.grammar is not None and found is not None and index not in found.late | found.failures.keys():
                row.grammar.output.append(0)
        return found or TokenMasks(np.zeros((0, 0), np.int32)), self.spent_s[-1] + self._waited_s

    def _inputs(self, sequence: Sequence) -> GrammarInputs | None:
        text = sequence.request.sampling.grammar
        return self._of_request.setdefault(sequence.request_id, GrammarInputs(text)) if text else None

    def _go_on(self, seconds: float) -> None:
        """Let the threads go on beside the one of the steps, whose clock shows none of their time."""
        before_s = self._processor.spent_s
        for thread in (self._compiler, self._helper):
            thread.go_on(seconds)  # type: ignore[attr-defined]
        self._processor.spent_s = before_s

    def _times(self) -> tuple[float, float]:
        return self._clock(), self._clock()

    def _wait(self, late: Tokens[GrammarInputs | None]) -> None:
        self._waited_s += max(0.0, self._left_s)
        self._go_on(max(0.0, self._left_s))
        self._left_s = 0.0
