"""The worker as a pure state machine: segments in; tokens, hand-overs and reports out.

Hosted by the live worker loop (`common/engine/worker_loop.py`) and by the simulator. The host calls

    on_message / on_peer_lost     whenever something arrives
    plan → (forward) → completed  one iteration after the other; one plan is in flight at most
    run_sent / run_received       when a KV run of an effect is through, or failed
    tick                          at least every `tick_s`, for deadlines

and performs `take_effects()` after each call. While a plan is in flight nothing it reads or writes is freed:
cancellations mark their sequences as doomed and take effect when the plan completes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from random import Random

import msgspec

from cohort.common.errors import InvariantViolated
from cohort.common.kv.lease import LeaseTable
from cohort.common.machines.effects import CancelRuns, Dial, Effect, ReceiveRuns, Run, Send, SendRuns
from cohort.common.machines.handover import Incoming, Outgoing, QueuedOffer
from cohort.common.messages import (
    BindSegment,
    Cancel,
    KvAbort,
    KvAccepted,
    KvChunk,
    KvGrant,
    KvHandOver,
    KvOffer,
    KvRenew,
    Message,
    PrefetchKv,
    RevisePrediction,
    SegmentEnded,
    StageTimes,
    StartSegment,
    TokenBatch,
    TokenLogprob,
    TokenUpdate,
)
from cohort.common.policies.interface import (
    ConsolidatesCopies,
    ExpectsHandOvers,
    ForeseesDecisions,
    GrowsByBlock,
    IterationPlan,
    IterationScheduler,
    KvAllocator,
    LearnsStepTimes,
    LimitsForesight,
    NamesHostBlocks,
    Phase,
    Row,
    Sequence,
    SequenceKey,
    TakesRevisions,
)
from cohort.common.types import Attempt, FinishReason, InstanceId, Outcome, QueuedWork, WorkerCapacity, WorkerFigures

_PARKED_GRACE_S = 0.25
"""Parked KV stays on the device so long, unless space is short: where load is low it is handed over sooner."""
_REPORTED_QUEUE = 512
"""Entries of the progress list in a report (D4); beyond, an execution predictor sees totals only."""


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """The parts of the configuration the machine needs."""

    links: tuple[str, ...]
    """Transports this process can use, best first."""
    offer_timeout_s: float
    accept_timeout_s: float
    lease_s: float
    default_prediction: float
    stall_timeout_s: float = 5.0
    """With hand-overs pending, the longest nothing may move: then two caches wait for each other."""
    chunked_transfer: bool = True
    """Push the blocks of a chunk while the next one computes (D6); else all of them once the segment is done."""


class Sampled(msgspec.Struct, frozen=True):
    """What the forward drew for one sequence."""

    sequence: Sequence
    token: int
    logprob: TokenLogprob | None = None


@dataclass(slots=True)
class _Averages:
    """Moving averages of measured iterations, for reports and cost estimates."""

    step_s: float = 0.0
    decode_step_s: float = 0.0
    prefill_tokens_per_s: float = 0.0

    def note(self, plan: IterationPlan, latency_s: float) -> None:
        self.step_s = _mix(self.step_s, latency_s)
        prefill = sum(row.count for row in plan.rows if row.count > 1)
        if prefill == 0:
            self.decode_step_s = _mix(self.decode_step_s, latency_s)
        else:
            self.prefill_tokens_per_s = _mix(self.prefill_tokens_per_s, prefill / max(latency_s, 1e-9))


def _mix(old: float, new: float) -> float:
    return new if old == 0.0 else 0.9 * old + 0.1 * new


@dataclass(slots=True)
class WorkerCounters:
    """Totals since start, for metrics."""

    prefill_tokens: int = 0
    decode_tokens: int = 0
    steps: int = 0
    preemptions: int = 0
    transfers_out: int = 0
    transfers_in: int = 0
    transfer_failures: int = 0
    transfer_retries: int = 0
    exposed_transfer_s: float = 0.0
    """Of hand-overs to here: time from a segment's last row until the request could go on, which no compute hid."""
    stalls: int = 0
    pooled: int = 0
    """Parked sequences moved to host memory (A2), prefetched back (A9), handed over straight from there."""
    prefetched: int = 0
    from_host: int = 0
    finished: dict[str, int] = field(default_factory=dict)


def _brings_back(plan: IterationPlan) -> bool:
    """Whether the plan fills device blocks from host memory."""
    return any(copy.direction == "in" for copy in plan.copies)


