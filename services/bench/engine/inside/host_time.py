"""The host's part of a decode step, without a model: what lies between two steps where none is planned ahead.

With `drafts` also what looking at texts for drafts takes (`engine/runner/drafting.py`, `prompt_lookup`), over texts in
which nothing stood before (`new`), or in which what stood before misleads (`misleading`), so that none is computed.

A real `WorkerMachine` with a preset's policies, the batch builder, and the standing buffers of a GPU's decode step on
the processor. Times are of this thread on a processor, so that other processes on the machine do not count.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from statistics import median
from typing import Any, Literal, ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor

from cohort.common.config import SpeculationConfig, load_config
from cohort.common.engine.drafts.prompt_lookup import PromptLookup
from cohort.common.engine.forward.static_decode import Ground, StaticDecode
from cohort.common.engine.models.step_inputs import StepInputs
from cohort.common.engine.runner.drafting import Drafting
from cohort.common.engine.step.batch import StepOutput
from cohort.common.engine.step.batch_builder import BatchBuilder
from cohort.common.engine.step.decode_classes import CaptureBudget
from cohort.common.engine.step.recorded_steps import Recorded, StepResult
from cohort.common.machines.effects import StartStep
from cohort.common.machines.events import Drafted, PlanAhead, Received, Sampled, StepEnded, WorkerEvent
from cohort.common.machines.worker.worker import WorkerMachine
from cohort.common.machines.worker.worker_state import WorkerSettings, WorkerSetup
from cohort.common.messages import StartSegment
from cohort.common.policies import compose
from cohort.common.policies.interface import IterationPlan
from cohort.common.sequence import Sequence
from cohort.common.types import Attempt, KvGeometry, Request, Role, SamplingParams, Segment, WorkerCapacity
from cohort.services.bench.rounds import no_collection

Texts = Literal["new", "misleading"]
P = ParamSpec("P")
Made = TypeVar("Made")

_BLOCK = 16
_VOCABULARY = 128_256
_DRAFTS = 8
_FIRST, _FEW = 16, 16
"""Tokens of a misleading text: each pair of them stood before."""
_SETTLING = 40
"""Steps until drafts that always failed are no longer wanted."""
_STEP_S = 0.01
_OUTPUT = 4096
"""Tokens that a row could have: more than it gets before all prompts are computed and all steps measured."""


@dataclass(frozen=True, slots=True)
class HostTime:
    """Microseconds of processor time a step, medians over `steps`. `completed`: the step's tokens told to the machine.
    `planned`: its decision, or the plan ahead. `built`: the arrays. `filled`: those in the buffers that a GPU reads.
    `looked`: at texts for drafts, and to judge what was expected."""

    preset: str
    rows: int
    context: int
    ahead: bool
    steps: int
    completed_us: float
    planned_us: float
    built_us: float
    filled_us: float
    looked_us: float = 0.0

    @property
    def planned(self) -> str:
        return "ahead" if self.ahead else "after"

    @property
    def whole_us(self) -> float:
        return self.completed_us + self.planned_us + self.built_us + self.filled_us + self.looked_us


class _NothingRecorder:
    """Steps that compute nothing: what remains is the host's part."""

    def record(self, step: Callable[[], StepResult]) -> Recorded:
        nothing = StepResult(torch.zeros(0), None)
        return Recorded(lambda: nothing, 0)


class _NoModel:
    """Never called."""

    sampled_states: Tensor | None = None

    def forward(self, step: StepInputs, kv: Tensor) -> Tensor:
        raise RuntimeError("a step that is measured computes nothing")


