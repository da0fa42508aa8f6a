"""KV transfers of one worker as spans, at both ends: from the offer to its acceptance.

    sender     "send KV"      KvOffer sent ─────▶ KvAccepted received
    receiver   "receive KV"   KvOffer received ─▶ KvAccepted sent;  its event "all announced" is the KvHandoff

Told by `worker.py` of messages about requests that are traced. One transfer per attempt and direction at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from cohort.common.messages import KvAbort, KvAccepted, KvChunk, KvHandoff, KvOffer, Message
from cohort.common.tracing.spans import OpenSpan, Tracing
from cohort.common.tracing.traceparent import TraceParent
from cohort.common.types import Attempt, InstanceId

Direction = Literal["send", "receive"]


@dataclass(slots=True)
class _Transfer:
    span: OpenSpan
    blocks: int = 0
    runs: int = 0


class TransferSpans:
    def __init__(self, tracing: Tracing) -> None:
        self._tracing = tracing
        self._open: dict[tuple[Attempt, Direction], _Transfer] = {}

    def __len__(self) -> int:
        return len(self._open)

    def said(
        self, now_s: float, attempt: Attempt, parent: TraceParent, message: Message, peer: InstanceId, *, sent: bool
    ) -> None:
        """A message of a transfer of this attempt, sent to the peer or received from it."""
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
        """So many runs with so many blocks are on their way."""
        transfer = self._open.get((attempt, direction))
        if transfer is not None:
            transfer.runs += runs
            transfer.blocks += blocks
            transfer.span.note(link=link, runs=transfer.runs, blocks=transfer.blocks)

    def over(self, now_s: float, attempt: Attempt, error: str) -> None:
        """The attempt has gone from this worker; what still moved of it ends."""
        self._end(now_s, attempt, "send", error)
        self._end(now_s, attempt, "receive", error)

    def _end(self, now_s: float, attempt: Attempt, direction: Direction, error: str = "") -> None:
        transfer = self._open.pop((attempt, direction), None)
        if transfer is not None:
            transfer.span.end(now_s, error)
