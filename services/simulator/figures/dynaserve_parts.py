"""DynaServe §4.1, §6.6 and Table 4 as simulations: search of the split, transfers in chunks, wrong predictions.

Called by `dynaserve`, which holds the figures. Compares nothing with the paper.
"""

from __future__ import annotations

import numpy as np

from cohort.common.policies.interface import ClusterView, Placed, Placement, Wait, WaitingRequest
from cohort.common.types import Segment
from cohort.common.workloads.arrivals import RandomArrivals
from cohort.common.workloads.changes import with_slos
from cohort.common.workloads.generate import Stream, stream
from cohort.common.workloads.items import WorkItem, Workload
from cohort.common.workloads.papers import paper_workload
from cohort.common.workloads.slos import dynaserve as slo_of
from cohort.services.simulator.core.report import SimReport
from cohort.services.simulator.figures.dynaserve_setup import DYNASERVE, SPLIT, System, simulated, within_per_s
from cohort.services.simulator.figures.figure import Lab


def _varied(sigma: float, seed: int) -> Workload:
    """Table 4: prompts of 219, outputs normal around 1,467; 3 requests a second, close to saturation here."""
    count = 900
    drawn = stream(seed, Stream.OUTPUT_LENGTHS).normal(1467.0, max(sigma, 1e-9), count)
    outputs = np.clip(np.rint(drawn), 1, 4000).astype(int)
    base = paper_workload("dynaserve-reasoning", RandomArrivals(3.0), count=count, seed=seed)
    items = tuple(WorkItem(item.arrival_s, 219, int(output)) for item, output in zip(base.items, outputs, strict=True))
    return with_slos(Workload(f"sigma {sigma:g}", items, base.facts), slo_of)


def varied_run(lab: Lab, sigma: float) -> SimReport:
    def of_sigma() -> SimReport:
        system = System(SPLIT, settings=(("gateway", "default_prediction_tokens", 1467),))
        return simulated(
            system, _varied(sigma, lab.seed), lab.options(predictor="none", warmup_s=100.0, horizon_s=220.0)
        )

    return lab.run(("varied", sigma), of_sigma)


def varied_goodput(lab: Lab, sigma: float) -> float:
    return within_per_s(varied_run(lab, sigma))


class Alternating(Placement):
    """Splits every request at the same share of its tokens, first segment on either instance in turn.

    With this, an offline search over shares knows the whole future of a workload of equal requests.
    """

    def __init__(self, share: float, output: int) -> None:
        self._share, self._output, self._turn = share, output, 0

    def place(
        self, now_s: float, waiting: WaitingRequest, cluster: ClusterView, preferred: str | None
    ) -> Placed | Wait:
        names = sorted(cluster.instances)
        self._turn += 1
        first, second = (names if self._turn % 2 else reversed(names)) if len(names) == 2 else (names[0], names[0])
        total = len(waiting.request.tokens) + self._output
        position = round(self._share * total)
        if first == second or not 0 < position < total:
            return Placed((Segment(0, None, first),), "whole")
        return Placed((Segment(0, position, first), Segment(position, None, second)), "at a fixed share")


def at_share(lab: Lab, share: float | None) -> SimReport:
    """Equal requests, saturated: all split at this share of their tokens, or as the preset does."""
    rate, end_s = 3.6, 120.0
    placement = None if share is None else Alternating(share, 512)
    return lab.run(
        ("oracle", share),
        lambda: simulated(
            DYNASERVE,
            with_slos(paper_workload("dynaserve-balanced", RandomArrivals(rate), count=700, seed=lab.seed), slo_of),
            lab.options(warmup_s=50.0, horizon_s=end_s),
            placement,
        ),
    )


def against_oracle(lab: Lab) -> float:
    """Throughput on equal requests over the best of all fixed splits, both saturated, in percent."""
    best = max(within_per_s(at_share(lab, share)) for share in (0.0, 0.6, 0.8, 0.9))
    return 100.0 * within_per_s(at_share(lab, None)) / best


def exposed_less(lab: Lab) -> float:
    """Percent of the exposed transfer time per KV transfer that pushing chunks removes; every request handed over in
    the middle of its answer."""

    def per_kv_transfer(chunked: bool) -> float:
        system = System(SPLIT, settings=(("transfer.ablation", "chunked", chunked),))
        report = lab.run(
            ("exposed", chunked),
            lambda: simulated(
                system,
                with_slos(paper_workload("dynaserve-reasoning", RandomArrivals(1.5), count=150, seed=lab.seed), slo_of),
                lab.options(horizon_s=120.0),
                Alternating(0.5, 1467),
                across=True,
            ),
        )
        handed = sum(instance.kv_transfers for instance in report.instances)
        return sum(instance.exposed_transfer_s for instance in report.instances) / max(handed, 1)

    return 100.0 * (1.0 - per_kv_transfer(True) / per_kv_transfer(False))
