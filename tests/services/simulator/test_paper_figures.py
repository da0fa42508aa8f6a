"""Settings of the papers' figures: LongBench is all of its tasks, and a capacity counts
requests."""

from __future__ import annotations

import numpy as np
from msgspec import structs

from cohort.common.workloads.arrivals import RandomArrivals
from cohort.common.workloads.papers import LONGBENCH, longbench_workload
from cohort.services.simulator.figures import dynaserve_setup
from cohort.services.simulator.figures.dynaserve_setup import SPLIT, System, keeps_up, run
from cohort.services.simulator.figures.figure import Lab


def test_longbench_has_every_task_as_often_and_ends_at_the_context() -> None:
    items = longbench_workload(RandomArrivals(1.0), count=4000, longest=9000).items
    answers = np.array([item.output_tokens for item in items])
    tasks = [answer for _, answer in LONGBENCH.values()]
    for answer in set(tasks):
        assert abs((answers == answer).mean() - tasks.count(answer) / len(tasks)) < 0.03
    assert max(item.prompt_tokens for item in items) == 9000
    alone = longbench_workload(RandomArrivals(1.0), count=4000, longest=1 << 20).items
    mean = 1.3 * sum(words for words, _ in LONGBENCH.values()) / len(LONGBENCH)
    assert abs(np.mean([item.prompt_tokens for item in alone]) / mean - 1.0) < 0.05


def test_a_rate_with_late_requests_is_no_capacity_though_99_percent_of_the_tokens_are_in_time() -> None:
    lab, system = Lab(0), System(SPLIT)
    report = run(lab, system, "azure-code", 3.0)
    slo = report.overall.slo
    assert slo is not None
    assert keeps_up(lab, system, "azure-code", 3.0)
    overall = structs.replace(report.overall, slo=structs.replace(slo, gaps=0.97, tbt=0.995))
    late = structs.replace(report, overall=overall)
    lab._done[(system, "azure-code", 3.0, dynaserve_setup.SMALL, 1.0)] = late, True
    assert not keeps_up(lab, system, "azure-code", 3.0)
