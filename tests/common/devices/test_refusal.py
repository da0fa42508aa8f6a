from __future__ import annotations

import re
from pathlib import Path

import pytest

from cohort.common.devices.refusal import DRIVER_FOR_FAMILY, TorchFacts, family_for, missing_toolchain, unusable_gpu
from tests.common.devices.fakes import host

ROOT = Path(__file__).resolve().parents[3]
CUDA_13 = TorchFacts("2.13.0", "13.0", works=False, error="The NVIDIA driver on your system is too old")
CPU_BUILD = TorchFacts("2.13.0+cpu", "", works=False)


@pytest.fixture(autouse=True)
def nothing_chosen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))


def test_a_driver_too_old_for_this_torch_is_named_with_the_build_for_it(tmp_path: Path) -> None:
    told = unusable_gpu("auto", CUDA_13, host(tmp_path, driver="550.54.15", nodes=["nvidiactl"]))
    for part in (
        "2.13.0 is a build for CUDA 13.0",
        "needs driver 580.65.06",
        "this host has 550.54.15",
        "driver on your system is too old",
        "COHORT_CUDA=cu126",
        "update the driver to 580.65.06",
        "--set engine.device=cpu",
    ):
        assert part in told


def test_a_build_for_the_cpu_on_a_box_with_a_gpu_is_refused(tmp_path: Path) -> None:
    told = unusable_gpu("auto", CPU_BUILD, host(tmp_path, driver="580.95.05", nodes=["nvidiactl"]))
    assert "a build for the CPU" in told and "COHORT_CUDA=cu130" in told
    assert "of unknown version" in unusable_gpu("auto", CPU_BUILD, host(tmp_path / "other", nodes=["nvidiactl"]))


def test_a_driver_that_runs_no_build_at_all(tmp_path: Path) -> None:
    told = unusable_gpu("auto", CUDA_13, host(tmp_path, driver="470.82.01"))
    assert "No build of this torch" in told and "525.60.13" in told


def test_a_fitting_driver_without_a_device_is_about_access(tmp_path: Path) -> None:
    told = unusable_gpu("auto", CUDA_13, host(tmp_path, driver="580.95.05"))
    assert "no device answers" in told and "nvidia-smi" in told


def test_the_cpu_is_served_where_it_is_wanted_or_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpu = host(tmp_path / "gpu", driver="550.54.15", nodes=["nvidiactl"])
    assert unusable_gpu("cpu", CUDA_13, with_gpu) == ""
    for device in ("auto", "cuda"):  # the latter is refused by `resolve_device`
        assert unusable_gpu(device, CUDA_13, host(tmp_path / f"none-{device}")) == ""
    assert unusable_gpu("auto", TorchFacts("2.13.0", "13.0", works=True), with_gpu) == ""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert unusable_gpu("auto", CUDA_13, with_gpu) == ""
    assert "wants cuda:0" in unusable_gpu("cuda:0", CUDA_13, with_gpu)  # named: hidden or not


@pytest.mark.parametrize(
    ("driver", "family"),
    [
        ("580.65.06", "cu130"),
        ("580.65.05", "cu129"),
        ("575.51.03", "cu129"),
        ("570.86.10", "cu126"),
        ("550.54.15", "cu126"),
        ("525.60.13", "cu126"),
        ("525.60.12", ""),
        ("", ""),
    ],
)
def test_the_newest_build_that_a_driver_runs(driver: str, family: str) -> None:
    assert family_for(driver) == family


def test_the_set_up_has_the_same_table() -> None:
    [table] = re.findall(r'^cuda_builds="(.*)"$', (ROOT / "scripts" / "setup").read_text(), re.MULTILINE)
    parsed = {}
    for entry in table.split():
        family, _, driver = entry.partition(":")
        parsed[family] = tuple(int(part) for part in driver.split("."))
    assert list(parsed.items()) == list(DRIVER_FOR_FAMILY.items())


def toolchain(tmp_path: Path, *, triton: bool = True, programs: tuple[str, ...] = ("gcc",), **environment: str) -> str:
    return missing_toolchain(
        environment=environment,
        which=lambda name: f"/usr/bin/{name}" if name in programs else None,
        has_module=lambda name: triton,
        include=tmp_path,
    )


def test_what_the_kernels_lack_is_named_with_its_cure(tmp_path: Path) -> None:
    assert "Python.h" in toolchain(tmp_path) and "python3-dev" in toolchain(tmp_path)
    (tmp_path / "Python.h").touch()
    assert toolchain(tmp_path) == "" == toolchain(tmp_path, programs=("clang",))
    assert "no Triton" in toolchain(tmp_path, triton=False)
    assert "no C compiler" in toolchain(tmp_path, programs=())
    assert "CC=icx is no program" in toolchain(tmp_path, CC="icx")
    assert toolchain(tmp_path, programs=("icx",), CC="icx") == ""
    assert toolchain(tmp_path, triton=False, programs=(), COHORT_KERNELS="reference") == ""
