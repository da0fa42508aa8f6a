"""Checks of this machine, for a configuration that is served or about to be.

Called by `doctor.py`. Sources under /proc, /sys and /dev are arguments.
"""

from __future__ import annotations

import ctypes
import resource
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from cohort.common.config import Config
from cohort.common.devices.fit import check_host_kv
from cohort.common.errors import ConfigError
from cohort.services.cli.checks.finding import Finding, fine, problem, refused, size, skipped, warning
from cohort.services.launcher.plan import ProcessPlan
from cohort.services.launcher.preflight import check_ports

LEAST_DISK_BYTES, ENOUGH_DISK_BYTES = 512 << 20, 4 << 30
LEAST_SHARED_BYTES = 256 << 20
LEAST_DESCRIPTORS, ENOUGH_DESCRIPTORS = 1024, 16_384
BUSY = 0.25
"""Share of the processors from which other programs are felt."""
_TIME_ERROR = 5
"""`adjtimex`: the clock is not synchronised."""


class Usage(NamedTuple):
    total: int
    used: int
    free: int


def ports(plans: Iterable[ProcessPlan], running: bool) -> Finding:
    """Check that the ports are free. `running`: the pipeline itself has them."""
    if running:
        return skipped("ports", "the pipeline that runs here has them")
    try:
        check_ports(plans)
    except ConfigError as error:
        says, _, cure = str(error).partition("; ")
        return problem("ports", says, f"{cure or 'choose others with --port'}; ss -ltnp names who listens")
    return fine("ports", "all free")


def disk(
    folders: Mapping[str, Path], usage: Callable[[Path], Usage] = lambda path: Usage(*shutil.disk_usage(path))
) -> Finding:
    """Check the disks of `folders`, by use. A folder that does not exist yet is judged by where it would be made."""
    least: tuple[int, str] | None = None
    for what, folder in folders.items():
        existing = next((path for path in (folder, *folder.parents) if path.exists()), Path("/"))
        free = usage(existing).free
        if least is None or free < least[0]:
            least = (free, f"{size(free)} free in {existing} ({what})")
    if least is None:
        return skipped("disk space", "nothing is kept")
    free, says = least
    cure = "remove old files (df -h), or name other folders: state.folder, COHORT_CACHE_DIR"
    if free < LEAST_DISK_BYTES:
        return problem("disk space", says, cure)
    return warning("disk space", says, cure) if free < ENOUGH_DISK_BYTES else fine("disk space", says)


def shared_memory(
    moves_kv: bool,
    folder: Path = Path("/dev/shm"),
    usage: Callable[[Path], Usage] = lambda path: Usage(*shutil.disk_usage(path)),
) -> Finding:
    """Check the folder through which UCX moves KV between processes of a host."""
    name = "shared memory"
    if not moves_kv:
        return skipped(name, "this placement moves no KV")
    try:
        found = usage(folder)
    except OSError as error:
        return problem(name, f"{folder} cannot be used: {error.strerror}", "mount a tmpfs there, mode 1777")
    says = f"{size(found.free)} of {size(found.total)} free in {folder}"
    if found.free < LEAST_SHARED_BYTES:
        return warning(name, says, "a container: --shm-size=1g (compose: shm_size); else remove what is left there")
    return fine(name, says)


def descriptors(limits: tuple[int, int] | None = None) -> Finding:
    """Check the limit of open files: a socket for each client. The launcher raises the soft limit to the hard one."""
    _, hard = limits or resource.getrlimit(resource.RLIMIT_NOFILE)
    name, endless = "open files", hard == resource.RLIM_INFINITY
    says = "no limit" if endless else f"at most {hard} in a process"
    cure = "ulimit -Hn 65536 as root; systemd: LimitNOFILE=65536; docker: --ulimit nofile=65536"
    if endless or hard >= ENOUGH_DESCRIPTORS:
        return fine(name, says)
    return problem(name, says, cure) if hard < LEAST_DESCRIPTORS else warning(name, says, cure)


def memory(config: Config, weights_bytes: int, available_bytes: int) -> Finding:
    """Check RAM for weights and KV of the workers on this processor. `available_bytes`: 0 = not known."""
    name = "memory"
    if config.on_gpu:
        return skipped(name, "weights and KV lie on the GPU")
    if not available_bytes:
        return skipped(name, "this system does not say")
    workers = len(config.instance_roles)
    try:
        check_host_kv(config, weights_bytes, available_bytes, workers)
    except ConfigError as error:
        return refused(name, error)
    wanted = workers * (weights_bytes + config.kv.cpu_bytes + config.kv.host_memory_bytes)
    return fine(name, f"{workers} workers want about {size(wanted)}, {size(available_bytes)} are available")


