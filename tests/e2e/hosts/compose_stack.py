"""docker-compose.yml as a running stack, with the image of this tree: a project whose ports and volumes are its own."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import re
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp

from cohort.common.http.ports import free_port

ROOT = Path(__file__).resolve().parents[3]
IMAGE = "cohort:cpu"
BUILD_TIMEOUT_S, START_TIMEOUT_S, COMMAND_TIMEOUT_S = 1800.0, 300.0, 300.0


@functools.cache
def missing() -> str:
    """What keeps a stack from running here; "" if nothing."""
    if shutil.which("docker") is None:
        return "no docker"
    for command in (["docker", "info"], ["docker", "compose", "version"]):
        if subprocess.run(command, capture_output=True, check=False).returncode:
            return f"{' '.join(command)} fails"
    return ""


def build_image() -> None:
    """Build it by the Dockerfile. Its first line names an image that reads it; the engine's own reader does as well."""
    text = (ROOT / "docker" / "Dockerfile").read_text(encoding="utf-8").partition("\n")[2]
    command = ["docker", "build", "--network", "host", "--file", "-", "--tag", IMAGE]
    command += [
        "--build-arg",
        "ACCELERATOR=cpu",
        "--build-arg",
        f"TORCH_INDEX={os.environ.get('COHORT_TORCH_INDEX', '')}",
    ]
    done = subprocess.run(
        [*command, str(ROOT)],
        input=text,
        env={**os.environ, "DOCKER_BUILDKIT": "1"},
        capture_output=True,
        text=True,
        timeout=BUILD_TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]


class Stack:
    def __init__(self, folder: Path, overlay: str = "", **settings: str) -> None:
        """`overlay`: a second compose file. `settings`: variables of the compose file."""
        self.folder = folder
        self.project = f"cohort-test-{os.getpid()}-{folder.name}".lower()
        self.port, self.monitor = free_port(), free_port()
        (folder / "overlay.yml").write_text(overlay or "services: {}\n", encoding="utf-8")
        self.settings = {
            "COHORT_ACCELERATOR": "cpu",
            "COMPOSE_PROFILES": "cpu",
            "COHORT_PORT": str(self.port),
            "COHORT_MONITOR_PORT": str(self.monitor),
            **settings,
        }

    def compose(self, *words: str, check: bool = True, **settings: str) -> subprocess.CompletedProcess[str]:
        files = ["-f", str(ROOT / "docker-compose.yml"), "-f", str(self.folder / "overlay.yml")]
        plain = {name: value for name, value in os.environ.items() if not name.startswith(("COHORT_", "HF_"))}
        done = subprocess.run(
            ["docker", "compose", "--project-name", self.project, "--project-directory", str(ROOT), *files, *words],
            env={**plain, **self.settings, **settings},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=COMMAND_TIMEOUT_S,
            check=False,
        )
        assert done.returncode == 0 or not check, (words, done.stdout[-2000:], done.stderr[-4000:])
        return done

    @contextmanager
    def running(self) -> Iterator[None]:
        try:
            self.up()
            yield
        finally:
            self.compose("down", "--volumes", "--timeout", "60", check=False)

    def up(self, *words: str, **settings: str) -> None:
        self.settings |= settings
        started = self.compose("up", "--detach", *words, check=False)
        assert started.returncode == 0, self.compose("logs", "--tail", "20").stdout[-4000:] + started.stderr[-1000:]
        self.until_ready()

    def until_ready(self) -> None:
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while not self.answers("/ready"):
            assert time.monotonic() < deadline_s, self.compose("logs", "--tail", "20").stdout[-6000:]
            time.sleep(0.5)

    def answers(self, path: str) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=5):
                return True
        except OSError:
            return False

    def ask(self, path: str, body: dict[str, Any] | bytes | None = None, **headers: str) -> Any:
        data = json.dumps(body).encode() if isinstance(body, dict) else body
        kind = {"Content-Type": "application/json"} if isinstance(body, dict) else {}
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", data, kind | headers)
        with urllib.request.urlopen(request, timeout=120) as answer:
            content = answer.read()
        return json.loads(content) if answer.headers.get_content_type() == "application/json" else content.decode()

    def workers(self) -> set[str]:
        """Workers that the monitor hears of."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.monitor}/metrics", timeout=10) as answer:
            text = answer.read().decode()
        return set(
            re.findall(r'^cohort_up\{instance="([^"]+)",role="(?:prefill|decode)_worker"\} 1', text, re.MULTILINE)
        )

    def until_workers(self, number: int) -> None:
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while len(self.workers()) != number:
            assert time.monotonic() < deadline_s, (number, self.workers())
            time.sleep(0.5)

    def events(self, service: str) -> list[dict[str, Any]]:
        """What a service's processes have logged."""
        lines = self.compose("logs", "--no-log-prefix", "--no-color", service).stdout.splitlines()
        whole = (line[line.find("{") :] for line in lines)  # compose writes what clears a line before it
        return [json.loads(line) for line in whole if line.startswith("{")]

    def kill_all(self, service: str) -> None:
        """`kill -9` all processes of a container, whose first one, which only waits for them, cannot be killed from
        inside; `docker kill` would count as a wish that it stays away."""
        self.compose("exec", "-T", service, "sh", "-c", "kill -9 -1", check=False)

    async def load(self, streams: int, tokens: int, disturbance: Sequence[str] = ()) -> list[int]:
        """Stream so many answers at once, each through breaks of its connection, while the container of each service of
        `disturbance` is killed. Return the tokens that came of each."""
        async with aiohttp.ClientSession(f"http://127.0.0.1:{self.port}") as session, asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._stream(session, f"Story {number}:", tokens)) for number in range(streams)]
            await asyncio.sleep(1.0)
            for service in disturbance:
                await asyncio.to_thread(self.kill_all, service)
        return [task.result() for task in tasks]

    async def _stream(self, session: aiohttp.ClientSession, prompt: str, tokens: int) -> int:
        """Count the tokens of one answer, as docs/guide/api.md has clients read it (resumable streams)."""
        body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
        body["stream_options"] = {"include_usage": True}
        url, last, counted = "", "", -1
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline_s:
            try:
                headers = {"Last-Event-ID": last} if last else {"x-cohort-resume": "keep"}
                asked = (
                    session.get(url, headers=headers)
                    if url
                    else session.post("/v1/completions", json=body, headers=headers)
                )
                async with asked as answer:
                    if answer.status == 503:
                        await asyncio.sleep(0.5)
                        continue
                    assert answer.status == 200, await answer.text()
                    url = f"/v1/streams/{answer.headers['x-cohort-resume']}"
                    event: dict[str, str] = {}
                    async for line in answer.content:
                        if text := line.decode().strip():
                            event.update([text.split(": ", 1)])  # type: ignore[list-item]
                        elif event.get("data") == "[DONE]":
                            return counted
                        elif event:
                            last = event.get("id", last)
                            usage = json.loads(event["data"]).get("usage")
                            counted = usage["completion_tokens"] if usage else counted
            except aiohttp.ClientError:
                await asyncio.sleep(0.5)
        raise AssertionError(f"no end of {prompt!r} at {url}")
