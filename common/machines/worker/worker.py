"""The worker as a pure state machine: segments in; tokens, KV transfers and reports out.

Hosted by the live worker loop (`engine/worker/worker_loop.py`) and by virtual-time hosts. After the last event of a
`handle` call the next iteration is decided, if none is in flight: `StartStep` is the last effect. While a step is in
flight nothing it reads or writes is freed: cancellations mark their sequences as aborting and take effect when the step
ends. On `PlanAhead` the next step is queued, if its rows are certain (`plan_ahead.py`); a sequence that ends with the
first of the two is then dropped with the second.

`KvSender` and `KvReceiver` move KV between workers, `ParkedPool` between device and host memory; only this file calls
the scheduler. Messages that are not for a worker are refused by the host; here they are an error.
"""

from __future__ import annotations

import operator
from array import array
from collections import deque
from collections.abc import Callable, Iterable
from random import Random
from typing import assert_never, cast

from cohort.common.errors import InvariantViolated
from cohort.common.machines.effects import Dial, Send, StartStep, WorkerEffect
from cohort.common.machines.events import (
    AdapterFailed,
    AdapterLoaded,
    DrainEnded,
    DrainStarted,
    LinkAddresses,
    LinkMeasured,
    PlanAhead,
    Pooled,
    PromptScores,
    Received,
    ReportDue,
    RunsReceived,
    RunsSent,
    Sampled,
    StepEnded,
    StepFailed,
    Tick,
    Undelivered,
    WorkerEvent,
)
from cohort.common.machines.senders import may_send
from cohort.common.machines.worker.adapter_slots import AdapterSlots
from cohort.common.machines.worker.kv_receiver import KvReceiver
from cohort.common.machines.worker.kv_sender import KvSender, brings_back
from cohort.common.machines.worker.parked_pool import Handovers, ParkedPool
from cohort.common.machines.worker.plan_ahead import AheadPlanner, same_rows
from cohort.common.machines.worker.speculation_control import SpeculationControl
from cohort.common.machines.worker.worker_report import WorkerReports
from cohort.common.machines.worker.worker_state import Held, WorkerSetup, WorkerState
from cohort.common.messages import (
    BindSegment,
    Cancel,
    KvAbort,
    KvAccepted,
    KvChunk,
    KvGrant,
    KvHandoff,
    KvOffer,
    KvRenew,
    ManagerHello,
    PooledStates,
    PrefetchKv,
    Registered,
    RevisePrediction,
    SegmentEnded,
    StageTimes,
    StartSegment,
    TokenBatch,
    TokenUpdate,
    ToWorker,
)
from cohort.common.policies.interface import IterationPlan, IterationScheduler, Learned, News, Ran
from cohort.common.policies.kv_interface import KvAllocator
from cohort.common.policies.step_times.learned_times import LearnedTimes
from cohort.common.sequence import Phase, Sequence
from cohort.common.types import Attempt, FinishReason, InstanceId, Outcome, WorkerStats

_RUNNABLE = (Phase.WAITING, Phase.SWAPPED, Phase.RUNNING)


