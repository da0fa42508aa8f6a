"""From a body to an answer in progress, whichever API it came by: the one way into the cluster.

    read body ─▶ parse ─▶ tokenise ─▶ prepare ─▶ offer ─▶ outlet ─▶ events, or one whole answer

The APIs read their bodies to a `Call` and format answers; all between is here. Every exit abandons what is still open,
so a client that disconnects frees its blocks on every worker.
"""

from __future__ import annotations

import dataclasses
import re
import secrets
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import msgspec
import structlog
from aiohttp import web

from cohort.common.clock import Clock
from cohort.common.config import GatewayConfig
from cohort.common.errors import RequestError
from cohort.common.machines.events import Offered
from cohort.common.process.metrics import RequestMetrics
from cohort.common.types import InstanceId, Request
from cohort.services.gateway.generation.answering import Answering, Outlet, Writer
from cohort.services.gateway.generation.choice import Choice, StopAutomaton
from cohort.services.gateway.generation.delta import Caller, GatewayTimes, Generation, Kind, Taker
from cohort.services.gateway.generation.openai_shapes import ChatShape, CompletionShape, Shape
from cohort.services.gateway.generation.preparation import Price, RequestBudget, Reservation, output_limits, prepare
from cohort.services.gateway.generation.request_trace import TRACE
from cohort.services.gateway.generation.streams import Streams
from cohort.services.gateway.generation.tool_calls import ToolReader, stable_id
from cohort.services.gateway.http.request_bodies import RequestBodies
from cohort.services.gateway.http.service_headers import RESUME_HEADER
from cohort.services.gateway.http.sse import EventStream, Outbox
from cohort.services.gateway.keys.key_lease import LEASE, Lease
from cohort.services.gateway.keys.middleware import HTTP_ID, OWNER, REQUEST_ID_HEADER
from cohort.services.gateway.keys.owners import Owners
from cohort.services.gateway.requests.model_card import Served
from cohort.services.gateway.requests.parsing import Call, Reader
from cohort.services.gateway.text.grammar_process import GrammarCompiler
from cohort.services.gateway.text.tokenizer import TokenText, latest_turns

# Request ids of clients that may become part of ours (they travel through logs and file names).
_PLAIN_ID = re.compile(r"[A-Za-z0-9._:-]{1,64}")


@dataclass(frozen=True, slots=True)
class GatewayHost:
    instance: InstanceId
    clock: Clock
    metrics: RequestMetrics
    log: structlog.stdlib.BoundLogger


@dataclass(frozen=True, slots=True)
class Body:
    """Body of a request, which counts as in flight, and its sender."""

    data: bytes
    caller: Caller


@dataclass
class ApiRequest(ABC):
    """Request of one API, and how that API formats the answer."""

    call: Call
    completed_at: int = 0
    """Unix time of the end, for answers that state it."""
    stored: bool | None = False
    """Whether the answer was kept for later; None until its end."""

    @abstractmethod
    def writer(self, answering: Answering) -> Writer:
        """Return the writer of all its events. Called once."""

    @abstractmethod
    async def whole(self, answering: Answering) -> bytes:
        """Return the whole answer as JSON. Raises the `RequestError` that it failed with."""

    def extra(self) -> bytes:
        """Return what `Endpoint.read` needs to read the same request again, besides its body."""
        return b""


class Endpoint(Protocol):
    kind: Kind
    chat: bool
    quiet_s: float | None
    """Time without events after which a stream shows that it is alive."""
    id_headers: Sequence[str]
    """Headers of a stream that carry the request's id."""

    async def read(self, data: bytes, headers: Mapping[str, str], owner: str, extra: bytes = b"") -> ApiRequest:
        """Parse a body; `extra` belongs to a request that is read again. Raises a 4xx `RequestError`."""


class ResumableStreams(Protocol):
    """Server of streams that outlive their connection."""

    async def serve(self, endpoint: Endpoint, request: web.Request) -> web.StreamResponse: ...


