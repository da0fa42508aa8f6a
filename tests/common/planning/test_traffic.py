from __future__ import annotations

from collections.abc import Callable

import pytest

from cohort.common.planning.simulation_jobs import from_stats, to_stats
from cohort.common.planning.traffic import (
    MOST_REQUESTS,
    Timing,
    TrafficRecord,
    TrafficWindow,
    growth,
    in_time,
    to_replay,
)
from cohort.common.types import Slo, StepTimes


def record(number: int, age_s: float = 0.0, *, output: int = 0, **more: object) -> TrafficRecord:
    timing = Timing(0.1, 0.01, 0.5) if output else None
    return TrafficRecord(number, age_s, 40, "rt", Slo(ttft_s=1.0), output, 0, timing, **more)


def test_a_request_told_twice_is_one_and_keeps_its_arrival() -> None:
    window = TrafficWindow(60.0, 100)
    window.note(10.0, "gateway", 1, [record(0, 1.0)])
    window.note(14.0, "gateway", 1, [record(0, 5.5, output=7)])
    (seen,) = window.latest(15.0).seen
    assert seen.arrived_s == 9.0 and seen.record.output_tokens == 7 and seen.judged


def test_gateways_and_their_restarts_count_for_themselves() -> None:
    window = TrafficWindow(60.0, 100)
    for gateway, incarnation in (("gateway", 1), ("gateway", 2), ("gateway-1", 1)):
        window.note(10.0, gateway, incarnation, [record(0)])
    assert len(window.latest(11.0).seen) == 3


def test_old_ones_go_and_the_latest_are_replayed() -> None:
    window = TrafficWindow(60.0, 5)
    for second in range(100):
        window.note(float(second), "gateway", 1, [record(second, output=3)])
    latest = window.latest(100.0)
    assert [seen.arrived_s for seen in latest.seen] == [95.0, 96.0, 97.0, 98.0, 99.0]
    assert [each.at_s for each in to_replay(latest, 256)] == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_memory_is_bounded() -> None:
    window = TrafficWindow(1e9, 10)
    for part in range(5):
        window.note(1.0, "gateway", part, [record(number) for number in range(MOST_REQUESTS // 4)])
    assert len(window._seen) == MOST_REQUESTS


def test_open_requests_are_expected_to_be_as_long_as_those_that_ended() -> None:
    window = TrafficWindow(60.0, 100)
    window.note(10.0, "gateway", 1, [record(0)])
    assert to_replay(window.latest(10.0), 256)[0].output_tokens == 256
    window.note(10.0, "gateway", 1, [record(1, output=10), record(2, output=20), record(3, output=900, cancelled=True)])
    assert to_replay(window.latest(10.0), 256)[0].output_tokens == 15


def test_in_time_is_every_objective() -> None:
    kept = Timing(0.5, 0.05, 3.0)
    assert in_time(Slo(0.5, 0.05, 3.0), kept, 60.0)
    assert not in_time(Slo(0.4), kept, 60.0)
    assert not in_time(Slo(0.5, 0.04), kept, 60.0)
    assert not in_time(Slo(0.5, 0.05, 2.0), kept, 60.0)
    assert not in_time(Slo(0.5), Timing(), 60.0), "it never came"
    assert in_time(Slo(), kept, 60.0) and not in_time(Slo(), kept, 2.0)


def test_step_times_travel_in_heartbeats() -> None:
    times = StepTimes(1e-3, 2e-4, 3e-5, 4e-3, 5e-9, 6e-8, 0.1, 7e-7)
    assert from_stats({"running": 1.0, **to_stats(times)}) == times
    assert from_stats({"running": 1.0}) is None and to_stats(None) == {}


def test_what_was_under_way_at_the_start_is_replayed_with_the_rest_of_its_answer() -> None:
    window = TrafficWindow(60.0, 2)
    slow = TrafficRecord(0, 40.0, 100, "rt", Slo(), 20, 0, Timing(10.0, 1.0, 30.0))
    waiting, over = record(1, 39.0), record(2, 38.0, output=5)
    window.note(100.0, "gateway", 1, [slow, waiting, over, record(3, 20.0), record(4, 10.0, output=9)])
    replay = window.latest(100.0)
    assert replay.start_s == 80.0 and [seen.record.number for seen in replay.seen] == [0, 1, 3, 4]
    first, second, third, _ = to_replay(replay, 256)
    # At 80 s half of its 20 s of tokens had passed.
    assert (first.at_s, first.prompt_tokens, first.output_tokens) == (0.0, 110, 10)
    assert (second.at_s, second.output_tokens) == (0.0, 14) and third.at_s == 0.0


def arrivals(rate: Callable[[float], float], until_s: float) -> list[float]:
    """Times at which the integral of the rate passes whole numbers."""
    times, due, at_s = [], 0.0, 0.0
    while at_s < until_s:
        due += 0.01 * rate(at_s)
        at_s += 0.01
        if due >= 1.0:
            due -= 1.0
            times.append(at_s)
    return times


def test_a_rise_is_carried_on_and_nothing_else_is() -> None:
    def ahead(times: list[float], **more: float) -> float:
        return growth(times, 100.0, **{"over_s": 100.0, "since_s": 0.0, "ahead_s": 50.0, **more})

    rising = arrivals(lambda at_s: 4.0 + 0.16 * at_s, 100.0)  # 4 a second, then 20: 12 on average, 28 in 50 s
    assert ahead(rising) == 2.0, "at most"
    assert ahead(rising, ahead_s=10.0) == pytest.approx(21.6 / 12, rel=0.08)
    assert ahead(rising, ahead_s=10.0) < 21.6 / 12, "a standard error is taken off"
    assert ahead(rising, ahead_s=10.0, since_s=50.0) == pytest.approx(21.6 / 16, rel=0.08), "of the later half"
    assert ahead(arrivals(lambda at_s: 10.0, 100.0)) == 1.0
    assert ahead(arrivals(lambda at_s: 20.0 - 0.16 * at_s, 100.0)) == 1.0
    assert ahead(rising[::100]) == 1.0, "too few to tell"


def test_a_rise_makes_what_is_replayed_denser() -> None:
    window = TrafficWindow(60.0, 100)
    for second in range(60):
        window.note(
            float(second), "gateway", 1, [record(100 * second + each, output=3) for each in range(second // 10)]
        )
    plain, dense = window.latest(60.0), window.latest(60.0, 30.0)
    assert plain.growth == 1.0 and 1.5 < dense.growth <= 2.0 and dense.seen == plain.seen
    assert [each.at_s * dense.growth for each in to_replay(dense, 256)] == pytest.approx(
        [each.at_s for each in to_replay(plain, 256)]
    )