class WorkerMachine:
    def __init__(
        self, setup: WorkerSetup, scheduler: IterationScheduler, kv: KvAllocator, random: Random, *, learns: bool = True
    ) -> None:
        """`learns`: iteration times are learned and reported even if the scheduler does not decide by them."""
        self.setup = setup
        self.scheduler = scheduler
        self.kv = kv
        self.state = state = WorkerState(setup, kv, random)
        self.counters = state.counters
        self.sender = KvSender(state, self._on_handed_over, self._fail)
        self.receiver = KvReceiver(state, lambda: self.sender.draining, self._on_kv_complete, self._fail)
        self.leases = self.receiver.leases
        self.pool = ParkedPool(state)
        self._ahead = AheadPlanner(state, scheduler, self.receiver, self.pool)
        learned = scheduler.learned
        self.observed = LearnedTimes() if setup.settings.learns and not isinstance(learned, LearnedTimes) else None
        """Iteration times learned here, because the scheduler learns none."""
        self.times = learned if isinstance(learned, LearnedTimes) else self.observed
        """Learned iteration times, of the scheduler or of `observed`; None if neither learns them."""
        self.adapters = AdapterSlots(state, self._admit_to_scheduler, self._refuse)
        self._handovers = Handovers(state, scheduler, self.pool, self.sender, self.adapters, self._fail)
        self._reports = WorkerReports(state, self.leases, self.times, self.adapters)
        self._held = state.held
        self._bound = 0
        """Sequences here whose answer is bound to a grammar: without any, no step's rows are searched for them."""
        self._effects = state.effects
        self._tokens = TokenUpdates(state)
        self._scoring = ScoringTurns(state.holds)
        self.drafts = SpeculationControl(state, self.times)
        self._now_s = float("-inf")
        self._next_renewal_s = 0.0
        self._repeats = False
        """Whether the step in flight was planned ahead and has the rows of the one before it."""
        self._ran: Ran | None = None
        self._earlier: list[Ran] = []
        self._revised: list[Sequence] = []
        """Input of the next decision: the last iteration and those before it, sequences with another prediction."""
        self._prompt_step = setup.capacity.max_step_tokens
        """Prompt tokens of the last iteration that held any."""

    def handle(self, now_s: float, *events: WorkerEvent) -> list[WorkerEffect]:
        """See `Machine`. Raises `InvariantViolated` for an answer to nothing (a step, a run)."""
        assert now_s >= self._now_s, f"it is {now_s} s, and was {self._now_s} s"
        self._now_s = now_s
        for event in events:
            match event:
                case Received(sender=sender, message=message):
                    self._received(now_s, sender, cast(ToWorker, message))
                case StepEnded():
                    self._completed(now_s, event)
                case RunsSent():
                    self.sender.runs_sent(now_s, event)
                case LinkMeasured(peer=peer, bytes_per_s=bytes_per_s):
                    self.state.link_rates[peer] = bytes_per_s
                case RunsReceived():
                    self.receiver.runs_received(now_s, event)
                case Tick():
                    self._tick(now_s)
                case ReportDue(memory_free_bytes=memory_free_bytes, quiet_s=quiet_s):
                    self._reports.due(memory_free_bytes, quiet_s)
                case StepFailed(reason=reason):
                    self._step_failed(now_s, reason)
                case PlanAhead(expected=expected):
                    self._plan_ahead(now_s, expected)
                case Undelivered(peer=peer):
                    self.sender.peer_lost(now_s, peer)
                    self.receiver.peer_lost(now_s, peer)
                case LinkAddresses(addresses=addresses):
                    self.receiver.links = addresses
                case AdapterLoaded() | AdapterFailed():
                    self.adapters.on_load_ended(now_s, event)
                case DrainStarted():
                    self._reports.draining = True
                case DrainEnded():
                    self._reports.leave()
                case _:
                    assert_never(event)
        if self.state.in_flight is None:
            assert self.state.ahead is None, "a step is begun behind none"
            self._plan(now_s)
        effects = self._effects.copy()
        self._effects.clear()
        return effects

    @property
    def idle(self) -> bool:
        """Whether no request is here in any phase and no ended transfer has runs in flight."""
        return not self._held and not self.sender.draining and not self.receiver.draining

    @property
    def learned(self) -> Learned | None:
        """State that a host stores over a restart: the scheduler's own, or else the times that are learned here."""
        return self.scheduler.learned or self.observed

    @property
    def plan_in_flight(self) -> IterationPlan:
        """Plan between `StartStep` and its answer. Raises `InvariantViolated` otherwise."""
        if self.state.in_flight is None:
            raise InvariantViolated("no plan is in flight")
        return self.state.in_flight

    def sequences(self) -> Iterable[Sequence]:
        return (held.sequence for held in self._held.values())

    def stats(self, memory_free_bytes: int) -> WorkerStats:
        return self._reports.stats(memory_free_bytes)

    def check(self) -> None:
        self.kv.check()
        stray = set(self.kv.owners()) - {*self._held, *self.sender.draining, *self.receiver.draining}
        if stray:
            raise InvariantViolated(f"blocks of forgotten sequences: {sorted(stray)[:4]}")
        self.sender.check()
        self.receiver.check()
        self.pool.check()
        self.adapters.check()
        bound = sum(held.sequence.has_grammar for held in self._held.values())
        if bound != self._bound:
            raise InvariantViolated(f"{bound} sequences with grammars, counted {self._bound}")

    def _received(self, now_s: float, sender: InstanceId, message: ToWorker) -> None:
        if not may_send(sender, message, managers=self._reports.managers):
            self.counters.misnamed += 1
            return
        if self._reports.refuses(sender, message):
            return
        match message:
            case StartSegment():
                self._start_segment(now_s, message)
            case KvOffer():
                self.receiver.offered(now_s, sender, message)
            case KvGrant():
                self.sender.granted(now_s, message)
            case KvChunk():
                self.receiver.announced(now_s, message)
            case KvHandoff():
                self.receiver.handed_over(now_s, message)
            case KvAccepted(lease_id=lease_id):
                self.sender.accepted(now_s, lease_id)
            case KvRenew(lease_ids=lease_ids, transfer_ids=transfer_ids):
                for lease_id in lease_ids:
                    self.leases.renew(now_s, lease_id)
                self.sender.offers_wait(now_s, transfer_ids)
            case KvAbort():
                self._aborted(now_s, sender, message)
            case Cancel(attempts=attempts, reason=reason):
                for attempt in attempts:
                    self._cancel(now_s, attempt, reason)
            case BindSegment():
                self._handovers.bound(now_s, message)
            case PrefetchKv(attempts=attempts):
                self.pool.prefetch(attempts)
            case RevisePrediction():
                self._revise(now_s, message)
            case Registered() | ManagerHello():
                self._reports.on_manager_hello(sender, message)
            case _:
                assert_never(message)

    def _revise(self, now_s: float, message: RevisePrediction) -> None:
        for held in self._held.values():
            sequence = held.sequence
            if sequence.request_id == message.request_id:
                sequence.predicted = message.prediction.mean
                self._revised.append(sequence)

    def _aborted(self, now_s: float, sender: InstanceId, message: KvAbort) -> None:
        if self.sender.aborted(now_s, sender, message):
            return
        awaiting = self.receiver.aborted(message)
        assert awaiting is None or awaiting.phase is Phase.AWAITING_KV
        if awaiting is not None:  # the sender decided about the request and informed the manager; here it only goes
            self._drop(now_s, awaiting, message.reason)

    def _tick(self, now_s: float) -> None:
        """Check deadlines: leases no sender renewed, transfers without an answer. Renew own leases."""
        settings = self.setup.settings
        self.receiver.tick(now_s)
        self.sender.tick(now_s)
        if now_s >= self._next_renewal_s:
            self._next_renewal_s = now_s + settings.lease_s / 4
            leases, transfers = self.sender.leases(), self.receiver.waiting_transfers()
            for peer in dict.fromkeys((*leases, *transfers)):
                self._effects.append(Send(peer, KvRenew(leases.get(peer, []), transfers.get(peer, []))))
        self.receiver.headroom_changed(now_s)
        self.adapters.move(now_s)
        if stalled := given_back(now_s, self.state, self.sender, self.receiver, self.adapters):
            self._fail(now_s, stalled, "caches waited for each other's blocks")

    def _start_segment(self, now_s: float, message: StartSegment) -> None:
        key = message.request.attempt
        settling = key in self.sender.draining or key in self.receiver.draining
        if key in self._held or (message.index == 0 and settling):
            return  # sent twice
        self._effects.append(Dial(message.request.gateway, message.gateway_endpoint))
        if message.next_endpoint:
            following = message.segments[message.index + 1].instance
            if following is not None:
                self._effects.append(Dial(following, message.next_endpoint))
        held = Held.of(message, now_s, self.setup.settings.default_prediction)
        sequence = held.sequence
        sequence.scored_slice = self.setup.settings.scored_step_tokens if sequence.scores_prompt else 0
        limit = self.setup.capacity.max_model_len
        if self.kv.geometry.blocks_for(min(sequence.max_positions, limit)) > self.kv.total_blocks:
            self._report_ended(sequence, Outcome.FAILED, f"{sequence.max_positions} positions exceed the whole cache")
            return
        assert settling or not self.kv.held(key), f"{key} starts here and has {self.kv.held(key)} blocks"
        self._held[key] = held
        self._bound += sequence.has_grammar
        if message.index > 0:
            sequence.phase = Phase.AWAITING_KV
            self.receiver.headroom_changed(now_s)
            self.adapters.expect(now_s, sequence)
        else:
            self.adapters.admit(now_s, sequence)

    def _admit_to_scheduler(self, now_s: float, sequence: Sequence) -> None:
        """Hand a sequence whose adapter is loaded to the scheduler, unless its prompt scores must wait."""
        if sequence.phase is not Phase.WAITING or not self._scoring.must_wait(sequence):
            self.scheduler.add(now_s, sequence)

    def _park(self, now_s: float, sequence: Sequence) -> None:
        """Let a sequence wait, holding its KV, until a `BindSegment` says where it goes on."""
        assert self.state.holds(sequence), f"{sequence.key} is parked and not held"
        sequence.phase = Phase.PARKED
        self.pool.park(now_s, self._held[sequence.key])
        self._report_ended(sequence, Outcome.PARKED)

    def _on_kv_complete(self, now_s: float, sequence: Sequence) -> None:
        """Start or park a sequence whose KV is complete."""
        assert sequence.phase is Phase.AWAITING_KV, f"KV of {sequence.key} arrived, which is {sequence.phase}"
        assert sequence.computed <= sequence.known, f"{sequence.key}: {sequence.computed} of {sequence.known} computed"
        if sequence.end is not None and sequence.computed >= sequence.end:  # a buffer for another worker (A5, A6)
            self._park(now_s, sequence)
            return
        sequence.phase = Phase.RUNNING
        self.adapters.admit(now_s, sequence)

    def _on_handed_over(self, now_s: float, sequence: Sequence) -> None:
        """Drop a sequence that another worker runs now, and report it as handed over."""
        assert sequence.phase is Phase.LEAVING, f"{sequence.key} has left and is {sequence.phase}"
        self._report_ended(sequence, Outcome.HANDED_OVER)
        del self._held[sequence.key]
        self._bound -= sequence.has_grammar

    def _plan(self, now_s: float) -> None:
        """Start the next iteration, if anything can run. Its rows' blocks are reserved until it has ended."""
        if self._handovers.pending:
            self._handovers.between_iterations(now_s)
        plan = self._decide(now_s)
        for sequence in plan.evicted:
            sequence.end = sequence.computed
            self._park(now_s, sequence)
        self.pool.move(now_s)
        plan.copies = self.kv.take_copies()
        self.counters.preemptions += len(plan.preempted)
        for preempt in plan.preempted:
            assert not preempt.sequence.pinned, f"{preempt.sequence.key} is preempted and a link still reads its KV"
        if not plan.rows and not plan.copies:
            return
        assert_plan(plan, self.state, following=None)
        self.state.moved_s = now_s
        for row in plan.rows:
            sequence = row.sequence
            if sequence.first_scheduled_s is None:
                sequence.first_scheduled_s = now_s
            if sequence.end is not None and sequence.key not in self.sender:
                following = self._held[sequence.key].next_instance
                if following is not None:
                    self.sender.offer(now_s, sequence, following, sequence.end)
        self.drafts.allot(plan)
        self.state.in_flight = plan
        self._begin(plan)

    def _plan_ahead(self, now_s: float, expected: list[Attempt]) -> None:
        """Queue the next iteration after the one in flight, if it is certain which rows it has."""
        news = bool(self._revised) or self._scoring.pending or self._handovers.pending
        plan = self._ahead.plan(news=news, prompt_step=self._prompt_step, drafts=self.drafts.prefers_drafts(expected))
        if plan is not None:
            assert_plan(plan, self.state, following=self.state.in_flight)
            self.state.moved_s, self.state.ahead = now_s, plan
            self.drafts.watch(plan)
            self._begin(plan, ahead=True)

    def _begin(self, plan: IterationPlan, *, ahead: bool = False) -> None:
        plan.has_grammars = self._bound > 0 and any([row.sequence.has_grammar for row in plan.rows])
        self._effects.append(StartStep(plan, ahead))

    def _decide(self, now_s: float) -> IterationPlan:
        counts_arriving = self.scheduler.wants_arriving
        arriving = self.receiver.arriving(self._prompt_step) if counts_arriving else 0
        if (scored := self._scoring.next()) is not None:
            self.scheduler.add(now_s, scored)
        news = News(self._ran, self._revised, arriving, self._earlier)
        self._ran, self._earlier, self._revised = None, [], []
        self._ahead.decided()
        plan = self.scheduler.decide(now_s, self.kv, news)
        if counts_arriving:
            self._prompt_step = sum(row.count for row in plan.rows if row.count > 1) or self._prompt_step
        return plan

    def _completed(self, now_s: float, event: StepEnded) -> None:
        """Take the results of the step in flight: `sampled` has one entry per row that reached the last known token."""
        for scores in event.scores:
            self._scored(scores)
        for pooled in event.pooled:
            self._pooled(pooled)
        plan, self.state.in_flight, self.state.ahead = self.plan_in_flight, self.state.ahead, None
        held_of = self._held
        assert plan.rows or not event.sampled, f"a step without rows sampled {event.sampled}"
        self.drafts.on_step_ended(plan, event)
        self.counters.steps += 1
        if plan.rows and not plan.has_grammars:
            self.state.averages.note(plan, event.latency_s)
        if self.observed is not None and not self._repeats:  # which teaches nothing new
            self.observed.note(plan, event.latency_s, self.kv.geometry)
        following = self.state.in_flight
        self._repeats = repeats = following is not None and same_rows(plan, following)
        self.state.skipped_s.append(event.latency_s)
        if following is None or (not repeats and plan.tokens > len(plan.rows)):
            ran = Ran(plan, now_s, tuple(self.state.skipped_s))
            self.state.skipped_s = []
            if following is None:
                self._ran = ran
            else:  # no decision follows, and the next plan does not show its prompts
                self._earlier.append(ran)
        late = frozenset(event.late)
        if late:
            self._ahead.late()
            self.counters.late_rows += len(late)
        ending, due = note_computed(now_s, plan, self.state, late)
        assert len(event.sampled) + len(late) == due or plan.drafted or plan.ended_rows, (
            f"{len(event.sampled)} tokens of a step whose rows yield {due}, {len(late)} of them late"
        )
        add = self._tokens.add
        for sampled in self.drafts.one_by_one(event.sampled) if plan.drafted else event.sampled:
            held = held_of[sampled.attempt]
            if not held.aborting and (finish := add(now_s, held, sampled)) is not None:
                self._finished(now_s, held.sequence, finish)
        for sequence in ending:
            known = held_of.get(sequence.key)
            if known is not None and known.sequence is sequence and not known.aborting:
                self._after_row(now_s, sequence)
        if self.pool.finish_moves() or brings_back(plan):  # pushes that were put off
            self.sender.push_all(now_s)
        if self.state.aborting:
            self._drop_aborting(now_s)
        self.receiver.headroom_changed(now_s)
        self.adapters.move(now_s)
        self._tokens.flush()

    def _scored(self, scores: PromptScores) -> None:
        """Store scores. Positions that are computed again (after a preemption) replace the former ones."""
        held = self._held.get(scores.attempt)
        if held is not None:
            held.prompt_logprobs[scores.position :] = scores.scores

    def _pooled(self, pooled: Pooled) -> None:
        """Add states to those before them, unless these positions are computed again from the first on."""
        held, states = self._held.get(pooled.attempt), pooled.states
        if held is None:
            return
        before = held.states
        if before is not None and states.start:
            assert before.end == states.start, f"{pooled.attempt}: states from {states.start} on follow {before.end}"
            total = array("f", map(operator.add, array("f", before.state), array("f", states.state)))
            states = PooledStates(before.start, before.count + states.count, total.tobytes())
        held.states = states

    def _step_failed(self, now_s: float, reason: str) -> None:
        """Give a failed step's requests back to be placed again; the worker lives on."""
        plan, self.state.in_flight, self.state.ahead = self.plan_in_flight, None, None
        self.state.skipped_s, self._earlier, self._repeats = [], [], False
        for held in self.pool.finish_moves():  # whether their copies were made is unknown
            self._fail(now_s, held.sequence, reason)
        for row in plan.rows:
            self._fail(now_s, row.sequence, reason)
        self._drop_aborting(now_s)

    def _drop_aborting(self, now_s: float) -> None:
        aborting, self.state.aborting = self.state.aborting, []
        for held in aborting:
            if self.state.computes(held.sequence):  # a row of the step that was planned ahead
                self.state.aborting.append(held)
            else:
                self._drop(now_s, held.sequence, "cancelled")

    def _after_row(self, now_s: float, sequence: Sequence) -> None:
        key = sequence.key
        if sequence.end is not None and sequence.computed >= sequence.end:
            self.scheduler.remove(now_s, sequence)
            if key not in self.sender:
                self._park(now_s, sequence)
                return
            sequence.phase = Phase.LEAVING
            self.sender.computed(now_s, key)
        self.sender.push(now_s, key)

    def _finished(self, now_s: float, sequence: Sequence, finish: FinishReason) -> None:
        self.counters.finished[finish.value] = self.counters.finished.get(finish.value, 0) + 1
        self._report_ended(sequence, Outcome.FINISHED, finish.value)
        self._end(now_s, self._held[sequence.key], "finished before the handoff")

    def _refuse(self, now_s: float, sequence: Sequence, why: str) -> None:
        self._finished(now_s, sequence, self._tokens.fail(sequence, why))
        self._tokens.flush()

    def _cancel(self, now_s: float, key: Attempt, reason: str) -> None:
        self.receiver.forget_offers(key)
        held = self._held.get(key)
        if held is None or held.aborting:
            return
        self._report_ended(held.sequence, Outcome.CANCELLED, reason)
        self._end(now_s, held, reason)

    def _fail(self, now_s: float, sequence: Sequence, reason: str) -> None:
        """Give the request back: the manager reschedules it, its gateway resubmits it."""
        held = self._held.get(sequence.key)
        if held is None or held.sequence is not sequence or held.aborting:
            return
        if sequence.key in self.sender or sequence.key in self.receiver:
            self.counters.transfer_failures += 1
        self._report_ended(sequence, Outcome.FAILED, reason)
        self._end(now_s, held, reason)

    def _end(self, now_s: float, held: Held, reason: str) -> None:
        """Drop it, now or when the step that computes its rows has ended."""
        sequence = held.sequence
        assert self.state.holds(sequence), f"{sequence.key} ends a second time: {reason}"
        if self.state.computes(sequence):
            self.scheduler.remove(now_s, sequence)
            held.aborting = True
            self.state.aborting.append(held)
        else:
            self._drop(now_s, sequence, reason)

    def _drop(self, now_s: float, sequence: Sequence, why: str) -> None:
        """Forget a sequence; its blocks are freed now, or as soon as its runs in flight have ended."""
        key = sequence.key
        self.scheduler.remove(now_s, sequence)
        del self._held[key]
        self._bound -= sequence.has_grammar
        self.pool.bound(key)
        being_read = self.sender.drop(key, why)
        being_written = self.receiver.drop(key, why)
        if not being_read and not being_written:
            assert not sequence.pinned, f"KV of {key} is freed and a link still reads it"
            self.kv.release(key)
        assert key not in self.sender and key not in self.receiver, f"{key} is dropped and still transferred"

    def _report_ended(self, sequence: Sequence, outcome: Outcome, reason: str = "") -> None:
        ended = SegmentEnded(self.setup.instance, sequence.key, outcome, sequence.computed, reason)
        self._effects.append(Send(self._reports.manager, ended))


