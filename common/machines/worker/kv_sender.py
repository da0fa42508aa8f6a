"""The sending end of KV transfers: offers, pushes chunk by chunk, deadlines.

    offered ─grant─▶ pushing (chunk by chunk while computing) ─all sent─▶ handed over ─accepted─▶ left

Called by `WorkerMachine`; calls back `moved` (the receiver runs the sequence) and `lost` (the transfer is over). A
transfer may be closed at any moment (cancelled, failed): it then waits for its runs in flight before its blocks are
freed, because a late read of a reused block would be another request's wrong token.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from cohort.common.errors import InvariantViolated
from cohort.common.kv.lease import tag_of
from cohort.common.machines.effects import CancelRuns, Run, Send, SendRuns
from cohort.common.machines.events import RunsSent
from cohort.common.machines.worker.worker_state import Held, WorkerState
from cohort.common.messages import KvAbort, KvGrant, KvHandoff, KvOffer
from cohort.common.policies.interface import IterationPlan
from cohort.common.policies.kv_interface import NO_BLOCK
from cohort.common.sequence import Phase, Sequence
from cohort.common.types import Attempt, InstanceId


@dataclass(slots=True, eq=False)
class Outgoing:
    sequence: Sequence
    peer: InstanceId
    transfer_id: int
    positions: int
    deadline_s: float
    """Deadline of the current wait: for the grant, later for the acceptance."""
    lease_id: int = 0
    targets: list[list[int]] = field(default_factory=list)
    """Granted blocks by position, of every layer group; `NO_BLOCK` if nothing is wanted."""
    skip_blocks: int = 0
    links: dict[str, bytes] = field(default_factory=dict)
    link: str = ""
    round: int = 0
    sent_blocks: int = 0
    round_runs: int = 0
    next_tag: int = 0
    in_flight: int = 0
    computed_at_s: float | None = None
    """Time at which the segment was complete; the wait from here on is exposed to the client."""
    handed_over: bool = False
    is_closed: bool = False

    @property
    def granted(self) -> bool:
        return self.lease_id != 0

    def next_runs(self, sources: Seq[Seq[int]], ready_blocks: int, longest: int) -> tuple[Run, ...]:
        """Return runs for the blocks that became ready in all layer groups. Neighbours on both sides travel together,
        at most `longest` blocks. Raises `InvariantViolated` if one is wanted that was given back."""
        runs = []
        for source, target in zip(sources, self.targets, strict=True):
            index = self.sent_blocks
            while index < ready_blocks:
                length = 1
                if target[index] == NO_BLOCK:  # behind the window of all tokens to come; here it may be gone, too
                    index += 1
                    continue
                while (
                    length < longest
                    and index + length < ready_blocks
                    and source[index + length] == source[index] + length
                    and target[index + length] == target[index] + length
                ):
                    length += 1
                if source[index] == NO_BLOCK:
                    raise InvariantViolated(f"{self.peer} wants KV of {self.sequence.key} that lies behind its window")
                runs.append(Run(self._tag(), source[index], target[index], length))
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


_FIRST_RUN_BYTES = 4 << 20
"""Bytes of a run to a peer without a measured rate."""


def brings_back(plan: IterationPlan) -> bool:
    return any(copy.direction == "in" for copy in plan.copies)


class KvSender:
    def __init__(
        self, state: WorkerState, moved: Callable[[float, Sequence], None], lost: Callable[[float, Sequence, str], None]
    ) -> None:
        self._state = state
        self._settings = state.settings
        self._moved = moved
        self._lost = lost
        self._outgoing: dict[Attempt, Outgoing] = {}
        self._by_lease: dict[int, Outgoing] = {}
        self._draining: dict[int, Outgoing] = {}

    def __contains__(self, key: Attempt) -> bool:
        return key in self._outgoing

    def offer(self, now_s: float, sequence: Sequence, peer: InstanceId, positions: int) -> Outgoing:
        """Offer [0, positions) of the sequence to `peer`."""
        assert sequence.key not in self._outgoing, f"{sequence.key} is offered a second time"
        transfer_id = self._state.random.getrandbits(53)
        outgoing = Outgoing(sequence, peer, transfer_id, positions, now_s + self._settings.offer_timeout_s)
        self._outgoing[sequence.key] = outgoing
        offer = KvOffer(self._state.setup.instance, sequence.key, transfer_id, positions)
        self._state.effects.append(Send(peer, offer))
        return outgoing

    def computed(self, now_s: float, key: Attempt) -> None:
        """Record that the segment is computed: time that passes from now on is exposed."""
        outgoing = self._outgoing[key]
        assert outgoing.sequence.phase is Phase.LEAVING, (
            f"{key} is computed to its end and is {outgoing.sequence.phase}"
        )
        outgoing.computed_at_s = now_s
        if not outgoing.granted:
            outgoing.deadline_s = now_s + self._settings.offer_timeout_s

    def push(self, now_s: float, key: Attempt) -> None:
        """Send the blocks of this sequence that became complete, if it is on its way to another worker."""
        outgoing = self._outgoing.get(key)
        if outgoing is not None:
            self._push(now_s, outgoing)

    def push_all(self, now_s: float) -> None:
        """Send complete blocks of every sequence: a step with copies, which held pushes up, is over."""
        for outgoing in list(self._outgoing.values()):
            self._push(now_s, outgoing)

    def drop(self, key: Attempt, why: str) -> bool:
        """Forget a transfer and inform its receiver. Return whether runs in flight must end before blocks are freed."""
        outgoing = self._outgoing.pop(key, None)
        if outgoing is None:
            return False
        self._state.effects.append(Send(outgoing.peer, KvAbort(key, outgoing.transfer_id, why)))
        outgoing.is_closed = True
        self._by_lease.pop(outgoing.lease_id, None)
        if outgoing.in_flight == 0:
            return False
        self._move_to_draining(outgoing)
        self._state.effects.append(CancelRuns(outgoing.lease_id))
        return True

    def granted(self, now_s: float, grant: KvGrant) -> None:
        outgoing = self._outgoing.get(grant.attempt)
        if outgoing is None or outgoing.transfer_id != grant.transfer_id or outgoing.granted:
            return  # given up meanwhile; its abort is on its way
        if not grant.lease_id or grant.lease_id in self._by_lease or grant.lease_id in self._draining:
            self._lost(now_s, outgoing.sequence, f"{outgoing.peer} grants a lease that is another transfer's")
            return
        link = next((name for name in self._settings.links if name in grant.links), "")
        if not link:
            self._lost(now_s, outgoing.sequence, f"no common KV link with {outgoing.peer}")
            return
        geometry = self._state.kv.geometry
        if len(grant.blocks) != geometry.blocks_for(outgoing.positions):
            self._lost(now_s, outgoing.sequence, f"{outgoing.peer} keeps its KV in blocks of other layers")
            return
        outgoing.lease_id = grant.lease_id
        entries = len(grant.blocks) // geometry.num_groups
        outgoing.targets = [
            grant.blocks[group * entries : (group + 1) * entries] for group in range(geometry.num_groups)
        ]
        outgoing.skip_blocks = grant.cached_tokens // self._state.block_size
        outgoing.sent_blocks = outgoing.skip_blocks
        outgoing.links = grant.links
        outgoing.link = link
        self._by_lease[grant.lease_id] = outgoing
        self._push(now_s, outgoing)

    def runs_sent(self, now_s: float, event: RunsSent) -> None:
        outgoing = self._by_lease.get(event.lease_id) or self._draining.get(event.lease_id)
        if outgoing is None:
            raise InvariantViolated(f"a run of unknown lease {event.lease_id} was sent")
        outgoing.in_flight -= event.runs
        assert outgoing.in_flight >= 0, f"more runs of lease {event.lease_id} were sent than begun"
        outgoing.sequence.pinned = outgoing.in_flight > 0
        if event.error is None and outgoing.handed_over:
            outgoing.deadline_s = max(outgoing.deadline_s, now_s + self._settings.accept_timeout_s)
        if outgoing.is_closed and outgoing.in_flight == 0:
            del self._draining[event.lease_id]
            self._free(outgoing)

    def accepted(self, now_s: float, lease_id: int) -> None:
        outgoing = self._by_lease.pop(lease_id, None)
        if outgoing is None:
            return
        key = outgoing.sequence.key
        self._state.counters.transfers_out += 1
        self._state.moved_s = now_s
        del self._outgoing[key]
        self._moved(now_s, outgoing.sequence)
        outgoing.is_closed = True
        if outgoing.in_flight:  # its bytes have arrived, but the link has not reported it yet
            self._move_to_draining(outgoing)
        else:
            self._free(outgoing)

    def _move_to_draining(self, outgoing: Outgoing) -> None:
        """Store an ended transfer until its runs in flight have ended."""
        assert outgoing.is_closed and outgoing.lease_id not in self._draining, (
            f"lease {outgoing.lease_id} settles twice"
        )
        self._draining[outgoing.lease_id] = outgoing

    def _free(self, outgoing: Outgoing) -> None:
        """Free the blocks: the link has reported the end of every run from them, and nothing else needs them."""
        key = outgoing.sequence.key
        assert outgoing.in_flight == 0, f"KV of {key} is freed with {outgoing.in_flight} runs in flight"
        assert key not in self._outgoing, f"KV of {key} is freed, which is offered again"
        self._state.kv.release(key)

    def aborted(self, now_s: float, sender: InstanceId, message: KvAbort) -> bool:
        """Handle an abort. Return False if it is about no transfer from here."""
        outgoing = self._outgoing.get(message.attempt)
        if outgoing is None or outgoing.transfer_id != message.transfer_id:
            return False
        if message.retry_link and message.round <= outgoing.round:
            return True  # sent twice
        if message.retry_link and message.retry_link in outgoing.links:
            self._state.counters.transfer_retries += 1
            outgoing.restart(message.retry_link, message.round)
            self._push(now_s, outgoing)
        else:
            self._lost(now_s, outgoing.sequence, f"{sender} aborted the transfer: {message.reason}")
        return True

    def offers_wait(self, now_s: float, transfer_ids: list[int]) -> None:
        """Extend the deadlines of offers that are in the receiver's queue."""
        for outgoing in self._outgoing.values():
            if outgoing.transfer_id in transfer_ids and not outgoing.granted:
                outgoing.deadline_s = now_s + self._settings.offer_timeout_s

    def peer_lost(self, now_s: float, peer: InstanceId) -> None:
        for outgoing in list(self._outgoing.values()):
            if outgoing.peer == peer:
                self._lost(now_s, outgoing.sequence, f"{peer} cannot be reached")

    def tick(self, now_s: float) -> None:
        for outgoing in list(self._outgoing.values()):
            waiting = not outgoing.granted or outgoing.handed_over
            if waiting and now_s >= outgoing.deadline_s:
                what = "accept the KV" if outgoing.granted else "grant blocks"
                self._lost(now_s, outgoing.sequence, f"{outgoing.peer} did not {what} in time")

    @property
    def draining(self) -> list[Attempt]:
        """Forgotten transfers whose runs in flight have not ended."""
        return [outgoing.sequence.key for outgoing in self._draining.values()]

    def ungranted(self) -> list[Sequence]:
        return [outgoing.sequence for outgoing in self._outgoing.values() if not outgoing.granted]

    def leases(self) -> dict[InstanceId, list[int]]:
        leases: dict[InstanceId, list[int]] = {}
        for outgoing in self._outgoing.values():
            if outgoing.granted:
                leases.setdefault(outgoing.peer, []).append(outgoing.lease_id)
        return leases

    def check(self) -> None:
        """Raise `InvariantViolated` unless every lease is of one transfer, and only what is over settles."""
        granted = {outgoing.lease_id: outgoing for outgoing in self._outgoing.values() if outgoing.granted}
        if granted != self._by_lease:
            raise InvariantViolated(f"{len(granted)} transfers are granted, {len(self._by_lease)} have a lease")
        for outgoing in self._draining.values():
            if not outgoing.is_closed or outgoing.in_flight <= 0:
                raise InvariantViolated(f"{outgoing.sequence.key} settles with {outgoing.in_flight} runs in flight")
        for key, outgoing in self._outgoing.items():
            held = self._state.held.get(key)
            if held is None or held.sequence is not outgoing.sequence or outgoing.is_closed or outgoing.in_flight < 0:
                raise InvariantViolated(f"{key} is sent and not held")

    def _push(self, now_s: float, outgoing: Outgoing) -> None:
        """Send the blocks that are complete; at the segment's end also the last, partial one, and the handoff."""
        state, sequence = self._state, outgoing.sequence
        if not outgoing.granted or outgoing.is_closed:
            return
        held = state.held[sequence.key]
        assert held.sequence is sequence, f"{sequence.key} is pushed and another one is held"
        if held.moving or (state.in_flight is not None and brings_back(state.in_flight)):
            return  # its blocks may be about to be filled from host memory; `push_all` comes back to it
        leaving = sequence.phase is Phase.LEAVING
        if not leaving and not self._settings.chunked_transfer:
            return
        if sequence.phase not in (Phase.RUNNING, Phase.LEAVING):
            return  # preempted: the blocks sent stay sent, the rest follows when it is computed again
        computed = min(sequence.computed, outgoing.positions)
        blocks = state.kv.geometry.entries(computed) if leaving else computed // state.block_size
        sources = state.kv.host_tables(sequence.key) if held.pooled else state.kv.tables(sequence.key)
        assert all(blocks <= len(target) for target in outgoing.targets), f"{sequence.key}: {blocks} blocks to push"
        runs = outgoing.next_runs(sources, blocks, self._longest_run(outgoing.peer))
        if held.pooled and not outgoing.handed_over:
            state.counters.from_host += 1
        if runs:
            sequence.pinned = True
            state.effects.append(
                SendRuns(
                    outgoing.peer,
                    sequence.key,
                    outgoing.lease_id,
                    outgoing.round,
                    outgoing.link,
                    outgoing.links[outgoing.link],
                    runs,
                    from_host=held.pooled,
                )
            )
        if leaving and not outgoing.handed_over:
            self._handoff(now_s, outgoing, held, computed)

    def _longest_run(self, peer: InstanceId) -> int:
        """Return the maximum blocks of a run: what the link carries in a part of its deadline; few if not measured."""
        measured = self._state.link_rates.get(peer, 0.0)
        nbytes = max(self._settings.piece_s * measured, 0 if measured else _FIRST_RUN_BYTES)
        return max(1, int(nbytes / self._state.setup.capacity.geometry.block_bytes))

    def _handoff(self, now_s: float, outgoing: Outgoing, held: Held, computed: int) -> None:
        assert not outgoing.handed_over, f"{outgoing.sequence.key} is handed over twice in round {outgoing.round}"
        outgoing.handed_over = True
        outgoing.deadline_s = now_s + self._settings.accept_timeout_s
        exposed_s = now_s - outgoing.computed_at_s if outgoing.computed_at_s is not None else 0.0
        sequence = outgoing.sequence
        message = KvHandoff(
            sequence.key,
            outgoing.lease_id,
            outgoing.round,
            sequence.tokens,
            computed,
            outgoing.round_runs,
            sequence.cached_tokens,
            held.logprobs,
            exposed_s,
            held.prompt_logprobs,
            held.states,
        )
        self._state.effects.append(Send(outgoing.peer, message))
