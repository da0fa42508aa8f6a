"""Both ends of a KV hand-over as data, and the rules that need no I/O. `WorkerMachine` drives them.

Sender:   offered ─grant─▶ pushing (chunk by chunk while computing) ─all sent─▶ handed over ─accepted─▶ gone
Receiver: queued ─room─▶ granted ─chunks─▶ receiving ─hand-over and all runs checked─▶ accepted ─▶ gone

Either end may turn `dead` (cancelled, failed, expired): then it only waits for its runs in flight to settle before
its blocks are freed, because a late read or write of a reused block would be somebody else's wrong answer.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from cohort.common.kv.lease import tag_of
from cohort.common.machines.effects import Run
from cohort.common.messages import KvHandOver
from cohort.common.sequence import Sequence
from cohort.common.types import Attempt, InstanceId


@dataclass(slots=True, eq=False)
class Outgoing:
    """The sending end."""

    sequence: Sequence
    peer: InstanceId
    transfer_id: int
    positions: int
    deadline_s: float
    """Of the current wait: for the grant, later for the acceptance."""
    lease_id: int = 0
    target_blocks: list[int] = field(default_factory=list)
    skip_blocks: int = 0
    links: dict[str, bytes] = field(default_factory=dict)
    link: str = ""
    round: int = 0
    sent_blocks: int = 0
    round_runs: int = 0
    next_tag: int = 0
    in_flight: int = 0
    computed_at_s: float | None = None
    """When the segment was complete; the wait from here on is exposed to the client."""
    handed_over: bool = False
    dead: bool = False
    release_on_settle: bool = False

    @property
    def granted(self) -> bool:
        return self.lease_id != 0

    def next_runs(self, source_blocks: Seq[int], ready_blocks: int) -> tuple[Run, ...]:
        """Runs for the blocks that became ready; neighbours on both sides travel together."""
        runs = []
        index = self.sent_blocks
        while index < ready_blocks:
            length = 1
            while (
                index + length < ready_blocks
                and source_blocks[index + length] == source_blocks[index] + length
                and self.target_blocks[index + length] == self.target_blocks[index] + length
            ):
                length += 1
            runs.append(Run(self._tag(), source_blocks[index], self.target_blocks[index], length))
            index += length
        self.sent_blocks = max(self.sent_blocks, ready_blocks)
        self.round_runs += len(runs)
        self.in_flight += len(runs)
        return tuple(runs)

    def restart(self, link: str, round_: int) -> None:
        """Send everything again over another path. Tags go on counting: late bytes of the old round match nothing."""
        self.link = link
        self.round = round_
        self.sent_blocks = self.skip_blocks
        self.round_runs = 0
        self.handed_over = False

    def _tag(self) -> int:
        tag = tag_of(self.lease_id, self.next_tag)
        self.next_tag += 1
        return tag


@dataclass(slots=True, eq=False)
class Incoming:
    """The receiving end, from the grant on."""

    sequence: Sequence
    sender: InstanceId
    transfer_id: int
    lease_id: int
    positions: int
    round: int = 0
    received_runs: int = 0
    announced_blocks: int = 0
    """Granted as cached, or announced by the sender; with a retry too many, which does not matter."""
    largest_piece: int = 0
    in_flight: int = 0
    hand_over: KvHandOver | None = None
    hand_over_at_s: float = 0.0
    retry_link: str = ""
    """Set while a failed round drains; the retry is asked for when nothing is in flight any more."""
    dead: bool = False

    def announced(self, blocks: int) -> None:
        """So many more blocks are on their way."""
        self.announced_blocks += blocks
        self.largest_piece = max(self.largest_piece, blocks)

    def imminent(self, block_size: int, chunk: int) -> bool:
        """It draws tokens where it is now, and little is left before it comes: a piece of its prompt as large as the
        largest so far (of one that has sent nothing yet: `chunk`, what a worker computes of prompts in one iteration),
        and an answer of two blocks, because every token of that takes an iteration there."""
        prompt = len(self.sequence.request.tokens)
        if self.positions < prompt:
            return False
        sent = self.announced_blocks * block_size
        prompt_left, answer_left = max(0, prompt - sent), self.positions - max(prompt, sent)
        piece = self.largest_piece * block_size or chunk
        return prompt_left <= piece and answer_left <= 2 * block_size

    @property
    def complete(self) -> bool:
        return (
            self.hand_over is not None
            and self.hand_over.round == self.round
            and self.in_flight == 0
            and self.received_runs == self.hand_over.total_runs
            and not self.retry_link
        )


@dataclass(frozen=True, slots=True)
class QueuedOffer:
    """An offer that waits for free blocks, or for the `StartSegment` it belongs to."""

    sender: InstanceId
    attempt: Attempt
    transfer_id: int
    positions: int
    since_s: float
