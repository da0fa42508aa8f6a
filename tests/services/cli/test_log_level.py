"""`cohort log-level`: which processes a word names, and that only those are signalled which catch it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cohort.common import paths
from cohort.services.cli.__main__ import main
from cohort.services.cli.log_level import catches, matching
from cohort.services.launcher.run_files import LauncherState, ProcessMark, RunFiles

INSTANCES = ["gateway", "predictor", "manager", "monitor", "prefill-0", "decode-0", "decode-1"]

LISTENER = """
import asyncio, sys
from pathlib import Path
from cohort.common.config import LoggingConfig
from cohort.common.process.log_levels import listen_for_levels
from cohort.common.process.logs import configure_logging

async def run():
    log = configure_logging(LoggingConfig(format="json"), service="gateway", instance="gateway")
    listen_for_levels(Path(sys.argv[1]), "gateway", "info", log, asyncio.get_running_loop())
    print("listening", flush=True)
    await asyncio.Event().wait()

asyncio.run(run())
"""


@pytest.mark.parametrize(
    ("word", "named"),
    [
        ("", INSTANCES),
        ("gateway", ["gateway"]),
        ("bucketing_manager", ["manager"]),
        ("decode-1", ["decode-1"]),
        ("decode", ["decode-0", "decode-1"]),
        ("decode_worker", ["decode-0", "decode-1"]),
        ("worker", ["prefill-0", "decode-0", "decode-1"]),
        ("deco", []),
    ],
)
def test_a_word_names_processes(word: str, named: list[str]) -> None:
    assert matching(word, INSTANCES) == named


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunFiles]:
    monkeypatch.setenv("COHORT_CACHE_DIR", str(tmp_path))
    made = RunFiles(paths.run_dir(8000))
    with made.claim():
        yield made


def record(files: RunFiles, processes: dict[str, int]) -> None:
    marks = {name: ProcessMark.of(pid) for name, pid in processes.items()}
    own = ProcessMark.of(os.getpid())
    assert own is not None
    known = {name: mark for name, mark in marks.items() if mark is not None}
    files.write_state(LauncherState(own, "cohort", "http://127.0.0.1:8000", 1.0, known, {}))


def test_a_running_process_changes_and_says_so(files: RunFiles, capsys: pytest.CaptureFixture[str]) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", LISTENER, str(files.folder)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout and process.stderr and process.stdout.readline() == "listening\n"
            record(files, {"gateway": process.pid})
            assert main(["log-level", "gateway", "debug"]) == 0
            assert capsys.readouterr().out == "gateway: debug\n"
            assert '"now":"debug"' in process.stderr.readline()  # after it was asked, whenever it is scheduled
            assert main(["log-level", "predictor", "debug"]) == 2
            assert "there are: gateway" in capsys.readouterr().err
        finally:
            process.terminate()


def test_a_process_that_does_not_listen_yet_is_left_alone(files: RunFiles, capsys: pytest.CaptureFixture[str]) -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        record(files, {"gateway": process.pid})
        assert not catches(process.pid, signal.SIGUSR2)
        assert main(["log-level", "debug"]) == 1
        assert "is starting or has ended" in capsys.readouterr().out
        assert process.poll() is None
        process.terminate()


def test_without_a_pipeline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COHORT_CACHE_DIR", str(tmp_path))
    assert main(["log-level", "debug"]) == 3


def test_processes_of_other_machines_are_not_signalled_from_here(
    files: RunFiles, capsys: pytest.CaptureFixture[str]
) -> None:
    own = ProcessMark.of(os.getpid())
    assert own is not None
    nodes = {"gateway": "10.0.0.1"}
    files.write_state(LauncherState(own, "cohort", "http://127.0.0.1:8000", 1.0, {}, {}, nodes))
    assert main(["log-level", "gateway", "debug"]) == 2
    assert "on several machines" in capsys.readouterr().err
