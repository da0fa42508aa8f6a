"""Routers in front of whole engines: affinity to what is cached, given up for load, each by its own rule."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from cohort.common.policies.interface import ClusterView, Impossible, InstanceView, Placed, Wait, WaitingRequest
from cohort.common.policies.routers.routers import ByCost, ByMatch, ByScores, Router
from cohort.common.types import Attempt, Request, Role, SamplingParams, WorkerCapacity, WorkerStats

Make = Callable[[], Router]
ROUTERS: list[Make] = [lambda: ByMatch(4), lambda: ByCost(1.0), lambda: ByScores(2.0, 2.0)]


def view(name: str, *, running: int = 0, waiting: int = 0, queued: int = 0, free: int = 1000) -> InstanceView:
    capacity = WorkerCapacity(Role.UNIFIED, "m", 8192, 1, 1, 1, 1, 16, 1000, 0, 64, 2048)
    stats = WorkerStats(
        total_blocks=1000, free_blocks=free, running=running, waiting=waiting, queued_prefill_tokens=queued
    )
    return InstanceView(name, capacity, stats)


def asked(first: int, tokens: int = 1024) -> WaitingRequest:
    """A prompt whose beginning is `first`, over and over."""
    request = Request(Attempt("r", 1), "g", [first] * tokens, tokens, SamplingParams(max_tokens=8), 0.0)
    return WaitingRequest(request, 0.0, None)


def where(router: Router, waiting: WaitingRequest, *views: InstanceView) -> str:
    placed = router.place(0.0, waiting, ClusterView({each.instance: each for each in views}), None)
    assert isinstance(placed, Placed), placed
    (segment,) = placed.segments
    return segment.instance


@pytest.mark.parametrize("make", ROUTERS)
def test_a_prompt_follows_its_beginning_while_loads_are_alike(make: Make) -> None:
    router, busy, other = make(), view("a", running=1, waiting=1, queued=64), view("b")
    assert where(router, asked(1), busy, other) == "b"
    busy.stats, other.stats = stats_of(busy), stats_of(other, running=1)
    assert where(router, asked(1), busy, other) == "b", "it has the prompt"
    assert where(router, asked(2), busy, other) == "a", "nobody has it"


@pytest.mark.parametrize("make", ROUTERS)
def test_a_worker_with_much_to_do_gets_nothing_whatever_it_has(make: Make) -> None:
    router, first, second = make(), view("a"), view("b")
    assert where(router, asked(1), first, second) == "a"
    first.stats = stats_of(first, running=20, waiting=30, queued=4000, free=100)
    assert where(router, asked(1), first, second) == "b"


def stats_of(of: InstanceView, **numbers: int) -> WorkerStats:
    return view(of.instance, **numbers).stats


def test_a_short_match_does_not_decide():
    router, first, second = ByMatch(64), view("a"), view("b")
    assert where(router, asked(1), first, second) == "a"
    first.stats = stats_of(first, running=1)
    waiting = asked(2)
    waiting.request.tokens[:256] = [1] * 256
    assert where(router, waiting, first, second) == "b", "a quarter of the prompt"


@pytest.mark.parametrize("make", ROUTERS)
def test_what_fits_nowhere_is_said(make: Make) -> None:
    assert isinstance(make().place(0.0, asked(1), ClusterView({}), None), Wait)
    found = make().place(0.0, asked(1, 9000), ClusterView({"a": view("a")}), None)
    assert isinstance(found, Impossible)
    placed = make().place(0.0, asked(1), ClusterView({"a": view("a"), "b": view("b")}), "b")
    assert isinstance(placed, Placed) and placed.segments[0].instance == "b"
