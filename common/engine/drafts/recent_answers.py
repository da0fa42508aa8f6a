"""What followed the last tokens in recent responses of the same kind: for traffic whose responses resemble each other.

Called by `drafting`; one memory of a worker, one drafter per sequence. Responses are kept apart by a key that the
engine chooses (the API key's owner and the adapter): a draft that is verified is faster, so a request could learn from
its timing what another one's response contained. Memory is bounded per key, by two generations of which the older one
is forgotten as a whole, and in keys, of which the least recently used is forgotten.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence

SHORTEST = 3
"""Shorter matches say too little of a response to another prompt."""

_LOOKED_BACK = 32
"""Tokens that a match is begun from: a longer one says no more."""
_WAITING = 64
"""Responses that wait to be taken in; of more the later ones are not."""
ROOT = 0
BOUNDARY = -1
"""A mark between two texts: no match reaches over it."""

_REFRESHED = 8
"""Suffixes of a new token that learn of it as their most recent place; older ones keep the place they had."""


class SuffixAutomaton:
    """Every substring of some texts, with a place where it stood, built and searched token by token; texts are only
    added.

    A state stands for the substrings with the same set of ends; its link leads to the state of the longest suffix that
    has more ends. Algorithm: Blumer et al. 1985, several texts in one automaton. Costs O(1) amortised for a token, and
    about 600 bytes.
    """

    __slots__ = ("_ends", "_last", "_lengths", "_links", "_next", "_text")

    def __init__(self) -> None:
        self._next: list[dict[int, int]] = [{}]
        self._links = [-1]
        self._lengths = [0]
        self._ends = [0]
        """The place in the text where a recent occurrence of each state's substrings ends."""
        self._text: list[int] = []
        self._last = ROOT
        """The state of the text that is being added."""

    def __len__(self) -> int:
        """Return the number of tokens that were added, with a boundary for each text."""
        return len(self._text)

    def add(self, text: Iterable[int]) -> None:
        self.extend(text)
        self.end()

    def extend(self, text: Iterable[int]) -> None:
        """Add a part of a text, which may already be matched as far as it goes."""
        last = self._last
        for token in text:
            self._text.append(token)
            last = self._extended(last, token, len(self._text))
            state = last
            for _ in range(_REFRESHED):
                self._ends[state] = len(self._text)
                state = self._links[state]
                if state <= ROOT:
                    break
        self._last = last

    def end(self) -> None:
        """End the text that was being added: what is added from now on does not follow it."""
        self._text.append(BOUNDARY)
        self._last = ROOT

    def advance(self, state: int, length: int, token: int) -> tuple[int, int]:
        """Return state and length of the longest suffix of (the match of `length` tokens at `state`) + `token` that
        stands in the texts, `ROOT` and 0 if none does. Texts may have been added since `state` was found."""
        state = self._settled(state, length)
        while token not in self._next[state]:
            if state == ROOT:
                return ROOT, 0
            state = self._links[state]
            length = self._lengths[state]
        return self._next[state][token], length + 1

    def following(self, state: int, length: int, limit: int, shortest: int) -> list[int]:
        """Return at most `limit` tokens that followed a recent occurrence of the match, or, where that ended its text,
        of its longest suffix that did not; none for matches of fewer than `shortest` tokens."""
        state = self._settled(state, length)
        while length >= shortest and state != ROOT:
            end = self._ends[state]
            found = self._text[end : end + limit]
            if BOUNDARY in found:
                found = found[: found.index(BOUNDARY)]
            if found:
                return found
            state = self._links[state]
            length = self._lengths[state]
        return []

    def _settled(self, state: int, length: int) -> int:
        """Return the state that the match belongs to now: states are split when texts are added."""
        while state != ROOT and length <= self._lengths[self._links[state]]:
            state = self._links[state]
        return state

    def _extended(self, last: int, token: int, end: int) -> int:
        """Return the state of the current text with `token` appended; `last`: of the text without."""
        known = self._next[last].get(token)
        if known is not None:
            if self._lengths[known] == self._lengths[last] + 1:
                return known
            return self._split(last, known, token)
        state = self._new({}, self._lengths[last] + 1, ROOT, end)
        before = last
        while before != -1 and token not in self._next[before]:
            self._next[before][token] = state
            before = self._links[before]
        if before != -1:
            known = self._next[before][token]
            exact = self._lengths[known] == self._lengths[before] + 1
            self._links[state] = known if exact else self._split(before, known, token)
        return state

    def _split(self, before: int, known: int, token: int) -> int:
        """Give the substrings of `known` that are no longer than those of `before` and `token` their own state."""
        copy = self._new(dict(self._next[known]), self._lengths[before] + 1, self._links[known], self._ends[known])
        self._links[known] = copy
        while before != -1 and self._next[before].get(token) == known:
            self._next[before][token] = copy
            before = self._links[before]
        return copy

    def _new(self, following: dict[int, int], length: int, link: int, end: int) -> int:
        self._next.append(following)
        self._lengths.append(length)
        self._links.append(link)
        self._ends.append(end)
        return len(self._next) - 1


