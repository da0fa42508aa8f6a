"""One choice of an answer: its tokens become text, with nothing of a stop string and no cut character.

Joins detokeniser and stop strings, and keeps log-probabilities beside the text they belong to. One per request and
stream; called by `generator.py`. Knows nothing of HTTP.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cohort.common.messages import TokenLogprob
from cohort.common.types import FinishReason
from cohort.services.gateway.generation.tool_calls import CallDelta
from cohort.services.gateway.text.detokenizer import Detokenizer
from cohort.services.gateway.text.stop_strings import StopAutomaton, StopStrings


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A token with its log-probabilities; `offset` is where its text starts, in characters. The first token of an
    echoed prompt has none."""

    token_id: int
    score: TokenLogprob | None
    offset: int


@dataclass(frozen=True, slots=True)
class Piece:
    """One delivery's addition to the client's text. `stopped`: a stop string was found, nothing follows. `calls` of
    tools, or more of them; `called`: there were some in this choice."""

    text: str
    scores: Sequence[ScoredToken]
    stopped: bool
    calls: Sequence[CallDelta] = ()
    called: bool = False


def prompt_scores(
    detokenizer: Detokenizer, tokens: Sequence[int], scores: Sequence[TokenLogprob]
) -> Iterator[ScoredToken]:
    """An echoed prompt's tokens; `scores` are those of all but the first, which nothing precedes."""
    offset = 0
    for token_id, score in zip(tokens, (None, *scores), strict=True):
        yield ScoredToken(token_id, score, offset)
        offset += len(detokenizer.feed(token_id))


class Choice:
    __slots__ = ("_detokenizer", "_min_tokens", "_produced", "_scored", "_scores", "_sent", "_stops", "tokens")

    def __init__(self, detokenizer: Detokenizer, stops: StopAutomaton, *, min_tokens: int, scored: bool) -> None:
        """`stops` is shared by all choices of a request."""
        self._detokenizer = detokenizer
        self._stops = StopStrings(stops)
        self._min_tokens = min_tokens
        self._scored = scored
        self._scores: deque[ScoredToken] = deque()
        self._produced = 0  # characters that came out of the detokeniser
        self._sent = 0  # characters that left towards the client
        self.tokens = 0
        """Tokens that count as completion: up to the one that completed a stop string."""

    @property
    def stop_string(self) -> str | None:
        return self._stops.matched

    def feed(self, tokens: Sequence[int], scores: Sequence[TokenLogprob], finish: FinishReason | None) -> Piece:
        """The next tokens of this choice, in order."""
        parts: list[str] = []
        for index, token_id in enumerate(tokens):
            self.tokens += 1
            if self._scored and index < len(scores):
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
        """As `feed` with this token alone, of a choice without scores and stop strings."""
        self.tokens += 1
        return self._detokenizer.feed(token_id)

    def _pass(self, text: str) -> str:
        self._produced += len(text)
        # Like end tokens, stop strings count only once the least number of tokens is there.
        return self._stops.feed(text) if self.tokens > self._min_tokens else text

    def _due_scores(self, *, everything: bool) -> list[ScoredToken]:
        """Scores leave with the first character of their token; those cut away by a stop string never do."""
        due: list[ScoredToken] = []
        while self._scores and (everything or self._scores[0].offset < self._sent):
            due.append(self._scores.popleft())
        return due
