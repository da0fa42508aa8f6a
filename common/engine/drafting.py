"""Tokens that the engine expects behind sequences: proposed for their rows, judged when their tokens are there.

Owned by the worker loop, on the event loop's thread. How many a row may carry is the machine's (`Row.drafts`); what is
proposed, the drafters' (`drafts/`). A proposal is made once for what is known of a sequence, and kept until more is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq

from cohort.common.engine.batch import StepOutput
from cohort.common.engine.drafts.interface import Drafter
from cohort.common.machines.events import Drafted
from cohort.common.policies.interface import Row
from cohort.common.sequence import Sequence
from cohort.common.types import Attempt


class _Expected:
    """Of one sequence: its drafter, and what that proposed when `known` tokens were known."""

    __slots__ = ("drafter", "known", "tokens")

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self.known = 0
        self.tokens: list[int] = []


class Drafting:
    def __init__(self, make: Callable[[], Drafter], most: int, *, looks_back: bool) -> None:
        """`most`: drafts of one row. `looks_back`: tokens are sampled one after the other, so that penalties and
        grammars see those before them; otherwise requests that have any get no drafts."""
        self._make = make
        self._most = most
        self._looks_back = looks_back
        self._expected: dict[Sequence, _Expected] = {}

    def proposals(self, rows: Seq[Row]) -> list[list[int]] | None:
        """Of each row, whose token is the last known one; None where nothing is proposed for any."""
        if not any([row.drafts for row in rows]):
            return None
        found = [self._propose(row.sequence)[: row.drafts] if row.drafts else [] for row in rows]
        return found if any(found) else None

    def expected(self, sequences: Iterable[Sequence]) -> list[Attempt]:
        """Those of which more than the token that the step in flight samples is expected."""
        return [s.key for s in sequences if len(self._propose(s)) > 1]

    def judged(self, sampling: Seq[Sequence], proposed: Seq[int] | None, output: StepOutput) -> list[Drafted]:
        """How the step's drafts did, and what was only expected. `proposed`: drafts of each of these. To be asked
        before the machine hears of the tokens."""
        judged, place = [], 0
        tokens, counts = output.tokens.tolist(), output.counts or (1,) * len(sampling)
        for index, (sequence, count) in enumerate(zip(sampling, counts, strict=True)):
            if proposed is not None and proposed[index]:
                judged.append(Drafted(sequence.key, proposed[index], count - 1))
            elif sequence.output_tokens and (only := self._propose(sequence)[:1]):
                judged.append(Drafted(sequence.key, 1, int(only[0] == tokens[place]), computed=False))
            place += count
        return judged

    def _propose(self, sequence: Sequence) -> list[int]:
        inputs = sequence.sampling_inputs
        if not self._looks_back and inputs is not None and (inputs.history is not None or inputs.grammar is not None):
            return []
        expected = self._expected.get(sequence)
        if expected is None:
            expected = self._expected[sequence] = _Expected(self._make())
        known = len(sequence.tokens)
        if expected.known != known:
            # One more than are computed: of a step in flight the first is what it samples.
            expected.known, expected.tokens = known, expected.drafter.propose(sequence.tokens, self._most + 1)
        return expected.tokens

    def forget(self, holds: Callable[[Sequence], bool]) -> None:
        """Those that the worker holds no more: an index takes some hundred bytes a token."""
        if gone := [each for each in self._expected if not holds(each)]:
            for each in gone:
                del self._expected[each]
