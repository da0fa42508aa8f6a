"""One HTTP request on its way back: tokens become text, text becomes what the client is sent.

Made by `openai_api.py` once a request is admitted, and fed by it with every delta. Knows nothing of HTTP.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from cohort.common.types import FinishReason
from cohort.services.gateway.choice import Choice, Piece, ScoredToken, prompt_scores
from cohort.services.gateway.detokenizer import TokenText
from cohort.services.gateway.mailbox import Delta, Generation
from cohort.services.gateway.parsing import Call
from cohort.services.gateway.responses import Extras, Shape, Usage, extras_of, usage_of


@dataclass(frozen=True, slots=True)
class Step:
    """What one delta means for the client. `first`: the choice's first visible piece."""

    piece: Piece
    finish: FinishReason | None
    first: bool


@dataclass(slots=True)
class Answering:
    """The choices of one request as text so far."""

    call: Call
    generation: Generation
    shape: Shape
    text: TokenText
    choices: list[Choice]
    echoes: list[str]
    base_id: str
    id: str
    created: int
    model: str
    begun: set[int] = field(default_factory=set)

    def next(self, delta: Delta) -> Step:
        """The delta as text; a stop string ends the choice. An echoed prompt rides with the first text."""
        index, tokens, finish = delta.index, delta.tokens, delta.finish
        if self.call.max_tokens == 0 and finish is not None:
            tokens, finish = [], FinishReason.LENGTH  # a scored prompt yields a token that nobody wanted
        piece = self.choices[index].feed(tokens, delta.logprobs, finish)
        finish = FinishReason.STOP if piece.stopped else finish
        first = index not in self.begun and bool(piece.text or finish)
        scores = self._behind_echo(index, piece.scores)
        if first:
            self.begun.add(index)
            piece = Piece(self.echoes[index] + piece.text, [*self._echo_scores(index), *scores], piece.stopped)
        else:
            piece = Piece(piece.text, scores, piece.stopped)
        return Step(piece, finish, first)

    def usage(self) -> Usage:
        """Over all choices; each prompt counts once, however many choices it has."""
        entries = self.generation.entries[:: self.call.n]
        return usage_of(
            sum(entry.request.prompt_tokens for entry in entries),
            sum(choice.tokens for choice in self.choices),
            sum(entry.cached_tokens for entry in entries),
        )

    def choice_usage(self, index: int) -> Usage:
        entry = self.generation.entries[index]
        return usage_of(entry.request.prompt_tokens, self.choices[index].tokens, entry.cached_tokens)

    def extras(self, indexes: Iterable[int]) -> Extras:
        extras = []
        for index in indexes:
            entry, choice = self.generation.entries[index], self.choices[index]
            tokens = entry.output[: choice.tokens] if self.call.return_token_ids else None
            extras.append(extras_of(index, entry, self.generation.times, choice.stop_string, tokens))
        return Extras(extras)

    def _behind_echo(self, index: int, scores: Sequence[ScoredToken]) -> Sequence[ScoredToken]:
        shift = len(self.echoes[index])
        return [dataclasses.replace(item, offset=item.offset + shift) for item in scores] if shift else scores

    def _echo_scores(self, index: int) -> list[ScoredToken]:
        if not self.call.scores_prompt:
            return []
        entry = self.generation.entries[index]
        detokenizer = self.text.stream(context=(), skip_special=self.call.skip_special_tokens)
        return prompt_scores(detokenizer, entry.request.tokens, entry.prompt_logprobs)