class TokenUpdates:
    """Sampled tokens of a step as messages: one update per sequence, one message per gateway."""

    def __init__(self, state: WorkerState) -> None:
        self._state = state
        self._updates: dict[InstanceId, list[TokenUpdate]] = {}

    def add(self, now_s: float, held: Held, sampled: Sampled) -> FinishReason | None:
        """Append the token to its sequence. Return why the request is finished with it, or None."""
        sequence = held.sequence
        if sampled.failure:
            return self.fail(sequence, sampled.failure, is_clients=True)
        tokens, token = sequence.tokens, sampled.token
        position = len(tokens)
        assert sequence.computed >= position, (
            f"{sequence.key}: token {position} is told, {sequence.computed} are computed"
        )
        tokens.append(token)
        finish: FinishReason | None = None
        if token in held.stop_ids:
            finish = FinishReason.STOP
        elif position + 1 >= held.max_length:
            finish = FinishReason.LENGTH
        logprobs = held.logprobs
        if sampled.logprob is not None:
            logprobs.append(sampled.logprob)
        is_first = sequence.last_token_s is None
        sequence.last_token_s = now_s
        sequence.delivered += 1
        updates = self._updates.get(held.gateway)
        if updates is None:
            updates = self._updates[held.gateway] = []
        if finish is None and not logprobs and not is_first and sequence.repeat_from is None:  # nearly all of them
            if updates and updates[-1].attempt is sequence.key:  # of the same row: they are sent together
                updates[-1].tokens.append(token)
            else:
                updates.append(TokenUpdate(sequence.key, position, [token], cached_tokens=sequence.cached_tokens))
            return None
        request = sequence.request
        start = position if sequence.repeat_from is None else sequence.repeat_from
        sequence.repeat_from = None
        before = updates.pop() if updates and updates[-1].attempt is sequence.key else None
        if before is not None:  # of the same row: they are sent together
            start = before.position
        times = self._times(now_s, sequence) if is_first or finish else None
        updates.append(
            TokenUpdate(
                request.attempt,
                start,
                tokens[start:],
                logprobs[start - len(request.tokens) :] if logprobs else [],
                finish,
                cached_tokens=sequence.cached_tokens,
                times=times if before is None or times is not None else before.times,
                prompt_logprobs=held.prompt_logprobs if start == request.prompt_tokens else [],
                pooled=held.states,
            )
        )
        return finish

    def fail(self, sequence: Sequence, why: str, *, is_clients: bool = False) -> FinishReason:
        """End the request with this error instead of having it placed again: no other worker could do better."""
        request = sequence.request
        self._updates.setdefault(request.gateway, []).append(
            TokenUpdate(
                request.attempt, len(sequence.tokens), finish=FinishReason.FAILED, error=why, is_clients=is_clients
            )
        )
        return FinishReason.FAILED

    def flush(self) -> None:
        for gateway, updates in self._updates.items():
            self._state.effects.append(Send(gateway, TokenBatch(self._state.setup.instance, updates)))
        self._updates.clear()

    def _times(self, now_s: float, sequence: Sequence) -> StageTimes:
        first = sequence.first_scheduled_s if sequence.first_scheduled_s is not None else now_s
        prefilled = sequence.prefill_done_s if sequence.prefill_done_s is not None else first
        return StageTimes(
            instance=self._state.setup.instance,
            queue_s=max(0.0, first - sequence.arrived_s - sequence.request.waited_s),
            prefill_s=max(0.0, prefilled - first),
            transfer_s=sequence.transfer_s,
            decode_s=max(0.0, now_s - prefilled),
            preemptions=sequence.preemptions,
        )


