"""Streaming requests over HTTP: one (a prepared body sent, every chunk stamped, what went wrong named), and a prepared
workload on time: open loop by due times, closed loop by free slots.

Called by `measuring`. Never raises for a failed request: the record says what happened; only cancellation passes
through (after it is recorded). Never retries: a benchmark reports what the server did. Measures its own lateness. Stops
early when `stop` is set: requests in flight are then cancelled and counted as such.

Output is a chunk whose choice has text, content, reasoning or a tool call. A chunk that only names the
role (sent by some servers before anything is computed) is no token; neither is an empty one that only says why the
answer ended (unless nothing came before), but it does set the end of the request.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import aiohttp
import msgspec

from cohort.common.workloads.arrivals import Arrivals, ClosedLoop
from cohort.services.bench.http.load.workload import RequestPlan

Status = Literal["pending", "completed", "failed", "cancelled"]
MAX_DETAIL_CHARS = 300
DONE = b"[DONE]"


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A request whose bytes exist before the clock starts."""

    plan: RequestPlan
    body: bytes
    headers: Mapping[str, str]


@dataclass(slots=True)
class RequestRecord:
    """One request as the client saw it: written by client and driver, read by `report`. All times are seconds of one
    monotonic clock, relative to the start of the run. `token_s` holds one entry per chunk that carried output; `end_s`
    is the last chunk with choices, or the failure."""

    plan: RequestPlan
    due_s: float = 0.0
    sent_s: float = 0.0
    end_s: float = 0.0
    token_s: array[float] = field(default_factory=lambda: array("d"))
    status: Status = "pending"
    error_kind: str = ""
    error_detail: str = ""
    reported_prompt_tokens: int | None = None
    reported_output_tokens: int | None = None
    cached_tokens: int | None = None

    @property
    def output_tokens(self) -> int:
        """Tokens by the server's usage; where it sends none, chunks with output are counted instead."""
        return len(self.token_s) if self.reported_output_tokens is None else self.reported_output_tokens

    @property
    def prompt_tokens(self) -> int:
        return self.plan.prompt_tokens if self.reported_prompt_tokens is None else self.reported_prompt_tokens

    @property
    def client_queue_s(self) -> float:
        """Time between due and sent: the client's own delay."""
        return self.sent_s - self.due_s

    @property
    def ttft_s(self) -> float | None:
        return self.token_s[0] - self.sent_s if self.token_s else None

    @property
    def e2e_s(self) -> float:
        return self.end_s - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """(e2e - TTFT) / (n - 1); undefined for a single token."""
        ttft_s = self.ttft_s
        if ttft_s is None or self.output_tokens < 2:
            return None
        return (self.e2e_s - ttft_s) / (self.output_tokens - 1)

    @property
    def itl_s(self) -> list[float]:
        """Gaps between consecutive chunks with output."""
        return [later - earlier for earlier, later in zip(self.token_s, self.token_s[1:], strict=False)]


class _Delta(msgspec.Struct):
    role: str | None = None
    content: Any = None
    reasoning: Any = None
    reasoning_content: Any = None
    tool_calls: Any = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None

    @property
    def carries_output(self) -> bool:
        if self.delta is not None:
            delta = self.delta
            if delta.content or delta.reasoning or delta.reasoning_content or delta.tool_calls:
                return True
            # Half a character: a token was made though nothing can be shown yet. A role alone is none.
            return delta.content is not None and delta.role is None and self.finish_reason is None
        if self.text:
            return True
        return self.text is not None and self.finish_reason is None


class _TokenDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _TokenDetails | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None


class EventParser:
    """Server-sent events as OpenAI-style streams use them: bytes in, payloads of complete `data:` lines out; keeps an
    unfinished line for the next call. One line is one event: comments and other fields are skipped."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        lines = (self._rest + data if self._rest else data).split(b"\n")
        self._rest = lines.pop()
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]

    def finish(self) -> list[bytes]:
        """Return a last line that the server did not end."""
        rest, self._rest = self._rest, b""
        return [rest[5:].strip()] if rest.startswith(b"data:") else []


def now_s() -> float:
    """Read the one clock of a run."""
    return time.perf_counter()


class HttpStreamClient:
    """`session` must have no connection limit of its own, or its queue would be measured instead of the server's."""

    def __init__(self, session: aiohttp.ClientSession, url: str, timeout_s: float) -> None:
        self._session = session
        self._url = url
        self._timeout_s = timeout_s
        self._decode = msgspec.json.Decoder(_Chunk).decode

    async def stream(self, request: PreparedRequest, record: RequestRecord, start_s: float) -> None:
        record.sent_s = record.end_s = now_s() - start_s
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._exchange(request, record, start_s)
        except TimeoutError:
            _fail(record, "timeout", f"no complete answer within {self._timeout_s:g} s")
        except asyncio.CancelledError:
            record.status = "cancelled"
            raise
        except aiohttp.ClientConnectorError as error:
            _fail(record, "connect", str(error))
        except (aiohttp.ClientError, ConnectionError) as error:
            _fail(record, "disconnected", f"{type(error).__name__}: {error}")
        finally:
            if record.status != "completed":
                record.end_s = now_s() - start_s

    async def _exchange(self, request: PreparedRequest, record: RequestRecord, start_s: float) -> None:
        async with self._session.post(self._url, data=request.body, headers=request.headers) as response:
            if response.status != 200:
                _fail(record, f"http_{response.status}", error_message(await response.read()))
                return
            if response.content_type != "text/event-stream":
                _fail(record, "not_a_stream", f"content type {response.content_type}")
                return
            await self._read(response.content, record, start_s)

    async def _read(self, content: aiohttp.StreamReader, record: RequestRecord, start_s: float) -> None:
        parser = EventParser()
        finished = done = False
        async for data in content.iter_any():
            at_s = now_s() - start_s
            for payload in parser.feed(data):
                if payload == DONE:
                    done = True
                elif payload:
                    finished |= self._take(payload, record, at_s)
                    if record.status == "failed":
                        return
        for payload in parser.finish():
            done |= payload == DONE
        if not (done or finished):
            _fail(record, "truncated", "the stream ended without [DONE] and without a finish reason")
        elif not record.token_s:
            _fail(record, "empty", "the stream ended without any output")
        else:
            record.status = "completed"

    def _take(self, payload: bytes, record: RequestRecord, at_s: float) -> bool:
        """Record one event; True if it says why the answer ended."""
        try:
            chunk = self._decode(payload)
        except msgspec.MsgspecError as error:
            _fail(record, "bad_event", f"{error}: {payload[:100]!r}")
            return False
        if chunk.error is not None:
            _fail(record, "stream_error", error_message(payload))
            return False
        if chunk.usage is not None:
            record.reported_prompt_tokens = chunk.usage.prompt_tokens
            record.reported_output_tokens = chunk.usage.completion_tokens
            if chunk.usage.prompt_tokens_details is not None:
                record.cached_tokens = chunk.usage.prompt_tokens_details.cached_tokens
        if not chunk.choices:
            return False
        record.end_s = at_s
        finished = any(choice.finish_reason for choice in chunk.choices)
        # An answer whose only chunk is its empty end still took until now to make its one token.
        if any(choice.carries_output for choice in chunk.choices) or (finished and not record.token_s):
            record.token_s.append(at_s)
        return finished


