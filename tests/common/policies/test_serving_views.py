"""What is kept up as views change: every choice is the one that a look at all of them makes."""

from __future__ import annotations

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from cohort.common.policies.baselines.fcfs import Fcfs
from cohort.common.policies.baselines.placements import Colocated, Disaggregated
from cohort.common.policies.interface import ClusterView, InstanceView
from cohort.common.policies.serving_views import MinIndex, ServingViews
from cohort.common.types import Role, WorkerCapacity, WorkerStats
from tests.common.policies.baselines.test_placements import view, waiting


def worker(random: Random, name: str) -> InstanceView:
    capacity = WorkerCapacity(
        random.choice(list(Role)), "m", random.choice([60, 1000]), 1, 1, 1, 1, 16, 100, 0, 64, 512
    )
    return InstanceView(name, capacity, stats(random))


def stats(random: Random) -> WorkerStats:
    """Few values, so that many tie."""
    return WorkerStats(
        total_blocks=100,
        free_blocks=random.choice([10, 60, 100]),
        running=random.randrange(3),
        awaiting_kv=random.randrange(2),
        queued_prefill_tokens=random.choice([0, 0, 64, 900]),
        link_rates={"w0": 1e6} if random.random() < 0.02 else {},
    )


@given(seed=st.integers(0, 1 << 32), workers=st.integers(0, 12))
def test_choices_are_those_of_a_look_at_every_worker(seed: int, workers: int) -> None:
    random = Random(seed)
    views = ServingViews({f"w{n}": worker(random, f"w{n}") for n in range(workers)})
    kept, looked = (Colocated(), Disaggregated()), (Colocated(), Disaggregated())
    orders = Fcfs(dispatch_ahead_tokens=300), Fcfs(dispatch_ahead_tokens=300)
    for turn in range(40):
        for name in random.choices(list(views), k=random.choice([0, 1, 3, 90])) if views else []:
            each = views[name]
            if random.random() < 0.5:
                each.stats = stats(random)
            each.assigned_requests = random.randrange(3)
            each.assigned_prefill_tokens = random.choice([0, 50, 400])
            each.assigned_context_tokens = random.choice([0, 50, 400])
            views.touch(name)
        if random.random() < 0.05:  # one comes, goes or drains
            views = ServingViews({n: each for n, each in views.items() if random.random() < 0.9})
        plain = dict(views)
        for _ in range(random.randrange(3)):
            wanted = waiting(f"r{turn}", random.choice([1, 50, 1200]), random.choice([1, 10]))
            preferred = random.choice([None, None, "w1"])
            for one, other in zip(kept, looked, strict=True):
                assert one.place(0.0, wanted, ClusterView(views), preferred) == other.place(
                    0.0, wanted, ClusterView(plain), preferred
                )
            for order in orders:
                order.add(0.0, wanted)
        assert orders[0].decide(0.0, ClusterView(views)) == orders[1].decide(0.0, ClusterView(plain))


def test_only_what_changed_is_read() -> None:
    read: list[str] = []

    def queued(each: InstanceView) -> tuple[int, str]:
        read.append(each.instance)
        return each.stats.queued_prefill_tokens, each.instance

    views = ServingViews({f"w{n}": view(f"w{n}", Role.UNIFIED, queued=n) for n in range(100)})
    least, prefills = MinIndex(queued), MinIndex(queued, lambda each: each.role is Role.PREFILL)
    assert least.of(views) is views["w0"] and prefills.of(views) is None and len(read) == 100
    views["w0"].stats = WorkerStats(queued_prefill_tokens=7)
    views.touch("w0")
    views.touch("unknown")
    assert least.of(views) is views["w1"] and prefills.of(views) is None and read[100:] == ["w0"]
    for _ in range(1000):  # nobody looks meanwhile: what changed is not kept for ever
        views.touch("w2")
    assert len(views.touched) < 500 and views.era > 0
    assert least.of(views) is views["w1"] and len(read) == 201
