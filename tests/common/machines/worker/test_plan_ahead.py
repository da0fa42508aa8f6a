"""The step after the one in flight: which rows it has, and what happens to them before the first of the two ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cohort.common.errors import InvariantViolated
from cohort.common.machines.effects import Send, StartStep, WorkerEffect
from cohort.common.machines.events import PlanAhead, PromptScores, Received, Sampled, StepEnded, StepFailed, Tick
from cohort.common.machines.worker.worker import WorkerMachine
from cohort.common.messages import Cancel, KvOffer, SegmentEnded, StartSegment, TokenBatch, TokenLogprob
from cohort.common.policies.baselines.paged_allocation import PagedAllocator
from cohort.common.policies.baselines.placements import Colocated, Disaggregated
from cohort.common.policies.interface import IterationPlan, News, Placement
from cohort.common.policies.kv_interface import KvAllocator
from cohort.common.sequence import Phase
from cohort.common.types import Attempt, Role, SamplingParams
from tests.common.machines.clusters import PD, PD_TWICE, UNIFIED, Asked, finish, offer, strike, tokens, total
from tests.common.machines.faults import Fault, any_faults
from tests.common.machines.small_worker import BLOCK, BLOCKS, GEOMETRY, PROMPT, machine, segment, whole
from tests.common.machines.world import SplitAnywhere, World
from tests.examples import of_worlds

STOP = 99
"""Ends every request of `small_worker`."""


def rows(plan: object) -> list[tuple[str, int, int]]:
    assert isinstance(plan, StartStep)
    return [(row.sequence.request_id, row.start, row.count) for row in plan.plan.rows]


def said(effects: list[WorkerEffect]) -> list[tuple[str, int, list[int]]]:
    batches = [effect.message for effect in effects if isinstance(effect, Send)]
    return [
        (each.attempt.request_id, each.position, each.tokens)
        for batch in batches
        if isinstance(batch, TokenBatch)
        for each in batch.updates
    ]


def outcomes(effects: list[WorkerEffect]) -> list[str]:
    ends = [effect.message for effect in effects if isinstance(effect, Send)]
    return [f"{end.attempt.request_id} {end.outcome.value}" for end in ends if isinstance(end, SegmentEnded)]


def sampled(*names: str, token: int = 7) -> StepEnded:
    return StepEnded([Sampled(Attempt(name, 1), token) for name in names], 0.1)


def decoding(*names: str, max_tokens: int = 8, blocks: int = BLOCKS) -> WorkerMachine:
    """The prompts of these have run, and their first decode step is in flight."""
    worker = machine(Role.UNIFIED, PagedAllocator(GEOMETRY, blocks, 0, prefix_caching=False))
    worker.handle(0.0, *(Received("manager", whole(name, max_tokens)) for name in names))
    effects = worker.handle(0.1, sampled(*names))
    assert rows(effects[-1]) == [(name, PROMPT, 1) for name in names]
    return worker


def refusals(worker: WorkerMachine) -> dict[str, int]:
    return dict(worker.counters.not_ahead)


def test_the_next_step_begins_behind_the_one_in_flight() -> None:
    worker = decoding("a", "b")
    before = [(s.known, s.computed) for s in worker.sequences()]
    (ahead,) = worker.handle(0.15, PlanAhead())
    assert isinstance(ahead, StartStep) and ahead.ahead
    assert rows(ahead) == [("a", PROMPT + 1, 1), ("b", PROMPT + 1, 1)]
    assert [(s.known, s.computed) for s in worker.sequences()] == before, "no token is known before it is sampled"
    assert worker.handle(0.16, PlanAhead()) == [], "one step behind the other at most"
    effects = worker.handle(0.2, sampled("a", "b", token=41))
    assert said(effects) == [("a", PROMPT + 1, [41]), ("b", PROMPT + 1, [41])]
    assert worker.plan_in_flight is ahead.plan, "it runs already"
    effects = worker.handle(0.3, sampled("a", "b", token=42))
    assert said(effects) == [("a", PROMPT + 2, [42]), ("b", PROMPT + 2, [42])]
    assert rows(effects[-1]) == [("a", PROMPT + 2, 1), ("b", PROMPT + 2, 1)]
    assert (worker.counters.planned_ahead, refusals(worker), worker.counters.wasted_rows) == (1, {}, 0)


def test_the_scheduler_hears_of_all_iterations_since_its_last_decision() -> None:
    worker = decoding("a", max_tokens=20)
    heard: list[tuple[float, ...]] = []
    decide = worker.scheduler.decide
    worker.scheduler.decide = lambda now_s, kv, news: heard.append(news.ran.times_s) or decide(now_s, kv, news)  # type: ignore[method-assign,union-attr,func-returns-value]
    for step in range(3):
        worker.handle(0.15 + step, PlanAhead())
        worker.handle(0.2 + step, StepEnded([Sampled(Attempt("a", 1), 7)], 0.5 + step))
    worker.handle(4.0, StepEnded([Sampled(Attempt("a", 1), 7)], 4.0))
    assert heard == [(0.5, 1.5, 2.5, 4.0)]


def test_a_row_that_ends_with_the_first_step_is_computed_in_vain_and_freed_once_after_the_second() -> None:
    worker = decoding("a", "b")
    worker.handle(0.15, PlanAhead())
    held = worker.kv.held(Attempt("a", 1))
    effects = worker.handle(0.2, StepEnded([Sampled(Attempt("a", 1), STOP), Sampled(Attempt("b", 1), 7)], 0.1))
    assert outcomes(effects) == ["a finished"], "its client waits for no other step"
    assert worker.kv.held(Attempt("a", 1)) == held, "the step in flight writes there"
    worker.check()
    effects = worker.handle(0.3, sampled("a", "b", token=8))
    assert said(effects) == [("b", PROMPT + 2, [8])]
    assert outcomes(effects) == []
    assert worker.kv.held(Attempt("a", 1)) == 0
    assert rows(effects[-1]) == [("b", PROMPT + 2, 1)]
    assert worker.counters.wasted_rows == 1
    assert worker.counters.finished == {"stop": 1}
    worker.check()


def test_a_step_may_be_planned_behind_one_with_a_row_in_vain() -> None:
    worker = decoding("a", "b")
    worker.handle(0.15, PlanAhead())
    worker.handle(0.2, StepEnded([Sampled(Attempt("a", 1), STOP), Sampled(Attempt("b", 1), 7)], 0.1))
    (ahead,) = worker.handle(0.25, PlanAhead())
    assert rows(ahead) == [("b", PROMPT + 2, 1)]
    worker.handle(0.3, sampled("a", "b"))
    assert worker.kv.held(Attempt("a", 1)) == 0


@pytest.mark.parametrize("when", ["before", "between"])
def test_a_cancelled_row_is_freed_after_the_last_step_that_computes_it(when: str) -> None:
    worker = decoding("a", "b")
    if when == "before":
        worker.handle(0.12, Received("manager", Cancel([Attempt("a", 1)], "left")))
        (ahead,) = worker.handle(0.15, PlanAhead())
        assert rows(ahead) == [("b", PROMPT + 1, 1)]
    else:
        worker.handle(0.15, PlanAhead())
        effects = worker.handle(0.17, Received("manager", Cancel([Attempt("a", 1)], "left")))
        assert outcomes(effects) == ["a cancelled"]
    effects = worker.handle(0.2, sampled("a", "b"))
    assert said(effects) == [("b", PROMPT + 1, [7])]
    assert (worker.kv.held(Attempt("a", 1)) == 0) == (when == "before")
    effects = worker.handle(0.3, sampled(*(["b"] if when == "before" else ["a", "b"])))
    assert said(effects) == [("b", PROMPT + 2, [7])]
    assert worker.kv.held(Attempt("a", 1)) == 0
    assert worker.counters.wasted_rows == (1 if when == "before" else 2)
    worker.check()


def test_the_last_row_of_all_in_vain_leaves_nothing() -> None:
    worker = decoding("a")
    worker.handle(0.15, PlanAhead())
    worker.handle(0.2, sampled("a", token=STOP))
    assert not worker.idle
    assert worker.handle(0.3, sampled("a")) == []
    assert worker.idle and worker.kv.free_blocks == BLOCKS


def test_rows_that_end_by_length_are_known_beforehand() -> None:
    worker = machine(Role.UNIFIED)
    worker.handle(0.0, Received("manager", whole("a", 3)), Received("manager", whole("b", 4)))
    worker.handle(0.1, sampled("a", "b"))
    worker.handle(0.2, sampled("a", "b"))
    (ahead,) = worker.handle(0.25, PlanAhead())
    assert rows(ahead) == [("b", PROMPT + 2, 1)]
    effects = worker.handle(0.3, sampled("a", "b"))
    assert outcomes(effects) == ["a finished"]
    assert worker.kv.held(Attempt("a", 1)) == 0, "no step computes a row of it"
    assert worker.handle(0.35, PlanAhead()) == []
    assert refusals(worker) == {"ended": 1}
    worker.handle(0.4, sampled("b"))
    assert worker.idle and worker.counters.wasted_rows == 0


def test_blocks_are_reserved_ahead_and_a_lack_of_them_is_left_to_the_scheduler() -> None:
    worker = decoding("a", "b", blocks=2 * PROMPT // BLOCK + 2)
    for step in range(3):
        assert len(worker.handle(0.15 + step, PlanAhead())) == 1
        worker.handle(0.2 + step, sampled("a", "b"))
    assert worker.kv.free_blocks == 0
    held = dict(worker.kv.owners())
    assert worker.handle(3.15, PlanAhead()) == []
    assert (refusals(worker), worker.kv.owners()) == ({"memory": 1}, held)
    effects = worker.handle(3.2, sampled("a", "b"))
    assert rows(effects[-1]) == [("a", PROMPT + 4, 1)]
    assert worker.counters.preemptions == 1


def test_an_arrival_is_decided_about_before_another_step_begins() -> None:
    worker = decoding("a")
    worker.handle(0.12, Received("manager", whole("b")))
    assert worker.handle(0.15, PlanAhead()) == []
    assert refusals(worker) == {"policy": 1}
    effects = worker.handle(0.2, sampled("a"))
    assert rows(effects[-1]) == [("b", 0, PROMPT), ("a", PROMPT + 1, 1)]


def test_a_prompt_that_ends_with_the_step_decodes_in_the_one_behind_it() -> None:
    worker = decoding("a")
    worker.handle(0.12, Received("manager", whole("b")))
    worker.handle(0.2, sampled("a"))
    (ahead,) = worker.handle(0.25, PlanAhead())
    assert rows(ahead) == [("a", PROMPT + 2, 1), ("b", PROMPT, 1)], "newcomers behind, as a decision has them"
    effects = worker.handle(0.3, sampled("b", "a", token=41))
    assert said(effects) == [("b", PROMPT, [41]), ("a", PROMPT + 2, [41])]
    effects = worker.handle(0.4, sampled("a", "b", token=42))
    assert said(effects) == [("a", PROMPT + 3, [42]), ("b", PROMPT + 1, [42])]
    assert rows(effects[-1]) == [("a", PROMPT + 3, 1), ("b", PROMPT + 1, 1)]


def test_the_scheduler_hears_of_prompts_behind_which_a_step_was_begun() -> None:
    """It learns from them what prompts cost; the plan of the last iteration does not tell."""
    worker = decoding("a")
    worker.handle(0.12, Received("manager", whole("b")))
    heard: list[tuple[list[int], tuple[float, ...]]] = []
    undecided: list[int] = []
    decide = worker.scheduler.decide

    def listen(now_s: float, kv: KvAllocator, news: News) -> IterationPlan:
        heard.extend(([row.count for row in ran.plan.rows], ran.times_s) for ran in news.runs)
        undecided.append(news.undecided)
        return decide(now_s, kv, news)

    worker.scheduler.decide = listen  # type: ignore[method-assign]
    worker.handle(0.2, StepEnded([Sampled(Attempt("a", 1), 7)], 0.1))
    for step in range(2):
        worker.handle(0.25 + step, PlanAhead())
        worker.handle(0.3 + step, StepEnded([Sampled(Attempt(name, 1), 7) for name in "ba"], 0.5 + step))
    worker.handle(3.0, StepEnded([Sampled(Attempt(name, 1), 7) for name in "ab"], 3.0))
    assert heard == [([1], (0.1,)), ([PROMPT, 1], (0.5,)), ([1, 1], (1.5, 3.0))]
    assert undecided == [0, 2]


def test_a_scheduler_that_does_not_hear_of_them_decides_behind_prompts() -> None:
    worker = machine(Role.UNIFIED)
    worker.scheduler.reads_runs = False
    worker.handle(0.0, Received("manager", whole("a")))
    assert worker.handle(0.05, PlanAhead()) == []
    assert refusals(worker) == {"policy": 1}


def long(name: str, prompt: int, **sampling: int) -> StartSegment:
    asked = whole(name)
    params = msgspec.structs.replace(asked.request.sampling, **sampling)
    request = msgspec.structs.replace(asked.request, tokens=[5] * prompt, prompt_tokens=prompt, sampling=params)
    return msgspec.structs.replace(asked, request=request)


def test_chunks_of_a_prompt_follow_each_other_beside_decode_rows() -> None:
    """They sample nothing until the last, and their counts are known."""
    worker = decoding("a", max_tokens=20)
    worker.handle(0.12, Received("manager", long("b", 150)))
    effects = worker.handle(0.2, sampled("a"))
    assert rows(effects[-1]) == [("b", 0, 63), ("a", PROMPT + 1, 1)]
    (second,) = worker.handle(0.25, PlanAhead())
    assert rows(second) == [("b", 63, 63), ("a", PROMPT + 2, 1)]
    assert said(worker.handle(0.3, sampled("a", token=41))) == [("a", PROMPT + 2, [41])]
    (third,) = worker.handle(0.35, PlanAhead())
    assert rows(third) == [("b", 126, 24), ("a", PROMPT + 3, 1)]
    worker.handle(0.4, sampled("a"))
    (fourth,) = worker.handle(0.45, PlanAhead())
    assert rows(fourth) == [("a", PROMPT + 4, 1), ("b", 150, 1)], "its last chunk samples"
    effects = worker.handle(0.5, sampled("b", "a", token=42))
    assert said(effects) == [("b", 150, [42]), ("a", PROMPT + 4, [42])]
    effects = worker.handle(0.6, sampled("a", "b", token=43))
    assert rows(effects[-1]) == [("a", PROMPT + 5, 1), ("b", 151, 1)]
    assert (worker.counters.planned_ahead, refusals(worker), worker.counters.steps) == (3, {}, 6)
    assert worker.counters.prefill_tokens == PROMPT + 150
    worker.check()


def test_a_prompt_alone_goes_on_and_an_arrival_waits_while_it_takes_all_tokens() -> None:
    worker = machine(Role.UNIFIED)
    most = worker.setup.capacity.max_step_tokens
    worker.handle(0.0, Received("manager", long("a", 2 * most + 9)))
    worker.handle(0.05, Received("manager", whole("b")))
    (second,) = worker.handle(0.06, PlanAhead())
    assert rows(second) == [("a", most, most)], "nothing is left that the other prompt could have"
    worker.handle(0.1, sampled())
    assert worker.handle(0.15, PlanAhead()) == [], "which of the tokens left are the other's is a decision"
    assert refusals(worker) == {"policy": 1}
    effects = worker.handle(0.2, sampled())
    assert rows(effects[-1]) == [("a", 2 * most, 9), ("b", 0, PROMPT)]


def test_a_prompt_that_is_cancelled_between_its_chunks_is_freed_after_the_second() -> None:
    worker = machine(Role.UNIFIED)
    most = worker.setup.capacity.max_step_tokens
    worker.handle(0.0, Received("manager", long("a", 2 * most)))
    assert len(worker.handle(0.05, PlanAhead())) == 1
    worker.handle(0.06, Received("manager", Cancel([Attempt("a", 1)], "left")))
    worker.handle(0.1, sampled())
    assert worker.kv.held(Attempt("a", 1)) > 0
    worker.check()
    worker.handle(0.2, sampled("a"))
    assert worker.idle and worker.kv.free_blocks == worker.kv.total_blocks


@pytest.mark.parametrize("why", ["scored", "one token", "its scheduler"])
def test_a_prompt_whose_next_chunk_is_to_be_decided(why: str) -> None:
    worker = decoding("a", max_tokens=20)
    asked = long("b", 100, prompt_logprobs=0) if why == "scored" else long("b", 100)
    worker.handle(0.12, Received("manager", asked))
    worker.handle(0.2, sampled("a"))
    if why == "one token":
        row = worker.plan_in_flight.rows[0]
        worker.plan_in_flight.rows[0] = msgspec.structs.replace(row, count=1)
    if why == "its scheduler":
        worker.scheduler.chunks_ahead = lambda prompts, single: None  # type: ignore[method-assign]
    assert worker.handle(0.25, PlanAhead()) == []
    assert refusals(worker) == {"prompts": 1}


def test_an_arrival_behind_a_step_that_was_planned_waits_for_that_one_only() -> None:
    worker = decoding("a")
    worker.handle(0.12, PlanAhead())
    worker.handle(0.15, Received("manager", whole("b")))
    assert worker.handle(0.2, sampled("a"))[-1] != StartStep(worker.plan_in_flight)
    assert worker.handle(0.25, PlanAhead()) == []
    effects = worker.handle(0.3, sampled("a"))
    assert rows(effects[-1]) == [("b", 0, PROMPT), ("a", PROMPT + 2, 1)]


def _decode_worker(offered: bool) -> WorkerMachine:
    worker = machine(Role.DECODE, PagedAllocator(GEOMETRY, 5, 0, prefix_caching=False))
    worker.handle(0.0, Received("manager", whole("a", 5)))
    worker.handle(0.1, sampled("a"))
    worker.handle(0.11, Received("manager", segment(1, "r")))
    if offered:
        worker.handle(0.12, Received("prefill", KvOffer("prefill", Attempt("r", 1), 3, PROMPT)))
    return worker


def test_an_offer_that_waits_for_blocks_comes_before_the_next_step() -> None:
    worker = _decode_worker(offered=True)
    assert worker.handle(0.15, PlanAhead()) == []
    assert refusals(worker) == {"kv_transfer": 1}


def test_an_offer_that_comes_while_a_planned_step_runs_is_granted_when_blocks_are_free() -> None:
    worker = _decode_worker(offered=False)
    assert len(worker.handle(0.15, PlanAhead())) == 1
    assert worker.handle(0.16, Received("prefill", KvOffer("prefill", Attempt("r", 1), 3, PROMPT))) == []
    worker.handle(0.2, sampled("a", token=STOP))
    worker.check()
    assert worker.kv.held(Attempt("r", 1)) == 0, "the row in vain still has its blocks"
    effects = worker.handle(0.3, sampled("a"))
    assert [type(effect.message).__name__ for effect in effects if isinstance(effect, Send)] == ["KvGrant"]
    worker.check()


@pytest.mark.parametrize("bound", [True, False])
def test_rows_of_a_segment_go_on_up_to_the_position_where_another_worker_continues(bound: bool) -> None:
    """`bound`: which worker that is is known, and the KV is offered to it with the first row."""
    worker = machine(Role.UNIFIED)
    asked = segment(0, decoder="decode" if bound else None)
    first = msgspec.structs.replace(asked.segments[0], end=PROMPT + 2, instance="unified")
    second = msgspec.structs.replace(asked.segments[1], start=PROMPT + 2)
    worker.handle(0.0, Received("manager", msgspec.structs.replace(asked, segments=[first, second])))
    (ahead,) = worker.handle(0.05, PlanAhead())
    assert rows(ahead) == [("r", PROMPT, 1)]
    worker.handle(0.1, sampled("r"))
    (ahead,) = worker.handle(0.15, PlanAhead())
    assert rows(ahead) == [("r", PROMPT + 1, 1)]
    worker.handle(0.2, sampled("r"))
    assert worker.handle(0.25, PlanAhead()) == []
    assert refusals(worker) == {"ended": 1}
    effects = worker.handle(0.3, sampled("r"))
    assert outcomes(effects) == ([] if bound else ["r parked"])
    (sequence,) = worker.sequences()
    assert (sequence.phase, sequence.computed) == (Phase.LEAVING if bound else Phase.PARKED, PROMPT + 2)
    worker.check()


@pytest.mark.parametrize("sampling", [{"frequency_penalty": 0.5}, {"grammar": "root ::= [a-z]+"}])
def test_penalties_and_grammars_keep_no_step_waiting(sampling: dict[str, Any]) -> None:
    """Only their sampling needs the token, which is the engine's to wait for."""
    asked = whole("a")
    request = msgspec.structs.replace(asked.request, sampling=SamplingParams(max_tokens=8, **sampling))
    worker = machine(Role.UNIFIED)
    worker.handle(0.0, Received("manager", StartSegment(request, asked.segments, 0, "ipc://gateway")))
    worker.handle(0.1, sampled("a"))
    (ahead,) = worker.handle(0.15, PlanAhead())
    assert rows(ahead) == [("a", PROMPT + 1, 1)]
    assert refusals(worker) == {}