class _Worker:
    """`rows` sequences that decode for ever, as far as a measurement goes."""

    def __init__(
        self, preset: str, rows: int, context: int, steps: int, temperature: float, looking: _Looking | None
    ) -> None:
        config = load_config(preset=preset, overrides={"engine": {"max_rows": max(256, rows)}})
        positions = context + _OUTPUT
        blocks = rows * -(-positions // _BLOCK) + 64
        geometry = KvGeometry(1, 1, 1, 2, _BLOCK)
        kv = compose.allocation(config, geometry, blocks, 0)
        capacity = WorkerCapacity(Role.UNIFIED, "m", positions, 1, 1, 1, 2, _BLOCK, blocks, 0, max(256, rows), 8192)
        speculation = SpeculationConfig("off" if looking is None else "lookup", max_drafts=_DRAFTS)
        settings = WorkerSettings((), 30.0, 30.0, 30.0, 256.0, speculation=speculation)
        setup = WorkerSetup("unified", 1, "", "manager", capacity, settings)
        self.machine = WorkerMachine(setup, compose.iteration(config), kv, random.Random(0))
        self.plan: IterationPlan | None = None
        self.planned_s = 0.0
        self._clock_plans()
        self.now_s = 0.0
        params = SamplingParams(max_tokens=_OUTPUT - steps, temperature=temperature, stop_token_ids=(2,))
        for index in range(rows):
            tokens = [3 + index] * context if looking is None else looking.prompt(context, random.Random(index))
            request = Request(Attempt(f"request-{index}", 1), "gateway", tokens, context, params, 0.0)
            self.tell(Received("manager", StartSegment(request, [Segment(0, None, "unified")], 0, "")))

    def tell(self, *events: WorkerEvent) -> None:
        self.now_s += 0.01
        effects = self.machine.handle(self.now_s, *events)
        if effects and isinstance(effects[-1], StartStep):
            self.plan = effects[-1].plan

    def next_plan(self, preset: str) -> IterationPlan:
        """The one that was made, to be run now."""
        plan, self.plan = self.plan, None
        if plan is None:
            raise RuntimeError(f"{preset} runs nothing")
        return plan

    def ended(self, sampling: list[Sequence], tokens: list[int], drafts: list[Drafted] | None = None) -> None:
        sampled = [Sampled(sequence.key, token) for sequence, token in zip(sampling, tokens, strict=True)]
        self.tell(StepEnded(sampled, _STEP_S, drafts=drafts or []))

    def _clock_plans(self) -> None:
        """Of `WorkerMachine.handle` it is the part that decides."""
        plan: Callable[[float], None] = self.machine._plan

        def clocked(now_s: float) -> None:
            _, self.planned_s = _timed(plan, now_s)

        machine: Any = self.machine
        machine._plan = clocked


class _Looking:
    """What the engine does for drafts, around a machine whose rows sample tokens that were never expected."""

    def __init__(self, misleading: bool) -> None:
        self._drafting = Drafting(PromptLookup, _DRAFTS)
        self._misleading = misleading
        self._other: dict[Sequence, PromptLookup] = {}
        self._fresh = count(_VOCABULARY)

    def prompt(self, length: int, chance: random.Random) -> list[int]:
        if self._misleading:
            return [_FIRST + chance.randrange(_FEW) for _ in range(length)]
        return [next(self._fresh) for _ in range(length)]

    def sampled(self, sampling: list[Sequence]) -> list[int]:
        """The next token of each. Not part of what is measured."""
        if not self._misleading:
            return [next(self._fresh) for _ in sampling]
        expected = [self._other.setdefault(each, PromptLookup()).propose(each.tokens, 1) for each in sampling]
        return [_FIRST + (tokens[0] + 1) % _FEW if tokens else _FIRST for tokens in expected]

    def expected(self, sampling: list[Sequence]) -> list[Attempt]:
        return self._drafting.expected(sampling)

    def judged(self, sampling: list[Sequence], tokens: list[int]) -> list[Drafted]:
        output = StepOutput(np.array(tokens, dtype=np.int64), (None,) * len(tokens))
        return self._drafting.judged(sampling, None, output)


def _timed(call: Callable[P, Made], *args: P.args, **kwargs: P.kwargs) -> tuple[Made, float]:
    """What it returns, and the seconds that this thread computed."""
    began_s = time.thread_time()
    made = call(*args, **kwargs)
    return made, time.thread_time() - began_s


def measure(
    preset: str,
    rows: int,
    context: int,
    steps: int,
    *,
    ahead: bool,
    temperature: float = 0.0,
    drafts: Texts | None = None,
) -> HostTime:
    """Decode steps of so many rows, one after the other or each planned while the one before it runs. `drafts`: looked
    for, over such texts."""
    looking = None if drafts is None else _Looking(drafts == "misleading")
    worker = _Worker(preset, rows, context, steps, temperature, looking)
    builder = BatchBuilder(worker.machine.kv)
    kv = torch.zeros(worker.machine.kv.total_blocks + 1, 1, 2, 1, _BLOCK, 1)
    ground = Ground(_NoModel(), kv, worker.machine.kv.total_blocks, context + _OUTPUT, torch.device("cpu"))
    decode = StaticDecode(ground, max(rows, 1), _VOCABULARY)
    decode.record(_NothingRecorder(), CaptureBudget(1 << 40))
    sampling: list[Sequence] = []
    settled = 0
    while sum(s.output_tokens > 1 for s in worker.machine.sequences()) < rows or settled < _SETTLING:  # prompts
        plan = worker.next_plan(preset)
        _, sampling = builder.build(plan)
        settled += 1
        tokens = [1] * len(sampling) if looking is None else looking.sampled(sampling)
        worker.ended(
            sampling, tokens, looking.judged(sampling, tokens) if looking is not None and plan.watched else None
        )
    parts: list[tuple[float, float, float, float, float]] = []
    plan = worker.next_plan(preset)
    _, sampling = builder.build(plan)
    with no_collection():
        for _ in range(steps):
            tokens = [1] * rows if looking is None else looking.sampled(sampling)
            judged, expected, looked_s = list[Drafted](), list[Attempt](), 0.0
            before_plan = plan
            if ahead:
                if looking is not None and plan.watched:
                    expected, looked_s = _timed(looking.expected, sampling)
                worker.planned_s = 0.0
                _, planned_s = _timed(worker.tell, PlanAhead(expected))
            else:
                if looking is not None and plan.watched:
                    judged, looked_s = _timed(looking.judged, sampling, tokens)
                _, ended_s = _timed(worker.ended, sampling, tokens, judged)
                planned_s = worker.planned_s
                completed_s = ended_s - planned_s
            if worker.plan is None or len(worker.plan.rows) != rows:
                raise RuntimeError(f"{preset} does not plan these rows {'ahead' if ahead else 'again'}")
            plan = worker.next_plan(preset)
            (batch, following), built_s = _timed(builder.build, plan, sampling if ahead else None)
            rows_class = decode.takes(batch)
            if rows_class is None:
                raise RuntimeError("no class of recorded steps takes these rows")
            before = torch.zeros(rows, dtype=torch.int64) if ahead else None
            _, run_s = _timed(decode.run, batch, rows_class, before)
            _, fill_s = _timed(decode.sampler.fill, batch.sampling, batch.sample_rows, rows_class)
            if ahead:
                if looking is not None and before_plan.watched:
                    judged, judged_s = _timed(looking.judged, sampling, tokens)
                    looked_s += judged_s
                _, completed_s = _timed(worker.ended, sampling, tokens, judged)
            sampling = following
            parts.append((completed_s, planned_s, built_s, run_s + fill_s, looked_s))
    return HostTime(preset, rows, context, ahead, steps, *(1e6 * median(part) for part in zip(*parts, strict=True)))
