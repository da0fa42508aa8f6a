"""Joins the ledger to the handlers that wait for its tokens; a stream survives whatever happens to its workers.

    TokenBatch, Placed, Displaced … ─▶ ledger ─▶ actions ─┬─▶ mailbox of the waiting HTTP handler
                                                          ├─▶ Submit, Cancel ─▶ manager, workers
                                                          └─▶ metrics, log line, what the predictor learns

Called by `openai_api.py` (open, start, stop, abandon) and `service.py` (messages, ticks). Performs actions and never
decides what a message means. What waits in a mailbox is bounded by the request's own max_tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import structlog

from cohort.common.clock import Clock
from cohort.common.errors import PeerUnreachable, RequestError
from cohort.common.messages import (
    Cancel,
    LengthFacts,
    Message,
    ObserveLength,
    PredictLength,
    RevisePrediction,
    TokenBatch,
    TokenLogprob,
)
from cohort.common.messages import Submit as SubmitMessage
from cohort.common.metrics import RequestMetrics
from cohort.common.types import Attempt, FinishReason, InstanceId, Prediction, Request, RequestId
from cohort.services.gateway.figures import Recent
from cohort.services.gateway.ledger import Action, CancelAttempt, Deliver, Entry, Fail, Ledger, Submit
from cohort.services.gateway.prediction import PredictorClient
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
    """All choices of one HTTP request."""

    entries: list[Entry]
    times: GatewayTimes
    mailbox: Mailbox
    chat: bool
    prompt_bytes: int
    stop_strings: int

    @property
    def request_ids(self) -> list[RequestId]:
        return [entry.request_id for entry in self.entries]


@dataclass(slots=True)
class _Track:
    """An open request: who waits for it."""

    generation: Generation
    index: int
    last_token_s: float | None = None


class Streams:
    def __init__(
        self,
        ledger: Ledger,
        *,
        to_manager: Callable[[Message], None],
        to_worker: Callable[[InstanceId, Message], None],
        to_predictor: Callable[[Message], None],
        clock: Clock,
        metrics: RequestMetrics,
        log: structlog.stdlib.BoundLogger,
        predictor_wait_s: float,
        default_prediction_tokens: int,
    ) -> None:
        """The three senders may raise `PeerUnreachable`."""
        self.ledger = ledger
        self._to_manager = to_manager
        self._to_worker = to_worker
        self._clock = clock
        self._metrics = metrics
        self._log = log
        self._default_tokens = float(default_prediction_tokens)
        self.predictor = PredictorClient(
            to_predictor,
            clock,
            wait_s=predictor_wait_s,
            default_tokens=default_prediction_tokens,
            late=self._on_late_prediction,
        )
        self._tracks: dict[RequestId, _Track] = {}
        self._empty = asyncio.Event()
        self._empty.set()
        self._online_waited = False
        self.on_online_placed: Callable[[], None] = lambda: None
        """Called when the last online request that waited for a worker has one, or is gone."""
        self.recent = Recent()

    def __len__(self) -> int:
        return len(self._tracks)

    # -- For the HTTP handlers -------------------------------------------------------------------------------------

    def open(
        self, requests: Sequence[Request], times: GatewayTimes, *, chat: bool, prompt_bytes: int, stop_strings: int
    ) -> Generation:
        """Own these requests from now on; `start` submits them. Whoever opens must `abandon` in the end."""
        now_s = self._clock.now_s()
        entries = [
            self.ledger.open(
                now_s, request, expected_output=min(self._default_tokens, float(request.sampling.max_tokens))
            )
            for request in requests
        ]
        generation = Generation(entries, times, Mailbox(), chat, prompt_bytes, stop_strings)
        for index, request in enumerate(requests):
            self._tracks[request.request_id] = _Track(generation, index)
            self._metrics.in_flight(request.traffic_class).inc()
            self._metrics.prompt_tokens(request.traffic_class).inc(request.prompt_tokens)
            self.recent.accepted(request.prompt_tokens)
            self._online_waited = self._online_waited or request.online
        self._empty.clear()
        return generation

    async def start(self, generation: Generation) -> None:
        """Ask how long the answers will be, briefly, and submit."""
        began_s = self._clock.now_s()
        groups = _by_prompt(generation.entries)
        questions = [PredictLength(group[0].request_id, _facts(generation, group[0].request)) for group in groups]
        predictions = await self.predictor.predict(questions)
        generation.times.predict_s = self._clock.now_s() - began_s
        for group, prediction in zip(groups, predictions, strict=True):
            if prediction.source == "default":
                self._metrics.default_predictions().inc(len(group))
            for entry in group:
                self.ledger.predicted(entry.request_id, prediction)
        for entry in generation.entries:
            self.perform(self.ledger.submit(entry.request_id))

    def stop(self, generation: Generation, index: int) -> None:
        """A stop string ended this choice: nothing more is wanted of it."""
        entry = generation.entries[index]
        self._close(entry, FinishReason.STOP, "a stop string was found")

    def abandon(self, generation: Generation, reason: str = "the client went away") -> None:
        """The handler ends: free what is still open. Harmless after a complete answer."""
        for entry in generation.entries:
            self._close(entry, FinishReason.CANCELLED, reason)

    async def drained(self) -> None:
        """Returns once no request is open; the caller sets the deadline."""
        await self._empty.wait()

    # -- For the service -------------------------------------------------------------------------------------------

    def on_tokens(self, sender: InstanceId, batch: TokenBatch) -> None:
        now_s = self._clock.now_s()
        before = self.ledger.dropped_tokens_total
        for update in batch.updates:
            self.perform(self.ledger.tokens(now_s, sender, update))
        if dropped := self.ledger.dropped_tokens_total - before:
            self._metrics.stale_tokens().inc(dropped)

    def perform(self, actions: Iterable[Action]) -> None:
        for action in actions:
            match action:
                case Deliver():
                    self._deliver(action)
                case Fail(entry, error):
                    track = self._tracks.get(entry.request_id)
                    if track is not None:
                        track.generation.mailbox.put(track.index, error=error)
                    self._finalize(entry, FinishReason.FAILED, error.message)
                case Submit(entry):
                    if entry.attempt.number:
                        self._log.info(
                            "resubmitting",
                            request_id=entry.request_id,
                            attempt=entry.attempt.number,
                            tokens=len(entry.output),
                            reason=entry.lost_because,
                        )
                        self._metrics.resubmissions(entry.lost_kind).inc()
                    self._submit(entry)
                case CancelAttempt(attempt, holders, reason):
                    self._cancel(attempt, holders, reason)
        if self._online_waited and not self.ledger.waiting_online:
            self._online_waited = False
            self.on_online_placed()

    def resubmit_unsent(self) -> None:
        """Try again what could not be handed to the manager."""
        for entry in self.ledger.unsubmitted():
            if entry.prediction is not None:  # otherwise its handler is still waiting for one
                self.perform(self.ledger.submit(entry.request_id))

    # -- Within ----------------------------------------------------------------------------------------------------

    def _submit(self, entry: Entry) -> None:
        try:
            self._to_manager(SubmitMessage(entry.current()))
        except PeerUnreachable as error:
            self._log.debug("manager unreachable, the request waits", request_id=entry.request_id, reason=str(error))
        else:
            self.ledger.submitted(self._clock.now_s(), entry.request_id)

    def _cancel(self, attempt: Attempt, holders: Iterable[InstanceId], reason: str) -> None:
        message = Cancel([attempt], reason)
        try:
            self._to_manager(message)
        except PeerUnreachable:
            self._log.debug("manager unreachable, cancel not sent", request_id=attempt.request_id)
        for holder in holders:
            try:
                self._to_worker(holder, message)
            except PeerUnreachable:  # dead, or never spoke to us: the manager's cancel reaches it
                self._log.debug("worker unreachable, cancel not sent", request_id=attempt.request_id, worker=holder)

    def _deliver(self, action: Deliver) -> None:
        entry = action.entry
        track = self._tracks.get(entry.request_id)
        if track is None:
            return
        if action.tokens:
            self._observe_tokens(track, entry, len(action.tokens))
        track.generation.mailbox.put(track.index, tokens=action.tokens, logprobs=action.logprobs, finish=action.finish)
        if action.finish is not None:
            self._finalize(entry, action.finish, "")

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

    def _close(self, entry: Entry, finish: FinishReason, reason: str) -> None:
        if self.ledger.get(entry.request_id) is not entry:
            return
        self.perform(self.ledger.close(entry.request_id, reason))
        self._finalize(entry, finish, reason)

    def _finalize(self, entry: Entry, finish: FinishReason, reason: str) -> None:
        """The request is over: count it, log it, learn from it."""
        track = self._tracks.pop(entry.request_id, None)
        if track is None:
            return
        if not self._tracks:
            self._empty.set()
        self.predictor.forget(entry.request_id)
        request, times = entry.request, track.generation.times
        e2e_s = self._clock.now_s() - times.arrived_s
        ttft_s = None if entry.first_token_s is None else entry.first_token_s - times.arrived_s
        self._count(entry, finish, ttft_s, e2e_s)
        complete = finish in (FinishReason.STOP, FinishReason.LENGTH)
        if complete and entry.output:
            self.predictor.observe(
                ObserveLength(
                    request.request_id,
                    _facts(track.generation, request),
                    output_tokens=len(entry.output),
                    truncated=finish is FinishReason.LENGTH,
                )
            )
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

    def _on_late_prediction(self, request_id: RequestId, prediction: Prediction) -> None:
        """It was submitted with the default: correct that, for all choices of the same prompt."""
        track = self._tracks.get(request_id)
        if track is None:
            return
        tokens = track.generation.entries[track.index].request.tokens
        for entry in track.generation.entries:
            if entry.request.tokens is tokens and self.ledger.predicted(entry.request_id, prediction):
                try:
                    self._to_manager(RevisePrediction(entry.request_id, prediction))
                except PeerUnreachable:
                    return  # it rides along when the request is submitted again


def _facts(generation: Generation, request: Request) -> LengthFacts:
    return LengthFacts(
        tokens=request.tokens,
        chat=generation.chat,
        max_tokens=request.sampling.max_tokens,
        temperature=request.sampling.temperature,
        stop_strings=generation.stop_strings,
        text_bytes=generation.prompt_bytes,
    )


def _by_prompt(entries: Sequence[Entry]) -> list[list[Entry]]:
    """Choices of one prompt share its token list, and one prediction."""
    groups: dict[int, list[Entry]] = {}
    for entry in entries:
        groups.setdefault(id(entry.request.tokens), []).append(entry)
    return list(groups.values())
