"""Resumable streams: a client loses no output when its connection breaks or its gateway stops.

    POST, x-cohort-resume: keep ─▶ session ─▶ events with ids, x-cohort-resume: TOKEN
                                     │ connection lost: generation continues and is journaled, for up to `resume_s`
    GET /v1/streams/TOKEN ───────────┴─▶ the same session; if this gateway has none, a new one: the stored request is
                                         resubmitted with its output so far appended to the prompt

Called by `generator.py` for requests with that header, and by aiohttp. One reader (a client's connection) reads a
stream; a later one takes it over. Output goes from memory (`ResumeLog`) through a writer task (`Journal`) into a
database (`ResumeStore`) before the reader gets it, so another gateway continues exactly after it. If the disk refuses
output, the reader gets it all the same; another gateway generates it again, with the same seed, and skips what the
client has seen. The gateway on which the stream ends, or which stops and releases it, charges the client's API key for
what no earlier gateway has charged.
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
from cohort.services.gateway.generation.delta import Caller, GatewayTimes, Generation
from cohort.services.gateway.generation.generator import ApiRequest, BackgroundRequest, Body, Endpoint, Generator
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
from cohort.services.gateway.resume.resume_marks import Seen, parse_last_event_id, resuming_writer
from cohort.services.gateway.resume.resume_session import (
    Outcome,
    ResumeLog,
    Session,
    cancelled_error,
    check_resumable,
    ended_entry,
    fail_reader,
    max_output_bytes,
    resubmissions,
    taken_over_error,
    unknown_error,
)
from cohort.services.gateway.resume.resume_store import Claim, Ending, ResumeStore, StreamRecord, digest_of

STREAMS_PATH = "/v1/streams/{id}"
_STORED_HEADERS = (CLASS_HEADER, TTFT_HEADER, TPOT_HEADER, IF_LATE_HEADER)
LeaseOf = Callable[[str, TrafficClass], Lease | None]
"""Function that counts a request within its API key's limits (`key_lease.py`); None for an owner without a key."""
T = TypeVar("T")


