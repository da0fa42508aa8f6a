"""The JSON of completions and chat completions, in OpenAI's shapes: whole and in chunks.

Structs list the keys; one builder per endpoint fills them. Log-probabilities become JSON as they arrive (`Scores`): a
tenth of the objects' size. Called by `openai_api.py` and `answering.py`. Cohort's own fields stand under the one key
`cohort`, so that strict clients parse the rest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec
from msgspec import UNSET, UnsetType

from cohort.common.machines.entry import Entry
from cohort.common.messages import TokenLogprob
from cohort.common.types import FinishReason, Prediction
from cohort.services.gateway.generation.answer_parts import CallDelta
from cohort.services.gateway.generation.choice import Piece, ScoredToken
from cohort.services.gateway.generation.delta import GatewayTimes, ttft_stages
from cohort.services.gateway.text.tokenizer import TokenText

# JSON has no infinity; this is what clients of other servers know as "impossible".
LEAST_LOGPROB = -9999.0
_encode = msgspec.json.Encoder().encode


class PromptTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct, frozen=True):
    reasoning_tokens: int


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET  # of answers that a reader reads


class RequestExtras(msgspec.Struct, frozen=True):
    """Workers of one choice, and where its time went in seconds."""

    index: int
    request_id: str
    traffic_class: str = msgspec.field(name="class")
    attempts: int
    instances: list[str]
    placement: str
    prediction: Prediction | None
    stop_string: str | None
    preemptions: int
    ttft_s: float | None
    stages_s: dict[str, float]
    token_ids: list[int] | UnsetType = UNSET  # of the output, when return_token_ids asks for them
    best_effort: bool | UnsetType = UNSET  # true: demoted, as no worker could keep its TTFT SLO


class Extras(msgspec.Struct, frozen=True):
    requests: list[RequestExtras]


class CompletionLogprobs(msgspec.Struct, frozen=True):
    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class PromptPlace(msgspec.Struct, frozen=True):
    """Token at one place of a prompt. `rank`: among all tokens there, from 1 on; null beyond those asked for."""

    logprob: float
    rank: int | None
    decoded_token: str


class CompletionChoice(msgspec.Struct, frozen=True):
    index: int
    text: str
    logprobs: msgspec.Raw | None  # CompletionLogprobs
    finish_reason: str | None
    prompt_logprobs: msgspec.Raw | UnsetType = UNSET  # [null, {token id: PromptPlace, …}, …], of the prompt's tokens


class TopLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class CalledFunction(msgspec.Struct, frozen=True):
    arguments: str
    name: str | UnsetType = UNSET


class ToolCall(msgspec.Struct, frozen=True):
    """A call, or one more piece of its arguments: then without id, type and name. `index` in streams only."""

    function: CalledFunction
    index: int | UnsetType = UNSET
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET


class ChatMessage(msgspec.Struct, frozen=True):
    role: str
    content: str | None
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct, frozen=True):
    index: int
    message: ChatMessage
    logprobs: msgspec.Raw | None  # {"content": [ChatTokenLogprob, …], "refusal": null}
    finish_reason: str | None


class ChatDelta(msgspec.Struct, frozen=True):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, frozen=True):
    index: int
    delta: ChatDelta
    logprobs: msgspec.Raw | None  # {"content": [ChatTokenLogprob, …], "refusal": null}
    finish_reason: str | None


class Answer(msgspec.Struct, frozen=True):
    """A whole answer or one chunk; `object` tells which."""

    id: str
    object: str
    created: int
    model: str
    choices: Sequence[CompletionChoice | ChatChoice | ChatChunkChoice]
    usage: Usage | UnsetType = UNSET
    prompt_logprobs: msgspec.Raw | UnsetType = UNSET  # of a chat, as of a `CompletionChoice`
    cohort: Extras | UnsetType = UNSET


class Scores(Protocol):
    """Log-probabilities of one choice, or of an echoed prompt, as the JSON they will be."""

    tokens: int

    def add(self, scores: Sequence[ScoredToken]) -> None:
        """Append scores, yielding to the event loop after a few."""

    def json(self) -> msgspec.Raw: ...


class Shape(Protocol):
    """One endpoint's way to write choices."""

    id_prefix: str
    whole_object: str
    chunk_object: str

    def scores(self, behind: Scores | None = None) -> Scores:
        """Return an empty list of scores. An echoed prompt's (`behind`) come first, shared and not copied."""
        ...

    def whole(
        self,
        index: int,
        text: str,
        scores: Scores | None,
        finish: FinishReason,
        calls: Sequence[CallDelta] = (),
        places: msgspec.Raw | None = None,
        reasoning: str = "",
    ) -> CompletionChoice | ChatChoice:
        """Return a whole choice; `places` are its prompt's log-probabilities, where it has them."""
        ...

    def chunk(
        self, index: int, piece: Piece, scores: Scores | None, *, first: bool, finish: FinishReason | None
    ) -> CompletionChoice | ChatChunkChoice:
        """Return a chunk. Tool calls and finish reason come from `Piece.calls` and `Piece.called`."""
        ...


