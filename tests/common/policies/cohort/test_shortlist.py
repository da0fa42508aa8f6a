"""Of a large cluster a placement looks at a few workers: at whole devices, at all in turn, at what was good before."""

from __future__ import annotations

from random import Random

from cohort.common.policies.cohort.shortlist import MAX_DEVICES, Shortlist
from cohort.common.policies.interface import InstanceView
from tests.common.policies.cohort.test_least_ttft import asked, cluster, placement, prompt, report, where, worker


def views(count: int, per_device: int = 1) -> dict[str, InstanceView]:
    devices = {f"w{index}": f"d{index // per_device}" if per_device > 1 else "" for index in range(count)}
    return {name: worker(name, device=device) for name, device in devices.items()}


def test_a_small_cluster_is_looked_at_whole() -> None:
    shortlist, small = Shortlist(), views(2 * MAX_DEVICES, per_device=2)
    assert shortlist.changed(small) and not shortlist.changed(small)
    assert shortlist.of(None, {}) is small
    assert (shortlist.devices, shortlist.standbys) == (MAX_DEVICES, MAX_DEVICES)


def test_of_a_large_one_all_come_up_in_turn() -> None:
    shortlist, large = Shortlist(), views(5 * MAX_DEVICES)
    shortlist.changed(large)
    seen = [shortlist.of(None, {}) for _ in range(5)]
    assert all(len(each) == MAX_DEVICES for each in seen)
    assert {name for each in seen for name in each} == set(large)


def test_the_preferred_the_cached_and_the_remembered_are_among_them() -> None:
    shortlist, large = Shortlist(), views(100)
    shortlist.changed(large)
    shortlist.remember(["w70", "w71", "w72", "w73"])
    found = shortlist.of("w50", {"w60": 100, "w61": 300, "w62": 200})
    assert list(found)[:6] == ["w50", "w61", "w62", "w70", "w71", "w72"] and len(found) == MAX_DEVICES


def test_those_that_have_the_adapter_are_among_them() -> None:
    shortlist, large = Shortlist(), views(100)
    shortlist.changed(large)
    for name in ("w80", "w81", "w80", "w82"):
        shortlist.placed("sql", name)
    assert list(shortlist.of(None, {}, "sql"))[:2] == ["w82", "w80"]
    assert not {"w80", "w82"} & set(shortlist.of(None, {}, "other"))


def test_devices_are_looked_at_whole() -> None:
    shortlist, large = Shortlist(), views(60, per_device=3)
    shortlist.changed(large)
    found = shortlist.of("w31", {})
    assert len(found) == 3 * MAX_DEVICES and {"w30", "w31", "w32"} <= set(found)


def test_another_cluster_is_noticed() -> None:
    shortlist, large = Shortlist(), views(50)
    shortlist.changed(large)
    shortlist.remember(["w49"])
    fewer = {name: view for name, view in large.items() if name != "w49"}
    assert shortlist.changed(fewer)
    assert all("w49" not in shortlist.of(None, {}) for _ in range(50))


def test_a_large_cluster_is_loaded_evenly() -> None:
    """No report comes between the placements: only what was placed tells of the load."""
    policy, draw = placement(), Random(1)
    large = cluster(*(worker(f"w{index}") for index in range(64)))
    counts: dict[str | None, int] = {}
    for index in range(640):
        tokens = [draw.randrange(40_000) for _ in range(400)]
        [name] = where(policy.place(0.001 * index, asked(f"r{index}", tokens), large, None))
        counts[name] = counts.get(name, 0) + 1
    assert len(counts) == 64 and max(counts.values()) <= 2 * 640 / 64


def test_a_cached_prefix_finds_its_worker_among_many() -> None:
    policy, large = placement(), cluster(*(worker(f"w{index}") for index in range(64)))
    common = list(range(2000))
    [first] = where(policy.place(1.0, asked("a", common), large, None))
    policy.finished(1.5, "a")
    again = []
    for index in range(12):
        again.append(where(policy.place(2.0 + index, asked(f"b{index}", [*common, index]), large, None)))
        policy.finished(2.5 + index, f"b{index}")
    assert again == [[first]] * 12


def test_a_finished_request_weighs_on_no_worker() -> None:
    policy, large = placement(caching=False), cluster(*(worker(f"w{index}") for index in range(3)))
    for index in range(30):
        policy.place(0.0, asked(f"r{index}", 2000), large, None)
        policy.finished(0.0, f"r{index}")
    fresh = placement(caching=False)
    one = policy.place(0.0, asked("x", 100), large, None)
    other = fresh.place(0.0, asked("x", 100), large, None)
    assert where(one) == where(other)
    assert one.forecast_s == other.forecast_s  # type: ignore[union-attr]


def test_where_none_of_the_few_can_hold_it_another_one_is_found() -> None:
    policy = placement()
    large = cluster(*(worker(f"w{index}", blocks=10) for index in range(40)), worker("big"))
    for index in range(5):
        assert where(policy.place(0.0, asked(f"r{index}", 3000), large, None)) == ["big"]


def test_a_busy_worker_is_passed_over() -> None:
    policy = placement()
    busy = [worker(f"w{index}", *(prompt(f"p{index}-{i}", 3000) for i in range(8))) for index in range(30)]
    large = cluster(*busy, worker("idle"))
    found = [where(policy.place(0.001 * i, asked(f"r{i}", 64, output=8.0), large, None)) for i in range(31)]
    assert ["idle"] in found
    large.instances["w0"].stats = report()
    assert any(where(policy.place(1.0 + 0.001 * i, asked(f"s{i}", 64), large, None)) == ["w0"] for i in range(31))
