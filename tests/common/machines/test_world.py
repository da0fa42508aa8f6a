"""Manager and workers together: whatever breaks, every request ends once, exactly, and nothing is left."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cohort.common.policies.baselines.placements import Colocated, Disaggregated
from cohort.common.policies.interface import Placement
from cohort.common.types import Role
from cohort.common.virtual_cluster.plugins import Flight
from tests.common.machines import clusters
from tests.common.machines.clusters import PD, PD_TWICE, UNIFIED, Asked, finish, strike, tokens, total
from tests.common.machines.faults import Fault, any_faults
from tests.common.machines.world import SplitAnywhere, World
from tests.examples import another_of_its_kind, of_worlds
from tests.support.kinds import by_default, in_turn

Landing = Callable[[float, Flight], float]


def requests(random: Random, shared: int = 0) -> Iterator[Asked]:
    """Half of them share a prefix of so many tokens."""
    prefix = tokens(random, shared)
    while True:
        prompt = (prefix if random.random() < 0.5 else []) + tokens(random, random.randint(1, 40))
        yield Asked(prompt, random.randint(1, 30))


def offer(world: World, count: int, *, shared: int = 0) -> None:
    clusters.offer(world, count, partial(requests, shared=shared), over_s=3.0)


@pytest.mark.parametrize(
    ("roles", "placement"), [(UNIFIED, Colocated), (PD, Disaggregated), (PD_TWICE, Disaggregated), (PD, Colocated)]
)
def test_undisturbed(roles: dict[str, Role], placement: type[Colocated] | type[Disaggregated]) -> None:
    world = World(1, roles, placement)
    offer(world, 60, shared=12)
    finish(world)
    assert world.attempts_lost == 0
    if placement is Disaggregated:
        assert total(world, "transfers_in") > 30
    hits = sum(node.machine.kv.metrics()["prefix_hits_total"] for node in world.workers.values())
    assert hits > 0


def test_reports_expect_of_an_answer_beyond_its_prediction_as_much_again() -> None:
    """8 tokens are predicted, 30 at most are drawn; the model's own end, if any, is not known before."""
    world = World(5, UNIFIED, Colocated)
    for index in range(6):
        world.submit(f"r{index}", [3 + index, 1, 4], 30)
    machine, seen = world.workers["unified-0"].machine, set()
    for hundredth in range(1, 400):
        world.run(0.01 * hundredth)
        sampled = {sequence.request_id: sequence.output_tokens for sequence in machine.sequences()}
        for work in machine.stats(0).queue:
            count = sampled[work.request_id]
            assert work.decode_left == max(1, min(abs(8 - count), 30 - count))
            seen.add(count)
    assert min(seen) < 8 and max(seen) > 20


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
@pytest.mark.parametrize(("roles", "placement"), [(UNIFIED, Colocated), (PD, Disaggregated)])
def test_a_small_cache_preempts_and_stays_exact(
    preemption: str, roles: dict[str, Role], placement: type[Colocated] | type[Disaggregated]
) -> None:
    world = World(2, roles, placement, blocks=22, preemption=preemption, host_blocks=40)
    offer(world, 60)
    finish(world)
    assert total(world, "preemptions") > 0


@pytest.mark.parametrize(("seed", "preemption"), in_turn(product(range(4), ("swap", "recompute")), of=2))
def test_segments_may_meet_anywhere_even_when_the_cache_is_tight(seed: int, preemption: str) -> None:
    world = World(
        seed, PD_TWICE, lambda: SplitAnywhere(seed), blocks=24, preemption=preemption, host_blocks=60, caching=seed > 1
    )
    offer(world, 90)
    finish(world)
    assert world.attempts_lost == 0
    assert total(world, "preemptions") > 0
    assert total(world, "transfers_in") > 20