class Generator:
    def __init__(
        self, config: GatewayConfig, served: Served, host: GatewayHost, streams: Streams, owners: Owners
    ) -> None:
        self.config = config
        self.host = host
        self.streams = streams
        self.owners = owners
        self.served = served
        self.reader = Reader(config, served)
        self.bodies = RequestBodies(config)
        self.budget = RequestBudget(config, served.tokenizer.longest_token)
        self._tokenizer = tokenizer = served.tokenizer
        self._text = TokenText(tokenizer)
        self._grammars = GrammarCompiler(tokenizer.to_json(), served.card.eos_token_ids)
        self.completion = CompletionShape(self._text)
        self.chat = ChatShape(self._text)
        self._outbox = Outbox()
        self.resumable: ResumableStreams | None = None
        """Maker of resumable streams; set by `service.py`."""

    async def serve(self, endpoint: Endpoint, request: web.Request) -> web.StreamResponse:
        """Answer an HTTP request. Raises `RequestError` only while nothing was sent."""
        if self.resumable is not None and RESUME_HEADER in request.headers:
            return await self.resumable.serve(endpoint, request)
        asked, answering = await self._accepted(endpoint, request)
        try:
            if answering.call.stream:
                events = self.stream_to(endpoint, request)
                writer = asked.writer(answering)
                sending = answering.outlet.run(answering, writer, events, endpoint.quiet_s)
                return await events.carry(sending, writer.failed)
            return web.Response(body=await asked.whole(answering), content_type="application/json")
        finally:
            self.release(answering)

    async def _accepted(self, endpoint: Endpoint, request: web.Request) -> tuple[ApiRequest, Answering]:
        async with self.arriving(request) as body:
            asked = await endpoint.read(body.data, request.headers, body.caller.owner)
            answering = await self.begin(asked.call, len(body.data), body.caller)
        return asked, answering

    def stream_to(
        self, endpoint: Endpoint, request: web.Request, headers: Mapping[str, str] | None = None
    ) -> EventStream:
        return EventStream(
            request,
            {**dict.fromkeys(endpoint.id_headers, request[HTTP_ID]), **(headers or {})},
            self._outbox,
            write_timeout_s=self.config.write_timeout_s,
            log=self.host.log,
        )

    @asynccontextmanager
    async def arriving(self, request: web.Request) -> AsyncIterator[Body]:
        """Read the body, in flight until the block ends. Raises a `RequestError`, and counts those of the block."""
        arrived_s, owner, http_id = self.host.clock.now_s(), request[OWNER], request[HTTP_ID]
        try:
            self.streams.check(request.content_length or 0, self.config.default_class, self.owners.share_of(owner))
            async with self.bodies.reading(request) as data:
                own = request.headers.get(REQUEST_ID_HEADER) == http_id and _PLAIN_ID.fullmatch(http_id)
                named = http_id if own else ""
                caller = Caller(owner, named, arrived_s, lease=request.get(LEASE), trace=request.get(TRACE))
                yield Body(data, caller)
        except RequestError as error:
            self._count_rejection(error)
            raise

    async def count(self, call: Call) -> int:
        """Count the tokens of a chat's prompt. Raises `RequestError` for more than any request may have."""
        [tokens] = await self._tokenize(call, self.config.max_request_work)
        return len(tokens)

    def release(self, answering: Answering, reason: str = "the client went away") -> None:
        """Cancel what is open and release its work. Harmless after a complete answer."""
        self.streams.abandon(answering.generation, reason)
        answering.reserved.release()

    async def begin(self, call: Call, body_bytes: int, caller: Caller, taker: Taker | None = None) -> Answering:
        """Tokenise a call and offer its requests; the answer must be released. Tokens go to `taker`, if given, in place
        of the answer's outlet. Raises `RequestError`."""
        self.budget.check(call)
        clock, card = self.host.clock, self.served.card
        limited, sampling = call.max_tokens is not None, call.sampling
        if call.grammar_spec is not None:
            sampling = msgspec.structs.replace(sampling, grammar=await self._grammars.compile(call.grammar_spec))
        priority = self.owners.priority(call.priority) + caller.behind
        call = dataclasses.replace(call, priority=priority, sampling=sampling)
        times = GatewayTimes(
            caller.arrived_s, trace=caller.trace, judged=caller.lease.on_judged if caller.lease else None
        )
        began_s = clock.now_s()
        prompts = await self._tokenize(call, self.served.max_model_len())
        times.tokenize_s = clock.now_s() - began_s
        lengths = [len(prompt) for prompt in prompts]
        max_tokens_of = output_limits(call, lengths, self.config, self.served.max_model_len(), card.sampling.max_tokens)
        price = self._charged(call, lengths, max_tokens_of, caller.lease)
        base_id = uuid.uuid4().hex[:20]
        if caller.named:
            base_id = f"{caller.named}-{base_id[:8]}"  # unique though a client may repeat its ids
        created_s = clock.wall_s()
        requests = prepare(
            call,
            prompts,
            base_id=base_id,
            gateway=self.host.instance,
            arrival_s=created_s,
            seed=secrets.randbits(63) if call.seed is None else call.seed,
            card=card,
            max_tokens_of=max_tokens_of,
        )
        requests = self.owners.marked(requests, caller.owner, max_tokens_named=limited)
        if times.trace is not None:
            requests = times.trace.prepared(requests, times.arrived_s, began_s, times.tokenize_s)
        outlet, reserved = Outlet(), self.budget.reserve(price)
        try:
            generation = self.streams.offer(
                Offered(
                    base_id,
                    requests,
                    choices_per_prompt=call.n,
                    chat=call.chat,
                    text_bytes=body_bytes,
                    stop_strings=len(call.stop_strings),
                    owner=self.owners.share_of(caller.owner),
                    max_tokens_named=limited,
                ),
                times,
                taker or outlet,
            )
        except BaseException:
            reserved.release()
            raise
        if times.trace is not None:
            times.trace.admitted(generation.entries)
        answering = self.unrendered(call, requests, generation, base_id, created_s, reserved)
        answering.outlet = outlet
        if caller.lease is not None:
            caller.lease.add_usage_source(answering.used)
        self.host.log.debug("accepted", request_ids=generation.request_ids)
        return answering

    def reserve_budget(self, call: Call, requests: Sequence[Request], lease: Lease | None) -> Reservation:
        """Reserve the gateway's memory for requests of `prepare`, and tokens of the API key's rate limit. Raises a 4xx
        `RequestError`, `KeyLimited` among these."""
        one_per_prompt = requests[:: call.n]
        lengths = [request.prompt_tokens for request in one_per_prompt]
        max_tokens_of = [request.sampling.max_tokens for request in one_per_prompt]
        return self.budget.reserve(self._charged(call, lengths, max_tokens_of, lease))

    def _charged(self, call: Call, lengths: Sequence[int], max_tokens_of: Sequence[int], lease: Lease | None) -> Price:
        """Return the price, with the key's tokens reserved. Raises as `own_budget`."""
        price = self.budget.price(call, lengths, max_tokens_of)
        if lease is not None:
            unnamed = call.max_tokens is None
            longest = self.config.default_prediction_tokens if unnamed else max(max_tokens_of)
            expected = call.n * sum(min(longest, most) for most in max_tokens_of)
            lease.reserve(call.traffic_class, sum(lengths), expected)
        return price

    def unrendered(
        self,
        call: Call,
        requests: Sequence[Request],
        generation: Generation,
        base_id: str,
        created_s: float,
        reserved: Reservation,
    ) -> Answering:
        """Return the answer to a generation, with nothing rendered yet; `requests` come from `prepare`."""
        # One per prompt, to which its choices refer.
        echoes = [self._echo(call, which, each.tokens) for which, each in enumerate(requests[:: call.n])]
        stops = StopAutomaton(call.stop_strings)
        shape: Shape = self.chat if call.chat else self.completion
        return Answering(
            call,
            generation,
            shape,
            self._text,
            choices=[self._choice(call, item, stops) for item in requests],
            echoes=[echo for echo in echoes for _ in range(call.n)],
            base_id=base_id,
            id=shape.id_prefix + base_id,
            created=int(created_s),
            created_s=created_s,
            stop=partial(self.streams.stop, generation),
            model=call.adapter or self.served.card.name,
            reserved=reserved,
            singly=call.tools is not None and not call.tools.parallel,
            readers=_tool_readers(call, len(requests), base_id, created_s),
        )

    def _choice(self, call: Call, request: Request, stops: StopAutomaton) -> Choice:
        detokenizer = self._text.stream(
            context=() if call.chat else request.tokens[-16:],
            skip_special=call.skip_special_tokens,
            kept=call.tools.format.mark_ids if call.tools is not None else frozenset(),
        )
        return Choice(detokenizer, stops, min_tokens=call.min_tokens, scored=call.sampling.logprobs >= 0)

    async def _tokenize(self, call: Call, limit: int) -> list[list[int]]:
        try:
            if call.chat:
                return [await self._tokenize_chat(call, limit)]
            texts = [prompt for prompt in call.prompts if isinstance(prompt, str)]
            encoded = iter(
                await self._tokenizer.encode_soon(texts, special_tokens=call.add_special_tokens, limit=limit)
            )
            return [next(encoded) if isinstance(prompt, str) else prompt for prompt in call.prompts]
        except UnicodeEncodeError as error:
            raise RequestError(
                "The prompt contains half of a surrogate pair, which is no character.",
                param="messages" if call.chat else "prompt",
            ) from error

    async def _tokenize_chat(self, call: Call, limit: int) -> list[int]:
        async def encode(messages: Sequence[Mapping[str, Any]]) -> list[int]:
            return await self._tokenizer.encode_chat(
                messages,
                add_generation_prompt=call.add_generation_prompt,
                variables=call.template_variables,
                limit=limit,
            )

        if not call.truncates:
            return await encode(call.messages)
        return await latest_turns(call.messages, limit - (call.max_tokens or 1), encode)

    def _echo(self, call: Call, which: int, tokens: list[int]) -> str:
        if not call.echo:
            return ""
        prompt = call.prompts[which]
        return (
            prompt if isinstance(prompt, str) else self._tokenizer.decode(tokens, skip_special=call.skip_special_tokens)
        )

    def _count_rejection(self, error: RequestError) -> None:
        self.streams.stats.recent.rejected()
        reason = {429: "busy", 503: "draining"}.get(error.status, "invalid")
        self.host.metrics.rejections(self.config.default_class, str(error.status), reason).inc()


def _tool_readers(call: Call, count: int, base_id: str, created_s: float) -> list[ToolReader]:
    tools = call.tools
    if tools is None:
        return []
    ids = stable_id(base_id, repr(created_s))
    return [ToolReader(tools.format, parallel=tools.parallel, ids=f"{ids}-{index}") for index in range(count)]