class ScoringTurns:
    """Queue of scored prompts: one at a time is the scheduler's to plan, and of that one a slice an iteration. Every
    position of a scored prompt goes through the head of the model, its softmax and a selection of the likeliest tokens:
    several times the work of a position that is only computed, which schedulers, planning by tokens, do not see.
    `Sequence.uncomputed` shows them a slice (`Sequence.scored_slice`); this class keeps the number of such sequences at
    one, so that a hundred scored prompts take no more of an iteration than one."""

    def __init__(self, is_held: Callable[[Sequence], bool]) -> None:
        self._is_held = is_held
        self._current: Sequence | None = None
        self._waiting: deque[Sequence] = deque()

    def must_wait(self, sequence: Sequence) -> bool:
        """Return whether a sequence that came in is kept from the scheduler until `next` names it."""
        if not sequence.scores_prompt:
            return False
        if self._current is None and not self._waiting:
            self._current = sequence
            return False
        self._waiting.append(sequence)
        return True

    @property
    def pending(self) -> bool:
        return bool(self._waiting)

    def next(self) -> Sequence | None:
        """Return the sequence whose turn has come (FCFS), to be added to the scheduler, before every decision."""
        current = self._current
        if current is not None:
            if self._is_held(current) and current.scores_prompt and current.phase in _RUNNABLE:
                return None
            self._current = None
        while self._waiting:
            sequence = self._waiting.popleft()
            if self._is_held(sequence):
                self._current = sequence
                return sequence
        return None


