"""POST /v1/completions and /v1/chat/completions, from body to last byte.

    read body ─▶ parse ─▶ tokenise ─▶ prepare ─▶ offer ─▶ deltas ─▶ text ─▶ chunks or one answer

Called by aiohttp through `middleware.py`, and by `batch_runner.py` for the lines of a batch. Every exit, whatever its
reason, abandons what is still open, so a client that disconnects frees its blocks on every worker.
"""

from __future__ import annotations

import asyncio
import dataclasses
import io
import re
import secrets
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec
import structlog
from aiohttp import web

from cohort.common.clock import Clock
from cohort.common.config import GatewayConfig
from cohort.common.errors import RequestError
from cohort.common.machines.events import Offered
from cohort.common.metrics import RequestMetrics
from cohort.common.types import FinishReason, InstanceId, Request
from cohort.services.gateway import request_trace
from cohort.services.gateway.answering import Answering, Mean, Step
from cohort.services.gateway.choice import Choice
from cohort.services.gateway.detokenizer import TokenText
from cohort.services.gateway.grammar_process import GrammarCompiler
from cohort.services.gateway.key_lease import current_lease
from cohort.services.gateway.middleware import HTTP_ID, OWNER, REQUEST_ID_HEADER
from cohort.services.gateway.model_card import ModelCard
from cohort.services.gateway.owners import Owners
from cohort.services.gateway.parsing import Call, parse_chat, parse_completion
from cohort.services.gateway.preparation import output_limits, prepare
from cohort.services.gateway.request_bodies import RequestBodies
from cohort.services.gateway.request_budget import RequestBudget
from cohort.services.gateway.responses import Answer, ChatShape, CompletionShape, Scores, Shape, Usage
from cohort.services.gateway.service_headers import CLASS_HEADER
from cohort.services.gateway.sse import EventStream
from cohort.services.gateway.stop_strings import StopAutomaton
from cohort.services.gateway.streams import Streams
from cohort.services.gateway.timing import GatewayTimes
from cohort.services.gateway.tokenizer import Tokenizer
from cohort.services.gateway.tool_calls import CallDelta, ToolReader, whole_calls
from cohort.services.gateway.tool_formats import ToolFormat

# A few milliseconds of parsing at most; a thread parses longer bodies.
PARSE_AT_ONCE_BYTES = 65_536
# Further than any priority a client may name: batch work never overtakes a request that a client waits for.
BATCH_PRIORITY = 2**32
_BATCH_HEADERS = {CLASS_HEADER: "be"}

# Request ids of clients that may become part of ours (they travel through logs and file names).
_PLAIN_ID = re.compile(r"[A-Za-z0-9._:-]{1,64}")
_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class LineAnswer:
    """A complete answer to a line of a batch: its JSON, our id of the request, what it used."""

    body: bytes
    request_id: str
    usage: Usage


