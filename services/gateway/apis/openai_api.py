"""POST /v1/completions and /v1/chat/completions: their answers, whole or as chunks.

Called by aiohttp through `middleware.py`, and by `batch_runner.py` for the lines of a batch. How a body becomes an
answer in progress is `generator.py`'s business.
"""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec
from aiohttp import web

from cohort.common.errors import RequestError
from cohort.common.types import FinishReason
from cohort.services.gateway.batches.batch_lines import LineAnswer
from cohort.services.gateway.generation.answering import Answering, Mean, Step
from cohort.services.gateway.generation.delta import Caller
from cohort.services.gateway.generation.direct_events import direct_events
from cohort.services.gateway.generation.generator import Generator
from cohort.services.gateway.generation.openai_shapes import Answer, Scores
from cohort.services.gateway.generation.tool_calls import CallDelta, whole_calls
from cohort.services.gateway.http.service_headers import CLASS_HEADER
from cohort.services.gateway.http.sse import Events, EventStream, Outbox
from cohort.services.gateway.keys.middleware import HTTP_ID, REQUEST_ID_HEADER
from cohort.services.gateway.requests.parsing import Call
from cohort.services.gateway.resume.resume_forms import ChunkForm, Form
from cohort.services.gateway.resume.resume_store import Ending, StreamRecord
from cohort.services.gateway.resume.resume_tape import Tape

if TYPE_CHECKING:
    from cohort.services.gateway.resume.resumption import Resumption

_BATCH_HEADERS = {CLASS_HEADER: "be"}
_encode = msgspec.json.Encoder().encode


class OpenAiApi:
    """The two generation endpoints over one `Generator`."""

    def __init__(self, generator: Generator) -> None:
        self._generator = generator
        self._outbox = Outbox()
        self.resumption: Resumption | None = None
        """Set by `service.py`."""

    def routes(self) -> list[web.RouteDef]:
        return [web.post("/v1/completions", self.completions), web.post("/v1/chat/completions", self.chat_completions)]

    async def completions(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, chat=False)

    async def chat_completions(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, chat=True)

    async def _answer(self, request: web.Request, *, chat: bool) -> web.StreamResponse:
        generator, resumption = self._generator, self.resumption
        async with generator.arriving(request) as body:
            call = await self.parse(body.data, body.headers, chat=chat)
            tape = None if resumption is None else resumption.tape(body.headers, call, body.data)
            answering = await generator.begin(call, len(body.data), body.caller, tape)
        mailbox = answering.generation.mailbox
        if resumption is not None and isinstance(mailbox, Tape):
            return await resumption.begin(request, answering, mailbox, self._form(len(answering.choices)))
        try:
            if answering.call.stream:
                return await self._stream(request, answering)
            answer = await self._whole(answering)
            return web.Response(body=_encode(answer), content_type="application/json")
        finally:
            generator.release(answering)

    async def answer_line(self, data: bytes, caller: Caller, *, chat: bool) -> LineAnswer:
        """One line of a batch, as if its body had been posted: best effort, offline, behind all online requests. Raises
        `RequestError` with the status the body would get."""
        generator = self._generator
        call = await self.parse(data, _BATCH_HEADERS, chat=chat)
        if call.stream:
            raise RequestError("stream: the answers of a batch are written to a file.", param="stream")
        answering = await generator.begin(dataclasses.replace(call, online=False), len(data), caller)
        try:
            answer = await self._whole(answering)
        finally:
            generator.release(answering, "the batch gave it up")
        return LineAnswer(_encode(answer), answering.base_id, answering.usage())

    def _form(self, choices: int) -> ChunkForm:
        return ChunkForm(choices, self.stream, self.send_chunks)

    async def restored(self, record: StreamRecord, owner: str, ending: Ending | None) -> tuple[Call, Form]:
        """For `resumption.py`."""
        call = await self.parse(record.body, record.headers, chat=record.chat)
        return call, self._form(len(record.requests))

    async def parse(self, data: bytes, headers: Mapping[str, str], *, chat: bool) -> Call:
        """Raises a 4xx `RequestError`."""
        reader = self._generator.reader
        parse = reader.chat if chat else reader.completion
        return await reader.read(data, lambda body: parse(body, headers), chat=chat)

    async def _whole(self, answering: Answering) -> Answer:
        generation, shape = answering.generation, answering.shape
        texts = [io.StringIO() for _ in generation.entries]
        calls: list[list[CallDelta]] = [[] for _ in generation.entries]
        scores: dict[int, Scores | None] = {}
        finished: dict[int, FinishReason] = {}
        means = [Mean() for _ in generation.entries]
        async for index, step in self._generator.steps(answering):
            texts[index].write(step.piece.text)
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
        return Answer(
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
                )
                for place, index in enumerate(chosen)
            ],
            usage=answering.usage(),
            prompt_logprobs=msgspec.UNSET if places[0] is None or not answering.call.chat else places[0],
            cohort=answering.extras(chosen, renumbered=True),
        )

    async def _stream(self, request: web.Request, answering: Answering) -> web.StreamResponse:
        events = EventStream(
            request,
            {REQUEST_ID_HEADER: request[HTTP_ID]},
            write_timeout_s=self._generator.config.write_timeout_s,
            log=self._generator.host.log,
        )
        return await self.stream(answering, events)

    async def stream(self, answering: Answering, events: EventStream) -> web.StreamResponse:
        """All that the client has not seen. Raises a `RequestError` as long as the stream is not open."""
        return await events.carry(self.send_chunks(events, answering), events.fail)

    async def send_chunks(self, events: Events, answering: Answering) -> None:
        """Of the choices that have not ended, then the end. Raises the `RequestError` that they failed with."""
        shape, call = answering.shape, answering.call
        mailbox = answering.generation.mailbox
        direct = direct_events(answering, events, self._outbox)
        if direct is not None:
            mailbox.direct = direct.send
        try:
            async for index, step in self._generator.steps(answering):
                if step.piece.text or step.piece.calls or step.finish is not None:
                    # else part of a character or of a stop string, perhaps
                    await events.send(await self._chunk(answering, index, step))
        finally:
            mailbox.direct = None
        if call.include_usage:
            await events.send(
                Answer(
                    id=answering.id,
                    object=shape.chunk_object,
                    created=answering.created,
                    model=answering.model,
                    choices=[],
                    usage=answering.usage(),
                )
            )
        await events.done()

    async def _chunk(self, answering: Answering, index: int, step: Step) -> Answer:
        shape = answering.shape
        scores = await answering.scores(index, first=step.first)
        if scores is not None:
            await answering.write(scores, step.piece.scores)
        return Answer(
            id=answering.id,
            object=shape.chunk_object,
            created=answering.created,
            model=answering.model,
            choices=[shape.chunk(index, step.piece, scores, first=step.first, finish=step.finish)],
            usage=answering.choice_usage(index) if answering.call.continuous_usage else msgspec.UNSET,
            cohort=answering.extras([index]) if step.finish is not None else msgspec.UNSET,
        )
