"""Hosts the gateway machine: tells it what happened and does what it asks; a stream survives whatever its workers do.

    HTTP handlers ─▶ Estimated, Offered, Closed ─▶ machine ─▶ effects ─┬─▶ mailbox of the waiting HTTP handler
    bus ─▶ Received ──────────────────────────────▶   ▲                ├─▶ bus (Undelivered, where that fails)
    timer ─▶ Tick ────────────────────────────────────┘                └─▶ metrics, log lines, the timer

Called by `openai_api.py` (check, offer, stop, abandon) and `service.py` (messages, start, drain). Decides nothing. What
waits in a mailbox is bounded by the request's own max_tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import assert_never

import structlog

from cohort.common.clock import Clock
from cohort.common.errors import PeerUnreachable, RequestError
from cohort.common.machines.effects import (
    Admitted,
    Deliver,
    Ended,
    Fail,
    GatewayEffect,
    ManagerFound,
    Rejected,
    Send,
    Wake,
)
from cohort.common.machines.entry import Entry
from cohort.common.machines.events import Closed, Estimated, GatewayEvent, Offered, Tick, Undelivered
from cohort.common.machines.gateway import GatewayMachine
from cohort.common.machines.machine import Machine
from cohort.common.messages import Message, Submit, TokenLogprob
from cohort.common.metrics import RequestMetrics
from cohort.common.types import FinishReason, InstanceId, RequestId, TrafficClass
from cohort.services.gateway.figures import Recent
from cohort.services.gateway.timing import GatewayTimes, slo_outcomes, tpot_s, ttft_stages


@dataclass(slots=True)
class Delta:
    """What arrived for one choice since its handler last looked."""

    index: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: FinishReason | None = None
    error: RequestError | None = None


class Mailbox:
    """Deltas of one HTTP request's choices, merged per choice until the handler takes them."""

    def __init__(self) -> None:
        self._ready: dict[int, Delta] = {}  # insertion order: the choice that waits longest first
        self._something = asyncio.Event()

    def put(
        self,
        index: int,
        *,
        tokens: Sequence[int] = (),
        logprobs: Sequence[TokenLogprob] = (),
        finish: FinishReason | None = None,
        error: RequestError | None = None,
    ) -> None:
        delta = self._ready.setdefault(index, Delta(index))
        delta.tokens += tokens
        delta.logprobs += logprobs
        delta.finish = finish or delta.finish
        delta.error = error or delta.error
        self._something.set()

    async def next(self) -> Delta:
        """Waits without a deadline of its own: the ledger ends every request by its deadline at the latest."""
        while not self._ready:
            self._something.clear()
            await self._something.wait()
        return self._ready.pop(next(iter(self._ready)))


@dataclass(slots=True)
class Generation:
    """All choices of one HTTP request. Without entries until it is admitted."""

    times: GatewayTimes
    mailbox: Mailbox = field(default_factory=Mailbox)
    entries: list[Entry] = field(default_factory=list)

    @property
    def request_ids(self) -> list[RequestId]:
        return [entry.request_id for entry in self.entries]


@dataclass(slots=True)
class _Track:
    """An open request and the handler that waits for it."""

    generation: Generation
    index: int
    last_token_s: float | None = None


