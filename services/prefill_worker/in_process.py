"""The engine without the pipeline: scheduler, cache and model in one process, driven by a closed loop.

What remains when gateway, manager, wire and streams are taken away; `scripts/bench_overhead` compares it with the same
workload over HTTP. Same policies, same `WorkerMachine`, same `ModelRunner` as a worker; nothing of the network.

    python -m cohort.services.prefill_worker.in_process --config FILE --concurrency 4 --requests 32
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from cohort.common.config import Config, load_config
from cohort.common.engine.batch import StepOutput
from cohort.common.engine.batch_builder import build_batch
from cohort.common.engine.model_runner import ModelRunner
from cohort.common.engine.worker_process import capacity_of, load_runner
from cohort.common.machines.effects import StartStep
from cohort.common.machines.events import Received, Sampled, StepEnded, WorkerEvent
from cohort.common.machines.worker import WorkerMachine
from cohort.common.machines.worker_state import WorkerSettings, WorkerSetup
from cohort.common.messages import StartSegment
from cohort.common.policies import compose
from cohort.common.policies.interface import IterationPlan
from cohort.common.sequence import Sequence
from cohort.common.types import Attempt, Request, Role, SamplingParams, Segment

_FIRST_ID = 1000  # prompts are drawn from here up: ordinary tokens in every vocabulary we know


@dataclass(frozen=True, slots=True)
class LoopFigures:
    """One run. Times in seconds; `outside_engine` is the share of the wall time not spent in the forward."""

    requests: int
    concurrency: int
    output_tokens: int
    wall_s: float
    output_tokens_per_s: float
    ttft_p50_s: float
    tpot_p50_s: float
    outside_engine: float


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
        self._submitted: list[WorkerEvent] = []
        self._next: IterationPlan | None = None
        self.engine_s = 0.0

    @property
    def free_blocks(self) -> int:
        """Of the cache, that nothing is kept in."""
        return self._machine.figures(0).free_blocks

    def submit(self, request_id: str, prompt: list[int], output_tokens: int) -> None:
        """It is scheduled with the next decision: of the next `step`, unless that one has been decided already."""
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
        batch, sampling = build_batch(plan, self._machine.kv)
        started = time.monotonic()
        output = self._runner.execute(batch)
        latency_s = time.monotonic() - started
        self.engine_s += latency_s
        self._tell(StepEnded(_sampled(sampling, output), latency_s))
        return sampling

    def _tell(self, *events: WorkerEvent) -> None:
        """Of the machine's effects only the step is performed: there is no peer to send anything to."""
        effects = self._machine.handle(time.monotonic(), *events)
        if effects and isinstance(effects[-1], StartStep):
            self._next = effects[-1].plan


def closed_loop(
    config: Config,
    runner: ModelRunner,
    *,
    concurrency: int,
    requests: int,
    prompt_tokens: int,
    output_tokens: int,
    seed: int,
) -> LoopFigures:
    """`concurrency` requests at a time, the next as soon as one ends."""
    engine = InProcessEngine(config, runner)
    draw = random.Random(seed)
    highest = runner.geometry.vocab_size - 1
    prompts = [[draw.randint(min(_FIRST_ID, highest), highest) for _ in range(prompt_tokens)] for _ in range(requests)]
    submitted: dict[str, float] = {}
    first: dict[str, float] = {}
    last: dict[str, float] = {}
    waiting = iter(range(requests))

    def submit_next() -> None:
        for index in waiting:
            name = str(index)
            submitted[name] = time.monotonic()
            engine.submit(name, prompts[index], output_tokens)
            return

    started = time.monotonic()
    for _ in range(concurrency):
        submit_next()
    while len(last) < requests:
        for sequence in engine.step():
            now, name = time.monotonic(), sequence.request_id
            first.setdefault(name, now)
            if sequence.output_tokens >= output_tokens:
                last[name] = now
                submit_next()
    wall_s = time.monotonic() - started
    return LoopFigures(
        requests=requests,
        concurrency=concurrency,
        output_tokens=requests * output_tokens,
        wall_s=wall_s,
        output_tokens_per_s=requests * output_tokens / wall_s,
        ttft_p50_s=statistics.median(first[name] - submitted[name] for name in first),
        tpot_p50_s=statistics.median((last[n] - first[n]) / max(1, output_tokens - 1) for n in last),
        outside_engine=1 - engine.engine_s / wall_s,
    )


def _sampled(sampling: list[Sequence], output: StepOutput) -> list[Sampled]:
    return [Sampled(sequence.key, token) for sequence, token in zip(sampling, output.tokens.tolist(), strict=True)]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--config", type=Path, action="append", default=[], help="configuration file, repeatable")
    parser.add_argument("--preset", default="", help="a preset of configs/presets")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0 = all cores")
    parser.add_argument("--concurrency", type=int, default=1, help="requests at a time")
    parser.add_argument("--requests", type=int, default=16, help="requests in all, after one warm-up request")
    parser.add_argument("--input-len", type=int, default=64, help="prompt tokens")
    parser.add_argument("--output-len", type=int, default=64, help="output tokens")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts")
    options = parser.parse_args()
    config = load_config(options.config, preset=options.preset)
    runner = load_runner(config, options.threads or len(os.sched_getaffinity(0)))
    runner.warm_up()
    shape = {"prompt_tokens": options.input_len, "output_tokens": options.output_len}
    closed_loop(config, runner, concurrency=1, requests=1, seed=options.seed + 1, **shape)
    figures = closed_loop(
        config, runner, concurrency=options.concurrency, requests=options.requests, seed=options.seed, **shape
    )
    json.dump(asdict(figures), sys.stdout, indent=2)
    print()
    return 0


if __name__ == "__main__":
    sys.exit(main())
