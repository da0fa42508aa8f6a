"""A rolling restart of toy processes: one after the other, in the order of their stages; one that fails stops it."""

from __future__ import annotations

import asyncio

import pytest

from cohort.services.launcher.run_files import RunFiles

pytestmark = pytest.mark.pipeline


async def until_over(pipeline) -> None:
    async with asyncio.timeout(20):
        while pipeline.supervisor.restart.running:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def ended(pipeline) -> None:
    """Before what it says is read, or the test's end closes what it says it to."""
    pipeline.supervisor.request_stop()
    await pipeline.exit_code()


async def test_all_are_restarted_one_after_the_other(run, toys, capsys):
    pipeline = run(toys(gateway="ready", manager="ready", monitor="ready"))
    await pipeline.until_ready()
    before = pipeline.supervisor.marks
    pipeline.supervisor.request_restart()
    assert pipeline.supervisor.restart.left == ["monitor", "manager", "gateway"]
    await until_over(pipeline)
    found = pipeline.supervisor.restart
    assert (found.number, found.done, found.left, found.failure) == (1, ["monitor", "manager", "gateway"], [], "")
    after = pipeline.supervisor.marks
    assert all(after[name].pid != before[name].pid for name in before)
    await ended(pipeline)
    changes = [line.split()[:2] for line in capsys.readouterr().out.splitlines() if " pid " in line]
    one_by_one = [[name, state] for name in found.done for state in ("stopping", "restarting", "starting", "ready")]
    first = changes.index(one_by_one[0])
    assert changes[first : first + len(one_by_one)] == one_by_one


async def test_only_those_that_are_named(run, toys, files: RunFiles):
    pipeline = run(toys(gateway="ready", manager="ready"))
    await pipeline.until_ready()
    before = pipeline.supervisor.marks
    files.request_restart(["manager"])
    pipeline.supervisor.request_restart()
    await until_over(pipeline)
    after = pipeline.supervisor.marks
    assert after["gateway"] == before["gateway"] and after["manager"] != before["manager"]
    pipeline.supervisor.request_restart()
    assert pipeline.supervisor.restart.left == ["manager", "gateway"], "the names count once"
    await until_over(pipeline)


async def test_one_that_does_not_come_back_stops_it(run, toys, monkeypatch, capsys):
    monkeypatch.setattr("cohort.services.launcher.rolling.READY_TIMEOUT_S", 1.0)
    pipeline = run(toys(gateway="ready", manager="once"))
    await pipeline.until_ready()
    gateway = pipeline.pid("gateway")
    pipeline.supervisor.request_restart()
    await until_over(pipeline)
    found = pipeline.supervisor.restart
    assert found.done == [] and found.left == ["manager", "gateway"]
    assert found.failure == "manager was not ready again within 1 s"
    assert pipeline.pid("gateway") == gateway
    await ended(pipeline)
    assert "the rolling restart has stopped" in capsys.readouterr().out


async def test_a_stop_amid_a_restart_ends_all(run, toys):
    pipeline = run(toys(gateway="ready", manager="ready", monitor="ready"))
    await pipeline.until_ready()
    pipeline.supervisor.request_restart()
    await asyncio.sleep(0.1)
    pipeline.supervisor.request_stop()
    assert await pipeline.exit_code() == 0
    assert pipeline.supervisor.marks == {}
