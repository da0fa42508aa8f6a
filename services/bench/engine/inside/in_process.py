"""The engine without the pipeline: scheduler, cache and model in one process; no gateway, manager, wire or streams.

Same policies, same `WorkerMachine`, same `ModelRunner` as a worker; nothing of the network. And clocks around functions
that know nothing of them: where a step's time goes, without a line of it in the engine. `clocked` puts a wrapper in
place of each function, by its name in the module, class or object that callers look it up in, and puts the function
back at the end. Times are the functions' own: time inside another clocked function counts for that one alone, so the
parts of a step add up to the step.
"""

from __future__ import annotations

import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from cohort.common.config import Config
from cohort.common.engine.runner import model_runner
from cohort.common.engine.runner.model_runner import ModelRunner
from cohort.common.engine.step.batch import StepOutput
from cohort.common.engine.step.batch_builder import BatchBuilder
from cohort.common.engine.worker.worker_process import capacity_of
from cohort.common.machines.effects import StartStep
from cohort.common.machines.events import Received, Sampled, StepEnded, WorkerEvent
from cohort.common.machines.worker.worker import WorkerMachine
from cohort.common.machines.worker.worker_state import WorkerSettings, WorkerSetup
from cohort.common.messages import StartSegment
from cohort.common.policies import compose
from cohort.common.policies.interface import IterationPlan
from cohort.common.sequence import Sequence
from cohort.common.types import Attempt, Request, Role, SamplingParams, Segment
from cohort.kernels.cpu import native
from cohort.services.bench.engine.report import StepPart

_KERNELS: dict[StepPart, tuple[str, ...]] = {
    "products": ("panel_product", "panel_product_added", "panel_product_gated"),
    "attention": ("paged_attention",),
    "elementwise": ("rms_norm", "rope_inplace", "silu_mul", "write_kv"),
    "embedding": ("panel_rows",),
}


@dataclass(frozen=True, slots=True)
class Target:
    """A function: the attribute `name` of `owner`, whose time counts for `part`."""

    owner: Any
    name: str
    part: StepPart


class StepClock:
    def __init__(self) -> None:
        self.seconds: defaultdict[StepPart, float] = defaultdict(float)
        self._inside = 0.0  # of clocked functions inside the one that is running

    def wrap(self, part: StepPart, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            outer, self._inside = self._inside, 0.0
            begin_s = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                whole_s = time.perf_counter() - begin_s
                self.seconds[part] += whole_s - self._inside
                self._inside = outer + whole_s

        return timed


def engine_targets() -> list[Target]:
    """Return every target inside `ModelRunner.execute`; without kernels where they are not compiled."""
    targets = [
        Target(model_runner.ModelRunner, "execute", "dispatch"),
        Target(model_runner, "step_inputs", "inputs"),
        Target(model_runner, "sample", "sampling"),
    ]
    if (operators := native.operators()) is not None:
        targets += [Target(operators, name, part) for part, names in _KERNELS.items() for name in names]
    return targets


@contextmanager
def clocked(clock: StepClock, targets: Iterable[Target]) -> Iterator[None]:
    """Add the targets' time within to the clock. One thread only."""
    with ExitStack() as restoring:
        for target in targets:
            function = getattr(target.owner, target.name)
            restoring.callback(setattr, target.owner, target.name, function)
            setattr(target.owner, target.name, clock.wrap(target.part, function))
        yield


class InProcessEngine:
    def __init__(self, config: Config, runner: ModelRunner) -> None:
        capacity = capacity_of(config, Role.UNIFIED, runner, "in-process")
        self._runner = runner
        self._machine = WorkerMachine(
            WorkerSetup("in-process", 1, "", "manager", capacity, WorkerSettings((), 30.0, 30.0, 30.0, 256.0)),
            compose.iteration(config),
            compose.allocation(config, capacity.geometry, capacity.num_blocks, capacity.host_blocks),
            random.Random(0),
        )
        self._builder = BatchBuilder(self._machine.kv)
        self._submitted: list[WorkerEvent] = []
        self._next: IterationPlan | None = None

    @property
    def free_blocks(self) -> int:
        """Blocks of the cache that hold nothing."""
        return self._machine.stats(0).free_blocks

    def submit(self, request_id: str, prompt: list[int], output_tokens: int) -> None:
        """Submit a greedy request for the next decision: of the next `step`, unless that one is decided already."""
        self._submitted.append(Received("manager", start(request_id, prompt, output_tokens, "in-process")))

    def step(self) -> list[Sequence]:
        """Run one iteration; return the sequences that got a token."""
        if self._submitted:
            submitted, self._submitted = self._submitted, []
            self._feed(*submitted)
        plan, self._next = self._next, None
        if plan is None:
            return []
        batch, sampling = self._builder.build(plan)
        started = time.monotonic()
        output = self._runner.execute(batch)
        latency_s = time.monotonic() - started
        self._feed(StepEnded(_sampled(sampling, output), latency_s))
        return sampling

    def _feed(self, *events: WorkerEvent) -> None:
        """Handle events, and perform only the step of their effects: there is no peer to send anything to."""
        effects = self._machine.handle(time.monotonic(), *events)
        if effects and isinstance(effects[-1], StartStep):
            self._next = effects[-1].plan


def start(request_id: str, prompt: list[int], output_tokens: int, instance: str) -> StartSegment:
    """Return a manager's message to this one worker: a greedy request."""
    params = SamplingParams(max_tokens=output_tokens, temperature=0.0)
    request = Request(Attempt(request_id, 1), "gateway", prompt, len(prompt), params, time.time())
    return StartSegment(request, [Segment(0, None, instance)], 0, "")


def machine_targets() -> list[Target]:
    """Return the machine's part of a step, for a clock."""
    return [Target(WorkerMachine, "_plan", "plan"), Target(WorkerMachine, "_completed", "completed")]


def _sampled(sampling: list[Sequence], output: StepOutput) -> list[Sampled]:
    return [Sampled(sequence.key, token) for sequence, token in zip(sampling, output.tokens.tolist(), strict=True)]
