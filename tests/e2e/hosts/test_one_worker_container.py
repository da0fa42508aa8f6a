"""The container with all workers of a host, by hand: a launcher that starts workers alone, of a pipeline elsewhere."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.containers import Containers

pytestmark = [pytest.mark.pipeline, pytest.mark.slow]

OTHERS = ("gateway", "length_predictor", "bucketing_manager", "global_monitor")


def test_a_launcher_has_the_workers_alone(tmp_path: Path, small_model: Path) -> None:
    """One that is killed comes again; all that they log goes to the launcher's output, and it is healthy when all are
    ready."""
    containers = Containers(tmp_path, small_model)
    try:
        assert containers.start("model").wait(timeout=300) == 0, containers.log("model")
        containers.processes.clear()
        for service in (*OTHERS, "workers"):
            containers.start(service)
        containers.until_ready(timeout_s=180)
        body = {"prompt": "The sea is", "max_tokens": 4, "ignore_eos": True}
        assert containers.fetch("/v1/completions", body)[0] == 200
        run = tmp_path / "workers" / "run"
        state = json.loads((run / "launcher.json").read_bytes())
        assert len(state["processes"]) == 1
        status = [sys.executable, "-P", "-m", "cohort.services.launcher", "--status", "--run-dir", str(run)]
        assert subprocess.run(status, capture_output=True, check=False).returncode == 0
        os.kill(next(iter(state["processes"].values()))["pid"], signal.SIGKILL)
        status_code, answer = containers.fetch("/v1/completions", body)
        assert status_code == 200 and answer["usage"]["completion_tokens"] == 4
        assert set(containers.stop().values()) == {0}
        logged = [json.loads(line) for line in containers.log("workers").splitlines() if line.startswith("{")]
        assert len([each for each in logged if each["event"] == "step times"]) == 2  # as each life of the worker begins
        assert "ready: " in containers.log("workers") and not list((run / "logs").iterdir())
    finally:
        containers.stop()
