"""POST /v1/responses, and what was answered there: read again, deleted, gone on with.

A body becomes a chat (`responses_api_bodies.py`), `generator.py` answers it and `responses_api_events.py` writes the
response. `responses_archive.py` keeps it before its client reads its end, unless `store` is false: a later request can
go on from it. Called by aiohttp through `middleware.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec
from aiohttp import web

from cohort.common.errors import RequestError
from cohort.common.types import FinishReason
from cohort.services.gateway.apis.responses_api_bodies import (
    NAMES,
    InputItem,
    ResponsesBody,
    chat_of,
    items_of,
    switches_of,
    without_oldest,
)
from cohort.services.gateway.apis.responses_api_events import (
    Event,
    ResponseObject,
    ResponseWriter,
    failed_response,
    pending_response,
)
from cohort.services.gateway.apis.responses_api_store import StoredResponse
from cohort.services.gateway.apis.responses_archive import ResponseArchive
from cohort.services.gateway.generation.answer_parts import stable_id
from cohort.services.gateway.generation.answering import Answering, Step, Writer
from cohort.services.gateway.generation.choice import Piece
from cohort.services.gateway.generation.delta import StreamKind
from cohort.services.gateway.generation.generator import ApiRequest, BackgroundRequest, Body, Generator
from cohort.services.gateway.generation.openai_shapes import ChatScores
from cohort.services.gateway.http.error_shapes import renamed
from cohort.services.gateway.http.listing import known_id, limit_of, query_of
from cohort.services.gateway.http.request_bodies import Take, refuse_shape
from cohort.services.gateway.http.sse import named
from cohort.services.gateway.keys.middleware import OWNER, REQUEST_ID_HEADER
from cohort.services.gateway.requests.parsing import Call, check_model, decode

RESPONSES_PATH = "/v1/responses"
KEEPALIVE_S = 15.0
"""Time without events until a stream is opened: proxies and clients give up silent connections."""
_encode = msgspec.json.Encoder().encode
_decoder = msgspec.json.Decoder(ResponsesBody)
_items_decoder = msgspec.json.Decoder(list[InputItem])


class _Kept(msgspec.Struct):
    """Part of a kept response that decides how it is read again."""

    background: bool = False


_status = msgspec.json.Decoder(_Kept)


def response_id(base_id: str, created_s: float) -> str:
    """Return a response's id: the same on every gateway that writes it."""
    return f"resp_{stable_id(base_id, repr(created_s))}"


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


@dataclass(kw_only=True)
class _ResponsesRequest(BackgroundRequest):
    """Request with the items of its conversation, and the task that keeps its response."""

    api: ResponsesApi
    owner: str
    body: ResponsesBody
    items: list[InputItem]
    answer_stored: bool | None = None
    storing: asyncio.Task[bool] | None = None
    """Task that keeps the response, started by whoever reaches the end first."""

    def accepted(self, call: Call) -> None:
        """Drop what truncation has dropped from what is kept, and the texts of the body."""
        self.items = without_oldest(self.items, len(self.call.messages) - len(call.messages))
        self.body = msgspec.structs.replace(self.body, input="")
        super().accepted(call)

    def background_id(self, base_id: str, created_s: float) -> str:
        return response_id(base_id, created_s) if self.body.background else ""

    def pending(self, base_id: str, created_s: float) -> bytes:
        return _encode(self.pending_response(base_id, created_s))

    def pending_response(self, base_id: str, created_s: float) -> ResponseObject:
        sampling = self.call.sampling
        return pending_response(
            self.body,
            response_id=response_id(base_id, created_s),
            created_at=int(created_s),
            model=self.call.adapter or self.api.model,
            store=self.body.store is not False and self.api.archive.enabled,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
        )

    async def keep_failure(self, base_id: str, created_s: float, error: RequestError) -> None:
        failed = failed_response(self.pending_response(base_id, created_s), error)
        await self.api.store(self, failed)

    def parse_context(self) -> bytes:
        return _encode(self.items)

    def writer(self, answering: Answering) -> Writer:
        return _Events(self, answering)

    async def whole(self, answering: Answering) -> bytes:
        finish, writer = FinishReason.STOP, self.events(answering)
        async for _, step in answering.whole():
            for _event in writer.take(step.piece, await _logprobs(answering, step)):
                pass
            finish = step.finish or finish
        for _event in writer.close(finish):
            pass
        return _encode(await self.api.ended(self, answering, writer, finish))

    def events(self, answering: Answering) -> ResponseWriter:
        return ResponseWriter(self.pending_response(answering.base_id, answering.created_s))