def threads(config: Config, cores: int) -> Finding:
    """Check the threads of workers that compute at the same time against the cores."""
    each = [config.worker_threads(instance, cores) for instance in config.instance_roles]
    wanted = max(each, default=0) if config.gathers else sum(each)
    says = f"{wanted} threads of {len(each)} workers compute at one time on {cores} cores"
    if wanted > 2 * cores:
        return problem("threads", says, f"--set engine.threads={max(1, cores // max(1, len(each)))}, or fewer workers")
    if wanted > cores and not config.on_gpu:
        return warning("threads", says, f"--set engine.threads={max(1, cores // max(1, len(each)))}")
    return fine("threads", says)


def load(others: float | None) -> Finding:
    """Check for other programs: on a busy machine predicted step times are unreliable. `others`: the share of the
    processors that they take (`OtherPrograms`)."""
    name = "load"
    if others is None:
        return skipped(name, "this system does not say")
    says = f"other programs take {others:.0%} of the processors"
    if others < BUSY:
        return fine(name, says)
    return warning(name, says, "end what else runs (top), or expect latencies of a machine that is shared")


def autogroup(busy: bool, proc: Path = Path("/proc")) -> Finding:
    """Check autogroup: with it niceness counts within a session only, so that a niced build takes half a core's time
    from a pipeline. Matters where other programs run."""
    name = "autogroup"
    try:
        on = (proc / "sys" / "kernel" / "sched_autogroup_enabled").read_text(encoding="ascii").strip() == "1"
    except OSError:
        return skipped(name, "this kernel has none")
    if not on:
        return fine(name, "off: niceness counts between sessions")
    if not busy:
        return fine(name, "on, and nothing else runs")
    return warning(
        name,
        "on: other sessions take as much as the pipeline, however nice they are",
        "sysctl -w kernel.sched_autogroup_enabled=0, or: echo -10 > /proc/PID/autogroup",
    )


def governor(cpu: Path = Path("/sys/devices/system/cpu")) -> Finding:
    """Check the processor's clocks: a governor that saves power raises them late."""
    name = "processor clocks"
    found = set()
    for file in sorted(cpu.glob("cpu[0-9]*/cpufreq/scaling_governor")):
        try:
            found.add(file.read_text(encoding="ascii").strip())
        except OSError:
            continue
    if not found:
        return skipped(name, "not this system's to say (a virtual machine?)")
    if "powersave" in found and not (cpu / "intel_pstate").exists():
        return warning(name, "the governor is powersave", "cpupower frequency-set -g performance")
    return fine(name, f"governor {', '.join(sorted(found))}")


def clock(one_machine: bool, state: Callable[[], int] | None = None) -> Finding:
    """Check the clock's synchronisation: requests carry their arrival as wall-clock time between hosts."""
    name = "clock"
    try:
        found = (state or _clock_state)()
    except OSError:
        return skipped(name, "this system does not say")
    if found != _TIME_ERROR:
        return fine(name, "synchronised")
    says = "not synchronised"
    if one_machine:
        return fine(name, f"{says}; all processes share it")
    return warning(name, says, "run a time daemon: timedatectl set-ntp true")


def gpu_clocks(rows: Sequence[str]) -> Finding:
    """Check GPU clocks. `rows`: as of `slowed_gpus`, one for each GPU."""
    name = "GPU clocks"
    if not rows:
        return skipped(name, "no GPU here")
    if not (reasons := slowed_gpus(rows)):
        return fine(name, "none is slowed down by heat or power")
    says = "; ".join(f"{gpu}: {reason}" for gpu, reason in reasons.items())
    return warning(name, says, "look at nvidia-smi -q -d PERFORMANCE,TEMPERATURE; mend cooling or power")


_SLOWED = {0x8: "hardware slowdown", 0x20: "software, for heat", 0x40: "hardware, for heat", 0x80: "power brake"}


def slowed_gpus(rows: Iterable[str]) -> dict[str, str]:
    """Parse rows "name, mask" of `nvidia-smi --query-gpu=name,clocks_throttle_reasons.active`."""
    found: dict[str, str] = {}
    for index, row in enumerate(rows):
        gpu, _, mask = row.rpartition(",")
        try:
            bits = int(mask.strip(), 16)
        except ValueError:
            continue
        if reasons := [reason for bit, reason in _SLOWED.items() if bits & bit]:
            found[f"GPU {index} ({gpu.strip()})"] = ", ".join(reasons)
    return found


def _clock_state() -> int:
    """Call `adjtimex` so that it changes nothing. Raises `OSError` if there is none."""
    library = ctypes.CDLL(None, use_errno=True)
    if not hasattr(library, "adjtimex"):
        raise OSError("no adjtimex")
    state: int = library.adjtimex(ctypes.create_string_buffer(512))
    if state < 0:
        raise OSError(ctypes.get_errno(), "adjtimex")
    return state
