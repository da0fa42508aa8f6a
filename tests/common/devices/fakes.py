"""A box with GPUs that are not there: an `nvidia-smi` that answers, and folders as a driver leaves them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from cohort.common.devices.inventory import Gpu, Sources

GIB = 1 << 30


def gpus(count: int, gib: int = 80, name: str = "NVIDIA H100 80GB HBM3") -> list[Gpu]:
    return [Gpu(f"GPU-{number:08x}-0000", name, gib * GIB, "9.0") for number in range(count)]


def fake_driver(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    cards: Sequence[Gpu],
    version: str = "580.95.05",
    instances: Sequence[str] = (),
) -> None:
    """From now on this process and its children find an `nvidia-smi` that knows these cards. `instances`: profile and
    UUID of each MIG instance of the last card, "3g.40gb MIG-…"."""
    rows = [f"{gpu.uuid}, {gpu.name}, {gpu.memory_bytes >> 20}, {gpu.capability}" for gpu in cards]
    smi = folder / "bin" / "nvidia-smi"
    smi.parent.mkdir(exist_ok=True)
    listed = "\n".join(f"echo '{row}'" for row in rows) or ":"
    tree = [f"echo 'GPU {number}: {gpu.name} (UUID: {gpu.uuid})'" for number, gpu in enumerate(cards)]
    for number, (profile, uuid) in enumerate(each.split() for each in instances):
        tree.append(f"echo '  MIG {profile}     Device  {number}: (UUID: {uuid})'")
    answers = f"-L) {'; '.join(tree) or ':'} ;;\n*driver_version*) echo {version} ;;\n*) {listed} ;;\n"
    smi.write_text(f'#!/bin/sh\ncase "$*" in\n{answers}esac\n')
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(smi.parent), prepend=":")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def host(folder: Path, *, driver: str = "", nodes: Sequence[str] = (), ram_gib: int = 0, limit_gib: int = 0) -> Sources:
    """/proc, /dev and the control group of a host."""
    sources = Sources(folder / "proc", folder / "dev", folder / "cgroup")
    (sources.proc / "driver" / "nvidia").mkdir(parents=True)
    sources.dev.mkdir()
    sources.cgroup.mkdir()
    if driver:
        line = f"NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {driver}  Release Build  (root@box)\n"
        (sources.proc / "driver" / "nvidia" / "version").write_text(line)
    for node in nodes:
        (sources.dev / node).touch()
    if ram_gib:
        (sources.proc / "meminfo").write_text(f"MemTotal:       {ram_gib * GIB // 1024} kB\nMemFree: 1 kB\n")
    (sources.cgroup / "memory.max").write_text(str(limit_gib * GIB) if limit_gib else "max\n")
    return sources
