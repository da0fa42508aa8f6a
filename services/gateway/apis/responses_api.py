"""POST /v1/responses, and what was answered there: read again, deleted, gone on with.

The rendering alone: a body becomes the chat that it says (`responses_api_bodies.py`), `generator.py` answers it, and
what comes is written as a response (`responses_api_events.py`). Answers are kept (`responses_api_kept.py`) unless
`store` is false: one that its client knows to be complete can be gone on with. Called by aiohttp through
`middleware.py`.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec
from aiohttp import web

from cohort.common.errors import RequestError
from cohort.common.types import FinishReason
from cohort.services.gateway.apis.responses_api_bodies import NAMES, InputItem, ResponsesBody, chat_of, items_of
from cohort.services.gateway.apis.responses_api_events import (
    Event,
    ResponseObject,
    ResponseWriter,
    asked_response,
    named,
)
from cohort.services.gateway.apis.responses_api_kept import KeptResponses
from cohort.services.gateway.apis.responses_api_store import StoredResponse
from cohort.services.gateway.generation.answering import Answering, Step
from cohort.services.gateway.generation.generator import QUIET, Generator
from cohort.services.gateway.generation.openai_shapes import ChatScores
from cohort.services.gateway.http.error_shapes import renamed
from cohort.services.gateway.http.listing import known_id, limit_of, query_of
from cohort.services.gateway.http.request_bodies import refuse_shape
from cohort.services.gateway.http.sse import EventStream
from cohort.services.gateway.keys.middleware import HTTP_ID, OWNER, REQUEST_ID_HEADER
from cohort.services.gateway.requests.parsing import Call, check_model, decode
from cohort.services.gateway.resume.resume_forms import Form, NamedEvents, NamedForm
from cohort.services.gateway.resume.resume_store import Ending, StreamRecord
from cohort.services.gateway.resume.resume_tape import Tape

if TYPE_CHECKING:
    from cohort.services.gateway.resume.resumption import Resumption

RESPONSES_PATH = "/v1/responses"
QUIET_S = 15.0
"""A stream for which nothing came for so long is opened: proxies and clients give up silent connections."""
_encode = msgspec.json.Encoder().encode
_decoder = msgspec.json.Decoder(ResponsesBody)
_items_decoder = msgspec.json.Decoder(list[InputItem])


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
    """One request: its body once it is read, the items of its conversation, and what became of its response."""

    owner: str
    body: ResponsesBody | None = None
    items: list[InputItem] = field(default_factory=list)
    encoded_items: bytes = b""
    """As JSON, once it was needed."""
    completed_at: int = 0
    kept: bool | None = None
    """None: it is not complete yet."""
    keeping: asyncio.Task[bool] | None = None
    """Whoever is at the end first has it kept."""

    def items_json(self) -> bytes:
        if not self.encoded_items:
            self.encoded_items = _encode(self.items)
        return self.encoded_items


class _Form(NamedForm):
    """A stream that was not kept before its client left is kept all the same: the client may come back for its end."""

    def __init__(self, api: ResponsesApi, asked: _Asked) -> None:
        super().__init__("responses", lambda answering: _Rendering(api, asked, answering))
        self._asked = asked

    def beside(self) -> bytes:
        return self._asked.items_json()

    def complete(self, answering: Answering) -> bool:
        return super().complete(answering) and self._asked.kept is not None

    def ending(self, cached_tokens: list[int], error: RequestError | None) -> Ending:
        ending = super().ending(cached_tokens, error)
        return msgspec.structs.replace(ending, completed_at=self._asked.completed_at, kept=bool(self._asked.kept))


class ResponsesApi:
    def __init__(self, generator: Generator, kept: KeptResponses) -> None:
        self._generator = generator
        self.kept = kept
        self.resumption: Resumption | None = None
        """Set by `service.py`."""
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
        generator, resumption = self._generator, self.resumption
        try:
            async with generator.arriving(request) as body:
                call = await self._parse(body.data, body.headers, asked)
                tape = None if resumption is None else resumption.tape(body.headers, call, body.data)
                answering = await generator.begin(call, len(body.data), body.caller, tape)
            mailbox = answering.generation.mailbox
            if resumption is not None and isinstance(mailbox, Tape):
                return await resumption.begin(request, answering, mailbox, _Form(self, asked))
            try:
                if answering.call.stream:
                    return await self._stream(request, asked, answering)
                response = await self._whole(asked, answering)
                return web.Response(body=_encode(response), content_type="application/json")
            finally:
                generator.release(answering)
        except RequestError as error:
            raise renamed(error, NAMES) from error

    async def restored(self, record: StreamRecord, owner: str, ending: Ending | None) -> tuple[Call, Form]:
        """For `resumption.py`. The items are those that were written down: the responses before may be gone."""
        asked = _Asked(owner, encoded_items=record.beside)
        if ending is not None:
            asked.completed_at, asked.kept = ending.completed_at, ending.kept

        def read() -> Call:
            asked.body = _decoder.decode(record.body)
            return self._call(asked.body, _items_decoder.decode(record.beside), record.headers)

        return await asyncio.to_thread(read), _Form(self, asked)

    async def _parse(self, data: bytes, headers: Mapping[str, str], asked: _Asked) -> Call:
        reader = self._generator.reader

        def read(data: bytes) -> tuple[ResponsesBody, list[InputItem]]:
            refuse_shape(data, reader.config, chat=True)
            body = decode(_decoder, data)
            check_model(body.model, reader.served.card)
            return body, items_of(body)

        body, own = await reader.read(data, read, chat=True)
        if body.store and not self.kept.keeps:
            raise RequestError("store: this server keeps no responses (responses.max_responses is 0).", param="store")
        before: list[InputItem] = []
        if body.previous_response_id is not None:
            before = await self.kept.conversation(known_id(body.previous_response_id), asked.owner)
        items = [*before, *own]
        asked.body, asked.items = body, items

        def call(_: bytes = b"") -> Call:
            return self._call(body, items, headers)

        return await (asyncio.to_thread(call) if before else reader.read(data, call, chat=True))

    def _call(self, body: ResponsesBody, items: list[InputItem], headers: Mapping[str, str]) -> Call:
        call = self._generator.reader.chat_call(chat_of(body, items), headers)
        return dataclasses.replace(call, truncates=body.truncation == "auto")

    def _keeps(self, body: ResponsesBody) -> bool:
        return body.store is not False and self.kept.keeps

    def writer(self, asked: _Asked, answering: Answering) -> ResponseWriter:
        assert asked.body is not None, "an answer in progress has a body"
        sampling = answering.call.sampling
        return ResponseWriter(
            asked_response(
                asked.body,
                response_id=f"resp_{answering.unique_id()}",
                created_at=answering.created,
                model=answering.model,
                store=self._keeps(asked.body),
                temperature=sampling.temperature,
                top_p=sampling.top_p,
            )
        )

    async def _whole(self, asked: _Asked, answering: Answering) -> ResponseObject:
        finish, writer = FinishReason.STOP, self.writer(asked, answering)
        async for _, step in self._generator.steps(answering):
            for _event in writer.take(step.piece, await _logprobs(answering, step)):
                pass
            finish = step.finish or finish
        for _event in writer.close(finish):
            pass
        return await self.ended(asked, answering, writer, finish)

    async def _stream(self, request: web.Request, asked: _Asked, answering: Answering) -> web.StreamResponse:
        events = EventStream(
            request,
            {REQUEST_ID_HEADER: request[HTTP_ID]},
            write_timeout_s=self._generator.config.write_timeout_s,
            log=self._generator.host.log,
        )
        rendering = _Rendering(self, asked, answering)
        return await events.carry(rendering.send(events), lambda error: rendering.fail(events, error))

    def steps(self, answering: Answering) -> AsyncIterator[tuple[int, Step]]:
        return self._generator.steps(answering, self.quiet_s)

    async def ended(
        self, asked: _Asked, answering: Answering, writer: ResponseWriter, finish: FinishReason
    ) -> ResponseObject:
        """The whole response, which is kept by then if it says so."""
        asked.completed_at = asked.completed_at or int(self._generator.host.clock.wall_s())
        response = writer.response(finish, answering.usage(), asked.completed_at, answering.extras([0]))
        if asked.kept is None:
            if asked.keeping is None:
                asked.keeping = asyncio.create_task(self._keep(asked, response), name="keep a response")
            asked.kept = await asyncio.shield(asked.keeping)
        return response if asked.kept else msgspec.structs.replace(response, store=False)

    async def _keep(self, asked: _Asked, response: ResponseObject) -> bool:
        if not response.store:
            return False
        row = StoredResponse(response.id, asked.owner, response.created_at, _encode(response), asked.items_json())
        try:
            if await self.kept.add(row):
                return True
        except Exception:  # a defect of ours: the answer is there all the same
            self._generator.host.log.exception("a response could not be kept")
            return False
        self._generator.host.log.warning("a response could not be kept", response_bytes=row.bytes)
        return False

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


class _Rendering:
    """One answer's events, once."""

    def __init__(self, api: ResponsesApi, asked: _Asked, answering: Answering) -> None:
        self._api = api
        self._asked = asked
        self._answering = answering
        self._writer = api.writer(asked, answering)

    async def send(self, events: NamedEvents) -> None:
        finish, answering, writer = FinishReason.STOP, self._answering, self._writer
        async for _, step in self._api.steps(answering):
            logprobs = await _logprobs(answering, step)
            due: list[Event] = []
            if step is QUIET or step.piece.text or step.piece.calls:
                due += writer.begin()
            due += writer.take(step.piece, logprobs)
            await events.send_named(*named(due))
            finish = step.finish or finish
        await events.send_named(*named([*writer.begin(), *writer.close(finish)]))
        response = await self._api.ended(self._asked, answering, writer, finish)
        await events.send_named(*named([writer.final(response)]))
        await events.end()

    async def fail(self, events: NamedEvents, error: RequestError) -> None:
        await events.send_named(*named([self._writer.failed(error)]))
        await events.end()


async def _logprobs(answering: Answering, step: Step) -> bytes:
    """Of the step's tokens, as JSON without the list's brackets."""
    scores = await answering.scores(0, first=step.first)
    if not isinstance(scores, ChatScores):
        return b""
    await answering.write(scores, step.piece.scores)
    return scores.items()
