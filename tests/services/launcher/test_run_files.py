from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from cohort.services.launcher import run_files
from cohort.services.launcher.run_files import LauncherState, ProcessMark, RunFiles, RunFilesError


def sleeper() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])


def state_of(mark: ProcessMark, **processes: ProcessMark) -> LauncherState:
    return LauncherState(mark, "cohort", "http://127.0.0.1:8000", 10.0, processes, {})


def test_one_owner_at_a_time(tmp_path: Path):
    files = RunFiles(tmp_path / "run")
    own = ProcessMark.of(os.getpid())
    assert own is not None
    with files.claim():
        assert files.claimed
        files.write_state(state_of(own))
        told = rf"already running here \(process {os.getpid()}, http://127.0.0.1:8000\)"
        with pytest.raises(RunFilesError, match=told), RunFiles(tmp_path / "run").claim():
            pass
    assert not files.claimed
    assert files.state() is None
    with files.claim():
        pass


def test_only_the_owner_may_read_it(tmp_path: Path):
    files = RunFiles(tmp_path / "run")
    with files.claim():
        files.write_config("gateway: {api_keys: [secret]}\n")
        assert stat.S_IMODE(files.folder.stat().st_mode) == 0o700
        assert stat.S_IMODE(files.config_file.stat().st_mode) == 0o600


@pytest.mark.pipeline
def test_leftovers_of_a_killed_launcher_are_cleared(tmp_path: Path):
    files = RunFiles(tmp_path / "run")
    process = sleeper()
    mark = ProcessMark.of(process.pid)
    assert mark is not None
    try:
        files.logs.mkdir(parents=True)
        files.write_state(state_of(ProcessMark(1, 1), manager=mark))
        (files.folder / "manager.sock").touch()
        with files.claim():
            assert not mark.alive  # it had the chance to end with its launcher, and did not
            assert not (files.folder / "manager.sock").exists()
    finally:
        process.kill()
        process.wait()


def test_a_strangers_process_is_never_signalled(tmp_path: Path):
    """The pid in the state file now belongs to another process: same number, another start time."""
    process = sleeper()
    try:
        mark = ProcessMark.of(process.pid)
        assert mark is not None
        stranger = ProcessMark(process.pid, mark.start_ticks - 1)
        assert not stranger.alive
        assert not stranger.send(signal.SIGKILL)
        assert stranger.wait_ended(0.0)
        assert process.poll() is None
        assert mark.send(signal.SIGKILL)
        assert process.wait(timeout=10) == -signal.SIGKILL
        assert mark.wait_ended(0.0)
    finally:
        process.kill()
        process.wait()


def test_a_damaged_state_file_counts_as_none(tmp_path: Path):
    files = RunFiles(tmp_path)
    (tmp_path / "launcher.json").write_text('{"launcher": 3')
    assert files.state() is None


def test_logs_keep_the_last_run_and_a_bound(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(run_files, "LOG_LIMIT_BYTES", 100)
    files = RunFiles(tmp_path)
    files.logs.mkdir()
    log = files.log_file("gateway")
    log.write_text("old run\n")
    files.start_log("gateway")
    assert not log.exists()
    with log.open("ab", buffering=0) as writer:
        writer.write(b"x" * 101 + b"\n")
        files.limit_log("gateway")
        writer.write(b"after\n")
    assert log.read_bytes() == b"after\n"
    assert files.log_tail("gateway", 3) == ["after"]
    assert log.with_suffix(".log.1").read_bytes() == b"x" * 101 + b"\n"


def test_a_full_disk_leaves_a_large_log_cut(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(run_files, "LOG_LIMIT_BYTES", 100)
    files = RunFiles(tmp_path)
    files.logs.mkdir()
    log = files.log_file("gateway")
    log.write_bytes(b"x" * 101)
    log.with_suffix(".log.1").symlink_to("/dev/full")
    files.limit_log("gateway")
    assert log.read_bytes() == b""
