"""Fair sharing around an order: identical for one key, shares for several, and nothing is lost between the two."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cohort.common.config import load_config
from cohort.common.policies import compose
from cohort.common.policies.baselines.fcfs import Fcfs
from cohort.common.policies.baselines.pass_through import PassThrough
from cohort.common.policies.fair_order import FairOrder
from cohort.common.policies.interface import ClusterView, InstanceView, PrefillOrder, WaitingRequest
from cohort.common.types import Attempt, Prediction, Request, Role, SamplingParams, WorkerCapacity, WorkerStats

AHEAD = 100
OUTPUT = 10
CAPACITY = WorkerCapacity(Role.PREFILL, "m", 10_000, 1, 1, 1, 1, 16, 1000, 0, 64, 512)


def waiting(
    name: str, owner: str, arrival_s: float = 0.0, *, prompt: int = 10, attempt: int = 0, **more: Any
) -> WaitingRequest:
    sampling = SamplingParams(max_tokens=OUTPUT)
    request = Request(Attempt(name, attempt), "g", [0] * prompt, prompt, sampling, arrival_s, owner=owner, **more)
    return WaitingRequest(request, arrival_s, None)


def cluster(headroom: int) -> ClusterView:
    return ClusterView({"p": InstanceView("p", CAPACITY, WorkerStats(queued_prefill_tokens=AHEAD - headroom))})


def fair(order: PrefillOrder | None = None) -> FairOrder:
    inside = Fcfs(dispatch_ahead_tokens=AHEAD) if order is None else order
    return FairOrder(inside, ahead_tokens=AHEAD, default_output=OUTPUT)


def went(order: PrefillOrder, now_s: float = 0.0, headroom: int = 10) -> list[str]:
    return [name for dispatch in order.decide(now_s, cluster(headroom)) for name in dispatch.request_ids]


def drained(order: PrefillOrder, now_s: float = 0.0, *, most: int = 1000) -> list[str]:
    """Requests in the order in which they go while workers have headroom for one at a time."""
    names: list[str] = []
    while len(names) < most and (found := went(order, now_s)):
        names += found
    return names


# -- one owner -----------------------------------------------------------------------------------------------------

events = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(0, 30), st.integers(1, 40), st.integers(-1, 1), st.booleans()),
        st.tuples(st.just("remove"), st.integers(0, 30)),
        st.tuples(st.just("decide"), st.integers(0, AHEAD), st.booleans()),
    ),
    max_size=60,
)


CONFIGS = {preset: load_config(preset=preset) for preset in ("unified", "bucketserve", "cohort")}


@pytest.mark.parametrize("preset", CONFIGS)
@settings(max_examples=50, deadline=None)
@given(events)
def test_with_one_owner_every_decision_is_that_of_the_order_inside(preset: str, script: list[Any]) -> None:
    config = CONFIGS[preset]
    plain = compose.prefill_order(config)
    around = fair(compose.prefill_order(config))
    for number, step in enumerate(script):
        now_s = float(number)
        match step:
            case ("add", place, prompt, priority, online):
                more = {"prompt": prompt, "priority": priority, "online": online}
                plain.add(now_s, waiting(f"r{place}", "", now_s, **more))
                around.add(now_s, waiting(f"r{place}", "k", now_s, **more))
            case ("remove", place):
                plain.remove(now_s, f"r{place}")
                around.remove(now_s, f"r{place}")
            case ("decide", headroom, returns):
                expected = plain.decide(now_s, cluster(headroom))
                assert around.decide(now_s, cluster(headroom)) == expected
                if returns and expected:  # placement found no worker for it
                    name = expected[0].request_ids[0]
                    plain.add(now_s, waiting(name, "", now_s))
                    around.add(now_s, waiting(name, "k", now_s))
        assert (len(around), around.waiting_tokens) == (len(plain), plain.waiting_tokens)
        assert around.next_wake_s(now_s) == plain.next_wake_s(now_s)
    assert not around.sharing and around.metrics() == plain.metrics()


def test_only_a_configuration_with_several_keys_shares() -> None:
    assert isinstance(compose.prefill_order(load_config()), Fcfs | PassThrough)
    for keys, shares in (([], False), (["a"], False), (["a", "a"], False), (["a", "b"], True)):
        order = compose.prefill_order(load_config(overrides={"gateway": {"api_keys": keys}}))
        assert isinstance(order, FairOrder) == shares
    assert isinstance(compose.prefill_order(load_config(overrides={"keys": {"file": "/k.json"}})), FairOrder)
    off = {"gateway": {"api_keys": ["a", "b"]}, "keys": {"fair_sharing": False}}
    assert not isinstance(compose.prefill_order(load_config(overrides=off)), FairOrder)


# -- several -------------------------------------------------------------------------------------------------------


def flood(order: PrefillOrder, owner: str, count: int, **more: Any) -> None:
    for number in range(count):
        order.add(0.0, waiting(f"{owner}{number:03}", owner, number / 1000, **more))


def test_a_long_queue_does_not_keep_another_key_waiting() -> None:
    order = fair()
    flood(order, "a", 200)
    assert went(order) == ["a000"]
    flood(order, "b", 3)
    assert drained(order, most=6) == ["a001", "b000", "a002", "b001", "a003", "b002"]
    assert drained(order)[:2] == ["a004", "a005"]


def test_also_around_an_order_that_keeps_nothing() -> None:
    order = fair(PassThrough())
    flood(order, "b", 1)
    flood(order, "a", 50)
    names = went(order, headroom=40)
    assert 4 <= len(names) <= 5 and "b000" in names  # not all 51: what is dispatched cannot be shared out any more
    assert went(order, headroom=0) == []


def test_weights() -> None:
    order = fair()
    flood(order, "a", 50, weight=1.0)
    flood(order, "b", 50, weight=4.0)
    counts = Counter(name[0] for name in drained(order, most=25))
    assert counts == {"b": 20, "a": 5}


def test_long_requests_count_for_what_they_are() -> None:
    order = fair()
    flood(order, "a", 20, prompt=90)  # with its output 100, the others 20
    flood(order, "b", 90)
    counts = Counter(name[0] for name in drained(order, most=60))
    assert counts == {"b": 50, "a": 10}


def test_what_is_expected_of_an_answer_counts() -> None:
    order = fair()
    for number in range(20):
        order.add(0.0, waiting(f"a{number:02}", "a"))
        order.add(0.0, waiting(f"b{number:02}", "b"))
        order.revise(0.0, f"a{number:02}", Prediction(1, 1, 1, 1))  # 11 tokens, the others 20
    order.decide(0.0, cluster(0))
    for number in range(20):
        order.remove(0.0, f"a{number:02}")
    assert len(order) == 20


def test_batch_work_of_one_key_waits_for_online_requests_of_all() -> None:
    order = fair()
    flood(order, "a", 3, online=False)
    flood(order, "b", 3)
    flood(order, "c", 2)
    assert sorted(drained(order, most=5)) == ["b000", "b001", "b002", "c000", "c001"]
    assert drained(order) == ["a000", "a001", "a002"]


def test_within_a_key_priority_then_class_then_arrival() -> None:
    order = fair()
    order.add(0.0, waiting("other", "z"))
    order.add(0.0, waiting("late", "a", 3.0))
    order.add(0.0, waiting("patient", "a", 1.0, traffic_class="be"))
    order.add(0.0, waiting("polite", "a", 0.0, priority=1))
    order.add(0.0, waiting("early", "a", 2.0))
    assert [name for name in drained(order) if name != "other"] == ["early", "late", "patient", "polite"]


def test_a_lost_attempt_comes_again_before_everything_that_is_held() -> None:
    order = fair()
    flood(order, "a", 50)
    flood(order, "b", 50)
    drained(order, most=10)
    order.add(0.0, waiting("again", "a", -1.0, attempt=1))
    assert drained(order, most=1) == ["again"]


def test_a_request_that_found_no_worker_is_charged_once() -> None:
    order = fair()
    flood(order, "a", 20)
    flood(order, "b", 20)
    for _ in range(10):  # placement sends it back again and again
        [name] = went(order)
        order.add(0.0, waiting(name, name[0], int(name[1:]) / 1000))
    counts = Counter(name[0] for name in drained(order, most=20))
    assert counts == {"a": 10, "b": 10}


def test_a_key_that_is_alone_again_is_no_longer_held_back() -> None:
    order = fair()
    flood(order, "a", 50)
    flood(order, "b", 1)
    drained(order, most=4)
    assert order.sharing and order.metrics()["fair_contentions"] == 1
    assert len(went(order, 1.0, headroom=20)) == 2 and order.sharing
    assert len(went(order, 10.0, headroom=20)) == 2 and not order.sharing
    assert len(drained(order, 10.0)) == 51 - 4 - 4


def test_around_an_order_that_keeps_nothing_a_key_alone_leaves_a_place() -> None:
    order = FairOrder(PassThrough(), ahead_tokens=AHEAD, default_output=OUTPUT, alone_tokens=4 * AHEAD)
    flood(order, "a", 200)
    assert went(order, headroom=AHEAD) == [f"a{number:03}" for number in range(40)]  # in their order, 400 tokens
    assert (len(order), order.sharing) == (160, False)
    flood(order, "b", 2)
    assert went(order, headroom=0) == []
    assert sorted(went(order, headroom=40)) == ["a040", "a041", "b000", "b001"]


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("add"), st.sampled_from("abc"), st.integers(1, 60), st.booleans()),
            st.tuples(st.just("remove"), st.integers(0, 80)),
            st.tuples(st.just("again"), st.integers(0, 80)),
            st.tuples(st.just("decide"), st.integers(0, AHEAD), st.booleans(), st.floats(0, 3)),
        ),
        max_size=80,
    )
)
def test_every_request_goes_once_and_workers_with_headroom_never_wait(script: list[Any]) -> None:
    order, now_s = fair(), 0.0
    left: dict[str, WaitingRequest] = {}
    for number, step in enumerate(script):
        match step:
            case ("add", owner, prompt, online):
                left[f"r{number}"] = waiting(f"r{number}", owner, now_s, prompt=prompt, online=online)
                order.add(now_s, left[f"r{number}"])
            case ("remove", place):
                left.pop(f"r{place}", None)
                order.remove(now_s, f"r{place}")
            case ("again", place) if f"r{place}" in left:
                order.add(now_s, left[f"r{place}"])
            case ("decide", headroom, returns, passes_s):
                now_s += passes_s
                names = went(order, now_s, headroom)
                assert bool(names) == bool(left and headroom)
                gone = [left.pop(name) for name in names]  # KeyError: it went twice, or after it was removed
                if returns and gone:
                    left[gone[0].request_id] = gone[0]
                    order.add(now_s, gone[0])
        assert len(order) == len(left)
        assert order.waiting_tokens == sum(len(each.request.tokens) for each in left.values())
    assert sorted(drained(order, now_s)) == sorted(left)