class OpenAiApi:
    """The two generation endpoints over one `Streams`."""

    def __init__(
        self,
        *,
        config: GatewayConfig,
        card: ModelCard,
        tokenizer: Tokenizer,
        streams: Streams,
        clock: Clock,
        metrics: RequestMetrics,
        log: structlog.stdlib.BoundLogger,
        instance: InstanceId,
        max_model_len: Callable[[], int],
        bodies: RequestBodies,
        owners: Owners,
        grammars: GrammarCompiler,
        tool_format: ToolFormat | None,
    ) -> None:
        self._config = config
        self._card = card
        self._tokenizer = tokenizer
        self._text = TokenText(tokenizer)
        self._streams = streams
        self._clock = clock
        self._metrics = metrics
        self._log = log
        self._instance = instance
        self._max_model_len = max_model_len
        self.budget = RequestBudget(config, tokenizer.longest_token)
        self._bodies = bodies
        self._owners = owners
        self._grammars = grammars
        self._tool_format = tool_format
        self._completion = CompletionShape(self._text)
        self._chat = ChatShape(self._text)

    def routes(self) -> list[web.RouteDef]:
        return [web.post("/v1/completions", self.completions), web.post("/v1/chat/completions", self.chat_completions)]

    async def completions(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, chat=False)

    async def chat_completions(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, chat=True)

    async def _answer(self, request: web.Request, *, chat: bool) -> web.StreamResponse:
        times = GatewayTimes(arrived_s=self._clock.now_s())
        try:
            answering = await self._accept(request, times, chat=chat)
        except RequestError as error:
            self._count_rejection(error)
            raise
        try:
            if answering.call.stream:
                return await self._stream(request, answering)
            answer = await self._whole(answering)
            return web.Response(body=_encode(answer), content_type="application/json")
        finally:
            self._streams.abandon(answering.generation)
            answering.reserved.release()

    async def answer_line(self, data: bytes, *, chat: bool, line_id: str, owner: str = "") -> LineAnswer:
        """One line of a batch, as if its body had been posted: best effort, offline, behind all online requests.

        `line_id` becomes part of the ids that workers log; `owner` is the batch's. Raises `RequestError` with the
        status the body would get.
        """
        times = GatewayTimes(arrived_s=self._clock.now_s())
        call = await self._parse(data, _BATCH_HEADERS, chat=chat)
        if call.stream:
            raise RequestError("stream: the answers of a batch are written to a file.", param="stream")
        priority = self._owners.priority(call.priority)
        call = dataclasses.replace(call, online=False, priority=BATCH_PRIORITY + priority)
        answering = await self._begin(call, len(data), times, owner, named=line_id)
        try:
            answer = await self._whole(answering)
        finally:
            self._streams.abandon(answering.generation, "the batch gave it up")
            answering.reserved.release()
        return LineAnswer(_encode(answer), answering.base_id, answering.usage())

    async def _accept(self, request: web.Request, times: GatewayTimes, *, chat: bool) -> Answering:
        """Everything before the request is owned; refusals are `RequestError`s."""
        owner = request[OWNER]
        self._streams.check(request.content_length or 0, self._config.default_class, self._owners.share_of(owner))
        async with self._bodies.reading(request) as data:
            call = await self._parse(data, request.headers, chat=chat)
            call = dataclasses.replace(call, priority=self._owners.priority(call.priority))
            http_id = request[HTTP_ID]
            own = request.headers.get(REQUEST_ID_HEADER) == http_id and _PLAIN_ID.fullmatch(http_id)
            answering = await self._begin(call, len(data), times, owner, named=http_id if own else "")
        self._log.debug("accepted", http_id=http_id, request_ids=answering.generation.request_ids)
        return answering

    async def _parse(self, data: bytes, headers: Mapping[str, str], *, chat: bool) -> Call:
        parse = self._parse_chat if chat else parse_completion
        self.budget.check_body(len(data), chat=chat, max_model_len=self._max_model_len())
        if len(data) <= PARSE_AT_ONCE_BYTES:
            call = parse(data, headers, self._config, self._card)
        else:
            call = await asyncio.to_thread(parse, data, headers, self._config, self._card)
        self.budget.check(call)
        return call

    def _parse_chat(self, data: bytes, headers: Mapping[str, str], config: GatewayConfig, card: ModelCard) -> Call:
        return parse_chat(data, headers, config, card, self._tool_format)

    async def _begin(self, call: Call, body_bytes: int, times: GatewayTimes, owner: str, *, named: str) -> Answering:
        """Tokenise, offer the requests, own them. `named`: an id of the client's that ours should begin with."""
        limited = call.max_tokens is not None
        if call.wanted is not None:
            bound = msgspec.structs.replace(call.sampling, grammar=await self._grammars.compile(call.wanted))
            call = dataclasses.replace(call, sampling=bound)
        began_s = self._clock.now_s()
        prompts = await self._tokenize(call)
        times.tokenize_s = self._clock.now_s() - began_s
        lengths = [len(prompt) for prompt in prompts]
        max_tokens_of = output_limits(
            call, lengths, self._config, self._max_model_len(), self._card.sampling.max_tokens
        )
        price = self.budget.price(call, lengths, max_tokens_of)
        lease = current_lease()
        if lease is not None:
            longest = max(max_tokens_of) if limited else self._config.default_prediction_tokens
            expected = call.n * sum(min(longest, most) for most in max_tokens_of)
            lease.reserve(call.traffic_class, sum(lengths), expected)
        base_id = uuid.uuid4().hex[:20]
        if named:
            base_id = f"{named}-{base_id[:8]}"  # unique though a client may repeat its ids
        created_s = self._clock.wall_s()
        requests = prepare(
            call,
            prompts,
            base_id=base_id,
            gateway=self._instance,
            arrival_s=created_s,
            seed=secrets.randbits(63) if call.seed is None else call.seed,
            card=self._card,
            max_tokens_of=max_tokens_of,
        )
        requests = self._owners.marked(requests, owner, max_tokens_named=limited)
        times.trace, requests = request_trace.begun(requests, times.arrived_s, began_s, times.tokenize_s)
        # Of every prompt one, to which its choices refer, like the automaton.
        echoes = [self._echo(call, which, prompt) for which, prompt in enumerate(prompts)]
        stops = StopAutomaton(call.stop_strings)
        shape: Shape = self._chat if call.chat else self._completion
        reserved = self.budget.reserve(price)
        try:
            generation = self._streams.offer(
                Offered(
                    base_id,
                    requests,
                    choices_per_prompt=call.n,
                    chat=call.chat,
                    text_bytes=body_bytes,
                    stop_strings=len(call.stop_strings),
                    owner=self._owners.share_of(owner),
                    max_tokens_named=limited,
                ),
                times,
            )
        except BaseException:
            reserved.release()
            raise
        if times.trace is not None:
            times.trace.admitted(generation.entries)
        answering = Answering(
            call,
            generation,
            shape,
            self._text,
            choices=[self._choice(call, item, stops) for item in requests],
            echoes=[echo for echo in echoes for _ in range(call.n)],
            base_id=base_id,
            id=shape.id_prefix + base_id,
            created=int(created_s),
            model=self._card.name,
            reserved=reserved,
            readers=[ToolReader(call.tools.format, parallel=call.tools.parallel) for _ in requests]
            if call.tools is not None
            else [],
        )
        if lease is not None:
            lease.answered_by(answering.used)
        return answering

    def _choice(self, call: Call, request: Request, stops: StopAutomaton) -> Choice:
        detokenizer = self._text.stream(
            context=() if call.chat else request.tokens[-16:],
            skip_special=call.skip_special_tokens,
            kept=call.tools.format.mark_ids if call.tools is not None else frozenset(),
        )
        return Choice(detokenizer, stops, min_tokens=call.min_tokens, scored=call.sampling.logprobs >= 0)

    async def _tokenize(self, call: Call) -> list[list[int]]:
        limit = self._max_model_len()
        try:
            if call.chat:
                return [
                    await self._tokenizer.encode_chat(
                        call.messages,
                        add_generation_prompt=call.add_generation_prompt,
                        variables=call.template_variables,
                        limit=limit,
                    )
                ]
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

    def _echo(self, call: Call, which: int, tokens: list[int]) -> str:
        if not call.echo:
            return ""
        prompt = call.prompts[which]
        return (
            prompt if isinstance(prompt, str) else self._tokenizer.decode(tokens, skip_special=call.skip_special_tokens)
        )

    # -- One answer ------------------------------------------------------------------------------------------------

    async def _whole(self, answering: Answering) -> Answer:
        generation, shape = answering.generation, answering.shape
        texts = [io.StringIO() for _ in generation.entries]
        calls: list[list[CallDelta]] = [[] for _ in generation.entries]
        scores: dict[int, Scores | None] = {}
        finished: dict[int, FinishReason] = {}
        means = [Mean() for _ in generation.entries]
        while len(finished) < len(generation.entries):
            for delta in answering.due(await generation.mailbox.next()):
                index = delta.index
                if index in finished:
                    continue
                if delta.error is not None:
                    raise delta.error
                step = answering.next(delta)
                texts[index].write(step.piece.text)
                calls[index] += step.piece.calls
                means[index].add(step.piece.scores)
                if index not in scores:
                    scores[index] = await answering.scores(index, first=True)
                if (written := scores[index]) is not None:
                    await answering.write(written, step.piece.scores)
                if step.piece.stopped:
                    self._streams.stop(generation, index)
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
        write_timeout_s = self._config.write_timeout_s
        events = EventStream(request, {REQUEST_ID_HEADER: request[HTTP_ID]}, write_timeout_s=write_timeout_s)
        try:
            await self._send_chunks(events, answering)
        except RequestError as error:
            if not events.started:
                raise
            await events.fail(error)
        except ConnectionError:
            self._log.debug("client went away", http_id=request[HTTP_ID])
        except TimeoutError:
            self._log.warning("client does not read its stream", write_timeout_s=write_timeout_s)
            if request.transport is not None:
                request.transport.abort()
        except Exception:
            if not events.started:
                raise
            # A defect of ours: the client must not take half an answer for a whole one.
            self._log.exception("stream failed unexpectedly", http_id=request[HTTP_ID])
            await events.fail(RequestError("The server failed to continue.", status=500, type_="server_error"))
        return events.response

    async def _send_chunks(self, events: EventStream, answering: Answering) -> None:
        generation, shape, call = answering.generation, answering.shape, answering.call
        finished: set[int] = set()
        while len(finished) < len(generation.entries):
            for delta in answering.due(await generation.mailbox.next()):
                if delta.index in finished:
                    continue
                if delta.error is not None:
                    raise delta.error
                step = answering.next(delta)
                if step.piece.stopped:
                    self._streams.stop(generation, delta.index)
                if step.finish is not None:
                    finished.add(delta.index)
                if (
                    step.piece.text or step.piece.calls or step.finish is not None
                ):  # else part of a character or of a stop string, perhaps
                    await events.send(await self._chunk(answering, delta.index, step))
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

    def _count_rejection(self, error: RequestError) -> None:
        self._streams.stats.recent.rejected()
        reason = {429: "busy", 503: "draining"}.get(error.status, "invalid")
        self._metrics.rejections(self._config.default_class, str(error.status), reason).inc()
