"""A worker's part of a trace: one span per segment of a request, with the parts of it below.

    segment ─┬─ wait            from its arrival to its first iteration
             ├─ prefill         one for each iteration that computes prompt positions
             ├─ send, receive KV (`TransferSpans`)
             └─ decode          all decode iterations as one; events: preempted, evicted, bound

The segment's own events: the first token it sampled, and how it ended. Told of every call of the machine by
`observed.py`. A row costs a dictionary look-up; requests without a traceparent are in no dictionary.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from cohort.common.machines.effects import Send, SendRuns, StartStep, WorkerEffect
from cohort.common.machines.events import Received, StepEnded, StepFailed, WorkerEvent
from cohort.common.messages import (
    BindSegment,
    Cancel,
    KvAbort,
    KvAccepted,
    KvChunk,
    KvHandoff,
    KvOffer,
    Message,
    SegmentEnded,
    StartSegment,
)
from cohort.common.policies.interface import IterationPlan
from cohort.common.tracing.spans import OpenSpan, Tracing
from cohort.common.tracing.traceparent import TraceParent, parse
from cohort.common.types import Attempt, InstanceId, Outcome

MOST = 65_536
"""Number of segments that are open at once; beyond it, the oldest ends early."""
EARLY = 1024
"""Number of remembered offers whose segment has not come, of requests that may not be traced at all."""
ENDED = 4096
"""Number of remembered attempts that have ended: a message that comes twice begins no second segment."""
Direction = Literal["send", "receive"]
_IN_VAIN = (Outcome.FAILED, Outcome.CANCELLED)


@dataclass(slots=True)
class _Segment:
    span: OpenSpan
    arrived_s: float
    prompt_tokens: int
    scheduled: bool = False
    first_token: bool = False
    decode: OpenSpan | None = None
    decoded: int = 0
    decoded_s: float = 0.0
    """Time at which the last decode iteration ended."""
    moves: list[tuple[float, str, str]] = field(default_factory=list)
    """Preemptions and the like before the first decode iteration."""


class WorkerSpans:
    def __init__(self, tracing: Tracing) -> None:
        self._tracing = tracing
        self._segments: dict[Attempt, _Segment] = {}
        self._transfers = TransferSpans(tracing)
        self._steps: deque[tuple[IterationPlan, float]] = deque()
        """Plan and start of the iteration in flight, and of the one queued after it."""
        self._ended_s = 0.0
        self._early: dict[Attempt, tuple[InstanceId, KvOffer]] = {}
        """Offers that came before their segment."""
        self._recently_ended: dict[Attempt, None] = {}

    def __len__(self) -> int:
        return len(self._segments) + len(self._transfers)

    def handled(
        self, now_s: float, took_s: float, events: Sequence[WorkerEvent], effects: Sequence[WorkerEffect]
    ) -> None:
        cancelled: list[Attempt] = []
        for event in events:
            match event:
                case Received(sender=sender, message=message):
                    self._received(now_s, sender, message)
                    if isinstance(message, Cancel):
                        cancelled += message.attempts
                case StepEnded():
                    self._step_ended(now_s, event)
                case StepFailed(reason=reason):
                    self._steps.clear()
                    for segment in self._segments.values():
                        segment.span.event(now_s, "iteration failed", reason=reason)
                case _:
                    pass
        for effect in effects:
            match effect:
                case StartStep(plan=plan):
                    self._step_begins(now_s + took_s, plan)
                case Send(peer=peer, message=message) if self._segments:
                    self._sent(now_s, peer, message)
                case SendRuns(attempt=attempt, link=link, runs=runs):
                    self._transfers.moves(attempt, "send", link, len(runs), sum(run.num_blocks for run in runs))
                case _:
                    pass
        for attempt in cancelled:
            self._end(now_s, attempt, "cancelled", "cancelled")

    # -- messages --------------------------------------------------------------------------------------------------

    def _received(self, now_s: float, sender: InstanceId, message: Message) -> None:
        match message:
            case StartSegment(request=request) if request.traceparent:
                self._start(now_s, message)
            case BindSegment(attempt=attempt, segment=bound):
                self._moved(now_s, attempt, "bound", bound.instance or "")
            case KvOffer(attempt=attempt) if attempt not in self._segments:
                self._early[attempt] = sender, message
                if len(self._early) > EARLY:
                    del self._early[next(iter(self._early))]
            case KvOffer() | KvHandoff() | KvAccepted() | KvAbort() | KvChunk():
                self._transferred(now_s, sender, message, message.attempt, sent=False)
                if isinstance(message, KvAbort) and not message.retry_link:
                    self._given_up(now_s, message)
            case _:
                pass

    def _sent(self, now_s: float, peer: InstanceId, message: Message) -> None:
        match message:
            case SegmentEnded(attempt=attempt, outcome=outcome, reason=reason, positions=positions):
                segment = self._segments.get(attempt)
                if segment is not None:
                    segment.span.note(positions=positions)
                in_vain = outcome in _IN_VAIN
                self._end(now_s, attempt, outcome.value, (reason or outcome.value) if in_vain else "")
            case KvOffer() | KvHandoff() | KvAccepted() | KvAbort():
                self._transferred(now_s, peer, message, message.attempt, sent=True)
            case _:
                pass

    def _start(self, now_s: float, message: StartSegment) -> None:
        request, parent = message.request, parse(message.request.traceparent)
        if parent is None or request.attempt in self._segments or request.attempt in self._recently_ended:
            return
        span = self._tracing.start("segment", now_s, parent, serves=True)
        own = message.segments[message.index]
        span.note(
            request_id=request.request_id,
            attempt=request.attempt.number,
            segment=message.index,
            segments=len(message.segments),
            start=own.start,
            prompt_tokens=request.prompt_tokens,
        )
        self._segments[request.attempt] = _Segment(span, now_s, len(request.tokens))
        if (early := self._early.pop(request.attempt, None)) is not None:
            sender, offer = early
            self._transferred(now_s, sender, offer, request.attempt, sent=False)
        if len(self._segments) > MOST:
            self._end(now_s, next(iter(self._segments)), "forgotten", "too many open segments")

    def _transferred(self, now_s: float, peer: InstanceId, message: Message, attempt: Attempt, *, sent: bool) -> None:
        segment = self._segments.get(attempt)
        if segment is not None:
            self._transfers.on_message(now_s, attempt, segment.span.place, message, peer, sent=sent)

    def _given_up(self, now_s: float, abort: KvAbort) -> None:
        """End a segment that waited for this KV; it sends no message. The sender's segment reports its own end."""
        segment = self._segments.get(abort.attempt)
        if segment is not None and not segment.scheduled:
            self._end(now_s, abort.attempt, "aborted", abort.reason)

    # -- iterations ------------------------------------------------------------------------------------------------

    def _step_begins(self, now_s: float, plan: IterationPlan) -> None:
        self._steps.append((plan, now_s))
        if not self._segments:
            return
        for preempt in plan.preempted:
            self._moved(now_s, preempt.sequence.key, "preempted", preempt.how)
        for sequence in plan.evicted:
            self._moved(now_s, sequence.key, "evicted", "its KV waits for another worker")

    def _step_ended(self, now_s: float, event: StepEnded) -> None:
        plan, started_s = self._steps.popleft() if self._steps else (None, now_s)
        started_s, self._ended_s = max(started_s, self._ended_s), now_s
        if plan is None or not self._segments:
            return
        for row in plan.rows:
            segment = self._segments.get(row.sequence.key)
            if segment is None:
                continue
            if not segment.scheduled:
                segment.scheduled = True
                self._tracing.span("wait", segment.arrived_s, started_s, segment.span.place)
            if row.start + row.count <= segment.prompt_tokens and not segment.decoded:
                self._tracing.span(
                    "prefill",
                    started_s,
                    now_s,
                    segment.span.place,
                    start=row.start,
                    positions=row.count,
                    batch_rows=len(plan.rows),
                    batch_tokens=plan.tokens,
                )
            else:
                self._decoded(started_s, now_s, segment, row.count)
        for sampled in event.sampled:
            segment = self._segments.get(sampled.attempt)
            if segment is not None and not segment.first_token:
                segment.first_token = True
                segment.span.event(now_s, "first token")

    def _decoded(self, started_s: float, ended_s: float, segment: _Segment, positions: int) -> None:
        if segment.decode is None:
            segment.decode = self._tracing.start("decode", started_s, segment.span.place)
            for at_s, name, detail in segment.moves:
                segment.decode.event(at_s, name, detail=detail)
            segment.moves.clear()
        segment.decoded += positions
        segment.decoded_s = ended_s

    def _moved(self, now_s: float, attempt: Attempt, name: str, detail: str) -> None:
        segment = self._segments.get(attempt)
        if segment is None:
            return
        if segment.decode is not None:
            segment.decode.event(now_s, name, detail=detail)
        else:
            segment.span.event(now_s, name, detail=detail)
            segment.moves.append((now_s, name, detail))

    def _end(self, now_s: float, attempt: Attempt, outcome: str, error: str) -> None:
        segment = self._segments.pop(attempt, None)
        if segment is None:
            return
        self._recently_ended[attempt] = None
        if len(self._recently_ended) > ENDED:
            del self._recently_ended[next(iter(self._recently_ended))]
        self._transfers.over(now_s, attempt, error or "the segment ended first")
        if segment.decode is not None:
            segment.decode.note(positions=segment.decoded)
            segment.decode.end(segment.decoded_s, error)
        segment.span.note(outcome=outcome)
        segment.span.end(now_s, error)


