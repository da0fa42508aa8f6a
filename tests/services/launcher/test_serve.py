"""`cohort serve` with the real processes and a real model: once through its life, and its death."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cohort.common.http.ports import free_port
from cohort.common.paths import cache_dir
from cohort.services.launcher.run_files import LauncherState, RunFiles
from tests.examples import another_of_its_kind
from tests.gguf_models import add_tokenizer, random_model, write_gguf

pytestmark = [pytest.mark.pipeline, pytest.mark.slow]

SMALL = ["--set", "kv.memory_bytes=67108864", "--set", "kv.host_memory_bytes=0", "--set", "engine.device=cpu"]
SMALL += ["--set", "predictor.learns=false"]  # to import what a training needs takes seconds, and an end waits for it


class Serve:
    """The command, with a cache folder of its own."""

    key = ""
    """Of the API: it is open."""

    def __init__(self, cache: Path, model: Path) -> None:
        self.port = free_port()
        self.files = RunFiles(cache / "run" / str(self.port))
        self._model = model
        self._environment = {**os.environ, "COHORT_CACHE_DIR": str(cache)}
        kernels = cache_dir() / "kernels"
        kernels.mkdir(parents=True, exist_ok=True)
        (cache / "kernels").symlink_to(kernels)  # compiled once per machine, not once per test

    def __call__(self, *options: str, model: Path | None = None) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-P", "-m", "cohort.services.launcher", "--port", str(self.port), *options]
        if not {"--stop", "--status"} & set(options):
            command += ["--model", str(model or self._model), *SMALL]
        return subprocess.run(
            command, env=self._environment, capture_output=True, text=True, timeout=180, check=False, cwd="/"
        )

    @property
    def state(self) -> LauncherState:
        state = self.files.state()
        assert state is not None
        return state

    def get(self, path: str) -> dict[str, Any]:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=30) as answer:
            found: dict[str, Any] = json.loads(answer.read())
            return found

    def answer(self, **wanted: Any) -> dict[str, Any]:
        body = {"model": "served", "temperature": 0, **wanted}
        url = f"http://127.0.0.1:{self.port}/v1/completions"
        request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            body = json.loads(answer.read())
            return body


@pytest.fixture
def serve(tmp_path: Path, small_model: Path) -> Iterator[Serve]:
    made = Serve(tmp_path, small_model)
    yield made
    state = made.files.state()
    if state is not None:
        state.launcher.send(signal.SIGKILL)
        for mark in state.processes.values():
            mark.wait_ended(10.0)


def test_a_pipeline_from_start_to_the_death_of_its_launcher_and_the_next_one_to_its_stop(serve: Serve, tmp_path: Path):
    """A launcher that is killed takes its processes along; the next start works, here of a GGUF file: the text is what
    the file's tokenizer says of what the model of its weights answers."""
    started = serve("--detach", "--preset", "unified", "--served-name", "served")
    assert started.returncode == 0, started.stdout + started.stderr
    for instance in ("gateway", "predictor", "manager", "monitor", "unified-0"):
        assert any(line.startswith(instance) and " ready " in line for line in started.stdout.splitlines()), instance
    assert f"http://127.0.0.1:{serve.port}" in started.stdout
    curl = next(line for line in started.stdout.splitlines() if "curl" in line).partition("try")[2]
    answer = subprocess.run(["bash", "-c", curl], capture_output=True, text=True, timeout=60, check=False)
    assert json.loads(answer.stdout)["choices"], answer.stderr

    [engine] = serve.get("/version")["engines"]
    assert engine["device"] and engine["kernels"] in ("native", "reference")
    with urllib.request.urlopen(f"http://127.0.0.1:{serve.port + 1}/metrics", timeout=10) as metrics:
        assert f'cohort_worker_engine{{capability="",decode_attention="{engine["kernels"]}"' in metrics.read().decode()

    again = serve("--detach")
    assert again.returncode == 2
    assert "already running" in again.stderr

    # Stands for a full disk: the launcher cannot write its state, and the worker comes back all the same.
    state = serve.state
    (serve.files.folder / ".launcher.json.partial").mkdir()
    os.kill(state.processes["unified-0"].pid, signal.SIGKILL)
    assert serve.answer(prompt="The sea is", max_tokens=5)["choices"][0]["text"]
    assert state.launcher.alive
    (serve.files.folder / ".launcher.json.partial").rmdir()
    assert "is not written" in serve.files.log_file("launcher").read_text()
    os.kill(state.processes["monitor"].pid, signal.SIGKILL)
    deadline_s = time.monotonic() + 20
    while serve.state.processes.get("unified-0") in (None, state.processes["unified-0"]):
        assert time.monotonic() < deadline_s
        time.sleep(0.05)

    state = serve.state
    state.launcher.send(signal.SIGKILL)
    assert all(mark.wait_ended(10.0) for mark in state.processes.values())

    file = write_gguf(random_model("llama"), tmp_path / "tiny.Q4_0.gguf", "Q4_0", extra=add_tokenizer)
    started = serve("--detach", "--preset", "unified", model=file)
    assert started.returncode == 0, started.stdout + started.stderr
    marks = serve.state.processes
    assert set(marks) == {"gateway", "predictor", "manager", "monitor", "unified-0"}
    assert [entry["id"] for entry in serve.get("/v1/models")["data"]] == ["tiny.Q4_0"]
    [choice] = serve.answer(model="tiny.Q4_0", prompt=[5, 90, 33, 170], max_tokens=8, logprobs=1)["choices"]
    assert len(choice["logprobs"]["token_logprobs"]) == 8 or choice["finish_reason"] == "stop"
    assert choice["text"]

    assert serve("--stop").returncode == 0
    assert not any(mark.alive for mark in marks.values())
    assert list(serve.files.folder.glob("*.sock")) == []


def test_errors_are_raised_before_anything_starts(serve: Serve, tmp_path: Path):
    result = serve(model=tmp_path / "absent")
    assert result.returncode == 2 and "absent: no such folder" in result.stderr
    result = serve("--preset", "nonsense")
    assert result.returncode == 2 and all(
        known in result.stderr for known in ("there are: ", "cohort, ", "disaggregated, ", "unified")
    )
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", serve.port))
        taken.listen()
        result = serve("--detach")
        assert result.returncode == 2 and f"port {serve.port} on 127.0.0.1 is taken" in result.stderr
    assert not serve.files.claimed


@another_of_its_kind()
def test_a_worker_that_cannot_load_the_model_is_reported(serve: Serve, tmp_path: Path):
    """The folder looks right, its weights are not: the worker says so, the launcher shows it and ends the rest."""
    model = tmp_path / "broken"
    model.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (model / name).write_bytes((serve._model / name).read_bytes())
    (model / "model.safetensors").write_bytes(b"not weights")
    started_s = time.monotonic()
    result = serve("--detach", "--preset", "unified", model=model)
    assert result.returncode == 1
    assert "unified-0" in result.stderr
    assert time.monotonic() - started_s < 120
