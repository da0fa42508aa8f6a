"""Attack: a wall clock that jumps ahead, by a wrong time server or a dead battery, deletes what has "expired".

Files and ended batches are deleted once and for good, a minute after the clock says so. While the clock disagrees with
the time that has passed nothing may be deleted, and a clock that comes back must find everything in place.
"""

from __future__ import annotations

import asyncio
import time

import openai
import pytest

from cohort.common.clock import SystemClock
from cohort.services.gateway.batches import batch_runner
from cohort.services.gateway.batches.batch_sweeps import HOLD_S, LONGEST_ABSENCE_S, SweepGuard
from tests.services.gateway.batch_client import ask, begin, client_of, ended, job
from tests.services.gateway.conftest import OpenSite, model_dir, open_site  # noqa: F401

DAY_S = 86_400.0
WALL_S, MINUTE_S = 1.8e9, 60.0


async def test_a_clock_that_jumps_deletes_nothing(
    open_site: OpenSite,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """40 days ahead, beyond every retention, for many sweeps; also over a restart in that state."""
    ahead_s = 0.0
    sweeps = 0
    original = batch_runner.BatchRunner.sweep

    async def counted(runner: batch_runner.BatchRunner) -> None:
        nonlocal sweeps
        await original(runner)
        sweeps += 1

    async def some_sweeps() -> None:
        done = sweeps + 5
        async with asyncio.timeout(10):
            while sweeps < done:  # noqa: ASYNC110 -- sweeps have no event
                await asyncio.sleep(0.01)

    monkeypatch.setattr(SystemClock, "wall_s", lambda clock: time.time() + ahead_s)
    monkeypatch.setattr(batch_runner, "SWEEP_S", 0.02)
    monkeypatch.setattr(batch_runner.BatchRunner, "sweep", counted)
    async with open_site() as site, client_of(site) as client:
        batch = await ended(client, await begin(client, job(ask())))
        await some_sweeps()
        ahead_s = 40 * DAY_S
        await some_sweeps()
        assert "the wall clock jumped" in capsys.readouterr().err
        with pytest.raises(openai.NotFoundError):
            await client.files.retrieve(batch.input_file_id)  # expired by that clock, but not deleted
    async with open_site() as site, client_of(site) as client:
        await some_sweeps()
        ahead_s = 0.0
        await some_sweeps()
        assert (await client.batches.retrieve(batch.id)).status == "completed"
        for file_id in (batch.input_file_id, str(batch.output_file_id)):
            assert (await client.files.content(file_id)).content


async def test_expired_files_still_go_when_the_clock_is_right(
    open_site: OpenSite,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(batch_runner, "SWEEP_S", 0.02)
    async with open_site(state={"retention_s": 1.0}) as site, client_of(site) as client:
        await client.files.create(file=b"x", purpose="batch")
        folder = site.batches
        async with asyncio.timeout(10):
            while contents(folder):  # noqa: ASYNC110 -- sweeps have no event
                await asyncio.sleep(0.01)


def contents(folder: str) -> list[str]:
    from pathlib import Path

    return [path.name for path in (Path(folder) / "files").iterdir()]


class Times:
    """A wall clock and the time that has passed, moved by hand."""

    def __init__(self, swept_at_s: float | None = None) -> None:
        self.guard = SweepGuard(swept_at_s)
        self.wall_s, self.elapsed_s = WALL_S, 1000.0

    def after(self, seconds: float) -> bool:
        self.wall_s += seconds
        self.elapsed_s += seconds
        return self.guard.is_plausible(self.wall_s, self.elapsed_s)


def test_small_corrections_are_no_jumps() -> None:
    times = Times()
    assert times.after(0)
    for correction_s in (3000.0, -3000.0, 1.0):
        times.wall_s += correction_s
        assert times.after(MINUTE_S)


@pytest.mark.parametrize("jump_s", [4000.0, 30 * DAY_S, -4000.0, -(50 * 365 * DAY_S)])
def test_a_clock_that_keeps_its_new_time_is_believed_after_a_day(jump_s: float) -> None:
    times = Times()
    assert times.after(0)
    times.wall_s += jump_s
    waited_s = 0.0
    while not times.after(MINUTE_S):
        waited_s += MINUTE_S
        assert waited_s <= HOLD_S + MINUTE_S
    assert waited_s >= HOLD_S - MINUTE_S
    assert times.after(MINUTE_S)


def test_a_clock_that_comes_back_is_believed_at_once() -> None:
    times = Times()
    assert times.after(0)
    times.wall_s += 30 * DAY_S
    assert not times.after(MINUTE_S) and not times.after(DAY_S / 2)
    times.wall_s -= 30 * DAY_S
    assert times.after(MINUTE_S)


def test_a_clock_that_jumps_about_is_not_believed() -> None:
    times = Times()
    assert times.after(0)
    for number in range(100):  # never back to where it was
        times.wall_s += 30 * DAY_S * (number + 1) * (-1) ** number
        assert not times.after(HOLD_S / 2)


@pytest.mark.parametrize(
    ("away_s", "trusted"),
    [
        (0.0, True),
        (LONGEST_ABSENCE_S - 1, True),
        (LONGEST_ABSENCE_S + 1, False),
        (40 * DAY_S, False),
        (-10 * DAY_S, False),
    ],
)
def test_a_start_compares_with_the_last_sweep_of_the_run_before(away_s: float, trusted: bool) -> None:
    """A boot with a clock that is wrong: nothing has run beside it that could have measured the time."""
    times = Times(swept_at_s=WALL_S - away_s)
    assert times.after(0) == trusted
    if not trusted:
        assert not times.after(HOLD_S - 1) and times.after(2.0)
