"""The cost of placing one request beside those queued: `cohort bench decisions placement`.

D9: the split search as the manager uses it; or any preset's placement. So many requests, prompts and decodes, are
queued on so many instances; a request is placed, a share of the instances reports, the next one is placed, … Prints
microseconds of processor time per placement: what a report costs is in that of the placement that looks at it first.
One core, no processes, no model.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from cohort.common.config import load_config, nested, parse_yaml
from cohort.common.policies import compose
from cohort.common.policies.interface import ClusterView, InstanceView, WaitingRequest
from cohort.common.types import (
    Attempt,
    Prediction,
    QueuedWork,
    Request,
    Role,
    SamplingParams,
    Slo,
    StepTimes,
    WorkerCapacity,
    WorkerStats,
)
from cohort.services.bench.output import print_costs
from cohort.services.bench.rounds import no_collection

STEP_TIMES = StepTimes(1.3e-3, 1.06e-4, 1.3e-4, 0.022, 6e-9, 1.5e-7)
"""Times of about Qwen2.5-14B on an A100."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Microseconds of processor time per placement: time of other processes is not in it."""

    preset: str
    balance: str
    instances: int
    queued: int
    median_us: float
    p99_us: float
    worst_us: float
    splits: int


def measure(
    preset: str,
    balance: str,
    instances: int,
    queued: int,
    rounds: int,
    *,
    reporting: float = 0.5,
    settings: Sequence[str] = (),
    seed: int = 0,
) -> Cost:
    draw = random.Random(seed)
    options: dict[str, Any] = {"experiment.dynaserve.balance": balance}
    options |= {key: parse_yaml(value) for key, _, value in (text.partition("=") for text in settings)}
    placement = compose.placement(load_config(preset=preset, overrides=nested(options, "--set")))
    capacity = WorkerCapacity(Role.UNIFIED, "m", 32_768, 48, 8, 128, 2, 16, 100_000, 0, 256, 2048)
    views = {f"u{index}": InstanceView(f"u{index}", capacity) for index in range(instances)}
    for index, view in enumerate(views.values()):
        view.stats = _report(draw, view.instance, queued // instances + (index < queued % instances))
    cluster = ClusterView(views)
    taken: list[float] = []
    splits = 0
    with no_collection():
        for round_ in range(rounds):
            prompt, output = draw.randint(16, 8000), float(draw.randint(1, 1500))
            prediction = Prediction(output, output, output, output)
            tokens = draw.choices(range(32_000), k=prompt)
            request = made_request(f"r{round_}", tokens, 4096, 0.0, slo=Slo(2.0, 0.1), prediction=prediction)
            waiting = WaitingRequest(request, 0.0, prediction)
            started = time.thread_time()
            placed = placement.place(0.2 * round_, waiting, cluster, None)
            taken.append((time.thread_time() - started) * 1e6)
            splits += len(getattr(placed, "segments", ())) == 2
            placement.finished(0.2 * round_, request.request_id)
            for view in draw.sample(list(views.values()), max(1, round(reporting * instances))):
                view.stats = _report(draw, view.instance, queued // instances)
    settled = sorted(taken[len(taken) // 10 :])
    return Cost(
        preset, balance, instances, queued, median(settled), settled[int(0.99 * len(settled))], settled[-1], splits
    )


def made_request(name: str, tokens: Sequence[int], most: int, at_s: float, **more: Any) -> Request:
    """Return a request of at most `most` output tokens; `more`: further fields."""
    return Request(Attempt(name, 1), "gateway", tokens, len(tokens), SamplingParams(max_tokens=most), at_s, **more)


def _report(draw: random.Random, name: str, count: int) -> WorkerStats:
    """Return a loaded instance: a third of its requests still wait for their prompts."""
    queue = [
        QueuedWork(f"{name}-{index}", draw.randint(16, 4000), 0, draw.randint(1, 800))
        if draw.random() < 0.33
        else QueuedWork(f"{name}-{index}", 0, draw.randint(16, 4000), draw.randint(1, 800))
        for index in range(count)
    ]
    return WorkerStats(
        total_blocks=100_000,
        free_blocks=80_000,
        running=count,
        queue=queue,
        step_times=STEP_TIMES,
        queued_prefill_tokens=sum(work.prefill_left for work in queue),
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--preset", default="dynaserve", help="whose placement is measured (default: %(default)s)")
    parser.add_argument("--instances", nargs="*", type=int, default=[2, 16])
    parser.add_argument("--queued", nargs="*", type=int, default=[100, 1000], help="requests on all instances together")
    share = "of the instances that report between two requests (default: %(default)s)"
    parser.add_argument("--reporting", type=float, default=0.5, metavar="SHARE", help=share)
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.OPTION=VALUE", help="may repeat")
    parser.add_argument("--rounds", type=int, default=2000)


def execute(options: argparse.Namespace) -> int:
    costs = [
        measure(
            options.preset,
            balance,
            instances,
            queued,
            options.rounds,
            reporting=options.reporting,
            settings=options.set,
        )
        for balance in (("work", "end") if options.preset == "dynaserve" else ("work",))
        for instances in options.instances
        for queued in options.queued
    ]
    columns = {
        "preset": "{0.preset}",
        "balance": "{0.balance}",
        "instances": "{0.instances}",
        "queued": "{0.queued:,}",
        "µs/request": "{0.median_us:.0f}",
        "p99": "{0.p99_us:.0f}",
        "worst": "{0.worst_us:.0f}",
        "split": "{0.splits}",
    }
    print_costs(costs, columns, as_json=options.json)
    return 0
