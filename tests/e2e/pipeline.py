"""A real pipeline of real processes for tests: started, broken and examined from outside, as an operator would."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from cohort.common.addresses import gateway_names, manager_names
from cohort.common.config import Config, dump_config, load_config
from cohort.common.http.ports import free_port
from cohort.common.process.service import HEARTBEAT_S
from cohort.common.types import Role
from cohort.services.bench.live.pipelines import UNLEARNED
from tests.e2e.forked import ForkedProcess, fork
from tests.e2e.held_file import Hold, content, held_file, hold_file
from tests.examples import nightly

CONTEXT_LIMIT = int(os.environ.get("COHORT_TEST_CONTEXT", "2048" if nightly() else "512"))
"""The pipeline under test serves so many positions; 8192 is the model's own limit and takes minutes on two cores."""

START_TIMEOUT_S = 120.0
_ONE_THREAD = os.environ.get("OMP_NUM_THREADS") == "1"
"""Where tests run beside each other: workers have one each, and all processes are forks of one template."""
_FOLDERS = {
    "gateway": "gateway",
    "predictor": "length_predictor",
    "manager": "bucketing_manager",
    "monitor": "global_monitor",
}


@dataclass
class Answer:
    """What one streamed completion gave."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finish: str | None = None
    cached_tokens: int = 0
    extras: dict[str, Any] = field(default_factory=dict)
    error: str = ""
    longest_pause_s: float = 0.0
    arrived_s: list[float] = field(default_factory=list)
    """When each event came, on the monotonic clock; the first is when the request was sent."""

    def pause_after_s(self, since_s: float) -> float:
        """The longest between two events of which the later came after `since_s`; 0 if all had come by then."""
        pairs = zip(self.arrived_s, self.arrived_s[1:], strict=False)
        return max((later - earlier for earlier, later in pairs if later > since_s), default=0.0)


class Pipeline:
    """One set of processes over one run folder. Use as a context manager: whatever happens, nothing survives it."""

    def __init__(
        self,
        folder: Path,
        model: Path,
        overrides: Mapping[str, Any] | None = None,
        *,
        preset: str = "",
        before: Mapping[str, list[str]] | None = None,
    ) -> None:
        """`before`: by process, a command that runs it, as `ip netns exec …`."""
        self.folder = folder
        self._before = before or {}
        self.held: set[str] = set()
        """Workers that are `held_worker`s when they start next."""
        self.instead: dict[str, str] = {}
        """Modules of `tests` that run in place of processes, by name."""
        self.port = free_port()
        given: dict[str, Any] = {
            "model": {"path": str(model), "dtype": "float32"},
            "gateway": {"port": self.port},
            "monitor": {"port": free_port()},
            "metrics": {"base_port": 0},
            "state": {"folder": str(folder)},
            # To import what a training needs takes seconds; `tests/services/length_predictor` has the real child.
            "predictor": dict(UNLEARNED),
        }
        for section, values in (overrides or {}).items():
            if isinstance(values, Mapping):
                given.setdefault(section, {}).update(values)
            else:
                given[section] = values
        self._given = given
        self._file = folder / "config.yaml"
        self.config: Config
        self.reconfigure(preset)
        self.processes: dict[str, subprocess.Popen[bytes] | ForkedProcess] = {}
        services = ["monitor", *manager_names(self.config), "predictor", *gateway_names(self.config)]
        self.names = [*services, *self.config.instance_roles]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Pipeline:
        try:
            for name in self.names:
                self.start(name)
            self.wait_ready()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- processes ---------------------------------------------------------------------------------------------

    def reconfigure(self, preset: str) -> None:
        """What is started from now on is of this preset, with the same overrides."""
        self.config = load_config(preset=preset, overrides=self._given)
        if _ONE_THREAD and not self.config.gathers and not self.config.engine.threads:
            one = {**self._given.get("engine", {}), "threads": 1}
            self.config = load_config(preset=preset, overrides={**self._given, "engine": one})
        self._file.write_text(dump_config(self.config), encoding="utf-8")

    def start(self, name: str) -> None:
        role = self.config.instance_roles.get(name)
        folder = _FOLDERS.get(name.partition("-")[0]) or ("decode_worker" if role is Role.DECODE else "prefill_worker")
        several = role is not None and not _ONE_THREAD
        threads = str(self.config.worker_threads(name, os.cpu_count() or 1)) if several else "1"
        arguments = ["--config", str(self._file), "--instance", name, "--run-dir", str(self.run_dir(name))]
        module = "tests.e2e.held_worker" if name in self.held else self.instead.get(name, f"cohort.services.{folder}")
        held_file(self.run_dir(name), name).unlink(missing_ok=True)  # what the one before it said is not its word
        environment = {**os.environ, "OMP_NUM_THREADS": threads, "OMP_WAIT_POLICY": "passive", "PYTHONUNBUFFERED": "1"}
        with (self.folder / f"{name}.log").open("ab") as log:
            if name in self._before:
                self.processes[name] = subprocess.Popen(
                    [*self._before[name], sys.executable, "-m", module, *arguments],
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,
                    env=environment,
                )
            else:
                self.processes[name] = fork(module, arguments, environment, log)

    @contextlib.contextmanager
    def hold(self, name: str) -> Iterator[Callable[..., None]]:
        """That worker, one of `held`, begins no step until the end of the block. Gives what lets it go on until it has
        sent so many `tokens`, and one to each of so many `requests`, and waits until it stands still again."""
        hold, held = hold_file(self.run_dir(name), name), held_file(self.run_dir(name), name)
        fresh = hold.with_suffix(".new")

        def order(tokens: int, requests: int = 0) -> None:
            fresh.write_bytes(msgspec.json.encode(Hold(tokens, requests)))
            fresh.replace(hold)

        def go_on(tokens: int, requests: int = 0) -> None:
            order(tokens, requests)
            said = hold.read_bytes()
            deadline = time.monotonic() + START_TIMEOUT_S
            while content(held) != said:
                assert time.monotonic() < deadline, f"{name} did not send so many tokens: {tokens}\n{self.log(name)}"
                time.sleep(0.02)

        order(0)
        try:
            yield go_on
        finally:
            hold.unlink(missing_ok=True)

    def wait_for_requests(self, number: int) -> None:
        """Until the gateway has so many that are not answered."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            stats = self.heard("gateway")
            if stats.get("requests_running", 0) + stats.get("requests_waiting", 0) >= number:
                return
            assert time.monotonic() < deadline, f"{number} requests are expected: {stats}"
            time.sleep(0.05)

    def run_dir(self, name: str) -> Path:
        """One machine's processes share one."""
        return self.folder / "run"

    def kill(self, name: str) -> None:
        """As an out-of-memory killer would."""
        process = self.processes.pop(name)
        process.kill()
        process.wait(10)

    def signal(self, name: str, number: signal.Signals) -> None:
        self.processes[name].send_signal(number)

    def terminate(self, name: str, timeout_s: float = 60.0) -> int:
        process = self.processes.pop(name)
        process.send_signal(signal.SIGTERM)
        return process.wait(timeout_s)

    def close(self) -> None:
        for process in self.processes.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()  # one that was forked just now leads no group yet
        for process in self.processes.values():
            process.wait(10)
        self.processes.clear()

    def wait_ready(self, workers: int | None = None) -> None:
        """Until the gateway is ready and all workers (or so many) are registered."""
        wanted = len(self.config.instance_roles) if workers is None else workers
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            for name, process in self.processes.items():
                if process.poll() is not None:
                    raise AssertionError(f"{name} ended with {process.returncode}:\n{self.log(name)}")
            with contextlib.suppress(OSError, urllib.error.URLError, json.JSONDecodeError, KeyError):
                self.get("/ready")
                if self.stats("manager").get("workers", 0) >= wanted:
                    return
            time.sleep(0.1)
        logs = "\n".join(f"--- {name}\n{self.log(name)}" for name in self.names)
        raise AssertionError(f"not ready within {START_TIMEOUT_S} s\n{logs}")

    def log(self, name: str, lines: int = 30) -> str:
        path = self.folder / f"{name}.log"
        return "\n".join(path.read_text(errors="replace").splitlines()[-lines:]) if path.exists() else ""

    # -- figures -----------------------------------------------------------------------------------------------

    def get(self, path: str, port: int | None = None) -> Any:
        with urllib.request.urlopen(f"http://127.0.0.1:{port or self.port}{path}", timeout=5) as response:
            body = response.read()
        return json.loads(body) if body[:1] in b"{[" else body.decode()

    def metrics(self) -> str:
        """The monitor's, once those of every other process are part of them: it hears of one later than clients do."""
        deadline, text = time.monotonic() + START_TIMEOUT_S, ""
        while any(f'cohort_scrape_up{{instance="{name}"}} 1' not in text for name in set(self.processes) - {"monitor"}):
            assert time.monotonic() < deadline, f"the monitor's metrics lack a process:\n{self.log('monitor')}"
            with contextlib.suppress(OSError):
                text = str(self.get("/metrics", self.config.monitor.port))
            time.sleep(0.05)
        return text

    def state(self) -> dict[str, Any]:
        """All processes' last heartbeats, from the monitor."""
        state = self.get("/api/state", self.config.monitor.port)
        return {process["instance"]: process for process in state["processes"]}

    def stats(self, name: str) -> dict[str, float]:
        process = self.state().get(name)  # a monitor that just started has not heard of every process
        return dict(process["stats"]) if process is not None and process["status"] == "up" else {}

    def heard(self, name: str) -> dict[str, float]:
        """`stats` of a process that lives, also where it or the monitor was not scheduled for seconds and counts as
        down until its next heartbeat."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            with contextlib.suppress(OSError):
                if stats := self.stats(name):
                    return stats
            assert time.monotonic() < deadline, f"nothing is heard of {name}:\n{self.log(name)}"
            time.sleep(0.1)

    def wait_told(self, *names: str) -> None:
        """Until each of these (all that run, but the monitor) has sent two heartbeats more: the second was made after
        this was called."""
        beats = dict.fromkeys(names or (name for name in self.processes if name != "monitor"), 0)
        ages_s: dict[str, float] = {}
        deadline = time.monotonic() + START_TIMEOUT_S
        while min(beats.values()) < 2:
            assert time.monotonic() < deadline, f"no heartbeats: {beats}"
            with contextlib.suppress(OSError):
                for name, process in self.state().items():
                    if name in beats:
                        beats[name] += process["age_s"] < ages_s.get(name, 0.0)
                        ages_s[name] = process["age_s"]
            time.sleep(0.1)

    def wait_for(self, name: str, stat: str, at_least: float, timeout_s: float = 5.0) -> None:
        """Until a heartbeat says so. Time is counted in heartbeats, so none passes while the process or the monitor is
        not scheduled."""
        deadline = time.monotonic() + START_TIMEOUT_S
        beats, last_age_s, value = 0, 0.0, 0.0
        while True:
            with contextlib.suppress(OSError):
                process = self.state().get(name)
                if process is not None and process["status"] == "up":
                    if (value := process["stats"].get(stat, 0.0)) >= at_least:
                        return
                    beats += process["age_s"] < last_age_s
                    last_age_s = process["age_s"]
            late = beats * HEARTBEAT_S > timeout_s or time.monotonic() > deadline
            assert not late, f"{name}: {stat} is {value} after {beats} heartbeats, expected {at_least} or more"
            time.sleep(0.1)

    def assert_nothing_left(self, timeout_s: float = 20.0) -> None:
        """No request, block or lease is held anywhere (heartbeats need a moment to say so)."""
        deadline = time.monotonic() + timeout_s
        left = {"the monitor does not answer": 1.0}
        while True:
            with contextlib.suppress(OSError):  # it is not scheduled
                left = self._left()
            if not left:
                return
            if time.monotonic() > deadline:
                raise AssertionError(f"left behind: {left}")
            time.sleep(0.25)

    def _left(self) -> dict[str, float]:
        left = {}
        for name in self.config.instance_roles:
            if name not in self.processes:
                continue
            stats = self.stats(name)
            if not stats:
                left[f"{name} is not up"] = 1.0
            for key in ("held_blocks", "leases", "running", "waiting", "awaiting_kv", "parked", "quarantined_blocks"):
                if stats.get(key, 0):
                    left[f"{name}.{key}"] = stats[key]
        for name in manager_names(self.config):
            manager = self.stats(name)
            left |= {f"{name}.{key}": manager[key] for key in ("waiting", "live") if manager.get(key, 0)}
        gateway = self.stats("gateway")
        left |= {
            f"gateway.{key}": gateway[key]
            for key in ("requests_running", "requests_waiting", "open_streams")
            if gateway.get(key, 0)
        }
        return left

    # -- requests ----------------------------------------------------------------------------------------------

    def complete_together(self, bodies: list[dict[str, Any]], name: str) -> list[Answer]:
        """All of them at once: that worker, one of `held`, begins no step before all are there, not at the gateway
        alone but waiting at the manager or a worker."""
        with ThreadPoolExecutor(1) as client:
            with self.hold(name):
                answers = client.submit(self.complete_all, bodies, len(bodies))
                self.wait_for_requests(len(bodies))
                self.wait_behind_the_gateway(len(bodies))
            return answers.result()

    def wait_behind_the_gateway(self, number: int) -> None:
        """Until the manager and the workers have so many requests."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while (there := self._waiting_behind_the_gateway()) < number:
            assert time.monotonic() < deadline, f"{there} of {number} requests have come to a worker"
            time.sleep(0.05)

    def wait_at(self, name: str, number: int) -> None:
        """Until that worker has so many requests, with their KV."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while sum((stats := self.heard(name)).get(each, 0.0) for each in ("waiting", "running", "parked")) < number:
            assert time.monotonic() < deadline, f"{number} requests are expected at {name}: {stats}"
            time.sleep(0.05)

    def _waiting_behind_the_gateway(self) -> float:
        there = sum(self.heard(name).get("waiting", 0.0) for name in manager_names(self.config)[:1])
        for name in self.config.instance_roles:
            stats = self.heard(name)
            there += sum(stats.get(each, 0.0) for each in ("waiting", "running", "awaiting_kv", "parked"))
        return there

    async def complete(self, session: aiohttp.ClientSession, **body: Any) -> Answer:
        return await complete(session, self.url, **body)

    def complete_all(self, bodies: list[dict[str, Any]], concurrency: int = 16) -> list[Answer]:
        """All of them, `concurrency` at a time, in order."""

        async def run() -> list[Answer]:
            gate = asyncio.Semaphore(concurrency)
            timeout = aiohttp.ClientTimeout(total=300)
            async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:

                async def one(body: dict[str, Any]) -> Answer:
                    async with gate:
                        return await self.complete(session, **body)

                return await asyncio.gather(*(one(body) for body in bodies))

        return asyncio.run(run())


async def complete(session: aiohttp.ClientSession, url: str, **body: Any) -> Answer:
    """One streamed /v1/completions; `tokens` are there if the body says `return_token_ids`."""
    answer = Answer()
    last = time.monotonic()
    answer.arrived_s.append(last)
    request = {"stream": True, "stream_options": {"include_usage": True}, **body}
    async with session.post(f"{url}/v1/completions", json=request) as response:
        if response.status != 200:
            answer.error = f"{response.status}: {await response.text()}"
            return answer
        async for raw in response.content:
            line = raw.strip()
            if not line.startswith(b"data: ") or line == b"data: [DONE]":
                continue
            chunk = json.loads(line[6:])
            if "error" in chunk:
                answer.error = str(chunk["error"])
                continue
            now = time.monotonic()
            answer.longest_pause_s, last = max(answer.longest_pause_s, now - last), now
            answer.arrived_s.append(now)
            for choice in chunk["choices"]:
                answer.text += choice["text"]
                answer.finish = choice["finish_reason"] or answer.finish
            if chunk.get("usage"):
                details = chunk["usage"].get("prompt_tokens_details") or {}
                answer.cached_tokens = details.get("cached_tokens", 0)
            for extras in (chunk.get("cohort") or {}).get("requests", []):
                answer.extras = extras
                answer.tokens = extras.get("token_ids", [])
    return answer
