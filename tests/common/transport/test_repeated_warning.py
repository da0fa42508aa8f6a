"""Repeated warnings: one line a second, in which every one counts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
import structlog
from structlog.testing import capture_logs

from cohort.common.transport.repeated_warning import EVERY_S, RepeatedWarning


def test_a_flood_is_one_line_a_second_and_none_is_left_uncounted(monkeypatch: pytest.MonkeyPatch) -> None:
    timers: list[Callable[[], None]] = []

    class Loop:
        def call_later(self, delay_s: float, callback: Callable[[], None]) -> object:
            assert delay_s == EVERY_S
            timers.append(callback)
            return callback

    monkeypatch.setattr(asyncio, "get_running_loop", Loop)
    warn = RepeatedWarning(structlog.get_logger(), "skipped")
    with capture_logs() as lines:
        for second in range(3):
            for number in range(4000):
                warn(number=4000 * second + number)
            assert len(timers) == 1
            timers.pop()()
        timers.pop()()  # a second without any
        assert not timers
        warn(number=12_000)
    assert [(line["number"], line["times"]) for line in lines] == [
        (0, 1),
        (3999, 3999),
        (7999, 4000),
        (11_999, 4000),
        (12_000, 1),
    ]
    assert {(line["event"], line["log_level"]) for line in lines} == {("skipped", "warning")}
