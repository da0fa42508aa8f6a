"""The gateway's part of a trace: the span that everything else of a request lies below, and its first stages.

    POST /v1/… ─┬─ parse       reading the body and understanding it
                ├─ tokenise
                ├─ admission   may it come in?
                ├─ predict     until the length predictor has answered
                └─ …           spans of the predictor, the manager and the workers

`middleware` opens the span of an HTTP request, continues the client's `traceparent` and ends it with the response; a
line of a batch begins a trace of its own. Where tracing is off there is no middleware, and no request has a trace.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from cohort.common.clock import Clock
from cohort.common.machines.entry import Entry
from cohort.common.process.metrics import TtftStage
from cohort.common.tracing.spans import OpenSpan, Tracing
from cohort.common.tracing.traceparent import HEADER
from cohort.common.types import FinishReason, Request

if TYPE_CHECKING:
    from cohort.services.gateway.generation.delta import Caller

_R = TypeVar("_R")

_GENERATES = "/v1/"
_LEFT_OUT = ("/v1/models", "/v1/files", "/v1/batches")
"""Paths that start no work on workers, and are polled."""


class RequestTrace:
    def __init__(self, tracing: Tracing, span: OpenSpan, clock: Clock) -> None:
        self._tracing = tracing
        self._clock = clock
        self._offered_s = 0.0
        self.span = span

    def add_to(self, requests: list[Request], arrived_s: float, parsed_s: float, tokenize_s: float) -> list[Request]:
        """Record how the requests were made, and return them with their place in the trace."""
        place = self.span.place
        tokenised_s = parsed_s + tokenize_s
        self._tracing.span("parse", arrived_s, parsed_s, place)
        self._tracing.span(
            "tokenise", parsed_s, tokenised_s, place, prompt_tokens=sum(item.prompt_tokens for item in requests)
        )
        self.span.note(
            request_id=requests[0].request_id, choices=len(requests), traffic_class=requests[0].traffic_class
        )
        self._offered_s = self._clock.now_s()
        return [msgspec.structs.replace(item, traceparent=str(place)) for item in requests]

    def record_admission(self, entries: Sequence[Entry]) -> None:
        self._tracing.span("admission", self._offered_s, self._clock.now_s(), self.span.place, requests=len(entries))

    def ended(
        self, now_s: float, entry: Entry, stages: Mapping[TtftStage, float], finish: FinishReason, reason: str
    ) -> str:
        """End the spans of a choice. Returns the trace's id, for the log."""
        span = self.span
        if entry.predict_s:
            source = entry.prediction.source if entry.prediction is not None else "none"
            self._tracing.span("predict", entry.opened_s, entry.opened_s + entry.predict_s, span.place, source=source)
        if entry.first_token_s is not None:
            span.event(entry.first_token_s, "first token", request_id=entry.request_id)
        if entry.last_token_s is not None:
            span.event(entry.last_token_s, "last token", request_id=entry.request_id)
        outcome = entry.refused_because or finish.value
        span.event(now_s, "choice ended", request_id=entry.request_id, outcome=outcome, reason=reason)
        span.note(outcome=outcome, output_tokens=len(entry.output), attempts=entry.attempt.number + 1)
        span.note(**{f"ttft_{stage}_s": round(seconds, 6) for stage, seconds in stages.items()})
        return f"{span.place.trace_id:032x}"


TRACE = web.RequestKey("trace", RequestTrace)


def middleware(tracing: Tracing, clock: Clock) -> Middleware:
    """Return a middleware with a span around every request that generates."""

    @web.middleware
    async def traced(request: web.Request, handler: Handler) -> web.StreamResponse:
        path = request.path
        wanted = path.startswith(_GENERATES) and not path.startswith(_LEFT_OUT) and request.method == "POST"
        sampled, client = tracing.wanted(request.headers.get(HEADER, "")) if wanted else (False, None)
        if not sampled:
            return await handler(request)
        span = tracing.start(f"POST {path}", clock.now_s(), client, serves=True)
        span.attributes({"http.request.method": "POST", "url.path": path})
        request[TRACE] = RequestTrace(tracing, span, clock)
        error = "the client's connection ended"
        try:
            response = await handler(request)
            span.attributes({"http.response.status_code": response.status})
            error = f"HTTP {response.status}" if response.status >= 500 else ""
            return response
        finally:
            span.end(clock.now_s(), error)

    return traced


def lines(
    tracing: Tracing, clock: Clock, answer: Callable[..., Coroutine[Any, Any, _R]]
) -> Callable[..., Coroutine[Any, Any, _R]]:
    """Return `answer` with a span around every line of a batch."""

    async def traced(data: bytes, caller: Caller, *, chat: bool) -> _R:
        if not tracing.wanted("")[0]:
            return await answer(data, caller, chat=chat)
        span = tracing.start("batch line", clock.now_s(), None, serves=True)
        span.note(line=caller.client_id)
        error = "not answered"
        try:
            answered = await answer(data, replace(caller, trace=RequestTrace(tracing, span, clock)), chat=chat)
            error = ""
            return answered
        finally:
            span.end(clock.now_s(), error)

    return traced
