from __future__ import annotations

from pathlib import Path

import pytest

from cohort.common.config.device_defaults import Machine
from cohort.common.devices import inventory
from cohort.common.devices.inventory import Gpu
from tests.common.devices.fakes import GIB, fake_driver, gpus, host


def test_without_a_driver_there_is_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    sources = host(tmp_path)
    assert inventory.visible_gpus() == []
    assert not inventory.driver_present(sources)
    assert inventory.driver_version(sources) == ""


def test_the_driver_names_its_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_driver(tmp_path, monkeypatch, gpus(2))
    assert inventory.visible_gpus() == gpus(2)
    assert inventory.driver_version(host(tmp_path / "host")) == "580.95.05"


@pytest.mark.parametrize(
    ("chosen", "left"),
    [("1,0", [1, 0]), ("GPU-00000002", [2]), ("", []), ("-1", []), ("NoDevFiles", []), ("0,7,1", [0])],
)
def test_the_variable_leaves_some_as_cuda_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chosen: str, left: list[int]
) -> None:
    fake_driver(tmp_path, monkeypatch, gpus(3))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
    assert inventory.visible_gpus() == [gpus(3)[place] for place in left]
    assert inventory.hidden() is (left == [])


@pytest.mark.parametrize(
    ("chosen", "left"),
    [
        ("MIG-bbbb-2", [("MIG-bbbb-2", "MIG 3g.40gb", 40)]),
        ("MIG-cc", [("MIG-cccc-3", "MIG 1g.10gb+me", 10)]),
        ("MIG-bbbb-2,MIG-cccc-3", [("MIG-bbbb-2", "MIG 3g.40gb", 40)]),
        ("MIG-dddd", []),
    ],
)
def test_a_mig_instance_is_a_gpu_of_its_own_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chosen: str, left: list[tuple[str, str, int]]
) -> None:
    """CUDA gives a process one instance, however many the variable names."""
    fake_driver(tmp_path, monkeypatch, gpus(2), instances=["3g.40gb MIG-bbbb-2", "1g.10gb+me MIG-cccc-3"])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
    card = gpus(2)[1].name
    assert inventory.visible_gpus() == [Gpu(uuid, f"{card} {name}", gib * GIB, "9.0") for uuid, name, gib in left]
    if left:
        assert inventory.this_machine().gpu_memory_bytes == left[0][2] * GIB


def test_a_failing_program_is_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_driver(tmp_path, monkeypatch, ())
    (tmp_path / "bin" / "nvidia-smi").write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed'\nexit 9\n")
    assert inventory.visible_gpus() == []


def test_memory_is_that_of_the_control_group_where_it_is_less(tmp_path: Path) -> None:
    assert inventory.host_memory_bytes(host(tmp_path / "a", ram_gib=512)) == 512 * GIB
    assert inventory.host_memory_bytes(host(tmp_path / "b", ram_gib=512, limit_gib=64)) == 64 * GIB
    for limit, found_gib in ((64 * GIB, 64), (0x7FFFFFFFFFFFF000, 512)):  # version 1, whose "max" is a number
        sources = host(tmp_path / f"v1-{found_gib}", ram_gib=512)
        (sources.cgroup / "memory").mkdir(parents=True)
        (sources.cgroup / "memory" / "memory.limit_in_bytes").write_text(f"{limit}\n")
        assert inventory.host_memory_bytes(sources) == found_gib * GIB


def test_a_machine_goes_by_its_smallest_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_driver(tmp_path, monkeypatch, [*gpus(1, 80), *gpus(1, 24)])
    machine = inventory.this_machine()
    assert machine == Machine(2, 24 * GIB, inventory.host_memory_bytes())


def test_mps_is_seen_by_its_control_pipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    assert not inventory.mps_runs()
    (tmp_path / "control").touch()
    assert inventory.mps_runs()
