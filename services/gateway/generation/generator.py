"""Turns HTTP bodies of all APIs into submitted requests and their answers: all generation enters the cluster here.

    read body ─▶ parse ─▶ tokenise ─▶ prepare ─▶ offer ─▶ outlet ─▶ events, or one whole answer

To offer is to submit to admission, which may refuse; an outlet is the queue of an answer's tokens. Each API parses its
body into a `Call` and formats the answer; everything between is here. A client's disconnect aborts its unfinished
requests, which frees their KV blocks on all workers; those of a resumable stream go on for `resume_s`.
"""

from __future__ import annotations

import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
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
from cohort.common.types import InstanceId, Request, SamplingParams
from cohort.services.gateway.generation.answer_parts import stable_id
from cohort.services.gateway.generation.answer_reader import AnswerReader
from cohort.services.gateway.generation.answering import Answering, Outlet, Writer
from cohort.services.gateway.generation.choice import Choice, StopAutomaton
from cohort.services.gateway.generation.delta import Caller, GatewayTimes, Generation, StreamKind, TokenSink
from cohort.services.gateway.generation.openai_shapes import ChatShape, CompletionShape, Shape
from cohort.services.gateway.generation.preparation import RequestBudget, Reservation, output_limits, prepare
from cohort.services.gateway.generation.request_trace import TRACE
from cohort.services.gateway.generation.streams import Streams
from cohort.services.gateway.http.ignored_fields import IgnoredFields
from cohort.services.gateway.http.request_bodies import RequestBodies, Take
from cohort.services.gateway.http.service_headers import RESUME_HEADER
from cohort.services.gateway.http.sse import EventStream, Outbox
from cohort.services.gateway.keys.key_lease import LEASE, Lease
from cohort.services.gateway.keys.middleware import HTTP_ID, OWNER, REQUEST_ID_HEADER
from cohort.services.gateway.keys.owners import Owners
from cohort.services.gateway.requests.model_card import Served
from cohort.services.gateway.requests.parsing import Call, RequestParser
from cohort.services.gateway.text.grammar_process import GrammarCompiler
from cohort.services.gateway.text.tokenizer import TokenText, latest_turns

# A client's request id becomes a part of ours only if it matches: ours travel through logs and file names.
_PLAIN_ID = re.compile(r"[A-Za-z0-9._:-]{1,64}")


MARK_TOKENS = 16
"""Tokens of a prompt's end in which a mark of reasoning is looked for."""


@dataclass(frozen=True, slots=True)
class GatewayContext:
    instance: InstanceId
    clock: Clock
    metrics: RequestMetrics
    log: structlog.stdlib.BoundLogger


@dataclass(frozen=True, slots=True)
class Body:
    """Body of an HTTP request, whose bytes count as in flight (`request_bodies.py`), and its sender. `take` counts what
    is read beside it; `parse_context`, as `ApiRequest` gave it, is for a body that is parsed again."""

    data: bytes
    caller: Caller
    take: Take = lambda _: None
    parse_context: bytes = b""


@dataclass
class ApiRequest(ABC):
    """Parsed request of one API, with the formatters of its answer."""

    call: Call
    completed_at: int = 0
    """Unix time of the end, for APIs whose answers have it."""
    answer_stored: bool | None = False
    """True: the API has stored the answer (Responses `store`). False: it has not, and never will. None: the answer has
    not ended, or the API is still storing it."""

    @abstractmethod
    def writer(self, answering: Answering) -> Writer:
        """Return the formatter of the answer's events. Called once for each `Answering`."""

    @abstractmethod
    async def whole(self, answering: Answering) -> bytes:
        """Return the whole answer as JSON. Raises the `RequestError` with which a choice failed."""

    def accepted(self, call: Call) -> None:
        """Replace the call by the one that was offered, which may have lost its oldest turns."""
        self.call = call

    def background_id(self, base_id: str, created_s: float) -> str:
        """Return the id of an answer that is generated whether its client waits or not; "" for any other."""
        return ""

    def parse_context(self) -> bytes:
        """Return data that `Endpoint.read` needs beside the body to parse the request again after a resume."""
        return b""


