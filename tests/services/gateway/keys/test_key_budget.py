"""Limits of a key: rates over any minute, what is given back, and what its headers say."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cohort.common.config import KeyLimits
from cohort.common.errors import RequestError
from cohort.services.gateway.keys.key_budget import Bucket, KeyBudget, KeyLimited, duration

NOON_S = 1_700_000_000.0 // 86_400 * 86_400 + 43_200


def budget(**limits: int) -> KeyBudget:
    return KeyBudget("alice", "rt", KeyLimits(**limits), 0.0, NOON_S)


def refused(made: KeyBudget, now_s: float = 0.0, wall_s: float = NOON_S) -> KeyLimited:
    with pytest.raises(KeyLimited) as caught:
        made.check(now_s, wall_s)
    assert (caught.value.status, caught.value.type_) == (429, "rate_limit_error")
    return caught.value


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 50), st.lists(st.tuples(st.floats(0, 30), st.integers(1, 20)), max_size=60))
def test_no_minute_has_more_than_two_of_its_limit_and_all_time_no_more_than_its_rate(
    limit: int, asks: list[tuple[float, int]]
) -> None:
    """A full bucket and what flows in meanwhile, never more; and what is refused fits after the time that is told."""
    bucket, now_s = Bucket(limit, 0.0), 0.0
    taken: list[tuple[float, int]] = []
    for pause_s, count in asks:
        now_s += pause_s
        wait_s = bucket.wait_s(now_s, count)
        if wait_s:
            if count <= limit:
                assert copy.copy(bucket).wait_s(now_s + wait_s + 1e-6, count) == 0
            continue
        bucket.take(now_s, count)
        taken.append((now_s, count))
        for since_s, _ in taken:
            within = sum(each for at_s, each in taken if at_s >= since_s)
            assert within <= limit * (1 + (now_s - since_s) / 60) + 1e-3
    assert bucket.level(now_s + 60.0 * (1 + len(taken) * 20)) == limit


def test_requests_a_minute() -> None:
    made = budget(requests_per_minute=2)
    for _ in range(2):
        made.check(0.0, NOON_S)
        made.enter(0.0)
    error = refused(made)
    assert "requests_per_minute of key alice, class rt is 2" in error.message and error.retry_after_s == 30.0
    made.leave(0.0, counts=True)
    refused(made)
    made.leave(0.0, counts=False)  # the server could not serve it
    made.check(0.0, NOON_S)
    refused_at = budget(requests_per_minute=2)
    refused_at.enter(0.0), refused_at.enter(0.0)
    refused_at.check(30.0, NOON_S)


def test_requests_open_at_once() -> None:
    made = budget(concurrent_requests=1)
    made.check(0.0, NOON_S)
    made.enter(0.0)
    assert "concurrent_requests" in refused(made).message
    made.leave(0.0, counts=True)
    made.check(0.0, NOON_S)
    assert made.headers(0.0, NOON_S) == {}


def test_tokens_are_reserved_and_settled() -> None:
    made = budget(tokens_per_minute=100)
    made.reserve(0.0, NOON_S, 80)
    with pytest.raises(KeyLimited, match=r"tokens_per_minute .* is 100; 20 are left, this request may use 30"):
        made.reserve(0.0, NOON_S, 30)
    made.settle(0.0, NOON_S, 80, 25)  # it was cancelled
    made.reserve(0.0, NOON_S, 75)
    refused(made)
    made.settle(0.0, NOON_S, 75, 145)  # the answer was longer than was expected
    assert refused(made).retry_after_s == pytest.approx(71 * 0.6)
    made.check(71 * 0.6 + 1e-6, NOON_S)


def test_a_request_beyond_every_minute_is_400_and_names_the_limit() -> None:
    for limits in ({"tokens_per_minute": 50}, {"tokens_per_day": 50}):
        with pytest.raises(RequestError, match=next(iter(limits))) as caught:
            budget(**limits).reserve(0.0, NOON_S, 51)
        assert caught.value.status == 400


def test_a_day_ends_at_midnight_of_utc_and_a_clock_set_back_does_not_begin_it_again() -> None:
    made = budget(tokens_per_day=100)
    made.reserve(0.0, NOON_S, 100)
    assert refused(made).retry_after_s == 43_200
    refused(made, wall_s=NOON_S - 86_400)
    made.check(0.0, NOON_S + 43_200)
    assert made.headers(0.0, NOON_S + 43_200)["x-ratelimit-reset-tokens"] == "24h0m0s"


def test_what_was_used_before_a_restart_counts() -> None:
    made = KeyBudget("alice", "rt", KeyLimits(tokens_per_day=100), 0.0, NOON_S, 90)
    with pytest.raises(KeyLimited):
        made.reserve(0.0, NOON_S, 11)
    made.reserve(0.0, NOON_S, 10)


def test_headers_name_the_limit_of_which_less_is_left() -> None:
    made = budget(requests_per_minute=60, tokens_per_minute=600, tokens_per_day=700)
    made.enter(0.0)
    made.reserve(0.0, NOON_S, 300)
    assert made.headers(0.0, NOON_S) == {
        "x-ratelimit-limit-requests": "60",
        "x-ratelimit-remaining-requests": "59",
        "x-ratelimit-reset-requests": "1s",
        "x-ratelimit-limit-tokens": "600",
        "x-ratelimit-remaining-tokens": "300",
        "x-ratelimit-reset-tokens": "30s",
    }
    made.reserve(20.0, NOON_S, 300)
    assert made.headers(20.0, NOON_S)["x-ratelimit-limit-tokens"] == "700"


def test_changed_limits_keep_what_was_used() -> None:
    made = budget(requests_per_minute=10)
    for _ in range(10):
        made.enter(0.0)
    made.relimit(KeyLimits(requests_per_minute=12, tokens_per_minute=5), 0.0)
    made.check(0.0, NOON_S)
    made.enter(0.0), made.enter(0.0)
    refused(made)
    made.relimit(KeyLimits(), 0.0)
    made.check(0.0, NOON_S)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0ms"), (0.0201, "21ms"), (0.9995, "1s"), (1, "1s"), (59.2, "1m0s"), (90, "1m30s"), (7320, "2h2m0s")],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("open"), st.integers(1, 80)),
            st.tuples(st.just("end"), st.integers(0, 9), st.integers(0, 120), st.booleans()),
            st.tuples(st.just("pass"), st.floats(0, 40)),
        ),
        max_size=60,
    )
)
def test_nothing_is_lost_between_reserving_and_settling(script: list[Any]) -> None:
    """When all has ended, the day is charged with exactly what was used, and no request counts as open."""
    made = budget(requests_per_minute=50, tokens_per_minute=300, tokens_per_day=3000, concurrent_requests=5)
    now_s, used = 0.0, 0
    held: list[int] = []
    for step in script:
        match step:
            case ("open", tokens):
                try:
                    made.check(now_s, NOON_S)
                    made.enter(now_s)
                except KeyLimited:
                    continue
                try:
                    made.reserve(now_s, NOON_S, tokens)
                    held.append(tokens)
                except KeyLimited:
                    made.leave(now_s, counts=False)
            case ("end", place, tokens, counts) if held:
                made.settle(now_s, NOON_S, held.pop(place % len(held)), tokens)
                made.leave(now_s, counts=counts)
                used += tokens
            case ("pass", seconds):
                now_s += seconds
        assert made.open == len(held) <= 5
        assert made.day.level(NOON_S) == 3000 - used - sum(held)
        assert made.tokens.level(now_s) <= 300 and made.requests.level(now_s) <= 50
