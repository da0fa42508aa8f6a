"""Tokens that the engine expects behind sequences: proposed for their rows, judged when their tokens are there.

Owned by the worker loop, on the event loop's thread. The machine decides how many drafts a row may carry
(`Row.drafts`), lookup or a draft model which (`drafts/`). A proposal is made once for what is known of a sequence, and
stored until more is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from cohort.common.engine.drafts.batch_drafts import BatchDrafter, DraftRow
from cohort.common.engine.drafts.prompt_lookup import PromptLookup
from cohort.common.engine.drafts.token_chain import TokenChain
from cohort.common.engine.step.batch import SamplingRow, StepOutput
from cohort.common.machines.events import Drafted
from cohort.common.policies.kv_interface import KvAllocator
from cohort.common.sequence import Row, Sequence
from cohort.common.types import Attempt, DraftSource

_INITIAL_CONFIDENCE, _CONFIDENCE_STEP, _CONFIDENT = 0.5, 0.15, 0.5
"""Confidence in lookups: initial value, weight of the latest token, and threshold that keeps the model uncalled."""


@dataclass(slots=True, eq=False)
class _Expectation:
    """Lookup of one sequence, and the proposal when `known` tokens were known."""

    lookup: PromptLookup
    chain: TokenChain
    """Chain for a draft model, as long as at its last call."""
    known: int = 0
    tokens: list[int] = field(default_factory=list)
    source: DraftSource = "lookup"
    lookup_token: list[int] = field(default_factory=list)
    """Next token by lookup, or nothing."""
    confidence: float = _INITIAL_CONFIDENCE
    """Moving average of how often that was right."""

    def propose(self, tokens: list[int], most: int) -> None:
        self.known, self.source, self.tokens = len(tokens), "lookup", self.lookup.propose(tokens, most)
        self.lookup_token = self.tokens[:1]

    def observe(self, token: int) -> None:
        if self.lookup_token:
            self.confidence += _CONFIDENCE_STEP * ((self.lookup_token[0] == token) - self.confidence)


@dataclass(slots=True, eq=False)
class Drafting:
    _most: int
    model: BatchDrafter | None = None
    """Draft model, called if lookups find nothing or are wrong too often."""
    _expected: dict[Sequence, _Expectation] = field(default_factory=dict)

    def drafts_of(self, rows: Seq[Row]) -> list[list[int]] | None:
        """Return the draft tokens for each row, whose token is the last known one; None if there are none at all."""
        if not any([row.drafts for row in rows]):
            return None
        found = [self._propose(row.sequence)[: row.drafts] if row.drafts else [] for row in rows]
        return found if any(found) else None

    def requests_for(self, rows: Seq[Row], kv: KvAllocator, number: Callable[[Sequence], int]) -> list[DraftRow]:
        """Return requests to the model for rows that may carry drafts and have no lookup, or no reliable one."""
        if self.model is None:
            return []
        return [
            self._draft_request(row, kv, number(row.sequence))
            for row in rows
            if row.drafts and self._uses_model(row.sequence, row.drafts)
        ]

    def store_drafts(self, rows: Seq[Row], requests: Seq[DraftRow], answers: Seq[list[int]]) -> None:
        """Store the model's drafts, which `drafts_of` then returns."""
        found = {id(each.chain): tokens for each, tokens in zip(requests, answers, strict=True)}
        for row in rows:
            expected = self._expected.get(row.sequence)
            if self.model is not None and expected is not None and (tokens := found.get(id(expected.chain))):
                expected.tokens, expected.source = tokens, self.model.source

    def _uses_model(self, sequence: Sequence, drafts: int) -> bool:
        if self.model is None or (self._propose(sequence) and self._is_confident(sequence)):
            return False
        chain = self._expected[sequence].chain
        chain.grow(sequence.tokens)
        return self.model.takes(chain, drafts)

    def _is_confident(self, sequence: Sequence) -> bool:
        """Return whether lookups are more reliable for it than a model would be."""
        return self.model is None or self._expected[sequence].confidence >= _CONFIDENT

    def _draft_request(self, row: Row, kv: KvAllocator, number: int) -> DraftRow:
        """Return the request for one row. Drafts are drawn under the same penalties and with their positions' numbers,
        so that they are right whenever both models let the same token win. Only the verifying model has grammars."""
        sequence, key = row.sequence, row.sequence.key
        params, inputs, first = sequence.request.sampling, sequence.sampling_inputs, len(sequence.tokens)
        bias, history = (None, None) if inputs is None else (inputs.bias, inputs.history)
        if history is not None:
            history.extend(sequence.tokens[sequence.request.prompt_tokens + history.output_tokens :])
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

    def worth_drafting(self, sequences: Iterable[Sequence]) -> list[Attempt]:
        """Return the sequences of which more is expected than the token that the step in flight samples."""
        return [s.key for s in sequences if len(self._propose(s)) > 1 or self._uses_model(s, self._most)]

    def acceptance(self, sampling: Seq[Sequence], proposed: Seq[int] | None, output: StepOutput) -> list[Drafted]:
        """Return how drafts and expectations did, before the machine takes the tokens. `proposed`: drafts of each."""
        if proposed is None and not any([self._propose(each) for each in sampling]):
            return []
        judged, place = [], 0
        tokens, counts = output.tokens.tolist(), output.counts or (1,) * len(sampling)
        for index, (sequence, count) in enumerate(zip(sampling, counts, strict=True)):
            if count == 0 or index in output.late:  # a row that sat the step out
                place += count
                continue
            if proposed is not None and proposed[index]:
                source = self._expected[sequence].source
                judged.append(Drafted(sequence.key, proposed[index], count - 1, source=source))
            elif sequence.output_tokens and (only := self._propose(sequence)[:1]) and self._is_confident(sequence):
                source = self._expected[sequence].source
                right = int(only[0] == tokens[place])
                judged.append(Drafted(sequence.key, 1, right, computed=False, source=source))
            if (expected := self._expected.get(sequence)) is not None and expected.known == len(sequence.tokens):
                expected.observe(tokens[place])
            place += count
        return judged

    def _propose(self, sequence: Sequence) -> list[int]:
        expected = self._expected.get(sequence)
        if expected is None:
            expected = self._expected[sequence] = _Expectation(PromptLookup(), TokenChain(sequence.request.cache_salt))
        if expected.known != len(sequence.tokens):
            # One more than are computed: of a step in flight the first is what it samples.
            expected.propose(sequence.tokens, self._most + 1)
        return expected.tokens

    def forget(self, holds: Callable[[Sequence], bool]) -> None:
        """Forget sequences that the worker no longer holds: an index takes some hundred bytes a token."""
        if ended := [each for each in self._expected if not holds(each)]:
            for each in ended:
                del self._expected[each]
