"""Pool, buffers, switches and evictions in the virtual cluster, which checks every slot of KV on device and host."""

from __future__ import annotations

from functools import partial
from itertools import product
from random import Random

import pytest

from cohort.common.machines.effects import WorkerEffect
from cohort.common.machines.events import Received, WorkerEvent
from cohort.common.machines.worker.worker import WorkerMachine
from cohort.common.messages import KvChunk, PrefetchKv
from tests.common.machines.clusters import PD, PD_TWICE, UNIFIED_TWICE, finish, offer, total
from tests.common.machines.world import World, expected_output
from tests.common.policies.alignedserve.pool import requests, world
from tests.examples import another_of_its_kind
from tests.support.kinds import by_default, in_turn


def cancel(found: World, name: str) -> None:
    if name in found.owned:
        found.cancel(name)


@pytest.mark.parametrize(("blocks", "preemption"), in_turn(product((24, 28, 64), ("swap", "recompute")), of=2))
def test_undisturbed_also_with_little_memory(blocks: int, preemption: str) -> None:
    found = world(blocks, blocks=blocks, host_blocks=120, preemption=preemption)
    offer(found, 50, requests)
    finish(found, 6.0)
    assert found.attempts_lost == 0
    if blocks < 64:
        assert total(found, "pooled") > 0, "KV went to the host pool"
        assert total(found, "from_host") > 0, "and left from there"
    stats = found.manager.stats()
    assert stats["late_bound_total"] > 10
    assert stats["batch_switches_total"] > 0


def test_prefetched_evicted_and_preempted_in_small_caches() -> None:
    prefetched = evicted = 0
    for seed in range(3):
        found = world(seed, blocks=30, host_blocks=60, preemption="swap")
        offer(found, 40, requests, over_s=1.0)
        finish(found, 6.0)
        prefetched += total(found, "prefetched")
        evicted += int(found.manager.stats()["evictions_total"])
    assert prefetched > 3
    assert evicted > 3


def test_a_pool_without_host_memory_slows_and_never_fails() -> None:
    found = world(3, blocks=24, host_blocks=0)
    offer(found, 50, requests, over_s=0.5)
    finish(found, 6.0)
    assert found.attempts_lost == 0
    assert total(found, "pooled") == 0


@pytest.mark.parametrize(
    ("seed", "blocks"), by_default([(0, 24), (3, 24), (4, 20), (5, 24), (8, 24)], (0, 24), (4, 20))
)
def test_decode_workers_run_the_requests_they_hold_for_each_other(seed: int, blocks: int) -> None:
    """Seeds that once ended with KV parked on two decode workers, each in the other's buffer, in caches too full for
    either to move."""
    found = world(seed, blocks=blocks, host_blocks=0)
    offer(found, 40, requests, over_s=0.5)
    finish(found, 6.0)


@pytest.mark.parametrize(
    "iteration",
    by_default(
        ["continuous_batching", "chunked_prefill", "slo_batching", "vllm"], "continuous_batching", "slo_batching"
    ),
)
def test_other_schedulers_resume_requests_from_the_host_memory_of_their_own_worker(iteration: str) -> None:
    where_it_lay = 0
    for seed in range(3, 6):
        found = world(seed, UNIFIED_TWICE, blocks=24, host_blocks=60, preemption="swap", iteration=iteration)
        offer(found, 40, requests, over_s=0.5)
        finish(found, 6.0)
        assert found.attempts_lost == 0
        where_it_lay += total(found, "pooled") - total(found, "from_host") - total(found, "prefetched")
    assert where_it_lay > 0


def test_low_load_is_placed_at_once_and_never_waits_in_the_pool() -> None:
    found = world(4)
    found.run(2.5)
    random = Random(4)
    for index in range(12):
        prompt = [random.randrange(50) for _ in range(9)]
        found.at(0.8 * index, partial(found.submit, f"r{index}", prompt, 12))
    finish(found, 6.0)
    assert found.manager.stats()["late_bound_total"] == 0


@pytest.mark.parametrize("victim", ["prefill-0", "decode-0", "manager"])
@pytest.mark.parametrize("seed", by_default(range(2), 0))
def test_kills(victim: str, seed: int) -> None:
    found = world(40 + seed, blocks=40, host_blocks=30, run_failure_rate=0.05)
    offer(found, 40, requests)
    if victim == "manager":
        found.at(2.5, lambda: found.kill_manager(0.4))
    else:
        found.at(2.2, lambda: found.kill_worker(victim, 1.5))
    for index in range(0, 40, 9):
        found.at(2.1 + 0.01 * index, partial(cancel, found, f"r{index}"))
    finish(found, 6.0)


