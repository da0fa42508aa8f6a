"""One simulation, from its ingredients or of a comparison's cell."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import msgspec
from msgspec import UNSET

from cohort.common.comparison.comparison import Cell, CellResult, columns_of
from cohort.common.comparison.comparison import configuration as configuration_of
from cohort.common.comparison.comparison_traffic import traffic as traffic_of
from cohort.common.config import Config
from cohort.common.policies.cost_model import ModelShape
from cohort.common.policies.interface import Placement
from cohort.common.types import Role
from cohort.common.workloads.items import WorkItem, Workload
from cohort.services.simulator.core.cluster import SimCluster
from cohort.services.simulator.core.kept import Waits, at_most
from cohort.services.simulator.core.report import SimReport, make_report
from cohort.services.simulator.core.sim_options import SimOptions
from cohort.services.simulator.hardware.hardware import Cluster, load_cluster, load_model


def simulate(
    config: Config,
    cluster: Cluster,
    model: ModelShape,
    workload: Workload,
    options: SimOptions | None = None,
    roles: Mapping[Role, int] | None = None,
    placement: Placement | None = None,
) -> SimReport:
    """Replay the workload; `placement` replaces the configured one. Raises `ConfigError` if it or the cluster is
    unfit."""
    sim = SimCluster(config, cluster, model, workload, options or SimOptions(), roles, placement)
    sim.run()
    return make_report(sim, workload.name, workload.facts)


def workload_of(cell: Cell) -> Workload:
    return traffic_of(cell.traffic, load=cell.load, duration_s=cell.duration_s, seed=cell.seed)


def simulation_of(cell: Cell, workload: Workload) -> SimCluster:
    """Build the simulation of a cell of `cohort compare`."""
    options = SimOptions(
        seed=cell.seed,
        predictor="oracle" if cell.compared.clairvoyant else cell.predictor,  # type: ignore[arg-type]  # by `Spec`
        predictor_sigma=cell.predictor_sigma,
        horizon_s=cell.horizon_s,
        slo_defaults=True,
    )
    cluster = load_cluster(cell.cluster, {"tensor_parallel": cell.traffic.tensor_parallel})
    roles = dict(cell.compared.instances) or None
    return SimCluster(configuration_of(cell), cluster, load_model(cell.model), workload, options, roles)


def measure(cell: Cell) -> CellResult:
    """Simulate a cell of `cohort compare`."""
    workload = workload_of(cell)

    def judges(item: WorkItem) -> bool:
        return cell.traffic.judged in ("all", item.traffic_class)

    sim = simulation_of(cell, workload)
    most, left_out = at_most(sim, workload, judges), list[WorkItem]()
    if cell.compared.clairvoyant and (chosen := at_most(sim, workload, judges, cell.compared.clairvoyant)):
        left_out = [workload.items[number] for number in chosen.left_out]
        stays = (item for number, item in enumerate(workload.items) if number not in chosen.left_out)
        workload = replace(workload, items=tuple(stays))
        sim = simulation_of(cell, workload)
    waits = Waits(sim, judges, ended=[(item, False) for item in left_out])
    sim.run()
    waits.close()
    report = make_report(sim, workload.name, workload.facts)
    judged = report.overall if cell.traffic.judged == "all" else report.by_class[cell.traffic.judged]
    slo = judged.slo
    return CellResult(
        digest=cell.digest,
        workload=cell.workload,
        load=cell.load,
        seed=cell.seed,
        system=cell.system,
        sent=judged.sent + len(left_out),
        finished=judged.finished,
        kept=round(slo.attainment * slo.judged) if slo is not None else 0,
        kept_tokens_per_s=slo.goodput_tokens_per_s if slo is not None else 0.0,
        numbers=columns_of(msgspec.to_builtins(judged)),
        at_most=None if most is None else most.requests,
        longest_wait_s=waits.longest_s,
        groups=waits.groups(),
        variant=0 if cell.variant is UNSET else cell.variant,
    )
