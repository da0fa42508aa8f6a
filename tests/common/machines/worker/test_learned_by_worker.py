"""What iterations take is learned by the worker where its scheduler learns no such thing, reported, and kept."""

from __future__ import annotations

from random import Random

import msgspec

from cohort.common.config import load_config
from cohort.common.machines.effects import StartStep
from cohort.common.machines.events import Received, Sampled, StepEnded
from cohort.common.machines.worker.worker import WorkerMachine
from cohort.common.messages import StartSegment
from cohort.common.policies import compose
from cohort.common.policies.baselines.paged_allocation import PagedAllocator
from cohort.common.policies.step_times.learned_times import LearnedTimes
from cohort.common.types import Role
from tests.common.machines.small_worker import BLOCKS, GEOMETRY, machine, setup, whole


def of(iteration: str) -> WorkerMachine:
    engine = {"max_rows": 16, "max_step_tokens": 64, "prefill_chunk": 64}  # those of `setup`
    config = load_config(preset="unified", overrides={"policies": {"iteration": iteration}, "engine": engine})
    kv = PagedAllocator(GEOMETRY, BLOCKS, 0, prefix_caching=False)
    return WorkerMachine(setup(Role.UNIFIED), compose.iteration(config), kv, Random(0))


def test_there_is_one_learner_whoever_owns_it() -> None:
    for iteration in compose.ITERATIONS:
        worker = of(iteration)
        learned = worker.scheduler.learned
        if isinstance(learned, LearnedTimes):
            assert worker.times is learned is worker.learned and worker.observed is None
        else:
            assert worker.times is worker.observed is not None
            assert worker.learned is (learned or worker.observed)
    assert machine(Role.UNIFIED, learns=False).times is None


def test_what_was_learned_is_reported_and_goes_on_in_the_next_process() -> None:
    worker = machine(Role.UNIFIED)
    assert worker.learned is worker.observed is not None
    assert worker.stats(0).step_times is None
    assert worker.learned.export_state() == b""  # not worth keeping
    for number in range(40):
        run_one(worker, f"r{number}", 4 + 3 * (number % 10))
    times = worker.stats(0).step_times
    assert times is not None and times.token_s > 0.0
    after = machine(Role.UNIFIED)
    assert after.learned is not None
    after.learned.import_state(worker.learned.export_state())
    again = after.stats(0).step_times
    assert again is not None


def run_one(worker: WorkerMachine, name: str, tokens: int, *, slower: float = 1.0) -> None:
    """A request of so many prompt tokens, whose iterations take a millisecond and another for each token, or longer."""
    said = whole(name, max_tokens=4)
    request = msgspec.structs.replace(said.request, tokens=[5] * tokens, prompt_tokens=tokens)
    effects = worker.handle(0.0, Received("manager", msgspec.structs.replace(said, request=request)))
    while plans := [effect.plan for effect in effects if isinstance(effect, StartStep)]:
        (plan,) = plans
        sampled = [Sampled(row.sequence.key, 7) for row in plan.rows if row.start + row.count == row.sequence.known]
        effects = worker.handle(0.0, StepEnded(sampled, slower * 0.001 * (1 + plan.tokens)))


def bound(name: str, max_tokens: int) -> StartSegment:
    plain = whole(name, max_tokens)
    sampling = msgspec.structs.replace(plain.request.sampling, grammar="any")
    return msgspec.structs.replace(plain, request=msgspec.structs.replace(plain.request, sampling=sampling))


def test_steps_with_grammars_teach_nothing() -> None:
    """What their masks take is up to a request, and would steer all others."""
    for iteration in compose.ITERATIONS:
        worker, plain = of(iteration), whole("plain", max_tokens=4)
        effects = worker.handle(0.0, Received("manager", bound("slow", max_tokens=4)))
        while plans := [effect.plan for effect in effects if isinstance(effect, StartStep)]:
            rows = [row for row in plans[0].rows if row.start + row.count == row.sequence.known]
            effects = worker.handle(0.0, StepEnded([Sampled(row.sequence.key, 7) for row in rows], 30.0))
        assert worker.idle and worker.state.averages.step_s == 0.0
        assert worker.times is None or len(worker.times.table) == 0, iteration
        worker.handle(0.0, Received("manager", plain))
        worker.handle(0.0, StepEnded([Sampled(plain.request.attempt, 7)], 0.1))
        assert worker.state.averages.step_s == 0.1


def counts(iteration: str, masks_s: float) -> list[list[tuple[str, int, int]]]:
    """Rows of all steps of prompts beside an answer whose masks take so long, on a machine that nothing is known of."""
    worker, steps = of(iteration), list[list[tuple[str, int, int]]]()
    worker.handle(0.0, Received("manager", bound("bound", max_tokens=30)))
    for number, tokens in enumerate((60, 50, 40)):
        plain = whole(f"p{number}", max_tokens=2)
        request = msgspec.structs.replace(plain.request, tokens=[5] * tokens, prompt_tokens=tokens)
        worker.handle(0.0, Received("manager", msgspec.structs.replace(plain, request=request)))
    plan = worker.plan_in_flight
    while plan is not None:
        steps.append([(row.sequence.request_id, row.start, row.count) for row in plan.rows])
        assert plan.has_grammars == any(name == "bound" for name, _, _ in steps[-1])
        sampled = [Sampled(row.sequence.key, 7) for row in plan.rows if row.start + row.count == row.sequence.known]
        effects = worker.handle(0.0, StepEnded(sampled, 0.15 + masks_s * plan.has_grammars))
        worker.check()
        plan = next((effect.plan for effect in effects if isinstance(effect, StartStep)), None)
    return steps


def test_what_masks_take_changes_no_decision() -> None:
    for iteration in compose.ITERATIONS:
        assert counts(iteration, 30.0) == counts(iteration, 0.0), iteration