def assert_plan(plan: IterationPlan, state: WorkerState, following: IterationPlan | None) -> None:
    """Assert that rows are distinct held sequences and start where these stand, or are no more than `following`'s."""
    rows, held_of = plan.rows, state.held
    sequences = {row.sequence for row in rows}
    assert len(sequences) == len(rows), f"{len(rows)} rows of {len(sequences)} sequences"
    if following is not None:
        assert len(rows) <= len(following.rows), f"{len(rows)} rows behind {len(following.rows)}"
        return
    tokens, most = 0, state.setup.capacity.max_step_tokens
    blocks, size = state.kv.blocks, state.kv.geometry.block_size
    for row in rows:
        sequence = row.sequence
        tokens += row.count
        assert row.start == sequence.computed and 0 < row.count <= len(sequence.tokens) - row.start, (
            f"{sequence.key} has {sequence.computed} of {sequence.known} positions, its row {row.start} + {row.count}"
        )
        assert row.start + row.count <= len(blocks(sequence.key)) * size, (
            f"{sequence.key} has {len(blocks(sequence.key))} blocks, its row {row.start} + {row.count}"
        )
        assert held_of[sequence.key].sequence is sequence, f"{sequence.key} is in a plan and not held"
    assert tokens <= max(most, len(rows)), f"{tokens} tokens in one step of {most} at most, in {len(rows)} rows"


