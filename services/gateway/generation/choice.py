"""One choice of an answer: its tokens become text, with nothing of a stop string and no cut character.

Joins detokeniser and stop strings; scores stay with their text. Called by `answering.py`, one per stream.

No part of a stop string is sent, and nothing is held back longer than needed. An Aho–Corasick automaton over a
request's stop strings is built once (by `generator.py`) and shared by its choices. Its depth after a character is the
length of the longest suffix that could still become a stop string: exactly what `StopStrings` holds back. Constant work
per character, amortised.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cohort.common.messages import TokenLogprob
from cohort.common.types import FinishReason
from cohort.services.gateway.generation.answer_parts import CallDelta, Part, Reasoning
from cohort.services.gateway.text.tokenizer import Detokenizer


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """Token with its log-probabilities (none for an echo's first); its text starts at character `offset`."""

    token_id: int
    score: TokenLogprob | None
    offset: int


@dataclass(frozen=True, slots=True)
class Piece:
    """Addition to the client's text, which a stop string ends if `stopped`. `parts`: the same with reasoning and tool
    calls in their order, () = text alone. `called`: the choice has tool calls."""

    text: str
    scores: Sequence[ScoredToken]
    stopped: bool
    parts: Sequence[Part] = ()
    called: bool = False

    @property
    def in_order(self) -> Sequence[Part]:
        return self.parts or ((self.text,) if self.text else ())

    @property
    def calls(self) -> list[CallDelta]:
        return [part for part in self.parts if isinstance(part, CallDelta)]

    @property
    def reasoning(self) -> str:
        return "".join([part.text for part in self.parts if isinstance(part, Reasoning)])


def prompt_scores(
    detokenizer: Detokenizer, tokens: Sequence[int], scores: Sequence[TokenLogprob]
) -> Iterator[ScoredToken]:
    """Yield an echoed prompt's tokens; `scores` are those of all but the first, which nothing precedes."""
    offset = 0
    for token_id, score in zip(tokens, (None, *scores), strict=True):
        yield ScoredToken(token_id, score, offset)
        offset += len(detokenizer.feed(token_id))


class Choice:
    __slots__ = ("_detokenizer", "_logprobs", "_min_tokens", "_produced", "_scores", "_sent", "_stops", "tokens")

    def __init__(
        self,
        detokenizer: Detokenizer,
        stops: StopAutomaton,
        *,
        min_tokens: int,
        logprobs: bool,
        includes_stop: bool = False,
    ) -> None:
        """`stops` is shared by all choices of a request. `includes_stop`: the text ends with its stop string."""
        self._detokenizer = detokenizer
        self._stops = StopStrings(stops, includes=includes_stop)
        self._min_tokens = min_tokens
        self._logprobs = logprobs
        self._scores: deque[ScoredToken] = deque()
        self._produced = 0  # characters that came out of the detokeniser
        self._sent = 0  # characters that left towards the client
        self.tokens = 0
        """Tokens that count as completion: up to the one that completed a stop string."""

    @property
    def stop_string(self) -> str | None:
        return self._stops.matched

    def feed(self, tokens: Sequence[int], scores: Sequence[TokenLogprob], finish: FinishReason | None) -> Piece:
        """Add the next tokens of this choice, in order, and return what can be sent."""
        parts: list[str] = []
        for index, token_id in enumerate(tokens):
            self.tokens += 1
            if self._logprobs and index < len(scores):
                self._scores.append(ScoredToken(token_id, scores[index], self._produced))
            parts.append(self._pass(self._detokenizer.feed(token_id)))
            if self._stops.matched is not None:
                break
        if finish is not None and self._stops.matched is None:
            parts.append(self._pass(self._detokenizer.flush()))
            parts.append(self._stops.flush())
        text = "".join(parts)
        self._sent += len(text)
        stopped = self._stops.matched is not None
        return Piece(text, self._due_scores(everything=finish is not None and not stopped), stopped)

    def plain(self, token_id: int) -> str:
        """Return the text of one token, for a choice without scores and stop strings."""
        self.tokens += 1
        return self._detokenizer.feed(token_id)

    def _pass(self, text: str) -> str:
        self._produced += len(text)
        # Like end tokens, stop strings count only once the least number of tokens is there.
        return self._stops.feed(text) if self.tokens > self._min_tokens else text

    def _due_scores(self, *, everything: bool) -> list[ScoredToken]:
        """Return scores to send: each with its token's first character, or never if a stop string cut that off."""
        due: list[ScoredToken] = []
        while self._scores and (everything or self._scores[0].offset < self._sent):
            due.append(self._scores.popleft())
        return due


class StopAutomaton:
    """Automaton over one request's stop strings; immutable, a dozen bytes a character. A string's next state is nearly
    always the next number, reached by `_character`. Only branches, fewer than the strings, have edges."""

    def __init__(self, stops: Sequence[str]) -> None:
        """Build the automaton. Raises `ValueError` for an empty stop string, which would stop everywhere."""
        if any(not stop for stop in stops):
            raise ValueError("an empty stop string stops everywhere")
        characters = [""]  # by which a state is reached from the one before it; "" = it is not
        depth, match = array("i", [0]), array("i", [0])
        self._branches: dict[tuple[int, str], int] = {}
        for stop in stops:
            state = 0
            for character in stop:
                following = self._follow(characters, state, character)
                if not following:
                    following = len(depth)
                    depth.append(depth[state] + 1)
                    match.append(0)
                    characters.append(character if following == state + 1 else "")
                    if following != state + 1:
                        self._branches[state, character] = following
                state = following
            match[state] = len(stop)
        self._characters = characters
        self.depth = depth
        self.match = match
        """Length of the longest stop string that ends in each state."""
        self._fail = self._failure_links()

    def __len__(self) -> int:
        """Return the number of states besides the first: 0 without stop strings."""
        return len(self.depth) - 1

    def after(self, state: int, character: str) -> int:
        following = self._follow(self._characters, state, character)
        while not following and state:
            state = self._fail[state]
            following = self._follow(self._characters, state, character)
        return following

    def _follow(self, characters: list[str], state: int, character: str) -> int:
        """Return the next state in the trie; 0 where it ends, as no edge leads back to the first state."""
        following = state + 1
        if following < len(characters) and characters[following] == character:
            return following
        return self._branches.get((state, character), 0)

    def _failure_links(self) -> array[int]:
        fail = array("i", bytes(4 * len(self.depth)))
        children: dict[int, list[tuple[str, int]]] = {}
        for (state, character), child in self._branches.items():
            children.setdefault(state, []).append((character, child))
        queue = deque([0])
        while queue:  # breadth first: a failure link always points to a shallower, finished state
            state = queue.popleft()
            straight = state + 1
            of_state = children.get(state, [])
            if straight < len(self._characters) and self._characters[straight]:
                of_state = [(self._characters[straight], straight), *of_state]
            for character, child in of_state:
                if state:
                    link = fail[state]
                    while link and not self._follow(self._characters, link, character):
                        link = fail[link]
                    fail[child] = self._follow(self._characters, link, character)
                self.match[child] = self.match[child] or self.match[fail[child]]
                queue.append(child)
        return fail


class StopStrings:
    """Filter of one stream. The stop string that is complete first counts; at the same character, the longest."""

    __slots__ = ("_automaton", "_held", "_includes", "_state", "matched")

    def __init__(self, automaton: StopAutomaton, *, includes: bool = False) -> None:
        """`includes`: the text ends with its stop string, not before it."""
        self._automaton = automaton
        self._includes = includes
        self._state = 0
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        """Return the text that can be sent now: none after a match (`matched`)."""
        if self.matched is not None:
            return ""
        automaton = self._automaton
        if not len(automaton):
            return text
        pending = self._held + text
        state = self._state
        for index in range(len(self._held), len(pending)):
            state = automaton.after(state, pending[index])
            if length := automaton.match[state]:
                end = index + 1
                self.matched = pending[end - length : end]
                self._held = ""
                return pending[: end if self._includes else end - length]
        self._state = state
        keep = automaton.depth[state]
        self._held = pending[len(pending) - keep :]
        return pending[: len(pending) - keep]

    def flush(self) -> str:
        """Return the text held back, at the end of the stream."""
        held, self._held, self._state = self._held, "", 0
        return held