def error_message(body: bytes) -> str:
    """Return the message inside an OpenAI-style error body; the body itself where there is none."""
    try:
        parsed = msgspec.json.decode(body)
    except msgspec.MsgspecError:
        parsed = None
    if isinstance(parsed, dict):
        error = parsed.get("error", parsed)
        message = error.get("message") if isinstance(error, dict) else error
        detail = message or parsed.get("detail")
        if detail:
            return str(detail)[:MAX_DETAIL_CHARS]
    return body[:MAX_DETAIL_CHARS].decode(errors="replace")


def _fail(record: RequestRecord, kind: str, detail: str) -> None:
    record.status = "failed"
    record.error_kind = kind
    record.error_detail = detail


LAG_PERIOD_S = 0.01


@dataclass(frozen=True, slots=True)
class RunLog:
    """Observations of a run: records in the order of the plans that were sent, lateness of the client's own loop."""

    records: tuple[RequestRecord, ...]
    loop_lag_s: tuple[float, ...]
    interrupted: bool


class Driver:
    def __init__(
        self,
        client: HttpStreamClient,
        requests: Sequence[PreparedRequest],
        arrivals: Arrivals,
        *,
        duration_s: float | None = None,
        stop: asyncio.Event | None = None,
    ) -> None:
        self._client = client
        self._requests = requests
        self._arrivals = arrivals
        self._duration_s = duration_s
        self._stop = stop or asyncio.Event()
        self._records: list[RequestRecord] = []
        self._start_s = 0.0

    async def run(self) -> RunLog:
        lag: list[float] = []
        self._start_s = now_s()
        async with asyncio.TaskGroup() as group:
            probe = group.create_task(measure_loop_lag(lag))
            sending = group.create_task(self._send_all())
            stopped = group.create_task(self._stop.wait())
            await asyncio.wait((sending, stopped), return_when=asyncio.FIRST_COMPLETED)
            for task in (sending, stopped, probe):
                task.cancel()
        return RunLog(tuple(self._records), tuple(lag), self._stop.is_set())

    async def _send_all(self) -> None:
        if isinstance(self._arrivals, ClosedLoop):
            await self._closed_loop(self._arrivals.concurrency)
        else:
            await self._open_loop()

    async def _open_loop(self) -> None:
        async with asyncio.TaskGroup() as group:
            for request in self._requests:
                due_s = request.plan.due_s or 0.0
                delay_s = self._start_s + due_s - now_s()
                if delay_s > 0:
                    await asyncio.sleep(delay_s)
                group.create_task(self._exchange(request, due_s))

    async def _closed_loop(self, concurrency: int) -> None:
        waiting = iter(self._requests)

        async def user() -> None:
            for request in waiting:
                due_s = now_s() - self._start_s
                if self._duration_s is not None and due_s >= self._duration_s:
                    return
                await self._exchange(request, due_s)

        async with asyncio.TaskGroup() as group:
            for _ in range(min(concurrency, len(self._requests))):
                group.create_task(user())

    async def _exchange(self, request: PreparedRequest, due_s: float) -> None:
        record = RequestRecord(request.plan, due_s=due_s)
        self._records.append(record)
        await self._client.stream(request, record, self._start_s)


async def measure_loop_lag(lag_s: list[float], period_s: float = LAG_PERIOD_S) -> None:
    """Record how late this process wakes up: if that is not small, the client and not the server is being measured.

    Sleeping in steps is the measurement itself here.
    """
    while True:
        started_s = now_s()
        await asyncio.sleep(period_s)
        lag_s.append(max(0.0, now_s() - started_s - period_s))
