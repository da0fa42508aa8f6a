"""When a process is quiet, and what ends its pauses."""

from __future__ import annotations

import asyncio

import pytest

from cohort.common.process import activity
from cohort.common.process.activity import QUIET_S, Activity

LONG_S = 3600.0


async def test_work_makes_a_long_pause_a_usual_one(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Activity()
    assert one.quiet_s() == 0.0
    monkeypatch.setattr(activity, "AFTER_S", 0.0)
    assert one.quiet_s() == QUIET_S
    pauses = [asyncio.create_task(one.pause(usual_s, LONG_S)) for usual_s in (0.0, LONG_S)]
    await asyncio.wait(pauses, timeout=0.01)
    assert not pauses[0].done()
    one.work.set()
    async with asyncio.timeout(10):
        await pauses[0]
    assert not pauses[1].done()
    pauses[1].cancel()


async def test_a_pause_is_usual_where_quiet_was_not_announced_or_work_has_come_since() -> None:
    one = Activity()
    async with asyncio.timeout(10):
        await one.pause(0.0, LONG_S)
        await one.pause(0.0, 0.0)
