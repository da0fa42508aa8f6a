"""Scored prompts come one at a time and in slices, whichever scheduler plans; what runs beside them does not wait."""

from __future__ import annotations

from array import array
from random import Random

import msgspec
import pytest

from cohort.common.config import CONFIGS_DIR, Config, load_config
from cohort.common.machines.events import Pooled, PromptScores, Received, Sampled, StepEnded
from cohort.common.machines.worker.worker import WorkerMachine
from cohort.common.machines.worker.worker_state import WorkerSettings, WorkerSetup
from cohort.common.messages import Cancel, PooledStates, StartSegment, TokenBatch, TokenLogprob
from cohort.common.policies import compose
from cohort.common.policies.interface import IterationPlan
from cohort.common.sequence import Sequence
from cohort.common.types import Attempt, KvGeometry, Pooling, Request, Role, SamplingParams, Segment, WorkerCapacity

SLICE = 32
PRESETS = sorted(path.stem for path in (CONFIGS_DIR / "presets").glob("*.yaml"))


def segment(
    name: str, prompt: int, *, max_tokens: int, prompt_logprobs: int = -1, pooling: Pooling = ""
) -> StartSegment:
    sampling = SamplingParams(max_tokens=max_tokens, prompt_logprobs=prompt_logprobs, pooling=pooling)
    request = Request(Attempt(name, 0), "gateway", [5] * prompt, prompt, sampling, 0.0)
    return StartSegment(request, [Segment(0, None, "w")], 0, "ipc://gateway")


def worker_of(config: Config, blocks: int) -> WorkerMachine:
    geometry = KvGeometry(1, 1, 8, 2, 16)
    capacity = WorkerCapacity(Role.UNIFIED, "m", 2048, 1, 1, 8, 2, 16, blocks, 0, 64, 512)
    return WorkerMachine(
        WorkerSetup(
            "w",
            1,
            "",
            "manager",
            capacity,
            msgspec.structs.replace(WorkerSettings.of(config, ()), scored_step_tokens=SLICE),
        ),
        compose.iteration(config),
        compose.allocation(config, geometry, blocks, 0),
        Random(0),
    )


def states(start: int, count: int) -> PooledStates:
    """The states of these positions: each a one, and its number."""
    return PooledStates(start, count, array("f", [count, sum(range(start, start + count))]).tobytes())


class Run:
    """A worker whose every step takes 10 ms, and what its gateway was told."""

    def __init__(self, preset: str, *, chunk: int = 512, blocks: int = 1024) -> None:
        options = {"max_step_tokens": 512, "prefill_chunk": chunk, "max_rows": 64}
        self.machine = worker_of(load_config(preset=preset, overrides={"engine": options}), blocks)
        self.now_s = 0.0
        self.scored_per_step: list[int] = []
        self.tokens: dict[str, int] = {}
        self.scores: dict[str, list[TokenLogprob]] = {}
        self.pooled: dict[str, PooledStates | None] = {}

    def begin(self, *segments: StartSegment) -> None:
        self._keep(self.machine.handle(self.now_s, *(Received("manager", each) for each in segments)))

    def step(self) -> IterationPlan:
        plan = self.machine.plan_in_flight
        self.now_s += 0.01
        sampled, scores, scored, pooled = [], [], 0, []
        for row in plan.rows:
            sequence = row.sequence
            if sequence.scores_prompt:
                scored += row.count
                end = min(row.start + row.count, sequence.request.prompt_tokens - 1)
                found = [TokenLogprob(float(position)) for position in range(row.start, end)]
                scores.append(PromptScores(sequence.key, row.start, found))
            if sequence.request.sampling.pooling == "mean":
                pooled.append(Pooled(sequence.key, states(row.start, row.count)))
            elif sequence.request.sampling.pooling and row.start + row.count == sequence.known:
                pooled.append(Pooled(sequence.key, states(sequence.known - 1, 1)))
            if row.start + row.count == sequence.known:
                sampled.append(Sampled(sequence.key, 7, None))
        self.scored_per_step.append(scored)
        self._keep(self.machine.handle(self.now_s, StepEnded(sampled, 0.01, scores, pooled=pooled)))
        self.machine.check()
        return plan

    def _keep(self, effects: list[object]) -> None:
        for effect in effects:
            message = getattr(effect, "message", None)
            if isinstance(message, TokenBatch):
                for update in message.updates:
                    name = update.attempt.request_id
                    self.tokens[name] = self.tokens.get(name, 0) + len(update.tokens)
                    self.scores[name] = [*self.scores.get(name, []), *update.prompt_logprobs]
                    self.pooled[name] = update.pooled


