"""The bound is above every set of requests that fits, and above what any system keeps."""

from __future__ import annotations

import itertools
from dataclasses import replace
from random import Random

import numpy as np
import pytest

pytest.importorskip("scipy")

from cohort.common.policies.cost_model import CostModel, StepWork, prefill_pairs
from cohort.common.types import Slo
from cohort.common.workloads.items import WorkItem, Workload
from cohort.services.simulator.bound.least_work import Instance, Prices, jobs, new_tokens
from cohort.services.simulator.bound.relaxation import Resource, most_fitting
from cohort.services.simulator.core.cluster import SimCluster, cost_model
from cohort.services.simulator.core.kept import Waits, at_most
from cohort.services.simulator.core.sim_options import SimOptions
from cohort.services.simulator.hardware.hardware import load_cluster, load_model
from tests.services.simulator.lab import MODEL, cluster, config

Job = tuple[float, float, float]
"""Work, begin, end."""


def in_time(jobs_: list[Job]) -> bool:
    """Whether one machine does these in time: earliest end first, interrupted at will, which is optimal."""
    pending = sorted(jobs_, key=lambda job: job[1])
    open_: list[list[float]] = []
    now = 0.0
    while pending or open_:
        if not open_:
            now = max(now, pending[0][1])
        while pending and pending[0][1] <= now:
            work, _, end = pending.pop(0)
            open_.append([end, work])
        open_.sort()
        until = min(pending[0][1] if pending else float("inf"), now + open_[0][1])
        open_[0][1] -= until - now
        now = until
        if open_[0][1] <= 1e-12 and now > open_.pop(0)[0] + 1e-9:
            return False
    return True


@pytest.mark.parametrize("seed", range(40))
def test_no_set_of_requests_that_fits_is_larger(seed: int):
    random = Random(seed)
    requests = [_random_jobs(random) for _ in range(random.randint(1, 8))]
    largest = max(
        len(chosen)
        for size in range(len(requests) + 1)
        for chosen in itertools.combinations(requests, size)
        if in_time([job for each in chosen for job in each])
    )
    fitting = most_fitting(len(requests), [_resource(requests)])
    assert largest <= fitting.most + 1e-6
    assert fitting.most < largest + 1.5, "a fraction of two requests at most"
    assert fitting.shares.sum() == pytest.approx(fitting.most, abs=1e-3)


def _random_jobs(random: Random) -> list[Job]:
    begin = random.uniform(0, 6)
    first, second = random.uniform(0.2, 2), random.uniform(0.2, 2)
    due = begin + first + random.uniform(0, 2)
    return [(first, begin, due), (second, begin + first, due + second + random.uniform(0, 2))]


def _resource(requests: list[list[Job]], capacity: float = 1.0) -> Resource:
    rows = [(number, *job) for number, of in enumerate(requests) for job in of]
    owner, work, begin, end = zip(*rows, strict=True)
    return Resource(capacity, np.array(owner), np.array(work), np.array(begin), np.array(end))


def test_two_machines_fit_twice_as_many():
    requests = [[(1.0, 0.0, 2.0)] for _ in range(6)]
    assert most_fitting(6, [_resource(requests)]).most == pytest.approx(2.0)
    assert most_fitting(6, [_resource(requests, 2.0)]).most == pytest.approx(4.0)
    assert most_fitting(6, []).most == 6.0


@pytest.mark.parametrize("device", ["a100-80", "h100-80", "cpu-core"])
@pytest.mark.parametrize("name", ["qwen2.5-14b", "qwen3-30b-a3b"])
def test_no_iteration_is_cheaper_than_its_rows(device: str, name: str):
    cost: CostModel = cost_model(load_model(name), load_cluster(f"{device}:1"))
    prices, random = Prices.of(cost), Random(3)
    assert prices.step_s <= cost.step_s(StepWork(1, 1, 1, 0, 0, 1, 1, 1))
    for _ in range(400):
        prompt, rows, context = random.randint(0, 6000), random.randint(0, 512), random.randint(1, 8000)
        if not prompt + rows:
            continue
        pairs, sampled = prefill_pairs(0, prompt) if prompt > 1 else 0, rows + (prompt > 1)
        decodes = rows + (prompt == 1)
        work = StepWork(prompt + rows, rows + (prompt > 0), sampled, pairs, prompt, decodes, decodes * context, context)
        parts = prices.token_s * work.tokens + prices.sample_s * sampled + prices.pair_s * pairs
        assert parts + prices.position_s * work.decode_context <= cost.step_s(work) * (1 + 1e-9)


def test_unlike_instances_count_by_their_speed():
    fast, slow = (Prices.of(cost_model(MODEL, load_cluster(f"{name}:1"))) for name in ("h100-80", "a100-80"))
    assert slow.slower(fast) > 1.0 > fast.slower(slow)
    items = [WorkItem(0.0, 500, 2, slo=Slo(1.0, 0.1))]
    capacity = jobs(items, [500], [Instance(slow, 0), Instance(fast, 0)], longest=2048, horizon_s=9.0)[1][0].capacity
    assert capacity == pytest.approx(1.0 + 1.0 / fast.slower(slow)) and capacity > 2.0


def test_prompts_count_what_nobody_had_before():
    first = WorkItem(0.0, 40, 1, hash_ids=(1, 2, 3), hash_block=16)
    items = [first, replace(first, hash_ids=(1, 2, 4)), first, WorkItem(0.0, 9, 1, session="a")]
    items += [WorkItem(0.0, 30, 1, session="a"), WorkItem(0.0, 7, 1)]
    assert new_tokens(items) == [40, 8, 1, 9, 21, 7]


@pytest.mark.parametrize("preset", ["cohort", "unified", "bros", "dynaserve", "ecoserve", "baseline-vllm"])
@pytest.mark.parametrize("seed", range(2))
def test_no_system_keeps_more(preset: str, seed: int):
    random = Random(seed)
    items = tuple(
        WorkItem(
            random.uniform(0, 0.3),
            length := random.randint(200, 1900),
            random.randint(1, 40),
            slo=Slo(random.choice([0.02, 0.1, 0.5]), random.choice([0.005, 0.05])),
            session="a" if length < 500 else "",
        )
        for _ in range(90)
    )
    workload = Workload("random", tuple(sorted(items, key=lambda item: item.arrival_s)))
    chosen = config(preset)
    sim = SimCluster(chosen, cluster(2), load_model("opt-2.7b"), workload, SimOptions(seed=seed, horizon_s=20.0))
    waits = Waits(sim, lambda item: True)
    found = at_most(sim, workload, waits.judges)
    sim.run()
    waits.close()
    assert found is not None and len(waits.ended) == len(items)
    kept = [item for item, kept in waits.ended if kept]
    assert len(kept) <= found.requests + 1e-6 < len(items)
    assert len(found.left_out) == pytest.approx(len(items) - found.requests, abs=10), "most shares are 0 or 1"
    assert all(sum(of[1] for of in groups.values()) == len(items) for groups in waits.groups().values())


def test_iterations_that_scatter_have_no_bound():
    workload = Workload("one", (WorkItem(0.0, 20, 5, slo=Slo(1.0, 1.0)),))
    sim = SimCluster(config(), cluster(1), MODEL, workload, SimOptions(scatter=0.1))
    assert at_most(sim, workload, lambda item: True) is None
