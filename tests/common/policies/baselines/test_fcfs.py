"""The order of arrival, through any coming, going and coming back."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cohort.common.policies.baselines.fcfs import Fcfs
from cohort.common.policies.interface import ClusterView, InstanceView, WaitingRequest
from cohort.common.types import Attempt, Request, Role, SamplingParams, WorkerCapacity, WorkerStats


def waiting(name: str, arrival_s: float, *, priority: int = 0, online: bool = True, prompt: int = 10) -> WaitingRequest:
    request = Request(
        Attempt(name, 1),
        "g",
        [0] * prompt,
        prompt,
        SamplingParams(max_tokens=4),
        arrival_s,
        priority=priority,
        online=online,
    )
    return WaitingRequest(request, 0.0, None)


def cluster(queued: int) -> ClusterView:
    capacity = WorkerCapacity(Role.PREFILL, "m", 1000, 1, 1, 1, 1, 16, 100, 0, 64, 512)
    return ClusterView({"p": InstanceView("p", capacity, WorkerStats(queued_prefill_tokens=queued))})


def dispatched(order: Fcfs, requests: int) -> list[str]:
    """Requests that go next when so many prompts of ten tokens fit."""
    return [d.request_ids[0] for d in order.decide(0.0, cluster(1000 - 10 * requests))]


def test_priority_before_online_before_arrival() -> None:
    order = Fcfs(dispatch_ahead_tokens=1000)
    for each in (
        waiting("late", 2.0),
        waiting("batch", 0.0, online=False),
        waiting("first", 1.0),
        waiting("urgent", 9.0, priority=-1),
    ):
        order.add(0.0, each)
    assert order.waiting_tokens == 40
    assert dispatched(order, 3) == ["urgent", "first", "late"]
    assert (len(order), order.waiting_tokens) == (1, 10)
    assert dispatched(order, 0) == []
    assert dispatched(order, 5) == ["batch"]


def test_a_request_back_with_another_priority_is_ranked_by_that() -> None:
    order = Fcfs(dispatch_ahead_tokens=1000)
    order.add(0.0, waiting("a", 0.0))
    order.add(0.0, waiting("b", 1.0))
    order.remove(0.0, "a")
    order.add(0.0, waiting("a", 0.0, priority=5))
    assert dispatched(order, 9) == ["b", "a"]
    order.remove(0.0, "nobody")
    assert (len(order), order.waiting_tokens) == (0, 0)


@given(
    steps=st.lists(
        st.one_of(
            st.tuples(st.just("add"), st.integers(0, 300), st.integers(-1, 1), st.booleans()),
            st.tuples(st.just("remove"), st.integers(0, 300)),
            st.tuples(st.just("decide"), st.integers(0, 4)),
        ),
        max_size=120,
    )
)
def test_equals_sorting_all_requests(steps: list[tuple[object, ...]]) -> None:
    order, model = Fcfs(dispatch_ahead_tokens=1000), dict[str, tuple[int, bool, float, str]]()
    for step in steps:
        match step:
            case ("add", int(number), int(priority), bool(online)):
                name = f"r{number}"
                if name not in model:
                    order.add(0.0, waiting(name, number % 7, priority=priority, online=online))
                    model[name] = (priority, not online, number % 7, name)
            case ("remove", int(number)):
                order.remove(0.0, f"r{number}")
                model.pop(f"r{number}", None)
            case ("decide", int(count)):
                expected = sorted(model, key=lambda name: model[name])[:count]
                assert dispatched(order, count) == expected
                for name in expected:
                    del model[name]
        assert (len(order), order.waiting_tokens) == (len(model), 10 * len(model))