@pytest.mark.parametrize("preset", PRESETS)
def test_slices_under_every_scheduler(preset: str) -> None:
    """Three scored prompts and two plain ones: all of them end, and the scores are those of every position in turn."""
    run = Run(preset)
    run.begin(
        segment("plain", 100, max_tokens=20, prompt_logprobs=-1),
        segment("a", 300, max_tokens=4, prompt_logprobs=20),
        segment("b", 90, max_tokens=1, prompt_logprobs=0),
        segment("c", 33, max_tokens=2, prompt_logprobs=0),
    )
    late = False
    for _ in range(400):
        if run.machine.state.in_flight is None:
            break
        run.step()
        if not late and len(run.scored_per_step) == 3:
            late = True
            run.begin(segment("late", 40, max_tokens=6, prompt_logprobs=-1))
    assert run.tokens == {"plain": 20, "a": 4, "b": 1, "c": 2, "late": 6}
    assert max(run.scored_per_step) <= SLICE
    assert sum(run.scored_per_step) >= 300 + 90 + 33
    for name, prompt in (("a", 300), ("b", 90), ("c", 33)):
        assert [score.logprob for score in run.scores[name]] == [float(each) for each in range(prompt - 1)], name
    assert run.machine.idle


@pytest.mark.parametrize("preset", ["unified", "dynaserve", "baseline-chunked-prefill"])
def test_a_plain_request_does_not_wait_for_a_scored_prompt(preset: str) -> None:
    """Its first token comes with the second step after it came, however many and long the scored prompts."""
    run = Run(preset)
    run.begin(*(segment(f"scored-{each}", 500, max_tokens=1, prompt_logprobs=20) for each in range(20)))
    run.step()
    run.begin(segment("plain", 20, max_tokens=4, prompt_logprobs=-1))
    steps = 0
    while "plain" not in run.tokens:
        run.step()
        steps += 1
    assert steps <= 2
    assert set(run.tokens) == {"plain"}


def test_a_scored_prompt_that_is_cancelled_gives_its_turn_away() -> None:
    run = Run("unified")
    run.begin(*(segment(name, 200, max_tokens=1, prompt_logprobs=0) for name in "abc"))
    run.step()
    run.machine.handle(run.now_s, Received("manager", Cancel([Attempt("a", 0), Attempt("b", 0)], "enough")))
    while run.machine.state.in_flight is not None:
        run.step()
    assert run.tokens == {"c": 1}
    assert len(run.scores["c"]) == 199
    assert run.machine.idle


def test_computed_again_it_is_no_scored_prompt() -> None:
    """After its first token a preempted request has its scores: nothing is sliced any more."""
    started = segment("a", 200, max_tokens=9, prompt_logprobs=0).request
    sequence = Sequence(started, list(started.tokens), None, 0, 0.0, scored_slice=SLICE)
    assert sequence.uncomputed == SLICE
    sequence.computed = 190
    assert sequence.uncomputed == 10
    sequence.tokens.append(7)
    sequence.computed = 0
    assert sequence.uncomputed == 201


@pytest.mark.parametrize("preset", PRESETS)
def test_states_of_a_prompt_are_summed_under_every_scheduler(preset: str) -> None:
    """In chunks, beside a plain request: each position once."""
    run = Run(preset, chunk=48)
    run.begin(
        segment("plain", 100, max_tokens=20),
        segment("mean", 300, max_tokens=1, pooling="mean"),
        segment("last", 90, max_tokens=1, pooling="last"),
    )
    for _ in range(400):
        if run.machine.state.in_flight is None:
            break
        run.step()
    assert run.tokens == {"plain": 20, "mean": 1, "last": 1}
    assert run.pooled == {"plain": None, "mean": states(0, 300), "last": states(89, 1)}
    assert run.machine.idle


def test_a_preempted_prompt_is_summed_anew() -> None:
    """The plain request's next block is taken from the prompt that is half computed."""
    run = Run("unified", chunk=16, blocks=19)
    run.begin(segment("plain", 108, max_tokens=40))
    while "plain" not in run.tokens:
        run.step()
    run.begin(segment("mean", 190, max_tokens=1, pooling="mean"))
    while run.machine.state.in_flight is not None:
        run.step()
    assert run.machine.counters.preemptions > 0
    assert (run.tokens, run.pooled["mean"]) == ({"plain": 40, "mean": 1}, states(0, 190))
    assert run.machine.idle
