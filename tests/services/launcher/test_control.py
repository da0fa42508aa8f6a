"""--detach, --stop and --status from their own side, with a stand-in for the launcher."""

from __future__ import annotations

import fcntl
import os
import resource
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from cohort.services.launcher import control
from cohort.services.launcher.run_files import LauncherState, ProcessMark, RunFiles

pytestmark = pytest.mark.pipeline

LAUNCHER = """
import signal, sys, time
from pathlib import Path
from cohort.services.launcher.run_files import LauncherState, ProcessMark, RunFiles
import os
files = RunFiles(Path(sys.argv[1]))
with files.claim():
    files.write_state(LauncherState(ProcessMark.of(os.getpid()), "cohort", "http://127.0.0.1:9", 5.0, {}, {}))
    if sys.argv[2] == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    else:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    print("up", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def launcher(tmp_path: Path):
    started: list[subprocess.Popen[str]] = []

    def start(behaviour: str) -> RunFiles:
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", LAUNCHER, str(tmp_path / "run"), behaviour], stdout=subprocess.PIPE, text=True
        )
        started.append(process)
        assert process.stdout is not None and process.stdout.readline() == "up\n"
        return RunFiles(tmp_path / "run")

    yield start
    for process in started:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def test_nothing_runs(tmp_path: Path, capsys):
    files = RunFiles(tmp_path / "run")
    assert control.stop(files, 8000) == control.EXIT_NOT_RUNNING
    assert control.status(files, 8000) == control.EXIT_NOT_RUNNING
    assert capsys.readouterr().err.splitlines() == ["no pipeline is running on port 8000"] * 2


def test_stop(launcher, capsys):
    files = launcher("ready")
    assert files.claimed
    assert control.stop(files, 8000) == 0
    assert not files.claimed
    assert capsys.readouterr().out.endswith("stopped\n")


def test_a_launcher_that_does_not_stop_is_killed(launcher, tmp_path: Path):
    files = launcher("stubborn")
    state = files.state()
    assert state is not None
    files.write_state(LauncherState(state.launcher, "cohort", "u", 0.2, {}, {}))
    assert control.stop(files, 8000) == 1
    assert not state.launcher.alive


def test_status_names_processes_that_are_down(launcher, tmp_path: Path, capsys):
    files = launcher("ready")
    state = files.state()
    assert state is not None
    gone = ProcessMark(1, -1)  # no process began then
    urls = {"gateway": "http://127.0.0.1:9/ready"}
    files.write_state(LauncherState(state.launcher, "cohort", "http://127.0.0.1:9", 5.0, {"gateway": gone}, urls))
    assert control.status(files, 9) == 1
    assert "restarting" in capsys.readouterr().out


def test_status_names_the_nodes_of_a_pipeline_on_several_machines(launcher, capsys):
    files = launcher("ready")
    state = files.state()
    assert state is not None
    urls = {"gateway": "http://127.0.0.1:9/ready", "decode-0": "http://127.0.0.1:9/ready"}
    nodes = {"gateway": "10.0.0.1"}
    files.write_state(LauncherState(state.launcher, "cohort", "http://127.0.0.1:9", 5.0, {}, urls, nodes))
    assert control.status(files, 9) == 1
    rows = {line.split()[0]: line.split()[1:3] for line in capsys.readouterr().out.splitlines()[1:]}
    assert rows["process"] == ["state", "node"]
    assert rows["gateway"] == ["starting", "10.0.0.1"], "placed, and not ready"
    assert rows["decode-0"][0] == "restarting", "placed nowhere"


@pytest.fixture
def detached(monkeypatch, tmp_path: Path):
    """`control.detach` with a one-line program in place of the launcher."""

    def run(program: str, timeout_s: float = 20.0) -> int:
        popen = subprocess.Popen

        def start(command: list[str], **options: object) -> object:
            fd = command[command.index("--notify-fd") + 1]
            return popen([sys.executable, "-c", textwrap.dedent(program), fd], **options)  # type: ignore[call-overload]

        monkeypatch.setattr(control.subprocess, "Popen", start)
        return control.detach([], RunFiles(tmp_path / "run"), timeout_s)

    return run


def test_detach_returns_once_it_is_ready(detached, capsys):
    assert detached("import os, sys; os.write(int(sys.argv[1]), b'http://x\\nready\\n')") == 0
    assert capsys.readouterr().out == "http://x\n"


def test_detach_shows_why_it_failed(detached, capsys):
    assert detached("import sys; print('no such model'); sys.exit(2)") == 2
    assert "no such model" in capsys.readouterr().err


def test_detach_ends_a_pipeline_that_is_not_ready_in_time(detached, capsys):
    assert detached("import time; time.sleep(600)", timeout_s=0.5) != 0
    assert "not ready after" in capsys.readouterr().err


def test_a_detached_launcher_is_followed_over_a_descriptor_of_any_number(capsys):
    ours, theirs = os.pipe()
    high = fcntl.fcntl(ours, fcntl.F_DUPFD, min(2000, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - 1))
    os.close(ours)
    os.write(theirs, b"manager starts\ngate")
    os.write(theirs, b"way starts\nready\nlater\n")
    os.close(theirs)
    assert control._follow(high, time.monotonic() + 10) == "ready"
    assert capsys.readouterr().out == "manager starts\ngateway starts\n"


def test_a_detached_launcher_that_ends_or_says_nothing_is_told_apart():
    ours, theirs = os.pipe()
    os.close(theirs)
    assert control._follow(ours, time.monotonic() + 10) == "ended"
    ours, theirs = os.pipe()
    assert control._follow(ours, time.monotonic() + 0.01) == "timeout"
    os.close(theirs)
