"""A live process's recording: nothing without a folder, whole up to the last second, never what ends a process."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import structlog

from cohort.common.config import load_config
from cohort.common.errors import ConfigError, InvariantViolated
from cohort.common.machines.events import Received, Tick
from cohort.common.machines.manager.manager import ManagerMachine, ManagerSettings
from cohort.common.machines.recorder import ManagerHeader, config_text
from cohort.common.machines.replayer import replay
from cohort.common.messages import GatewayHello, Registered
from cohort.common.policies import compose
from cohort.common.process import recording
from cohort.common.process.recording import RecordingFile, recorded

HELLO = Received("g", GatewayHello("g", 1, "at-g"))


class Clock:
    now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s

    def time_ns(self) -> int:
        return int(self.now_s * 1e9)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(recording, "time", clock)
    return clock


def manager(folder: Path | str) -> tuple[ManagerMachine, Any]:
    """The machine, and what a service tells."""
    config = load_config(overrides={"recording": {"folder": str(folder)}, "gateway": {"api_keys": ["very-secret"]}})
    settings = ManagerSettings.of(config)
    order, placement = compose.prefill_order(config), compose.placement(config)
    machine = ManagerMachine("manager", 3, settings, order, placement, None, 5.0)
    context: Any = SimpleNamespace(config=config, instance="manager", log=structlog.get_logger())
    header = ManagerHeader("manager", 3, settings, 5.0, config_text(config))
    return machine, recorded(context, machine, lambda: header)


def test_without_a_folder_the_machine_itself_is_told() -> None:
    machine, told = manager("")
    assert told is machine


def test_after_a_second_written_calls_survive_a_killed_process(tmp_path: Path, clock: Clock) -> None:
    _, told = manager(tmp_path / "new" / "folder")
    (path,) = tmp_path.rglob("manager-*.jsonl")
    told.handle(5.0, HELLO, Tick())
    clock.now_s += 1.0
    told.handle(6.0, Tick())
    told.handle(6.5, Tick())  # in no file yet
    assert len(path.read_bytes().splitlines()) == 3
    found = replay(path)
    assert (found.machine, found.instance, found.calls, found.difference) == ("manager", "manager", 2, "")
    assert found.effects >= 3


def test_a_last_line_that_is_half_written_is_passed_over(tmp_path: Path, clock: Clock) -> None:
    _, told = manager(tmp_path)
    (path,) = tmp_path.iterdir()
    for second in range(5):
        clock.now_s += 1.0
        told.handle(5.0 + second, HELLO, Tick())
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    assert (replay(path).calls, replay(path).difference) == (4, "")
    path.write_bytes(whole.replace(b'"now_s":7', b'"now_s"7', 1))
    with pytest.raises(ConfigError, match=":4: not a call of a recording"):
        replay(path)


def test_only_its_owner_may_read_it_and_no_key_is_in_it(tmp_path: Path, clock: Clock) -> None:
    _, told = manager(tmp_path)
    clock.now_s += 1.0
    told.handle(5.0, Tick())
    (path,) = tmp_path.iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert b"load_interval_s" in path.read_bytes() and b"very-secret" not in path.read_bytes()


def test_a_full_disk_ends_the_recording_and_not_the_machine(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    monkeypatch.setattr(recording.os, "open", lambda *_: full)
    with structlog.testing.capture_logs() as logs:
        _, told = manager(tmp_path)
        clock.now_s += 1.0
        assert told.handle(5.0, HELLO, Tick())
        clock.now_s += 1.0
        assert told.handle(5.5, Tick())
    assert [line["event"] for line in logs if line["log_level"] == "warning"] == ["recording ended early"]


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"recording\.folder: .*file"):
        RecordingFile(tmp_path / "file", "manager", structlog.get_logger())


def test_an_error_is_recorded_and_replayed(tmp_path: Path, clock: Clock) -> None:
    _, told = manager(tmp_path)
    (path,) = tmp_path.iterdir()
    with pytest.raises(InvariantViolated):
        told.handle(5.0, HELLO, Received("g", Registered(1)))
    clock.now_s += 1.0
    told.handle(6.0, Tick())
    assert (replay(path).calls, replay(path).difference) == (2, "")
    path.write_bytes(path.read_bytes().replace(b"InvariantViolated", b"KeyError"))
    assert "recorded KeyError: a Registered of g" in replay(path).difference
