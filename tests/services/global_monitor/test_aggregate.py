"""Up, failed, gone: the whole life of a process, step by step under a clock of our own."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cohort.common.messages import Farewell, Heartbeat
from cohort.services.global_monitor.aggregate import MAX_INSTANCES, Cluster, Event, Status


def beat(
    instance: str = "decode-0", role: str = "decode_worker", incarnation: int = 1, ready: bool = True, **stats: float
) -> Heartbeat:
    return Heartbeat(instance, role, incarnation, 4711, ready, "", stats)


def cluster() -> Cluster:
    return Cluster(silence_s=3.0, history_s=900.0)


def test_a_process_appears_falls_silent_and_comes_back() -> None:
    watched = cluster()
    assert watched.on_heartbeat(0.0, beat()) == [Event(0.0, "decode-0", "appeared")]
    assert watched.on_heartbeat(1.0, beat()) == []
    assert watched.tick(4.0) == []  # exactly silence_s: still up
    assert watched.tick(4.1) == [Event(4.1, "decode-0", "down")]
    assert watched.tick(9.0) == []
    process = watched.processes["decode-0"]
    assert (process.status, process.ready, process.since_s) == (Status.DOWN, False, 4.1)
    assert watched.on_heartbeat(10.0, beat()) == [Event(10.0, "decode-0", "back")]
    assert (process.status, process.ready, process.restarts) == (Status.UP, True, 0)
    assert [event.what for event in watched.events] == ["appeared", "down", "back"]


def test_a_process_is_as_silent_as_it_announced_and_up() -> None:
    watched = cluster()
    watched.on_heartbeat(0.0, msgspec.structs.replace(beat(), quiet_s=3.0))
    assert watched.tick(6.0) == []
    assert watched.tick(6.1) == [Event(6.1, "decode-0", "down")]


def test_a_new_incarnation_without_farewell_is_a_restart_even_without_silence() -> None:
    watched = cluster()
    watched.on_heartbeat(0.0, beat(incarnation=1))
    assert watched.on_heartbeat(0.5, beat(incarnation=2)) == [Event(0.5, "decode-0", "restarted")]
    assert watched.processes["decode-0"].restarts == 1


def test_a_farewell_is_no_failure_and_coming_back_no_restart() -> None:
    watched = cluster()
    watched.on_heartbeat(0.0, beat(incarnation=1))
    assert watched.on_farewell(1.0, Farewell("decode-0", 1)) == [Event(1.0, "decode-0", "left")]
    assert watched.tick(100.0) == []
    assert watched.on_heartbeat(100.0, beat(incarnation=1)) == []  # was still under way
    assert watched.processes["decode-0"].status is Status.LEFT
    assert watched.on_heartbeat(101.0, beat(incarnation=2)) == [Event(101.0, "decode-0", "back")]
    assert watched.processes["decode-0"].restarts == 0


def test_words_of_a_replaced_process_are_ignored() -> None:
    watched = cluster()
    watched.on_heartbeat(0.0, beat(incarnation=5, running=1))
    assert watched.on_heartbeat(1.0, beat(incarnation=4, running=9)) == []
    assert watched.on_farewell(1.0, Farewell("decode-0", 4)) == []
    process = watched.processes["decode-0"]
    assert (process.incarnation, process.stats, process.status) == (5, {"running": 1}, Status.UP)


def test_a_farewell_of_a_stranger_is_ignored() -> None:
    watched = cluster()
    assert watched.on_farewell(0.0, Farewell("nobody", 1)) == []
    assert watched.processes == {}


def test_the_long_gone_are_forgotten_and_the_living_are_not() -> None:
    watched = Cluster(silence_s=3.0, history_s=60.0)
    watched.on_heartbeat(0.0, beat("decode-0"))
    watched.on_heartbeat(0.0, beat("decode-1"))
    for now_s in range(1, 120):
        watched.on_heartbeat(float(now_s), beat("decode-1"))
        watched.tick(float(now_s))
    assert set(watched.processes) == {"decode-1"}


def test_the_number_of_processes_is_bounded() -> None:
    watched = cluster()
    for index in range(MAX_INSTANCES + 5):
        watched.on_heartbeat(0.0, beat(f"decode-{index}"))
    assert len(watched.processes) == MAX_INSTANCES


def test_the_stats_for_the_manager() -> None:
    watched = cluster()
    watched.on_heartbeat(0.0, beat("gateway", "gateway", requests_total=0, prompt_tokens_total=0))
    for second in range(1, 31):
        watched.on_heartbeat(
            float(second), beat("gateway", "gateway", requests_total=4 * second, prompt_tokens_total=80 * second)
        )
        watched.tick(float(second))
    told = watched.stats_for_manager()
    assert told.arrival_rate == watched.demand.rate > 0.0
    assert told.mean_prompt_tokens == watched.demand.mean_prompt_tokens == pytest.approx(20.0)


def test_samples_show_rates_and_cache_use() -> None:
    watched = cluster()
    watched.tick(0.0)
    watched.on_heartbeat(0.0, beat("gateway", "gateway", requests_total=0))
    watched.on_heartbeat(
        0.0, beat("decode-0", kv_total_blocks=100, kv_used_blocks=25, kv_cached_blocks=50, kv_free_blocks=25)
    )
    watched.on_heartbeat(
        1.5, beat("gateway", "gateway", requests_total=6, generation_tokens_total=300, requests_running=4)
    )
    watched.tick(2.0)
    (sample,) = watched.samples
    assert (sample.arrivals_per_s, sample.output_tokens_per_s) == (3.0, 150.0)
    assert (sample.requests_running, sample.kv_used, sample.kv_cached) == (4, 0.25, 0.5)


def test_samples_are_bounded_by_the_history() -> None:
    watched = Cluster(silence_s=3.0, history_s=10.0)
    for now_s in range(100):
        watched.tick(float(now_s))
    assert len(watched.samples) == 10


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["beat", "farewell", "tick"]),
            st.sampled_from(["a", "b"]),
            st.integers(1, 4),
            st.floats(0.0, 5.0),
        ),
        max_size=60,
    )
)
def test_any_history_leaves_a_consistent_state(history: list[tuple[str, str, int, float]]) -> None:
    watched, now_s = cluster(), 0.0
    newest: dict[str, int] = {}
    for action, instance, incarnation, passed_s in history:
        now_s += passed_s
        match action:
            case "beat":
                watched.on_heartbeat(now_s, beat(instance, incarnation=incarnation))
                newest[instance] = max(newest.get(instance, 0), incarnation)
            case "farewell":
                watched.on_farewell(now_s, Farewell(instance, incarnation))
            case _:
                watched.tick(now_s)
                assert all(p.age_s(now_s) <= 3.0 for p in watched.up())
        for process in watched.processes.values():
            assert process.incarnation == newest[process.instance]
            assert process.since_s <= now_s
            assert process.status is Status.UP or not process.ready
            assert process.restarts < process.incarnation
