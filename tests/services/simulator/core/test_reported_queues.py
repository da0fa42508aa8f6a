"""Reports of simulated workers list the progress of every sequence only where a policy of the manager may read it."""

from __future__ import annotations

import pytest

from cohort.common.policies import compose
from cohort.common.policies.baselines.placements import Colocated
from cohort.common.policies.interface import ClusterView, Impossible, Placed, Wait, WaitingRequest
from cohort.services.simulator.core.sim_options import SimOptions
from tests.services.simulator.lab import MODEL, Recorded, cluster, config, workload


class Watching(Colocated):
    """Decides as `Colocated` does, and keeps how many sequences reports listed and how many they counted."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[int, int]] = set()

    def place(
        self, now_s: float, waiting: WaitingRequest, cluster: ClusterView, preferred: str | None
    ) -> Placed | Wait | Impossible:
        for view in cluster.instances.values():
            self.seen.add((len(view.stats.queue), view.stats.running + view.stats.waiting))
        return super().place(now_s, waiting, cluster, preferred)


class Reading(Watching):
    reads_queues = True


def ran(placement: Watching) -> Recorded:
    load = workload(*((0.15 * number, 300, 400) for number in range(12)))
    sim = Recorded(config("unified"), cluster(2), MODEL, load, SimOptions(), placement=placement)
    sim.run()
    return sim


def test_the_queue_is_listed_where_it_is_read_and_nothing_else_changes() -> None:
    watching, reading = Watching(), Reading()
    without, listed = ran(watching), ran(reading)
    assert {entries for entries, _ in watching.seen} == {0}
    assert all(entries == counted for entries, counted in reading.seen) and len(reading.seen) > 2
    assert without.token_times == listed.token_times
    assert {counted for _, counted in watching.seen} == {counted for _, counted in reading.seen}


@pytest.mark.parametrize(
    ("preset", "reads"),
    [
        ("unified", False),
        ("disaggregated", False),
        ("cohort", True),
        ("dynaserve", True),
        ("bucketserve", True),
        ("alignedserve", True),
    ],
)
def test_presets_whose_policies_predict_read_it(preset: str, reads: bool) -> None:
    chosen = config(preset)
    assert compose.reads_queues(chosen, compose.placement(chosen)) is reads
