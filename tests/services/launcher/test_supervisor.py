from __future__ import annotations

import asyncio
import errno
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest

from cohort.services.launcher import hosts
from cohort.services.launcher.console import Console
from cohort.services.launcher.local_hosts import LocalHosts
from cohort.services.launcher.run_files import LAUNCHER_LOG, TEMPLATE_LOG, ProcessMark, RunFiles, is_stopped
from cohort.services.launcher.supervisor import Supervisor

pytestmark = pytest.mark.pipeline


async def test_all_become_ready_and_end_in_order(run, toys, capsys):
    pipeline = run(toys(gateway="ready", manager="ready", monitor="ready"))
    await pipeline.until_ready()
    marks = pipeline.supervisor.marks
    assert set(marks) == {"gateway", "manager", "monitor"}
    pipeline.supervisor.request_stop()
    assert await pipeline.exit_code() == 0
    assert not any(mark.alive for mark in marks.values())
    stopping = [line.split()[0] for line in capsys.readouterr().out.splitlines() if " stopped" in line]
    assert stopping == ["gateway", "manager", "monitor"]


async def test_a_killed_process_comes_back_under_a_new_pid(run, toys):
    pipeline = run(toys(gateway="ready", manager="ready"))
    await pipeline.until_ready()
    before = pipeline.supervisor.marks
    os.kill(before["manager"].pid, signal.SIGKILL)
    async with asyncio.timeout(10):
        while pipeline.supervisor.marks.get("manager") in (None, before["manager"]):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    assert pipeline.pid("gateway") == before["gateway"].pid


async def test_of_workers_that_die_together_one_starts_first(toys, files: RunFiles):
    """The sooner one of them serves the better; on the same cores two take twice as long."""
    pipeline = hosts.Pipeline(files, Console([]), lambda: None)
    supervisor = Supervisor(pipeline, LocalHosts(files), toys(**{"prefill-0": "ready", "decode-0": "ready"}))
    first, second = pipeline.processes
    await supervisor._until_cores_are_free(first)
    first.child = SimpleNamespace(running=True)  # type: ignore[assignment]
    waiting = asyncio.create_task(supervisor._until_cores_are_free(second))
    await asyncio.wait([waiting], timeout=0.2)
    assert not waiting.done()
    first.ready.set()
    async with asyncio.timeout(10):
        await waiting
    first.ready.clear()
    waiting = asyncio.create_task(supervisor._until_cores_are_free(second))
    await asyncio.wait([waiting], timeout=0.01)
    first.child = SimpleNamespace(running=False)  # type: ignore[assignment]
    async with asyncio.timeout(10):
        await waiting


async def test_every_process_is_forked_and_only_workers_of_what_imports_torch(run, toys, asked):
    pipeline = run(toys(**{"prefill-0": "ready", "manager": "ready"}))
    await pipeline.until_ready()
    before = pipeline.supervisor.marks
    for mark in before.values():
        os.kill(mark.pid, signal.SIGKILL)
    async with asyncio.timeout(10):
        while any(pipeline.supervisor.marks.get(name) in (None, mark) for name, mark in before.items()):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    worker, manager = (["cohort.services.prefill-0.service"], "ready"), (["cohort.services.manager.service"], "ready")
    assert sorted(asked) == sorted([worker, manager] * 2)


async def test_a_process_that_was_stopped_goes_on(run, toys, monkeypatch, capsys):
    monkeypatch.setattr("cohort.services.launcher.supervisor.STOPPED_S", 0.1)
    monkeypatch.setattr("cohort.services.launcher.supervisor.REFRESH_INTERVAL_S", 0.05)
    pipeline = run(toys(gateway="ready", manager="ready"))
    await pipeline.until_ready()
    pid = pipeline.pid("manager")
    os.kill(pid, signal.SIGSTOP)
    async with asyncio.timeout(10):
        while not is_stopped(pid):  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        while is_stopped(pid):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    assert pipeline.pid("manager") == pid
    pipeline.supervisor.request_stop()
    assert await pipeline.exit_code() == 0
    assert "manager was stopped by a signal; it goes on" in capsys.readouterr().out


