"""One worker in virtual time: the preset's own machine, scheduler and cache, and a clock of the costs of two cores.

Used by `test_neighbours.py`. A step takes what the simulator's cost model says for the default model on a CPU
(configs/devices/cpu-2core.yaml), and what scores take besides, which no cost model knows: for each position of a scored
prompt and each row with log-probabilities, the head of the model and the selection among its logits. Masks take what
their grammar names (`virtual_masks.py`). Nothing here depends on the machine that runs it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from random import Random

import numpy as np

from cohort.common.config import Config
from cohort.common.engine.step.grammar_masks import TokenMasks
from cohort.common.machines.effects import Send
from cohort.common.machines.events import PromptScores, Received, Sampled, StepEnded
from cohort.common.machines.worker.worker import WorkerMachine
from cohort.common.machines.worker.worker_state import WorkerSettings, WorkerSetup
from cohort.common.messages import StartSegment, TokenBatch, TokenLogprob
from cohort.common.policies import compose
from cohort.common.policies.cost_model import CostModel
from cohort.common.policies.interface import IterationPlan
from cohort.common.types import Attempt, Request, Role, SamplingParams, Segment, Slo, WorkerCapacity
from cohort.services.simulator.core.cluster import profile_points
from cohort.services.simulator.core.engine import plan_cost
from cohort.services.simulator.hardware.hardware import load_cluster, load_model
from tests.support.virtual_masks import VirtualMasks

MODEL = "smollm2-135m"
DEVICE = "cpu-2core"
CACHE_BLOCKS = 4096
SCORED_POSITION_S = 0.4e-3
"""Beyond the forward itself: the head, its log-softmax and the twenty likeliest of 49,152 logits, on two cores."""

PLAIN_PROMPT, PLAIN_TOKENS = 12, 24
NO_MASKS = TokenMasks(np.zeros((0, 0), np.int32))


def request(
    name: str,
    prompt: list[int],
    *,
    max_tokens: int,
    at_s: float,
    config: Config,
    traffic_class: str = "rt",
    prompt_logprobs: int = -1,
    logprobs: int = -1,
    choices: int = 1,
) -> StartSegment:
    """As the gateway gives it to a worker, with the class's default SLO."""
    gateway = config.gateway
    real_time = traffic_class == "rt"
    slo = Slo(ttft_s=gateway.rt_ttft_slo_s, tpot_s=gateway.rt_tpot_slo_s) if real_time else Slo()
    sampling = SamplingParams(max_tokens=max_tokens, prompt_logprobs=prompt_logprobs, logprobs=logprobs)
    asked = Request(
        Attempt(name, 0),
        "gateway",
        prompt,
        len(prompt),
        sampling,
        at_s,
        traffic_class="rt" if real_time else "be",
        slo=slo,
        choices=choices,
    )
    return StartSegment(asked, [Segment(0, None, "w")], 0, "ipc://gateway")


def choices(name: str, prompt: list[int], n: int, *, scored: bool = False, **options: object) -> list[StartSegment]:
    """Of one request: the first choice scores the prompt for all (`preparation.py`)."""
    return [
        request(
            f"{name}-{index}",
            prompt,
            prompt_logprobs=20 if scored and index == 0 else -1,
            choices=n,
            **options,  # type: ignore[arg-type]
        )
        for index in range(n)
    ]


@dataclass
class Run:
    """What happened to each request: when it came, when its tokens were there."""

    came_s: dict[str, float] = field(default_factory=dict)
    tokens_s: dict[str, list[float]] = field(default_factory=dict)
    steps_s: list[float] = field(default_factory=list)
    computed: list[tuple[float, int]] = field(default_factory=list)
    """Of each step, when it ended and the tokens of all its rows."""
    prompt_tokens: dict[str, int] = field(default_factory=dict)
    """Positions computed of each prompt; more than it has if some were computed twice."""

    def first_s(self, name: str) -> float:
        return self.tokens_s[name][0] - self.came_s[name]

    def longest_gap_s(self, name: str) -> float:
        times = self.tokens_s[name]
        return max((after - before for before, after in pairwise(times)), default=0.0)

    def work_between(self, name: str) -> list[int]:
        """Return the tokens that were computed for anybody from its arrival to its first token, from then to its
        second, and so on."""
        times = [self.came_s[name], *self.tokens_s[name]]
        return [sum(count for at_s, count in self.computed if a < at_s <= b) for a, b in pairwise(times)]


