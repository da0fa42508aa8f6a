"""Workers forked from a template: they start without importing, and end as a process of their own does."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from cohort.common.http.listeners import bound_everywhere
from cohort.services.launcher.processes.child import Child
from cohort.services.launcher.processes.forks import Fork, Forks

pytestmark = pytest.mark.pipeline

TOY = "tests.services.launcher.forked_toy"
ROOT = str(Path(__file__).parents[4])
LAUNCHER = f"""
import asyncio, os, pathlib, signal, sys
from cohort.services.launcher.processes.forks import Forks
async def main():
    log = pathlib.Path(sys.argv[1])
    forks = Forks(sys.executable, ["tests.services.launcher.imported_once"], log.with_suffix(".template"))
    await forks.child([sys.executable, "-P", "-m", "{TOY}", "serves"], log, dict(os.environ))
    while log.read_text().count(chr(10)) < 2:
        await asyncio.sleep(0.02)
    [template] = forks._templates.values()
    os.kill(template._process.pid, signal.SIGKILL)
    await template._process.wait()
    print("alone", flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": ROOT, **more}


def command(*words: str) -> list[str]:
    return [sys.executable, "-P", "-m", TOY, *words]


@pytest.fixture
async def forks(tmp_path: Path) -> AsyncIterator[Forks]:
    made = Forks(sys.executable, ["tests.services.launcher.imported_once"], tmp_path / "template.log")
    yield made
    made.end()


def lines_of(log: Path) -> list[str]:
    return log.read_text().splitlines() if log.exists() else []


def lives(pid: int) -> bool:
    try:
        return " Z " not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False


def name_of(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text().strip()


def is_known(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


async def said(log: Path, lines: int) -> list[str]:
    async with asyncio.timeout(20):
        while len(lines_of(log)) < lines:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    return lines_of(log)


async def gone(pid: int) -> None:
    async with asyncio.timeout(20):
        while lives(pid):  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def test_several_share_one_import_and_tell_how_they_ended(forks: Forks, tmp_path: Path) -> None:
    started = [
        await forks.child(command("ends", str(code)), tmp_path / f"{code}.log", environment()) for code in (0, 7)
    ]
    assert all(isinstance(each, Fork) for each in started)
    assert [await each.wait() for each in started] == [0, 7]
    lines = [(await said(tmp_path / f"{code}.log", 1))[0] for code in (0, 7)]
    assert [line.split(",")[0] for line in lines] == [f"ends in {each.pid}" for each in started]
    [imported] = {line.rpartition(" ")[2] for line in lines}
    assert int(imported) not in {each.pid for each in started}


async def test_one_that_is_told_to_end_takes_its_helpers_along(forks: Forks, tmp_path: Path) -> None:
    log = tmp_path / "serves.log"
    worker = await forks.child(command("serves"), log, environment())
    helper = int((await said(log, 2))[1])
    assert worker.running and lives(helper)
    assert name_of(worker.pid) == "forked_toy", "not the template's"
    worker.terminate()
    assert await worker.wait() == 0 and not worker.running
    await gone(helper)


async def test_one_accepts_on_the_socket_that_its_launcher_bound(forks: Forks, tmp_path: Path) -> None:
    """And the next one on the same: connections that come between them wait."""
    [listener] = bound_everywhere("127.0.0.1", 0)
    port = listener.getsockname()[1]
    for turn in range(2):
        each = await forks.child(
            command("accepts", str(port)), tmp_path / f"{turn}.log", environment(), [listener.fileno()]
        )
        await said(tmp_path / f"{turn}.log", 2)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        assert int(await reader.read()) == each.pid
        writer.close()
        assert await each.wait() == 0
    listener.close()


async def test_one_that_is_killed_ends_by_that_signal(forks: Forks, tmp_path: Path) -> None:
    worker = await forks.child(command("serves"), tmp_path / "killed.log", environment())
    await said(tmp_path / "killed.log", 2)
    os.kill(worker.pid, signal.SIGKILL)
    assert await worker.wait() == -signal.SIGKILL


async def test_what_a_killed_one_had_started_is_reaped(forks: Forks, tmp_path: Path) -> None:
    """By the process that adopted it: else each would stay a zombie as long as that lives."""
    log = tmp_path / "killed.log"
    worker = await forks.child(command("serves"), log, environment())
    helper = int((await said(log, 2))[1])
    os.kill(worker.pid, signal.SIGKILL)
    async with asyncio.timeout(20):
        while is_known(helper):  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def test_a_template_outlives_the_last_of_its_workers(forks: Forks, tmp_path: Path) -> None:
    for name in ("first", "second"):
        alone = await forks.child(command("ends", "0"), tmp_path / f"{name}.log", environment())
        assert isinstance(alone, Fork) and await alone.wait() == 0
    imported = {(await said(tmp_path / f"{name}.log", 1))[0].rpartition(" ")[2] for name in ("first", "second")}
    assert len(imported) == 1


async def test_with_another_environment_there_is_another_template(forks: Forks, tmp_path: Path) -> None:
    for threads in ("1", "2"):
        child = await forks.child(
            command("ends", "0"), tmp_path / f"{threads}.log", environment(OMP_NUM_THREADS=threads)
        )
        assert await child.wait() == 0
    lines = [(await said(tmp_path / f"{threads}.log", 1))[0] for threads in ("1", "2")]
    assert len({line.rpartition(" ")[2] for line in lines}) == 2


async def test_what_was_prepared_is_forked_from(forks: Forks, tmp_path: Path) -> None:
    template = forks.prepare(environment())
    started = await forks.child(command("ends", "0"), tmp_path / "log", environment())
    assert await started.wait() == 0
    assert (await said(tmp_path / "log", 1))[0].rpartition(" ")[2] == str(template._process.pid)


async def test_after_a_renewal_others_are_forked_from_a_new_one(forks: Forks, tmp_path: Path) -> None:
    """And workers of the former one live on."""
    old = await forks.child(command("serves"), tmp_path / "old.log", environment())
    await said(tmp_path / "old.log", 2)
    [former] = forks._templates.values()
    forks.renew()
    new = await forks.child(command("serves"), tmp_path / "new.log", environment())
    imported = [(await said(tmp_path / f"{name}.log", 2))[0].rpartition(" ")[2] for name in ("old", "new")]
    assert imported[0] != imported[1] and old.running
    await gone(former._process.pid)
    old.terminate()
    assert await old.wait() == 0
    third = await forks.child(command("ends", "0"), tmp_path / "third.log", environment())
    assert await third.wait() == 0 and new.running


async def test_a_template_that_dies_leaves_its_workers_alive_and_others_start_without_it(
    forks: Forks, tmp_path: Path
) -> None:
    log = tmp_path / "adopted.log"
    worker = await forks.child(command("serves"), log, environment())
    await said(log, 2)
    [template] = forks._templates.values()
    os.kill(template._process.pid, signal.SIGKILL)
    await template._process.wait()
    following = await forks.child(command("ends", "3"), tmp_path / "alone.log", environment())
    assert isinstance(following, Child)
    assert await following.wait() == 3
    assert worker.running and lives(worker.pid)
    worker.terminate()
    assert await worker.wait() == 0


async def test_workers_die_with_the_process_that_ordered_them(tmp_path: Path) -> None:
    """Whose template may be gone by then."""
    log = tmp_path / "worker.log"
    launcher = await asyncio.create_subprocess_exec(
        sys.executable, "-c", LAUNCHER, str(log), env=environment(), stdout=asyncio.subprocess.PIPE
    )
    assert launcher.stdout is not None and await launcher.stdout.readline() == b"alone\n"
    first, helper = lines_of(log)
    worker = int(first.split()[2].rstrip(","))
    assert lives(worker)
    launcher.kill()
    await launcher.wait()
    await gone(worker)
    os.kill(int(helper), signal.SIGKILL)


async def test_a_template_that_does_not_answer_is_ended_and_others_start_without_it(
    forks: Forks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = await forks.child(command("serves"), tmp_path / "before.log", environment())
    await said(tmp_path / "before.log", 2)
    monkeypatch.setattr("cohort.services.launcher.processes.forks._FORK_TIMEOUT_S", 0.2)
    [template] = forks._templates.values()
    os.kill(template._process.pid, signal.SIGSTOP)
    logs = [tmp_path / "first.log", tmp_path / "second.log"]
    async with asyncio.timeout(20):
        following = await asyncio.gather(*(forks.child(command("ends", "3"), log, environment()) for log in logs))
    assert all([isinstance(each, Child) and await each.wait() == 3 for each in following])
    assert worker.running and not template._process.running
    worker.terminate()
    assert await worker.wait() == 0
