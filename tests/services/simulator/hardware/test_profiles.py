"""Machines by name: the user's profiles beside the shipped ones, how old they are, and whether they still hold."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from cohort.common import code_fingerprint
from cohort.common.config import CONFIGS_DIR
from cohort.common.errors import ConfigError
from cohort.services.cli.__main__ import main
from cohort.services.simulator.advise import advise
from cohort.services.simulator.hardware.data_files import check_name, names, user_folder
from cohort.services.simulator.hardware.hardware import load_cluster, load_device
from cohort.services.simulator.hardware.profile_note import ProfileNote, warnings


@pytest.fixture
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("COHORT_CACHE_DIR", str(tmp_path))
    return tmp_path / "profiles"


def note(**changes: Any) -> ProfileNote:
    facts: dict[str, Any] = {
        **ProfileNote.fingerprint(Path("/nowhere")),
        "model": "smollm2-135m",
        "threads": 1,
        "measured_on": "2026-01-01",
        "machine": "box",
    }
    return msgspec.convert({**facts, **changes}, ProfileNote)


def saved(folder: Path, name: str, **device: Any) -> Path:
    """A profile as the command writes it: the shipped core under another name."""
    data = yaml.safe_load((CONFIGS_DIR / "devices" / "cpu-core.yaml").read_text(encoding="utf-8"))
    for kind, content in (
        ("devices", {**data, "name": name, **device}),
        ("clusters", {"device": name, "instances": 2}),
    ):
        (folder / kind).mkdir(parents=True, exist_ok=True)
        (folder / kind / f"{name}.yaml").write_text(yaml.safe_dump(content), encoding="utf-8")
    return folder / "clusters" / f"{name}.yaml"


def test_a_saved_machine_is_taken_by_name(user: Path) -> None:
    saved(user, "here", scatter=0.12, profile=msgspec.to_builtins(note()))
    assert user_folder() == user
    found = load_cluster("here")
    assert (found.instances, found.device.name, found.scatter) == (2, "here", 0.12)
    assert load_cluster("here:5").instances == 5 and load_cluster("a100-80:1+here:1").instances == 2
    assert "here" in names("clusters") and "a100-80" in names("devices")


def test_shipped_names_stay_the_shipped_machines(user: Path) -> None:
    saved(user, "here")
    assert load_device("cpu-core")[0].name == "cpu-core"
    with pytest.raises(ConfigError, match=r"no cluster named 'there'.*here"):
        load_cluster("there")


def test_a_name_that_two_files_have_is_an_error_that_names_both(user: Path) -> None:
    saved(user, "cpu-core")
    with pytest.raises(ConfigError) as caught:
        load_device("cpu-core")
    assert str(CONFIGS_DIR / "devices" / "cpu-core.yaml") in str(caught.value)
    assert str(user / "devices" / "cpu-core.yaml") in str(caught.value)


@pytest.mark.parametrize("name", ["a100-80", "cpu-2x1", "Mine", "a:2", "a+b", "../x", ""])
def test_names_that_cannot_be_saved(user: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="--save"):
        check_name(name)


def test_a_cluster_written_elsewhere_finds_its_device_beside_it(user: Path, tmp_path: Path) -> None:
    path = saved(tmp_path / "elsewhere", "far")
    assert load_cluster(str(path)).device.name == "far"
    with pytest.raises(ConfigError, match="no cluster named 'far'"):
        load_cluster("far")


def test_a_profile_older_than_its_code_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert warnings("here", None) == [] and warnings("here", note()) == []
    assert "version 0.0.1 made it" in warnings("here", note(version="0.0.1"))[0]
    assert "engine or kernels have changed" in warnings("here", note(engine="0" * 16))[0]
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    old = note(**ProfileNote.fingerprint(model))
    assert warnings("here", old) == []
    (model / "model.safetensors").write_bytes(b"weights")
    assert "the model in" in warnings("here", old)[0] and "cohort profile --save here" in warnings("here", old)[0]
    shutil.rmtree(model)
    assert warnings("here", old) == []  # a model that is not here has not changed


def test_the_digest_follows_the_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "common" / "engine" / "step.py"
    source.parent.mkdir(parents=True)
    (tmp_path / "kernels").mkdir()
    source.write_text("fast = True\n")
    monkeypatch.setattr(code_fingerprint, "_ROOT", tmp_path)
    digest = code_fingerprint.engine_digest.__wrapped__
    before = digest()
    assert digest() == before
    source.write_text("fast = False\n")
    assert digest() != before


def test_simulate_and_advise_warn(
    user: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(user, "here", profile=msgspec.to_builtins(note(version="0.0.1")))
    traffic = ["--trace", "32x4", "--count", "4", "--model", "smollm2-135m", "--cluster", "here"]
    assert main(["simulate", *traffic, "--preset", "unified"]) == 0
    said = capsys.readouterr()
    assert "version 0.0.1 made it" in said.err
    assert "warning" not in said.out

    def simulated(*_: object) -> None:
        raise ConfigError("enough")

    monkeypatch.setattr(advise, "advise", simulated)
    assert main(["advise", *traffic, "--preset", "unified", "--count", "4", "--jobs", "1"]) == 2
    assert "version 0.0.1 made it" in capsys.readouterr().err
