"""DynaServe in the simulator: jumping changes nothing, the bound holds, splits and chunked transfers do what they are
for."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from cohort.common.policies.interface import ClusterView, Placed, Placement, WaitingRequest
from cohort.common.types import Segment, Slo
from cohort.common.workloads.items import WorkItem, Workload
from cohort.services.simulator.core.cluster import SimCluster
from cohort.services.simulator.core.sim_options import SimOptions
from cohort.services.simulator.hardware.hardware import load_model
from tests.examples import examples
from tests.services.simulator.core.test_cluster import lengths, outcome
from tests.services.simulator.lab import MODEL, cache_of, cluster, config, run, workload


@settings(max_examples=examples(0.2))
@given(
    lengths=lengths,
    blocks=st.sampled_from([45, 1000]),
    preemption=st.sampled_from(["swap", "recompute"]),
    slo_ms=st.sampled_from([2.5, 100.0]),
)
def test_jumping_over_repeated_iterations_changes_nothing(
    lengths: list[tuple[float, int, int]], blocks: int, preemption: str, slo_ms: float
) -> None:
    load = Workload("random", tuple(WorkItem(*each) for each in sorted(lengths)))
    chosen = config(
        "dynaserve",
        kv=cache_of(blocks),
        engine={"preemption": preemption},
        dynaserve={"tbt_slo_s": slo_ms / 1e3, "kv_transfer_s": 0.0, "await_arrivals": False},
    )
    one_by_one, jumping = run(chosen, cluster(2), load, jump=False), run(chosen, cluster(2), load)
    assert outcome(jumping) == outcome(one_by_one)
    assert [w.machine.kv.owners() for w in jumping.workers] == [{}, {}]


def busy() -> Workload:
    """Long answers, and prompts that would stop them."""
    answers = [(0.0, 50, 150)] * 12
    prompts = [(0.5 + 0.08 * index, 1500, 4) for index in range(20)]
    return workload(*answers, *prompts, slo=Slo(tpot_s=0.1))


def large(**sections: dict[str, Any]) -> SimCluster:
    """A model of which a prompt of 1,500 tokens takes a fifth of a second."""
    sim = SimCluster(config("dynaserve", **sections), cluster(2), load_model("qwen2.5-14b"), busy(), SimOptions())
    sim.run()
    assert sim.clients.all.finished == 32
    return sim


def test_iterations_stay_within_the_bound_that_plain_chunks_break() -> None:
    aware = large().clients.all
    engine, policies = {"prefill_chunk": 2048}, {"iteration": "continuous_batching", "prefill_order": "fcfs"}
    plain = large(engine=engine, policies=policies).clients.all
    assert aware.tokens_within_tbt / aware.slo_output_tokens > 0.97
    assert plain.tbt.quantile(0.99) > 0.1 > aware.tbt.quantile(0.99)


def test_lessons_of_schedulers_reach_the_manager_and_ends_are_judged() -> None:
    sim = large()
    stats = sim.manager.stats()
    assert stats["finish_tracked_total"] >= 20  # the run ends before the manager hears of the last ones
    assert 0.0 < stats["finish_error"] < 2.0
    times = sim.workers[0].machine.stats(0).step_times
    assert times is not None
    assert 1e-5 < times.token_s < 1e-3


class InTheMiddle(Placement):
    def place(self, now_s: float, waiting: WaitingRequest, cluster: ClusterView, preferred: str | None) -> Placed:
        first, second = sorted(cluster.instances)
        return Placed((Segment(0, 900, first), Segment(900, None, second)), "in the middle of the answer")


def exposed_s(chunked: bool) -> float:
    sim = SimCluster(
        config("dynaserve", transfer={"chunked": chunked}),
        cluster(2, per_host=1, across="tcp"),
        MODEL,
        workload(*((0.05 * index, 600, 600) for index in range(8))),
        SimOptions(),
        placement=InTheMiddle(),
    )
    sim.run()
    counters = sim.workers[1].machine.counters
    assert counters.transfers_in == 8
    return counters.exposed_transfer_s


def test_pushing_chunks_while_computing_hides_most_of_a_transfer() -> None:
    assert exposed_s(True) < 0.2 * exposed_s(False)
