"""Drafts of a worker's rows: how far they may go, how their tokens are taken, and what a machine does not believe."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from cohort.common.config import SpeculationConfig
from cohort.common.errors import InvariantViolated
from cohort.common.machines.effects import StartStep, WorkerEffect
from cohort.common.machines.events import Drafted, PlanAhead, Received, Sampled, StepEnded
from cohort.common.machines.worker.worker import WorkerMachine
from cohort.common.messages import Cancel
from cohort.common.policies.baselines.paged_allocation import PagedAllocator
from cohort.common.policies.interface import IterationPlan
from cohort.common.policies.speculation import Speculation
from cohort.common.types import Attempt, Role
from tests.common.machines.small_worker import BLOCKS, GEOMETRY, PROMPT, machine, whole
from tests.common.machines.worker.test_plan_ahead import STOP, outcomes, rows, said

R = Attempt("r", 1)


class Generous(Speculation):
    """As many drafts as rows may have."""

    def _best(
        self, times: object, shape: object, candidates: Sequence[tuple[Any, int]], most: int, within_s: float
    ) -> tuple[list[int], float]:
        return [min(limit, self._max_drafts) for _, limit in candidates], 2.0


def drafting(max_tokens: int = 40, blocks: int = BLOCKS, caching: bool = False) -> WorkerMachine:
    """One request whose first tokens were sampled, one at a time, as expected; a row with drafts is in flight."""
    kv = PagedAllocator(GEOMETRY, blocks, 0, prefix_caching=caching)
    worker = machine(Role.UNIFIED, kv, speculation=SpeculationConfig("lookup", max_drafts=4))
    worker.drafts.policy = Generous(4)
    worker.handle(0.0, Received("manager", whole("r", max_tokens)))
    worker.handle(0.1, StepEnded([Sampled(R, 7)], 0.1))
    for step in range(2):
        worker.handle(0.2 + step / 10, StepEnded([Sampled(R, 7)], 0.1, drafts=[Drafted(R, 1, 1, computed=False)]))
    return worker


def plan(worker: WorkerMachine) -> IterationPlan:
    return worker.plan_in_flight


def ended(*tokens: int, proposed: int) -> StepEnded:
    return StepEnded([Sampled(R, token) for token in tokens], 0.1, drafts=[Drafted(R, proposed, len(tokens) - 1)])


def test_right_drafts_and_the_token_behind_them_are_told_together() -> None:
    worker = drafting()
    (row,) = plan(worker).rows
    assert (row.start, row.count, row.drafts) == (PROMPT + 2, 1, 4)
    assert len(worker.kv.blocks(R)) * GEOMETRY.block_size >= PROMPT + 7, "blocks for them"
    effects = worker.handle(0.5, ended(41, 42, 43, proposed=4))
    assert said(effects) == [("r", PROMPT + 3, [41, 42, 43])]
    assert rows(effects[-1]) == [("r", PROMPT + 5, 1)]
    (sequence,) = worker.sequences()
    assert (sequence.computed, sequence.known) == (PROMPT + 5, PROMPT + 6)
    counters = worker.counters
    assert (counters.drafted_rows["rt"], counters.drafted_tokens["rt"], counters.accepted_tokens["rt"]) == (1, 4, 2)
    assert counters.decode_tokens == 5


def test_tokens_behind_a_stop_are_dropped() -> None:
    worker = drafting()
    effects = worker.handle(0.5, ended(41, STOP, 43, 44, proposed=4))
    assert said(effects) == [("r", PROMPT + 3, [41, STOP])]
    assert outcomes(effects) == ["r finished"] and worker.idle and worker.kv.owners() == {}


def test_a_request_that_was_cancelled_meanwhile_takes_none_of_them() -> None:
    worker = drafting()
    worker.handle(0.45, Received("manager", Cancel([R], "gone")))
    effects = worker.handle(0.5, ended(41, 42, proposed=4))
    assert said(effects) == [] and worker.idle and worker.kv.owners() == {}


@pytest.mark.parametrize("max_tokens", [4, 5, 6])
def test_no_draft_goes_beyond_the_last_token(max_tokens: int) -> None:
    worker = drafting(max_tokens=max_tokens)
    (row,) = plan(worker).rows
    assert row.drafts == max_tokens - 4
    tokens = [41] * (row.drafts + 1)
    effects = worker.handle(
        0.5, ended(*tokens, proposed=row.drafts) if row.drafts else StepEnded([Sampled(R, 41)], 0.1)
    )
    assert outcomes(effects) == ["r finished"]


def test_full_blocks_of_right_drafts_enter_the_prefix_cache_and_wrong_ones_do_not() -> None:
    worker = drafting(caching=True)
    worker.handle(0.5, ended(41, 42, proposed=4))  # positions up to PROMPT + 3: one block is full
    worker.handle(0.6, Received("manager", Cancel([R], "gone")), StepEnded([Sampled(R, 1)], 0.1))
    tokens = [5] * PROMPT + [7, 7, 7, 41, 42, 43, 44, 45]
    again = Attempt("again", 1)
    assert worker.kv.reserve(again, tokens, len(tokens)) == PROMPT + GEOMETRY.block_size
    worker.kv.release(again)


def test_a_cache_that_is_nearly_full_carries_none() -> None:
    worker = drafting(max_tokens=6, blocks=5)
    assert [row.drafts for row in plan(worker).rows] == [0]


def test_a_step_is_planned_ahead_unless_drafts_are_likely() -> None:
    def ahead(effects: list[WorkerEffect]) -> bool:
        return any(isinstance(effect, StartStep) and effect.ahead for effect in effects)

    worker = drafting(max_tokens=100)
    worker.handle(0.5, ended(41, proposed=4))
    assert not ahead(worker.handle(0.55, PlanAhead([R])))
    assert worker.counters.not_ahead == {"drafts": 1}
    for step in range(60):
        worker.handle(0.6 + step, StepEnded([Sampled(R, 7)], 0.1, drafts=[Drafted(R, 1, 0, computed=False)]))
    assert ahead(worker.handle(80.0, PlanAhead([R])))


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(InvariantViolated, match="3 right ones of 2 drafts"):
        drafting().handle(0.5, StepEnded([Sampled(R, 7)] * 4, 0.1, drafts=[Drafted(R, 2, 3)]))
    worker = drafting()
    worker.handle(0.45, PlanAhead())
    with pytest.raises(InvariantViolated, match="planned behind one with drafts"):
        worker.handle(0.5, ended(41, 42, proposed=2))


def test_what_a_model_takes_for_a_draft_is_learned() -> None:
    worker = drafting()
    worker.drafts.policy = Generous(4, uses_draft_model=True)
    (row,) = plan(worker).rows
    step = ended(41, 42, 43, proposed=4)
    worker.handle(0.5, StepEnded(step.sampled, step.latency_s, drafts=step.drafts, drafting_s=0.2))
    assert worker.drafts.metrics()["draft_seconds"] == pytest.approx(0.05)
    judged = row.sequence.drafts_judged
    worker.handle(0.6, StepEnded([Sampled(R, 44)], 0.1))  # nothing was expected: its record fades
    assert row.sequence.drafts_judged == pytest.approx(0.98 * judged)
    assert worker.drafts.metrics()["draft_seconds"] == pytest.approx(0.05)