class RecentAnswers:
    """Responses of one key."""

    __slots__ = ("_half", "generations")

    def __init__(self, capacity_tokens: int) -> None:
        self._half = capacity_tokens // 2
        self.generations: tuple[SuffixAutomaton, ...] = (SuffixAutomaton(),)
        """The newest first; at most two, of half the capacity each."""

    def retained(self, answer: Sequence[int]) -> Sequence[int]:
        """Return a response, of one longer than half the capacity its end."""
        return answer[-(self._half - 1) :]

    def begin(self, length: int) -> None:
        """Make room in the newest generation for a response of `length` tokens, which goes there next."""
        if len(self.generations[0]) + length + 1 > self._half:
            self.generations = (SuffixAutomaton(), self.generations[0])

    def add(self, answer: Sequence[int]) -> None:
        retained = self.retained(answer)
        self.begin(len(retained))
        self.generations[0].add(retained)


class AnswerMemory:
    """Recent responses of one worker: at most `keys` · `capacity_tokens` tokens, of about 600 bytes each."""

    def __init__(self, capacity_tokens: int = 8192, keys: int = 16) -> None:
        if capacity_tokens < 4 or keys < 1:
            raise ValueError(f"{capacity_tokens} tokens of {keys} keys: at least 4 and 1")
        self._capacity, self._keys = capacity_tokens, keys
        self._answers: OrderedDict[str, RecentAnswers] = OrderedDict()
        self._waiting: deque[tuple[str, Sequence[int]]] = deque()
        self._taken = 0
        """Tokens of the first that waits."""

    def of(self, key: str) -> RecentAnswers | None:
        """Return the responses of `key`, now the most recently used; None: it has none."""
        answers = self._answers.get(key)
        if answers is not None:
            self._answers.move_to_end(key)
        return answers

    def learn(self, key: str, answer: Sequence[int]) -> None:
        """Queue a response that has ended, to be taken in."""
        if answer and len(self._waiting) < _WAITING:
            self._waiting.append((key, answer))

    def take_in(self, most: int) -> None:
        """Add at most `most` tokens of the responses that wait: a long one must not hold up the caller."""
        while self._waiting and most > 0:
            key, answer = self._waiting[0]
            answers = self.of(key)
            if answers is None:
                answers, self._taken = RecentAnswers(self._capacity), 0  # perhaps forgotten half way
                self._answers[key] = answers
                if len(self._answers) > self._keys:
                    self._answers.popitem(last=False)
            retained = answers.retained(answer)
            if not self._taken:
                answers.begin(len(retained))
            part = retained[self._taken : self._taken + most]
            answers.generations[0].extend(part)
            self._taken += len(part)
            most -= len(part)
            if self._taken == len(retained):
                answers.generations[0].end()
                self._waiting.popleft()
                self._taken = 0


class AnswerLookup:
    """The lookup of one sequence among the responses of `key`."""

    __slots__ = ("_key", "_matches", "_memory", "_seen", "matched")

    def __init__(self, memory: AnswerMemory, key: str) -> None:
        self._memory, self._key = memory, key
        self._matches: dict[SuffixAutomaton, tuple[int, int]] = {}
        self._seen = 0
        self.matched = 0

    def propose(self, tokens: Sequence[int], limit: int) -> list[int]:
        """Return what followed the longest match of the end of `tokens`; of two equal ones the newer generation's."""
        answers = self._memory.of(self._key)
        generations = () if answers is None else answers.generations
        self._matches = {each: self._moved(each, tokens) for each in generations}
        self._seen = len(tokens)
        if limit <= 0:
            return []
        for each in sorted(generations, key=lambda each: -self._matches[each][1]):
            if found := each.following(*self._matches[each], limit, SHORTEST):
                self.matched = self._matches[each][1]
                return found
        return []

    def _moved(self, generation: SuffixAutomaton, tokens: Sequence[int]) -> tuple[int, int]:
        first, match = self._seen, self._matches.get(generation)
        if match is None or len(tokens) - first > _LOOKED_BACK:
            first, match = max(0, len(tokens) - _LOOKED_BACK), (ROOT, 0)
        for token in tokens[first:]:
            match = generation.advance(*match, token)
        return match