class BackgroundRequest(ApiRequest):
    """Request of an API that has answers in the background."""

    @abstractmethod
    def pending(self, base_id: str, created_s: float) -> bytes:
        """Return the answer before its end, as JSON."""

    @abstractmethod
    async def keep_failure(self, base_id: str, created_s: float, error: RequestError) -> None:
        """Keep the end of an answer that failed, for its client to find."""


class Endpoint(Protocol):
    kind: StreamKind
    """Format of its streams' events, and so of the `Last-Event-ID` with which a client resumes one."""
    chat: bool
    keepalive_s: float | None
    """Idle time after which a stream sends a keep-alive event; None = never."""
    id_headers: Sequence[str]
    """Headers of a stream that carry the request's id."""

    async def read(self, body: Body, headers: Mapping[str, str]) -> ApiRequest:
        """Parse a body. Raises a 4xx `RequestError`."""


class ResumableStreams(Protocol):
    """Server of resumable streams, and of answers in the background (`resumption.py`)."""

    async def serve(self, endpoint: Endpoint, request: web.Request) -> web.StreamResponse: ...

    async def begin_background(
        self, endpoint: Endpoint, headers: Mapping[str, str], body: Body, api_request: BackgroundRequest
    ) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        """Begin an answer; return what answers its request, once the body is no longer in flight."""

    async def find_background(self, answer_id: str, owner: str) -> tuple[ApiRequest, str, float] | None:
        """Return the request of an answer that has not ended, with its `base_id` and `created_s`."""

    async def follow(self, request: web.Request, token: str, last_event_id: str) -> web.StreamResponse:
        """Answer with the events after this one."""

    async def cancel_stream(self, token: str, owner: str) -> None:
        """End a stream. Raises a 404 `RequestError`."""