@pytest.mark.parametrize(
    ("roles", "placement", "window"),
    in_turn(
        [(*placed, window) for window in (1, 6, 13) for placed in ((UNIFIED, Colocated), (PD, Disaggregated))], of=2
    ),
)
def test_blocks_behind_a_window_are_given_back(
    window: int, roles: dict[str, Role], placement: type[Colocated] | type[Disaggregated]
) -> None:
    """Every slot that a position sees is checked; the prefix cache finds blocks that running sequences gave back."""
    world = World(1, roles, placement, window=window)
    offer(world, 60, shared=25)
    finish(world)
    metrics = [node.machine.kv.metrics() for node in world.workers.values()]
    assert all(each["window_blocks_total"] > 10 for each in metrics)
    assert sum(each["prefix_hits_total"] for each in metrics) > 0


@pytest.mark.parametrize(
    ("window", "preemption"),
    by_default(product((1, 6, 13), ("swap", "recompute")), (1, "recompute"), (6, "swap"), (13, "swap")),
)
def test_windows_under_splits_preemption_and_failed_runs(window: int, preemption: str) -> None:
    world = World(
        window,
        PD_TWICE,
        lambda: SplitAnywhere(window),
        blocks=24,
        preemption=preemption,
        host_blocks=60,
        run_failure_rate=0.1,
        window=window,
    )
    offer(world, 90, shared=18)
    finish(world)
    assert total(world, "preemptions") > 0 or window < 13  # then the cache is no longer tight
    assert total(world, "transfers_in") > 20
    assert sum(node.machine.kv.metrics()["window_blocks_total"] for node in world.workers.values()) > 100


@pytest.mark.parametrize(
    ("groups", "preemption"),
    [
        ((0, 6, 6), "swap"),
        pytest.param((0, 13), "recompute", marks=another_of_its_kind()),
        pytest.param((0, 1), "recompute", marks=another_of_its_kind()),
        pytest.param((9, 5), "swap", marks=another_of_its_kind()),
    ],
)
def test_groups_of_layers_under_splits_preemption_and_failed_runs(groups: tuple[int, ...], preemption: str) -> None:
    """Each group's KV has values of its own: a block in another group's place is wrong KV."""
    world = World(
        sum(groups),
        PD_TWICE,
        lambda: SplitAnywhere(sum(groups)),
        blocks=20,
        preemption=preemption,
        host_blocks=60,
        run_failure_rate=0.1,
        groups=groups,
    )
    offer(world, 90, shared=18)
    finish(world)
    metrics = [node.machine.kv.metrics() for node in world.workers.values()]
    assert total(world, "preemptions") > 0
    assert total(world, "transfers_in") > 20
    assert sum(each["window_blocks_total"] for each in metrics) > 100
    assert sum(each["prefix_hits_total"] for each in metrics) > 0


@pytest.mark.parametrize("groups", [(), (0, 6)])
def test_a_window_moves_fewer_blocks(groups: tuple[int, ...]) -> None:
    """What lies behind it is neither granted nor sent; the outputs are the same."""
    sent = {0: 0, 6: 0}
    for window in sent:
        of_window = (0, window) if groups else ()
        world = World(1, PD, Disaggregated, window=window, caching=False, groups=of_window)
        landing_s = world.network.landing_s

        def counted(now_s: float, flight: Flight, window: int = window, landing_s: Landing = landing_s) -> float:
            sent[window] += sum(run.num_blocks for run in flight.sent)
            return landing_s(now_s, flight)

        world.network.landing_s = counted  # type: ignore[method-assign]
        offer(world, 40)
        finish(world)
    assert 0 < sent[6] < (0.85 if groups else 0.7) * sent[0]


def test_a_request_that_fits_nowhere_is_refused() -> None:
    world = World(3, PD, Disaggregated, blocks=8)
    world.run(3.0)
    world.submit("big", [1] * 40, 30)
    world.submit("small", [1] * 10, 5)
    world.run_until_quiet()
    assert world.owned["big"].refused
    world.check_outputs()
    assert world.owned["small"].finish is not None


