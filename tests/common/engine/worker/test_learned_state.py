"""What schedulers learned comes back after a restart, whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO

import pytest
import structlog

from cohort.common.engine.worker.learned_state import LearnedState
from cohort.common.errors import ConfigError
from cohort.common.types import StepTimes


class Learner:
    def __init__(self, state: bytes = b"") -> None:
        self.state = state

    def step_times(self) -> StepTimes | None:
        return None

    def export_state(self) -> bytes:
        return self.state

    def import_state(self, data: bytes) -> None:
        if not data.startswith(b"ok"):
            raise ValueError("not a state")
        self.state = data


def test_saved_and_read_again(tmp_path: Path) -> None:
    LearnedState(Learner(b"ok 1"), tmp_path / "new", "a/b model:cpu", "").save()
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["a-b-model-cpu.json"]
    later = Learner()
    assert LearnedState(later, tmp_path / "new", "a/b model:cpu", "").load() == "kept"
    assert later.state == b"ok 1"


def test_a_profile_only_while_nothing_is_kept(tmp_path: Path) -> None:
    profile = tmp_path / "profile.json"
    profile.write_bytes(b"ok profile")
    learner = Learner()
    state = LearnedState(learner, tmp_path / "s", "w", str(profile))
    assert state.load() == "profile"
    state.save()
    profile.write_bytes(b"ok another")
    assert LearnedState(Learner(), tmp_path / "s", "w", str(profile)).load() == "kept"


def test_a_new_instance_starts_from_the_newest_that_is_like_it(tmp_path: Path) -> None:
    """As a container does, whose name is another one each time."""
    for age, name in enumerate(("m-prefill-b-x", "m-prefill-a-x", "m-decode-c-x", "m-prefill-a-y")):
        LearnedState(Learner(f"ok {name}".encode()), tmp_path, name, "").save()
        os.utime(tmp_path / f"{name}.json", (age, age))
    new = Learner()
    assert LearnedState(new, tmp_path, "m-prefill-new-x", "", "m-prefill-*-x").load() == "kept"
    assert new.state == b"ok m-prefill-a-x"
    own = Learner()
    assert LearnedState(own, tmp_path, "m-prefill-b-x", "", "m-prefill-*-x").load() == "kept"
    assert own.state == b"ok m-prefill-b-x"
    assert LearnedState(Learner(), tmp_path, "n-prefill-new-x", "", "n-prefill-*-x").load() == "nothing"


def test_a_broken_file_is_passed_over_a_broken_profile_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "w.json").write_bytes(b"half a")
    assert LearnedState(Learner(), tmp_path, "w", "").load() == "nothing"
    with pytest.raises(ConfigError, match="profile: "):
        LearnedState(Learner(), tmp_path, "w", str(tmp_path / "missing.json")).load()


def test_nothing_learned_is_not_written_and_saving_is_rare(tmp_path: Path) -> None:
    LearnedState(Learner(), tmp_path, "w", "").save()
    assert list(tmp_path.iterdir()) == []
    state = LearnedState(Learner(b"ok"), tmp_path, "w", "")
    state.save_if_due(100.0)
    (tmp_path / "w.json").unlink()
    state.save_if_due(110.0)
    assert list(tmp_path.iterdir()) == []
    state.save_if_due(131.0)
    assert (tmp_path / "w.json").exists()


def test_a_folder_that_cannot_be_written_does_not_end_a_worker(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    state = LearnedState(Learner(b"ok"), tmp_path / "file", "w", "")
    state.save()
    assert [path.name for path in tmp_path.iterdir()] == ["file"], "nothing half written is left"
    assert (tmp_path / "file").read_text() == ""
    assert state.load() == "nothing"


def test_a_save_that_fails_is_logged_once_of_each_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = LearnedState(Learner(b"ok"), tmp_path, "w", "")
    failures = iter([28, 28, 13, 28])

    def failing(path: Path, mode: str) -> BinaryIO:
        raise OSError(next(failures), "it fails")

    monkeypatch.setattr("cohort.common.engine.worker.learned_state.open_private", failing)
    with structlog.testing.capture_logs() as logs:
        for _ in range(4):
            state.save()
    assert [(entry["log_level"], entry["event"], entry["kind"]) for entry in logs] == [
        ("warning", "learned state not saved", "ENOSPC"),
        ("warning", "learned state not saved", "EACCES"),
    ]
    assert logs[0]["path"] == str(tmp_path / "w.json")


def test_a_save_that_fails_keeps_the_earlier_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    learner = Learner(b"ok 1")
    state = LearnedState(learner, tmp_path, "w", "")
    state.save()
    learner.state = b"ok 2"

    def full(path: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    state.save()
    assert [path.name for path in tmp_path.iterdir()] == ["w.json"]
    assert (tmp_path / "w.json").read_bytes() == b"ok 1"


def test_what_a_decision_stumbled_over_is_not_read_again(tmp_path: Path) -> None:
    state = LearnedState(Learner(b"ok 1"), tmp_path / "s", "w", "")
    state.save()
    state.forget()
    state.forget()
    assert LearnedState(Learner(), tmp_path / "s", "w", "").load() == "nothing"
