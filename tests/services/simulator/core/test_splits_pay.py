"""Under load the shipped `dynaserve` splits requests where splitting pays, and then serves more than the better of its
baselines: on unlike instances, and where iterations with prompts and decodes have a price."""

from __future__ import annotations

import pytest

from cohort.common.config import load_config
from cohort.common.workloads.arrivals import AllAtOnce, RandomArrivals
from cohort.common.workloads.changes import mixture, with_slos
from cohort.common.workloads.items import Workload
from cohort.common.workloads.papers import paper_workload
from cohort.common.workloads.slos import dynaserve as slo_of
from cohort.services.simulator.core.report import SimReport
from cohort.services.simulator.core.run import simulate
from cohort.services.simulator.core.sim_options import SimOptions
from cohort.services.simulator.hardware.hardware import load_cluster, load_model
from tests.examples import another_of_its_kind, nightly

_WARMUP_S, _END_S = 30.0, 80.0
CHUNKS = (256, 512) if nightly() else (512,)


def hybrid(rate: float) -> Workload:
    count = round(1.2 * rate * _END_S)
    parts = [
        (1.0, paper_workload(f"dynaserve-{name}", AllAtOnce(), count=count, seed=1))
        for name in ("burstgpt", "azure-code")
    ]
    return with_slos(mixture("hybrid", parts, RandomArrivals(rate), count=count, seed=1), slo_of)


def served(
    preset: str, cluster: str, rate: float, mixed_share: float, chunk: int = 2048, end_s: float = _END_S
) -> SimReport:
    engine = {"max_rows": 256, "max_step_tokens": chunk, "prefill_chunk": chunk, "preemption": "recompute"}
    return simulate(
        load_config(preset=preset, overrides={"engine": engine, "kv": {"prefix_caching": False}}),
        load_cluster(cluster, {"mixed_share": mixed_share}),
        load_model("qwen2.5-14b"),
        hybrid(rate),
        SimOptions(predictor="noisy", predictor_sigma=10.0, warmup_s=_WARMUP_S, horizon_s=end_s),
    )


def keeps_up(report: SimReport) -> bool:
    """The bounds of a capacity: 99 % of the gaps within 100 ms, half of the first tokens within 2 s."""
    tbt, ttft = report.overall.tbt_ms, report.overall.ttft_ms
    return tbt is not None and ttft is not None and tbt.p99 <= 100.0 and ttft.p50 <= 2000.0


@pytest.mark.parametrize(
    ("cluster", "rate", "mixed_share"),
    [
        pytest.param("h100-80:1+a100-80:1", 16.0, 0.0, id="an H100 beside an A100", marks=another_of_its_kind()),
        pytest.param("a100-80:2", 6.1, 0.3, id="mixing costs 30 %"),
    ],
)
def test_where_splitting_pays_it_splits_and_serves_more_than_either_baseline(
    cluster: str, rate: float, mixed_share: float
) -> None:
    mine = served("dynaserve", cluster, rate, mixed_share)
    others = [
        served("baseline-distserve", cluster, rate, mixed_share),
        *(served("baseline-chunked-prefill", cluster, rate, mixed_share, chunk) for chunk in CHUNKS),
    ]
    placed = mine.manager["splits_total"] + mine.manager["whole_total"]
    assert mine.manager["splits_total"] > 0.2 * placed
    assert keeps_up(mine)
    assert not any(map(keeps_up, others))
    assert mine.overall.finished > max(each.overall.finished for each in others)


def test_on_equal_instances_without_such_a_price_requests_stay_whole() -> None:
    manager = served("dynaserve", "a100-80:2", 8.0, 0.0, end_s=45.0).manager
    assert manager["splits_total"] < 0.05 * manager["whole_total"]
