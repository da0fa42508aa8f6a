"""Hosts the gateway machine: feeds it events and performs its effects; a stream survives the failures of its workers.

    HTTP handlers ─▶ Estimated, Offered, Closed ─▶ machine ─▶ effects ─┬─▶ outlet of the answer, or its resume log
    bus ─▶ Received ──────────────────────────────▶   ▲                ├─▶ bus (Undelivered, where that fails)
    timer ─▶ Tick ────────────────────────────────────┘                └─▶ metrics, log lines, the timer

Called by `generator.py` (check, offer, stop, abandon) and `service.py` (messages, start, drain). Decides nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
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
from cohort.common.machines.gateway.gateway import GatewayMachine
from cohort.common.machines.machine import Machine
from cohort.common.messages import Message, Submit
from cohort.common.process.activity import Activity
from cohort.common.process.metrics import RequestMetrics
from cohort.common.types import FinishReason, InstanceId, RequestId, TrafficClass
from cohort.services.gateway.generation.delta import Delta, GatewayTimes, Generation, TokenSink
from cohort.services.gateway.generation.request_stats import RequestStats


@dataclass(slots=True)
class _Track:
    generation: Generation
    index: int
    token_sink: TokenSink
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
        activity: Activity | None = None,
    ) -> None:
        """`hosted` gets the events: `machine` itself, or a recorder around it. `send` may raise `PeerUnreachable`."""
        self.ledger = machine.ledger
        self._machine = machine
        self._hosted = hosted
        self._send = send
        self._clock = clock
        self._log = log
        self._activity = activity or Activity()
        self.stats = RequestStats(metrics, log)
        self._tracks: dict[RequestId, _Track] = {}
        self._empty = asyncio.Event()
        self._empty.set()
        self._timer: asyncio.TimerHandle | None = None
        self._deciding: RequestId = ""
        """The offer that the machine is deciding on."""
        self._offered: tuple[Generation, TokenSink] | None = None
        """Generation under decision; None for an estimate."""
        self._refusal: RequestError | None = None
        self._online_waited = False
        self.online_placed = asyncio.Event()
        """Event set when no online request waits for a worker any more."""
        self.on_events: Callable[[], None] = lambda: None
        """Callback after every event, time included."""

    def __len__(self) -> int:
        return len(self._tracks)

    def check(self, body_bytes: int, traffic_class: TrafficClass, owner: str = "") -> None:
        """Check admission before any work; `owner` as in `Offered`. Raises a 429 or 503 `RequestError`."""
        self._decide(Estimated("estimate", body_bytes, traffic_class, owner), None)

    def offer(self, offer: Offered, times: GatewayTimes, token_sink: TokenSink) -> Generation:
        """Admit all of the offer's requests or raise a 429 or 503 `RequestError`. Abandon the result in the end."""
        generation = Generation(times)
        self._decide(offer, (generation, token_sink))
        return generation

    def stop(self, generation: Generation, index: int) -> None:
        """End a choice at which a stop string was found."""
        self._close(generation.entries[index], FinishReason.STOP, "a stop string was found")

    def abandon(self, generation: Generation, reason: str = "the client went away") -> None:
        """Cancel the choices that are still open. Harmless after a complete answer."""
        for entry in generation.entries:
            self._close(entry, FinishReason.CANCELLED, reason)

    async def drained(self) -> None:
        """Wait until no request is open; the caller sets the deadline."""
        await self._empty.wait()

    def open_requests(self) -> Iterator[tuple[Entry, GatewayTimes]]:
        """Yield open requests, the latest first, for introspection."""
        for track in reversed(self._tracks.values()):
            yield track.generation.entries[track.index], track.generation.times

    def feed(self, *events: GatewayEvent) -> None:
        """Pass events to the machine. Without any, the effects left by a call that failed are performed."""
        lost = self._perform(self._hosted.handle(self._clock.now_s(), *events))
        while lost:
            lost = self._perform(self._hosted.handle(self._clock.now_s(), *lost))
        self.stats.observe()
        self.stats.totals(self.ledger.dropped_tokens_total, self._machine.default_predictions_total)
        if self._online_waited and not self.ledger.waiting_online:
            self._online_waited = False
            self.online_placed.set()
        if self._tracks:
            self._activity.work.set()
        self.on_events()

    def end(self) -> None:
        """Stop the ticks."""
        if self._timer is not None:
            self._timer.cancel()

    def _perform(self, effects: Sequence[GatewayEffect]) -> list[Undelivered]:
        """Perform effects, also after a defect in one of them, and return the messages that were not sent."""
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
                    case Admitted(offer_id, entries):
                        self._admitted(offer_id, entries)
                    case Rejected(offer_id, error):
                        if offer_id == self._deciding:
                            self._refusal = error
                    case Fail(entry, error):
                        track = self._tracks.get(entry.request_id)
                        if track is not None:
                            track.token_sink.put(Delta(track.index, error=error))
                    case Ended(entry, finish, reason):
                        self._finalize(entry, finish, reason)
                    case ManagerFound(incarnation, outstanding, manager):
                        self._log.info(
                            "manager is there",
                            manager=manager,
                            manager_incarnation=incarnation,
                            outstanding=outstanding,
                        )
                    case _:
                        assert_never(effect)
            except Exception:
                self._log.exception("effect failed", type=type(effect).__name__)
        return lost

    def _decide(self, offer: Estimated | Offered, offered: tuple[Generation, TokenSink] | None) -> None:
        self._deciding, self._offered, self._refusal = offer.offer_id, offered, None
        try:
            self.feed(offer)
        finally:
            self._deciding, self._offered = "", None
        if self._refusal is not None:
            raise self._refusal

    def _admitted(self, offer_id: RequestId, entries: list[Entry]) -> None:
        if self._deciding != offer_id or self._offered is None or not entries:
            return
        generation, token_sink = self._offered
        generation.entries = entries
        for index, entry in enumerate(entries):
            self._tracks[entry.request_id] = _Track(generation, index, token_sink)
            self.stats.admitted(entry.request)
            self._online_waited = self._online_waited or entry.request.online
        self._empty.clear()

    def _note(self, message: Message) -> None:
        """Log a request that is submitted again."""
        if isinstance(message, Submit) and message.request.attempt.number:
            entry = self.ledger.get(message.request.request_id)
            if entry is not None:
                self.stats.resubmitted(entry)

    def _set_timer(self, at_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(max(0.0, at_s - self._clock.now_s()), self._tick)

    def _tick(self) -> None:
        try:
            self.feed(Tick(self._activity.quiet_s()))
        except Exception:
            self._log.exception("tick failed")
            self.feed()

    def _deliver(self, action: Deliver) -> None:
        entry = action.entry
        track = self._tracks.get(entry.request_id)
        if track is None:
            return
        tokens = action.tokens
        if tokens:
            now_s = entry.last_token_s or self._clock.now_s()
            if track.last_token_s is None:
                self.stats.first_tokens(now_s, entry, track.generation.times, len(tokens))
            else:
                self.stats.tokens(entry.request.traffic_class, now_s - track.last_token_s, len(tokens))
            track.last_token_s = now_s
        if action.finish is None and not action.logprobs:
            track.token_sink.put_tokens(track.index, tokens)
        else:
            track.token_sink.put(Delta(track.index, tokens, action.logprobs, action.finish))

    def _close(self, entry: Entry, finish: FinishReason, reason: str) -> None:
        if self.ledger.get(entry.request_id) is entry:
            self.feed(Closed(entry.request_id, finish, reason))

    def _finalize(self, entry: Entry, finish: FinishReason, reason: str) -> None:
        track = self._tracks.pop(entry.request_id, None)
        if track is None:
            return
        if not self._tracks:
            self._empty.set()
        self.stats.ended(self._clock.now_s(), entry, track.generation.times, finish, reason)
