"""The bounds of a batch, one by one, and over random clusters none is ever passed."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from cohort.common.types import QueuedWork, Role
from tests.common.policies.bucketserve.cluster import BLOCK, cluster, controller, demand_rule, pair, view
from tests.examples import examples

TOKEN_BYTES = 2 * 2 * 1 * 8 * 2


def test_ten_per_cent_of_the_rest_is_kept() -> None:
    # 100 blocks of which 10 are kept: 9 requests of 10 blocks
    round_ = controller().open(0.0, pair(blocks=100))
    assert round_.next_batch() == "p0"
    taken = [round_.take(f"r{i}", 8, 40, online=True) for i in range(10)]
    assert taken == [True] * 9 + [False]


def test_memory_is_looked_at_anew_for_every_batch() -> None:
    control = controller()
    round_ = control.open(0.0, pair(blocks=100, free=50))
    assert round_.next_batch() == "p0"
    assert round_.take("r0", 8, 120, online=True)  # 30 of 45
    assert not round_.take("r1", 8, 80, online=True)
    # No report since: the reservation still counts
    round_ = control.open(0.1, pair(blocks=100, free=50))
    round_.next_batch()
    assert not round_.take("r1", 8, 80, online=True)
    # The report says that more became free, and r0 is there
    view_of_d0 = view("d0", Role.DECODE, free=90, queue=[QueuedWork("r0", 0, 8, 112)])
    round_ = control.open(0.3, cluster(view("p0", Role.PREFILL, blocks=1000), view_of_d0))
    round_.next_batch()
    assert round_.take("r1", 8, 80, online=True)


def test_a_request_beyond_the_safe_share_runs_alone_on_an_idle_worker() -> None:
    round_ = controller().open(0.0, pair(blocks=100))
    round_.next_batch()
    assert round_.take("big", 8, 396, online=True)  # 99 of 100 blocks, 90 are safe
    assert not round_.take("next", 4, 4, online=True)
    busy = pair(blocks=100, free=99, queue=[QueuedWork("x", 0, 4, 0)])
    round_ = controller().open(0.0, busy)
    round_.next_batch()
    assert not round_.take("big", 8, 396, online=True)


def test_a_batch_is_one_forward_of_the_prefill_worker() -> None:
    round_ = controller(ahead=10_000).open(0.0, pair(blocks=1000))
    round_.next_batch()
    assert round_.take("long", 600, 604, online=True)  # the first may be longer than a forward of 512
    assert not round_.take("short", 1, 2, online=True)
    round_.next_batch()
    assert [round_.take(f"r{i}", 200, 204, online=True) for i in range(3)] == [True, True, False]


def test_on_a_padded_path_every_row_costs_the_longest() -> None:
    round_ = controller(padded=True).open(0.0, pair(blocks=1000))
    round_.next_batch()
    assert round_.take("r0", 10, 12, online=True)
    assert round_.take("r1", 200, 202, online=True)  # 2 · 200
    assert not round_.take("r2", 10, 12, online=True)  # 3 · 200 > 512


def test_on_a_padded_path_a_worker_gets_one_whole_batch_when_half_a_forward_is_left() -> None:
    control = controller(padded=True, ahead=10_000)
    round_ = control.open(0.0, pair(blocks=1000))
    assert round_.next_batch() == "p0"
    assert round_.take("r0", 100, 102, online=True)
    assert round_.next_batch() is None  # no second one at once
    for queued, more in ((256, True), (257, False)):
        seen = cluster(view("p0", Role.PREFILL, blocks=1000, queued=queued), view("d0", Role.DECODE, blocks=1000))
        assert control.has_headroom(seen) is more
        assert (control.open(1.0, seen).next_batch() == "p0") is more
    sent = pair(blocks=1000)
    sent.instances["p0"].assigned_prefill_tokens = 1  # not in its report yet
    assert not control.has_headroom(sent)


def test_device_memory_beside_the_cache_bounds_the_forward() -> None:
    tight = cluster(
        view("p0", Role.PREFILL, blocks=1000, memory=100_000), view("d0", Role.DECODE, blocks=1000)
    )  # 0.9 · 100,000 / 1,000 = 90 tokens
    round_ = controller(activation_bytes=1000).open(0.0, tight)
    round_.next_batch()
    assert [round_.take(f"r{i}", 40, 44, online=True) for i in range(3)] == [True, True, False]


def test_the_prefill_workers_own_cache_counts_too() -> None:
    small = cluster(view("p0", Role.PREFILL, blocks=20), view("d0", Role.DECODE, blocks=1000))
    round_ = controller().open(0.0, small)
    round_.next_batch()
    assert [round_.take(f"r{i}", 32, 36, online=True) for i in range(3)] == [True, True, False]  # 8 of 18 blocks each


def test_prompts_may_wait_computed_in_a_share_of_the_prefill_workers_cache() -> None:
    full = cluster(
        view("p0", Role.PREFILL, blocks=100), view("d0", Role.DECODE, free=0, queue=[QueuedWork("x", 0, 400, 0)])
    )
    for staging, expected in ((0.0, 0), (0.5, 5), (1.0, 9)):
        control = controller(staging=staging)
        round_ = control.open(0.0, full)
        round_.next_batch()
        # Spans of 10 blocks beyond the decode worker's memory; of the prefill worker's own cache 90 blocks are safe
        assert [round_.take(f"r{i}", 40, 40, online=True) for i in range(12)].count(True) == expected
        # What was reserved once is not reserved again in the next round
        round_ = control.open(0.1, full)
        round_.next_batch()
        assert not round_.take("again", 40, 40, online=True)


def test_batches_go_to_the_prefill_worker_with_least_to_do() -> None:
    two = cluster(
        view("p0", Role.PREFILL, blocks=1000, queued=100),
        view("p1", Role.PREFILL, blocks=1000, queued=300),
        view("d0", Role.DECODE, blocks=1000),
    )
    round_ = controller(ahead=400).open(0.0, two)
    chosen = []
    while (name := round_.next_batch()) is not None:
        chosen.append(name)
        assert round_.take(f"r{len(chosen)}", 150, 154, online=True)
    # 300 and 100 tokens of room: p0 until it has 150 left, then again (150 > 100), then p1
    assert chosen == ["p0", "p0", "p1"]


def test_a_skipped_worker_leaves_the_others() -> None:
    two = cluster(
        view("p0", Role.PREFILL, blocks=10, free=1, running=1),
        view("p1", Role.PREFILL, blocks=1000, queued=10),
        view("d0", Role.DECODE, blocks=1000),
    )
    round_ = controller().open(0.0, two)
    assert round_.next_batch() == "p0"
    assert not round_.take("r", 32, 36, online=True)
    round_.skip_worker()
    assert round_.next_batch() == "p1"
    assert round_.take("r", 32, 36, online=True)


def test_nothing_goes_to_a_worker_whose_stats_are_old() -> None:
    for views in (
        (view("p0", Role.PREFILL, age_s=1.5), view("d0", Role.DECODE)),
        (view("p0", Role.PREFILL, age_s=1.5), view("d0", Role.DECODE, age_s=1.5)),
    ):
        round_ = controller().open(0.0, cluster(*views))
        assert round_.next_batch() in (None, "d0")  # at most the fresh one stands in


def test_offline_work_leaves_the_expected_need_of_online_work() -> None:
    control = controller(demand=demand_rule(blind_share=0.5))
    round_ = control.open(0.0, pair(blocks=100))
    round_.next_batch()
    assert [round_.take(f"r{i}", 4, 40, online=False) for i in range(6)] == [True] * 4 + [False, False]  # 45 of 90 stay
    assert round_.take("online", 4, 40, online=True)


def test_a_missing_role_is_stood_in_for() -> None:
    only = cluster(view("d0", Role.DECODE, blocks=100))
    control = controller()
    assert control.has_headroom(only)
    round_ = control.open(0.0, only)
    assert round_.next_batch() == "d0"
    assert round_.take("r", 8, 40, online=True)
    nobody = cluster()
    assert not control.has_headroom(nobody)
    assert control.open(0.0, nobody).next_batch() is None


def test_n_max_is_equation_6_at_the_mean_and_never_past_the_bound() -> None:
    control = controller(max_batch=20)
    seen = pair(blocks=100)
    control.open(0.0, seen)
    assert control.safe_memory_bytes == 90 * BLOCK * TOKEN_BYTES
    assert control.expected_batch(seen, 40.0) == 9
    assert control.expected_batch(seen, 1.0) == 20
    assert control.expected_batch(seen, 10_000.0) == 1


@settings(max_examples=examples(0.8))
@given(
    workers=st.lists(
        st.tuples(st.sampled_from(list(Role)), st.integers(1, 60), st.integers(0, 60), st.integers(0, 3)),
        min_size=1,
        max_size=4,
    ),
    lengths=st.lists(st.tuples(st.integers(1, 60), st.integers(0, 120)), min_size=1, max_size=25),
    padded=st.booleans(),
)
def test_no_round_reserves_more_than_is_safe(
    workers: list[tuple[Role, int, int, int]], lengths: list[tuple[int, int]], padded: bool
) -> None:
    views = [
        view(f"w{i}", role, blocks=blocks, free=min(free, blocks), running=running)
        for i, (role, blocks, free, running) in enumerate(workers)
    ]
    decoding = [v for v in views if v.role.decodes] or views
    safe = {v.instance: int(0.9 * v.free_blocks) for v in decoding}
    control = controller(padded=padded, ahead=100_000)
    round_ = control.open(0.0, cluster(*views))
    if round_.next_batch() is None:
        return
    taken = [
        length for i, (p, o) in enumerate(lengths) for length in [p + o] if round_.take(f"r{i}", p, length, online=True)
    ]
    blocks = sum(-(-length // BLOCK) for length in taken)
    # Beyond the safe total only one first request on each worker that was idle
    idle = sum(1 for v in decoding if v.stats.running == 0)
    if idle == 0:
        assert blocks <= sum(safe.values())
    else:
        largest = sorted((-(-length // BLOCK) for length in taken), reverse=True)[:idle]
        assert blocks - sum(largest) <= sum(safe.values())
