"""What one worker's machine answers, as whole lists of effects."""

from __future__ import annotations

import pytest

from cohort.common.errors import InvariantViolated
from cohort.common.machines.effects import Dial, ReceiveRuns, Run, Send, SendRuns, StartStep
from cohort.common.machines.events import (
    DrainEnded,
    DrainStarted,
    LinkAddresses,
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
)
from cohort.common.machines.worker.worker import WorkerMachine
from cohort.common.messages import (
    BindSegment,
    Cancel,
    KvAbort,
    KvAccepted,
    KvChunk,
    KvGrant,
    KvHandoff,
    KvOffer,
    KvRun,
    Leaving,
    ManagerHello,
    PrefetchKv,
    Registered,
    RegisterWorker,
    SegmentEnded,
    StageTimes,
    TokenBatch,
    TokenLogprob,
    TokenUpdate,
    WorkerReport,
)
from cohort.common.policies.baselines.paged_allocation import PagedAllocator
from cohort.common.policies.interface import KvCopy
from cohort.common.types import Attempt, FinishReason, Role, Segment
from tests.common.machines.small_worker import BLOCKS, GEOMETRY, PROMPT, machine, segment, whole

R = Attempt("r", 1)


def rows_of(effect: object) -> list[tuple[str, int, int]]:
    assert isinstance(effect, StartStep)
    return [(row.sequence.request_id, row.start, row.count) for row in effect.plan.rows]


def started(worker: WorkerMachine) -> StartStep:
    """The step in flight, as the effect that started it."""
    return StartStep(worker.plan_in_flight)


def ended(instance: str, outcome: str, positions: int, reason: str = "", request_id: str = "r") -> Send:
    return Send("manager", SegmentEnded(instance, Attempt(request_id, 1), outcome, positions, reason))


# -- one request, from its segment to its last token --------------------------------------------------------------


def test_a_request_on_one_worker() -> None:
    worker = machine(Role.UNIFIED)
    effects = worker.handle(1.0, Received("manager", whole(max_tokens=3)))
    assert effects == [Dial("gateway", "ipc://gateway"), started(worker)]
    assert rows_of(effects[-1]) == [("r", 0, PROMPT)]
    effects = worker.handle(1.5, StepEnded([Sampled(R, 41)], 0.5))
    times = StageTimes("unified", prefill_s=0.5)
    assert effects == [
        Send("gateway", TokenBatch("unified", [TokenUpdate(R, PROMPT, [41], times=times)])),
        started(worker),
    ]
    assert rows_of(effects[-1]) == [("r", PROMPT, 1)]
    effects = worker.handle(1.75, StepEnded([Sampled(R, 42)], 0.25))
    assert effects == [Send("gateway", TokenBatch("unified", [TokenUpdate(R, PROMPT + 1, [42])])), started(worker)]
    effects = worker.handle(2.0, StepEnded([Sampled(R, 43)], 0.25))
    last = TokenUpdate(
        R, PROMPT + 2, [43], finish=FinishReason.LENGTH, times=StageTimes("unified", prefill_s=0.5, decode_s=0.5)
    )
    assert effects == [
        ended("unified", "finished", PROMPT + 2, "length"),
        Send("gateway", TokenBatch("unified", [last])),
    ]
    assert worker.idle
    assert worker.kv.free_blocks == BLOCKS
    assert (worker.counters.steps, worker.counters.prefill_tokens, worker.counters.decode_tokens) == (3, PROMPT, 2)


def test_a_stop_token_ends_it() -> None:
    worker = machine(Role.UNIFIED)
    worker.handle(0.0, Received("manager", whole()))
    effects = worker.handle(0.1, StepEnded([Sampled(R, 99)], 0.1))
    assert effects[0] == ended("unified", "finished", PROMPT, "stop")
    assert len(effects) == 2, "nothing is left to start"


def test_events_that_arrive_together_are_planned_once() -> None:
    worker = machine(Role.UNIFIED)
    effects = worker.handle(0.0, Received("manager", whole("a")), Received("manager", whole("b")))
    assert effects == [Dial("gateway", "ipc://gateway"), Dial("gateway", "ipc://gateway"), started(worker)]
    assert rows_of(effects[-1]) == [("a", 0, PROMPT), ("b", 0, PROMPT)]


