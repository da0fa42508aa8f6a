"""Digests of what simulations decide: one line a preset and load, the same before and after a change that is to leave
all decisions as they are. `python -m tests.services.simulator.digests > before`, and again afterwards: the files are
equal.

`records` covers, exactly, when every token of every request reached the gateway, the order in which requests ended,
and every instance's counters. `report` covers the whole report but for measured time, with twelve digits of every
number: how sums of times are grouped may change their last one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from random import Random
from typing import Any

import msgspec

from cohort.common.types import Slo
from cohort.common.workloads.items import WorkItem, Workload
from cohort.services.simulator.core.report import make_report
from cohort.services.simulator.core.setup import preset_names
from cohort.services.simulator.core.sim_options import SimOptions
from tests.services.simulator.lab import MODEL, Recorded, cache_of, cluster, config

INSTANCES = 4


def loads() -> Iterator[tuple[str, Workload, dict[str, Any]]]:
    """Name, requests and `kv` section: a cache that never fills, one that preempts and keeps KV transfers waiting, and
    prompts with common prefixes."""
    for name, rate, blocks in (("free", 60.0, 4000), ("tight", 600.0, 160)):
        random, now_s = Random(7), 0.0
        items = []
        for _ in range(150):
            now_s += random.expovariate(rate)
            prompt, output = min(900, int(random.lognormvariate(4.6, 1.0)) + 1), random.randint(1, 180)
            slo = Slo(ttft_s=0.2, tpot_s=0.004) if random.random() < 0.5 else Slo()
            items.append(WorkItem(now_s, prompt, output, slo=slo, traffic_class=random.choice(("rt", "be"))))
        yield name, Workload(name, tuple(items)), cache_of(blocks)
    shared = [WorkItem(0.01 * i, 200, 60, hash_ids=(i % 3, 7 + i % 5), hash_block=64) for i in range(60)]
    yield "shared", Workload("shared", tuple(shared)), cache_of(300)


def rounded(value: Any) -> Any:
    match value:
        case float():
            return float(f"{value:.12g}")
        case dict():
            return {key: rounded(entry) for key, entry in value.items()}
        case list():
            return [rounded(entry) for entry in value]
        case _:
            return value


def digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def digests() -> Iterator[str]:
    for preset in preset_names():
        for name, workload, kv in loads():
            sim = Recorded(config(preset, kv=kv), cluster(INSTANCES), MODEL, workload, SimOptions(horizon_s=60.0))
            sim.run()
            times = {request: [time.hex() for time in each] for request, each in sim.token_times.items()}
            counters = [msgspec.to_builtins(worker.machine.counters) for worker in sim.workers]
            for each in counters:
                each.pop("exposed_transfer_s", None)
                assert not each.pop("late_rows", 0), "simulated requests have no grammars"
            report = msgspec.to_builtins(make_report(sim, name, workload.facts))
            del report["measured"]
            tokens = sum(map(len, times.values()))
            records = digest([times, sim.ended, counters])
            yield f"{preset:22s} {name:7s} {tokens:6d} tokens  records {records}  report {digest(rounded(report))}"


if __name__ == "__main__":
    for line in digests():
        print(line, flush=True)