class Resumption:
    def __init__(self, generator: Generator, endpoints: Sequence[Endpoint], lease_of: LeaseOf, database: Path) -> None:
        self._config = generator.config
        self._endpoints = endpoints
        self._generator = generator
        self._streams = generator.streams
        self._owners = generator.owners
        self._model = generator.served.card.name
        self._instance = generator.context.instance
        self._lease_of = lease_of
        self._clock = generator.context.clock
        self._log = log = generator.context.log
        self._holder_id = uuid.uuid4().hex  # of this gateway process, in the store
        self._database = database
        self._journal = Journal(database, self._holder_id, self._on_lost, log)
        self._sessions: dict[str, Session] = {}
        self._resume_locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # by stream, one at a time
        self._finalizing: dict[str, asyncio.Task[None]] = {}
        """Tasks that store the outcomes of ended sessions, by the digest of the stream's token."""
        self._started_s = self._clock.wall_s() - self._clock.now_s()
        self._swept_s = float("-inf")

    def routes(self) -> list[web.RouteDef]:
        return [web.get(STREAMS_PATH, self.resume, allow_head=False), web.delete(STREAMS_PATH, self.cancel)]

    async def aclose(self) -> None:
        """Release running streams to the next gateway."""
        for session in list(self._sessions.values()):
            self._end(session, "released")
        while self._finalizing:
            await asyncio.gather(*self._finalizing.values(), return_exceptions=True)
        await self._journal.close()

    async def serve(self, endpoint: Endpoint, request: web.Request) -> web.StreamResponse:
        """Answer as `Generator.serve`, with a stream that can be resumed."""
        async with self._generator.arriving(request) as body:
            api_request = await endpoint.read(body, request.headers)
            check_resumable(request.headers[RESUME_HEADER], api_request.call)
            session, writer = await self._begin(endpoint, request.headers, body, api_request)
        return await self._read(request, session, session.answering, writer)

    async def begin_background(
        self, endpoint: Endpoint, headers: Mapping[str, str], body: Body, api_request: BackgroundRequest
    ) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        """Begin an answer that needs no client. Return the function that answers its request: with its events, or with
        what is known of it now. Raises `RequestError`, also where its output cannot be written down."""
        session, writer = await self._begin(endpoint, headers, body, api_request)
        if not session.journaled:
            self._end(session, "discarded")
            raise RequestError(
                "background: the server has no space now to keep such an answer. Please retry later.",
                status=503,
                type_="server_error",
                param="background",
                retry_after_s=1.0,
            )
        session.token_announced = True

        async def answer(request: web.Request) -> web.StreamResponse:
            answering = session.answering
            if answering.call.stream:
                return await self._read(request, session, answering, writer)
            self._start_drain(session)
            pending = api_request.pending(answering.base_id, answering.created_s)
            return web.Response(body=pending, content_type="application/json")

        return answer

    async def _begin(
        self, endpoint: Endpoint, headers: Mapping[str, str], body: Body, api_request: ApiRequest
    ) -> tuple[Session, Writer]:
        resume_log = ResumeLog()
        answering = await self._generator.begin(api_request.call, len(body.data), body.caller, resume_log)
        api_request.accepted(answering.call)
        background_id = api_request.background_id(answering.base_id, answering.created_s)
        token = background_id or secrets.token_urlsafe(16)
        caller, requests = body.caller, [entry.request for entry in answering.generation.entries]
        session = Session(
            token, digest_of(token), caller.owner, resume_log, answering, requests, caller.lease, endpoint, api_request
        )
        session.background = bool(background_id)
        self._hold_lease(session)
        try:
            nothing_seen = parse_last_event_id(endpoint.kind, len(requests), "")
            writer = resuming_writer(answering, api_request.writer(answering), {}, nothing_seen)
            resume_log.reader = answering.outlet
            session.journaled = await self._store(session, body.data, headers)
        except BaseException:
            session.journaled = True  # perhaps: a cancelled insert may still commit, and `_finalize` deletes it then
            self._end(session, "discarded")
            raise
        self._sessions[session.digest] = session
        resume_log.call_when_unwritten(lambda: self._schedule_write(session))
        return session, writer

    def _hold_lease(self, session: Session) -> None:
        """Keep the lease open after this HTTP request, and charge it for the session, not for one reader's answer."""
        if session.lease is not None:
            session.lease.keep_open()
            session.lease.replace_usage_source(session.used)

    async def _store(self, session: Session, body: bytes, headers: Mapping[str, str]) -> bool:
        """Store a new stream. Return False if there is no space or the disk refuses: then it cannot be resumed."""
        answering, max_bytes = session.answering, bounds.BOUNDS.streams_bytes
        record = StreamRecord(
            chat=answering.call.chat,
            body=body,
            headers={name: headers[name] for name in _STORED_HEADERS if name in headers},
            requests=session.requests,
            base_id=answering.base_id,
            created_s=answering.created_s,
            model=self._model,
            kind=session.endpoint.kind,
            beside=session.api_request.parse_context(),
        )
        try:
            await self._sweep()
            return await self._journal.run(
                lambda store: store.add(
                    session.digest,
                    session.owner,
                    self._holder_id,
                    record,
                    output_bytes=max_output_bytes(session.requests),
                    expires_s=self._expires_s(background=session.background),
                    max_bytes=max_bytes,
                    max_owner_bytes=int(max_bytes * self._owners.share),
                    background=session.background,
                )
            )
        except DISK_ERRORS as error:
            self._journal.log_failure(error)
            return False

    def _schedule_write(self, session: Session) -> None:
        if session.journaled:
            self._journal.schedule(session.digest, session.resume_log)
        else:  # nothing will be written
            session.resume_log.publish(session.resume_log.take_unwritten())

    async def _read(
        self, request: web.Request, session: Session, answering: Answering, writer: Writer
    ) -> web.StreamResponse:
        endpoint = session.endpoint
        events = self._stream_to(endpoint, request, session.token if session.journaled else "")
        try:
            sending = answering.outlet.run(answering, writer, events, endpoint.keepalive_s)
            return await events.run(sending, writer.failed)
        finally:
            session.token_announced = session.token_announced or events.started
            self._on_reader_ended(session, answering)

    def _stream_to(self, endpoint: Endpoint, request: web.Request, token: str) -> EventStream:
        return self._generator.stream_to(endpoint, request, {RESUME_HEADER: token} if token else {})

    def _on_reader_ended(self, session: Session, answering: Answering) -> None:
        """Decide what becomes of a session whose reader, a connection or `_drain`, has ended."""
        if session.over or session.answering is not answering:
            return
        # A response that is to be stored (Responses `store`) is complete only once its API has tried to store it.
        if len(answering.ended) == len(answering.choices) and session.api_request.answer_stored is not None:
            self._end(session, "finished")
        elif session.resume_log.error is not None:
            # 503: no worker, or a shutdown; another gateway may finish the stream. Other errors are stored as its end.
            outcome: Outcome = "released" if session.resume_log.error.status == 503 else "finished"
            self._end(session, outcome if session.token_announced else "discarded")
        elif not (session.journaled and session.token_announced):
            self._end(session, "discarded")
        else:
            self._start_drain(session)

    def _start_drain(self, session: Session) -> None:
        """Continue a stream without a client for up to `resume_s`, one in the background to its end. A task reads in
        the client's place: it renders the answer from its start, which finds stop strings and stores the response, and
        discards the events."""
        nothing_seen = parse_last_event_id(session.endpoint.kind, len(session.requests), "")
        answering, writer = self._attach_reader(session, nothing_seen)
        session.drain_task = asyncio.create_task(self._drain(session, answering, writer), name="drain a stream")
        if not session.background:
            loop = asyncio.get_running_loop()
            session.expiry = loop.call_later(self._config.resume_s, self._end, session, "discarded")

    async def _drain(self, session: Session, answering: Answering, writer: Writer) -> None:
        try:
            await answering.outlet.run(answering, writer, Nowhere())
        except RequestError:
            pass  # the next reader gets it from `resume_log`
        except Exception:
            self._log.exception("stream failed unexpectedly", base_id=answering.base_id)
            self._end(session, "discarded")
        finally:
            if session.drain_task is asyncio.current_task():
                self._on_reader_ended(session, answering)

    def _attach_reader(self, session: Session, seen: Seen) -> tuple[Answering, Writer]:
        """Attach a new reader; the previous one ends with a 409. A 400 `RequestError` leaves the session unchanged."""
        old, resume_log = session.answering, session.resume_log
        answering = self._generator.new_answer(
            old.call, session.requests, old.generation, old.base_id, old.created_s, old.reserved
        )
        writer = session.api_request.writer(answering)
        writer = resuming_writer(answering, writer, resume_log.deltas, seen, may_be_ahead=session.client_may_be_ahead)
        # The new reader renders from the start again; the API key is charged for the most that any reader has rendered.
        session.rendered_tokens = max(session.rendered_tokens, old.completion_tokens)
        if session.expiry is not None:
            session.expiry.cancel()
        if session.drain_task is not None:
            session.drain_task.cancel()
            session.drain_task = None
        session.answering = answering
        fail_reader(old, taken_over_error())
        resume_log.reader = answering.outlet
        return answering, writer

    def _end(self, session: Session, outcome: Outcome) -> None:
        """End a session on this gateway: stop its generation and release what it reserved."""
        if session.over:
            return
        session.over = True
        self._sessions.pop(session.digest, None)
        if session.expiry is not None:
            session.expiry.cancel()
        if session.drain_task is not None and session.drain_task is not asyncio.current_task():
            session.drain_task.cancel()
        self._streams.abandon(session.answering.generation, "no client reads it any more")
        session.answering.reserved.release()
        self._finalizing[session.digest] = asyncio.create_task(self._finalize(session, outcome), name="end a stream")

    async def _finalize(self, session: Session, outcome: Outcome) -> None:
        still_holder = outcome != "taken_over"
        try:
            if session.journaled and still_holder:
                await self._journal.flush(session.digest)
                still_holder = await self._store_outcome(session, outcome)
        except DISK_ERRORS as failure:
            self._journal.log_failure(failure)
        finally:
            self._finalizing.pop(session.digest, None)
            if session.lease is not None:
                session.lease.free(charge=still_holder)

    async def _store_outcome(self, session: Session, outcome: Outcome) -> bool:
        """Store how a session ended. Return False if another gateway has the stream."""
        digest, holder, now_s = session.digest, self._holder_id, self._now_s()
        expires_s, api_request = self._expires_s(), session.api_request
        match outcome:
            case "finished":
                cached = [entry.cached_tokens for entry in session.answering.generation.entries]
                ending = Ending(cached, completed_at=api_request.completed_at, kept=bool(api_request.answer_stored))
                if (error := session.resume_log.error) is not None:
                    ending = structs.replace(ending, message=error.message, status=error.status, type=error.type_)
                    if session.background and isinstance(api_request, BackgroundRequest):
                        await api_request.keep_failure(session.answering.base_id, session.answering.created_s, error)
                return await self._journal.run(lambda store: store.end(digest, holder, ending, expires_s))
            case "released":
                used = session.used()
                if session.lease is not None:  # a reader that still renders adds nothing to what is stored as charged
                    session.lease.replace_usage_source(lambda: used)
                charged = session.charged_tokens + sum(used)
                expires_s = self._expires_s(background=session.background)
                return await self._journal.run(lambda store: store.release(digest, holder, expires_s, charged))
            case "discarded":
                return await self._journal.run(lambda store: store.discard(digest, holder, now_s))
            case "taken_over":
                return False
            case _:
                assert_never(outcome)

    def _on_lost(self, digest: str, by_gateway: bool) -> None:
        """End a session that another gateway has taken over, or that its client cancelled through another gateway."""
        session = self._sessions.get(digest)
        if session is not None:
            fail_reader(session.answering, taken_over_error() if by_gateway else cancelled_error())
            self._end(session, "taken_over" if by_gateway else "discarded")

    def _now_s(self) -> float:
        """Return the time in the store, which gateways share: the wall clock as it was at this one's start, and what
        has passed since. A wall clock that is set an hour forward ends no stream, one that is set back keeps none."""
        return self._started_s + self._clock.now_s()

    def _expires_s(self, *, background: bool = False) -> float:
        """Return when a stream expires that no gateway extends: one in the background waits for the next gateway."""
        within_s = self._config.resume_s
        return self._now_s() + (max(within_s, self._config.request_timeout_s) if background else within_s)

    async def _sweep(self) -> None:
        """Renew the expiry of this gateway's streams and discard expired ones, at most every `resume_s / 4`."""
        now_s = self._now_s()
        if now_s - self._swept_s >= self._config.resume_s / 4:
            self._swept_s = now_s
            digests, expires_s, background_s = list(self._sessions), self._expires_s(), self._expires_s(background=True)
            await self._journal.run(lambda store: store.refresh(digests, self._holder_id, expires_s, background_s))
            await self._journal.run(lambda store: store.sweep(now_s))

    async def run(self) -> None:
        """Run sweeps until cancelled."""
        while True:
            await asyncio.sleep(max(0.05, self._config.resume_s / 4))
            if self._config.resume_s and (self._journal.opened or self._database.is_file()):
                try:
                    await self._sweep()
                    await self._adopt()
                except DISK_ERRORS as error:
                    self._journal.log_failure(error)

    async def _adopt(self) -> None:
        """Continue streams in the background whose gateway has stopped: it has released them, or not extended them
        when it should have."""
        overdue_s = self._expires_s(background=True) - self._config.resume_s / 2
        for digest, owner in await self._journal.run(lambda store: store.left(overdue_s)):
            if digest in self._sessions or digest in self._finalizing:
                continue
            try:
                async with self._resume_locks.setdefault(digest, asyncio.Lock()):
                    self._start_drain(await self._claim_session(digest, owner))
            except RequestError as error:  # no worker yet, perhaps: it is tried again until it expires
                self._log.warning("an answer in the background cannot go on now", reason=error.message)

    async def _claim_session(self, digest: str, owner: str) -> Session:
        with self._generator.bodies.holding() as take:
            take(await self._run_or_refuse(lambda store: store.length(digest, owner)))
            claim = await self._claim(digest, owner)
            endpoint, api_request = await self._reparse(claim.record, claim.ending, owner)
        record = claim.record
        try:
            token = api_request.background_id(record.base_id, record.created_s)
            return self._continue(endpoint, api_request, claim, token, owner)
        except RequestError:
            holder, expires_s, charged = self._holder_id, self._expires_s(background=True), claim.charged
            await self._journal.run(lambda store: store.release(digest, holder, expires_s, charged))
            raise

    async def find_background(self, answer_id: str, owner: str) -> tuple[ApiRequest, str, float] | None:
        """Return the request of an answer that has not ended, with its `base_id` and `created_s`; None if there is
        none of this owner."""
        digest = digest_of(answer_id)
        if (session := self._sessions.get(digest)) is not None:
            answering = session.answering
            mine = session.background and session.owner == owner
            return (session.api_request, answering.base_id, answering.created_s) if mine else None
        if not self._journal.opened and not self._database.is_file():
            return None
        with self._generator.bodies.holding() as take:
            take(await self._run_or_refuse(lambda store: store.length(digest, owner)))
            record = await self._run_or_refuse(lambda store: store.record(digest, owner))
            if record is None or record.model != self._model:
                return None
            _, api_request = await self._reparse(record, None, owner)
        return api_request, record.base_id, record.created_s

    async def resume(self, request: web.Request) -> web.StreamResponse:
        """Answer GET /v1/streams/TOKEN with `Last-Event-ID`: what followed that event, and what is still to come."""
        return await self.follow(request, request.match_info["id"], request.headers.get(LAST_EVENT_HEADER, ""))

    async def follow(self, request: web.Request, token: str, last_event_id: str) -> web.StreamResponse:
        """Answer with the events after this one. Raises `RequestError`."""
        owner, digest = request[OWNER], digest_of(token)
        async with self._resume_locks.setdefault(digest, asyncio.Lock()):
            if (finalizing := self._finalizing.get(digest)) is not None:
                await asyncio.wait([finalizing])
            session = self._sessions.get(digest)
            if session is not None:
                if session.owner != owner:
                    raise unknown_error()
                seen = parse_last_event_id(session.endpoint.kind, len(session.requests), last_event_id)
                answering, writer = self._attach_reader(session, seen)
            else:
                with self._generator.bodies.holding() as take:
                    take(await self._run_or_refuse(lambda store: store.length(digest, owner)))
                    claim = await self._claim(digest, owner)
                    endpoint, api_request = await self._reparse(claim.record, claim.ending, owner)
                seen = parse_last_event_id(endpoint.kind, len(claim.record.requests), last_event_id)
                if claim.ending is not None:
                    answering, writer = self._replay_finished(api_request, claim, claim.ending, seen)
                else:
                    session = self._continue(endpoint, api_request, claim, token, owner)
                    try:
                        answering, writer = self._attach_reader(session, seen)
                    except RequestError:
                        self._start_drain(session)  # without it the claimed stream would have no reader
                        raise
        if session is not None:
            return await self._read(request, session, answering, writer)
        events = self._stream_to(endpoint, request, token)  # the stream has ended: there is no session
        try:
            sending = answering.outlet.run(answering, writer, events, endpoint.keepalive_s)
            return await events.run(sending, writer.failed)
        finally:
            answering.reserved.release()

    async def _reparse(self, record: StreamRecord, ending: Ending | None, owner: str) -> tuple[Endpoint, ApiRequest]:
        """Parse a stored request again. Raises `RequestError`."""
        endpoint = next(each for each in self._endpoints if (each.kind, each.chat) == (record.kind, record.chat))
        body = Body(record.body, Caller(owner, "", self._clock.now_s()), parse_context=record.beside)
        api_request = await endpoint.read(body, record.headers)
        if ending is not None:
            api_request.completed_at, api_request.answer_stored = ending.completed_at, ending.kept  # as stored
        self._generator.budget.check(api_request.call)
        return endpoint, api_request

    async def cancel(self, request: web.Request) -> web.Response:
        """Answer DELETE /v1/streams/TOKEN: end the stream."""
        await self.cancel_stream(request.match_info["id"], request[OWNER])
        return web.Response(status=204)

    async def cancel_stream(self, token: str, owner: str) -> None:
        """End a stream, here or on another gateway. Raises a 404 `RequestError`."""
        digest, now_s = digest_of(token), self._now_s()
        session = self._sessions.get(digest)
        if session is not None and session.owner == owner:
            fail_reader(session.answering, cancelled_error())
            self._end(session, "discarded")
        else:
            cancelled = await self._run_or_refuse(lambda store: store.cancel(digest, owner, now_s))
            if not cancelled:
                raise unknown_error()

    async def _claim(self, digest: str, owner: str) -> Claim:
        now_s, expires_s, background_s = self._now_s(), self._expires_s(), self._expires_s(background=True)
        claim = await self._run_or_refuse(
            lambda store: store.claim(
                digest, owner, self._holder_id, now_s=now_s, expires_s=expires_s, background_s=background_s
            )
        )
        if claim == "gone":
            raise RequestError(
                "This stream was cancelled or has expired: it must be resumed within "
                f"{self._config.resume_s:g} s (gateway.resume_s).",
                status=410,
            )
        if claim is None or claim.record.model != self._model:
            raise unknown_error()
        return claim

    async def _run_or_refuse(self, work: Callable[[ResumeStore], T]) -> T:
        if not self._config.resume_s:
            raise unknown_error()
        try:
            return await self._journal.run(work)
        except DISK_ERRORS as error:
            self._journal.log_failure(error)
            raise RequestError(
                "Streams cannot be resumed now: the server cannot read them. Please retry later.",
                status=503,
                type_="server_error",
                retry_after_s=1.0,
            ) from error

    def _replay_finished(
        self, api_request: ApiRequest, claim: Claim, ending: Ending, seen: Seen
    ) -> tuple[Answering, Writer]:
        """Return the answer of a stream that has ended, from its stored output."""
        record, call, now_s = claim.record, api_request.call, self._clock.now_s()
        entries = [ended_entry(now_s, each, claim.stored_deltas.get(i)) for i, each in enumerate(record.requests)]
        for entry, cached in zip(entries, ending.cached_tokens, strict=True):
            entry.cached_tokens = cached
        generation = Generation(GatewayTimes(arrived_s=now_s), entries)
        reserved = self._generator.reserve_budget(call, record.requests, lease=None)
        try:
            answering = self._generator.new_answer(
                call, record.requests, generation, record.base_id, record.created_s, reserved
            )
            writer = resuming_writer(answering, api_request.writer(answering), claim.stored_deltas, seen)
        except BaseException:
            reserved.release()
            raise
        if ending.error is not None:
            fail_reader(answering, ending.error)
        return answering, writer

    def _continue(self, endpoint: Endpoint, api_request: ApiRequest, claim: Claim, token: str, owner: str) -> Session:
        """Resubmit unfinished choices with their output in the prompt. Raises as a new request does; clients retry."""
        lease = self._lease_of(owner, api_request.call.traffic_class)
        try:
            return self._resubmit(endpoint, api_request, claim, token, owner, lease)
        except BaseException:
            if lease is not None:
                lease.free(charge=False)
            raise

    def _resubmit(
        self, endpoint: Endpoint, api_request: ApiRequest, claim: Claim, token: str, owner: str, lease: Lease | None
    ) -> Session:
        record, deltas, call, requests = claim.record, claim.stored_deltas, api_request.call, claim.record.requests
        unfinished = [i for i in range(len(requests)) if i not in deltas or deltas[i].finish is None]
        name, now_s = f"{record.base_id}-r{uuid.uuid4().hex[:8]}", self._clock.now_s()
        resubmitted = resubmissions(
            requests, deltas, unfinished, name=name, gateway=self._instance, arrival_s=self._clock.wall_s()
        )
        reserved = self._generator.reserve_budget(call, requests, lease)
        resume_log = ResumeLog(indexes=unfinished, deltas=deltas)
        times = GatewayTimes(arrived_s=now_s, on_slo_result=None if lease is None else lease.on_slo_result)
        try:
            offer = Offered(
                name,
                resubmitted,
                choices_per_prompt=1,
                chat=call.chat,
                text_bytes=len(record.body),
                stop_strings=len(call.stop_strings),
                owner=self._owners.queue_owner(owner),
                max_tokens_named=call.max_tokens is not None,
            )
            # Nothing is resubmitted if all choices had finished and only the stream's end was not stored.
            resubmission = self._streams.offer(offer, times, resume_log) if resubmitted else Generation(times)
        except BaseException:
            reserved.release()
            raise
        running = dict(zip(unfinished, resubmission.entries, strict=True))
        entries = [running.get(i) or ended_entry(now_s, request, deltas.get(i)) for i, request in enumerate(requests)]
        generation = Generation(times, entries)
        answering = self._generator.new_answer(call, requests, generation, record.base_id, record.created_s, reserved)
        output_tokens = sum(len(delta.tokens) for delta in deltas.values())
        session = Session(token, digest_of(token), owner, resume_log, answering, requests, lease, endpoint, api_request)
        session.charged_tokens = claim.charged
        session.background = bool(api_request.background_id(record.base_id, record.created_s))
        session.journaled = session.token_announced = session.client_may_be_ahead = True  # if its disk failed
        self._hold_lease(session)
        self._sessions[session.digest] = session
        self._log.info("resumed a stream of another gateway", base_id=record.base_id, output_tokens=output_tokens)
        resume_log.call_when_unwritten(lambda: self._schedule_write(session))
        return session
