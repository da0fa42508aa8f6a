"""Resumable streams: a connection that breaks costs a client nothing, nor does the end of the gateway that served it.

    POST, x-cohort-resume: keep ─▶ session ─▶ events with ids, x-cohort-resume: TOKEN
                                     │ connection lost: read to nowhere, for `resume_s`
    GET /v1/streams/TOKEN ───────────┴─▶ the same session; where there is none: the request as it was written, its
                                         output so far, and what follows that

Called by `generator.py` for requests that ask for it, and by aiohttp. One connection reads a stream; a later one takes
it over. What a client has seen was written before (`resume_journal.py`), so another gateway continues exactly after it;
what the disk refused comes again, unseen. The gateway that ends a stream charges its key, once.
"""

from __future__ import annotations

import asyncio
import secrets
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar, assert_never
from weakref import WeakValueDictionary

from aiohttp import web
from msgspec import structs

from cohort.common.errors import RequestError
from cohort.common.machines.events import Offered
from cohort.common.types import TrafficClass
from cohort.services.gateway import bounds
from cohort.services.gateway.generation.answering import Answering, Nowhere, Writer
from cohort.services.gateway.generation.delta import GatewayTimes, Generation
from cohort.services.gateway.generation.generator import ApiRequest, Endpoint, Generator
from cohort.services.gateway.http.service_headers import (
    CLASS_HEADER,
    IF_LATE_HEADER,
    LAST_EVENT_HEADER,
    RESUME_HEADER,
    TPOT_HEADER,
    TTFT_HEADER,
)
from cohort.services.gateway.http.sse import EventStream
from cohort.services.gateway.keys.key_lease import Lease
from cohort.services.gateway.keys.middleware import OWNER
from cohort.services.gateway.resume.resume_journal import DISK_ERRORS, Journal
from cohort.services.gateway.resume.resume_marks import Place, read_on, seen_of
from cohort.services.gateway.resume.resume_session import (
    Outcome,
    ResumeLog,
    Session,
    cancelled,
    ended_entry,
    fail_reader,
    most_output_bytes,
    refuse_unkeepable,
    resubmitted,
    taken_over,
    unknown,
)
from cohort.services.gateway.resume.resume_store import Ending, StreamRecord, Taken, digest_of

STREAMS_PATH = "/v1/streams/{id}"
_HEADERS = (CLASS_HEADER, TTFT_HEADER, TPOT_HEADER, IF_LATE_HEADER)
LeaseOf = Callable[[str, TrafficClass], Lease | None]
T = TypeVar("T")