class VirtualWorker:
    """`learned`: the scheduler starts from a profile of this machine, as after its first minutes. `slowness`: how many
    times as long as the profile says its steps take, as beside other programs."""

    def __init__(self, config: Config, *, learned: bool = True, slowness: float = 1.0) -> None:
        self._slowness = slowness
        model, cluster = load_model(MODEL), load_cluster(DEVICE)
        self._cost = CostModel(model, cluster.device, cluster.stack)
        self._geometry = model.kv_geometry(config.kv.block_size)
        engine = config.engine
        self.scheduler = compose.iteration(config)
        if learned and self.scheduler.learned is not None:
            points = profile_points(self._cost, model.max_positions, engine.max_rows, engine.max_step_tokens)
            self.scheduler.learned.import_state(points)
        capacity = WorkerCapacity(
            Role.UNIFIED,
            model.name,
            model.max_positions,
            self._geometry.num_layers,
            self._geometry.num_kv_heads,
            self._geometry.head_dim,
            self._geometry.dtype_bytes,
            self._geometry.block_size,
            CACHE_BLOCKS,
            0,
            engine.max_rows,
            engine.max_step_tokens,
        )
        self.machine = WorkerMachine(
            WorkerSetup("w", 1, "", "manager", capacity, WorkerSettings.of(config, ())),
            self.scheduler,
            compose.allocation(config, self._geometry, CACHE_BLOCKS, 0),
            Random(0),
        )
        self.masks = VirtualMasks()
        self._step: tuple[float, TokenMasks] = 0.0, NO_MASKS
        """Duration and masks of the step in flight."""

    def run(self, arrivals: list[tuple[float, list[StartSegment]]], *, until: str) -> Run:
        """Until every request whose name begins with `until` has all its tokens."""
        run, now_s = Run(), 0.0
        coming = sorted(arrivals, key=lambda arrival: arrival[0])
        left = {s.request.attempt.request_id for _, segments in coming for s in segments}
        left = {name for name in left if name.startswith(until)}
        wanted = {s.request.attempt.request_id: s.request.sampling.max_tokens for _, ss in coming for s in ss}
        ends_s = float("inf")
        while left:
            if coming and (coming[0][0] < ends_s):
                at_s, segments = coming.pop(0)
                now_s = max(now_s, at_s)
                for segment in segments:
                    run.came_s[segment.request.attempt.request_id] = at_s
                effects = self.machine.handle(now_s, *(Received("manager", segment) for segment in segments))
            else:
                assert ends_s < float("inf"), f"nothing runs, and {sorted(left)[:4]} wait"
                now_s = ends_s
                run.computed.append((now_s, sum(row.count for row in self.machine.plan_in_flight.rows)))
                effects = self.machine.handle(now_s, self._ended(run))
            for effect in effects:
                if isinstance(effect, Send) and isinstance(effect.message, TokenBatch):
                    for update in effect.message.updates:
                        times = run.tokens_s.setdefault(update.attempt.request_id, [])
                        times += [now_s] * len(update.tokens)
            left = {name for name in left if len(run.tokens_s.get(name, ())) < wanted[name]}
            if self.machine.state.in_flight is None:
                ends_s = float("inf")
            elif now_s >= ends_s or ends_s == float("inf"):
                self._step = self._begin(self.machine.plan_in_flight)
                ends_s = now_s + self._step[0]
        return run

    def _begin(self, plan: IterationPlan) -> tuple[float, TokenMasks]:
        scored = sum(row.count for row in plan.rows if row.sequence.scores_prompt)
        scored += sum(row.count == 1 and row.sequence.request.sampling.logprobs >= 0 for row in plan.rows)
        forward_s = self._cost.step_s(plan_cost(plan, self._geometry).work) + scored * SCORED_POSITION_S
        forward_s *= self._slowness
        if not plan.has_grammars:
            return forward_s, NO_MASKS
        masks, more_s = self.masks.step(plan, forward_s)
        return forward_s + more_s, masks

    def _ended(self, run: Run) -> StepEnded:
        plan, (seconds, masks) = self.machine.plan_in_flight, self._step
        sampled, scores, late, yields = [], [], [], 0
        for row in plan.rows:
            sequence = row.sequence
            name = sequence.request_id
            if row.start < sequence.request.prompt_tokens:
                run.prompt_tokens[name] = run.prompt_tokens.get(name, 0) + row.count
            if sequence.scores_prompt:
                end = min(row.start + row.count, sequence.request.prompt_tokens - 1)
                scores.append(PromptScores(sequence.key, row.start, [TokenLogprob(-1.0)] * (end - row.start)))
            if row.start + row.count == sequence.known:
                if yields in masks.late:
                    late.append(sequence.key)
                else:
                    sampled.append(Sampled(sequence.key, 7, failure=masks.failures.get(yields, "")))
                yields += 1
        run.steps_s.append(seconds)
        return StepEnded(sampled, seconds, scores, late=late)