class WorkerMachine:
    def __init__(
        self,
        instance: InstanceId,
        manager: InstanceId,
        capacity: WorkerCapacity,
        settings: WorkerSettings,
        scheduler: IterationScheduler,
        kv: KvAllocator,
        random: Random,
        link_addresses: Callable[[], Mapping[str, bytes]],
    ) -> None:
        self.instance = instance
        self.manager = manager
        self.capacity = capacity
        self.counters = WorkerCounters()
        self.kv = kv
        self.scheduler = scheduler
        by_block = isinstance(kv, GrowsByBlock) and kv.grows_by_block
        # What the policies add to their seats is asked once: asking a protocol costs as much as a small decision.
        self._expecting = scheduler if isinstance(scheduler, ExpectsHandOvers) else None
        self._prompt_step = capacity.max_step_tokens
        """Prompt tokens of the last iteration that held any."""
        self._learning = scheduler if isinstance(scheduler, LearnsStepTimes) else None
        self._consolidating = kv if isinstance(kv, ConsolidatesCopies) else None
        self._foreseeing = scheduler if by_block and isinstance(scheduler, ForeseesDecisions) else None
        self._settings = settings
        self._random = random
        self._link_addresses = link_addresses  # asked for every grant: a link may have to move
        self._sequences: dict[SequenceKey, Sequence] = {}
        self._segments: dict[SequenceKey, StartSegment] = {}
        self._logprobs: dict[SequenceKey, list[TokenLogprob]] = {}
        self._prompt_logprobs: dict[SequenceKey, list[TokenLogprob]] = {}
        """Of this attempt's output tokens, where asked for: they move with the request."""
        self._doomed: set[SequenceKey] = set()
        self._in_flight: IterationPlan | None = None
        self._outgoing: dict[SequenceKey, Outgoing] = {}
        self._outgoing_by_lease: dict[int, Outgoing] = {}
        self._incoming: dict[SequenceKey, Incoming] = {}
        self._incoming_by_lease: dict[int, Incoming] = {}
        self._settling: dict[int, Outgoing | Incoming] = {}
        self._offers: deque[QueuedOffer] = deque()
        self.leases = LeaseTable(settings.lease_s)
        self._next_renewal_s = 0.0
        self._moved_s = 0.0
        """When a plan was made or a hand-over got on last."""
        self._averages = _Averages()
        self._limiting = scheduler if isinstance(scheduler, LimitsForesight) else None
        self._host_tables = kv if isinstance(kv, NamesHostBlocks) else None
        self._on_device: dict[SequenceKey, float] = {}
        """Parked with their KV on the device, since when; oldest first."""
        self._pooled: set[SequenceKey] = set()
        """Parked, or leaving from there, with their KV in host memory."""
        self._buffered: dict[SequenceKey, None] = {}
        """Of the pool, brought back to the device to be handed over soon (A5)."""
        self._prefetches: deque[SequenceKey] = deque()
        self._moving: set[SequenceKey] = set()
        """Pool entries that copies of the plan in flight move; nobody may read them yet."""
        self._effects: list[Effect] = []
        self._updates: dict[InstanceId, list[TokenUpdate]] = {}

    # -- the host's side ---------------------------------------------------------------------------------------

    def take_effects(self) -> list[Effect]:
        for gateway, updates in self._updates.items():
            self._effects.append(Send(gateway, TokenBatch(self.instance, updates)))
        self._updates = {}
        effects, self._effects = self._effects, []
        return effects

    @property
    def idle(self) -> bool:
        """No request is here in any phase and no transfer is settling."""
        return not self._sequences and not self._settling

    @property
    def plan_in_flight(self) -> IterationPlan:
        """Between `plan` and `completed`. Raises `InvariantViolated` otherwise."""
        if self._in_flight is None:
            raise InvariantViolated("no plan is in flight")
        return self._in_flight

    def sequences(self) -> Iterable[Sequence]:
        return self._sequences.values()

    @property
    def held(self) -> list[Attempt]:
        """Attempts that are computed here, or on their way from here."""
        waiting = (Phase.AWAITING_KV, Phase.PARKED)
        return [s.key for s in self._sequences.values() if s.phase not in waiting]

    @property
    def awaiting(self) -> list[Attempt]:
        """Attempts that wait for somebody: for the worker who should hand their state over, or, parked, for a manager
        who binds them. A manager that does not know of it never will, and has them placed anew."""
        waiting = (Phase.AWAITING_KV, Phase.PARKED)
        return [s.key for s in self._sequences.values() if s.phase in waiting]

    def on_message(self, now_s: float, sender: InstanceId, message: Message) -> bool:
        """False for a message that is not a worker's business."""
        match message:
            case StartSegment():
                self._start_segment(now_s, message)
            case Cancel(attempts=attempts, reason=reason):
                for attempt in attempts:
                    self._cancel(now_s, attempt, reason)
            case BindSegment():
                self._bind(now_s, message)
            case PrefetchKv(attempts=attempts):
                self._prefetches.extend(attempt for attempt in attempts if attempt in self._pooled)
            case RevisePrediction(request_id=request_id, prediction=prediction):
                for sequence in self._sequences.values():
                    if sequence.request_id == request_id:
                        sequence.predicted = prediction.mean
                        if isinstance(self.scheduler, TakesRevisions):
                            self.scheduler.revised(now_s, sequence)
            case KvOffer():
                self._offers.append(QueuedOffer(sender, message.attempt, message.transfer_id, message.positions, now_s))
                self._grant_offers(now_s)
            case KvGrant():
                self._granted(now_s, message)
            case KvChunk():
                self._chunk(now_s, message)
            case KvHandOver():
                self._hand_over(now_s, message)
            case KvAccepted(lease_id=lease_id):
                self._accepted(now_s, lease_id)
            case KvAbort():
                self._abort(now_s, sender, message)
            case KvRenew(lease_ids=lease_ids, transfer_ids=transfer_ids):
                for lease_id in lease_ids:
                    self.leases.renew(now_s, lease_id)
                for outgoing in self._outgoing.values():
                    if outgoing.transfer_id in transfer_ids and not outgoing.granted:
                        outgoing.deadline_s = now_s + self._settings.offer_timeout_s
            case _:
                return False
        return True

    def on_peer_lost(self, now_s: float, peer: InstanceId) -> None:
        """A worker we hand over to, or take over from, cannot be reached."""
        for outgoing in list(self._outgoing.values()):
            if outgoing.peer == peer:
                self._fail(now_s, outgoing.sequence, f"{peer} cannot be reached")
        for incoming in list(self._incoming.values()):
            if incoming.sender == peer:
                self._fail(now_s, incoming.sequence, f"{peer} cannot be reached")

    def tick(self, now_s: float) -> None:
        """Deadlines: leases nobody renewed, hand-overs nobody answers; renewals of our own."""
        for lease in self.leases.expire(now_s):
            incoming = self._incoming_by_lease.get(lease.lease_id)
            if incoming is not None:
                self._fail(now_s, incoming.sequence, f"lease expired: {incoming.sender} went silent")
        for outgoing in list(self._outgoing.values()):
            waiting = not outgoing.granted or outgoing.handed_over
            if waiting and now_s >= outgoing.deadline_s:
                what = "accept the KV" if outgoing.granted else "grant blocks"
                self._fail(now_s, outgoing.sequence, f"{outgoing.peer} did not {what} in time")
        if now_s >= self._next_renewal_s:
            self._next_renewal_s = now_s + self._settings.lease_s / 4
            self._renew(now_s)
        self._grant_offers(now_s)
        if now_s - self._moved_s >= self._settings.stall_timeout_s:
            self._break_stall(now_s)

    # -- segments ----------------------------------------------------------------------------------------------

    def _start_segment(self, now_s: float, message: StartSegment) -> None:
        request = message.request
        key = request.attempt
        if key in self._sequences:
            return  # said twice
        segment = message.segments[message.index]
        self._effects.append(Dial(request.gateway, message.gateway_endpoint))
        if message.next_endpoint:
            following = message.segments[message.index + 1].instance
            if following is not None:
                self._effects.append(Dial(following, message.next_endpoint))
        sequence = Sequence(
            request=request,
            tokens=list(request.tokens),
            end=segment.end,
            batch_id=message.batch_id,
            arrived_s=now_s - request.waited_s,
            predicted=request.prediction.mean if request.prediction else self._settings.default_prediction,
            delivered=request.output_known,
        )
        if self.kv.geometry.blocks_for(min(sequence.max_positions, self.capacity.max_model_len)) > self.kv.total_blocks:
            self._ended(now_s, sequence, Outcome.FAILED, f"{sequence.max_positions} positions exceed the whole cache")
            return
        self._sequences[key] = sequence
        self._segments[key] = message
        if message.index > 0:
            sequence.phase = Phase.AWAITING_KV
            self._grant_offers(now_s)
        else:
            self.scheduler.add(now_s, sequence)

    def _bind(self, now_s: float, message: BindSegment) -> None:
        sequence = self._sequences.get(message.attempt)
        if sequence is None or sequence.phase is not Phase.PARKED or message.segment.instance is None:
            return
        self._on_device.pop(sequence.key, None)
        self._buffered.pop(sequence.key, None)
        if message.segment.instance == self.instance:
            self._go_on(now_s, sequence, message)
            return
        self._effects.append(Dial(message.segment.instance, message.next_endpoint))
        sequence.phase = Phase.LEAVING
        self._offer(now_s, sequence, message.segment.instance, message.segment.start)
        self._outgoing[sequence.key].computed_at_s = now_s

    def _go_on(self, now_s: float, sequence: Sequence, message: BindSegment) -> None:
        """What was parked here runs on here."""
        sequence.end, sequence.batch_id = message.segment.end, message.batch_id
        sequence.phase = Phase.SWAPPED if sequence.key in self._pooled else Phase.RUNNING
        self._pooled.discard(sequence.key)
        self.scheduler.add(now_s, sequence)

    def _park(self, now_s: float, sequence: Sequence) -> None:
        """It waits, holding its KV, until a `BindSegment` says where it goes on."""
        sequence.phase = Phase.PARKED
        self._on_device[sequence.key] = now_s
        self._ended(now_s, sequence, Outcome.PARKED)

    def _pool_copies(self, now_s: float, plan: IterationPlan) -> None:
        """A2, A9 · Parked KV between device and host memory, beside the plan's rows: nothing of it is in a row, and
        what is freed here is taken by nobody until the plan is done."""
        if self._host_tables is None or not (self._on_device or self._prefetches or self._buffered):
            return
        spare = self._spare_blocks() if self._prefetches else 0
        while self._prefetches:
            key = self._prefetches[0]
            sequence = self._sequences.get(key)
            if sequence is not None and sequence.phase is Phase.PARKED and key in self._pooled:
                spare -= self.kv.geometry.blocks_for(sequence.computed)
                copy = self.kv.swap_in(sequence) if spare >= 0 else None
                if copy is None:
                    break
                plan.copies.append(replace(copy, beside=True))
                self._pooled.discard(key)
                self._buffered[key] = None
                self._moving.add(key)
                self.counters.prefetched += 1
            self._prefetches.popleft()
        self._offload(now_s, plan)

    def _offload(self, now_s: float, plan: IterationPlan) -> None:
        """What was parked a while ago; where prompts cannot get blocks, the buffer as well, its last first."""
        free = self.kv.free_blocks + self.kv.cached_blocks
        # A decode worker hands over what it set aside: that frees its blocks sooner than two copies.
        short = self.capacity.role.prefills and free < self.kv.total_blocks // 4
        for key, since_s in list(self._on_device.items()):
            if now_s - since_s < _PARKED_GRACE_S and not short:
                break
            if not self._to_host(key, plan):
                return
        while short and self._buffered and self._spare_blocks() < 0:
            key = next(reversed(self._buffered))
            if key in self._moving or not self._to_host(key, plan):
                return

    def _to_host(self, key: SequenceKey, plan: IterationPlan) -> bool:
        """False: the pool is full. It stays where it is, and prompts wait for its blocks."""
        copy = self.kv.swap_out(self._sequences[key])
        if copy is None:
            return False
        plan.copies.append(replace(copy, beside=True))
        self._on_device.pop(key, None)
        self._buffered.pop(key, None)
        self._pooled.add(key)
        self._moving.add(key)
        self.counters.pooled += 1
        return True

    def _spare_blocks(self) -> int:
        """Blocks that KV of the pool may be brought back into: a twentieth stays free, and what the largest prompt
        needs that waits."""
        waiting = (s.target for s in self._sequences.values() if s.phase is Phase.WAITING)
        wanted = self.kv.geometry.blocks_for(max(waiting, default=0))
        return self.kv.free_blocks + self.kv.cached_blocks - wanted - self.kv.total_blocks // 20

    def _next_instance(self, sequence: Sequence) -> InstanceId | None:
        """Who takes over after this segment; None: nobody, or not known yet."""
        message = self._segments[sequence.key]
        following = message.segments[message.index + 1 : message.index + 2]
        return following[0].instance if following else None

    # -- iterations --------------------------------------------------------------------------------------------

    def plan(self, now_s: float) -> IterationPlan | None:
        """The next iteration, or None when nothing can run. Its rows' blocks are reserved until `completed`."""
        if self._in_flight is not None:
            raise InvariantViolated("a plan is in flight already")
        if self._expecting is not None:
            self._expecting.expect(self._arriving())
        plan = self.scheduler.decide(now_s, self.kv)
        if self._expecting is not None:
            self._prompt_step = sum(row.count for row in plan.rows if row.count > 1) or self._prompt_step
        for sequence in plan.set_aside:
            sequence.end = sequence.computed
            self._park(now_s, sequence)
        self._pool_copies(now_s, plan)
        if self._consolidating is not None:
            plan.copies = self._consolidating.take_copies()
        self.counters.preemptions += len(plan.preempted)
        if not plan.rows and not plan.copies:
            return None
        self._moved_s = now_s
        for row in plan.rows:
            sequence = row.sequence
            if sequence.first_scheduled_s is None:
                sequence.first_scheduled_s = now_s
            if sequence.end is not None and sequence.key not in self._outgoing:
                following = self._next_instance(sequence)
                if following is not None:
                    self._offer(now_s, sequence, following, sequence.end)
        self._in_flight = plan
        return plan

    def completed(self, now_s: float, sampled: Iterable[Sampled], latency_s: float) -> None:
        """The plan in flight ran; `sampled` has one entry per row that reached the last known token."""
        plan = self._in_flight
        if plan is None:
            raise InvariantViolated("no plan is in flight")
        self._in_flight = None
        self.counters.steps += 1
        if plan.rows:
            self._averages.note(plan, latency_s)
        self.scheduler.observe(now_s, plan, latency_s)
        counters, doomed, kv = self.counters, self._doomed, self.kv
        for row in plan.rows:
            sequence = row.sequence
            if sequence.key in doomed:
                continue
            sequence.computed = row.start + row.count
            if row.count == 1 and sequence.output_tokens > 0:
                counters.decode_tokens += 1
            else:
                counters.prefill_tokens += row.count
            if sequence.prefill_done_s is None and sequence.computed >= len(sequence.request.tokens):
                sequence.prefill_done_s = now_s
            kv.committed(sequence)
        for draw in sampled:
            if draw.sequence.key not in doomed:
                self._token(now_s, draw)
        for row in plan.rows:
            sequence = row.sequence
            if sequence.end is None:
                continue  # nobody takes over from here
            if self._sequences.get(sequence.key) is sequence and sequence.key not in doomed:
                self._after_row(now_s, sequence)
        moved, self._moving = self._moving, set()
        if moved or _brings_back(plan):  # what `_push` put off
            for outgoing in list(self._outgoing.values()):
                self._push(now_s, outgoing)
        for key in list(self._doomed):
            self._doomed.discard(key)
            self._drop(now_s, self._sequences[key])
        self._grant_offers(now_s)

    def repeatable(self) -> bool:
        """Whether the plan in flight will repeat itself, row by row one position on, until something happens: for
        hosts with virtual time, who may then run several iterations as one (`repeat`)."""
        plan = self._in_flight
        scheduler = self._foreseeing
        if scheduler is None or plan is None or self._offers or self._doomed or not plan.rows:
            return False
        if self._on_device or self._prefetches or self._buffered:
            return False
        for row in plan.rows:
            sequence = row.sequence
            if (
                row.count != 1
                or sequence.end is not None
                or sequence.last_token_s is None
                or sequence.repeat_from is not None
                or row.start != len(sequence.tokens) - 1
                or sequence.phase is not Phase.RUNNING
            ):
                return False
        return scheduler.repeats(plan, self.kv)

    def undisturbed_by(self, message: Message) -> bool:
        """Whether `on_message` with this neither needs nor changes what iterations depend on: sequences in them, the
        scheduler, free blocks. What a host foresaw (`repeatable`) then holds, and need not be applied first. For peers
        that keep to the protocol: a virtual-time host has no others."""
        match message:
            case StartSegment(index=index):  # somebody else computes first
                return index > 0 and not self._offers
            case KvChunk():  # how far a hand-over has come is what some schedulers expect by
                return self._expecting is None
            case KvHandOver(lease_id=lease_id):
                incoming = self._incoming_by_lease.get(lease_id)
                return incoming is not None and incoming.in_flight > 0
            case KvRenew():
                return True
            case _:
                return False

    def undisturbed_by_runs(self, lease_id: int, runs: int) -> bool:
        """The same of `run_received` with so many runs that are well: others of this hand-over are still to come."""
        incoming = self._incoming_by_lease.get(lease_id)
        return incoming is not None and (incoming.hand_over is None or incoming.in_flight > runs)

    def fitting_repetitions(self, wanted: int) -> int:
        """How many of `wanted` iterations after the one in flight find blocks without anybody being preempted."""
        plan, kv = self._in_flight, self.kv
        if plan is None:
            raise InvariantViolated("no plan is in flight")
        size = kv.geometry.block_size
        available = kv.free_blocks + kv.cached_blocks
        if self._limiting is not None:
            wanted = max(0, min(wanted, self._limiting.repetitions()))
        if wanted // size + 1 <= available // len(plan.rows):
            return wanted  # enough even if nobody had blocks left
        tables = [(row.start, len(kv.blocks(row.sequence.key))) for row in plan.rows]
        low, high = 0, wanted
        while low < high:
            middle = (low + high + 1) // 2
            # Blocks beyond those that were allocated ahead.
            if sum(max(0, (start + middle) // size + 1 - held) for start, held in tables) <= available:
                low = middle
            else:
                high = middle - 1
        return low

    def repeat(self, ends_s: Seq[float], latencies_s: Seq[float], token: int) -> None:
        """As if `completed` and `plan` had been called once for each of `ends_s`, every row drawing `token` each time;
        the plan in flight is then the one that follows. Only after `repeatable`, for no more than
        `fitting_repetitions`, and short of every row's last token. The token updates it would send are left to the
        host, who knows them."""
        plan = self._in_flight
        if plan is None:
            raise InvariantViolated("no plan is in flight")
        count, size, kv = len(ends_s), self.kv.geometry.block_size, self.kv
        averages = self._averages
        for latency_s in latencies_s:
            averages.step_s = _mix(averages.step_s, latency_s)
            averages.decode_step_s = _mix(averages.decode_step_s, latency_s)
        # What touches blocks happens in the order of the iterations: after each, full blocks are committed; then the
        # next one reserves. So the same blocks go to the same rows.
        touched: list[tuple[int, bool, int]] = []
        last_s = ends_s[-1]
        self._moved_s = max(self._moved_s, last_s)
        drawn = [token] * count
        for index, row in enumerate(plan.rows):
            start = row.start
            to_boundary = size - start % size
            touched += [(step - 1, False, index) for step in range(to_boundary, count + 1, size)]
            touched += [(step, True, index) for step in range(to_boundary, count + 1, size)]
            row.sequence.tokens += drawn
        touched.sort()
        rows = plan.rows
        for step, reserves, index in touched:
            row = rows[index]
            if reserves:
                if not kv.extend(row.sequence, row.start + step + 1):
                    raise InvariantViolated(f"no block for {row.sequence.key} in a repeated iteration")
            else:
                row.sequence.computed = row.start + step + 1
                kv.committed(row.sequence)
        plan.rows = following = []
        for row in rows:
            sequence, start = row.sequence, row.start + count
            sequence.computed = start
            sequence.delivered += count
            sequence.last_token_s = last_s
            following.append(Row(sequence, start, 1))
        self.counters.steps += count
        self.counters.decode_tokens += count * len(rows)

    def scored(self, sequence: Sequence, position: int, scores: list[TokenLogprob]) -> None:
        """What the iteration in flight found for the prompt tokens after `position`, one each; before `completed`.
        Positions that are computed again (after a preemption) replace what was known."""
        if sequence.key in self._sequences:
            self._prompt_logprobs.setdefault(sequence.key, [])[position:] = scores

    def step_failed(self, now_s: float, reason: str) -> None:
        """The forward itself failed: its requests are given back to be placed again, the worker lives on."""
        plan = self._in_flight
        if plan is None:
            raise InvariantViolated("no plan is in flight")
        self._in_flight = None
        for key in self._moving:  # nobody knows whether their copies were made
            if key in self._sequences:
                self._fail(now_s, self._sequences[key], reason)
        self._moving = set()
        for row in plan.rows:
            if self._sequences.get(row.sequence.key) is row.sequence:
                self._fail(now_s, row.sequence, reason)
        for key in list(self._doomed):
            self._doomed.discard(key)
            if key in self._sequences:
                self._drop(now_s, self._sequences[key])

    def _token(self, now_s: float, draw: Sampled) -> None:
        sequence = draw.sequence
        request, tokens = sequence.request, sequence.tokens
        position = len(tokens)
        tokens.append(draw.token)
        sampling = request.sampling
        finish: FinishReason | None = None
        if draw.token in sampling.stop_token_ids:
            finish = FinishReason.STOP
        elif position + 1 - request.prompt_tokens >= sampling.max_tokens:
            finish = FinishReason.LENGTH
        if draw.logprob is not None:
            self._logprobs.setdefault(sequence.key, []).append(draw.logprob)
        start = position if sequence.repeat_from is None else sequence.repeat_from
        sequence.repeat_from = None
        logprobs = self._logprobs.get(sequence.key)
        first_here = sequence.last_token_s is None
        sequence.last_token_s = now_s
        sequence.delivered += 1
        self._updates.setdefault(request.gateway, []).append(
            TokenUpdate(
                request.attempt,
                start,
                tokens[start:],
                logprobs[start - len(request.tokens) :] if logprobs else [],
                finish,
                cached_tokens=sequence.cached_tokens,
                times=self._times(now_s, sequence) if first_here or finish else None,
                prompt_logprobs=self._prompt_logprobs.get(sequence.key, []) if start == request.prompt_tokens else [],
            )
        )
        if finish is not None:
            self._finished(now_s, sequence, finish)

    def _finished(self, now_s: float, sequence: Sequence, finish: FinishReason) -> None:
        self.counters.finished[finish.value] = self.counters.finished.get(finish.value, 0) + 1
        self._ended(now_s, sequence, Outcome.FINISHED, finish.value)
        self._drop(now_s, sequence, tell_peer="finished before the hand-over")

    def _after_row(self, now_s: float, sequence: Sequence) -> None:
        outgoing = self._outgoing.get(sequence.key)
        if sequence.end is not None and sequence.computed >= sequence.end:
            self.scheduler.remove(now_s, sequence)
            if outgoing is None:
                self._park(now_s, sequence)
                return
            sequence.phase = Phase.LEAVING
            outgoing.computed_at_s = now_s
            if not outgoing.granted:
                outgoing.deadline_s = now_s + self._settings.offer_timeout_s
        if outgoing is not None:
            self._push(now_s, outgoing)

    def _times(self, now_s: float, sequence: Sequence) -> StageTimes:
        first = sequence.first_scheduled_s if sequence.first_scheduled_s is not None else now_s
        prefilled = sequence.prefill_done_s if sequence.prefill_done_s is not None else first
        return StageTimes(
            instance=self.instance,
            queue_s=max(0.0, first - sequence.arrived_s - sequence.request.waited_s),
            prefill_s=max(0.0, prefilled - first),
            transfer_s=sequence.transfer_s,
            decode_s=max(0.0, now_s - prefilled),
            preemptions=sequence.preemptions,
        )

    # -- endings -----------------------------------------------------------------------------------------------

    def _cancel(self, now_s: float, key: SequenceKey, reason: str) -> None:
        self._offers = deque(o for o in self._offers if o.attempt != key)
        sequence = self._sequences.get(key)
        if sequence is None or key in self._doomed:
            return
        self._ended(now_s, sequence, Outcome.CANCELLED, reason)
        if self._is_in_flight(sequence):
            self.scheduler.remove(now_s, sequence)
            self._doomed.add(key)
        else:
            self._drop(now_s, sequence, tell_peer=reason)

    def _fail(self, now_s: float, sequence: Sequence, reason: str) -> None:
        """Give the request back: the manager displaces it, its gateway resubmits it."""
        if sequence.key in self._doomed or self._sequences.get(sequence.key) is not sequence:
            return
        if sequence.key in self._outgoing or sequence.key in self._incoming:
            self.counters.transfer_failures += 1
        self._ended(now_s, sequence, Outcome.FAILED, reason)
        if self._is_in_flight(sequence):
            self.scheduler.remove(now_s, sequence)
            self._doomed.add(sequence.key)
        else:
            self._drop(now_s, sequence, tell_peer=reason)

    def _is_in_flight(self, sequence: Sequence) -> bool:
        return self._in_flight is not None and any(row.sequence is sequence for row in self._in_flight.rows)

    def _drop(self, now_s: float, sequence: Sequence, tell_peer: str = "cancelled") -> None:
        """Forget a sequence; its blocks are freed now, or as soon as its runs in flight have settled."""
        key = sequence.key
        self.scheduler.remove(now_s, sequence)
        self._sequences.pop(key, None)
        self._segments.pop(key, None)
        self._logprobs.pop(key, None)
        self._prompt_logprobs.pop(key, None)
        self._on_device.pop(key, None)
        self._buffered.pop(key, None)
        self._pooled.discard(key)
        outgoing = self._outgoing.pop(key, None)
        incoming = self._incoming.pop(key, None)
        held_back = False
        if outgoing is not None:
            self._effects.append(Send(outgoing.peer, KvAbort(sequence.key, outgoing.transfer_id, tell_peer)))
            held_back = self._settle(outgoing, outgoing.lease_id)
        if incoming is not None:
            self._incoming_by_lease.pop(incoming.lease_id, None)
            self.leases.end(incoming.lease_id)
            self._effects.append(Send(incoming.sender, KvAbort(sequence.key, incoming.transfer_id, tell_peer)))
            held_back = self._settle(incoming, incoming.lease_id) or held_back
        if not held_back:
            self.kv.release(key)

    def _settle(self, transfer: Outgoing | Incoming, lease_id: int) -> bool:
        """Mark a transfer dead; True if its runs in flight must end before its blocks are freed."""
        transfer.dead = True
        if isinstance(transfer, Outgoing):
            self._outgoing_by_lease.pop(lease_id, None)
        if transfer.in_flight == 0:
            return False
        self._settling[lease_id] = transfer
        self._effects.append(CancelRuns(lease_id))
        return True

    def _settled(self, lease_id: int) -> None:
        transfer = self._settling[lease_id]
        if transfer.in_flight == 0:
            del self._settling[lease_id]
            self.kv.release(transfer.sequence.key)

    def _ended(self, now_s: float, sequence: Sequence, outcome: Outcome, reason: str = "") -> None:
        self._effects.append(
            Send(self.manager, SegmentEnded(self.instance, sequence.key, outcome, sequence.computed, reason))
        )

    # -- hand-over, sending end --------------------------------------------------------------------------------

    def _offer(self, now_s: float, sequence: Sequence, peer: InstanceId, positions: int) -> None:
        outgoing = Outgoing(
            sequence, peer, self._random.getrandbits(53), positions, now_s + self._settings.offer_timeout_s
        )
        self._outgoing[sequence.key] = outgoing
        self._effects.append(Send(peer, KvOffer(self.instance, sequence.key, outgoing.transfer_id, positions)))

    def _granted(self, now_s: float, grant: KvGrant) -> None:
        key = grant.attempt
        outgoing = self._outgoing.get(key)
        if outgoing is None or outgoing.transfer_id != grant.transfer_id or outgoing.granted:
            return  # we gave up meanwhile; the abort that said so is on its way
        link = next((name for name in self._settings.links if name in grant.links), "")
        if not link:
            self._fail(now_s, outgoing.sequence, f"no common KV link with {outgoing.peer}")
            return
        outgoing.lease_id = grant.lease_id
        outgoing.target_blocks = grant.blocks
        outgoing.skip_blocks = outgoing.sent_blocks = grant.cached_tokens // self.capacity.block_size
        outgoing.links = grant.links
        outgoing.link = link
        self._outgoing_by_lease[grant.lease_id] = outgoing
        self._push(now_s, outgoing)

    def _push(self, now_s: float, outgoing: Outgoing) -> None:
        """Send the blocks that are complete; at the segment's end also the last, partial one, and the hand-over."""
        if not outgoing.granted or outgoing.dead:
            return
        if self._in_flight is not None and _brings_back(self._in_flight):
            return  # its blocks may be about to be filled from host memory; `completed` comes back to it
        sequence = outgoing.sequence
        if sequence.key in self._moving:
            return
        leaving = sequence.phase is Phase.LEAVING
        if not leaving and not self._settings.chunked_transfer:
            return
        if sequence.phase not in (Phase.RUNNING, Phase.LEAVING):
            return  # preempted: what was sent stays sent, the rest follows when it is computed again
        computed = min(sequence.computed, outgoing.positions)
        blocks = self.kv.geometry.blocks_for(computed) if leaving else computed // self.capacity.block_size
        pool = self._host_tables if sequence.key in self._pooled else None
        source = self.kv.blocks(sequence.key) if pool is None else pool.host_table(sequence.key)
        runs = outgoing.next_runs(source, blocks)
        if pool is not None and not outgoing.handed_over:
            self.counters.from_host += 1
        if runs:
            sequence.pinned = True
            self._effects.append(
                SendRuns(
                    outgoing.peer,
                    sequence.key,
                    outgoing.lease_id,
                    outgoing.round,
                    outgoing.link,
                    outgoing.links[outgoing.link],
                    runs,
                    from_host=pool is not None,
                )
            )
        if leaving and not outgoing.handed_over:
            outgoing.handed_over = True
            outgoing.deadline_s = now_s + self._settings.accept_timeout_s
            exposed = now_s - outgoing.computed_at_s if outgoing.computed_at_s is not None else 0.0
            self._effects.append(
                Send(
                    outgoing.peer,
                    KvHandOver(
                        sequence.key,
                        outgoing.lease_id,
                        outgoing.round,
                        sequence.tokens,
                        computed,
                        outgoing.round_runs,
                        sequence.cached_tokens,
                        self._logprobs.get(sequence.key, []),
                        exposed,
                        self._prompt_logprobs.get(sequence.key, []),
                    ),
                )
            )

    def run_sent(self, now_s: float, lease_id: int, error: str | None, runs: int = 1) -> None:
        """So many runs left (or failed: then the receiver will ask again, or a deadline ends it)."""
        outgoing = self._outgoing_by_lease.get(lease_id) or self._settling.get(lease_id)
        if not isinstance(outgoing, Outgoing):
            raise InvariantViolated(f"a run of unknown lease {lease_id} was sent")
        outgoing.in_flight -= runs
        outgoing.sequence.pinned = outgoing.in_flight > 0
        if outgoing.dead:
            self._settled(lease_id)

    def _accepted(self, now_s: float, lease_id: int) -> None:
        outgoing = self._outgoing_by_lease.pop(lease_id, None)
        if outgoing is None:
            return
        sequence = outgoing.sequence
        self.counters.transfers_out += 1
        self._moved_s = now_s
        del self._outgoing[sequence.key]
        self._ended(now_s, sequence, Outcome.HANDED_OVER)
        self._sequences.pop(sequence.key)
        self._segments.pop(sequence.key)
        self._logprobs.pop(sequence.key, None)
        self._prompt_logprobs.pop(sequence.key, None)
        self._pooled.discard(sequence.key)
        outgoing.dead = True
        if outgoing.in_flight:  # its bytes have arrived, but the link has not said so yet
            self._settling[lease_id] = outgoing
        else:
            self.kv.release(sequence.key)

    # -- hand-over, receiving end ------------------------------------------------------------------------------

    def _arriving(self) -> int:
        """Requests in the middle of their answers that will be here shortly."""
        size = self.capacity.block_size
        return sum(1 for incoming in self._incoming.values() if incoming.imminent(size, self._prompt_step))

    def _grant_offers(self, now_s: float) -> None:
        """First come, first granted. Not while a plan with copies runs: blocks it frees are still being read."""
        if self._in_flight is not None and self._in_flight.copies:
            return
        postponed: deque[QueuedOffer] = deque()
        while self._offers:
            offer = self._offers.popleft()
            key = offer.attempt
            sequence = self._sequences.get(key)
            if sequence is None:
                # Its StartSegment comes over another connection and may be later than the offer.
                if now_s - offer.since_s < self._settings.offer_timeout_s:
                    postponed.append(offer)
                continue
            if key in self._incoming:
                continue
            if any(transfer.sequence.key == key for transfer in self._settling.values()):
                # It was here before, and its last run from here has not settled.
                postponed.append(offer)
                continue
            if not self._room_for(offer.positions):
                postponed.append(offer)
                break
            cached = self.kv.reserve(key, sequence.tokens, offer.positions)
            if cached is None:
                postponed.append(offer)
                break
            self._grant(now_s, offer, sequence, cached)
        postponed.extend(self._offers)
        self._offers = postponed

    def _room_for(self, positions: int) -> bool:
        """Keep a block for every running sequence, unless nothing else is going on."""
        running = sum(1 for s in self._sequences.values() if s.phase is Phase.RUNNING)
        spare = self.kv.free_blocks + self.kv.cached_blocks - self.kv.geometry.blocks_for(positions)
        return running == 0 or spare >= min(running, self.kv.total_blocks // 20)

    def _grant(self, now_s: float, offer: QueuedOffer, sequence: Sequence, cached: int) -> None:
        lease_id = self._random.getrandbits(40) | 1 << 40  # never 0; tags take the low 40 bits
        incoming = Incoming(sequence, offer.sender, offer.transfer_id, lease_id, offer.positions)
        incoming.announced_blocks = cached // self.capacity.block_size
        self._incoming[sequence.key] = incoming
        self._incoming_by_lease[lease_id] = incoming
        self.leases.grant(now_s, lease_id, sequence.key, offer.sender)
        self._effects.append(
            Send(
                offer.sender,
                KvGrant(
                    offer.attempt,
                    offer.transfer_id,
                    lease_id,
                    self._settings.lease_s,
                    list(self.kv.blocks(sequence.key)),
                    cached,
                    dict(self._link_addresses()),
                ),
            )
        )

    def _chunk(self, now_s: float, chunk: KvChunk) -> None:
        incoming = self._incoming_by_lease.get(chunk.lease_id)
        if incoming is None or chunk.round != incoming.round or incoming.retry_link:
            return  # of a round or a lease that is over
        if chunk.attempt != incoming.sequence.key:
            self._fail(now_s, incoming.sequence, f"{incoming.sender} sent KV of another request under this lease")
            return
        own = set(self.kv.blocks(incoming.sequence.key))
        for run in chunk.runs:
            if not own.issuperset(range(run.first_block, run.first_block + run.num_blocks)):
                self._fail(now_s, incoming.sequence, f"{incoming.sender} sent KV to blocks it was not granted")
                return
        self.leases.renew(now_s, chunk.lease_id)
        incoming.in_flight += len(chunk.runs)
        incoming.announced(sum(run.num_blocks for run in chunk.runs))
        runs = tuple(Run(run.tag, 0, run.first_block, run.num_blocks, run.checksum) for run in chunk.runs)
        self._effects.append(ReceiveRuns(chunk.lease_id, chunk.round, chunk.link, runs))

    def run_received(self, now_s: float, lease_id: int, round_: int, error: str | None, runs: int = 1) -> None:
        """So many runs of one round are in their blocks and checked, or are not."""
        settling = self._settling.get(lease_id)
        if settling is not None:
            settling.in_flight -= runs
            self._settled(lease_id)
            return
        incoming = self._incoming_by_lease.get(lease_id)
        if incoming is None:
            raise InvariantViolated(f"a run of unknown lease {lease_id} was received")
        incoming.in_flight -= runs
        if error is None and round_ == incoming.round and not incoming.retry_link:
            incoming.received_runs += runs
            self._moved_s = now_s
            self.leases.renew(now_s, lease_id)
        elif not incoming.retry_link:
            self._round_failed(now_s, incoming, error or "stale round")
        if incoming.dead:
            return
        if incoming.retry_link and incoming.in_flight == 0:
            self._ask_again(now_s, incoming)
        elif incoming.complete:
            self._accept(now_s, incoming)

    def _round_failed(self, now_s: float, incoming: Incoming, error: str) -> None:
        """Once over another path, then give up (the request is recomputed elsewhere)."""
        path = self._settings.links[-1]
        if incoming.round > 0:
            self._fail(now_s, incoming.sequence, f"KV transfer failed twice: {error}")
            return
        self.counters.transfer_retries += 1
        incoming.retry_link = path
        if incoming.in_flight:
            self._effects.append(CancelRuns(incoming.lease_id))

    def _ask_again(self, now_s: float, incoming: Incoming) -> None:
        incoming.round += 1
        incoming.received_runs = 0
        incoming.hand_over = None
        link, incoming.retry_link = incoming.retry_link, ""
        self.leases.renew(now_s, incoming.lease_id)
        request = incoming.sequence.request
        self._effects.append(
            Send(
                incoming.sender, KvAbort(request.attempt, incoming.transfer_id, "transfer failed", link, incoming.round)
            )
        )

    def _hand_over(self, now_s: float, message: KvHandOver) -> None:
        incoming = self._incoming_by_lease.get(message.lease_id)
        if incoming is None or message.round != incoming.round:
            return
        if message.computed != incoming.positions or len(message.tokens) < message.computed:
            self._fail(now_s, incoming.sequence, f"{incoming.sender} handed over {message.computed} positions")
            return
        incoming.hand_over = message
        incoming.hand_over_at_s = now_s
        self.leases.renew(now_s, message.lease_id)
        if incoming.complete:
            self._accept(now_s, incoming)

    def _accept(self, now_s: float, incoming: Incoming) -> None:
        hand_over = incoming.hand_over
        if hand_over is None:
            raise InvariantViolated("accepted without a hand-over")
        sequence = incoming.sequence
        sequence.tokens = list(hand_over.tokens)
        sequence.computed = hand_over.computed
        sequence.cached_tokens = hand_over.cached_tokens
        sequence.delivered = sequence.output_tokens
        if sequence.known > len(sequence.request.tokens):
            sequence.repeat_from = len(sequence.request.tokens)
        if hand_over.logprobs:
            self._logprobs[sequence.key] = list(hand_over.logprobs)
        if hand_over.prompt_logprobs:
            self._prompt_logprobs[sequence.key] = list(hand_over.prompt_logprobs)
        sequence.transfer_s = hand_over.exposed_s + (now_s - incoming.hand_over_at_s)
        self.counters.exposed_transfer_s += sequence.transfer_s
        del self._incoming[sequence.key]
        del self._incoming_by_lease[incoming.lease_id]
        self.leases.end(incoming.lease_id)
        self.counters.transfers_in += 1
        self._moved_s = now_s
        self.kv.committed(sequence)
        self._effects.append(Send(incoming.sender, KvAccepted(sequence.key, incoming.lease_id)))
        if sequence.end is not None and sequence.computed >= sequence.end:  # a buffer for somebody else (A5, A6)
            self._park(now_s, sequence)
            return
        sequence.phase = Phase.RUNNING
        self.scheduler.add(now_s, sequence)

    # -- hand-over, both ends ----------------------------------------------------------------------------------

    def _break_stall(self, now_s: float) -> None:
        """Nothing has moved here for long although somebody wants blocks: they are held for KV that waits, directly or
        in a ring of workers, for what is held here. The youngest grant goes back, or else the youngest of those that
        could leave; its request is placed anew. (A prefill worker whose decode worker is merely full waits on.)"""
        self._moved_s = now_s  # one at a time: its blocks may be what everybody waited for
        runnable = (Phase.WAITING, Phase.SWAPPED, Phase.RUNNING)
        if not self._offers and not any(s.phase in runnable for s in self._sequences.values()):
            return
        held = [incoming.sequence for incoming in self._incoming.values() if incoming.hand_over is None]
        if not held and self._offers:
            held = [outgoing.sequence for outgoing in self._outgoing.values() if not outgoing.granted]
        if not held:  # what only wants to wait here (A6 eviction) may hold up where it is what we wait for
            wanted = [self._sequences.get(o.attempt) for o in self._offers]
            held = [s for s in wanted if s is not None and s.end is not None]
        if held:
            self.counters.stalls += 1
            self._fail(now_s, held[-1], "caches waited for each other's blocks")

    def _abort(self, now_s: float, sender: InstanceId, message: KvAbort) -> None:
        key = message.attempt
        self._offers = deque(o for o in self._offers if o.transfer_id != message.transfer_id)
        outgoing = self._outgoing.get(key)
        if outgoing is not None and outgoing.transfer_id == message.transfer_id:
            if message.retry_link and message.retry_link in outgoing.links:
                self.counters.transfer_retries += 1
                outgoing.restart(message.retry_link, message.round)
                self._push(now_s, outgoing)
            else:
                self._fail(now_s, outgoing.sequence, f"{sender} aborted the transfer: {message.reason}")
            return
        incoming = self._incoming.get(key)
        awaiting = self._sequences.get(key)
        if incoming is not None and incoming.transfer_id != message.transfer_id:
            return
        # The sender decided about the request and told the manager; here it only goes.
        if awaiting is not None and awaiting.phase is Phase.AWAITING_KV:
            self._drop(now_s, awaiting, tell_peer=message.reason)

    def _renew(self, now_s: float) -> None:
        """Tell receivers that we are still at it, and senders that their offers still wait."""
        leases: dict[InstanceId, list[int]] = {}
        transfers: dict[InstanceId, list[int]] = {}
        for outgoing in self._outgoing.values():
            if outgoing.granted:
                leases.setdefault(outgoing.peer, []).append(outgoing.lease_id)
        for offer in self._offers:
            transfers.setdefault(offer.sender, []).append(offer.transfer_id)
        for peer in leases.keys() | transfers.keys():
            self._effects.append(Send(peer, KvRenew(leases.get(peer, []), transfers.get(peer, []))))

    # -- reports -----------------------------------------------------------------------------------------------

    def figures(self, memory_free_bytes: int) -> WorkerFigures:
        running = waiting = awaiting_kv = parked = queued = context = 0
        queue: list[QueuedWork] = []
        for sequence in self._sequences.values():
            request, computed, known = sequence.request, sequence.computed, len(sequence.tokens)
            prompt = len(request.tokens)  # with the output of former attempts: prefilled alike
            phase = sequence.phase
            if phase is Phase.AWAITING_KV:  # what comes before its segment is somebody else's work
                message = self._segments[sequence.key]
                computed = message.segments[message.index].start
                known = max(known, computed)
            prefill_left = (prompt if sequence.end is None else min(prompt, sequence.end)) - computed
            prefill_left = max(prefill_left, 0)
            if phase is Phase.RUNNING:
                running += 1
            elif phase is Phase.WAITING or phase is Phase.SWAPPED:
                waiting += 1
            elif phase is Phase.AWAITING_KV:
                awaiting_kv += 1
            else:
                parked += 1
            if phase is Phase.RUNNING or phase is Phase.WAITING or phase is Phase.SWAPPED:
                queued += prefill_left if prefill_left > 1 else 0
                context += computed
            if len(queue) < _REPORTED_QUEUE:
                # Who has drawn more than was predicted goes on, nobody knows how long: for as many again (D8).
                drawn = known - request.prompt_tokens
                left = max(1, min(abs(round(sequence.predicted) - drawn), request.sampling.max_tokens - drawn))
                if sequence.end is not None:  # the rest is drawn by the next segment's worker
                    left = min(left, max(0, sequence.end - max(known, prompt)))
                queue.append(QueuedWork(request.request_id, prefill_left, computed, left))
        kv = self.kv
        cache = kv.figures()
        return WorkerFigures(
            total_blocks=kv.total_blocks,
            free_blocks=kv.free_blocks,
            cached_blocks=kv.cached_blocks,
            host_blocks=kv.host_blocks,
            host_free_blocks=kv.host_free_blocks,
            memory_free_bytes=memory_free_bytes,
            running=running,
            waiting=waiting,
            awaiting_kv=awaiting_kv,
            parked=parked,
            queued_prefill_tokens=queued,
            running_context_tokens=context,
            step_s=self._averages.step_s,
            prefill_tokens_per_s=self._averages.prefill_tokens_per_s,
            decode_step_s=self._averages.decode_step_s,
            preemptions=self.counters.preemptions,
            prefix_queries=int(cache.get("prefix_queries_total", 0)),
            prefix_hits=int(cache.get("prefix_hits_total", 0)),
            leases=len(self.leases),
            expired_leases=self.leases.expired,
            queue=queue,
            step_times=None if self._learning is None else self._learning.step_times(),
        )

    def check(self) -> None:
        """Raise `InvariantViolated` if anything is held by nobody, or by two."""
        self.kv.check()
        known = set(self._sequences) | {transfer.sequence.key for transfer in self._settling.values()}
        stray = set(self.kv.owners()) - known
        if stray:
            raise InvariantViolated(f"blocks of forgotten sequences: {sorted(stray)[:4]}")
        for lease_id in self._incoming_by_lease:
            self.leases.get(lease_id)
        if len(self.leases) != len(self._incoming_by_lease):
            raise InvariantViolated("leases and incoming transfers differ")