def note_computed(
    now_s: float, plan: IterationPlan, state: WorkerState, late: frozenset[Attempt] = frozenset()
) -> tuple[list[Sequence], int]:
    """Record the rows' positions as computed. Return the sequences with a segment end, and how many rows yield a token.
    Rows of ended sequences count as wasted. Of `late` rows the last position does not count: it is planned again, as a
    row that samples; nor does a row of theirs that was planned ahead. Runs once a step over all rows: a decode row's
    path is short."""
    counters, kv, held_of, aborting = state.counters, state.kv, state.held, state.aborting
    size, by_block, decoded, due = kv.geometry.block_size, kv.grows_by_block, 0, 0
    ending: list[Sequence] = []
    for row in plan.rows:
        sequence, count = row.sequence, row.count
        due += row.start + count >= len(sequence.tokens)
        if aborting and held_of[sequence.key].aborting:
            counters.wasted_rows += 1
            continue
        if sequence.end is not None:
            ending.append(sequence)
        if late and sequence.key in late:
            count -= 1
            if count == 0 or row.start > sequence.computed:
                continue
        assert sequence.computed == row.start, f"{sequence.key} has {sequence.computed} positions, its row {row.start}"
        sequence.computed = computed = row.start + count
        if count == 1 and (sequence.prefill_done_s is not None or sequence.output_tokens > 0):
            decoded += 1
        else:
            counters.prefill_tokens += count
        if sequence.prefill_done_s is None and computed >= len(sequence.request.tokens):
            sequence.prefill_done_s = now_s
        if count > 1 or computed % size == 0 or not by_block:
            kv.committed(sequence)
    counters.decode_tokens += decoded
    return ending, due


