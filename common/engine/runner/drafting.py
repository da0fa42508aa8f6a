"""Tokens that the engine expects behind sequences: proposed for their rows, judged when their tokens are there.

Owned by the worker loop, on the event loop's thread. How many a row may carry is the machine's (`Row.drafts`); what is
proposed, the drafters' (`drafts/`). A proposal is made once for what is known of a sequence, and kept until more is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Protocol

from cohort.common.engine.drafts.batch_drafts import BatchDrafter, DraftRow
from cohort.common.engine.drafts.recent_answers import AnswerLookup, AnswerMemory
from cohort.common.engine.drafts.token_chain import TokenChain
from cohort.common.engine.step.batch import SamplingRow, StepOutput
from cohort.common.machines.events import Drafted
from cohort.common.policies.kv_interface import KvAllocator
from cohort.common.sequence import Row, Sequence
from cohort.common.types import Attempt, DraftSource

_LEARNED_AT_ONCE = 256
"""Tokens of responses that are taken in behind one step: half a millisecond."""
_FIRST_TRUST, _NEW_TRUST, _TRUSTED = 0.5, 0.15, 0.5
"""Of what texts say of a request's tokens: to begin with, the weight of the latest token, and from where on no model is
asked instead."""


class Drafter(Protocol):
    """What proposes tokens of one sequence, which only grow from call to call. Every proposal is verified: a wrong one
    costs a computed position and never changes a response. `matched`: how many of the last tokens the latest proposal
    is made for; of several drafters the one that knows more of them is believed."""

    matched: int

    def propose(self, tokens: Seq[int], limit: int) -> list[int]:
        """At most `limit` tokens that are likely to follow `tokens` (prompt and response so far); perhaps none.

        `tokens` begins with the tokens of every earlier call. Costs O(new tokens + limit), not O(tokens).
        """
        ...


@dataclass(slots=True, eq=False)
class _Expected:
    """Of one sequence: its drafters, and what they proposed when `known` tokens were known."""

    drafters: list[tuple[DraftSource, Drafter]]
    chain: TokenChain
    """As a draft model wants it; as long as it was then."""
    known: int = 0
    tokens: list[int] = field(default_factory=list)
    source: DraftSource = "lookup"
    looked_up: list[int] = field(default_factory=list)
    """What texts say comes next: one token, or nothing."""
    trust: float = _FIRST_TRUST
    """How often that was right lately."""

    def propose(self, tokens: list[int], most: int) -> None:
        """By the drafter that knows the end of `tokens` from the longest match; of equal ones the first."""
        self.known, self.tokens, longest = len(tokens), [], 0
        for source, drafter in self.drafters:
            found = drafter.propose(tokens, most)
            if found and drafter.matched > longest:
                self.source, self.tokens, longest = source, found, drafter.matched
        self.looked_up = self.tokens[:1]

    def came(self, token: int) -> None:
        if self.looked_up:
            self.trust += _NEW_TRUST * ((self.looked_up[0] == token) - self.trust)


@dataclass(slots=True, eq=False)
class Drafting:
    _make: Callable[[], Drafter]
    """A drafter that looks at one sequence alone."""
    _most: int
    """Drafts of one row."""
    _answers: AnswerMemory | None = None
    """Where those that ended are remembered, if they are."""
    model: BatchDrafter | None = None
    """Asked where these say nothing, or too often something wrong."""
    _expected: dict[Sequence, _Expected] = field(default_factory=dict)

    @property
    def learns(self) -> bool:
        """Responses that ended are to be told."""
        return self._answers is not None

    def proposals(self, rows: Seq[Row]) -> list[list[int]] | None:
        """Of each row, whose token is the last known one; None where nothing is proposed for any."""
        if not any([row.drafts for row in rows]):
            return None
        found = [self._propose(row.sequence)[: row.drafts] if row.drafts else [] for row in rows]
        return found if any(found) else None

    def wanted(self, rows: Seq[Row], kv: KvAllocator, number: Callable[[Sequence], int]) -> list[DraftRow]:
        """What the model is asked: of rows that may carry drafts and of which texts say nothing, or nothing right."""
        if self.model is None:
            return []
        return [
            self._asked(row, kv, number(row.sequence))
            for row in rows
            if row.drafts and self._asks(row.sequence, row.drafts)
        ]

    def drafted(self, rows: Seq[Row], asked: Seq[DraftRow], answers: Seq[list[int]]) -> None:
        """What the model said, which `proposals` has then."""
        said = {id(each.chain): tokens for each, tokens in zip(asked, answers, strict=True)}
        for row in rows:
            expected = self._expected.get(row.sequence)
            if self.model is not None and expected is not None and (tokens := said.get(id(expected.chain))):
                expected.tokens, expected.source = tokens, self.model.source

    def _asks(self, sequence: Sequence, drafts: int) -> bool:
        if self.model is None or (self._propose(sequence) and self._trusts(sequence)):
            return False
        chain = self._expected[sequence].chain
        chain.grow(sequence.tokens)
        return self.model.takes(chain, drafts)

    def _trusts(self, sequence: Sequence) -> bool:
        """Texts say more of it than a model would."""
        return self.model is None or self._expected[sequence].trust >= _TRUSTED

    def _asked(self, row: Row, kv: KvAllocator, number: int) -> DraftRow:
        """Drafts are drawn under the same penalties, with the numbers of the positions that they are for, so that they
        are right wherever both models let the same token win. Grammars are the verifying model's alone."""
        sequence, key = row.sequence, row.sequence.key
        params, inputs, first = sequence.request.sampling, sequence.sampling_inputs, len(sequence.tokens)
        bias, history = (None, None) if inputs is None else (inputs.bias, inputs.history)
        if history is not None:
            history.catch_up(sequence.tokens[sequence.request.prompt_tokens + history.output_tokens :])
        banned_before = sequence.request.prompt_tokens + params.min_tokens
        sampling = tuple(
            [
                SamplingRow(
                    params.seed,
                    position,
                    params.temperature,
                    params.top_p,
                    params.top_k,
                    params.min_p,
                    params.repetition_penalty,
                    params.presence_penalty,
                    params.frequency_penalty,
                    history,
                    bias,
                    banned=params.stop_token_ids if position < banned_before else (),
                )
                for position in range(first, first + row.drafts)
            ]
        )
        directions = kv.directions(key)
        chain = self._expected[sequence].chain
        return DraftRow(chain, list(kv.blocks(key)), None if directions is None else list(directions), sampling, number)

    def expected(self, sequences: Iterable[Sequence]) -> list[Attempt]:
        """Those of which more than the token that the step in flight samples is expected."""
        return [s.key for s in sequences if len(self._propose(s)) > 1 or self._asks(s, self._most)]

    def judged(self, sampling: Seq[Sequence], proposed: Seq[int] | None, output: StepOutput) -> list[Drafted]:
        """How the step's drafts did, and what was only expected. `proposed`: drafts of each of these. To be asked
        before the machine hears of the tokens."""
        if proposed is None and not any([self._propose(each) for each in sampling]):
            return []
        judged, place = [], 0
        tokens, counts = output.tokens.tolist(), output.counts or (1,) * len(sampling)
        for index, (sequence, count) in enumerate(zip(sampling, counts, strict=True)):
            if proposed is not None and proposed[index]:
                source = self._expected[sequence].source
                judged.append(Drafted(sequence.key, proposed[index], count - 1, source=source))
            elif sequence.output_tokens and (only := self._propose(sequence)[:1]) and self._trusts(sequence):
                source = self._expected[sequence].source
                right = int(only[0] == tokens[place])
                judged.append(Drafted(sequence.key, 1, right, computed=False, source=source))
            if (expected := self._expected.get(sequence)) is not None and expected.known == len(sequence.tokens):
                expected.came(tokens[place])
            place += count
        return judged

    def _propose(self, sequence: Sequence) -> list[int]:
        expected = self._expected.get(sequence)
        if expected is None:
            drafters: list[tuple[DraftSource, Drafter]] = [("lookup", self._make())]
            if self._answers is not None:
                drafters.append(("recent", AnswerLookup(self._answers, answers_key(sequence))))
            expected = self._expected[sequence] = _Expected(drafters, TokenChain(sequence.request.cache_salt))
        if expected.known != len(sequence.tokens):
            # One more than are computed: of a step in flight the first is what it samples.
            expected.propose(sequence.tokens, self._most + 1)
        return expected.tokens

    def ended(self, sequences: Iterable[Sequence]) -> None:
        """Their responses are whole: they are remembered for others."""
        if self._answers is not None:
            for each in sequences:
                self._answers.learn(answers_key(each), each.tokens[each.request.prompt_tokens :])

    def learn(self) -> None:
        """Some of what has ended is taken in. Between two steps, or beside one."""
        if self._answers is not None:
            self._answers.take_in(_LEARNED_AT_ONCE)

    def forget(self, holds: Callable[[Sequence], bool]) -> None:
        """Those that the worker holds no more: an index takes some hundred bytes a token."""
        if gone := [each for each in self._expected if not holds(each)]:
            for each in gone:
                del self._expected[each]


def answers_key(sequence: Sequence) -> str:
    """Whose responses a sequence may be drafted from, and which model's: nobody may notice by a response's speed what
    another API key's responses say. Unlike cached prefixes they are never shared between keys."""
    return f"{sequence.request.owner}\0{sequence.request.adapter}"