class Generator:
    def __init__(
        self, config: GatewayConfig, served: Served, context: GatewayContext, streams: Streams, owners: Owners
    ) -> None:
        self.config = config
        self.context = context
        self.streams = streams
        self.owners = owners
        self.served = served
        self.parser = RequestParser(config, served)
        self.bodies = RequestBodies(config)
        self.ignored_fields = IgnoredFields(context.log)
        self.budget = RequestBudget(config, served.tokenizer.least_tokens, served.card.embedding.width)
        self._tokenizer = tokenizer = served.tokenizer
        self._text = TokenText(tokenizer)
        self._grammars = GrammarCompiler(tokenizer.to_json(), served.card.eos_token_ids)
        self.completion = CompletionShape(self._text)
        self.chat = ChatShape(self._text)
        self._outbox = Outbox()
        self.resumable: ResumableStreams | None = None
        """Server of resumable streams; set by `service.py`."""

    async def serve(self, endpoint: Endpoint, request: web.Request) -> web.StreamResponse:
        """Answer an HTTP request. Raises `RequestError` only while nothing was sent."""
        if self.resumable is not None and RESUME_HEADER in request.headers:
            return await self.resumable.serve(endpoint, request)
        async with self.arriving(request) as body:
            api_request = await endpoint.read(body, request.headers)
            detached = api_request.background_id("", 0.0) != ""
            if self.resumable is not None and detached and isinstance(api_request, BackgroundRequest):
                background = await self.resumable.begin_background(endpoint, request.headers, body, api_request)
            else:
                background = None
                answering = await self.begin(api_request.call, len(body.data), body.caller)
                api_request.accepted(answering.call)
        if background is not None:
            return await background(request)
        try:
            if answering.call.stream:
                events = self.stream_to(endpoint, request)
                writer = api_request.writer(answering)
                rendering = answering.outlet.run(answering, writer, events, endpoint.keepalive_s)
                return await events.run(rendering, writer.failed)
            return web.Response(body=await api_request.whole(answering), content_type="application/json")
        finally:
            self.release(answering)

    def stream_to(
        self, endpoint: Endpoint, request: web.Request, headers: Mapping[str, str] | None = None
    ) -> EventStream:
        return EventStream(
            request,
            {**dict.fromkeys(endpoint.id_headers, request[HTTP_ID]), **(headers or {})},
            self._outbox,
            write_timeout_s=self.config.write_timeout_s,
            log=self.context.log,
        )

    @asynccontextmanager
    async def arriving(self, request: web.Request) -> AsyncIterator[Body]:
        """Read the body, which is in flight within this context. A `RequestError` in there counts as a rejection."""
        arrived_s, owner, http_id = self.context.clock.now_s(), request[OWNER], request[HTTP_ID]
        try:
            # Admission may refuse before the body is read. The body may name a class: the default one stands in.
            self.streams.check(request.content_length or 0, self.config.default_class, self.owners.queue_owner(owner))
            async with self.bodies.reading(request) as data:
                sent_by_client = request.headers.get(REQUEST_ID_HEADER) == http_id  # else the middleware made it
                client_id = http_id if sent_by_client and _PLAIN_ID.fullmatch(http_id) else ""
                caller = Caller(owner, client_id, arrived_s, lease=request.get(LEASE), trace=request.get(TRACE))
                with self.bodies.holding(own=len(data)) as take:
                    yield Body(data, caller, take)
        except RequestError as error:
            self._count_rejection(error)
            raise

    async def count(self, call: Call, owner: str) -> int:
        """Count the tokens of a chat's prompt. Raises `RequestError` for more than `max_request_work` tokens."""
        most = self.config.max_request_work  # it counts units; a token is one
        [tokens], _ = await self._tokenize(call, most, self.owners.queue_owner(owner))
        return len(tokens)

    def release(self, answering: Answering, reason: str = "the client went away") -> None:
        """Abort unfinished requests and release the reservation. No effect after a complete answer."""
        self.streams.abandon(answering.generation, reason)
        answering.reserved.release()

    async def begin(self, call: Call, body_bytes: int, caller: Caller, sink: TokenSink | None = None) -> Answering:
        """Tokenise a call and offer its requests; the caller must `release` the answer. Tokens go to `sink`, if
        given, in place of the answer's outlet. Raises `RequestError`."""
        self.budget.check(call)
        clock, card, queue_owner = self.context.clock, self.served.card, self.owners.queue_owner(caller.owner)
        client_set_max_tokens, sampling = call.max_tokens is not None, call.sampling
        if call.grammar_spec is not None:
            compiled = await self._grammars.compile(call.grammar_spec, queue_owner)
            sampling = msgspec.structs.replace(sampling, grammar=compiled)
        priority = self.owners.priority(call.priority) + caller.priority_penalty
        times = GatewayTimes(
            caller.arrived_s, trace=caller.trace, on_slo_result=caller.lease.on_slo_result if caller.lease else None
        )
        began_s = clock.now_s()
        prompts, messages = await self._tokenize(call, self.served.max_model_len(), queue_owner)
        if sampling.grammar and call.chat:
            sampling = self._after_reasoning(sampling, prompts[0])
        call = msgspec.structs.replace(call, priority=priority, sampling=sampling, messages=messages)
        times.tokenize_s = clock.now_s() - began_s
        lengths = [len(prompt) for prompt in prompts]
        token_limits = output_limits(call, lengths, self.config, self.served.max_model_len(), card.sampling.max_tokens)
        price = self.budget.price(call, lengths, token_limits)
        self._reserve_for_key(call, lengths, token_limits, caller.lease)
        base_id = secrets.token_hex(10)
        if caller.client_id:
            base_id = f"{caller.client_id}-{base_id[:8]}"  # unique though a client may repeat its ids
        created_s = clock.wall_s()
        requests = prepare(
            call,
            prompts,
            base_id=base_id,
            gateway=self.context.instance,
            arrival_s=created_s,
            seed=secrets.randbits(63) if call.seed is None else call.seed,
            card=card,
            token_limits=token_limits,
        )
        requests = self.owners.with_owner(requests, caller.owner, max_tokens_named=client_set_max_tokens)
        if times.trace is not None:
            requests = times.trace.add_to(requests, times.arrived_s, began_s, times.tokenize_s)
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
                    owner=queue_owner,
                    max_tokens_named=client_set_max_tokens,
                ),
                times,
                sink or outlet,
            )
        except BaseException:
            reserved.release()
            raise
        if times.trace is not None:
            times.trace.record_admission(generation.entries)
        answering = self.new_answer(call, requests, generation, base_id, created_s, reserved)
        answering.outlet = outlet
        if caller.lease is not None:
            caller.lease.add_usage_source(answering.used)
        self.context.log.debug("accepted", request_ids=generation.request_ids)
        return answering

    def reserve_budget(self, call: Call, requests: Sequence[Request], lease: Lease | None) -> Reservation:
        """Reserve the gateway's budget and the key's tokens for prepared requests. Raises a 4xx `RequestError`."""
        one_per_prompt = requests[:: call.n]
        lengths = [request.prompt_tokens for request in one_per_prompt]
        token_limits = [request.sampling.max_tokens for request in one_per_prompt]
        price = self.budget.price(call, lengths, token_limits)
        self._reserve_for_key(call, lengths, token_limits, lease)
        return self.budget.reserve(price)

    def _reserve_for_key(self, call: Call, lengths: Sequence[int], limits: Sequence[int], lease: Lease | None) -> None:
        """Reserve tokens of the API key's rate limit. Whoever ends the lease gives them back, also after a refusal."""
        if lease is not None:
            expected = limits
            if call.max_tokens is None:
                expected = [min(self.config.default_prediction_tokens, each) for each in limits]
            lease.reserve(call.traffic_class, sum(lengths), call.n * sum(expected))

    def new_answer(
        self,
        call: Call,
        requests: Sequence[Request],
        generation: Generation,
        base_id: str,
        created_s: float,
        reserved: Reservation,
    ) -> Answering:
        """Return an `Answering` that renders a generation's output from its start. `requests` come from `prepare`."""
        # A prompt is decoded once: its choices share the string.
        echoes = [self._echo(call, which, each.tokens) for which, each in enumerate(requests[:: call.n])]
        stops = StopAutomaton(call.stop_strings)
        readers = self._readers(call, requests, base_id, created_s)
        unskipped = self._mark_ids(call) if readers else frozenset()
        shape: Shape = self.chat if call.chat else self.completion
        return Answering(
            call,
            generation,
            shape,
            self._text,
            choices=[self._choice(call, item, stops, unskipped) for item in requests],
            echoes=[echo for echo in echoes for _ in range(call.n)],
            base_id=base_id,
            id=shape.id_prefix + base_id,
            created=int(created_s),
            created_s=created_s,
            stop=partial(self.streams.stop, generation),
            model=call.adapter or self.served.card.name,
            reserved=reserved,
            readers=readers,
        )

    def _choice(self, call: Call, request: Request, stops: StopAutomaton, unskipped: frozenset[int]) -> Choice:
        detokenizer = self._text.stream(
            # A first space depends on the text before.
            context=() if call.chat and not call.continues else request.tokens[-16:],
            skip_special=call.skip_special_tokens,
            unskipped=unskipped,
        )
        return Choice(
            detokenizer,
            stops,
            min_tokens=call.min_tokens,
            logprobs=call.sampling.logprobs >= 0,
            includes_stop=call.includes_stop,
        )

    def _after_reasoning(self, sampling: SamplingParams, prompt: list[int]) -> SamplingParams:
        """Return the parameters with the place where the grammar begins to bind."""
        if (format_ := self.served.tool_format) is None:
            return sampling
        encode = partial(self._tokenizer.encode, special_tokens=False)
        opens, closes = format_.free_start(self._end_of(prompt), encode)
        return msgspec.structs.replace(sampling, grammar_opens=opens, grammar_closes=closes)

    def _end_of(self, prompt: list[int]) -> str:
        return self._tokenizer.decode(prompt[-MARK_TOKENS:], skip_special=False)

    def _mark_ids(self, call: Call) -> frozenset[int]:
        """Return special tokens that a reader needs in the text."""
        format_ = self.served.tool_format
        assert format_ is not None, "there is a reader only for a known form of answers"
        return format_.reasoning_mark_ids if call.tools is None else format_.call_mark_ids

    def _readers(self, call: Call, requests: Sequence[Request], base_id: str, created_s: float) -> list[AnswerReader]:
        """Return a reader for each choice; none where an answer can be nothing but content."""
        format_, tools = self.served.tool_format, call.tools
        if not call.chat or format_ is None or not (tools or format_.reasoning or format_.body == "channels"):
            return []
        prompt = requests[0].tokens[: requests[0].prompt_tokens]
        reasoning = format_.reasoning_at(self._end_of(list(prompt[-MARK_TOKENS:])))
        if tools is None and reasoning == "ended":
            return []
        ids = stable_id(base_id, repr(created_s))
        return [
            AnswerReader(
                format_,
                calls=tools is not None,
                parallel=tools is None or tools.parallel,
                ids=f"{ids}-{index}",
                in_reasoning=reasoning == "begun",
                schemas=None if tools is None else tools.schemas,
            )
            for index in range(len(requests))
        ]

    async def _tokenize(self, call: Call, limit: int, owner: str) -> tuple[list[list[int]], list[dict[str, Any]]]:
        """Return the tokens of each prompt, and a chat's messages without the turns that truncation drops."""
        most = limit
        if call.keeps_tokens is not None:  # a text beyond the context is cut after it was tokenised
            limit = self.config.max_request_work
        try:
            if call.chat:
                tokens, messages = await self._tokenize_chat(call, limit, owner)
                return [self._last(tokens, call, most)], messages
            texts = [prompt for prompt in call.prompts if isinstance(prompt, str)]
            encoded = iter(
                await self._tokenizer.encode_all(
                    texts, special_tokens=call.add_special_tokens, limit=limit, owner=owner
                )
            )
            prompts = [next(encoded) if isinstance(prompt, str) else prompt for prompt in call.prompts]
            return [self._last(prompt, call, most) for prompt in prompts], call.messages
        except UnicodeEncodeError as error:
            raise RequestError(
                "The prompt contains an unpaired surrogate, which is no character.",
                param="messages" if call.chat else "prompt",
            ) from error

    async def _tokenize_chat(self, call: Call, limit: int, owner: str) -> tuple[list[int], list[dict[str, Any]]]:
        async def encode(messages: Sequence[dict[str, Any]]) -> list[int]:
            return await self._tokenizer.encode_chat(
                messages,
                owner=owner,
                add_generation_prompt=call.add_generation_prompt,
                continues=call.continues,
                variables=call.template_variables,
                limit=limit,
            )

        if not call.truncates:
            return await encode(call.messages), call.messages
        return await latest_turns(call.messages, limit - (call.max_tokens or 1), encode)

    def _last(self, prompt: list[int], call: Call, context: int) -> list[int]:
        """Return a prompt's tokens as its client wants them cut (`Call.keeps_tokens`). Raises `RequestError`."""
        if (keeps := call.keeps_tokens) is None:
            return prompt
        if keeps > context:
            why = f"is {keeps}, but this model's maximum context length is {context} tokens"
            raise RequestError(f"truncate_prompt_tokens {why}.", param="truncate_prompt_tokens")
        if len(prompt) > (most := self.config.max_request_work):
            why = f"at most {most} tokens are read to be cut (gateway.max_request_work); these are {len(prompt)}"
            raise RequestError(f"truncate_prompt_tokens: {why}.", param="truncate_prompt_tokens")
        if keeps < 0:
            keeps = context - (1 if call.max_tokens is None else call.max_tokens)
        return prompt[max(0, len(prompt) - max(0, keeps)) :]

    def _echo(self, call: Call, which: int, tokens: Sequence[int]) -> str:
        if not call.echo:
            return ""
        if isinstance(prompt := call.prompts[which], str) and call.keeps_tokens is None:
            return prompt
        return self._tokenizer.decode(list(tokens), skip_special=call.skip_special_tokens)

    def _count_rejection(self, error: RequestError) -> None:
        reason = {429: "busy", 503: "draining"}.get(error.status, "invalid")
        self.streams.stats.rejected(self.config.default_class, error.status, reason)  # as in `arriving`
