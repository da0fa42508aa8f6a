"""Where requests of a LoRA adapter go: to who holds it, unless another copy is sooner."""

from __future__ import annotations

import msgspec
import pytest

from cohort.common.policies.interface import InstanceView, Placed, WaitingRequest
from cohort.common.types import QueuedWork
from tests.common.policies.cohort.test_least_ttft import asked, cluster, placement, where, worker


def holding(view: InstanceView, *adapters: str, free: int = 0, load_s: float = 0.3) -> InstanceView:
    view.stats = msgspec.structs.replace(
        view.stats, adapters=list(adapters), free_adapter_slots=free, adapter_load_s=load_s
    )
    return view


def of_adapter(item: WaitingRequest, adapter: str) -> WaitingRequest:
    item.request = msgspec.structs.replace(item.request, adapter=adapter)
    return item


def test_loading_an_adapter_is_in_the_forecast() -> None:
    idle = cluster(worker("a"), holding(worker("b"), "sql"))
    policy = placement()
    first = policy.place(0.0, of_adapter(asked("1", 100), "sql"), idle, None)
    assert where(first) == ["b"]
    loaded = placement().place(0.0, of_adapter(asked("1", 100), "other"), cluster(holding(worker("b"), free=1)), None)
    assert isinstance(first, Placed) and isinstance(loaded, Placed)
    assert loaded.estimated_s == pytest.approx(first.estimated_s + 0.3, abs=0.02)


def test_a_queue_longer_than_the_load_is_worth_another_copy() -> None:
    queue = [QueuedWork(f"q{index}", 4000, 0, 10) for index in range(4)]
    busy, other = holding(worker("b", *queue), "sql"), holding(worker("c"), free=1)
    assert where(placement().place(0.0, of_adapter(asked("1", 100), "sql"), cluster(busy, other), None)) == ["c"]


def test_a_free_slot_goes_before_one_that_is_taken() -> None:
    views = cluster(holding(worker("a"), "one"), holding(worker("b"), free=1, load_s=0.0))
    assert where(placement().place(0.0, of_adapter(asked("1", 100), "two"), views, None)) == ["b"]
