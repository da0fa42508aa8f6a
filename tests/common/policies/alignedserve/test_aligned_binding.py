"""Whole decisions on hand-made pools: a worker has 100 blocks of 16 tokens, so B_max is 40 blocks; R_min is 4."""

from __future__ import annotations

from typing import Any

from cohort.common.policies.alignedserve.aligned_binding import AlignedBinding
from cohort.common.policies.alignedserve.batch_numbers import FIRST_BATCH
from cohort.common.policies.interface import Bind, ClusterView, Prefetch
from cohort.common.policies.settings import AlignedServeSettings
from cohort.common.types import QueuedWork, Role
from tests.common.policies.alignedserve.pool import cluster, parked, view


def binding(**options: Any) -> AlignedBinding:
    return AlignedBinding(AlignedServeSettings(least_requests=4, **options), default_output=256.0)


def busy(running: int, blocks: int, *queue: tuple[str, int], waiting: int = 0) -> ClusterView:
    """One decode worker with so many rows in so many blocks; progress of some by name."""
    work = [QueuedWork(name, 0, context, 9) for name, context in queue]
    decode = view("decode-0", Role.DECODE, running=running, free_blocks=100 - blocks, queue=work, waiting=waiting)
    return cluster(view("prefill-0", Role.PREFILL), decode)


def binds(actions: list[Bind | Prefetch]) -> list[tuple[str, str, int]]:
    return [(a.request_id, a.instance, a.batch_id - FIRST_BATCH) for a in actions if isinstance(a, Bind)]


def fetched(actions: list[Bind | Prefetch]) -> list[tuple[str, ...]]:
    return [a.request_ids for a in actions if isinstance(a, Prefetch)]


def waiting(policy: AlignedBinding) -> tuple[float, float, float]:
    """Requests in the pool, in buffers, and batches made so far."""
    metrics = policy.metrics()
    return metrics["pool_requests"], metrics["buffered_requests"], metrics["aligned_batches_total"]


def test_low_load_a_single_request_joins_at_once() -> None:
    policy = binding()
    policy.parked(0.0, parked("a", 100))
    assert policy.decide(0.0, busy(0, 0)) == [Bind("a", "decode-0", FIRST_BATCH, "next batch")]
    assert policy.decide(0.0, busy(0, 0)) == []


def test_a_busy_worker_gets_its_next_batch_prefetched_and_as_far_as_there_is_room() -> None:
    policy = binding()
    for index in range(4):
        policy.parked(0.0, parked(f"s{index}", 60))
    actions = policy.decide(0.0, busy(20, 80))
    assert (binds(actions), fetched(actions)) == ([], [("s0", "s1", "s2", "s3")])
    assert waiting(policy) == (0, 4, 1), "as the next batch"
    assert policy.decide(0.1, busy(18, 79)) == []
    # Four blocks each, and a block for every row that runs stays free: twice.
    switched = policy.decide(0.2, busy(9, 80))
    assert binds(switched) == [(f"s{index}", "decode-0", 0) for index in range(2)]
    assert binds(policy.decide(0.3, busy(11, 60))) == [(f"s{index}", "decode-0", 0) for index in range(2, 4)]


def test_fewer_than_a_batch_wait_for_company_while_others_keep_the_worker_busy() -> None:
    policy = binding()
    policy.parked(0.0, parked("a", 60))
    assert policy.decide(0.0, busy(20, 41)) == []
    assert binds(policy.decide(0.1, busy(19, 39))) == [("a", "decode-0", 0)]


def test_aligned_requests_are_chosen_and_the_others_stay() -> None:
    policy = binding()
    for index in range(6):
        policy.parked(0.0, parked(f"s{index}", 60))
    policy.parked(0.0, parked("long", 1600))
    assert {name for name, _, _ in binds(policy.decide(0.0, busy(0, 0)))} == {f"s{index}" for index in range(6)}
    assert policy.metrics()["pool_requests"] == 1


def started() -> AlignedBinding:
    """Four of 60 tokens run and have been reported at 80."""
    policy = binding()
    for index in range(4):
        policy.parked(0.0, parked(f"s{index}", 60))
    policy.decide(0.0, busy(0, 0))
    for index in range(4):
        policy.moved(0.0, f"s{index}")
    policy.decide(0.5, running())
    return policy


def running(blocks: int = 60) -> ClusterView:
    return busy(4, blocks, *((f"s{index}", 80) for index in range(4)))


def test_dynamic_scheduling_takes_in_a_match_of_the_grown_batch() -> None:
    policy = started()
    policy.parked(1.0, parked("grown", 85))
    policy.parked(1.0, parked("other", 300))
    assert binds(policy.decide(1.0, running())) == [("grown", "decode-0", 0)]
    assert policy.metrics()["pool_requests"] == 1