@dataclass(slots=True)
class _Transfer:
    span: OpenSpan
    blocks: int = 0
    runs: int = 0


class TransferSpans:
    """KV transfers of one worker at both ends, from offer to acceptance; one per attempt and direction at a time.

    sender     "send KV"      KvOffer sent ─────▶ KvAccepted received
    receiver   "receive KV"   KvOffer received ─▶ KvAccepted sent;  its event "all announced" is the KvHandoff
    """

    def __init__(self, tracing: Tracing) -> None:
        self._tracing = tracing
        self._open: dict[tuple[Attempt, Direction], _Transfer] = {}

    def __len__(self) -> int:
        return len(self._open)

    def on_message(
        self, now_s: float, attempt: Attempt, parent: TraceParent, message: Message, peer: InstanceId, *, sent: bool
    ) -> None:
        """Record a message of a transfer of this attempt, sent to the peer or received from it."""
        match message:
            case KvOffer(positions=positions):
                direction: Direction = "send" if sent else "receive"
                self._end(now_s, attempt, direction, "offered again")
                span = self._tracing.start(f"{direction} KV", now_s, parent)
                span.note(peer=peer, positions=positions)
                self._open[attempt, direction] = _Transfer(span)
            case KvChunk(runs=runs, link=link):
                self.moves(attempt, "receive", link, len(runs), sum(run.num_blocks for run in runs))
            case KvHandoff(computed=computed):
                transfer = self._open.get((attempt, "send" if sent else "receive"))
                if transfer is not None:
                    transfer.span.event(now_s, "all announced", computed=computed)
            case KvAccepted():
                self._end(now_s, attempt, "receive" if sent else "send")
            case KvAbort(reason=reason, retry_link=link) if link:
                for direction in ("send", "receive"):
                    transfer = self._open.get((attempt, direction))
                    if transfer is not None:
                        transfer.span.event(now_s, "sent again", link=link, reason=reason)
            case KvAbort(reason=reason):
                self.over(now_s, attempt, reason)
            case _:
                pass

    def moves(self, attempt: Attempt, direction: Direction, link: str, runs: int, blocks: int) -> None:
        """Record runs and blocks that are in transit."""
        transfer = self._open.get((attempt, direction))
        if transfer is not None:
            transfer.runs += runs
            transfer.blocks += blocks
            transfer.span.note(link=link, runs=transfer.runs, blocks=transfer.blocks)

    def over(self, now_s: float, attempt: Attempt, error: str) -> None:
        """End the transfers of an attempt that has left this worker."""
        self._end(now_s, attempt, "send", error)
        self._end(now_s, attempt, "receive", error)

    def _end(self, now_s: float, attempt: Attempt, direction: Direction, error: str = "") -> None:
        transfer = self._open.pop((attempt, direction), None)
        if transfer is not None:
            transfer.span.end(now_s, error)