def given_back(
    now_s: float, state: WorkerState, sender: KvSender, receiver: KvReceiver, adapters: AdapterSlots
) -> Sequence | None:
    """Return the sequence to be given back now; one at a time, as its blocks may be what all others waited for."""
    if now_s - state.moved_s < state.settings.stall_timeout_s:
        return None
    state.moved_s = now_s
    stalled = holds_up(state, sender, receiver, adapters)
    state.counters.stalls += stalled is not None
    return stalled


def holds_up(state: WorkerState, sender: KvSender, receiver: KvReceiver, adapters: AdapterSlots) -> Sequence | None:
    """Return the sequence that holds blocks up, if nothing has moved for long although blocks are wanted: they are held
    for KV that waits, directly or in a ring of workers, for what is held here. It is the youngest grant, or else the
    youngest of those that could leave or that wait for an adapter's slot; its request is placed anew. (A prefill worker
    whose decode worker is merely full waits on.)"""
    offers = receiver.offers
    if not offers and not any(held.sequence.phase in _RUNNABLE for held in state.held.values()):
        return None
    holding = receiver.unfinished()
    if not holding and offers:
        holding = sender.ungranted()
    if not holding:  # what only wants to wait here (A6 eviction) may hold up where it is what we wait for
        wanted = [state.held[offer.attempt].sequence for offer in offers if offer.attempt in state.held]
        holding = [sequence for sequence in wanted if sequence.end is not None]
    holding = holding or adapters.stuck()
    return holding[-1] if holding else None
