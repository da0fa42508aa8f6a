"""Checks of a machine, each of them broken on purpose."""

from __future__ import annotations

import resource
import socket
from pathlib import Path

import msgspec
import pytest

from cohort.common.config import Config, EngineConfig, KvConfig, MetricsConfig, MonitorConfig, PolicyConfig, WorkerGroup
from cohort.common.http.ports import free_port
from cohort.common.types import Role
from cohort.services.cli.checks import machine
from cohort.services.cli.checks.machine import Usage
from cohort.services.launcher.plan import plan

GIB = 1 << 30


def config(**sections: object) -> Config:
    return msgspec.structs.replace(Config(), **sections)


def test_a_port_that_another_program_has() -> None:
    base = free_port()
    gateway = msgspec.structs.replace(Config().gateway, port=base)
    wanted = config(gateway=gateway, monitor=MonitorConfig(port=base + 1), metrics=MetricsConfig(base_port=base + 10))
    plans = plan(wanted)
    assert machine.ports(plans, running=False).status == "ok"
    with socket.socket() as other:
        other.bind(("127.0.0.1", base + 1))
        other.listen()
        found = machine.ports(plans, running=False)
        assert found.status == "problem"
        assert "monitor: port" in found.says and "monitor.port=PORT" in found.cure and "ss -ltnp" in found.cure
        assert machine.ports(plans, running=True).status == "skipped"


@pytest.mark.parametrize(("free", "status"), [(100 << 20, "problem"), (2 * GIB, "warning"), (50 * GIB, "ok")])
def test_a_disk_that_is_full(free: int, status: str, tmp_path: Path) -> None:
    def usage(path: Path) -> Usage:
        return Usage(100 * GIB, 0, free if path == tmp_path else 90 * GIB)

    folders = {"cache": Path("/"), "batches": tmp_path / "not" / "made" / "yet"}
    found = machine.disk(folders, usage)
    assert found.status == status and f"in {tmp_path} (batches)" in found.says


def test_shared_memory_that_is_small_or_absent(tmp_path: Path) -> None:
    def absent(path: Path) -> Usage:
        raise FileNotFoundError(2, "No such file or directory")

    assert machine.shared_memory(True, tmp_path, lambda path: Usage(64 << 20, 0, 64 << 20)).status == "warning"
    assert machine.shared_memory(True, tmp_path, absent).status == "problem"
    assert machine.shared_memory(True, tmp_path, lambda path: Usage(GIB, 0, GIB)).status == "ok"
    assert machine.shared_memory(False, tmp_path, absent).status == "skipped"


@pytest.mark.parametrize(
    ("hard", "status"), [(512, "problem"), (4096, "warning"), (65_536, "ok"), (resource.RLIM_INFINITY, "ok")]
)
def test_few_open_files(hard: int, status: str) -> None:
    assert machine.descriptors((256, hard)).status == status


def test_too_little_memory() -> None:
    kv = KvConfig(memory_bytes=GIB, host_memory_bytes=0)
    assert machine.memory(config(kv=kv), GIB // 2, 4 * GIB).status == "ok"
    short = machine.memory(config(kv=kv), 2 * GIB, 4 * GIB)
    assert short.status == "problem" and "2 workers want 6.0 GiB for weights and KV, 4.0 GiB" in short.says
    tight = machine.memory(config(kv=kv), GIB, 3 * GIB)
    assert tight.cure == f"--set kv.memory_bytes={358 << 20} would fit"
    assert machine.memory(config(kv=kv, engine=EngineConfig(device="cuda")), 2 * GIB, 4 * GIB).status == "skipped"
    assert machine.memory(config(), 0, 0).status == "skipped"


def test_more_threads_than_cores() -> None:
    workers = tuple(WorkerGroup(Role.PREFILL, 1, 4) for _ in range(4))
    apart = PolicyConfig(placement="disaggregated")
    assert machine.threads(config(workers=workers, policies=apart), 16).status == "ok"
    assert machine.threads(config(workers=workers, policies=apart), 12).status == "warning"
    found = machine.threads(config(workers=workers, policies=apart), 4)
    assert found.status == "problem" and "16 threads" in found.says and "engine.threads=1" in found.cure
    assert machine.threads(config(workers=workers), 4).status == "ok", "of these one computes at a time"


def test_a_machine_that_is_busy(tmp_path: Path) -> None:
    assert machine.load(0.61).says == "other programs take 61% of the processors"
    assert [machine.load(share).status for share in (0.61, 0.1, None)] == ["warning", "ok", "skipped"]
    switch = tmp_path / "sys" / "kernel" / "sched_autogroup_enabled"
    assert machine.autogroup(True, tmp_path).status == "skipped"
    switch.parent.mkdir(parents=True)
    switch.write_text("1\n")
    assert machine.autogroup(True, tmp_path).status == "warning"
    assert machine.autogroup(False, tmp_path).status == "ok"
    switch.write_text("0\n")
    assert machine.autogroup(True, tmp_path).status == "ok"


def test_a_processor_that_saves_power(tmp_path: Path) -> None:
    assert machine.governor(tmp_path).status == "skipped"
    for core, word in (("cpu0", "performance"), ("cpu1", "powersave")):
        file = tmp_path / core / "cpufreq" / "scaling_governor"
        file.parent.mkdir(parents=True)
        file.write_text(word + "\n")
    assert machine.governor(tmp_path).status == "warning"
    (tmp_path / "intel_pstate").mkdir()  # whose powersave follows the load
    assert machine.governor(tmp_path).status == "ok"


def test_a_clock_that_nothing_sets() -> None:
    def unknown() -> int:
        raise OSError("no adjtimex")

    assert machine.clock(False, lambda: 5).status == "warning"
    assert machine.clock(True, lambda: 5).status == "ok"
    assert machine.clock(False, lambda: 0).status == "ok"
    assert machine.clock(False, unknown).status == "skipped"
    assert machine.clock(False).status in ("ok", "warning", "skipped"), "this system's own word can be had"


def test_gpus_that_are_slowed_down() -> None:
    rows = ["NVIDIA H100, 0x0000000000000001", "NVIDIA H100, 0x0000000000000060", "NVIDIA H100, [N/A]"]
    slowed = machine.slowed_gpus(rows)
    assert slowed == {"GPU 1 (NVIDIA H100)": "software, for heat, hardware, for heat"}
    assert [machine.gpu_clocks(each).status for each in (rows, rows[:1], [])] == ["warning", "ok", "skipped"]