class Resumption:
    def __init__(self, generator: Generator, endpoints: Sequence[Endpoint], lease_of: LeaseOf, database: Path) -> None:
        self._config = generator.config
        self._endpoints = endpoints
        self._generator = generator
        self._streams = generator.streams
        self._owners = generator.owners
        self._model = generator.served.card.name
        self._instance = generator.host.instance
        self._lease_of = lease_of
        self._clock = generator.host.clock
        self._log = log = generator.host.log
        self._holder = uuid.uuid4().hex
        self._journal = Journal(database, self._holder, self._lost, log)
        self._sessions: dict[str, Session] = {}
        self._taking: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._settling: dict[str, asyncio.Task[None]] = {}
        """Tasks that write a stream's end, by digest."""
        self._swept_s = float("-inf")

    def routes(self) -> list[web.RouteDef]:
        return [web.get(STREAMS_PATH, self.resume, allow_head=False), web.delete(STREAMS_PATH, self.cancel)]

    async def aclose(self) -> None:
        """Leave running streams to the next gateway."""
        for session in list(self._sessions.values()):
            self._end(session, "left")
        while self._settling:
            await asyncio.gather(*self._settling.values(), return_exceptions=True)
        await self._journal.close()

    async def serve(self, endpoint: Endpoint, request: web.Request) -> web.StreamResponse:
        """Answer as `Generator.serve`, with a stream that can be resumed."""
        session, writer = await self._accepted(endpoint, request)
        return await self._read(request, session, session.answering, writer)

    async def _accepted(self, endpoint: Endpoint, request: web.Request) -> tuple[Session, Writer]:
        tape, token = ResumeLog(), secrets.token_urlsafe(16)
        async with self._generator.arriving(request) as body:
            asked = await endpoint.read(body.data, request.headers, body.caller.owner)
            refuse_unkeepable(request.headers[RESUME_HEADER], asked.call)
            answering = await self._generator.begin(asked.call, len(body.data), body.caller, tape)
        requests = [entry.request for entry in answering.generation.entries]
        session = Session(
            token, digest_of(token), body.caller.owner, tape, answering, requests, body.caller.lease, endpoint, asked
        )
        self._hold(session)
        try:
            writer = read_on(answering, asked.writer(answering), {}, seen_of(endpoint.kind, "", len(requests)))
            tape.reader = answering.outlet
            session.stored = await self._store(session, body.data, request.headers)
        except BaseException:
            session.stored = True  # it may be, later
            self._end(session, "dropped")
            raise
        self._sessions[session.digest] = session
        tape.begin(lambda: self._written(session))
        return session, writer

    def _hold(self, session: Session) -> None:
        if session.lease is not None:
            session.lease.hold()
            session.lease.replace_usage_source(session.used)

    async def _store(self, session: Session, body: bytes, headers: Mapping[str, str]) -> bool:
        """Store a new stream. Return False if there is no space or the disk refuses: then it cannot be resumed."""
        answering, most = session.answering, bounds.BOUNDS.streams_bytes
        record = StreamRecord(
            answering.call.chat,
            body,
            {name: headers[name] for name in _HEADERS if name in headers},
            session.requests,
            answering.base_id,
            answering.created_s,
            self._model,
            session.endpoint.kind,
            session.asked.extra(),
        )
        try:
            await self._sweep()
            return await self._journal.run(
                lambda store: store.add(
                    session.digest,
                    session.owner,
                    self._holder,
                    record,
                    output_bytes=most_output_bytes(session.requests),
                    expires_s=self._until_s(),
                    most_bytes=most,
                    most_owner_bytes=int(most * self._owners.share),
                )
            )
        except DISK_ERRORS as error:
            self._journal.refused(error)
            return False

    def _written(self, session: Session) -> None:
        if session.stored:
            self._journal.changed(session.digest, session.resume_log)
        else:
            session.resume_log.written(session.resume_log.take_unwritten())

    async def _read(
        self, request: web.Request, session: Session, answering: Answering, writer: Writer
    ) -> web.StreamResponse:
        endpoint = session.endpoint
        events = self._stream_to(endpoint, request, session.token if session.stored else "")
        try:
            sending = answering.outlet.run(answering, writer, events, endpoint.quiet_s)
            return await events.carry(sending, writer.failed)
        finally:
            session.token_announced = session.token_announced or events.started
            self._left(session, answering)

    def _stream_to(self, endpoint: Endpoint, request: web.Request, token: str) -> EventStream:
        return self._generator.stream_to(endpoint, request, {RESUME_HEADER: token} if token else {})

    def _left(self, session: Session, answering: Answering) -> None:
        """Handle the end of a reader."""
        if session.over or session.answering is not answering:
            return
        if len(answering.ended) == len(answering.choices) and session.asked.stored is not None:
            self._end(session, "done")
        elif session.resume_log.error is not None:
            # What another gateway may finish is left to it; any other error stays what the stream ended with.
            again = session.resume_log.error.status == 503
            self._end(session, ("left" if again else "done") if session.token_announced else "dropped")
        elif not (session.stored and session.token_announced):
            self._end(session, "dropped")
        else:
            self._read_unattended(session)

    def _read_unattended(self, session: Session) -> None:
        """Keep a stream whose client left going for a while, without a reader."""
        answering, writer = self._another(session, seen_of(session.endpoint.kind, "", len(session.requests)))
        session.unread = asyncio.create_task(self._drain(session, answering, writer), name="unread stream")
        session.grace = asyncio.get_running_loop().call_later(self._config.resume_s, self._end, session, "dropped")

    async def _drain(self, session: Session, answering: Answering, writer: Writer) -> None:
        try:
            await answering.outlet.run(answering, writer, Nowhere())
        except RequestError:
            pass  # it is on the tape
        except Exception:
            self._log.exception("stream failed unexpectedly")
            self._end(session, "dropped")
        finally:
            if session.unread is asyncio.current_task():
                self._left(session, answering)

    def _another(self, session: Session, seen: Place | int) -> tuple[Answering, Writer]:
        """Return an answer for another reader; the old one fails. A 400 `RequestError` changes nothing."""
        old, tape = session.answering, session.resume_log
        answering = self._generator.unrendered(
            old.call, session.requests, old.generation, old.base_id, old.created_s, old.reserved
        )
        writer = read_on(answering, session.asked.writer(answering), tape.log, seen, gaps=session.gaps)
        session.rendered = max(session.rendered, old.used()[1])
        if session.grace is not None:
            session.grace.cancel()
        if session.unread is not None:
            session.unread.cancel()
            session.unread = None
        session.answering = answering
        fail_reader(old, taken_over())
        tape.reader = answering.outlet
        return answering, writer

    def _end(self, session: Session, outcome: Outcome) -> None:
        """End a session on this gateway: stop its generation and release what it reserved."""
        if session.over:
            return
        session.over = True
        self._sessions.pop(session.digest, None)
        if session.grace is not None:
            session.grace.cancel()
        if session.unread is not None and session.unread is not asyncio.current_task():
            session.unread.cancel()
        self._streams.abandon(session.answering.generation, "no client reads it any more")
        session.answering.reserved.release()
        self._settling[session.digest] = asyncio.create_task(self._settle(session, outcome), name="end of a stream")

    async def _settle(self, session: Session, outcome: Outcome) -> None:
        ours = outcome != "lost"
        try:
            if session.stored and ours:
                await self._journal.settle(session.digest)
                ours = await self._settled(session, outcome)
        except DISK_ERRORS as failure:
            self._journal.refused(failure)
        finally:
            self._settling.pop(session.digest, None)
            if session.lease is not None:
                session.lease.free(counts=ours)

    async def _settled(self, session: Session, outcome: Outcome) -> bool:
        """Write a session's outcome. Return False if another gateway has the stream."""
        digest, holder, until_s, now_s = session.digest, self._holder, self._until_s(), self._clock.wall_s()
        match outcome:
            case "done":
                cached = [entry.cached_tokens for entry in session.answering.generation.entries]
                ending = Ending(cached, completed_at=session.asked.completed_at, kept=bool(session.asked.stored))
                if (error := session.resume_log.error) is not None:
                    ending = structs.replace(ending, message=error.message, status=error.status, type=error.type_)
                return await self._journal.run(lambda store: store.end(digest, holder, ending, until_s))
            case "left":
                return await self._journal.run(lambda store: store.leave(digest, holder, until_s))
            case "dropped":
                return await self._journal.run(lambda store: store.drop(digest, holder, now_s))
            case "lost":
                return False
            case _:
                assert_never(outcome)

    def _lost(self, digest: str, elsewhere: bool) -> None:
        """End a session that another gateway continues (`elsewhere`), or that its client cancelled there."""
        session = self._sessions.get(digest)
        if session is not None:
            fail_reader(session.answering, taken_over() if elsewhere else cancelled())
            self._end(session, "lost" if elsewhere else "dropped")

    def _until_s(self) -> float:
        return self._clock.wall_s() + self._config.resume_s

    async def _sweep(self) -> None:
        """Extend this gateway's streams and drop expired ones, four times in `resume_s`."""
        now_s = self._clock.wall_s()
        if abs(now_s - self._swept_s) >= self._config.resume_s / 4:
            self._swept_s = now_s
            here = list(self._sessions)
            await self._journal.run(lambda store: store.refresh(here, self._holder, now_s + self._config.resume_s))
            await self._journal.run(lambda store: store.sweep(now_s))

    async def run(self) -> None:
        """Run sweeps until cancelled."""
        while True:
            await asyncio.sleep(max(0.05, self._config.resume_s / 4))
            if self._journal.opened:
                try:
                    await self._sweep()
                except DISK_ERRORS as error:
                    self._journal.refused(error)

    async def resume(self, request: web.Request) -> web.StreamResponse:
        """Answer GET /v1/streams/TOKEN with `Last-Event-ID`: what followed that event, and what is still to come."""
        token, owner = request.match_info["id"], request[OWNER]
        digest, seen = digest_of(token), request.headers.get(LAST_EVENT_HEADER, "")
        lock = self._taking.setdefault(digest, asyncio.Lock())
        async with lock:
            settling = self._settling.get(digest)
            if settling is not None:
                await asyncio.wait([settling])
            taken: Taken | None = None
            session = self._sessions.get(digest)
            if session is not None:
                if session.owner != owner:
                    raise unknown()
                place = seen_of(session.endpoint.kind, seen, len(session.requests))
            else:
                taken = await self._take(digest, owner)
                endpoint, asked = await self._asked_again(taken, owner)
                place = seen_of(endpoint.kind, seen, len(taken.record.requests))
                if taken.ending is None:
                    session = self._go_on(endpoint, asked, taken, token, owner)
                else:
                    answering, writer = self._ended(asked, taken, taken.ending, place)
            if session is not None:
                try:
                    answering, writer = self._another(session, place)
                except RequestError:
                    if taken is not None:
                        self._read_unattended(session)
                    raise
        if session is not None:
            return await self._read(request, session, answering, writer)
        events = self._stream_to(endpoint, request, token)
        try:
            return await events.carry(answering.outlet.run(answering, writer, events, endpoint.quiet_s), writer.failed)
        finally:
            answering.reserved.release()

    async def _asked_again(self, taken: Taken, owner: str) -> tuple[Endpoint, ApiRequest]:
        """Parse a stored request again. Raises `RequestError`."""
        record, ending = taken.record, taken.ending
        endpoint = next(each for each in self._endpoints if (each.kind, each.chat) == (record.kind, record.chat))
        asked = await endpoint.read(record.body, record.headers, owner, record.beside)
        if ending is not None:
            asked.completed_at, asked.stored = ending.completed_at, ending.kept
        self._generator.budget.check(asked.call)
        return endpoint, asked

    async def cancel(self, request: web.Request) -> web.Response:
        """Answer DELETE /v1/streams/TOKEN: end the stream."""
        digest, owner, now_s = digest_of(request.match_info["id"]), request[OWNER], self._clock.wall_s()
        session = self._sessions.get(digest)
        if session is not None and session.owner == owner:
            fail_reader(session.answering, cancelled())
            self._end(session, "dropped")
        elif not self._config.resume_s or not await self._or_unavailable(
            self._journal.run(lambda store: store.cancel(digest, owner, now_s))
        ):
            raise unknown()
        return web.Response(status=204)

    async def _take(self, digest: str, owner: str) -> Taken:
        if not self._config.resume_s:
            raise unknown()
        until_s, now_s = self._until_s(), self._clock.wall_s()
        taken = await self._or_unavailable(
            self._journal.run(lambda store: store.take(digest, owner, self._holder, now_s=now_s, expires_s=until_s))
        )
        if taken == "gone":
            raise RequestError(
                f"This stream is over: it was cancelled, or not asked for within {self._config.resume_s:g} s "
                "(gateway.resume_s).",
                status=410,
            )
        if taken is None or taken.record.model != self._model:
            raise unknown()
        return taken

    async def _or_unavailable(self, answer: Awaitable[T]) -> T:
        try:
            return await answer
        except DISK_ERRORS as error:
            self._journal.refused(error)
            raise RequestError(
                "Streams cannot be resumed now: the server's database for them cannot be used.",
                status=503,
                type_="server_error",
                retry_after_s=1.0,
            ) from error

    def _ended(self, asked: ApiRequest, taken: Taken, ending: Ending, place: Place | int) -> tuple[Answering, Writer]:
        """Return the answer to a stream that is complete."""
        record, call, now_s = taken.record, asked.call, self._clock.now_s()
        entries = [
            ended_entry(now_s, request, taken.stored_deltas.get(index)) for index, request in enumerate(record.requests)
        ]
        for entry, cached in zip(entries, ending.cached_tokens, strict=True):
            entry.cached_tokens = cached
        generation = Generation(GatewayTimes(arrived_s=now_s), entries)
        budget, first = self._generator.budget, record.requests[:: call.n]
        reserved = budget.reserve(
            budget.price(call, [r.prompt_tokens for r in first], [r.sampling.max_tokens for r in first])
        )
        try:
            answering = self._generator.unrendered(
                call, record.requests, generation, record.base_id, record.created_s, reserved
            )
            writer = read_on(answering, asked.writer(answering), taken.stored_deltas, place)
        except BaseException:
            reserved.release()
            raise
        if ending.error is not None:
            fail_reader(answering, ending.error)
        return answering, writer

    def _go_on(self, endpoint: Endpoint, asked: ApiRequest, taken: Taken, token: str, owner: str) -> Session:
        """Submit again what has not ended, after its output. Raises as a new request does; the client may retry."""
        lease = self._lease_of(owner, asked.call.traffic_class)
        try:
            return self._offered(endpoint, asked, taken, token, owner, lease)
        except BaseException:
            if lease is not None:
                lease.free(counts=False)
            raise

    def _offered(
        self, endpoint: Endpoint, asked: ApiRequest, taken: Taken, token: str, owner: str, lease: Lease | None
    ) -> Session:
        record, said, call = taken.record, taken.stored_deltas, asked.call
        requests = record.requests
        left = [i for i in range(len(requests)) if i not in said or said[i].finish is None]
        name, now_s = f"{record.base_id}-r{uuid.uuid4().hex[:8]}", self._clock.now_s()
        again = resubmitted(requests, said, left, name=name, gateway=self._instance, arrival_s=self._clock.wall_s())
        first = requests[:: call.n]
        reserved = self._generator.own_budget(
            call,
            [request.prompt_tokens for request in first],
            [request.sampling.max_tokens for request in first],
            lease,
        )
        tape = ResumeLog(indexes=left, log=said)
        times = GatewayTimes(arrived_s=now_s, judged=None if lease is None else lease.on_judged)
        try:
            offer = Offered(
                name,
                again,
                choices_per_prompt=1,
                chat=call.chat,
                text_bytes=len(record.body),
                stop_strings=len(call.stop_strings),
                owner=self._owners.share_of(owner),
                max_tokens_named=call.max_tokens is not None,
            )
            offered = self._streams.offer(offer, times, tape) if again else Generation(times)
        except BaseException:
            reserved.release()
            raise
        running = dict(zip(left, offered.entries, strict=True))
        entries = [running.get(i) or ended_entry(now_s, request, said.get(i)) for i, request in enumerate(requests)]
        generation = Generation(times, entries)
        answering = self._generator.unrendered(call, requests, generation, record.base_id, record.created_s, reserved)
        charged = sum(len(delta.tokens) for delta in said.values()) if taken.charged else None
        session = Session(token, digest_of(token), owner, tape, answering, requests, lease, endpoint, asked, charged)
        session.stored = session.token_announced = session.gaps = True
        self._hold(session)
        self._sessions[session.digest] = session
        self._log.info("stream goes on here", tokens=sum(len(delta.tokens) for delta in said.values()))
        tape.begin(lambda: self._written(session))
        return session
