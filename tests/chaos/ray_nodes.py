"""A Ray cluster of several nodes on one machine, each in a network namespace of its own, and a launcher on the first.

    launcher, raylet, agents      raylet, agents           raylet, agents
      10.77.0.1 (head)              10.77.0.2                10.77.0.3
          └───────────── veth ── bridge 10.77.0.254 ── veth ─────┘          clients: outside, on the bridge

A node dies as a machine does: all of its processes at once, by SIGKILL.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from cohort.common.paths import cache_dir

SUBNET = "10.77.0"
HEAD_PORT = 6400
API_PORT = 8600
STORE_BYTES = 80_000_000
START_TIMEOUT_S = 120.0
ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",  # by default it follows from a file in the home folder
    # Ray starts processes ahead for work to come; ours come once.
    "RAY_prestart_worker_first_driver": "0",
    "RAY_enable_worker_prestart": "0",
    "RAY_worker_niceness": "0",
    # A lost node counts as lost after three seconds instead of fifteen.
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
    "OMP_WAIT_POLICY": "passive",
}


def why_not() -> str:
    """Why this machine cannot be divided into nodes; "" where it can."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return "network namespaces want root and iproute2"
    tried = subprocess.run(["ip", "netns", "list"], capture_output=True)
    return "" if tried.returncode == 0 else "no network namespaces here"


