"""The compose file's commands as processes of this machine: `docker/entrypoint ROLE …` for each, by hand.

Everything is as in containers, but for what a machine without them lacks: host names become 127.0.0.1, ports free ones,
the volumes /var/cache/cohort and /var/lib/cohort folders. Called by the tests of tests/security.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import yaml

from cohort.common.http.ports import free_port
from cohort.common.paths import DEFAULT_MODEL_NAME, cache_dir
from cohort.services.bench.live.pipelines import UNLEARNED

ROOT = Path(__file__).resolve().parent.parent
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
ENTRYPOINT = str(ROOT / "docker" / "entrypoint")


class Containers:
    def __init__(self, folder: Path, model: Path) -> None:
        """`folder` takes volumes, run folders and logs. `model`: in Hugging Face format."""
        self.folder = folder
        self.cache = folder / "cache"
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        block = free_port()
        self.gateway, self.monitor = block, block + 1
        self.endpoints = {
            name: f"tcp://127.0.0.1:{block + 2 + offset}"
            for offset, name in enumerate(("manager", "predictor", "monitor", "gateway"))
        }
        (self.cache / "models").mkdir(parents=True)
        (self.cache / "models" / DEFAULT_MODEL_NAME).symlink_to(model)
        if (kernels := cache_dir() / "kernels").is_dir():
            (self.cache / "kernels").symlink_to(kernels)  # to compile them again would take a minute
        self._write_config()

    def _write_config(self) -> None:
        text = (ROOT / "configs" / "compose.yaml").read_text(encoding="utf-8")
        text = text.replace("/var/cache/cohort", str(self.cache))
        config = yaml.safe_load(text)
        config["gateway"].update(host="127.0.0.1", port=self.gateway)
        config["monitor"].update(host="127.0.0.1", port=self.monitor)
        config["metrics"]["host"] = "127.0.0.1"
        config["endpoints"] = {**self.endpoints, "bind_host": "127.0.0.1"}
        config["predictor"] = dict(UNLEARNED)
        config["kv"] = {"memory_bytes": 64 << 20, "host_memory_bytes": 0}
        config["model"] = {"dtype": "float32"}  # of which the right answer is known
        self._config = yaml.safe_dump(config)

    def environment(self, service: str, **more: str) -> dict[str, str]:
        """Of one container: nothing of the caller's that the entry point or the configuration listens to."""
        plain = {name: value for name, value in os.environ.items() if not name.startswith(("COHORT_", "UCX_", "XDG_"))}
        return {
            **plain,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "COHORT_BASE_CONFIG": str(self.folder / service / "compose.yaml"),
            "COHORT_CACHE_DIR": str(self.cache),
            "COHORT_ACCELERATOR": "cpu",
            "COHORT_RUN_DIR": str(self.folder / service / "run"),
            "COHORT_HOST": "127.0.0.1",
            "OMP_NUM_THREADS": "1",
            **more,
        }

    def start(self, service: str, **environment: str) -> subprocess.Popen[bytes]:
        """`environment`: beside what the compose file gives by default."""
        own = self.folder / service
        shutil.rmtree(own, ignore_errors=True)
        (own / "run").mkdir(parents=True)
        (own / "state").mkdir()
        text = self._config.replace("/var/lib/cohort", str(own / "state"))
        (own / "compose.yaml").write_text(text, encoding="utf-8")
        command = ["0" if part == "9100" else part for part in SERVICES[service]["command"]]
        with (self.folder / f"{service}.log").open("wb") as log:
            self.processes[service] = subprocess.Popen(
                [ENTRYPOINT, *command],
                env=self.environment(service, **environment),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.folder,
            )
        return self.processes[service]

    def log(self, service: str) -> str:
        return (self.folder / f"{service}.log").read_text(encoding="utf-8")

    def fetch(self, path: str, body: dict[str, Any] | None = None, *, key: str = "") -> tuple[int, Any]:
        """Of the gateway: status and JSON; 0 where nothing answers."""
        data = json.dumps(body).encode() if body is not None else None
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        request = urllib.request.Request(f"http://127.0.0.1:{self.gateway}{path}", data, headers)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, json.loads(answer.read())
        except urllib.error.HTTPError as error:
            return error.code, None
        except OSError:
            return 0, None

    def until_ready(self, timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        while self.fetch("/ready")[0] != 200:
            for name, process in self.processes.items():
                assert process.poll() is None, self.log(name)[-2000:]
            assert time.monotonic() < deadline_s, {name: self.log(name)[-600:] for name in self.processes}
            time.sleep(0.2)

    def stop(self) -> dict[str, int]:
        """Exit codes by service."""
        for process in self.processes.values():
            process.send_signal(signal.SIGTERM)
        codes = {}
        for name, process in self.processes.items():
            try:
                codes[name] = process.wait(timeout=45)
            except subprocess.TimeoutExpired:
                process.kill()
                codes[name] = process.wait()
        self.processes.clear()
        return codes


def listening(pid: int) -> set[str]:
    """IPv4 addresses on which a process listens; "::" for anything of IPv6."""
    inodes = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile: this listing's own, where it is our process
            if (target := os.readlink(descriptor)).startswith("socket:["):
                inodes.add(target[8:-1])
    found = set()
    for table, width in (("tcp", 8), ("tcp6", 32)):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                host = fields[1].split(":")[0]
                found.add(".".join(str(byte) for byte in bytes.fromhex(host)[::-1]) if width == 8 else "::")
    return found
