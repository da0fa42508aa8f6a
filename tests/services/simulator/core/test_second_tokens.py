"""What the wait between prompt and decode shows in: time to the second token, gaps by request, and iterations that wait
for KV transfers where these block."""

from __future__ import annotations

import pytest

from cohort.common.types import Slo
from cohort.services.simulator.core.report import SimReport, make_report
from tests.services.simulator.core.test_cluster import outcome
from tests.services.simulator.lab import Recorded, cluster, config, run, workload

SHORT, LONG = (0.0, 400, 40), (0.002, 1500, 40)


def disaggregated(*, blocks: bool, jump: bool = True) -> Recorded:
    load = workload(SHORT, LONG, *((0.01 * index, 600, 30) for index in range(1, 8)), slo=Slo(tpot_s=0.001))
    return run(
        config("disaggregated"), cluster(2, per_host=1, across="tcp"), load, blocking_transfers=blocks, jump=jump
    )


def _report(sim: Recorded) -> SimReport:
    return make_report(sim, "test", workload(SHORT).facts)


@pytest.mark.parametrize("jump", [True, False])
def test_the_second_token_is_timed_apart_from_the_first(jump: bool) -> None:
    sim = disaggregated(blocks=False, jump=jump)
    times = [tokens[1] for tokens in sim.token_times.values()]
    second, ttft = sim.clients.all.second, sim.clients.all.ttft
    assert second.count == ttft.count == 9
    arrivals = sum(item.arrival_s for item in workload(SHORT, LONG, *((0.01 * i, 0, 0) for i in range(1, 8))).items)
    assert second.sum_s == pytest.approx(sum(times) - arrivals)
    assert second.sum_s > ttft.sum_s


def test_blocking_transfers_lengthen_the_receivers_iterations_and_nothing_else() -> None:
    free, blocked = disaggregated(blocks=False), disaggregated(blocks=True)
    assert blocked.clients.all.jct.sum_s > 1.02 * free.clients.all.jct.sum_s
    assert blocked.clients.all.ttft.sum_s == pytest.approx(free.clients.all.ttft.sum_s)
    assert blocked.workers[1].tally.busy_s > free.workers[1].tally.busy_s
    assert outcome(disaggregated(blocks=True, jump=False)) == outcome(blocked)


def test_one_late_gap_makes_a_request_late_and_one_token() -> None:
    slo = _report(disaggregated(blocks=False)).overall.slo
    assert slo is not None
    assert slo.gaps < slo.tbt