def test_a_row_that_gave_no_token_is_planned_again_and_nothing_behind_it() -> None:
    """The one that was planned behind it already counts for nothing."""
    worker, late = machine(Role.UNIFIED), [Attempt("a", 1)]
    worker.handle(0.0, Received("manager", whole("a")))
    effects = worker.handle(0.1, StepEnded([], 0.1, late=late))
    assert rows(effects[-1]) == [("a", PROMPT - 1, 1)], "the prompt's last position"
    worker.handle(0.2, sampled("a"))
    (ahead,) = worker.handle(0.25, PlanAhead())
    assert rows(ahead) == [("a", PROMPT + 1, 1)]
    worker.handle(0.3, StepEnded([], 0.1, late=late))
    assert worker.handle(0.35, PlanAhead()) == []
    assert refusals(worker) == {"grammars": 1}
    effects = worker.handle(0.4, StepEnded([], 0.1, late=late))
    assert rows(effects[-1]) == [("a", PROMPT, 1)]
    effects = worker.handle(0.5, sampled("a"))
    assert rows(effects[-1]) == [("a", PROMPT + 1, 1)] and worker.counters.late_rows == 3
    assert rows(worker.handle(0.55, PlanAhead())[-1]) == [("a", PROMPT + 2, 1)]
    worker.check()


