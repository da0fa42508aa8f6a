"""Capacity: its search, against a deterministic queue, what a burst is worth, and what no peak allows."""

from __future__ import annotations

import heapq
import math
from dataclasses import replace
from typing import Any

import pytest

from cohort.common.policies.cost_model import StepWork, prefill_pairs
from cohort.common.types import Slo
from cohort.common.workloads.items import WorkItem
from cohort.services.simulator.core.capacity import MEAN_TIMES, WINDOW_S, Load, Point, find_capacity
from cohort.services.simulator.core.cluster import cost_model
from cohort.services.simulator.core.roofline import BeyondRoofline, check, peaks, roofline
from cohort.services.simulator.core.sim_options import SimOptions
from cohort.services.simulator.core.traffic import Traffic
from cohort.services.simulator.hardware.hardware import load_model
from tests.services.simulator import lab
from tests.support.kinds import by_default


def traffic(text: str, slo: Slo, **more: Any) -> Traffic:
    given = {"count": None, "duration_s": None, "time_scale": 1.0, "cv": 1.0, "seed": 3, "best_effort": 0.0}
    return Traffic(text, slo=slo, **given | more)  # type: ignore[arg-type]


@pytest.mark.parametrize("start", [0.3, 6.9, 7.1, 300.0])
def test_the_capacity_is_found_from_any_start(start: float):
    found = find_capacity(lambda rate: Point(rate, 1.0 if rate <= 7.0 else 0.5), start, 0.9)
    assert 7.0 * 0.95 <= found.rate_per_s <= 7.0


def test_no_capacity_is_zero():
    assert find_capacity(lambda rate: Point(rate, 0.0), 4.0, 0.9).rate_per_s == 0.0


def test_what_is_not_served_does_not_hold():
    found = find_capacity(lambda rate: Point(rate, 1.0, served=min(1.0, 7.0 / rate)), 4.0, 0.9)
    assert 7.0 * 0.95 <= found.rate_per_s <= 7.0 / 0.97


# -- a queue of deterministic servers -----------------------------------------------------------------------------


PACE = 100.0
"""Slowness with which a request takes about a second, and messages nearly none of it."""
WITHIN = 3.0
"""Times its own service within which a request is wanted."""


def server(count: int, pace: float = PACE) -> tuple[Load, float]:
    """Return instances of one row each, and the seconds that their requests take."""
    config, cluster = lab.config("unified", engine={"max_rows": 1}), lab.cluster(count, pace=pace)
    service_s = lab.run(config, cluster, lab.workload((0.0, 64, 8))).clients.all.jct.max_s
    slo = Slo(deadline_s=WITHIN * service_s)
    return Load(config, cluster, lab.MODEL, traffic("64x8", slo), SimOptions()), service_s


def brute_force(load: Load, service_s: float, rate: float, count: int) -> Point:
    """Serve the same arrivals first come first served."""
    window_s = max(WINDOW_S, 200 / rate)
    items = load.traffic.lasting(1.4 * window_s).workload(rate).items
    free_s = [0.0] * count
    kept = []
    for item in items:
        end_s = max(item.arrival_s, heapq.heappop(free_s)) + service_s
        heapq.heappush(free_s, end_s)
        if 0.15 * window_s <= item.arrival_s < 1.15 * window_s:
            kept.append(end_s - item.arrival_s <= WITHIN * service_s)
    return Point(rate, sum(kept) / len(kept))


def waits_at_most(services: float, load: float) -> float:
    """Erlang 1909 · P(W ≤ t) = (1 - ρ) Σ_k (λ(kD - t))^k / k! · exp(-λ(kD - t)), k ≤ t / D, of M/D/1; t in D."""
    terms = [load * (k - services) for k in range(int(services) + 1)]
    return (1.0 - load) * sum(u**k / math.factorial(k) * math.exp(-u) for k, u in enumerate(terms))


