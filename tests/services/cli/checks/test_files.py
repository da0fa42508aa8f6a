"""Checks of what a configuration names, each of them broken on purpose."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from safetensors.numpy import save_file

from cohort import __version__
from cohort.common.code_fingerprint import engine_digest
from cohort.common.config import (
    Config,
    EngineConfig,
    GatewayConfig,
    ModelConfig,
    TracingConfig,
    TransferConfig,
    UcxConfig,
)
from cohort.common.devices.inventory import Sources
from cohort.common.devices.refusal import TorchFacts
from cohort.common.errors import ConfigError
from cohort.common.transport.ucx_devices import UcxChoice
from cohort.services.cli.checks import files
from cohort.services.simulator.hardware.profile_note import ProfileNote
from tests.certificates import make_certificate
from tests.services.launcher.test_preflight import SHAPE


def config(**sections: object) -> Config:
    return msgspec.structs.replace(Config(), **sections)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "model"
    made.mkdir()
    (made / "config.json").write_text(json.dumps(SHAPE))
    (made / "tokenizer.json").write_text('{"model": {}}')
    save_file({"a": np.zeros((64, 64), np.float32)}, made / "model-00001-of-00002.safetensors")
    save_file({"b": np.zeros(16, np.float32)}, made / "model-00002-of-00002.safetensors")
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (made / "model.safetensors.index.json").write_text(json.dumps(index))
    return made


def checked(folder: Path) -> tuple[str, str]:
    found = files.model(config(model=ModelConfig(path=str(folder))), folder)
    return found.status, found.says


def test_a_model_that_is_whole(folder: Path) -> None:
    assert checked(folder)[0] == "ok"


def test_a_part_of_the_weights_is_missing(folder: Path) -> None:
    (folder / "model-00002-of-00002.safetensors").unlink()
    status, says = checked(folder)
    assert status == "problem" and "model-00002-of-00002.safetensors is missing" in says


@pytest.mark.parametrize("left", [4, 60, 1000])
def test_a_part_of_the_weights_is_cut_off(folder: Path, left: int) -> None:
    part = folder / "model-00001-of-00002.safetensors"
    part.write_bytes(part.read_bytes()[:left])
    status, says = checked(folder)
    assert status == "problem" and "cut off" in says


@pytest.mark.parametrize(("name", "says"), [("config.json", "no config.json"), ("tokenizer.json", "no tokenizer")])
def test_a_file_is_missing(folder: Path, name: str, says: str) -> None:
    (folder / name).unlink()
    status, said = checked(folder)
    assert status == "problem" and says in said


def test_a_gguf_file_needs_nothing_beside_it(tmp_path: Path) -> None:
    file = tmp_path / "x.Q8_0.gguf"
    file.write_bytes(b"0" * 2048)
    status, says = checked(file)
    assert status == "ok" and "x.Q8_0.gguf" in says


def test_a_default_model_that_was_not_made_to_its_end(tmp_path: Path) -> None:
    assert files.model(Config(), tmp_path / "absent").status == "ok"
    found = files.model(Config(), tmp_path)
    assert found.status == "problem" and f"rm -r {tmp_path}" in found.cure


def test_a_certificate_that_ends(tmp_path: Path) -> None:
    cert = make_certificate(tmp_path)  # for a day
    served = config(gateway=GatewayConfig(tls_cert=str(cert), tls_key=str(cert.with_suffix(".key"))))
    assert files.certificate(Config()).status == "skipped"
    assert files.certificate(served).status == "warning"
    assert files.certificate(served, time.time() - 30 * 86_400).status == "ok"
    assert files.certificate(served, time.time() + 2 * 86_400).status == "problem"
    cert.write_text("no longer one")
    found = files.certificate(served)
    assert found.status == "problem" and "gateway.tls_cert" in found.says


def test_packages_that_are_wanted_and_absent() -> None:
    def nothing(name: str) -> bool:
        return False

    assert files.ucx(Config(), True, nothing).status == "warning"
    assert files.ucx(config(transfer=TransferConfig(links=("ucx",))), True, nothing).status == "problem"
    assert files.ucx(Config(), False, nothing).status == "skipped"
    found = files.ucx(Config(), True, lambda name: True, lambda choice: ["tcp/eth0", "cma/memory"])
    assert (found.status, found.says) == ("ok", "may use tcp/eth0, cma/memory")

    def absent(choice: UcxChoice) -> list[str]:
        raise ConfigError(f"transfer.ucx.tls: UCX has no {choice.tls!r} here; it has tcp")

    asked = config(transfer=TransferConfig(ucx=UcxConfig(tls="rc")))
    refused = files.ucx(asked, True, lambda name: True, absent)
    assert refused.status == "problem" and "UCX has no 'rc' here" in refused.says
    wanted = config(tracing=TracingConfig(endpoint="http://127.0.0.1:4318/v1/traces"))
    assert files.traces(wanted, nothing).status == "problem"
    assert files.traces(wanted).status == "ok"
    assert files.traces(Config(), nothing).status == "skipped"
    assert not files.installed("no_such_package.at_all")


WORKS = TorchFacts("2.11.0", "13.0", True)
CPU_BUILD = TorchFacts("2.11.0+cpu", "", False, "not compiled with CUDA")


@pytest.fixture
def driver(tmp_path: Path) -> Sources:
    version = tmp_path / "driver" / "nvidia" / "version"
    version.parent.mkdir(parents=True)
    version.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.95.05  Tue\n")
    return Sources(proc=tmp_path, dev=tmp_path, cgroup=tmp_path)


def test_gpus(driver: Sources, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    none = Sources(tmp_path / "x", tmp_path / "x", tmp_path / "x")

    def found(sources: Sources, torch: TorchFacts | None, device: str = "auto", toolchain: str = "") -> tuple[str, str]:
        said = files.gpu(config(engine=EngineConfig(device=device)), lambda: torch, sources, lambda: toolchain)
        return said.status, f"{said.says} → {said.cure}"

    assert found(driver, WORKS)[0] == "ok"
    assert found(driver, WORKS, "cpu")[0] == "skipped"
    assert found(none, None)[0] == "skipped"
    assert found(none, None, "cuda")[0] == "problem"
    assert found(driver, None)[0] == "problem"
    status, said = found(driver, CPU_BUILD)
    assert status == "problem" and "a build for the CPU" in said and "COHORT_CUDA=cu130" in said
    status, said = found(driver, WORKS, toolchain="no C compiler for the GPU kernels (gcc): install gcc, or name one")
    assert status == "problem" and "install gcc" in said


def test_torch_is_asked_in_a_process_of_its_own(tmp_path: Path) -> None:
    assert files.probe_torch(str(tmp_path / "no-python")) is None
    facts = files.probe_torch()
    assert facts is not None and facts.version


def note(**fields: Any) -> ProfileNote:
    made = {
        "version": __version__,
        "engine": engine_digest(),
        "model": "m",
        "model_folder": "/nowhere",
        "model_digest": "",
        "threads": 2,
        "measured_on": "2026-01-01",
        "machine": "box",
    }
    return ProfileNote(**{**made, **fields})


def test_profiles_of_another_version_or_engine(tmp_path: Path) -> None:
    assert files.profiles(Config(), []).status == "skipped"
    assert files.profiles(Config(), [("box", note())]).status == "ok"
    for old in (note(version="0.0.1"), note(engine="another")):
        found = files.profiles(Config(), [("box", old)])
        assert found.status == "warning" and "cohort profile --save box" in found.cure
    missing = config(engine=EngineConfig(profile=str(tmp_path / "absent.json")))
    assert files.profiles(missing, []).status == "problem"