def test_a_scored_prompt_that_waits_for_its_turn_is_not_kept_waiting() -> None:
    worker = machine(Role.UNIFIED)
    sampling = SamplingParams(max_tokens=8, prompt_logprobs=0)
    for name in ("a", "b"):
        asked = whole(name)
        request = msgspec.structs.replace(asked.request, sampling=sampling)
        worker.handle(0.0, Received("manager", msgspec.structs.replace(asked, request=request)))
    assert worker.handle(0.05, PlanAhead()) == []
    assert refusals(worker) == {"news": 1}
    scores = PromptScores(Attempt("a", 1), 0, [TokenLogprob(-1.0, [], [])] * (PROMPT - 1))
    effects = worker.handle(0.1, StepEnded([Sampled(Attempt("a", 1), 7)], 0.1, [scores]))
    assert rows(effects[-1]) == [("b", 0, PROMPT), ("a", PROMPT, 1)], "the second prompt's turn has come"


def test_a_failed_step_takes_the_one_behind_it_along() -> None:
    worker = decoding("a", "b")
    worker.handle(0.15, PlanAhead())
    worker.handle(0.16, Received("manager", Cancel([Attempt("b", 1)], "left")))
    effects = worker.handle(0.2, StepFailed("broken"))
    assert outcomes(effects) == ["a failed"]
    assert worker.idle and worker.kv.free_blocks == BLOCKS
    with pytest.raises(InvariantViolated):
        worker.handle(0.3, sampled("a", "b"))


