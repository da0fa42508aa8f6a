"""POST /v1/messages and /v1/messages/count_tokens, as clients of Anthropic's API expect them.

The rendering alone: a body becomes the chat that it says (`messages_api_bodies.py`), `generator.py` answers it, and
what comes is written as a message (`messages_api_events.py`). Called by aiohttp through `middleware.py`, which gives
the errors of these paths Anthropic's shape.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeVar

import msgspec
from aiohttp import web

from cohort.common.errors import RequestError
from cohort.common.types import FinishReason
from cohort.services.gateway.apis.messages_api_bodies import NAMES, CountTokensBody, MessagesBody, chat_of
from cohort.services.gateway.apis.messages_api_events import MessageAnswer, MessageWriter, Ping, named
from cohort.services.gateway.generation.answering import Answering
from cohort.services.gateway.generation.generator import QUIET, Generator
from cohort.services.gateway.http.error_shapes import MESSAGES_PATH, anthropic_error, renamed
from cohort.services.gateway.http.request_bodies import refuse_shape
from cohort.services.gateway.http.sse import EventStream
from cohort.services.gateway.keys.middleware import HTTP_ID, REQUEST_ID_HEADER
from cohort.services.gateway.requests.parsing import Call, decode
from cohort.services.gateway.resume.resume_forms import Form, NamedEvents, NamedForm
from cohort.services.gateway.resume.resume_store import Ending, StreamRecord
from cohort.services.gateway.resume.resume_tape import Tape

if TYPE_CHECKING:
    from cohort.services.gateway.resume.resumption import Resumption

COUNT_TOKENS_PATH = f"{MESSAGES_PATH}/count_tokens"
QUIET_S = 15.0
"""A stream in which nothing happens for so long gets a ping, and is opened with one where nothing came yet: proxies and
clients close connections that are silent for a minute."""
B = TypeVar("B", bound=CountTokensBody)
_encode = msgspec.json.Encoder().encode
_decoder = msgspec.json.Decoder(MessagesBody)
_count_decoder = msgspec.json.Decoder(CountTokensBody)


class CountedTokens(msgspec.Struct, frozen=True):
    input_tokens: int


class MessagesApi:
    """Two endpoints over one `Generator`."""

    def __init__(self, generator: Generator) -> None:
        self._generator = generator
        self.resumption: Resumption | None = None
        """Set by `service.py`."""
        self.quiet_s = QUIET_S

    def routes(self) -> list[web.RouteDef]:
        return [web.post(MESSAGES_PATH, self.messages), web.post(COUNT_TOKENS_PATH, self.count_tokens)]

    async def messages(self, request: web.Request) -> web.StreamResponse:
        generator, resumption = self._generator, self.resumption
        try:
            async with generator.arriving(request) as body:
                call = await self._parse(body.data, body.headers, _decoder)
                tape = None if resumption is None else resumption.tape(body.headers, call, body.data)
                answering = await generator.begin(call, len(body.data), body.caller, tape)
            mailbox = answering.generation.mailbox
            if resumption is not None and isinstance(mailbox, Tape):
                return await resumption.begin(request, answering, mailbox, self._form())
            try:
                if answering.call.stream:
                    return await self._stream(request, answering)
                return web.Response(body=_encode(await self._whole(answering)), content_type="application/json")
            finally:
                generator.release(answering)
        except RequestError as error:
            raise renamed(error, NAMES) from error

    def _form(self) -> NamedForm:
        return NamedForm("messages", lambda answering: _Rendering(self._generator, answering, self.quiet_s))

    async def restored(self, record: StreamRecord, owner: str, ending: Ending | None) -> tuple[Call, Form]:
        """For `resumption.py`."""
        return await self._parse(record.body, record.headers, _decoder), self._form()

    async def count_tokens(self, request: web.Request) -> web.Response:
        generator = self._generator
        try:
            async with generator.bodies.reading(request) as data:
                call = await self._parse(data, {}, _count_decoder)
                counted = CountedTokens(await generator.count(call))
        except RequestError as error:
            raise renamed(error, NAMES) from error
        return web.Response(body=_encode(counted), content_type="application/json")

    async def _parse(self, data: bytes, headers: Mapping[str, str], decoder: msgspec.json.Decoder[B]) -> Call:
        reader = self._generator.reader

        def read(data: bytes) -> Call:
            refuse_shape(data, reader.config, chat=True)
            return reader.chat_call(chat_of(decode(decoder, data)), headers)

        return await reader.read(data, read, chat=True)

    async def _whole(self, answering: Answering) -> MessageAnswer:
        finish, writer = FinishReason.STOP, _writer(answering)
        async for _, step in self._generator.steps(answering):
            for _event in writer.take(step.piece):
                pass
            finish = step.finish or finish
        stop_string = answering.choices[0].stop_string
        return writer.message(finish, stop_string, answering.usage(), answering.extras([0]))

    async def _stream(self, request: web.Request, answering: Answering) -> web.StreamResponse:
        http_id = request[HTTP_ID]
        events = EventStream(
            request,
            {REQUEST_ID_HEADER: http_id, "request-id": http_id},
            write_timeout_s=self._generator.config.write_timeout_s,
            log=self._generator.host.log,
        )
        rendering = _Rendering(self._generator, answering, self.quiet_s)
        return await events.carry(rendering.send(events), lambda error: rendering.fail(events, error))


class _Rendering:
    """One answer's events, once."""

    def __init__(self, generator: Generator, answering: Answering, quiet_s: float) -> None:
        self._generator = generator
        self._answering = answering
        self._quiet_s = quiet_s

    async def send(self, events: NamedEvents) -> None:
        finish, answering, writer = FinishReason.STOP, self._answering, _writer(self._answering)
        async for _, step in self._generator.steps(answering, self._quiet_s):
            due = list(writer.take(step.piece))
            if step is QUIET:
                due = [Ping()]
            if due:
                await events.send_named(*map(named, [*writer.begin(answering.usage()), *due]))
            finish = step.finish or finish
        usage = answering.usage()
        end = writer.end(finish, answering.choices[0].stop_string, usage, answering.extras([0]))
        await events.send_named(*map(named, [*writer.begin(usage), *end]))
        await events.end()

    async def fail(self, events: NamedEvents, error: RequestError) -> None:
        await events.send_named(("error", anthropic_error(renamed(error, NAMES))))
        await events.end()


def _writer(answering: Answering) -> MessageWriter:
    return MessageWriter(f"msg_{answering.unique_id()}", answering.model)
