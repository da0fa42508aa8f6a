"""The time of scheduling one request, at any length of queue: `cohort bench decisions prefill-order`.

Measures a `PrefillOrder` as the manager uses it: every arrival is one `add` and one `decide`, every report one more
`decide`; the queue is kept at a fixed length. Prints microseconds per request over queue lengths and over bucket counts
(B11: the cost grows with neither). One core, no processes, no model.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from cohort.common.config import load_config
from cohort.common.policies import compose
from cohort.common.policies.interface import ClusterView, InstanceView, PrefillOrder, WaitingRequest
from cohort.common.types import Prediction, Role, WorkerCapacity, WorkerStats
from cohort.services.bench.decisions.placement import made_request
from cohort.services.bench.output import print_costs
from cohort.services.bench.rounds import no_collection

_LIMIT = 8192
_REPORT_EVERY = 8
"""Requests served between two reports of the workers."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Microseconds per request: median and 99th percentile over rounds of `_REPORT_EVERY` requests."""

    order: str
    waiting: int
    buckets: int
    median_us: float
    p99_us: float
    add_us: float
    """Share of `add` alone."""


def measure(order: PrefillOrder, name: str, waiting: int, rounds: int, seed: int = 0) -> Cost:
    """Measure a steady state of `waiting` requests: as many arrive as leave."""
    draw = random.Random(seed)
    serial = 0

    def arrival(now_s: float) -> WaitingRequest:
        nonlocal serial
        serial += 1
        prompt = min(_LIMIT - 300, max(1, int(draw.lognormvariate(5.0, 1.2))))
        output = min(256.0, draw.lognormvariate(4.5, 0.8))
        prediction = Prediction(output, output, 2 * output, 4 * output)
        online, priority = draw.random() < 0.8, draw.choice((0, 0, 0, 1))
        more = {"online": online, "priority": priority, "prediction": prediction}
        request = made_request(f"r{serial}", [0] * prompt, 256, now_s, **more)
        return WaitingRequest(request, now_s, prediction)

    now_s = 0.0
    for _ in range(waiting):
        order.add(now_s, arrival(now_s))
        now_s += 0.001
    busy, roomy = _cluster(queued=1 << 20), _cluster(queued=0)
    served: list[float] = []
    adding: list[float] = []
    with no_collection():
        for round_ in range(rounds + rounds // 10):
            arrivals = [arrival(now_s + 0.001 * index) for index in range(_REPORT_EVERY)]
            add_s = busy_s = roomy_s = 0.0
            for request in arrivals:
                now_s += 0.001
                started = time.perf_counter()
                order.add(now_s, request)
                added = time.perf_counter()
                order.decide(now_s, busy)
                busy_s += time.perf_counter() - added
                add_s += added - started
            dispatched = 0
            while len(order) > waiting:
                now_s += 3.0  # former promises are over: memory is as free as the reports say
                roomy = _cluster(queued=0)
                started = time.perf_counter()
                dispatches = order.decide(now_s, roomy)
                roomy_s += time.perf_counter() - started
                dispatched += sum(len(dispatch.request_ids) for dispatch in dispatches)
                if not dispatches:
                    raise RuntimeError(f"{name} dispatches nothing to an idle cluster")
            for _ in range(max(0, waiting - len(order))):  # a batch may take more than came
                order.add(now_s, arrival(now_s))
            if round_ >= rounds // 10:
                served.append(((add_s + busy_s) / _REPORT_EVERY + roomy_s / max(1, dispatched)) * 1e6)
                adding.append(add_s / _REPORT_EVERY * 1e6)
    served.sort()
    return Cost(
        name,
        waiting,
        int(order.metrics().get("buckets", 1)),
        median(served),
        served[int(0.99 * len(served))],
        median(adding),
    )


def _cluster(queued: int) -> ClusterView:
    """Return two prefill and two decode workers that have just reported."""

    def view(name: str, role: Role, queued: int) -> InstanceView:
        capacity = WorkerCapacity(role, "m", _LIMIT, 32, 8, 128, 2, 16, 4096, 0, 256, 2048)
        stats = WorkerStats(total_blocks=4096, free_blocks=4096, queued_prefill_tokens=queued)
        return InstanceView(name, capacity, stats)

    roles = (("p0", Role.PREFILL), ("p1", Role.PREFILL), ("d0", Role.DECODE), ("d1", Role.DECODE))
    return ClusterView({name: view(name, role, queued if role.prefills else 0) for name, role in roles})


def run(presets: Sequence[str], lengths: Sequence[int], buckets: Sequence[int], rounds: int) -> list[Cost]:
    costs = []
    for preset in presets:
        for waiting in lengths:
            config = load_config(preset=preset)
            costs.append(measure(compose.prefill_order(config), preset, waiting, rounds))
    for most in buckets:
        options = {
            "policies": {"prefill_order": "buckets"},
            "experiment": {"bucketserve": {"max_batch": 8, "max_buckets": most}},
        }
        order = compose.prefill_order(load_config(overrides=options))
        costs.append(measure(order, f"buckets, at most {most}", 10_000, rounds))
    return costs


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--preset", nargs="*", default=["bucketserve"], help="presets whose prefill order is measured")
    parser.add_argument("--waiting", nargs="*", type=int, default=[10, 1000, 100_000], help="queue lengths")
    parser.add_argument("--buckets", nargs="*", type=int, default=[1, 4, 16, 64], help="bounds on the bucket count")
    parser.add_argument("--rounds", type=int, default=500, help=f"of {_REPORT_EVERY} requests each")


def execute(options: argparse.Namespace) -> int:
    costs = run(options.preset, options.waiting, options.buckets, options.rounds)
    columns = {
        "order": "{0.order}",
        "waiting": "{0.waiting:,}",
        "buckets": "{0.buckets}",
        "µs/request": "{0.median_us:.1f}",
        "p99": "{0.p99_us:.1f}",
        "of it add": "{0.add_us:.1f}",
    }
    print_costs(costs, columns, as_json=options.json)
    return 0
