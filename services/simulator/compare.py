"""A cell of `cohort compare`, simulated; what is compared and how it is told is `common/comparison`'s."""

from __future__ import annotations

import msgspec

from cohort.common.comparison.comparison import Cell, CellResult, columns_of, configuration
from cohort.common.comparison.comparison_traffic import traffic
from cohort.services.simulator.core.run import simulate
from cohort.services.simulator.core.sim_options import SimOptions
from cohort.services.simulator.hardware.hardware import load_cluster, load_model


def measure(cell: Cell) -> CellResult:
    workload = traffic(cell.traffic, load=cell.load, duration_s=cell.duration_s, seed=cell.seed)
    options = SimOptions(
        seed=cell.seed,
        predictor=cell.predictor,  # type: ignore[arg-type]  # checked by `Spec`
        predictor_sigma=cell.predictor_sigma,
        horizon_s=cell.horizon_s,
        slo_defaults=True,
    )
    cluster = load_cluster(cell.cluster, {"tensor_parallel": cell.traffic.tensor_parallel})
    report = simulate(configuration(cell), cluster, load_model(cell.model), workload, options, cell.compared.roles())
    judged = report.overall if cell.traffic.judged == "all" else report.by_class[cell.traffic.judged]
    slo = judged.slo
    kept = round(slo.attainment * slo.judged) if slo is not None else 0
    return CellResult(
        digest=cell.digest,
        workload=cell.workload,
        load=cell.load,
        seed=cell.seed,
        system=cell.system,
        sent=judged.sent,
        finished=judged.finished,
        kept=kept,
        kept_tokens_per_s=slo.goodput_tokens_per_s if slo is not None else 0.0,
        ttft_p99_s=judged.ttft_ms.p99 / 1e3 if judged.ttft_ms else None,
        tbt_p99_s=judged.tbt_ms.p99 / 1e3 if judged.tbt_ms else None,
        longest_ttft_s=judged.ttft_ms.max / 1e3 if judged.ttft_ms else None,
        numbers=columns_of(msgspec.to_builtins(judged)),
    )
