"""The cost of deciding one iteration on a worker: `cohort bench decisions iteration`.

Measures an `IterationScheduler` with its allocator as the worker machine uses them, without model or processes: so many
requests are on the worker all the time, half real-time, half best-effort; those that end are replaced. With `--slo`
all are real-time and name an SLO. Iterations take virtual time (`_STEP_S` and `_TOKEN_S` a token), so that deadlines
and the learned costs mean something. Prints the processor time of a decision, the collected copies included. One core.
"""

from __future__ import annotations

import argparse
import random
import time
from dataclasses import dataclass
from statistics import fmean, median

from cohort.common.config import load_config
from cohort.common.policies import compose
from cohort.common.policies.interface import IterationPlan, News, Ran
from cohort.common.policies.kv_interface import KvAllocator
from cohort.common.sequence import Sequence
from cohort.common.types import KvGeometry, Slo
from cohort.services.bench.decisions.placement import made_request
from cohort.services.bench.output import print_costs
from cohort.services.bench.rounds import no_collection

_STEP_S = 0.02
_TOKEN_S = 0.0001
_BLOCK = 16
_MOST_TOKENS = 2048


@dataclass(frozen=True, slots=True)
class DecisionCost:
    """Microseconds per decision over `decisions` of them; `rows` and `shared_blocks` are means."""

    preset: str
    queued: int
    blocks: int
    decisions: int
    rows: float
    shared_blocks: float
    median_us: float
    p99_us: float


class _Load:
    def __init__(self, preset: str, queued: int, blocks: int, seed: int, rows: int, slo: Slo | None) -> None:
        engine = {"max_rows": rows, "max_step_tokens": max(_MOST_TOKENS, 2 * rows)} if rows else {}
        config = load_config(preset=preset, overrides={"kv": {"prefix_caching": False}, "engine": engine})
        self._slo = slo
        self.scheduler = compose.iteration(config)
        geometry = KvGeometry(1, 1, 1, 1, _BLOCK)
        self.kv: KvAllocator = compose.allocation(config, geometry, blocks, blocks)
        self._random = random.Random(seed)
        self._serial = 0
        self._ran: Ran | None = None
        self.now_s = 0.0
        for _ in range(queued):
            self._arrive()

    def _arrive(self) -> None:
        draw = self._random
        self._serial += 1
        prompt = min(1000, max(4, int(draw.lognormvariate(5.0, 0.8))))
        most, traffic_class = draw.randint(16, 256), "rt" if self._slo or self._serial % 2 else "be"
        more = {"traffic_class": traffic_class, "slo": self._slo or Slo()}
        request = made_request(f"r{self._serial}", [0] * prompt, most, self.now_s, **more)
        predicted = float(draw.randint(16, 256))
        self.scheduler.add(
            self.now_s, Sequence(request, list(request.tokens), None, 0, self.now_s, predicted=predicted)
        )

    def decide(self) -> IterationPlan:
        plan = self.scheduler.decide(self.now_s, self.kv, News(self._ran))
        plan.copies = self.kv.take_copies()
        return plan

    def perform(self, plan: IterationPlan) -> None:
        latency_s = _STEP_S + _TOKEN_S * plan.tokens
        self.now_s += latency_s
        self._ran = Ran(plan, self.now_s, (latency_s,))
        for row in plan.rows:
            sequence = row.sequence
            sequence.computed = row.start + row.count
            self.kv.committed(sequence)
            if sequence.computed == sequence.known:
                sequence.tokens.append(1)
                sequence.last_token_s = self.now_s
                sequence.prefill_done_s = sequence.prefill_done_s or self.now_s
            if sequence.output_tokens >= sequence.request.sampling.max_tokens:
                self.scheduler.remove(self.now_s, sequence)
                self.kv.release(sequence.key)
                self._arrive()


def measure(
    preset: str, queued: int, blocks: int, decisions: int, *, rows: int = 0, slo: Slo | None = None, seed: int = 0
) -> DecisionCost:
    """Measure a worker that has so many requests `queued`. `rows`: of an iteration at most; 0 = the default."""
    load = _Load(preset, queued, blocks, seed, rows, slo)
    for _ in range(decisions // 4):
        load.perform(load.decide())
    seconds: list[float] = []
    planned: list[int] = []
    shared: list[float] = []
    with no_collection():
        for _ in range(decisions):
            started = time.thread_time()
            plan = load.decide()
            seconds.append(time.thread_time() - started)
            planned.append(len(plan.rows))
            shared.append(load.kv.metrics().get("shared_blocks", 0.0))
            load.perform(plan)
    seconds.sort()
    return DecisionCost(
        preset,
        queued,
        blocks,
        decisions,
        fmean(planned),
        fmean(shared),
        median(seconds) * 1e6,
        seconds[int(0.99 * len(seconds))] * 1e6,
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--preset", nargs="*", default=["cohort", "bros", "baseline-vllm", "baseline-round-robin"])
    parser.add_argument("--queued", nargs="*", type=int, default=[100, 1000], help="requests on the worker")
    parser.add_argument("--blocks", type=int, default=1500, help="KV blocks of 16 tokens on the device and on the host")
    parser.add_argument("--rows", type=int, default=0, help="`engine.max_rows` (default: the preset's)")
    parser.add_argument("--slo", nargs=2, type=float, metavar="S", help="TTFT and TPOT that every request names")
    parser.add_argument("--decisions", type=int, default=400, help="iterations measured, after a quarter as many")


def execute(options: argparse.Namespace) -> int:
    slo = Slo(*options.slo) if options.slo else None
    costs = [
        measure(preset, queued, options.blocks, options.decisions, rows=options.rows, slo=slo)
        for preset in options.preset
        for queued in options.queued
    ]
    columns = {
        "preset": "{0.preset}",
        "queued": "{0.queued:,}",
        "rows": "{0.rows:.0f}",
        "shared blocks": "{0.shared_blocks:.0f}",
        "µs/decision": "{0.median_us:.0f}",
        "p99": "{0.p99_us:.0f}",
    }
    print_costs(costs, columns, as_json=options.json)
    return 0
