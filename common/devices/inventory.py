"""The GPUs that this host shows to this process, by NVIDIA's driver without torch: `nvidia-smi` and /proc.

Called at start by the launcher, by every process that reads a configuration of its own, and by workers that say why
they cannot use a GPU. Never raises: a host without a driver, or with one that does not answer, has no GPUs.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from cohort.common.config.device_defaults import Machine

_QUERY = ("uuid", "name", "memory.total", "compute_cap")
_TIMEOUT_S = 20.0  # the first question after a boot starts the driver
_MEBIBYTE = 1 << 20
_MPS_FOLDER = "/tmp/nvidia-mps"


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU as the driver describes it. `capability`: "9.0"; "" and 0 where it does not say."""

    uuid: str
    name: str
    memory_bytes: int
    capability: str = ""


@dataclass(frozen=True, slots=True)
class Sources:
    """Folders in which kernel and driver show themselves; tests have their own."""

    proc: Path = Path("/proc")
    dev: Path = Path("/dev")
    cgroup: Path = Path("/sys/fs/cgroup")


HOST = Sources()


def visible_gpus() -> list[Gpu]:
    """Return the GPUs that `CUDA_VISIBLE_DEVICES` leaves, in the driver's order; or the one MIG instance it names."""
    found = []
    for row in _query("--query-gpu=" + ",".join(_QUERY)):
        fields = [field.strip() for field in row.split(",")]
        if len(fields) != len(_QUERY):
            continue
        uuid, name, mebibytes, capability = fields
        memory = int(mebibytes) * _MEBIBYTE if mebibytes.isdigit() else 0
        found.append(Gpu(uuid, name, memory, capability if re.fullmatch(r"\d+\.\d+", capability) else ""))
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None and chosen.strip().startswith("MIG-"):
        return _instances(found, chosen.split(",")[0].strip())
    return _visible(found, chosen)


def hidden() -> bool:
    """Return whether `CUDA_VISIBLE_DEVICES` names no GPU: its user, or Slurm ("NoDevFiles"), wants the CPU."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    return chosen is not None and chosen.split(",")[0].strip() in ("", "-1", "NoDevFiles")


def driver_present(sources: Sources = HOST) -> bool:
    """Return whether there is an NVIDIA driver, and so a GPU, be it usable here or not."""
    return (
        (sources.dev / "nvidiactl").exists()
        or (sources.proc / "driver" / "nvidia" / "version").exists()
        or ((sources.dev / "dxg").exists() and shutil.which("nvidia-smi") is not None)
    )


def driver_version(sources: Sources = HOST) -> str:
    """Return the driver's version, such as "550.54.15"; "" if it is not known."""
    try:
        text = (sources.proc / "driver" / "nvidia" / "version").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    if found := re.search(r"Module.*?\s(\d+\.\d+(?:\.\d+)?)\s", text):
        return found[1]
    rows = _query("--query-gpu=driver_version")
    return rows[0] if rows and re.fullmatch(r"\d+(\.\d+)+", rows[0]) else ""


def throttling() -> list[str]:
    """List "name, mask" of every GPU: NVML's bits for why its clocks are lowered."""
    return _query("--query-gpu=name,clocks_throttle_reasons.active")


def mps_runs() -> bool:
    """Return whether CUDA contexts of this process go through the Multi-Process Service, whose control pipe exists."""
    return (Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", _MPS_FOLDER)) / "control").exists()


def host_memory_bytes(sources: Sources = HOST) -> int:
    """Return the RAM, or less where this container's control group allows less, in either version of cgroups."""
    known = [meminfo_bytes(sources, "MemTotal")]
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        with suppress(OSError, ValueError):  # no such file, or "max"
            known.append(int((sources.cgroup / name).read_text(encoding="ascii")))
    return min(known)


def meminfo_bytes(sources: Sources, field: str) -> int:
    """Return a size in /proc/meminfo; 0 if it cannot be read."""
    try:
        for line in (sources.proc / "meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return 0


def this_machine() -> Machine:
    """Describe this host for `load_config`: its defaults go by its smallest GPU."""
    gpus = visible_gpus()
    smallest = min((gpu.memory_bytes for gpu in gpus), default=0)
    return Machine(len(gpus), smallest, host_memory_bytes())


def _query(query: str, form: Sequence[str] = ("--format=csv,noheader,nounits",)) -> list[str]:
    """Return the rows of an answer of `nvidia-smi`; none if it is missing or fails."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    try:
        done = subprocess.run(
            [program, query, *form],
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return [row.strip() for row in done.stdout.splitlines() if row.strip()] if done.returncode == 0 else []


def _instances(gpus: Sequence[Gpu], named: str) -> list[Gpu]:
    """Return the MIG instance whose UUID begins so. CUDA gives a process one instance, whatever follows. Its profile
    names its memory: "MIG 3g.40gb" has 40 GiB, with "+me" behind it or not."""
    whole: Gpu | None = None
    for row in _query("-L", form=()):
        if card := re.match(r"GPU \d+: .*\(UUID: (GPU-[^)]+)\)", row):
            whole = next((gpu for gpu in gpus if gpu.uuid == card[1]), None)
        elif (part := re.match(r"MIG (\S*?(\d+)gb\S*)\s.*\(UUID: (MIG-[^)]+)\)", row)) and part[3].startswith(named):
            name, capability = (whole.name, whole.capability) if whole else ("MIG", "")
            return [Gpu(part[3], f"{name} MIG {part[1]}", int(part[2]) << 30, capability)]
    return []


def _visible(gpus: Sequence[Gpu], chosen: str | None) -> list[Gpu]:
    """Choose GPUs as CUDA reads the variable: indices or beginnings of UUIDs, up to the first that names none."""
    if chosen is None:
        return list(gpus)
    visible: list[Gpu] = []
    for item in (part.strip() for part in chosen.split(",")):
        named = ([gpus[int(item)]] if item.isdigit() and int(item) < len(gpus) else []) or [
            gpu for gpu in gpus if len(item) > 4 and gpu.uuid.startswith(item)
        ]
        if not named:
            break
        visible.append(named[0])
    return visible