class ResponsesApi:
    kind: StreamKind = "responses"
    chat = True
    id_headers: Sequence[str] = (REQUEST_ID_HEADER,)

    def __init__(self, generator: Generator, archive: ResponseArchive) -> None:
        self._generator = generator
        self.archive = archive
        self.model = generator.served.card.name
        self.keepalive_s: float | None = KEEPALIVE_S

    def routes(self) -> list[web.RouteDef]:
        one = RESPONSES_PATH + "/{id}"
        return [
            web.post(RESPONSES_PATH, self.create),
            web.get(one, self.retrieve),
            web.delete(one, self.delete),
            web.get(f"{one}/input_items", self.input_items),
            web.post(f"{one}/cancel", self.cancel),
        ]

    async def create(self, request: web.Request) -> web.StreamResponse:
        try:
            return await self._generator.serve(self, request)
        except RequestError as error:
            raise renamed(error, NAMES) from error

    async def read(self, sent: Body, headers: Mapping[str, str]) -> ApiRequest:
        """Parse a body; its context has the items as first read, as earlier responses may be gone."""
        parser, data, owner = self._generator.parser, sent.data, sent.caller.owner

        def again() -> _ResponsesRequest:
            body = decode(_decoder, data, parser.config)
            items = _items_decoder.decode(sent.parse_context)
            return _ResponsesRequest(self._call(body, items, headers), api=self, owner=owner, body=body, items=items)

        def read(data: bytes) -> tuple[ResponsesBody, list[InputItem]]:
            refuse_shape(data, parser.config, chat=True)
            body = decode(_decoder, data, parser.config)
            check_model(body.model, parser.served.card)
            return body, items_of(body)

        if sent.parse_context:
            return await asyncio.to_thread(again)
        body, own = await parser.read(data, read)
        if body.background:
            self._check_background(body)
        if body.store and not self.archive.enabled:
            raise RequestError("store: this server keeps no responses (responses.storage_bytes is 0).", param="store")
        before: list[InputItem] = []
        if body.previous_response_id is not None:
            before = await self.archive.conversation(known_id(body.previous_response_id), owner, sent.take)
        items = [*before, *own]

        def call(_: bytes = b"") -> Call:
            if before and body.truncation != "auto":
                self._refuse_too_long(items)
            return self._call(body, items, headers)

        made = await (asyncio.to_thread(call) if before else parser.read(data, call))
        return _ResponsesRequest(made, api=self, owner=owner, body=body, items=items)

    def _check_background(self, body: ResponsesBody) -> None:
        if body.store is False or not self.archive.enabled:
            why = "store is false" if body.store is False else "responses.storage_bytes is 0"
            raise RequestError(f"background: nobody could read the answer, as {why}.", param="background")
        if not self._generator.config.resume_s:
            raise RequestError("background: this server keeps no streams (gateway.resume_s is 0).", param="background")

    def _refuse_too_long(self, items: list[InputItem]) -> None:
        most = self._generator.config.max_body_bytes
        if (size := len(_encode(items))) > most:
            raise RequestError(
                f"previous_response_id: its conversation and this input are {size} bytes of JSON, but {most} may be "
                'kept (gateway.max_body_bytes). Begin a new one, or drop its oldest turns by truncation: "auto".',
                param="previous_response_id",
            )

    def _call(self, body: ResponsesBody, items: list[InputItem], headers: Mapping[str, str]) -> Call:
        call = self._generator.parser.chat_call(chat_of(body, items), headers, switches_of(body))
        return msgspec.structs.replace(call, truncates=body.truncation == "auto")

    async def ended(
        self, api_request: _ResponsesRequest, answering: Answering, writer: ResponseWriter, finish: FinishReason
    ) -> ResponseObject:
        """Return the whole response, stored by then if that is requested."""
        api_request.completed_at = api_request.completed_at or int(self._generator.context.clock.wall_s())
        response = writer.response(finish, answering.usage(), api_request.completed_at, answering.extras([0]))
        if api_request.answer_stored is None:
            if api_request.storing is None:
                api_request.storing = asyncio.create_task(self.store(api_request, response), name="keep a response")
            api_request.answer_stored = await asyncio.shield(api_request.storing)
        return response if api_request.answer_stored else msgspec.structs.replace(response, store=False)

    async def store(self, api_request: _ResponsesRequest, response: ResponseObject) -> bool:
        """Keep a response that has ended. Return whether it is kept."""
        if not response.store:
            return False
        items = [(item.id or "", _encode(item)) for item in api_request.items]
        row = StoredResponse(response.id, api_request.owner, response.created_at, _encode(response), items)
        fits = sum(len(data) for _, data in items) <= self._generator.config.max_body_bytes
        try:
            if fits and await self.archive.add(row):
                return True
        except Exception:  # a defect of ours: the answer is there all the same
            self._generator.context.log.exception("a response could not be kept")
            return False
        self._generator.context.log.warning("a response could not be kept", response_bytes=row.bytes)
        return False

    async def retrieve(self, request: web.Request) -> web.StreamResponse:
        """Return a response: as it ended, or as far as one in the background is."""
        response_id, owner = known_id(request.match_info["id"]), request[OWNER]
        with self._generator.bodies.holding() as take:
            answer = await self._find(response_id, owner, take)
            if request.query.get("stream", "false") == "false":
                return web.Response(body=answer, content_type="application/json")
        if self._generator.resumable is None or not _status.decode(answer).background:
            raise RequestError("stream: only the answers of background requests are streamed again.", param="stream")
        after = request.query.get("starting_after", "")
        return await self._generator.resumable.follow(request, response_id, after)

    async def _find(self, response_id: str, owner: str, take: Take) -> bytes:
        """Return a response. Raises a 404 `RequestError`."""
        try:
            return await self.archive.answer(response_id, owner, take)
        except RequestError as error:
            if error.status != 404:
                raise
            if (found := await self._pending(response_id, owner)) is not None:
                return _encode(found[1])
        return await self.archive.answer(response_id, owner, take)  # it may have ended in between

    async def _pending(self, response_id: str, owner: str) -> tuple[_ResponsesRequest, ResponseObject] | None:
        """Return the request of a response in the background, and the response before its end."""
        streams = self._generator.resumable
        found = None if streams is None else await streams.find_background(response_id, owner)
        if found is None:
            return None
        api_request, base_id, created_s = found
        assert isinstance(api_request, _ResponsesRequest), api_request
        return api_request, api_request.pending_response(base_id, created_s)

    async def delete(self, request: web.Request) -> web.Response:
        response_id = known_id(request.match_info["id"])
        await self.archive.delete(response_id, request[OWNER])
        return web.Response(body=_encode(DeletedResponse(response_id)), content_type="application/json")

    async def input_items(self, request: web.Request) -> web.Response:
        """Return all that the response was made from, earlier responses included; newest first by default."""
        query = query_of(request, "limit", "order", "after", "include", "include[]")
        limit, order = limit_of(query, default=20, most=100), query.get("order", "desc")
        if order not in ("asc", "desc"):
            raise RequestError("order must be asc or desc.", param="order")
        with self._generator.bodies.holding() as take:
            data, more = await self.archive.items(
                known_id(request.match_info["id"]),
                request[OWNER],
                take,
                limit=limit,
                after=query.get("after"),
                newest_first=order == "desc",
            )
            ends = (data[0].id, data[-1].id) if data else (None, None)
            body = _encode(InputItems("list", data, *ends, has_more=more))
        return web.Response(body=body, content_type="application/json")

    async def cancel(self, request: web.Request) -> web.Response:
        """End a response in the background. One that has ended is returned as it is."""
        response_id, owner = known_id(request.match_info["id"]), request[OWNER]
        streams, found = self._generator.resumable, await self._pending(response_id, owner)
        if streams is None or found is None:
            with self._generator.bodies.holding() as take:
                answer = await self.archive.answer(response_id, owner, take)
            if not _status.decode(answer).background:
                raise RequestError("Only a response made in the background can be cancelled.")
        else:
            api_request, pending = found
            cancelled = msgspec.structs.replace(pending, status="cancelled")
            await self.store(api_request, cancelled)
            await streams.cancel_stream(response_id, owner)
            answer = _encode(cancelled)
        return web.Response(body=answer, content_type="application/json")