async def test_a_process_that_the_system_refuses_is_tried_again(run, toys, monkeypatch, capsys):
    pipeline = run(toys(gateway="ready", manager="ready"))
    await pipeline.until_ready()
    before, begin = pipeline.supervisor.marks, LocalHosts.begin
    refusals = [OSError(errno.EAGAIN, "no place for it")] * 2

    async def refused_twice(self, process):
        if refusals:
            raise refusals.pop()
        return await begin(self, process)

    monkeypatch.setattr(LocalHosts, "begin", refused_twice)
    os.kill(before["manager"].pid, signal.SIGKILL)
    async with asyncio.timeout(10):
        while pipeline.supervisor.marks.get("manager") in (None, before["manager"]):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    assert pipeline.pid("gateway") == before["gateway"].pid and not refusals
    pipeline.supervisor.request_stop()
    assert await pipeline.exit_code() == 0
    assert "not started: [Errno 11] no place for it" in capsys.readouterr().out


async def test_a_crash_at_start_is_tried_again(run, toys, files: RunFiles):
    pipeline = run(toys(manager="crash_once"))
    await pipeline.until_ready()
    assert (files.folder / "manager.marker").exists()


async def test_a_configuration_error_ends_the_pipeline_and_shows_the_log(run, toys, capsys):
    pipeline = run(toys(gateway="ready", manager="config_error"))
    assert await pipeline.exit_code() == 1
    assert "exit code 2" in pipeline.supervisor.failure
    said = capsys.readouterr().out
    assert "kv.block_size: 7 is none of 8, 16" in said
    assert said.splitlines()[-1].startswith("given up: manager: ")
    assert pipeline.supervisor.marks == {}


async def test_a_process_that_never_starts_is_given_up_after_five_attempts(run, toys, monkeypatch):
    monkeypatch.setattr("cohort.services.launcher.processes.restart_policy.SECOND_DELAY_S", 0.01)
    pipeline = run(toys(manager="crash"))
    assert await pipeline.exit_code() == 1
    assert "never became ready in 5 attempts" in pipeline.supervisor.failure


async def test_a_process_that_ignores_sigterm_is_killed_after_its_deadline(run, toys, capsys):
    pipeline = run(toys(gateway="stubborn"))
    await pipeline.until_ready()
    mark = pipeline.supervisor.marks["gateway"]
    pipeline.supervisor.request_stop()
    assert await pipeline.exit_code() == 0
    assert not mark.alive
    said = capsys.readouterr().out
    assert "gateway did not end in time; killed" in said and "by hand" not in said


async def test_the_launchers_own_logs_are_bounded_too(run, toys, files: RunFiles, monkeypatch):
    """It shows the warnings of all: what floods theirs floods its own."""
    monkeypatch.setattr("cohort.services.launcher.run_files.LOG_LIMIT_BYTES", 1000)
    monkeypatch.setattr("cohort.services.launcher.supervisor.REFRESH_INTERVAL_S", 0.01)
    pipeline = run(toys(gateway="ready"))
    await pipeline.until_ready()
    logs = [files.log_file(name) for name in ("gateway", LAUNCHER_LOG, TEMPLATE_LOG)]
    for log in logs:
        with log.open("ab") as writer:
            writer.write(b"x" * 1001)
    async with asyncio.timeout(10):
        while any(log.stat().st_size for log in logs):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert all(log.with_suffix(".log.1").stat().st_size >= 1001 for log in logs)


async def test_helpers_of_a_killed_process_end_with_it(run, toys, files: RunFiles):
    pipeline = run(toys(predictor="helper"))
    await pipeline.until_ready()
    helper = ProcessMark.of(int(files.log_tail("predictor", 1)[0]))
    assert helper is not None
    os.kill(pipeline.pid("predictor"), signal.SIGKILL)
    assert await asyncio.to_thread(helper.wait_ended, 5.0)


def test_nothing_outlives_a_killed_launcher(tmp_path: Path):
    """The launcher is killed with no chance to react; its processes must be gone at once."""
    script = textwrap.dedent(
        f"""
        import asyncio, sys
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from pathlib import Path
        from cohort.services.launcher.processes.child import Child

        async def main():
            code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
            child = Child([sys.executable, "-c", code], Path({str(tmp_path / "log")!r}), {{}})
            print(child.pid, flush=True)
            await child.wait()

        asyncio.run(main())
        """
    )
    launcher = subprocess.Popen([sys.executable, "-P", "-c", script], stdout=subprocess.PIPE, text=True)
    assert launcher.stdout is not None
    child = ProcessMark.of(int(launcher.stdout.readline()))
    assert child is not None and child.alive
    launcher.kill()
    launcher.wait(timeout=10)
    launcher.stdout.close()
    assert child.wait_ended(5.0)