@pytest.mark.parametrize(("seed", "host_blocks"), in_turn(product((2, 25, 137, 153, 165, 203), (0, 16)), of=2))
def test_anything_breaks_in_tiny_caches(seed: int, host_blocks: int) -> None:
    """Seeds that once left KV parked where another request waited for its blocks."""
    random = Random(seed)
    found = world(
        seed,
        blocks=random.choice([20, 30]),
        host_blocks=host_blocks,
        preemption=random.choice(["swap", "recompute"]),
        run_failure_rate=random.choice([0.0, 0.1]),
        message_delay_s=random.choice([0.002, 0.05]),
        prefetch=random.random() < 0.7,
        aligned=random.random() < 0.8,
        starvation_s=random.choice([0.2, 5.0]),
    )
    offer(found, 30, requests)
    for _ in range(3):
        name, at_s, back_s = random.choice([*PD_TWICE, "manager"]), random.uniform(1.6, 5.0), random.uniform(0.1, 6.0)
        if name == "manager":
            found.at(at_s, partial(found.kill_manager, back_s))
        else:
            found.at(at_s, partial(found.kill_worker, name, back_s))
    finish(found, 6.0)


EVERY_S = 0.022


def adversary(starvation_s: float) -> World:
    """Short requests come faster than one decode worker serves them, so that their subtree is always the densest."""
    found = world(60, PD, blocks=48, host_blocks=4000, starvation_s=starvation_s)
    random = Random(60)
    for index in range(1000):
        prompt = [random.randrange(50) for _ in range(6)]
        while len(expected_output(prompt, 24)) < 24:  # no early ends: the batch never runs out by itself
            prompt = [random.randrange(50) for _ in range(6)]
        found.at(2.0 + EVERY_S * index, partial(found.submit, f"s{index}", prompt, 24))
    return found


def overtakers(found: World, *, patience_s: float, limit_s: float) -> int:
    """A long request comes at second 8; how many that came after it was due have ended before it has (or by the
    limit)."""
    prompt = [Random(61).randrange(50) for _ in range(52)]
    found.at(8.0, lambda: found.submit("long", prompt, 4))
    found.run(8.0 + limit_s, lambda: "long" in found.owned and found.owned["long"].finish is not None)
    first = int((6.0 + patience_s) / EVERY_S) + 1
    later = [found.owned[name] for name in (f"s{index}" for index in range(first, 1000)) if name in found.owned]
    return sum(owned.finish is not None for owned in later)


@pytest.mark.slow
@another_of_its_kind()
def test_an_adversary_cannot_starve_a_lone_long_request() -> None:
    """A request that came after the long one was due does not overtake it, but for those running or chosen already."""
    bounded = adversary(1.0)
    assert overtakers(bounded, patience_s=1.0, limit_s=20.0) <= 2
    assert bounded.owned["long"].finish is not None
    unbounded = adversary(1e6)
    assert overtakers(unbounded, patience_s=1.0, limit_s=9.0) > 8, "so the bound is A8's work"
    assert unbounded.owned["long"].finish is None


def test_prefetching_is_asked_of_the_holder_before_the_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str]] = []
    handle = WorkerMachine.handle

    def spy(machine: WorkerMachine, now_s: float, *events: WorkerEvent) -> list[WorkerEffect]:
        for event in events:
            match event:
                case Received(message=PrefetchKv(attempts=attempts)):
                    asked.extend((machine.setup.instance, attempt.request_id) for attempt in attempts)
                case Received(message=KvChunk(attempt=attempt)):
                    asked.append(("chunk", attempt.request_id))
                case _:
                    pass
        return handle(machine, now_s, *events)

    monkeypatch.setattr(WorkerMachine, "handle", spy)
    found = world(1, PD, blocks=40, host_blocks=120)
    offer(found, 40, requests, over_s=0.5)
    finish(found, 6.0)
    wanted = [name for who, name in asked if who.startswith("prefill")]
    assert wanted
    for name in wanted[:5]:
        assert asked.index(("prefill-0", name)) < asked.index(("chunk", name)), name
