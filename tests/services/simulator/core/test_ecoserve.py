"""EcoServe in the simulator: jumping over its certain iterations changes nothing, and what lending is for happens."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cohort.common.workloads.items import WorkItem, Workload
from cohort.services.simulator.core.report import make_report
from tests.common.policies.ecoserve.test_in_cluster import VARIANTS
from tests.examples import examples
from tests.services.simulator.core.test_cluster import lengths, outcome
from tests.services.simulator.lab import Recorded, cache_of, cluster, config, run


@settings(max_examples=examples(0.2))
@given(
    lengths=lengths,
    variant=st.sampled_from(sorted(VARIANTS)),
    blocks=st.sampled_from([45, 80, 400]),
    predictor=st.sampled_from(["oracle", "lognormal", "none"]),
    rows=st.sampled_from([3, 256]),
)
@example(  # a forecast that no longer holds after the iteration in flight
    lengths=[(0.0, 1, 1), (0.0, 1, 3), (0.0, 1, 3), (0.0, 1, 3)],
    variant="forecast",
    blocks=45,
    predictor="oracle",
    rows=3,
)
def test_jumping_changes_nothing(
    lengths: list[tuple[float, int, int]], variant: str, blocks: int, predictor: str, rows: int
) -> None:
    items = tuple(WorkItem(at, prompt, output) for at, prompt, output in sorted(lengths))
    chosen = config("ecoserve", kv=cache_of(blocks), engine={"max_rows": rows}, ecoserve=VARIANTS[variant])
    load = Workload("random", items)
    one_by_one = run(chosen, cluster(1), load, jump=False, predictor=predictor, predictor_sigma=0.5)
    jumping = run(chosen, cluster(1), load, predictor=predictor, predictor_sigma=0.5)
    assert outcome(jumping) == outcome(one_by_one)
    assert jumping.workers[0].machine.scheduler.metrics() == one_by_one.workers[0].machine.scheduler.metrics()
    assert jumping.workers[0].machine.kv.owners() == {}
    assert jumping.events.handled - jumping.void <= one_by_one.events.handled


def crowd(order: int = 5, **options: Any) -> Recorded:
    """Responses of 40 to 400 tokens that do not all fit; `order` permutes their lengths."""
    items = tuple(WorkItem(0.001 * index, 30, 40 + 45 * (index * order % 9)) for index in range(60))
    return run(config("ecoserve", kv=cache_of(110), ecoserve=options), cluster(1), Workload("crowd", items))


@pytest.mark.parametrize("order", [1, 4, 5, 8])
def test_lending_ends_sooner(order: int) -> None:
    lending, keeping = crowd(order), crowd(order, pipelined=False)
    reports = [make_report(sim, "crowd", Workload("crowd", ()).facts) for sim in (lending, keeping)]
    assert reports[0].duration_s < reports[1].duration_s
    assert reports[0].instances[0].preemptions == 0
    assert reports[0].instances[0].scheduler["borrowers_total"] > 0
    assert reports[0].instances[0].allocation_failures == 0


def test_a_forecast_fills_the_cache_further() -> None:
    """The same crowd without a block that is allocated and unused: no sequence is evicted, and it ends sooner still."""
    sims = (crowd(), crowd(lending="forecast"))
    halves, forecast = (make_report(sim, "crowd", Workload("crowd", ()).facts) for sim in sims)
    assert forecast.instances[0].kv_filled > halves.instances[0].kv_filled
    assert forecast.duration_s < halves.duration_s
    assert forecast.instances[0].preemptions == 0


@pytest.mark.parametrize("variant", ["full", "D", "forecast"])
def test_jumps_are_taken(variant: str) -> None:
    load = Workload("one", (WorkItem(0.0, 100, 800),))
    chosen = config("ecoserve", ecoserve=VARIANTS[variant])
    assert run(chosen, cluster(1), load).events.handled < run(chosen, cluster(1), load, jump=False).events.handled / 5