def test_nothing_is_planned_while_a_step_is_in_flight() -> None:
    worker = machine(Role.UNIFIED)
    first = worker.handle(0.0, Received("manager", whole("a")))[-1]
    assert worker.handle(0.1, Received("manager", whole("b"))) == [Dial("gateway", "ipc://gateway")]
    assert worker.handle(0.2, Tick()) == []
    assert started(worker) == first


def test_unasked_questions_are_not_answered() -> None:
    worker = machine(Role.UNIFIED)
    for event in (StepEnded([], 0.1), StepFailed("broken"), RunsSent(5), RunsReceived(5, 0)):
        with pytest.raises(InvariantViolated):
            worker.handle(0.0, event)


def test_a_request_beyond_the_whole_cache_fails_at_once() -> None:
    worker = machine(Role.UNIFIED, PagedAllocator(GEOMETRY, 4, 0, prefix_caching=False))
    assert worker.handle(0.0, Received("manager", whole())) == [
        Dial("gateway", "ipc://gateway"),
        ended("unified", "failed", 0, "19 positions exceed the whole cache"),
    ]
    assert worker.idle


def test_logprobs_and_prompt_scores_come_with_the_token() -> None:
    worker = machine(Role.UNIFIED)
    worker.handle(0.0, Received("manager", whole()))
    scores, score = [TokenLogprob(-0.5)] * (PROMPT - 1), TokenLogprob(-0.25, [41], [-0.25])
    effects = worker.handle(0.1, StepEnded([Sampled(R, 41, score)], 0.1, [PromptScores(R, 0, scores)]))
    match effects[0]:
        case Send(message=TokenBatch(updates=[update])):
            assert (update.logprobs, update.prompt_logprobs) == ([score], scores)
        case other:
            pytest.fail(f"{other}")


# -- endings in the middle of a step ------------------------------------------------------------------------------


def test_a_cancelled_request_keeps_its_blocks_until_its_step_has_ended() -> None:
    worker = machine(Role.UNIFIED)
    worker.handle(0.0, Received("manager", whole("a")), Received("manager", whole("b")))
    assert worker.handle(0.1, Received("manager", Cancel([Attempt("a", 1)], "client left"))) == [
        ended("unified", "cancelled", 0, "client left", "a")
    ]
    assert worker.kv.free_blocks == BLOCKS - 2 * PROMPT // 4
    assert worker.handle(0.15, Received("manager", Cancel([Attempt("a", 1)]))) == [], "said twice"
    effects = worker.handle(0.2, StepEnded([Sampled(Attempt("a", 1), 1), Sampled(Attempt("b", 1), 2)], 0.2))
    match effects[0]:
        case Send(message=TokenBatch(updates=updates)):
            assert [update.attempt.request_id for update in updates] == ["b"]
        case other:
            pytest.fail(f"{other}")
    assert rows_of(effects[-1]) == [("b", PROMPT, 1)]
    assert list(worker.kv.owners()) == [Attempt("b", 1)]


