"""What GPUs this host shows to this process, asked from NVIDIA's driver without torch: `nvidia-smi` and /proc.

Called at start by the launcher, by every process that reads a configuration of its own, and by workers that say why
they cannot use a GPU. Never raises: a host without a driver, or with one that does not answer, has no GPUs.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
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
    """Where a driver shows itself; a test gives folders of its own."""

    proc: Path = Path("/proc")
    dev: Path = Path("/dev")
    cgroup: Path = Path("/sys/fs/cgroup")


HOST = Sources()


def visible_gpus() -> list[Gpu]:
    """GPUs that `CUDA_VISIBLE_DEVICES` leaves this process, in the driver's order; or the one MIG instance it names."""
    found = []
    for row in _ask("--query-gpu=" + ",".join(_QUERY)):
        fields = [field.strip() for field in row.split(",")]
        if len(fields) != len(_QUERY):
            continue
        uuid, name, mebibytes, capability = fields
        memory = int(mebibytes) * _MEBIBYTE if mebibytes.isdigit() else 0
        found.append(Gpu(uuid, name, memory, capability if re.fullmatch(r"\d+\.\d+", capability) else ""))
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None and chosen.strip().startswith("MIG-"):
        return _instances(found, chosen.split(",")[0].strip())
    return _left(found, chosen)


def hidden() -> bool:
    """`CUDA_VISIBLE_DEVICES` is set and names none: its user, or Slurm ("NoDevFiles"), wants the CPU."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    return chosen is not None and chosen.split(",")[0].strip() in ("", "-1", "NoDevFiles")


def driver_present(sources: Sources = HOST) -> bool:
    """Whether an NVIDIA driver shows that this host has a GPU, be it usable here or not."""
    return (
        (sources.dev / "nvidiactl").exists()
        or (sources.proc / "driver" / "nvidia" / "version").exists()
        or ((sources.dev / "dxg").exists() and shutil.which("nvidia-smi") is not None)
    )


def driver_version(sources: Sources = HOST) -> str:
    """ "550.54.15", or "" where it cannot be found out."""
    try:
        text = (sources.proc / "driver" / "nvidia" / "version").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    if found := re.search(r"Module.*?\s(\d+\.\d+(?:\.\d+)?)\s", text):
        return found[1]
    rows = _ask("--query-gpu=driver_version")
    return rows[0] if rows and re.fullmatch(r"\d+(\.\d+)+", rows[0]) else ""


def throttling() -> list[str]:
    """ "name, mask" of every GPU: why its clocks are lowered, as NVML's bits."""
    return _ask("--query-gpu=name,clocks_throttle_reasons.active")


def mps_runs() -> bool:
    """Whether this process's CUDA contexts would go through the Multi-Process Service: its control pipe is there."""
    return (Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", _MPS_FOLDER)) / "control").exists()


def host_memory_bytes(sources: Sources = HOST) -> int:
    """RAM, or less where this process's control group allows less."""
    total = 0
    try:
        for line in (sources.proc / "meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemTotal:"):
                total = int(line.split()[1]) * 1024
        limit = (sources.cgroup / "memory.max").read_text(encoding="ascii").strip()
        return min(total, int(limit)) if limit.isdigit() else total
    except (OSError, ValueError, IndexError):
        return total


def this_machine() -> Machine:
    """For `load_config`: the defaults of a box go by its smallest GPU."""
    gpus = visible_gpus()
    smallest = min((gpu.memory_bytes for gpu in gpus), default=0)
    return Machine(len(gpus), smallest, host_memory_bytes())


def _ask(query: str, form: Sequence[str] = ("--format=csv,noheader,nounits",)) -> list[str]:
    """Rows of `nvidia-smi`'s answer; none where there is no such program or it fails."""
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
    """The MIG instance of that UUID, or of the beginning of one. CUDA gives a process one instance, whatever follows.
    Its memory is what its profile says: "MIG 3g.40gb" has 40 GiB, with "+me" behind it or not."""
    whole: Gpu | None = None
    for row in _ask("-L", form=()):
        if card := re.match(r"GPU \d+: .*\(UUID: (GPU-[^)]+)\)", row):
            whole = next((gpu for gpu in gpus if gpu.uuid == card[1]), None)
        elif (part := re.match(r"MIG (\S*?(\d+)gb\S*)\s.*\(UUID: (MIG-[^)]+)\)", row)) and part[3].startswith(named):
            name, capability = (whole.name, whole.capability) if whole else ("MIG", "")
            return [Gpu(part[3], f"{name} MIG {part[1]}", int(part[2]) << 30, capability)]
    return []


def _left(gpus: Sequence[Gpu], chosen: str | None) -> list[Gpu]:
    """As CUDA reads the variable: indices or beginnings of UUIDs, up to the first that names none."""
    if chosen is None:
        return list(gpus)
    left: list[Gpu] = []
    for word in (part.strip() for part in chosen.split(",")):
        named = ([gpus[int(word)]] if word.isdigit() and int(word) < len(gpus) else []) or [
            gpu for gpu in gpus if len(word) > 4 and gpu.uuid.startswith(word)
        ]
        if not named:
            break
        left.append(named[0])
    return left
