"""Every worker learns what its iterations take, whatever its scheduler; jumping over repeated ones teaches the same."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cohort.common.policies.baselines.placements import Colocated
from cohort.common.policies.cost_model import StepWork
from cohort.common.policies.interface import ClusterView, WaitingRequest
from cohort.common.policies.step_times.learned_times import LearnedTimes
from cohort.common.policies.step_times.step_cost import BatchShape, step_seconds
from cohort.common.types import StepTimes
from cohort.common.workloads.items import WorkItem, Workload
from cohort.services.simulator.core.sim_options import SimOptions
from tests.examples import examples
from tests.services.simulator.core.test_cluster import lengths, outcome
from tests.services.simulator.lab import MODEL, Recorded, cache_of, cluster, config


class Asking(Colocated):
    """Decides as `Colocated` does, and keeps what it was told of iteration times."""

    wants_step_times = True

    def __init__(self) -> None:
        super().__init__()
        self.told: list[tuple[float, list[StepTimes | None]]] = []

    def place(self, now_s: float, waiting: WaitingRequest, cluster: ClusterView, preferred: str | None) -> Any:
        self.told.append((now_s, [view.stats.step_times for view in cluster.instances.values()]))
        return super().place(now_s, waiting, cluster, preferred)


def ran(
    load: Workload, iteration: str, *, jump: bool, profiled: bool = False, **sections: Any
) -> tuple[Recorded, Asking]:
    asking = Asking()
    chosen = config("unified", policies={"iteration": iteration}, **sections)
    sim = Recorded(chosen, cluster(2), MODEL, load, SimOptions(jump=jump, profiled=False), placement=asking)
    sim.run()
    return sim, asking


def learned(sim: Recorded) -> list[bytes]:
    return [worker.machine.times.export_state() for worker in sim.workers if worker.machine.times is not None]


@settings(max_examples=examples(0.3))
@given(
    lengths=lengths,
    iteration=st.sampled_from(["continuous_batching", "vllm", "srtf", "cohort_batching", "slack_packing"]),
    blocks=st.sampled_from([45, 1000]),
    preemption=st.sampled_from(["swap", "recompute"]),
)
def test_jumping_over_repeated_iterations_teaches_the_same(
    lengths: list[tuple[float, int, int]], iteration: str, blocks: int, preemption: str
) -> None:
    load = Workload("random", tuple(WorkItem(*each) for each in sorted(lengths)))
    sections = {"kv": cache_of(blocks), "engine": {"preemption": preemption}}
    one_by_one, was_told = ran(load, iteration, jump=False, **sections)
    jumping, told = ran(load, iteration, jump=True, **sections)
    assert outcome(jumping) == outcome(one_by_one)
    assert told.told == was_told.told
    assert learned(jumping) == learned(one_by_one)
    assert len(learned(jumping)) == 2


@pytest.mark.parametrize(
    "iteration", ["continuous_batching", "mlfq", "slack_packing", "time_synced", "aligned_batching"]
)
def test_workers_whose_scheduler_learns_no_such_times_report_them(iteration: str) -> None:
    load = Workload("even", tuple(WorkItem(0.02 * i, 40 + 17 * (i % 9), 30 + i % 20) for i in range(80)))
    sim, asking = ran(load, iteration, jump=True)
    assert asking.told[0][1] == [None, None]  # nothing has run yet
    for times in asking.told[-1][1]:
        assert times is not None
        shape = BatchShape(0, 0, 0, 8, 8 * 100).with_prefill(0, 120)
        work = _step_work(shape)
        assert step_seconds(times, shape) == pytest.approx(sim.costs[0].step_s(work), rel=0.15)


def test_nothing_is_learned_where_nothing_in_a_simulation_asks() -> None:
    load = Workload("one", (WorkItem(0.0, 100, 20),))
    sim = Recorded(config("unified"), cluster(1), MODEL, load, SimOptions())
    sim.run()
    assert sim.workers[0].machine.times is None
    asked = Recorded(config("dynaserve"), cluster(1), MODEL, load, SimOptions())
    assert isinstance(asked.workers[0].machine.times, LearnedTimes)
    assert asked.workers[0].machine.observed is None  # the scheduler's own


def _step_work(shape: BatchShape) -> StepWork:
    rows = shape.prefill_rows + shape.decodes
    return StepWork(
        shape.prefill_tokens + shape.decodes,
        rows,
        rows,
        shape.prefill_pairs,
        shape.prefill_tokens,
        shape.decodes,
        shape.decode_context,
        shape.decode_context // max(1, shape.decodes),
    )
