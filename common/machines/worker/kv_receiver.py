"""The receiving end of KV transfers: the queue of offers, grants under leases, runs received and checked.

    queued ─blocks free─▶ granted ─chunks─▶ receiving ─handoff and all runs checked─▶ arrived

Called by `WorkerMachine`; calls back `arrived` (the sequence can run here) and `lost` (its KV will not come). A
transfer may be closed at any moment (cancelled, failed, expired): it then waits for its runs in flight before its
blocks are freed, because a late write into a reused block would be another request's wrong token.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from cohort.common.errors import InvariantViolated
from cohort.common.kv.lease import LeaseTable
from cohort.common.machines.effects import CancelRuns, ReceiveRuns, Run, Send
from cohort.common.machines.events import RunsReceived
from cohort.common.machines.worker.worker_state import WorkerState
from cohort.common.messages import KvAbort, KvAccepted, KvChunk, KvGrant, KvHandoff, KvOffer
from cohort.common.sequence import Phase, Sequence
from cohort.common.types import Attempt, InstanceId


@dataclass(slots=True, eq=False)
class Incoming:
    sequence: Sequence
    sender: InstanceId
    transfer_id: int
    lease_id: int
    positions: int
    round: int = 0
    received_runs: int = 0
    announced_blocks: int = 0
    """Blocks of the first layer group that were cached, unwanted or announced. Too many after a retry: harmless."""
    largest_chunk: int = 0
    in_flight: int = 0
    last_tag: int = -1
    """Highest tag of the posted runs. Tags grow within a lease: a chunk that comes twice is recognised by them."""
    handoff: KvHandoff | None = None
    handoff_at_s: float = 0.0
    retry_link: str = ""
    """Link of the retry, set while a failed round drains; the retry is requested when nothing is in flight any more."""
    is_closed: bool = False

    def announced(self, blocks: int) -> None:
        self.announced_blocks += blocks
        self.largest_chunk = max(self.largest_chunk, blocks)

    def imminent(self, block_size: int, chunk: int) -> bool:
        """Return whether the sequence will soon be here: it samples tokens where it is now, and little is left to send.
        Little is a chunk of its prompt as large as the largest so far (before the first: `chunk`, a worker's prompt
        tokens per iteration), and an output of two blocks, because every token of that takes an iteration there."""
        prompt = len(self.sequence.request.tokens)
        if self.positions < prompt:
            return False
        sent = self.announced_blocks * block_size
        prompt_left, output_left = max(0, prompt - sent), self.positions - max(prompt, sent)
        largest = self.largest_chunk * block_size or chunk
        return prompt_left <= largest and output_left <= 2 * block_size

    @property
    def complete(self) -> bool:
        return (
            self.handoff is not None
            and self.handoff.round == self.round
            and self.in_flight == 0
            and self.received_runs == self.handoff.total_runs
            and not self.retry_link
        )


@dataclass(frozen=True, slots=True)
class QueuedOffer:
    """Offer that waits for free blocks, or for its `StartSegment`."""

    sender: InstanceId
    attempt: Attempt
    transfer_id: int
    positions: int
    since_s: float


class KvReceiver:
    def __init__(
        self,
        state: WorkerState,
        still_sent: Callable[[], list[Attempt]],
        arrived: Callable[[float, Sequence], None],
        lost: Callable[[float, Sequence, str], None],
    ) -> None:
        """`still_sent`: attempts that were here before and whose last run from here has not ended."""
        self._state = state
        self._settings = state.settings
        self._still_sent = still_sent
        self._arrived = arrived
        self._lost = lost
        self._incoming: dict[Attempt, Incoming] = {}
        self._by_lease: dict[int, Incoming] = {}
        self._draining: dict[int, Incoming] = {}
        self.offers: deque[QueuedOffer] = deque()
        self.leases = LeaseTable(state.settings.lease_s)
        self.links: dict[str, bytes] = {}

    def __contains__(self, key: Attempt) -> bool:
        return key in self._incoming

    def offered(self, now_s: float, sender: InstanceId, offer: KvOffer) -> None:
        if offer.positions <= 0:
            return  # no segment ends there
        self.offers.append(QueuedOffer(sender, offer.attempt, offer.transfer_id, offer.positions, now_s))
        self.headroom_changed(now_s)

    def headroom_changed(self, now_s: float) -> None:
        """Grant what fits, FCFS. Not while a step with copies runs: blocks it frees are still being read."""
        if not self.offers:
            return
        state = self._state
        if state.in_flight is not None and state.in_flight.copies:
            return
        postponed: deque[QueuedOffer] = deque()
        while self.offers:
            offer = self.offers.popleft()
            key = offer.attempt
            held = state.held.get(key)
            if held is None:
                # Its StartSegment comes over another connection and may be later than the offer.
                if now_s - offer.since_s < self._settings.offer_timeout_s:
                    postponed.append(offer)
                continue
            if key in self._incoming or held.sequence.phase is not Phase.AWAITING_KV:
                continue  # sent twice
            if key in self._still_sent() or key in self.draining:
                postponed.append(offer)
                continue
            if not self._fits(offer.positions):
                postponed.append(offer)
                break
            sequence = held.sequence
            cached = state.kv.reserve(key, sequence.tokens, offer.positions, salt=sequence.request.cache_salt)
            if cached is None:
                postponed.append(offer)
                break
            self._grant(now_s, offer, sequence, cached)
        postponed.extend(self.offers)
        self.offers = postponed

    def _fits(self, positions: int) -> bool:
        """Return whether a block stays free for every running sequence, unless nothing else is going on."""
        kv = self._state.kv
        running = sum(1 for held in self._state.held.values() if held.sequence.phase is Phase.RUNNING)
        spare = kv.free_blocks + kv.cached_blocks - kv.geometry.blocks_held(positions)
        return running == 0 or spare >= min(running * kv.geometry.num_groups, kv.total_blocks // 20)

    def _grant(self, now_s: float, offer: QueuedOffer, sequence: Sequence, cached: int) -> None:
        lease_id = self._state.random.getrandbits(40) | 1 << 40  # never 0; tags take the low 40 bits
        assert sequence.key not in self._incoming, f"{sequence.key} is granted blocks a second time"
        assert lease_id not in self._by_lease and lease_id not in self._draining, f"lease {lease_id} is there already"
        incoming = Incoming(sequence, offer.sender, offer.transfer_id, lease_id, offer.positions)
        geometry = self._state.kv.geometry
        unwanted = geometry.blocks_before_window(offer.positions, geometry.windows[0])
        incoming.announced_blocks = max(unwanted, cached // self._state.block_size)
        self._incoming[sequence.key] = incoming
        self._by_lease[lease_id] = incoming
        self.leases.grant(now_s, lease_id, sequence.key, offer.sender)
        blocks = [block for table in self._state.kv.tables(sequence.key) for block in table]
        assert len(blocks) == geometry.blocks_for(offer.positions), (
            f"{sequence.key}: {len(blocks)} blocks are granted for {offer.positions} positions"
        )
        grant = KvGrant(
            offer.attempt, offer.transfer_id, lease_id, self._settings.lease_s, blocks, cached, dict(self.links)
        )
        self._state.effects.append(Send(offer.sender, grant))

    def announced(self, now_s: float, chunk: KvChunk) -> None:
        incoming = self._by_lease.get(chunk.lease_id)
        if incoming is None or chunk.round != incoming.round or incoming.retry_link:
            return  # of a round or a lease that is over
        if chunk.attempt != incoming.sequence.key:
            self._lost(now_s, incoming.sequence, f"{incoming.sender} sent KV of another request under this lease")
            return
        if not chunk.runs or chunk.runs[0].tag <= incoming.last_tag:
            return  # sent twice
        first, *more = self._state.kv.tables(incoming.sequence.key)
        of_first = set(first)
        own = of_first.union(*more) if more else of_first
        for run in chunk.runs:
            if not own.issuperset(range(run.first_block, run.first_block + run.num_blocks)):
                self._lost(now_s, incoming.sequence, f"{incoming.sender} sent KV to blocks it was not granted")
                return
        self.leases.renew(now_s, chunk.lease_id)
        incoming.last_tag = chunk.runs[-1].tag
        incoming.in_flight += len(chunk.runs)
        incoming.announced(sum(run.num_blocks for run in chunk.runs if run.first_block in of_first))
        runs = tuple(Run(run.tag, 0, run.first_block, run.num_blocks, run.checksum) for run in chunk.runs)
        self._state.effects.append(ReceiveRuns(chunk.lease_id, chunk.round, chunk.link, runs, incoming.sender))

    def runs_received(self, now_s: float, event: RunsReceived) -> None:
        settling = self._draining.get(event.lease_id)
        if settling is not None:
            settling.in_flight -= event.runs
            assert settling.in_flight >= 0, f"more runs of lease {event.lease_id} were received than begun"
            if settling.in_flight == 0:
                del self._draining[event.lease_id]
                key = settling.sequence.key
                assert settling.is_closed and key not in self._incoming, (
                    f"KV of {key} is freed, which is received again"
                )
                self._state.kv.release(key)
            return
        incoming = self._by_lease.get(event.lease_id)
        if incoming is None:
            raise InvariantViolated(f"a run of unknown lease {event.lease_id} was received")
        incoming.in_flight -= event.runs
        assert incoming.in_flight >= 0, f"more runs of lease {event.lease_id} were received than begun"
        if event.error is None and event.round == incoming.round and not incoming.retry_link:
            incoming.received_runs += event.runs
            self._state.moved_s = now_s
            self.leases.renew(now_s, event.lease_id)
        elif not incoming.retry_link:
            self._round_failed(now_s, incoming, event.error or "stale round")
        if incoming.is_closed:
            return
        if incoming.retry_link and incoming.in_flight == 0:
            self._retry_transfer(now_s, incoming)
        elif incoming.complete:
            self._accept(now_s, incoming)

    def _round_failed(self, now_s: float, incoming: Incoming, error: str) -> None:
        """Retry once over another path, then give up (the request is recomputed elsewhere)."""
        if incoming.round > 0:
            self._lost(now_s, incoming.sequence, f"KV transfer failed twice: {error}")
            return
        self._state.counters.transfer_retries += 1
        incoming.retry_link = self._settings.links[-1]
        if incoming.in_flight:
            self._state.effects.append(CancelRuns(incoming.lease_id))

    def _retry_transfer(self, now_s: float, incoming: Incoming) -> None:
        assert not incoming.is_closed and incoming.in_flight == 0, (
            f"{incoming.sequence.key}: a round is still under way"
        )
        incoming.round += 1
        incoming.received_runs = 0
        incoming.handoff = None
        link, incoming.retry_link = incoming.retry_link, ""
        self.leases.renew(now_s, incoming.lease_id)
        again = KvAbort(incoming.sequence.key, incoming.transfer_id, "transfer failed", link, incoming.round)
        self._state.effects.append(Send(incoming.sender, again))

    def handed_over(self, now_s: float, message: KvHandoff) -> None:
        incoming = self._by_lease.get(message.lease_id)
        if incoming is None or message.round != incoming.round:
            return
        if message.computed != incoming.positions or len(message.tokens) < message.computed:
            self._lost(now_s, incoming.sequence, f"{incoming.sender} handed over {message.computed} positions")
            return
        incoming.handoff = message
        incoming.handoff_at_s = now_s
        self.leases.renew(now_s, message.lease_id)
        if incoming.complete:
            self._accept(now_s, incoming)

    def _accept(self, now_s: float, incoming: Incoming) -> None:
        state, handoff, sequence = self._state, incoming.handoff, incoming.sequence
        if handoff is None:
            raise InvariantViolated("accepted without a handoff")
        assert incoming.in_flight == 0, f"{sequence.key} is accepted with {incoming.in_flight} runs in flight"
        assert handoff.computed == incoming.positions, f"{sequence.key} is accepted with other positions than granted"
        sequence.tokens = list(handoff.tokens)
        sequence.computed = handoff.computed
        sequence.cached_tokens = handoff.cached_tokens
        sequence.delivered = sequence.output_tokens
        if sequence.known > len(sequence.request.tokens):
            sequence.repeat_from = len(sequence.request.tokens)
        held = state.held[sequence.key]
        held.logprobs = list(handoff.logprobs)
        held.prompt_logprobs = list(handoff.prompt_logprobs)
        held.states = handoff.pooled
        sequence.transfer_s = handoff.exposed_s + (now_s - incoming.handoff_at_s)
        del self._incoming[sequence.key]
        del self._by_lease[incoming.lease_id]
        self.leases.end(incoming.lease_id)
        state.counters.exposed_transfer_s += sequence.transfer_s
        state.counters.transfers_in += 1
        state.moved_s = now_s
        state.kv.committed(sequence)
        state.effects.append(Send(incoming.sender, KvAccepted(sequence.key, incoming.lease_id)))
        self._arrived(now_s, sequence)

    def drop(self, key: Attempt, why: str) -> bool:
        """Forget a transfer and inform its sender. Return whether runs in flight must end before blocks are freed."""
        incoming = self._incoming.pop(key, None)
        if incoming is None:
            return False
        self._by_lease.pop(incoming.lease_id, None)
        self.leases.end(incoming.lease_id)
        self._state.effects.append(Send(incoming.sender, KvAbort(key, incoming.transfer_id, why)))
        incoming.is_closed = True
        if incoming.in_flight == 0:
            return False
        assert incoming.lease_id not in self._draining, f"lease {incoming.lease_id} settles twice"
        self._draining[incoming.lease_id] = incoming
        self._state.effects.append(CancelRuns(incoming.lease_id))
        return True

    def forget_offers(self, key: Attempt) -> None:
        if self.offers:
            self.offers = deque(o for o in self.offers if o.attempt != key)

    def aborted(self, message: KvAbort) -> Sequence | None:
        """Handle the sender's withdrawal of an offer or transfer. Return the sequence that now waits in vain."""
        if self.offers:
            self.offers = deque(o for o in self.offers if o.transfer_id != message.transfer_id)
        incoming, held = self._incoming.get(message.attempt), self._state.held.get(message.attempt)
        if held is None or held.sequence.phase is not Phase.AWAITING_KV:
            return None
        return held.sequence if incoming is None or incoming.transfer_id == message.transfer_id else None

    def peer_lost(self, now_s: float, peer: InstanceId) -> None:
        for incoming in list(self._incoming.values()):
            if incoming.sender == peer:
                self._lost(now_s, incoming.sequence, f"{peer} cannot be reached")

    def tick(self, now_s: float) -> None:
        for lease in self.leases.expire(now_s):
            incoming = self._by_lease.get(lease.lease_id)
            if incoming is not None:
                self._lost(now_s, incoming.sequence, f"lease expired: {incoming.sender} went silent")

    @property
    def draining(self) -> list[Attempt]:
        """Forgotten transfers whose runs in flight have not ended."""
        return [incoming.sequence.key for incoming in self._draining.values()]

    def lease_of(self, lease_id: int) -> Incoming | None:
        return self._by_lease.get(lease_id)

    def unfinished(self) -> list[Sequence]:
        """Return sequences with a grant whose sender has more to compute or to send."""
        return [incoming.sequence for incoming in self._incoming.values() if incoming.handoff is None]

    def arriving(self, chunk: int) -> int:
        """Return how many sequences in the middle of their output arrive soon. `chunk`: as for `imminent`."""
        size = self._state.block_size
        return sum(1 for incoming in self._incoming.values() if incoming.imminent(size, chunk))

    def waiting_transfers(self) -> dict[InstanceId, list[int]]:
        transfers: dict[InstanceId, list[int]] = {}
        for offer in self.offers:
            transfers.setdefault(offer.sender, []).append(offer.transfer_id)
        return transfers

    def check(self) -> None:
        for lease_id in self._by_lease:
            self.leases.get(lease_id)
        if len(self.leases) != len(self._by_lease):
            raise InvariantViolated("leases and incoming transfers differ")
        if {incoming.lease_id: incoming for incoming in self._incoming.values()} != self._by_lease:
            raise InvariantViolated(f"{len(self._incoming)} transfers come here, {len(self._by_lease)} have a lease")
        for incoming in self._draining.values():
            if not incoming.is_closed or incoming.in_flight <= 0:
                raise InvariantViolated(f"{incoming.sequence.key} settles with {incoming.in_flight} runs in flight")
