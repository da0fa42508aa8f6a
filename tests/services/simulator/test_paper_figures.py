"""Settings of the papers' figures: LongBench is all of its tasks, and a capacity counts
requests."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from cohort.common.policies.alignedserve.thresholds import Thresholds
from cohort.common.policies.settings import AlignedServeSettings, EcoServeSettings, settings_of
from cohort.common.types import Role, WorkerCapacity
from cohort.common.workloads.arrivals import RandomArrivals
from cohort.common.workloads.papers import LONGBENCH, longbench_workload
from cohort.services.simulator.core.report import SimReport
from cohort.services.simulator.figures import alignedserve, dynaserve, dynaserve_setup, ecoserve_setup
from cohort.services.simulator.figures.dynaserve_setup import SPLIT, System, keeps_up, run
from cohort.services.simulator.figures.figure import Lab
from cohort.services.simulator.reproduce.reproduce import all_figures
from tests.examples import another_of_its_kind


class Seen(Exception):
    """Instead of a simulation."""


def test_longbench_has_every_task_as_often_and_ends_at_the_context() -> None:
    items = longbench_workload(RandomArrivals(1.0), count=2000, longest=9000).items
    answers = np.array([item.output_tokens for item in items])
    tasks = [answer for _, answer in LONGBENCH.values()]
    for answer in set(tasks):
        assert abs((answers == answer).mean() - tasks.count(answer) / len(tasks)) < 0.03
    assert max(item.prompt_tokens for item in items) == 9000
    alone = longbench_workload(RandomArrivals(1.0), count=2000, longest=1 << 20).items
    mean = 1.3 * sum(words for words, _ in LONGBENCH.values()) / len(LONGBENCH)
    assert abs(np.mean([item.prompt_tokens for item in alone]) / mean - 1.0) < 0.05


def test_fastgen_computes_again_where_vllm_swaps() -> None:
    presets = (ecoserve_setup.FASTGEN, ecoserve_setup.VLLM)
    said = [ecoserve_setup.Case(preset, "alpaca").config().engine.preemption for preset in presets]
    assert said == ["recompute", "swap"]


def test_figures_at_one_rate_are_at_the_papers_in_its_order() -> None:
    asked: list[tuple[ecoserve_setup.Case, float]] = []

    class Asked(Lab):
        def run(self, key: Any, simulation: Callable[[], SimReport]) -> SimReport:
            asked.append(key)
            raise Seen

    for figure in all_figures():
        if figure.id.startswith(("ecoserve-1-", "ecoserve-1d-", "ecoserve-12-")) or figure.id.endswith("-printed"):
            with suppress(Seen):
                figure.measure(Asked(0))
    assert len(asked) > 30
    for case, rate in asked:
        assert rate == ecoserve_setup.TABLE_2_PER_S[case.data]
        if case.preset == ecoserve_setup.ECOSERVE:
            assert settings_of(case.config(), EcoServeSettings).patience_s == ecoserve_setup.NEVER_S


def test_a_rate_with_late_requests_is_no_capacity_though_99_percent_of_the_tokens_are_in_time() -> None:
    lab, system = Lab(0), System(SPLIT)
    report = run(lab, system, "azure-code", 3.0)
    slo = report.overall.slo
    assert slo is not None
    assert keeps_up(lab, system, "azure-code", 3.0)
    overall = structs.replace(report.overall, slo=structs.replace(slo, gaps=0.97, tbt=0.995))
    late = structs.replace(report, overall=overall)
    key = (system, "azure-code", 3.0, dynaserve_setup.SMALL, 1.0)
    lab._done[key] = structs.replace(lab._done[key], report=late)
    assert not keeps_up(lab, system, "azure-code", 3.0)


@pytest.mark.parametrize(
    ("model", "data"),
    [
        ("opt-2.7b", "longbench"),
        *(
            pytest.param(model, data, marks=another_of_its_kind())
            for model, data in (("opt-2.7b", "synthetic"), ("opt-2.7b", "azure"), ("opt-13b", "sharegpt"))
        ),
    ],
)
def test_alignedserve_is_offered_more_than_the_other_serves(model: str, data: str) -> None:
    lab, run = Lab(0), alignedserve._Run(data, model=model)
    alone = alignedserve._Run(data, "baseline-distserve", model, saturated=True)
    answers = [item.output_tokens for item in alone.workload_at(alone.rate_per_s(lab), 0).items]
    served_per_s = alignedserve._throughput(alone.report(lab)) * len(answers) / sum(answers)
    assert alone.rate_per_s(lab) > 1.2 * served_per_s
    for devices in (2, 4):
        offered = replace(run, devices=devices).rate_per_s(lab)
        assert offered == pytest.approx(0.8 * 1.6 * served_per_s * (devices - 1))


def test_goodput_is_compared_where_more_comes_than_dynaserve_can_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []

    class Asked(Lab):
        def run(self, key: Any, simulation: Callable[[], SimReport]) -> SimReport:
            asked.append(key[2])
            raise Seen

    monkeypatch.setattr(dynaserve, "_capacity", lambda lab, preset, name, scale=None: 5.0)
    for figure in all_figures():
        if figure.id.startswith(("dynaserve-8-goodput-", "dynaserve-10-")):
            with suppress(Seen):
                figure.measure(Asked(0))
    assert len(asked) == 12
    assert set(asked) == {1.2 * 5.0}


def test_a_batch_of_alignedserve_is_as_small_as_the_paper_has_it_however_many_rows_memory_holds() -> None:
    config = alignedserve._Run("sharegpt").config(10**10)
    capacity = WorkerCapacity(Role.DECODE, "m", 1000, 1, 1, 1, 1, 16, 1000, 0, config.engine.max_rows, 8192)
    thresholds = Thresholds(settings_of(config, AlignedServeSettings))
    assert capacity.max_rows > 256 and thresholds.min_requests(capacity) == 36
