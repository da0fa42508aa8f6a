"""Every change by a small hand-made case, and what it must never do."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cohort.common.errors import ConfigError
from cohort.common.types import Slo
from cohort.common.workloads import slos
from cohort.common.workloads.arrivals import ClosedLoop, RandomArrivals, TraceTimes
from cohort.common.workloads.changes import clip, mixture, together, with_class, with_class_share, with_slos
from cohort.common.workloads.items import ClosedLoopPart, WorkItem, Workload, WorkloadFacts

A = Workload(
    "a",
    (WorkItem(0.0, 100, 10, hash_ids=(1, 2), hash_block=64), WorkItem(2.0, 50, 400, session="s")),
    WorkloadFacts("A", "times"),
    (ClosedLoopPart(2, (WorkItem(0.0, 900, 30),)),),
)
B = Workload("b", (WorkItem(1.0, 7, 3, hash_ids=(1,), hash_block=4),), WorkloadFacts("B", "times", skipped_rows=4))


def test_clipping_is_counted() -> None:
    clipped = clip(A, max_prompt=64, max_output=200)
    assert [(i.prompt_tokens, i.output_tokens, i.hash_ids) for i in clipped.items] == [(64, 10, (1,)), (50, 200, ())]
    assert clipped.closed_loop[0].items[0].prompt_tokens == 64
    assert (clipped.facts.clipped_prompts, clipped.facts.clipped_outputs) == (2, 1)
    with pytest.raises(ConfigError, match="max_total is 1"):
        clip(A, max_total=1)


@given(prompt=st.integers(1, 300), output=st.integers(1, 300), bound=st.integers(2, 200))
def test_a_total_bound_always_leaves_a_request(prompt: int, output: int, bound: int) -> None:
    (item,) = clip(Workload("w", (WorkItem(0.0, prompt, output),)), max_total=bound).items
    assert item.prompt_tokens >= 1 and item.output_tokens >= 1
    assert item.prompt_tokens + item.output_tokens == min(bound, prompt + output)
    assert item.prompt_tokens <= prompt and item.output_tokens <= output


def test_classes_reach_every_item() -> None:
    best_effort = with_class(A, "be")
    assert {i.traffic_class for i in (*best_effort.items, *best_effort.closed_loop[0].items)} == {"be"}
    many = Workload("m", tuple(WorkItem(float(i), 1, 1) for i in range(4000)))
    shared = with_class_share(many, 0.25)
    assert sum(i.traffic_class == "be" for i in shared.items) == pytest.approx(1000, abs=120)


def test_slos_of_the_papers() -> None:
    real, best = WorkItem(0.0, 100, 10), WorkItem(0.0, 100, 10, traffic_class="be")
    assert (slos.bros(real), slos.bros(best)) == (Slo(ttft_s=0.4, tpot_s=0.2), Slo())
    assert slos.dynaserve(real) == Slo(tpot_s=0.1)
    assert slos.ecoserve(0.05, 0.02)(real) == Slo(deadline_s=2 * (0.05 + 0.02 * 10))
    assert slos.ecoserve(0.05, 0.02, scale=1.0)(real) == Slo(deadline_s=0.25)
    assert slos.per_token(0.5, 0.1)(real) == Slo(ttft_s=0.5, tpot_s=0.1)
    kept = with_slos(A, slos.dynaserve)
    assert {i.slo for i in (*kept.items, *kept.closed_loop[0].items)} == {Slo(tpot_s=0.1)}


def test_workloads_together_share_nothing() -> None:
    both = together("both", [A, B, B])
    assert [i.arrival_s for i in both.items] == [0.0, 1.0, 1.0, 2.0]
    ids = [hash_id for i in both.items for hash_id in i.hash_ids]
    assert len(ids) == len(set(ids)) == 4
    assert len(both.closed_loop) == 1
    assert (both.facts.skipped_rows, both.facts.source) == (8, "A + B + B")
    both.check()


def test_a_mixture_takes_by_weight_and_in_order() -> None:
    mixed = mixture("mix", [(3.0, A), (1.0, B)], RandomArrivals(10.0), count=4000, seed=2)
    mixed.check()
    assert sum(i.prompt_tokens == 7 for i in mixed.items) == pytest.approx(1000, abs=120)
    assert [i.prompt_tokens for i in mixed.items if i.prompt_tokens != 7][:4] == [100, 50, 100, 50]
    assert mixed.facts.source == "mixture: 75 % a, 25 % b"
    (part,) = mixture("mix", [(1.0, B)], ClosedLoop(3), count=5).closed_loop
    assert (part.concurrency, len(part.items)) == (3, 5)
    for wrong in ([], [(0.0, A)], [(1.0, Workload("none", ()))]):
        with pytest.raises(ConfigError, match="parts"):
            mixture("mix", wrong, RandomArrivals(1.0), count=1)
    with pytest.raises(ConfigError, match="arrivals of its own"):
        mixture("mix", [(1.0, A)], TraceTimes(), count=1)