class RayNodes:
    """Use as a context manager: no namespace, process or folder survives it."""

    def __init__(self, folder: Path, cpus: tuple[float, ...]) -> None:
        """`cpus` that Ray counts of each node, the head first."""
        self._folder = folder
        self._cpus = cpus
        self._session = Path(tempfile.mkdtemp(prefix="cray-", dir="/tmp"))  # its sockets' paths must be short
        self._tag = f"cr{os.getpid() % 10_000}"
        self._launcher: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> RayNodes:
        try:
            ip("link", "add", f"{self._tag}br", "type", "bridge")
            ip("addr", "add", f"{SUBNET}.254/24", "dev", f"{self._tag}br")
            ip("link", "set", f"{self._tag}br", "up")
            for index in range(len(self._cpus)):
                self._make(index)
                self._start(index)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for index in range(len(self._cpus)):
            self.kill(index)
            subprocess.run(["ip", "netns", "del", self._name(index)], capture_output=True)
        subprocess.run(["ip", "link", "del", f"{self._tag}br"], capture_output=True)
        if self._launcher is not None:
            self._launcher.kill()
            self._launcher.wait(10)
        shutil.rmtree(self._session, ignore_errors=True)

    # -- nodes ----------------------------------------------------------------------------------------------------

    @staticmethod
    def address(index: int) -> str:
        return f"{SUBNET}.{index + 1}"

    def pids(self, index: int) -> list[int]:
        found = subprocess.run(["ip", "netns", "pids", self._name(index)], capture_output=True, text=True)
        return [int(word) for word in found.stdout.split()]

    def kill(self, index: int) -> None:
        """Every process of the node; those that start meanwhile, too."""
        while found := self.pids(index):
            for pid in found:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            time.sleep(0.01)

    def processes(self, index: int) -> list[str]:
        """Command lines of the pipeline's own processes on a node."""
        lines = []
        for pid in self.pids(index):
            try:
                line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if "cohort.services." in line and "launcher" not in line and "services.cli" not in line:
                lines.append(line)
        return lines

    def agents(self) -> int:
        """Actors of the pipeline that live, on all nodes: Ray names their processes."""
        lines = [Path(f"/proc/{pid}/cmdline") for index in range(len(self._cpus)) for pid in self.pids(index)]
        return sum(_first_bytes(line).startswith(b"ray::Agent") for line in lines)

    def groups(self) -> dict[str, str]:
        """Placement groups that Ray has, by id, with their states."""
        script = (
            "import json, ray, ray.util\n"
            f"ray.init(address='{self.address(0)}:{HEAD_PORT}', log_to_driver=False, logging_level=40)\n"
            "print(json.dumps({k: v['state'] for k, v in ray.util.placement_group_table().items()}))"
        )
        command = [*self._inside(0), sys.executable, "-c", script]
        done = subprocess.run(command, capture_output=True, text=True, env=self._environment(0), timeout=60)
        found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
        return found

    # -- the launcher ---------------------------------------------------------------------------------------------

    @property
    def url(self) -> str:
        return f"http://{self.address(0)}:{API_PORT}"

    def serve(self, *arguments: str) -> None:
        """On the head, in the foreground of a terminal that is a file."""
        with (self._folder / "launcher.log").open("wb") as log:
            self._launcher = subprocess.Popen(
                [
                    *self._inside(0),
                    *(sys.executable, "-P", "-m", "cohort.services.cli", "serve", "--port", str(API_PORT)),
                    *("--on", f"ray={self.address(0)}:{HEAD_PORT}", "--host", "0.0.0.0", "--set", "gateway.open=true"),
                    *arguments,
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environment(0),
            )

    def said(self) -> str:
        return (self._folder / "launcher.log").read_text(errors="replace")

    def wait_said(self, words: str, times: int = 1, timeout_s: float = START_TIMEOUT_S) -> None:
        deadline_s = time.monotonic() + timeout_s
        while self.said().count(words) < times:
            assert self._launcher is not None and self._launcher.poll() is None, self.said()
            assert time.monotonic() < deadline_s, f"{words!r} was not said in {timeout_s} s:\n{self.said()}"
            time.sleep(0.05)

    def where(self) -> dict[str, str]:
        """Addresses of the pipeline's processes by instance, as the launcher records them."""
        state = json.loads((self._cache(0) / "run" / str(API_PORT) / "launcher.json").read_bytes())
        found: dict[str, str] = state["nodes"]
        return found

    def run_folder(self, instance: str) -> Path:
        """On the launcher's node, of a process that is there."""
        [found] = (self._cache(0) / "run" / str(API_PORT) / "nodes").glob(f"*/{instance}")
        return found

    def log(self, instance: str) -> list[dict[str, Any]]:
        """Lines of a process's log, as they came to the launcher's node."""
        text = (self._cache(0) / "run" / str(API_PORT) / "logs" / f"{instance}.log").read_text(errors="replace")
        return [json.loads(line) for line in text.splitlines() if line.startswith("{") and line.endswith("}")]

    def stop(self, number: signal.Signals = signal.SIGINT, timeout_s: float = 90.0) -> int:
        """The launcher's exit code."""
        assert self._launcher is not None
        self._launcher.send_signal(number)
        return self._launcher.wait(timeout_s)

    def kill_launcher(self) -> None:
        assert self._launcher is not None
        self._launcher.kill()
        self._launcher.wait(10)

    # -- inside ---------------------------------------------------------------------------------------------------

    def _name(self, index: int) -> str:
        return f"{self._tag}n{index}"

    def _inside(self, index: int) -> list[str]:
        return ["ip", "netns", "exec", self._name(index)]

    def _cache(self, index: int) -> Path:
        """A node's own disk."""
        return self._folder / f"node{index}"

    def _environment(self, index: int) -> dict[str, str]:
        return {**os.environ, **ENVIRONMENT, "COHORT_CACHE_DIR": str(self._cache(index))}

    def _make(self, index: int) -> None:
        name, ends = self._name(index), f"{self._tag}v{index}"
        ip("netns", "add", name)
        ip("link", "add", ends, "type", "veth", "peer", "name", "eth0", "netns", name)
        ip("link", "set", ends, "master", f"{self._tag}br", "up")
        ip("-n", name, "addr", "add", f"{self.address(index)}/24", "dev", "eth0")
        ip("-n", name, "link", "set", "eth0", "up")
        ip("-n", name, "link", "set", "lo", "up")
        self._cache(index).mkdir()
        if (kernels := cache_dir() / "kernels").is_dir():
            (self._cache(index) / "kernels").symlink_to(kernels)  # to compile them again would take a minute

    def _start(self, index: int) -> None:
        head: list[Any] = ["--head", f"--port={HEAD_PORT}", "--include-dashboard=false", f"--temp-dir={self._session}"]
        where = head if index == 0 else [f"--address={self.address(0)}:{HEAD_PORT}"]
        command = [
            *self._inside(index),
            *(sys.executable, "-m", "ray.scripts.scripts", "start", "--disable-usage-stats"),
            *(f"--object-store-memory={STORE_BYTES}", f"--num-cpus={self._cpus[index]:g}", "--num-gpus=0"),
            *(f"--node-ip-address={self.address(index)}", *where),
        ]
        with (self._folder / f"ray{index}.log").open("wb") as log:
            subprocess.run(command, env=self._environment(index), stdout=log, stderr=log, check=True, timeout=90)


def _first_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=10)