def test_several_that_are_cancelled_in_a_step_free_their_blocks_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same order in every process: a recording must replay."""
    worker = machine(Role.UNIFIED)
    worker.handle(0.0, *(Received("manager", whole(name)) for name in "abcdef"))
    released: list[str] = []
    monkeypatch.setattr(worker.kv, "release", lambda key: released.append(key.request_id))
    worker.handle(0.1, *(Received("manager", Cancel([Attempt(name, 1)])) for name in "cfadbe"))
    assert released == []
    worker.handle(0.2, StepEnded([Sampled(Attempt(name, 1), 7) for name in "abcde"], 0.2))  # "f" has a chunk
    assert released == list("cfadbe")


def test_a_failed_step_gives_its_requests_back_and_plans_the_others() -> None:
    worker = machine(Role.UNIFIED)
    worker.handle(0.0, Received("manager", whole("a")))
    effects = worker.handle(0.1, Received("manager", whole("b")), StepFailed("out of order"))
    assert effects == [
        Dial("gateway", "ipc://gateway"),
        ended("unified", "failed", 0, "out of order", "a"),
        started(worker),
    ]
    assert rows_of(effects[-1]) == [("b", 0, PROMPT)]


def test_a_failed_step_frees_what_was_cancelled_during_it() -> None:
    worker = machine(Role.UNIFIED)
    worker.handle(0.0, Received("manager", whole("a")), Received("manager", whole("b")))
    worker.handle(0.1, Received("manager", Cancel([Attempt("a", 1)], "client left")))
    effects = worker.handle(0.2, StepFailed("out of order"))
    assert effects == [ended("unified", "failed", 0, "out of order", "b")]
    assert worker.idle and worker.kv.free_blocks == BLOCKS


# -- KV between two workers ---------------------------------------------------------------------------------------


def test_the_offer_follows_the_plan_that_starts_its_segment() -> None:
    worker = machine(Role.PREFILL)
    effects = worker.handle(0.0, Received("manager", segment(0)))
    match effects:
        case [Dial(), Dial(peer="decode"), Send(peer="decode", message=KvOffer() as offer), StartStep()]:
            assert (offer.attempt, offer.positions) == (R, PROMPT)
        case other:
            pytest.fail(f"{other}")
    grant = KvGrant(R, offer.transfer_id, 77, 5.0, [10, 11, 12], 0, {"other": b"", "link": b"there"})
    assert worker.handle(0.1, Received("decode", grant)) == [], "nothing is computed yet"
    effects = worker.handle(0.2, StepEnded([Sampled(R, 41)], 0.2))
    first = worker.kv.blocks(R)[0]
    tag = 77 << 24
    tokens = [5] * PROMPT + [41]
    update = TokenUpdate(R, PROMPT, [41], times=StageTimes("prefill", prefill_s=0.2))
    assert effects == [
        SendRuns("decode", R, 77, 0, "link", b"there", (Run(tag, first, 10, 3),)),
        Send("decode", KvHandoff(R, 77, 0, tokens, PROMPT, 1, 0, [], 0.0)),
        Send("gateway", TokenBatch("prefill", [update])),
    ]
    assert worker.handle(0.3, Received("decode", KvAccepted(R, 77))) == [ended("prefill", "handed_over", PROMPT)]
    assert not worker.idle and worker.kv.free_blocks == BLOCKS - 3, "the link may still read its blocks"
    assert worker.handle(0.4, RunsSent(77)) == []
    assert worker.idle and worker.kv.free_blocks == BLOCKS


def test_a_receiver_grants_receives_accepts_and_runs_it_in_the_same_call() -> None:
    worker = machine(Role.DECODE)
    offer = Received("prefill", KvOffer("prefill", R, 9, PROMPT))
    assert worker.handle(0.0, offer) == [], "its segment is not known yet"
    effects = worker.handle(0.1, Received("manager", segment(1)))
    match effects:
        case [Dial(), Send(peer="prefill", message=KvGrant() as grant)]:
            assert (grant.transfer_id, grant.links, len(grant.blocks)) == (9, {"link": b"here"}, 3)
        case other:
            pytest.fail(f"{other}")
    lease, block = grant.lease_id, grant.blocks[0]
    chunk = KvChunk(R, lease, 0, "link", [KvRun(1, block, 3, 6)])
    handoff = KvHandoff(R, lease, 0, [5] * PROMPT + [41], PROMPT, 1, 0, [], 0.25)
    effects = worker.handle(0.2, Received("prefill", chunk), Received("prefill", handoff))
    assert effects == [ReceiveRuns(lease, 0, "link", (Run(1, 0, block, 3, 6),), "prefill")]
    effects = worker.handle(0.3, RunsReceived(lease, 0))
    assert effects == [Send("prefill", KvAccepted(R, lease)), started(worker)]
    assert rows_of(effects[-1]) == [("r", PROMPT, 1)]
    update = worker.handle(0.4, StepEnded([Sampled(R, 42)], 0.1))[0]
    times = StageTimes("decode", queue_s=0.2, prefill_s=0.1, transfer_s=0.35)
    match update:
        case Send(message=TokenBatch(updates=[TokenUpdate(position=position, tokens=tokens, times=found)])):
            assert (position, tokens) == (PROMPT, [41, 42]), "the former worker's token is repeated"
            assert found is not None and found.transfer_s == pytest.approx(times.transfer_s)
        case other:
            pytest.fail(f"{other}")


def test_a_row_that_can_have_no_token_ends_its_request_as_the_clients_error() -> None:
    worker = machine(Role.UNIFIED)
    worker.handle(0.0, Received("manager", whole()))
    failed = TokenUpdate(R, PROMPT, finish=FinishReason.FAILED, error="too dear", is_clients=True)
    effects = worker.handle(0.1, StepEnded([Sampled(R, 0, failure="too dear")], 0.1))
    assert Send("gateway", TokenBatch("unified", [failed])) in effects
    assert worker.idle


def test_grants_name_the_addresses_told_last() -> None:
    worker = machine(Role.DECODE)
    offer = Received("prefill", KvOffer("prefill", R, 9, PROMPT))
    moved = LinkAddresses({"link": b"moved"})
    match worker.handle(0.0, moved, Received("manager", segment(1)), offer)[-1]:
        case Send(message=KvGrant(links=links)):
            assert links == {"link": b"moved"}
        case other:
            pytest.fail(f"{other}")


def test_an_undelivered_message_ends_the_transfers_with_its_peer() -> None:
    worker = machine(Role.PREFILL)
    offer = worker.handle(0.0, Received("manager", segment(0)))[2]
    assert isinstance(offer, Send)
    assert worker.handle(0.1, Undelivered("gateway", offer.message)) == []
    assert worker.handle(0.1, Undelivered("decode", offer.message)) == [
        ended("prefill", "failed", 0, "decode cannot be reached")
    ]
    effects = worker.handle(0.2, StepEnded([Sampled(R, 41)], 0.2))
    match effects:
        case [Send(peer="decode", message=KvAbort(attempt=attempt))]:
            assert attempt == R
        case other:
            pytest.fail(f"{other}")
    assert worker.idle
    assert worker.counters.transfer_failures == 1


# -- registration, reports, the leave -----------------------------------------------------------------------------


def registration(held: list[Attempt]) -> Send:
    capacity = machine(Role.UNIFIED).setup.capacity
    return Send("manager", RegisterWorker("unified", 3, "ipc://inbox", capacity, held, []))


def test_it_registers_until_the_manager_knows_it_then_reports() -> None:
    worker = machine(Role.UNIFIED)
    assert worker.handle(0.0, ReportDue(100)) == [registration([])]
    assert worker.handle(0.1, ReportDue(100)) == [registration([])]
    assert worker.handle(0.2, Received("manager", Registered(1))) == []
    for number in (1, 2):
        effects = worker.handle(0.3, ReportDue(100 + number))
        stats = worker.stats(100 + number)
        since = number - 1  # the second one goes on from the first
        assert effects == [Send("manager", WorkerReport("unified", 3, number, stats, [], [], since=since))]
    assert stats.memory_free_bytes == 102


def test_a_quiet_worker_announces_it_to_those_that_stand_by_too() -> None:
    worker = machine(Role.UNIFIED)
    worker.handle(0.0, Received("manager", Registered(1)))
    worker._reports.managers = ("manager", "manager-1")
    for quiet_s, peers in ((0.0, ["manager"]), (4.0, ["manager", "manager-1"])):
        effects = worker.handle(0.1, ReportDue(0, quiet_s))
        assert [send.peer for send in effects if isinstance(send, Send)] == peers
        assert {send.message.quiet_s for send in effects if isinstance(send, Send)} == {quiet_s}  # type: ignore[union-attr]


def test_a_manager_that_does_not_know_it_is_answered_at_once() -> None:
    worker = machine(Role.UNIFIED)
    worker.handle(0.0, Received("manager", Registered(1)), Received("manager", whole()))
    assert worker.handle(0.1, Received("manager", ManagerHello(2))) == [registration([R])]
    assert worker.handle(0.2, ReportDue(0)) == [registration([R])]
    worker.handle(0.3, Received("manager", Registered(2)))
    match worker.handle(0.4, ReportDue(0)):
        case [Send(message=WorkerReport(sequence=1, held=held, awaiting=[]))]:
            assert held == [R]
        case other:
            pytest.fail(f"{other}")


def test_a_draining_worker_says_so_and_takes_its_leave() -> None:
    worker = machine(Role.UNIFIED)
    worker.handle(0.0, Received("manager", Registered(1)))
    assert worker.handle(0.1, DrainStarted()) == []
    match worker.handle(0.2, ReportDue(0)):
        case [Send(message=WorkerReport(draining=draining))]:
            assert draining
        case other:
            pytest.fail(f"{other}")
    assert worker.handle(0.3, DrainEnded()) == [Send("manager", Leaving("unified", 3))]


def test_a_request_that_only_waits_is_reported_as_awaiting() -> None:
    worker = machine(Role.DECODE)
    worker.handle(0.0, Received("manager", Registered(1)), Received("manager", segment(1)))
    match worker.handle(0.1, ReportDue(0)):
        case [Send(message=WorkerReport(held=[], awaiting=awaiting))]:
            assert awaiting == [R]
        case other:
            pytest.fail(f"{other}")


# -- the pool of parked KV ----------------------------------------------------------------------------------------


class Collecting(PagedAllocator):
    """Has a copy to make before anything else moves, as of a decision that moved slots."""

    def __init__(self) -> None:
        super().__init__(GEOMETRY, BLOCKS, 16, prefix_caching=False)
        self.collected: list[KvCopy] = []

    def take_copies(self) -> list[KvCopy]:
        taken, self.collected = [*self.collected, *super().take_copies()], []
        return taken


def parked(kv: PagedAllocator) -> WorkerMachine:
    worker = machine(Role.PREFILL, kv)
    worker.handle(0.0, Received("manager", segment(0, decoder=None)))
    effects = worker.handle(0.1, StepEnded([Sampled(R, 41)], 0.1))
    assert effects[0] == ended("prefill", "parked", PROMPT)
    return worker


def test_parked_kv_moves_to_host_memory_and_back() -> None:
    kv = PagedAllocator(GEOMETRY, BLOCKS, 16, prefix_caching=False)
    worker = parked(kv)
    assert worker.handle(0.2, Tick()) == [], "not so soon"
    (step,) = worker.handle(0.5, Tick())
    assert isinstance(step, StartStep)
    assert [(copy.direction, len(copy.device)) for copy in step.plan.copies] == [("out", 3)]
    assert kv.free_blocks == BLOCKS
    assert worker.counters.pooled == 1
    worker.handle(0.6, StepEnded([], 0.1))
    (step,) = worker.handle(0.7, Received("manager", PrefetchKv([R])))
    assert isinstance(step, StartStep)
    assert [(copy.direction, len(copy.device)) for copy in step.plan.copies] == [("in", 3)]
    assert worker.handle(0.8, StepEnded([], 0.1)) == []
    worker.check()


def test_a_prefetch_keeps_kv_on_the_device_that_has_not_left_it() -> None:
    """It is asked for once: offloaded all the same, it would never come back."""
    worker = parked(PagedAllocator(GEOMETRY, BLOCKS, 16, prefix_caching=False))
    assert worker.handle(0.2, Received("manager", PrefetchKv([R]))) == []
    assert worker.handle(0.5, Tick()) == []
    assert (worker.counters.pooled, worker.kv.free_blocks) == (0, BLOCKS - 3)
    worker.check()


def test_a_prefetch_yields_to_prompts_that_lack_blocks() -> None:
    worker = parked(PagedAllocator(GEOMETRY, 6, 16, prefix_caching=False))
    worker.handle(0.2, Received("manager", PrefetchKv([R])))
    prompts = [Received("manager", segment(0, name, decoder=None)) for name in ("a", "b")]
    step = worker.handle(0.3, *prompts)[-1]
    assert rows_of(step) == [("a", 0, PROMPT)], "b waits for blocks"
    assert isinstance(step, StartStep)
    assert [(copy.direction, len(copy.device)) for copy in step.plan.copies] == [("out", 3)]
    worker.check()


def test_a_decision_whose_copies_are_collected_keeps_them_beside_those_of_the_pool() -> None:
    """First what the decision moved, then what the pool moved; neither takes the other's place."""
    kv = Collecting()
    worker = parked(kv)
    decided = KvCopy("out", "slot", (63,), (15,))
    kv.collected.append(decided)
    (step,) = worker.handle(0.5, Tick())
    assert isinstance(step, StartStep)
    first, second = step.plan.copies
    assert first is decided
    assert (second.direction, second.unit, len(second.device)) == ("out", "block", 3)


def test_pooled_kv_is_sent_straight_from_host_memory() -> None:
    worker = parked(PagedAllocator(GEOMETRY, BLOCKS, 16, prefix_caching=False))
    worker.handle(0.5, Tick())
    worker.handle(0.6, StepEnded([], 0.1))
    bind = BindSegment(R, Segment(PROMPT, None, "decode"), "ipc://decode", 1)
    match worker.handle(0.7, Received("manager", bind)):
        case [Dial(peer="decode"), Send(message=KvOffer(transfer_id=transfer_id))]:
            pass
        case other:
            pytest.fail(f"{other}")
    grant = KvGrant(R, transfer_id, 77, 5.0, [1, 2, 3], 0, {"link": b""})
    match worker.handle(0.8, Received("decode", grant)):
        case [SendRuns(from_host=from_host), Send(message=KvHandoff(exposed_s=exposed_s))]:
            assert from_host
            assert exposed_s == pytest.approx(0.1)
        case other:
            pytest.fail(f"{other}")
