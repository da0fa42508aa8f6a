"""POST /v1/messages and /v1/messages/count_tokens, as clients of Anthropic's API expect them.

A body becomes a chat (`messages_api_bodies.py`), `generator.py` answers it, and `messages_api_events.py` writes the
message. Called by aiohttp through `middleware.py`, which gives errors of these paths Anthropic's shape.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

import msgspec
from aiohttp import web

from cohort.common.errors import RequestError
from cohort.common.types import FinishReason
from cohort.services.gateway.apis.messages_api_bodies import NAMES, CountTokensBody, MessagesBody, chat_of, switches_of
from cohort.services.gateway.apis.messages_api_events import Event, MessageWriter, Ping
from cohort.services.gateway.generation.answering import Answering, Step, Writer
from cohort.services.gateway.generation.choice import Piece
from cohort.services.gateway.generation.delta import StreamKind
from cohort.services.gateway.generation.generator import ApiRequest, Body, Generator
from cohort.services.gateway.http.error_shapes import MESSAGES_PATH, anthropic_error, renamed
from cohort.services.gateway.http.request_bodies import refuse_shape
from cohort.services.gateway.http.sse import named
from cohort.services.gateway.keys.middleware import OWNER, REQUEST_ID_HEADER
from cohort.services.gateway.requests.parsing import Call, decode

COUNT_TOKENS_PATH = f"{MESSAGES_PATH}/count_tokens"
KEEPALIVE_S = 15.0
"""Idle time until a stream gets a ping, as proxies and clients close connections that are silent for a minute."""
B = TypeVar("B", bound=CountTokensBody)
_encode = msgspec.json.Encoder().encode
_decoder = msgspec.json.Decoder(MessagesBody)
_count_decoder = msgspec.json.Decoder(CountTokensBody)


class CountedTokens(msgspec.Struct, frozen=True):
    input_tokens: int


class MessagesApi:
    kind: StreamKind = "messages"
    chat = True
    id_headers: Sequence[str] = (REQUEST_ID_HEADER, "request-id")

    def __init__(self, generator: Generator) -> None:
        self._generator = generator
        self.keepalive_s: float | None = KEEPALIVE_S

    def routes(self) -> list[web.RouteDef]:
        return [web.post(MESSAGES_PATH, self.messages), web.post(COUNT_TOKENS_PATH, self.count_tokens)]

    async def messages(self, request: web.Request) -> web.StreamResponse:
        try:
            return await self._generator.serve(self, request)
        except RequestError as error:
            raise renamed(error, NAMES) from error

    async def count_tokens(self, request: web.Request) -> web.Response:
        generator = self._generator
        try:
            async with generator.bodies.reading(request) as data:
                call = await self._parse(data, {}, _count_decoder)
                counted = CountedTokens(await generator.count(call, request[OWNER]))
        except RequestError as error:
            raise renamed(error, NAMES) from error
        return web.Response(body=_encode(counted), content_type="application/json")

    async def _parse(self, data: bytes, headers: Mapping[str, str], decoder: msgspec.json.Decoder[B]) -> Call:
        parser = self._generator.parser

        def read(data: bytes) -> Call:
            refuse_shape(data, parser.config, chat=True)
            body = decode(decoder, data, parser.config)
            return parser.chat_call(chat_of(body), headers, switches_of(body))

        return await parser.read(data, read)

    async def read(self, body: Body, headers: Mapping[str, str]) -> ApiRequest:
        return _MessagesRequest(await self._parse(body.data, headers, _decoder))


class _MessagesRequest(ApiRequest):
    def writer(self, answering: Answering) -> Writer:
        return _Events(answering)

    async def whole(self, answering: Answering) -> bytes:
        finish, writer = FinishReason.STOP, _writer(answering)
        async for _, step in answering.whole():
            for _event in writer.take(step.piece):
                pass
            finish = step.finish or finish
        stop_string = answering.choices[0].stop_string
        return _encode(writer.message(finish, stop_string, answering.usage(), answering.extras([0])))


class _Events:
    at_once = True

    def __init__(self, answering: Answering) -> None:
        self._answering = answering
        self._writer = _writer(answering)
        self._finish = FinishReason.STOP

    def plain(self, index: int, text: str) -> bytes:
        return b"".join(_framed(self._writer.take(Piece(text, (), stopped=False))))

    async def take(self, index: int, step: Step) -> list[bytes]:
        self._finish = step.finish or self._finish
        due = _framed(self._writer.take(step.piece))
        return [*self._opening(), *due] if due else []

    def keepalive(self) -> list[bytes]:
        return [*self._opening(), *_framed([Ping()])]

    async def end(self) -> list[bytes]:
        answering = self._answering
        stop_string, usage = answering.choices[0].stop_string, answering.usage()
        end = self._writer.end(self._finish, stop_string, usage, answering.extras([0]))
        return [*self._opening(), *_framed(end)]

    def failed(self, error: RequestError) -> list[bytes]:
        return [named("error", anthropic_error(renamed(error, NAMES)))]

    def _opening(self) -> list[bytes]:
        return [] if self._writer.started else _framed(self._writer.begin(self._answering.usage()))


def _writer(answering: Answering) -> MessageWriter:
    return MessageWriter(f"msg_{answering.unique_id()}", answering.model)


def _framed(events: Iterable[Event]) -> list[bytes]:
    """Encode events, named in the stream by their types."""
    return [named(str(event.__struct_config__.tag), event) for event in events]