class CompletionScores:
    def __init__(self, spell: Callable[[Sequence[ScoredToken]], CompletionLogprobs], behind: Scores | None) -> None:
        self._spell = spell
        self._behind = behind if isinstance(behind, CompletionScores) else None
        self._lists = [bytearray() for _ in CompletionLogprobs.__struct_fields__]
        self.tokens = 0

    def add(self, scores: Sequence[ScoredToken]) -> None:
        if not scores:
            return
        self.tokens += len(scores)
        spelled = self._spell(scores)
        for name, written in zip(CompletionLogprobs.__struct_fields__, self._lists, strict=True):
            _append(written, getattr(spelled, name))

    def json(self) -> msgspec.Raw:
        lists = []
        for index, name in enumerate(CompletionLogprobs.__struct_fields__):
            parts = [self._behind._lists[index]] if self._behind is not None else []
            parts.append(self._lists[index])
            lists.append(b'"%b":[%b]' % (name.encode(), b",".join([part for part in parts if part])))
        return msgspec.Raw(b"{" + b",".join(lists) + b"}")


class ChatScores:
    def __init__(self, spell: Callable[[Sequence[ScoredToken]], list[ChatTokenLogprob]]) -> None:
        self._spell = spell
        self._list = bytearray()
        self.tokens = 0

    def add(self, scores: Sequence[ScoredToken]) -> None:
        self.tokens += len(scores)
        if scores:
            _append(self._list, self._spell(scores))

    def json(self) -> msgspec.Raw:
        return msgspec.Raw(b'{"content":[%b],"refusal":null}' % bytes(self._list))

    def items(self) -> bytes:
        """Return the JSON of the list's items, without its brackets."""
        return bytes(self._list)


def _append(written: bytearray, items: Sequence[object]) -> None:
    if written:
        written += b","
    written += _encode(items)[1:-1]


class CompletionShape:
    id_prefix = "cmpl-"
    whole_object = "text_completion"
    chunk_object = "text_completion"

    def __init__(self, text: TokenText) -> None:
        self._text = text

    def scores(self, behind: Scores | None = None) -> CompletionScores:
        return CompletionScores(self._logprobs, behind)

    def whole(
        self,
        index: int,
        text: str,
        scores: Scores | None,
        finish: FinishReason,
        calls: Sequence[CallDelta] = (),
        places: msgspec.Raw | None = None,
        reasoning: str = "",
    ) -> CompletionChoice:
        logprobs = None if scores is None else scores.json()
        return CompletionChoice(index, text, logprobs, finish.value, UNSET if places is None else places)

    def chunk(
        self, index: int, piece: Piece, scores: Scores | None, *, first: bool, finish: FinishReason | None
    ) -> CompletionChoice:
        logprobs = None if scores is None else scores.json()
        return CompletionChoice(index, piece.text, logprobs, finish.value if finish else None)

    def _logprobs(self, scores: Sequence[ScoredToken]) -> CompletionLogprobs:
        return CompletionLogprobs(
            text_offset=[scored.offset for scored in scores],
            token_logprobs=[None if scored.score is None else _finite(scored.score.logprob) for scored in scores],
            tokens=[self._name(scored.token_id) for scored in scores],
            top_logprobs=[self._top(scored) for scored in scores],
        )

    def _top(self, scored: ScoredToken) -> dict[str, float] | None:
        """Return the likeliest tokens and the sampled one, which is always there."""
        score = scored.score
        if score is None:
            return None
        top: dict[str, float] = {}
        for token_id, value in zip(score.top_ids, score.top_logprobs, strict=True):
            # Distinct tokens may be spelled alike; the likeliest of them keeps the name.
            top.setdefault(self._name(token_id), _finite(value))
        top.setdefault(self._name(scored.token_id), _finite(score.logprob))
        return top

    def _name(self, token_id: int) -> str:
        """Return a token's text; for a part of a character its bytes, as OpenAI spells them."""
        data = self._text.token_bytes(token_id)
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


