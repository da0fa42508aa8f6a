"""The host's part of a decode step, without a model: what lies between two steps where none is planned ahead.

A real `WorkerMachine` with a preset's policies, the batch builder, and the standing buffers of a GPU's decode step on
the processor. Times are of this thread on a processor, so that other processes on the machine do not count.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from cohort.common.config import SpeculationConfig, load_config
from cohort.common.engine.forward.static_decode import Ground, StaticDecode
from cohort.common.engine.models.step_inputs import StepInputs
from cohort.common.engine.step.batch_builder import BatchBuilder
from cohort.common.engine.step.decode_classes import CaptureBudget
from cohort.common.engine.step.recorded_steps import Recorded, StepResult
from cohort.common.machines.effects import StartStep
from cohort.common.machines.events import PlanAhead, Received, Sampled, StepEnded, WorkerEvent
from cohort.common.machines.worker.worker import WorkerMachine
from cohort.common.machines.worker.worker_state import WorkerSettings, WorkerSetup
from cohort.common.messages import StartSegment
from cohort.common.policies import compose
from cohort.common.policies.interface import IterationPlan
from cohort.common.sequence import Sequence
from cohort.common.types import Attempt, KvGeometry, Request, Role, SamplingParams, Segment, WorkerCapacity
from cohort.services.bench.rounds import no_collection

P = ParamSpec("P")
Made = TypeVar("Made")

_BLOCK = 16
_VOCABULARY = 128_256
_STEP_S = 0.01
_OUTPUT = 4096
"""Tokens that a row could have: more than it gets before all prompts are computed and all steps measured."""


@dataclass(frozen=True, slots=True)
class HostTime:
    """Microseconds of processor time a step, medians over `steps`. `completed`: the step's tokens told to the machine.
    `planned`: its decision, or the plan ahead. `built`: the arrays. `filled`: those in the buffers that a GPU reads."""

    preset: str
    rows: int
    context: int
    ahead: bool
    steps: int
    completed_us: float
    planned_us: float
    built_us: float
    filled_us: float

    @property
    def planned(self) -> str:
        return "ahead" if self.ahead else "after"

    @property
    def whole_us(self) -> float:
        return self.completed_us + self.planned_us + self.built_us + self.filled_us


class _NothingRecorder:
    """Steps that compute nothing: what remains is the host's part."""

    def record(self, step: Callable[[], StepResult]) -> Recorded:
        nothing = StepResult(torch.zeros(0), None)
        return Recorded(lambda: nothing, 0)


class _NoModel:
    """Model that is never called."""

    sampled_states: Tensor | None = None

    def forward(self, step: StepInputs, kv: Tensor) -> Tensor:
        raise RuntimeError("a step that is measured computes nothing")


class _Worker:
    """`rows` sequences that decode for ever, as far as a measurement goes."""

    def __init__(self, preset: str, rows: int, context: int, steps: int, temperature: float) -> None:
        config = load_config(preset=preset, overrides={"engine": {"max_rows": max(256, rows)}})
        positions = context + _OUTPUT
        blocks = rows * -(-positions // _BLOCK) + 64
        geometry = KvGeometry(1, 1, 1, 2, _BLOCK)
        kv = compose.allocation(config, geometry, blocks, 0)
        capacity = WorkerCapacity(Role.UNIFIED, "m", positions, 1, 1, 1, 2, _BLOCK, blocks, 0, max(256, rows), 8192)
        settings = WorkerSettings((), 30.0, 30.0, 30.0, 256.0, speculation=SpeculationConfig("off"))
        setup = WorkerSetup("unified", 1, "", "manager", capacity, settings)
        self.machine = WorkerMachine(setup, compose.iteration(config), kv, random.Random(0))
        self.plan: IterationPlan | None = None
        self.planned_s = 0.0
        self._clock_plans()
        self.now_s = 0.0
        params = SamplingParams(max_tokens=_OUTPUT - steps, temperature=temperature, stop_token_ids=(2,))
        for index in range(rows):
            request = Request(Attempt(f"request-{index}", 1), "gateway", [3 + index] * context, context, params, 0.0)
            self.feed(Received("manager", StartSegment(request, [Segment(0, None, "unified")], 0, "")))

    def feed(self, *events: WorkerEvent) -> None:
        self.now_s += 0.01
        effects = self.machine.handle(self.now_s, *events)
        if effects and isinstance(effects[-1], StartStep):
            self.plan = effects[-1].plan

    def next_plan(self, preset: str) -> IterationPlan:
        """Return the plan that was made, to be run now."""
        plan, self.plan = self.plan, None
        if plan is None:
            raise RuntimeError(f"{preset} runs nothing")
        return plan

    def ended(self, sampling: list[Sequence]) -> None:
        self.feed(StepEnded([Sampled(sequence.key, 1) for sequence in sampling], _STEP_S))

    def _clock_plans(self) -> None:
        """Measure the part of `WorkerMachine.handle` that decides."""
        plan: Callable[[float], None] = self.machine._plan

        def clocked(now_s: float) -> None:
            _, self.planned_s = _timed(plan, now_s)

        machine: Any = self.machine
        machine._plan = clocked


def _timed(call: Callable[P, Made], *args: P.args, **kwargs: P.kwargs) -> tuple[Made, float]:
    """Return the call's result, and the seconds that this thread computed."""
    began_s = time.thread_time()
    made = call(*args, **kwargs)
    return made, time.thread_time() - began_s


def measure(preset: str, rows: int, context: int, steps: int, *, ahead: bool, temperature: float = 0.0) -> HostTime:
    """Decode steps of so many rows, one after the other or each planned while the one before it runs."""
    worker = _Worker(preset, rows, context, steps, temperature)
    builder = BatchBuilder(worker.machine.kv)
    kv = torch.zeros(worker.machine.kv.total_blocks + 1, 1, 2, 1, _BLOCK, 1)
    ground = Ground(_NoModel(), kv, worker.machine.kv.total_blocks, context + _OUTPUT, torch.device("cpu"))
    decode = StaticDecode(ground, max(rows, 1), _VOCABULARY)
    decode.record(_NothingRecorder(), CaptureBudget(1 << 40))
    sampling: list[Sequence] = []
    while sum(s.output_tokens > 1 for s in worker.machine.sequences()) < rows:  # prompts
        _, sampling = builder.build(worker.next_plan(preset))
        worker.ended(sampling)
    parts: list[tuple[float, float, float, float]] = []
    _, sampling = builder.build(worker.next_plan(preset))
    with no_collection():
        for _ in range(steps):
            if ahead:
                worker.planned_s = 0.0
                _, planned_s = _timed(worker.feed, PlanAhead([]))
            else:
                _, ended_s = _timed(worker.ended, sampling)
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
                _, completed_s = _timed(worker.ended, sampling)
            sampling = following
            parts.append((completed_s, planned_s, built_s, run_s + fill_s))
    return HostTime(preset, rows, context, ahead, steps, *(1e6 * median(part) for part in zip(*parts, strict=True)))
