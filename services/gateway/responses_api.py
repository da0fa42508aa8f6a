"""POST /v1/responses, and what was answered there: read again, deleted, gone on with.

The rendering alone: a body becomes the chat that it says (`responses_api_bodies.py`), `generator.py` answers it, and
what comes is written as a response (`responses_api_events.py`). Answers are kept (`responses_api_kept.py`) unless
`store` is false: one that its client knows to be complete can be gone on with. Called by aiohttp through
`middleware.py`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec
from aiohttp import web

from cohort.common.errors import RequestError
from cohort.common.types import FinishReason
from cohort.services.gateway.answering import Answering, Step
from cohort.services.gateway.body_shape import refuse_shape
from cohort.services.gateway.error_shapes import renamed
from cohort.services.gateway.generator import QUIET, Generator
from cohort.services.gateway.listing import known_id, limit_of, query_of
from cohort.services.gateway.middleware import HTTP_ID, OWNER, REQUEST_ID_HEADER
from cohort.services.gateway.openai_shapes import ChatScores
from cohort.services.gateway.parsing import Call, chat_call, check_model, decode
from cohort.services.gateway.responses_api_bodies import NAMES, InputItem, ResponsesBody, chat_of, items_of
from cohort.services.gateway.responses_api_events import Event, ResponseObject, ResponseWriter, asked_response, named
from cohort.services.gateway.responses_api_kept import KeptResponses
from cohort.services.gateway.responses_api_store import StoredResponse
from cohort.services.gateway.sse import EventStream

RESPONSES_PATH = "/v1/responses"
QUIET_S = 15.0
"""A stream for which nothing came for so long is opened: proxies and clients give up silent connections."""
_encode = msgspec.json.Encoder().encode
_decoder = msgspec.json.Decoder(ResponsesBody)


class InputItems(msgspec.Struct, frozen=True):
    """`object` is "list"."""

    object: str
    data: list[InputItem]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedResponse(msgspec.Struct, frozen=True):
    id: str
    object: str = "response"
    deleted: bool = True


@dataclass(slots=True)
class _Asked:
    """One request: its body once it is read, and the items of its conversation, where they will be kept."""

    owner: str
    body: ResponsesBody | None = None
    items: list[InputItem] = field(default_factory=list)


class ResponsesApi:
    def __init__(self, generator: Generator, kept: KeptResponses) -> None:
        self._generator = generator
        self.kept = kept
        self.quiet_s = QUIET_S

    def routes(self) -> list[web.RouteDef]:
        one = RESPONSES_PATH + "/{id}"
        return [
            web.post(RESPONSES_PATH, self.create),
            web.get(one, self.retrieve),
            web.delete(one, self.delete),
            web.get(f"{one}/input_items", self.input_items),
            web.post(f"{one}/cancel", self.cancel),
        ]

    # -- Answers ---------------------------------------------------------------------------------------------------

    async def create(self, request: web.Request) -> web.StreamResponse:
        asked = _Asked(request[OWNER])

        async def parse(data: bytes, headers: Mapping[str, str]) -> Call:
            return await self._parse(data, headers, asked)

        try:
            async with self._generator.answering(request, parse, chat=True) as answering:
                writer = self._writer(asked, answering)
                if answering.call.stream:
                    return await self._stream(request, asked, answering, writer)
                response = await self._whole(asked, answering, writer)
                return web.Response(body=_encode(response), content_type="application/json")
        except RequestError as error:
            raise renamed(error, NAMES) from error

    async def _parse(self, data: bytes, headers: Mapping[str, str], asked: _Asked) -> Call:
        generator = self._generator

        def read(data: bytes) -> tuple[ResponsesBody, list[InputItem]]:
            refuse_shape(data, generator.config, chat=True)
            body = decode(_decoder, data)
            check_model(body.model, generator.card)
            return body, items_of(body)

        body, own = await generator.parsed(data, read, chat=True)
        if body.store and not self.kept.keeps:
            raise RequestError("store: this server keeps no responses (responses.max_responses is 0).", param="store")
        before: list[InputItem] = []
        if body.previous_response_id is not None:
            before = await self.kept.conversation(known_id(body.previous_response_id), asked.owner)
        items = [*before, *own]
        asked.body, asked.items = body, items if self._keeps(body) else []

        def call(_: bytes = b"") -> Call:
            chat = chat_of(body, items)
            call = chat_call(chat, headers, generator.config, generator.card, generator.tool_format)
            return dataclasses.replace(call, truncates=body.truncation == "auto")

        return await (asyncio.to_thread(call) if before else generator.parsed(data, call, chat=True))

    def _keeps(self, body: ResponsesBody) -> bool:
        return body.store is not False and self.kept.keeps

    def _writer(self, asked: _Asked, answering: Answering) -> ResponseWriter:
        assert asked.body is not None, "an answer in progress has a body"
        sampling = answering.call.sampling
        return ResponseWriter(
            asked_response(
                asked.body,
                response_id=f"resp_{uuid.uuid4().hex}",
                created_at=answering.created,
                model=answering.model,
                store=self._keeps(asked.body),
                temperature=sampling.temperature,
                top_p=sampling.top_p,
            )
        )

    async def _whole(self, asked: _Asked, answering: Answering, writer: ResponseWriter) -> ResponseObject:
        finish = FinishReason.STOP
        async for _, step in self._generator.steps(answering):
            for _event in writer.take(step.piece, await _logprobs(answering, step)):
                pass
            finish = step.finish or finish
        for _event in writer.close(finish):
            pass
        return await self._kept(asked, answering, writer, finish)

    async def _stream(
        self, request: web.Request, asked: _Asked, answering: Answering, writer: ResponseWriter
    ) -> web.StreamResponse:
        events = EventStream(
            request,
            {REQUEST_ID_HEADER: request[HTTP_ID]},
            write_timeout_s=self._generator.config.write_timeout_s,
            log=self._generator.log,
        )

        async def fail(error: RequestError) -> None:
            await events.send_named(*named([writer.failed(error)]))
            await events.end()

        return await events.carry(self._send(events, asked, answering, writer), fail)

    async def _send(self, events: EventStream, asked: _Asked, answering: Answering, writer: ResponseWriter) -> None:
        finish = FinishReason.STOP
        async for _, step in self._generator.steps(answering, self.quiet_s):
            logprobs = await _logprobs(answering, step)
            due: list[Event] = []
            if step is QUIET or step.piece.text or step.piece.calls:
                due += writer.begin()
            due += writer.take(step.piece, logprobs)
            await events.send_named(*named(due))
            finish = step.finish or finish
        await events.send_named(*named([*writer.begin(), *writer.close(finish)]))
        response = await self._kept(asked, answering, writer, finish)
        await events.send_named(*named([writer.final(response)]))
        await events.end()

    async def _kept(
        self, asked: _Asked, answering: Answering, writer: ResponseWriter, finish: FinishReason
    ) -> ResponseObject:
        """The whole response, which is kept by then if it says so."""
        completed_at = int(self._generator.clock.wall_s())
        response = writer.response(finish, answering.usage(), completed_at, answering.extras([0]))
        if not response.store:
            return response
        row = StoredResponse(response.id, asked.owner, response.created_at, _encode(response), _encode(asked.items))
        if await self.kept.add(row):
            return response
        self._generator.log.warning("a response could not be kept", response_bytes=row.bytes)
        return msgspec.structs.replace(response, store=False)

    # -- What was answered -----------------------------------------------------------------------------------------

    async def retrieve(self, request: web.Request) -> web.Response:
        if request.query.get("stream", "false") != "false":
            raise RequestError("stream: only the answers of background requests are streamed again.", param="stream")
        row = await self.kept.get(known_id(request.match_info["id"]), request[OWNER])
        return web.Response(body=row.response, content_type="application/json")

    async def delete(self, request: web.Request) -> web.Response:
        response_id = known_id(request.match_info["id"])
        await self.kept.delete(response_id, request[OWNER])
        return web.Response(body=_encode(DeletedResponse(response_id)), content_type="application/json")

    async def input_items(self, request: web.Request) -> web.Response:
        """All that the response was made from, the responses before it included; newest first unless asked."""
        query = query_of(request, "limit", "order", "after", "include", "include[]")
        limit, order = limit_of(query, default=20, most=100), query.get("order", "desc")
        if order not in ("asc", "desc"):
            raise RequestError("order must be asc or desc.", param="order")
        items = await self.kept.items(known_id(request.match_info["id"]), request[OWNER])
        if order == "desc":
            items.reverse()
        if "after" in query:
            ids = [item.id for item in items]
            items = items[ids.index(query["after"]) + 1 :] if query["after"] in ids else []
        data = items[:limit]
        ends = (data[0].id, data[-1].id) if data else (None, None)
        page = InputItems("list", data, *ends, has_more=len(items) > limit)
        return web.Response(body=_encode(page), content_type="application/json")

    async def cancel(self, request: web.Request) -> web.Response:
        """Raises: a response that is kept has ended."""
        await self.kept.get(known_id(request.match_info["id"]), request[OWNER])
        raise RequestError("Only a response made in the background can be cancelled; background is not served here.")


async def _logprobs(answering: Answering, step: Step) -> bytes:
    """Of the step's tokens, as JSON without the list's brackets."""
    scores = await answering.scores(0, first=step.first)
    if not isinstance(scores, ChatScores):
        return b""
    await answering.write(scores, step.piece.scores)
    return scores.items()
