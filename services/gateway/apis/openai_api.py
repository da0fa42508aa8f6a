"""POST /v1/completions and /v1/chat/completions: their answers, whole or as chunks.

Called by aiohttp through `middleware.py` and, for lines of batches, by `batch_runner.py`; built on `generator.py`.
"""

from __future__ import annotations

import io
import uuid
from collections.abc import Mapping, Sequence

import msgspec
from aiohttp import web

from cohort.common.errors import RequestError
from cohort.common.types import FinishReason
from cohort.services.gateway.batches.batch_lines import LineAnswer
from cohort.services.gateway.generation.answer_parts import CallDelta, whole_calls
from cohort.services.gateway.generation.answering import Answering, Mean, Step, Writer
from cohort.services.gateway.generation.choice import Piece
from cohort.services.gateway.generation.delta import Caller, StreamKind
from cohort.services.gateway.generation.generator import ApiRequest, Body, Endpoint, Generator
from cohort.services.gateway.generation.openai_shapes import Answer, Scores
from cohort.services.gateway.http.error_shapes import error_body
from cohort.services.gateway.http.service_headers import CLASS_HEADER
from cohort.services.gateway.http.sse import framed
from cohort.services.gateway.keys.middleware import REQUEST_ID_HEADER

DONE = b"data: [DONE]\n\n"
_BATCH_HEADERS = {CLASS_HEADER: "be"}
_encode = msgspec.json.Encoder().encode


class OpenAiApi:
    def __init__(self, generator: Generator) -> None:
        self._generator = generator
        self._completions = _Chunks(generator, chat=False)
        self._chats = _Chunks(generator, chat=True)
        self.endpoints: Sequence[Endpoint] = (self._completions, self._chats)

    def routes(self) -> list[web.RouteDef]:
        return [web.post("/v1/completions", self.completions), web.post("/v1/chat/completions", self.chat_completions)]

    async def completions(self, request: web.Request) -> web.StreamResponse:
        return await self._generator.serve(self._completions, request)

    async def chat_completions(self, request: web.Request) -> web.StreamResponse:
        return await self._generator.serve(self._chats, request)

    async def answer_line(self, data: bytes, caller: Caller, *, chat: bool) -> LineAnswer:
        """Answer a batch's line as if posted: best effort, after all online requests. Raises `RequestError`."""
        generator = self._generator
        with generator.ignored_fields.noted():
            api_request = await (self._chats if chat else self._completions).read(Body(data, caller), _BATCH_HEADERS)
        if api_request.call.stream:
            raise RequestError("stream: the answers of a batch are written to a file.", param="stream")
        answering = await generator.begin(msgspec.structs.replace(api_request.call, online=False), len(data), caller)
        try:
            answer = await api_request.whole(answering)
        finally:
            generator.release(answering, "the batch gave it up")
        return LineAnswer(answer, answering.base_id, answering.usage())


class _Chunks:
    """Endpoint of completions or of chats."""

    kind: StreamKind = "chunks"
    keepalive_s: float | None = None
    id_headers: Sequence[str] = (REQUEST_ID_HEADER,)

    def __init__(self, generator: Generator, *, chat: bool) -> None:
        self._parser = generator.parser
        self.chat = chat

    async def read(self, body: Body, headers: Mapping[str, str]) -> ApiRequest:
        parse = self._parser.chat if self.chat else self._parser.completion
        return _CompletionRequest(await self._parser.read(body.data, lambda data: parse(data, headers)))


class _CompletionRequest(ApiRequest):
    def writer(self, answering: Answering) -> Writer:
        return ChunkWriter(answering)

    async def whole(self, answering: Answering) -> bytes:
        generation, shape = answering.generation, answering.shape
        texts = [io.StringIO() for _ in generation.entries]
        reasoning = [io.StringIO() for _ in generation.entries]
        calls: list[list[CallDelta]] = [[] for _ in generation.entries]
        scores: dict[int, Scores | None] = {}
        finished: dict[int, FinishReason] = {}
        means = [Mean() for _ in generation.entries]
        async for index, step in answering.whole():
            texts[index].write(step.piece.text)
            reasoning[index].write(step.piece.reasoning)
            calls[index] += step.piece.calls
            means[index].add(step.piece.scores)
            if index not in scores:
                scores[index] = await answering.scores(index, first=True)
            if (written := scores[index]) is not None:
                await answering.write(written, step.piece.scores)
            if step.finish is not None:
                finished[index] = step.finish
        places = {index: await answering.prompt_logprobs(index) for index in range(len(generation.entries))}
        chosen = answering.likeliest([mean.value for mean in means])
        answer = Answer(
            id=answering.id,
            object=shape.whole_object,
            created=answering.created,
            model=answering.model,
            choices=[
                shape.whole(
                    place,
                    texts[index].getvalue(),
                    scores[index],
                    finished[index],
                    whole_calls(calls[index]),
                    places[index],
                    reasoning[index].getvalue(),
                )
                for place, index in enumerate(chosen)
            ],
            usage=answering.usage(),
            prompt_logprobs=msgspec.UNSET if places[0] is None or not answering.call.chat else places[0],
            cohort=answering.extras(chosen, renumbered=True),
        )
        return _encode(answer)


class ChunkWriter:
    at_once = True

    def __init__(self, answering: Answering) -> None:
        self._answering = answering
        self._around: dict[int, tuple[bytes, bytes]] = {}
        """Bytes before and after the text of a choice's plain events, quotes left out."""

    def plain(self, index: int, text: str) -> bytes:
        """Return the event of a text. All the rest is encoded once per choice."""
        around = self._around.get(index)
        if around is None:
            mark = uuid.uuid4().hex
            event = framed(self._chunk(index, Step(Piece(mark, (), stopped=False), finish=None, first=False), None))
            before, after = event.split(_encode(mark))
            around = self._around[index] = before, after
        return around[0] + _encode(text) + around[1]

    async def take(self, index: int, step: Step) -> list[bytes]:
        if not (step.piece.text or step.piece.parts or step.finish is not None):
            return []  # part of a character or of a stop string, perhaps
        scores = await self._answering.scores(index, first=step.first)
        if scores is not None:
            await self._answering.write(scores, step.piece.scores)
        return [framed(self._chunk(index, step, scores))]

    def keepalive(self) -> list[bytes]:
        return []

    async def end(self) -> list[bytes]:
        answering = self._answering
        if not answering.call.include_usage:
            return [DONE]
        usage = Answer(
            id=answering.id,
            object=answering.shape.chunk_object,
            created=answering.created,
            model=answering.model,
            choices=[],
            usage=answering.usage(),
        )
        return [framed(usage), DONE]

    def failed(self, error: RequestError) -> list[bytes]:
        return [framed(error_body(error)), DONE]

    def _chunk(self, index: int, step: Step, scores: Scores | None) -> Answer:
        answering = self._answering
        return Answer(
            id=answering.id,
            object=answering.shape.chunk_object,
            created=answering.created,
            model=answering.model,
            choices=[answering.shape.chunk(index, step.piece, scores, first=step.first, finish=step.finish)],
            usage=answering.choice_usage(index) if answering.call.continuous_usage else msgspec.UNSET,
            cohort=answering.extras([index]) if step.finish is not None else msgspec.UNSET,
        )