class ChatShape:
    id_prefix = "chatcmpl-"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, text: TokenText) -> None:
        self._text = text

    def scores(self, behind: Scores | None = None) -> ChatScores:
        return ChatScores(self._logprobs)  # a chat is never echoed

    def whole(
        self,
        index: int,
        text: str,
        scores: Scores | None,
        finish: FinishReason,
        calls: Sequence[CallDelta] = (),
        places: msgspec.Raw | None = None,
        reasoning: str = "",
    ) -> ChatChoice:
        logprobs = None if scores is None else scores.json()
        thought = reasoning or UNSET
        if not calls:
            message = ChatMessage("assistant", text, reasoning_content=thought)
            return ChatChoice(index, message, logprobs, finish.value)
        made = [ToolCall(CalledFunction(call.arguments, call.name), id=call.id, type="function") for call in calls]
        message = ChatMessage("assistant", text or None, reasoning_content=thought, tool_calls=made)
        return ChatChoice(index, message, logprobs, _finish_of_calls(finish))

    def chunk(
        self, index: int, piece: Piece, scores: Scores | None, *, first: bool, finish: FinishReason | None
    ) -> ChatChunkChoice:
        # The role rides with the first text: a chunk of its own would count as a first token.
        content = piece.text if piece.text or (first and not piece.parts) else UNSET
        calls = [_delta_of(call) for call in piece.calls]
        delta = ChatDelta("assistant" if first else UNSET, content, piece.reasoning or UNSET, calls or UNSET)
        logprobs = scores.json() if scores is not None and scores.tokens else None
        reason = None if finish is None else _finish_of_calls(finish) if piece.called else finish.value
        return ChatChunkChoice(index, delta, logprobs, reason)

    def _logprobs(self, scores: Sequence[ScoredToken]) -> list[ChatTokenLogprob]:
        return [
            ChatTokenLogprob(
                *self._spelled(scored.token_id, score.logprob),
                [
                    TopLogprob(*self._spelled(token_id, value))
                    for token_id, value in zip(score.top_ids, score.top_logprobs, strict=True)
                ],
            )
            for scored in scores
            if (score := scored.score) is not None
        ]

    def _spelled(self, token_id: int, logprob: float) -> tuple[str, float, list[int]]:
        data = self._text.token_bytes(token_id)
        return data.decode("utf-8", "replace"), _finite(logprob), list(data)


def prompt_places(text: TokenText, tokens: Sequence[int], scores: Sequence[TokenLogprob]) -> list[bytes]:
    def place(token: int, logprob: float, rank: int | None) -> PromptPlace:
        return PromptPlace(_finite(logprob), rank, text.token_bytes(token).decode("utf-8", "replace"))

    written = []
    for token, score in zip(tokens, scores, strict=True):
        places = {
            str(other): place(other, logprob, rank)
            for rank, (other, logprob) in enumerate(zip(score.top_ids, score.top_logprobs, strict=True), 1)
        }
        places.setdefault(str(token), place(token, score.logprob, None))
        written.append(_encode(places))
    return written


def _delta_of(call: CallDelta) -> ToolCall:
    if not call.id:
        return ToolCall(CalledFunction(call.arguments), call.index)
    return ToolCall(CalledFunction(call.arguments, call.name), call.index, call.id, "function")


def _finish_of_calls(finish: FinishReason) -> str:
    return "tool_calls" if finish is FinishReason.STOP else finish.value


def extras_of(
    index: int, entry: Entry, times: GatewayTimes, stop_string: str | None, tokens: list[int] | None = None
) -> RequestExtras:
    ttft_s = None if entry.first_token_s is None else entry.first_token_s - times.arrived_s
    return RequestExtras(
        index=index,
        request_id=entry.request_id,
        traffic_class=entry.request.traffic_class,
        attempts=entry.attempt.number + 1,
        instances=entry.instances,
        placement=entry.placement_reason,
        prediction=entry.prediction,
        stop_string=stop_string,
        preemptions=sum(part.preemptions for part in entry.times.values()),
        ttft_s=None if ttft_s is None else round(ttft_s, 6),
        stages_s={stage: round(seconds, 6) for stage, seconds in ttft_stages(times, entry).items()},
        token_ids=UNSET if tokens is None else tokens,
        best_effort=entry.best_effort or UNSET,
    )


def usage_of(prompt_tokens: int, completion_tokens: int, cached_tokens: int, reasoning: int | None = None) -> Usage:
    return Usage(
        prompt_tokens,
        completion_tokens,
        prompt_tokens + completion_tokens,
        PromptTokensDetails(cached_tokens),
        UNSET if reasoning is None else CompletionTokensDetails(reasoning),
    )


def _finite(value: float) -> float:
    return value if math.isfinite(value) and value > LEAST_LOGPROB else LEAST_LOGPROB