class Streams:
    def __init__(
        self,
        machine: GatewayMachine,
        hosted: Machine[GatewayEvent, GatewayEffect],
        *,
        send: Callable[[InstanceId, Message], None],
        clock: Clock,
        metrics: RequestMetrics,
        log: structlog.stdlib.BoundLogger,
    ) -> None:
        """`hosted` is told events: `machine` itself, or a recorder around it. `send` may raise `PeerUnreachable`."""
        self.ledger = machine.ledger
        self._machine = machine
        self._hosted = hosted
        self._send = send
        self._clock = clock
        self._metrics = metrics
        self._log = log
        self._tracks: dict[RequestId, _Track] = {}
        self._empty = asyncio.Event()
        self._empty.set()
        self._timer: asyncio.TimerHandle | None = None
        self._offered: Generation | None = None
        """Whose offer the machine is deciding on."""
        self._refusal: RequestError | None = None
        self._dropped = self._defaults = 0
        """Of the machine's totals, what the metrics have already."""
        self._online_waited = False
        self.on_online_placed: Callable[[], None] = lambda: None
        """Called when the last online request that waited for a worker has one, or is gone."""
        self.on_told: Callable[[], None] = lambda: None
        """Called whenever something happened, time included."""
        self.recent = Recent()

    def __len__(self) -> int:
        return len(self._tracks)

    # -- For the HTTP handlers -------------------------------------------------------------------------------------

    def check(self, body_bytes: int, traffic_class: TrafficClass) -> None:
        """Before any work. Raises a 429 or 503 `RequestError`."""
        self._decide(Estimated("", body_bytes, traffic_class))

    def offer(self, offer: Offered, times: GatewayTimes) -> Generation:
        """All of the offer's requests come in, or none: then raises a 429 or 503 `RequestError`. Must be abandoned in
        the end."""
        self._offered = generation = Generation(times)
        self._decide(offer)
        return generation

    def stop(self, generation: Generation, index: int) -> None:
        """A stop string ended this choice: nothing more is wanted of it."""
        self._close(generation.entries[index], FinishReason.STOP, "a stop string was found")

    def abandon(self, generation: Generation, reason: str = "the client went away") -> None:
        """The handler ends: free what is still open. Harmless after a complete answer."""
        for entry in generation.entries:
            self._close(entry, FinishReason.CANCELLED, reason)

    async def drained(self) -> None:
        """Returns once no request is open; the caller sets the deadline."""
        await self._empty.wait()

    # -- For the service -------------------------------------------------------------------------------------------

    def tell(self, *events: GatewayEvent) -> None:
        """These events happened, now. Without any: does what is left over from a call that failed."""
        lost = self._perform(self._hosted.handle(self._clock.now_s(), *events))
        while lost:
            lost = self._perform(self._hosted.handle(self._clock.now_s(), *lost))
        if more := self.ledger.dropped_tokens_total - self._dropped:
            self._dropped += more
            self._metrics.stale_tokens().inc(more)
        if more := self._machine.default_predictions_total - self._defaults:
            self._defaults += more
            self._metrics.default_predictions().inc(more)
        if self._online_waited and not self.ledger.waiting_online:
            self._online_waited = False
            self.on_online_placed()
        self.on_told()

    def end(self) -> None:
        """No more ticks."""
        if self._timer is not None:
            self._timer.cancel()

    # -- Effects ---------------------------------------------------------------------------------------------------

    def _perform(self, effects: Sequence[GatewayEffect]) -> list[Undelivered]:
        """Returns what could not be sent. A defect in one effect must not keep the others from being performed."""
        lost: list[Undelivered] = []
        for effect in effects:
            try:
                match effect:
                    case Deliver():
                        self._deliver(effect)
                    case Send(peer, message):
                        self._note(message)
                        try:
                            self._send(peer, message)
                        except PeerUnreachable as error:
                            self._log.debug("not sent", peer=peer, type=type(message).__name__, reason=str(error))
                            lost.append(Undelivered(peer, message))
                    case Wake(at_s):
                        self._set_timer(at_s)
                    case Admitted(_, entries):
                        self._open(entries)
                    case Rejected(_, error):
                        self._refusal = error
                    case Fail(entry, error):
                        track = self._tracks.get(entry.request_id)
                        if track is not None:
                            track.generation.mailbox.put(track.index, error=error)
                    case Ended(entry, finish, reason):
                        self._finalize(entry, finish, reason)
                    case ManagerFound(incarnation, outstanding):
                        self._log.info("manager is there", manager_incarnation=incarnation, outstanding=outstanding)
                    case _:
                        assert_never(effect)
            except Exception:
                self._log.exception("effect failed", type=type(effect).__name__)
        return lost

    def _decide(self, offer: Estimated | Offered) -> None:
        self._refusal = None
        try:
            self.tell(offer)
        finally:
            self._offered = None
        if self._refusal is not None:
            raise self._refusal

    def _open(self, entries: list[Entry]) -> None:
        generation = self._offered
        if generation is None:  # an estimate
            return
        generation.entries = entries
        for index, entry in enumerate(entries):
            request = entry.request
            self._tracks[request.request_id] = _Track(generation, index)
            self._metrics.in_flight(request.traffic_class).inc()
            self._metrics.prompt_tokens(request.traffic_class).inc(request.prompt_tokens)
            self.recent.accepted(request.prompt_tokens)
            self._online_waited = self._online_waited or request.online
        if entries:
            self._empty.clear()

    def _note(self, message: Message) -> None:
        """A line in the log for what is submitted once more."""
        if not isinstance(message, Submit) or not message.request.attempt.number:
            return
        entry = self.ledger.get(message.request.request_id)
        if entry is not None:
            self._log.info(
                "resubmitting",
                request_id=entry.request_id,
                attempt=entry.attempt.number,
                tokens=len(entry.output),
                reason=entry.lost_because,
            )
            self._metrics.resubmissions(entry.lost_kind).inc()

    def _set_timer(self, at_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(max(0.0, at_s - self._clock.now_s()), self._tick)

    def _tick(self) -> None:
        try:
            self.tell(Tick())
        except Exception:
            self._log.exception("tick failed")
            self.tell()

    def _deliver(self, action: Deliver) -> None:
        entry = action.entry
        track = self._tracks.get(entry.request_id)
        if track is None:
            return
        if action.tokens:
            self._observe_tokens(track, entry, len(action.tokens))
        track.generation.mailbox.put(track.index, tokens=action.tokens, logprobs=action.logprobs, finish=action.finish)

    def _observe_tokens(self, track: _Track, entry: Entry, count: int) -> None:
        now_s = entry.last_token_s or self._clock.now_s()
        traffic_class = entry.request.traffic_class
        self._metrics.generation_tokens(traffic_class).inc(count)
        if track.last_token_s is None:
            ttft = now_s - track.generation.times.arrived_s
            self._metrics.ttft_seconds(traffic_class).observe(ttft)
            self._metrics.observe_ttft_stages(traffic_class, ttft_stages(track.generation.times, entry))
            self.recent.first_token(ttft, count)
        else:
            # Tokens that came together share the time since the last one.
            gap_s = (now_s - track.last_token_s) / count
            histogram = self._metrics.itl_seconds(traffic_class)
            for _ in range(count):
                histogram.observe(gap_s)
            self.recent.tokens(gap_s, count)
        track.last_token_s = now_s

    # -- Endings ---------------------------------------------------------------------------------------------------

    def _close(self, entry: Entry, finish: FinishReason, reason: str) -> None:
        if self.ledger.get(entry.request_id) is entry:
            self.tell(Closed(entry.request_id, finish, reason))

    def _finalize(self, entry: Entry, finish: FinishReason, reason: str) -> None:
        """The request is over: count it, log it."""
        track = self._tracks.pop(entry.request_id, None)
        if track is None:
            return
        if not self._tracks:
            self._empty.set()
        request, times = entry.request, track.generation.times
        e2e_s = self._clock.now_s() - times.arrived_s
        ttft_s = None if entry.first_token_s is None else entry.first_token_s - times.arrived_s
        self._count(entry, finish, ttft_s, e2e_s)
        write = self._log.warning if finish is FinishReason.FAILED else self._log.info
        write(
            "request finished",
            request_id=request.request_id,
            status=finish.value,
            reason=reason or None,
            prompt_tokens=request.prompt_tokens,
            output_tokens=len(entry.output),
            cached_tokens=entry.cached_tokens,
            ttft_s=None if ttft_s is None else round(ttft_s, 6),
            e2e_s=round(e2e_s, 6),
            attempts=entry.attempt.number + 1,
            instances=entry.instances,
            traffic_class=request.traffic_class,
        )

    def _count(self, entry: Entry, finish: FinishReason, ttft_s: float | None, e2e_s: float) -> None:
        request, metrics = entry.request, self._metrics
        traffic_class = request.traffic_class
        metrics.in_flight(traffic_class).dec()
        metrics.request_success(traffic_class, finish.value).inc()
        self.recent.ended(finish)
        if finish is FinishReason.CANCELLED:
            return  # its times say when the client left, not how fast we were
        metrics.e2e_seconds(traffic_class).observe(e2e_s)
        metrics.request_prompt_tokens(traffic_class).observe(request.prompt_tokens)
        metrics.request_generation_tokens(traffic_class).observe(len(entry.output))
        if entry.first_times is not None:
            metrics.queue_seconds(traffic_class).observe(entry.bucket_s + entry.first_times.queue_s)
            metrics.prefill_seconds(traffic_class).observe(entry.first_times.prefill_s)
        if entry.first_token_s is not None and entry.last_token_s is not None:
            metrics.decode_seconds(traffic_class).observe(entry.last_token_s - entry.first_token_s)
        per_token_s = tpot_s(entry)
        if per_token_s is not None:
            metrics.tpot_seconds(traffic_class).observe(per_token_s)
        outcomes = slo_outcomes(
            request.slo, ttft_s=ttft_s, per_token_s=per_token_s, e2e_s=None if finish is FinishReason.FAILED else e2e_s
        )
        for objective, met in outcomes.items():
            metrics.slo(traffic_class, objective, "met" if met else "missed").inc()
