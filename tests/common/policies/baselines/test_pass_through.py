"""Everything goes out at once, in the order in which a queue without bound would have sent it."""

from __future__ import annotations

from random import Random

from cohort.common.policies.baselines.fcfs import Fcfs
from cohort.common.policies.baselines.pass_through import PassThrough
from cohort.common.policies.interface import ClusterView, InstanceView, WaitingRequest
from cohort.common.types import Attempt, Request, Role, SamplingParams, WorkerCapacity, WorkerStats


def waiting(name: str, random: Random) -> WaitingRequest:
    request = Request(
        Attempt(name, 1),
        "gateway",
        [0] * random.randint(1, 5000),
        1,
        SamplingParams(max_tokens=16),
        random.choice([0.0, 1.0, 2.0]),
        online=random.random() < 0.7,
        priority=random.randint(0, 2),
    )
    return WaitingRequest(request, 0.0, None)


def cluster(*queued: int) -> ClusterView:
    capacity = WorkerCapacity(Role.UNIFIED, "m", 8192, 2, 1, 8, 2, 16, 100, 0, 64, 512)
    stats = [WorkerStats(queued_prefill_tokens=tokens) for tokens in queued]
    return ClusterView({f"u{i}": InstanceView(f"u{i}", capacity, each) for i, each in enumerate(stats)})


def test_nothing_waits_however_much_is_queued_at_the_workers() -> None:
    order, random = PassThrough(), Random(1)
    for index in range(40):
        order.add(0.0, waiting(f"r{index}", random))
    sent = order.decide(0.0, cluster(900_000, 900_000))
    assert len(sent) == 40 and len(order) == 0 and order.waiting_tokens == 0
    assert [dispatch.batch_id for dispatch in sent] == list(range(1, 41))
    assert {len(dispatch.request_ids) for dispatch in sent} == {1}
    assert {dispatch.instance for dispatch in sent} == {None}, "where it runs is the placement's to say"


def test_the_order_is_that_of_an_unbounded_first_come() -> None:
    for seed in range(20):
        random = Random(seed)
        items = [waiting(f"r{index}", random) for index in range(random.randint(1, 30))]
        orders = PassThrough(), Fcfs(dispatch_ahead_tokens=10**9)
        for order in orders:
            for item in items:
                order.add(0.0, item)
            order.remove(0.0, items[0].request_id)
        ours, theirs = ([d.request_ids for d in order.decide(0.0, cluster(0, 70))] for order in orders)
        assert ours == theirs and len(ours) == len(items) - 1


def test_without_a_worker_everything_waits() -> None:
    order = PassThrough()
    order.add(0.0, waiting("r", Random(1)))
    assert order.decide(0.0, cluster()) == [] and len(order) == 1
    assert [d.request_ids for d in order.decide(0.0, cluster(0))] == [("r",)]