class _Events:
    """Events of one answer. The end of its item comes with its last piece, before it is kept."""

    at_once = True

    def __init__(self, api_request: _ResponsesRequest, answering: Answering) -> None:
        self._api_request = api_request
        self._answering = answering
        self._writer = api_request.events(answering)
        self._finish = FinishReason.STOP

    def plain(self, index: int, text: str) -> bytes:
        return b"".join(_framed(self._writer.take(Piece(text, (), stopped=False))))

    async def take(self, index: int, step: Step) -> list[bytes]:
        writer, logprobs = self._writer, await _logprobs(self._answering, step)
        if step.finish is None:
            opening = writer.begin() if step.piece.in_order else ()
            return _framed([*opening, *writer.take(step.piece, logprobs)])
        self._finish = step.finish
        return _framed([*writer.begin(), *writer.take(step.piece, logprobs), *writer.close(step.finish)])

    def keepalive(self) -> list[bytes]:
        return _framed(self._writer.begin())

    async def end(self) -> list[bytes]:
        """End the stream. The response is kept even if its client left: it may come back for it."""
        response = await self._api_request.api.ended(self._api_request, self._answering, self._writer, self._finish)
        return _framed([self._writer.final(response)])

    def failed(self, error: RequestError) -> list[bytes]:
        return _framed([self._writer.failed(error)])


def _framed(events: Iterable[Event]) -> list[bytes]:
    """Encode events, named in the stream by their types."""
    return [named(event.type, event) for event in events]


async def _logprobs(answering: Answering, step: Step) -> bytes:
    """Return the log-probabilities of the step's tokens, as JSON without the list's brackets."""
    scores = await answering.scores(0, first=step.first)
    if not isinstance(scores, ChatScores):
        return b""
    await answering.write(scores, step.piece.scores)
    return scores.items()