def test_prefetched_requests_take_no_more_of_the_holders_blocks_than_a_batch() -> None:
    """Two decode workers, two candidate batches of five requests in eight blocks each, one holder of 100 blocks."""
    policy = binding()
    for index in range(10):
        policy.parked(0.0, parked(f"s{index}", 120))

    def full(in_use: int) -> ClusterView:
        decodes = [view(f"decode-{n}", Role.DECODE, running=8, free_blocks=100 - in_use) for n in range(2)]
        return cluster(view("prefill-0", Role.PREFILL), *decodes)

    first = [name for names in fetched(policy.decide(0.0, full(90))) for name in names]
    assert waiting(policy) == (0, 10, 2)
    assert len(first) == 5, "40 of 100 blocks"
    assert fetched(policy.decide(0.1, full(90))) == []
    # What has joined leaves the buffer, and the others may come into it: with as many blocks as that.
    later = policy.decide(0.2, full(60))
    joined = {name for name, _, _ in binds(later)} & set(first)
    assert joined
    assert len([name for names in fetched(later) for name in names]) <= len(joined)


def test_a_match_waits_prefetched_while_there_is_no_room() -> None:
    policy = started()
    policy.parked(1.0, parked("grown", 85))
    before = waiting(policy)
    actions = policy.decide(1.0, running(95))
    assert (binds(actions), fetched(actions)) == ([], [("grown",)])
    assert (before, waiting(policy)) == ((0, 0, 1), (0, 1, 1)), "beside the running batch: no batch is made for it"
    assert binds(policy.decide(1.1, running(70))) == [("grown", "decode-0", 0)]


def test_one_long_prefix_in_a_batch_does_not_make_all_requests_match() -> None:
    policy = binding()
    for index in range(12):
        policy.parked(0.0, parked(f"s{index}", 16))
    policy.parked(0.0, parked("long", 400))
    first = binds(policy.decide(0.0, busy(0, 0)))
    assert len(first) == 13, "the whole pool fits"
    for name, _, _ in first:
        policy.moved(0.5, name)
    policy.parked(1.0, parked("between", 200))
    policy.parked(1.0, parked("short", 18))
    assert binds(policy.decide(1.0, busy(13, 50))) == [("short", "decode-0", 0)]


def test_memory_is_filled_or_a_batchs_share_of_it_kept() -> None:
    for fill, joined in ((True, 8), (False, 6)):  # of four blocks each, beside 16 that are in use
        policy = binding(fill_memory=fill)
        for index in range(8):
            policy.parked(0.0, parked(f"s{index}", 60))
        assert len(binds(policy.decide(0.0, busy(2, 16)))) == joined


def test_a_starved_request_goes_before_matching_ones() -> None:
    policy = started()
    policy.parked(1.0, parked("long", 480))
    assert binds(policy.decide(1.0, running())) == []
    policy.parked(11.5, parked("match", 85))
    actions = policy.decide(11.5, running())
    assert binds(actions) == [("long", "decode-0", 1)]
    assert [a.reason for a in actions if isinstance(a, Bind)] == ["starved"]


def test_without_alignment_the_pool_is_first_come_first_served() -> None:
    policy = binding(aligned=False)
    for index, positions in enumerate((1600, 60, 60, 60)):
        policy.parked(float(index), parked(f"r{index}", positions, since_s=float(index)))
    assert binds(policy.decide(4.0, busy(0, 0)))[0][0] == "r0"


def test_no_request_overtakes_one_preempted_on_the_worker() -> None:
    policy = started()
    policy.parked(1.0, parked("grown", 85))
    preempted = busy(3, 60, *((f"s{index}", 80) for index in range(4)), waiting=1)
    assert binds(policy.decide(1.0, preempted)) == []


def test_an_evicted_request_goes_to_a_prefill_workers_buffer_and_comes_back_to_its_batch() -> None:
    policy = started()
    policy.parked(1.0, parked("s3", 82, since_s=1.0, at="decode-0"))
    (away,) = policy.decide(1.0, running(95))
    assert away == Bind("s3", "prefill-0", 0, "evicted: the longest makes room", parks=True)
    policy.moved(1.1, "s3")
    policy.parked(1.1, parked("s3", 82, since_s=1.1))
    assert binds(policy.decide(1.2, running(95))) == []
    assert binds(policy.decide(1.3, running(60))) == [("s3", "decode-0", 0)]


def test_without_prefetch_nothing_is_asked_of_the_holder() -> None:
    policy = binding(prefetch=False)
    for index in range(4):
        policy.parked(0.0, parked(f"s{index}", 60))
    assert policy.decide(0.0, busy(20, 85)) == []


def test_a_request_that_ends_in_the_pool_is_forgotten() -> None:
    policy = binding()
    policy.parked(0.0, parked("a", 60))
    policy.removed(0.0, "a")
    assert policy.decide(0.0, busy(0, 0)) == []
    for index in range(4):
        policy.parked(0.0, parked(f"s{index}", 60))
    policy.decide(0.0, busy(20, 85))
    policy.removed(0.1, "s2")
    assert [name for name, _, _ in binds(policy.decide(0.2, busy(0, 0)))] == ["s0", "s1", "s3"]


def test_a_lost_workers_candidates_go_to_another() -> None:
    policy = binding()
    for index in range(4):
        policy.parked(0.0, parked(f"s{index}", 60))
    policy.decide(0.0, busy(20, 85))
    other = cluster(view("prefill-0", Role.PREFILL), view("decode-1", Role.DECODE))
    assert {instance for _, instance, _ in binds(policy.decide(1.0, other))} == {"decode-1"}