def test_with_nothing_in_flight_there_is_nothing_to_plan() -> None:
    worker = machine(Role.UNIFIED)
    assert worker.handle(0.0, PlanAhead()) == []
    assert worker.handle(0.1, Tick()) == []
    assert refusals(worker) == {}


def _requests(random: Random) -> Iterator[Asked]:
    while True:
        yield Asked(tokens(random, random.randint(1, 30)), random.randint(5, 30))


def _lived(world: World, faults: Sequence[Fault] = ()) -> World:
    """Of requests that end by length, by a stop token, by their client, or on another worker."""
    offer(world, 20, _requests, over_s=1.5)
    for index in range(0, 20, 4):
        world.at(0.6 + 0.07 * index, partial(_cancel, world, f"r{index}"))
    strike(world, faults)
    finish(world, 6.0)
    return world


def _cancel(world: World, name: str) -> None:
    if name in world.owned:
        world.cancel(name)


@pytest.mark.parametrize(("roles", "placement"), [(UNIFIED, Colocated), (PD, Disaggregated)])
def test_a_world_plans_ahead_and_wastes_few_rows(
    roles: dict[str, Role], placement: type[Colocated] | type[Disaggregated]
) -> None:
    world = _lived(World(1, roles, placement, blocks=30, preemption="swap"))
    assert total(world, "planned_ahead") > total(world, "steps") / 10
    assert 0 < total(world, "wasted_rows") <= 20
    assert sum(node.worker.counters.finished.get("stop", 0) for node in world.workers.values()) > 3


@settings(parent=of_worlds(0.1), suppress_health_check=list(HealthCheck))
@given(
    seed=st.integers(0, 2**32),
    placement=st.sampled_from([Colocated, Disaggregated, SplitAnywhere]),
    preemption=st.sampled_from(["swap", "recompute"]),
    blocks=st.sampled_from([20, 30, 64]),
    caching=st.booleans(),
    delay=st.sampled_from([0.002, 0.05]),
    faults=any_faults(latest_s=3.0, longest_s=2.0, most=4),
)
def test_whatever_ends_while_a_planned_step_runs_is_freed_once(
    seed: int,
    placement: Callable[[], Placement],
    preemption: str,
    blocks: int,
    caching: bool,
    delay: float,
    faults: list[Fault],
) -> None:
    _lived(
        World(
            seed,
            PD_TWICE,
            placement,
            blocks=blocks,
            preemption=preemption,
            caching=caching,
            host_blocks=40,
            message_delay_s=delay,
        ),
        faults,
    )
