"""What followed the last tokens in recent responses of the same kind: for traffic whose responses resemble each other.

Called by the engine through `Drafter`; one memory of a worker, one drafter per sequence. Responses are kept apart by a
key that the engine chooses (an adapter, a user of the API): a draft that is verified is faster, so a request could
learn from its timing what another one's response contained. Memory is bounded per key, by two generations of which the
older one is forgotten as a whole, and in keys, of which the least recently used is forgotten.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from cohort.common.engine.drafts.interface import Drafter
from cohort.common.engine.drafts.prompt_lookup import PromptLookup
from cohort.common.engine.drafts.suffix_automaton import ROOT, SuffixAutomaton

SHORTEST = 3
"""Shorter matches say too little of a response to another prompt."""

_LOOKED_BACK = 32
"""Tokens that a match is begun from: a longer one says no more."""


class RecentAnswers:
    """Responses of one key."""

    __slots__ = ("_capacity", "generations")

    def __init__(self, capacity_tokens: int) -> None:
        self._capacity = capacity_tokens
        self.generations: tuple[SuffixAutomaton, ...] = (SuffixAutomaton(),)
        """The newest first; at most two, of half the capacity each."""

    def add(self, answer: Sequence[int]) -> None:
        """A response; of one that is longer than half the capacity its end."""
        half = self._capacity // 2
        kept = answer[-(half - 1) :]
        if len(self.generations[0]) + len(kept) + 1 > half:
            self.generations = (SuffixAutomaton(), self.generations[0])
        self.generations[0].add(kept)


class AnswerLookup:
    """Of one sequence."""

    __slots__ = ("_answers", "_matches", "_seen")

    def __init__(self, answers: RecentAnswers) -> None:
        self._answers = answers
        self._matches: dict[SuffixAutomaton, tuple[int, int]] = {}
        self._seen = 0

    def propose(self, tokens: Sequence[int], limit: int) -> list[int]:
        """What followed the longest match of the end of `tokens`; of two equal ones the newer generation's."""
        generations = self._answers.generations
        self._matches = {each: self._moved(each, tokens) for each in generations}
        self._seen = len(tokens)
        if limit <= 0:
            return []
        for each in sorted(generations, key=lambda each: -self._matches[each][1]):
            if found := each.following(*self._matches[each], limit, SHORTEST):
                return found
        return []

    def observe(self, tokens: Sequence[int], prompt_tokens: int) -> None:
        """The response is kept for other sequences of the same key."""
        if len(tokens) > prompt_tokens:
            self._answers.add(tokens[prompt_tokens:])

    def _moved(self, generation: SuffixAutomaton, tokens: Sequence[int]) -> tuple[int, int]:
        first, match = self._seen, self._matches.get(generation)
        if match is None or len(tokens) - first > _LOOKED_BACK:
            first, match = max(0, len(tokens) - _LOOKED_BACK), (ROOT, 0)
        for token in tokens[first:]:
            match = generation.advance(*match, token)
        return match


class FirstOf:
    """Several drafters of one sequence: the first that proposes anything."""

    __slots__ = ("_drafters",)

    def __init__(self, *drafters: Drafter) -> None:
        self._drafters = drafters

    def propose(self, tokens: Sequence[int], limit: int) -> list[int]:
        """See `Drafter`."""
        for drafter in self._drafters:
            if found := drafter.propose(tokens, limit):
                return found
        return []

    def observe(self, tokens: Sequence[int], prompt_tokens: int) -> None:
        """See `Drafter`."""
        for drafter in self._drafters:
            drafter.observe(tokens, prompt_tokens)


class AnswerMemory:
    """Of one worker: at most `keys` · `capacity_tokens` tokens, of about 600 bytes each."""

    def __init__(self, capacity_tokens: int = 8192, keys: int = 16) -> None:
        if capacity_tokens < 4 or keys < 1:
            raise ValueError(f"{capacity_tokens} tokens of {keys} keys: at least 4 and 1")
        self._capacity, self._keys = capacity_tokens, keys
        self._answers: OrderedDict[str, RecentAnswers] = OrderedDict()

    def drafter(self, key: str) -> Drafter:
        """For one sequence: prompt lookup first, then the responses of `key`."""
        answers = self._answers.get(key)
        if answers is None:
            answers = self._answers[key] = RecentAnswers(self._capacity)
            if len(self._answers) > self._keys:
                self._answers.popitem(last=False)
        self._answers.move_to_end(key)
        return FirstOf(PromptLookup(), AnswerLookup(answers))
