"""The engine without the pipeline: scheduler, cache and model in one process; no gateway, manager, wire or streams.

Same policies, same `WorkerMachine`, same `ModelRunner` as a worker; nothing of the network. All of the measuring wing's
uses of the machine are here.
"""

from __future__ import annotations

import random
import time

from cohort.common.config import Config
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
from cohort.services.bench.engine.inside.clocks import Target


class InProcessEngine:
    """One unified worker's inside."""

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
        """Of the cache, that nothing is kept in."""
        return self._machine.stats(0).free_blocks

    def submit(self, request_id: str, prompt: list[int], output_tokens: int) -> None:
        """Greedy. It is scheduled with the next decision: of the next `step`, unless that one has been decided
        already."""
        request = Request(
            Attempt(request_id, 1),
            "gateway",
            prompt,
            len(prompt),
            SamplingParams(max_tokens=output_tokens, temperature=0.0),
            time.time(),
        )
        self._submitted.append(Received("manager", StartSegment(request, [Segment(0, None, "in-process")], 0, "")))

    def step(self) -> list[Sequence]:
        """One iteration; the sequences that got a token."""
        if self._submitted:
            submitted, self._submitted = self._submitted, []
            self._tell(*submitted)
        plan, self._next = self._next, None
        if plan is None:
            return []
        batch, sampling = self._builder.build(plan)
        started = time.monotonic()
        output = self._runner.execute(batch)
        latency_s = time.monotonic() - started
        self._tell(StepEnded(_sampled(sampling, output), latency_s))
        return sampling

    def _tell(self, *events: WorkerEvent) -> None:
        """Of the machine's effects only the step is performed: there is no peer to send anything to."""
        effects = self._machine.handle(time.monotonic(), *events)
        if effects and isinstance(effects[-1], StartStep):
            self._next = effects[-1].plan


def machine_targets() -> list[Target]:
    """The machine's part of a step, for a clock."""
    return [Target(WorkerMachine, "_plan", "plan"), Target(WorkerMachine, "_completed", "completed")]


def _sampled(sampling: list[Sequence], output: StepOutput) -> list[Sampled]:
    return [Sampled(sequence.key, token) for sequence, token in zip(sampling, output.tokens.tolist(), strict=True)]