def test_failed_runs_are_sent_again_over_the_second_path() -> None:
    world = World(4, PD, Disaggregated, run_failure_rate=0.3)
    offer(world, 60)
    finish(world)
    assert total(world, "transfer_retries") > 5


@pytest.mark.parametrize("victim", ["prefill-0", "decode-0"])
def test_a_dead_worker_loses_nothing(victim: str) -> None:
    world = World(5, PD_TWICE, Disaggregated)
    offer(world, 80)
    world.at(2.5, lambda: world.kill_worker(victim, None))
    finish(world)
    assert world.attempts_lost > 0


def test_the_only_decode_worker_dies_and_the_prefill_worker_stands_in() -> None:
    world = World(6, PD, Disaggregated)
    offer(world, 40)
    world.at(2.5, lambda: world.kill_worker("decode-0", None))
    finish(world)


def test_a_restarted_manager_takes_over_requests_on_workers() -> None:
    world = World(7, PD, Disaggregated)
    offer(world, 40)
    world.at(2.3, lambda: world.kill_manager(0.4))
    finish(world)


def test_cancelled_requests_leave_nothing() -> None:
    world = World(8, PD, Disaggregated)
    offer(world, 60)
    for index in range(0, 60, 2):
        world.at(1.5 + 0.07 * index, lambda i=index: world.cancel(f"r{i}") if f"r{i}" in world.owned else None)
    finish(world, 6.0)


@of_worlds(0.4)
@given(
    seed=st.integers(0, 2**32),
    placement=st.sampled_from([Colocated, Disaggregated, SplitAnywhere]),
    preemption=st.sampled_from(["swap", "recompute"]),
    blocks=st.sampled_from([20, 30, 64]),
    chunk=st.sampled_from([3, 8, 32]),
    caching=st.booleans(),
    failures=st.sampled_from([0.0, 0.1]),
    delay=st.sampled_from([0.002, 0.05]),
    faults=any_faults(latest_s=5.0, longest_s=6.0, most=6),
)
def test_anything_may_break_at_any_time(
    seed: int,
    placement: Callable[[], Placement],
    preemption: str,
    blocks: int,
    chunk: int,
    caching: bool,
    failures: float,
    delay: float,
    faults: list[Fault],
) -> None:
    world = World(
        seed,
        PD_TWICE,
        placement,
        blocks=blocks,
        preemption=preemption,
        chunk=chunk,
        caching=caching,
        run_failure_rate=failures,
        message_delay_s=delay,
    )
    offer(world, 30, shared=9)
    strike(world, faults)
    finish(world, 6.0)


@pytest.mark.parametrize(("seed", "preemption"), in_turn(product((8, 10, 25, 39, 48, 49), ("swap", "recompute")), of=2))
def test_tight_caches_that_transfer_both_ways(seed: int, preemption: str) -> None:
    """Grants that arrive while KV is still on its way back from the host, and caches full of KV that waits for the
    other worker's cache, which is full of KV that waits for this one."""
    world = World(seed, PD_TWICE, lambda: SplitAnywhere(seed), blocks=20, preemption=preemption, message_delay_s=0.002)
    offer(world, 30, shared=9)
    finish(world)


def test_a_ring_of_waiting_caches_gives_one_kv_transfer_back() -> None:
    world = World(4, PD_TWICE, lambda: SplitAnywhere(4), blocks=20, preemption="swap", message_delay_s=0.002)
    offer(world, 30, shared=9)
    world.run(4.0)
    world.run_until_quiet()
    assert total(world, "stalls") == world.attempts_lost == 1


def test_a_worker_killed_twice_at_one_instant_amid_tight_caches() -> None:
    world = World(
        240580,
        PD_TWICE,
        SplitAnywhere,
        blocks=20,
        preemption="swap",
        chunk=8,
        caching=True,
        run_failure_rate=0.1,
        message_delay_s=0.002,
    )
    offer(world, 30, shared=9)
    for _ in range(2):
        world.at(3.18, lambda: world.kill_worker("decode-1", 5.45))
    finish(world, 6.0)
