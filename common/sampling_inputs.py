"""Inputs of sampling a sequence's next token beside its logits, as arrays: made once per request and worker.

Made with the `Sequence`, extended by the batch builder, read by both samplers. No step builds them anew: a biased or
penalised row costs a step the length of its arrays, never a pass of the interpreter over them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from cohort.common.types import SamplingParams

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class LogitBias:
    """Addition of `values[i]`, float32, to the logit of token `ids[i]`; ids are distinct, ascending, not negative."""

    ids: Ids
    values: npt.NDArray[np.float32]

    @staticmethod
    def of(bias: Mapping[int, float]) -> LogitBias:
        ids = np.fromiter(bias.keys(), np.int64, len(bias))
        values = np.fromiter(bias.values(), np.float32, len(bias))
        order = ids.argsort()
        order = order[np.searchsorted(ids[order], 0) :]
        return LogitBias(ids[order], values[order])

    def within(self, vocabulary: int) -> tuple[Ids, npt.NDArray[np.float32]]:
        """Return views of the ids inside the vocabulary, and their values: others can never be sampled."""
        end = int(np.searchsorted(self.ids, vocabulary))
        return self.ids[:end], self.values[:end]


class TokenHistory:
    """Tokens that repetition, presence and frequency penalties look back on: each once, those of the output with their
    number. Another token costs one look-up, however long the history is."""

    def __init__(self, prompt_tokens: Sequence[int], output_tokens: Sequence[int] = ()) -> None:
        self._seen = np.unique(np.asarray(prompt_tokens, dtype=np.int64))
        self._seen_ids = set(self._seen.tolist())
        self._seen_count = len(self._seen)
        self._slots: dict[int, int] = {}
        self._output_ids: Ids = np.zeros(16, dtype=np.int64)
        self._counts: Ids = np.zeros(16, dtype=np.int64)
        self._tokens = 0
        self.extend(output_tokens)

    @property
    def output_tokens(self) -> int:
        """Number of output tokens that are counted."""
        return self._tokens

    @property
    def seen(self) -> Ids:
        """Distinct tokens of prompt and output."""
        return self._seen[: self._seen_count]

    @property
    def output_counts(self) -> tuple[Ids, Ids]:
        """Distinct tokens of the output, and the count of each."""
        count = len(self._slots)
        return self._output_ids[:count], self._counts[:count]

    def seen_with(self, ahead: Sequence[int]) -> Ids:
        """Return `seen` as it will be after the tokens `ahead`."""
        new = [token for token in dict.fromkeys(ahead) if token not in self._seen_ids]
        return np.concatenate([self.seen, np.array(new, dtype=np.int64)]) if new else self.seen

    def output_counts_with(self, ahead: Sequence[int]) -> tuple[Ids, Ids]:
        """Return `output_counts` as it will be after the tokens `ahead`."""
        if not ahead:
            return self.output_counts
        counts, new = self.output_counts[1].copy(), dict[int, int]()
        for token in ahead:
            if (slot := self._slots.get(token)) is None:
                new[token] = new.get(token, 0) + 1
            else:
                counts[slot] += 1
        if not new:
            return self.output_counts[0], counts
        ids, numbers = (np.array(list(each), dtype=np.int64) for each in (new.keys(), new.values()))
        return np.concatenate([self.output_counts[0], ids]), np.concatenate([counts, numbers])

    def extend(self, new_tokens: Sequence[int]) -> None:
        """Count the next tokens of the output."""
        for token in new_tokens:
            slot = self._slots.get(token)
            if slot is None:
                slot = self._slots[token] = len(self._slots)
                if slot == len(self._output_ids):
                    self._output_ids, self._counts = _doubled(self._output_ids), _doubled(self._counts)
                self._output_ids[slot] = token
                if token not in self._seen_ids:
                    self._seen_ids.add(token)
                    if self._seen_count == len(self._seen):
                        self._seen = _doubled(self._seen)
                    self._seen[self._seen_count] = token
                    self._seen_count += 1
            self._counts[slot] += 1
        self._tokens += len(new_tokens)


@dataclass(slots=True, eq=False)
class GrammarInputs:
    """Grammar that an answer is bound to, and its output tokens so far; `opens` and `closes` as in `SamplingParams`.
    The rest is the engine's: the grammar's state, why the engine gave it up, and whether the last step had no mask in
    time, hence gave no token. Another worker makes them again from text and tokens."""

    text: str
    output: list[int] = field(default_factory=list)
    opens: tuple[int, ...] = ()
    closes: int = -1
    answer: object | None = None
    failure: str = ""
    late: bool = False
    _searched: int = 0
    """Output tokens that were searched for `closes`; the last of them is it, if there is one."""

    def begin(self, ahead: Sequence[int] = ()) -> int:
        """Return the place among output and `ahead` where the grammar begins; -1 while the answer reasons."""
        if self.closes < 0 or not self._may_reason(ahead):
            return 0
        output, first = self.output, len(self.opens)
        if len(output) + len(ahead) < first:
            return 0
        if not self._searched or output[self._searched - 1] != self.closes:
            start = max(self._searched, first)
            found = self.closes in output[start:]
            self._searched = output.index(self.closes, start) + 1 if found else len(output)
        if self._searched > first and output[self._searched - 1] == self.closes:
            return self._searched
        return len(output) + ahead.index(self.closes) + 1 if self.closes in ahead else -1

    def may_open(self, ahead: Sequence[int] = ()) -> int:
        """Return the token with which reasoning begins, or goes on to begin; -1 if it cannot any more."""
        known = len(self.output) + len(ahead)
        return self.opens[known] if 0 <= known < len(self.opens) and self._may_reason(ahead) else -1

    def _may_reason(self, ahead: Sequence[int]) -> bool:
        begun = (*self.output[: len(self.opens)], *ahead)[: len(self.opens)]
        return begun == self.opens[: len(begun)]


@dataclass(frozen=True, slots=True, eq=False)
class SamplingInputs:
    """Inputs of one request on one worker; None where the request has none."""

    bias: LogitBias | None
    history: TokenHistory | None
    grammar: GrammarInputs | None = None

    @staticmethod
    def of(params: SamplingParams, prompt_tokens: Sequence[int]) -> SamplingInputs | None:
        """Make them, or None for a request that needs nothing but its logits."""
        penalised = (
            params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
        )
        if not penalised and not params.logit_bias and not params.grammar:
            return None
        return SamplingInputs(
            LogitBias.of(params.logit_bias) if params.logit_bias else None,
            TokenHistory(prompt_tokens) if penalised else None,
            GrammarInputs(params.grammar, opens=params.grammar_opens, closes=params.grammar_closes)
            if params.grammar
            else None,
        )


def _doubled(array: Ids) -> Ids:
    grown: Ids = np.zeros(max(16, 2 * len(array)), dtype=np.int64)
    grown[: len(array)] = array
    return grown