@pytest.mark.parametrize("count", by_default([1, 2], 1))
def test_the_capacity_is_that_of_a_queue_of_deterministic_servers(count: int):
    load, service_s = server(count)
    start = 0.7 * count / service_s
    found = load.capacity(start, 0.9)
    expected = find_capacity(lambda rate: brute_force(load, service_s, rate, count), start, 0.9)
    assert found.rate_per_s == pytest.approx(expected.rate_per_s, rel=0.05)
    if count == 1:
        known = find_capacity(lambda rate: Point(rate, waits_at_most(WITHIN - 1.0, rate)), 0.5, 0.9)
        assert found.rate_per_s * service_s == pytest.approx(known.rate_per_s, rel=0.15)  # of some two hundred requests
    for point in found.tried:
        assert not point.holds(0.9) or point.window_s >= max(WINDOW_S, MEAN_TIMES * point.mean_s)


def test_a_burst_is_no_capacity():
    """A few requests at thrice the rate would all be in time."""
    load, service_s = server(1)
    at_once = lab.run(load.config, load.cluster, lab.workload(*((number / 3.0, 64, 8) for number in range(3))))
    assert at_once.clients.all.jct.max_s <= WITHIN * service_s
    point = load.point(3.0 / service_s, 0.9)
    assert point.broken_off and not point.holds(0.9)


def test_a_point_lasts_as_long_as_its_requests():
    """More than ten at once: two hundred arrive in less than twenty of their times."""
    load = replace(
        server(1, 4 * PACE)[0], config=lab.config("unified"), traffic=traffic("64x30", Slo(deadline_s=500.0))
    )
    point = load.point(0.6, 0.9)
    assert point.holds(0.9) and point.mean_s > 10.0 and point.window_s >= MEAN_TIMES * point.mean_s > 200 / 0.6


# -- the roofline --------------------------------------------------------------------------------------------------


def test_the_roofline_is_what_every_step_of_a_request_needs():
    config, cluster, item = lab.config("unified", engine={"max_rows": 4}), lab.cluster(2), WorkItem(0.0, 90, 12)
    cost = cost_model(lab.MODEL, cluster)
    steps = [StepWork(90, 1, 1, prefill_pairs(0, 90), 90)]
    steps += [StepWork(1, 1, 1, decode_rows=1, decode_context=position + 1) for position in range(90, 101)]
    flops = sum(cost.flops(step) for step in steps)
    read = sum(step.decode_context * lab.MODEL.kv_geometry(1).token_bytes for step in steps)
    read += 11 * lab.MODEL.read_bytes(4) / 4
    peak_flops, peak_bytes = peaks(cluster)
    assert peak_flops == 2 * cost.peak_flops_per_s
    expected = min(peak_flops / flops, peak_bytes / read)
    assert roofline(lab.MODEL, cluster, config, [item]) == pytest.approx(expected)
    assert roofline(lab.MODEL, cluster, config, [item], drafts=True) == pytest.approx(peak_flops / flops)
    cached = WorkItem(0.0, 90, 12, session="a")
    assert roofline(lab.MODEL, cluster, config, [cached], drafts=True) > 5 * peak_flops / flops
    assert roofline(lab.MODEL, cluster, config, [WorkItem(0.0, 5000, 1)]) == math.inf  # refused
    with pytest.raises(ValueError, match="no requests"):
        roofline(lab.MODEL, cluster, config, [])


def test_layers_with_a_window_see_no_more_than_it():
    model, config, cluster = load_model("gpt-oss-20b"), lab.config("unified"), lab.cluster(1)
    seen = sum(12 * (at + 1) + 12 * min(at + 1, 128) for at in range(300))
    flops = 2.0 * model.active_parameters * 300 + 2.0 * model.head_parameters + 4.0 * 64 * 64 * seen
    assert roofline(model, cluster, config, [WorkItem(0.0, 300, 1)]) == pytest.approx(peaks(cluster)[0] / flops)


def test_a_cluster_that_serves_more_than_its_peaks_stops_the_search(monkeypatch: pytest.MonkeyPatch):
    load, service_s = server(1)
    part = 0.3 / service_s / load.bound(load.traffic.sample())
    flops, read = peaks(load.cluster)
    monkeypatch.setattr("cohort.services.simulator.core.roofline.peaks", lambda cluster: (part * flops, part * read))
    with pytest.raises(BeyondRoofline, match=r"peaks allow .* at most: the cost model is wrong"):
        load.capacity(0.6 / service_s, 0.9)
    assert load.point(0.2 / service_s, 0.9).holds(0.9)
    check(0.3, 0.3, "just what the peaks allow")
