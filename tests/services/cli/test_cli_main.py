"""`cohort`: quick, helpful, and clear about what is wrong."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from cohort.services.bench.__main__ import COMMANDS as MEASUREMENTS
from cohort.services.cli import __main__ as cli
from cohort.services.cli import api_keys

NEEDED = {
    "log-level": ["info"],
    "keys": ["a-file"],
    "keys add": ["a"],
    "keys show": ["a"],
    "keys set": ["a"],
    "keys revoke": ["a"],
    "simulate": ["--trace", "8x8", "--cluster", "a100-80:1", "--model", "opt-13b"],
    "compare": ["papers"],
    "replay": ["a-file"],
    "traces": ["list"],
    "bench operators": ["a-folder"],
    "bench decisions": ["placement"],
}
"""Words without which a command line lacks something else."""

STATE = {
    "name": "unified",
    "model": "tiny-model",
    "uptime_s": 5.0,
    "events": [],
    "last_minute": {
        "seconds": 60.0,
        "arrivals_per_s": 1.5,
        "finished_per_s": 1.0,
        "prompt_tokens_per_s": 7.0,
        "output_tokens_per_s": 42.0,
        "failed": 0,
        "refused": {},
        "classes": {},
    },
    "slo": {},
    "arrival_rate": 1.5,
    "arrival_rate_forecast": 2.5,
    "mean_prompt_tokens": 0.0,
    "mean_output_tokens": 0.0,
    "sample_ages_s": [1.0],
    "samples": {},
    "processes": [
        {
            "instance": "gateway",
            "role": "gateway",
            "status": "up",
            "ready": True,
            "pid": 1,
            "age_s": 0.1,
            "since_s": 300.0,
            "restarts": 0,
            "metrics_url": "",
            "stats": {"requests_running": 7, "requests_waiting": 2},
        },
        {
            "instance": "unified-0",
            "role": "prefill_worker",
            "status": "up",
            "ready": False,
            "pid": 2,
            "age_s": 0.1,
            "since_s": 5.0,
            "restarts": 3,
            "metrics_url": "",
            "stats": {"kv_total_blocks": 100, "kv_used_blocks": 40, "running": 5, "waiting": 0},
            "work": {"step_ms": 12.34, "rows": 2.0},
        },
    ],
}


class Monitor(HTTPServer):
    body = b""
    status = 200


class _Handler(BaseHTTPRequestHandler):
    server: Monitor

    def do_GET(self) -> None:
        self.send_response(self.server.status)
        self.end_headers()
        self.wfile.write(b"" if self.path == "/metrics" else self.server.body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def monitor() -> Iterator[Monitor]:
    with Monitor(("127.0.0.1", 0), _Handler) as server:
        server.body = json.dumps(STATE).encode()
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join(5)


def url(monitor: Monitor) -> str:
    return f"http://127.0.0.1:{monitor.server_port}"


def test_help_names_every_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "cohort.services.cli", "--help"], capture_output=True, text=True, timeout=60, check=True
    )
    assert all(name in done.stdout for name in (*cli.COMMANDS, "curl", "first steps"))


def test_nothing_heavy_is_imported_for_help() -> None:
    code = (
        "import sys, cohort.services.cli.__main__ as c\n"
        "try: c.main(['--help'])\nexcept SystemExit: pass\n"
        "print([m for m in sys.modules if m.startswith('cohort.') and m not in BASE], len(sys.modules))"
    )
    code = f"BASE = {('cohort.common', 'cohort.common.errors', 'cohort.services', 'cohort.services.cli')}\n{code}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    told = done.stdout.splitlines()[-1]
    assert told.startswith("['cohort.services.cli.__main__'] ")
    assert int(told.split()[-1]) < 200, "of the standard library too: each costs the user's time"


def test_without_a_command_it_helps(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 0
    assert "commands:" in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("cohort 0.")


def test_an_unknown_command_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["srve"])
    assert ended.value.code == 2
    assert "there is no command srve; did you mean serve?" in capsys.readouterr().err


def test_a_missing_part_breaks_only_itself(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(cli.COMMANDS, "paint", "a command whose module is missing")
    assert cli.main(["paint"]) == 2
    assert "`cohort paint` is not usable in this installation" in capsys.readouterr().err
    assert cli.main([]) == 0


EVERY = [
    *([name] for name in cli.COMMANDS),
    *(["bench", name] for name in MEASUREMENTS),
    *(["keys", name] for name in api_keys.COMMANDS),
]


@pytest.mark.parametrize("command", EVERY, ids=" ".join)
def test_every_command_explains_itself(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Its own usage, a sentence, an example, and a default for each number."""
    with pytest.raises(SystemExit) as ended:
        cli.main([*command, "--help"])
    assert ended.value.code == 0
    usage, described, *_ = (text := capsys.readouterr().out).split("\n\n")
    assert usage.startswith(f"usage: cohort {' '.join(command)} ")
    assert len(described.split()) > 3 and not described.startswith(("options:", "positional"))
    named = " ".join(command).removesuffix(" http")  # which `cohort bench` is without a word
    assert re.search(rf"example[\s\S]*cohort {named}\b", text)
    assert "%(" not in text


@pytest.mark.parametrize("command", EVERY, ids=" ".join)
def test_a_wrong_option_is_an_error_of_its_command(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([*command, *NEEDED.get(" ".join(command), ()), "--hepl"])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert f"usage: cohort {' '.join(command)} " in error and "--hepl; did you mean --help?" in error


@pytest.mark.parametrize("command", ["status", "doctor", "restart", "log-level", "chaos", "compare", "bench", "serve"])
def test_what_looks_for_a_pipeline_takes_its_port(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main([command, "--help"])
    assert "--port " in capsys.readouterr().out


def test_status_finds_the_monitor_by_the_port_of_the_pipeline(
    monitor: Monitor, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["status", "--port", str(monitor.server_port - 1)]) == 0
    assert "tiny-model" in capsys.readouterr().out


def test_status_shows_the_processes(monitor: Monitor, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["status", "--url", url(monitor)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "tiny-model" in lines[0] and "42 output tokens/s" in lines[1] and "preset unified" in lines[0]
    gateway = next(line for line in lines if line.lstrip().startswith("gateway"))
    worker = next(line for line in lines if line.lstrip().startswith("unified-0"))
    assert gateway.split()[1:] == ["ready", "5", "min", "7", "2", "0"]
    assert "not ready" in worker and "████░░░░░░  40 %" in worker and "12.3 ms" in worker
    assert worker.split()[-1] == "3"


def test_status_fails_when_a_process_is_down(monitor: Monitor, capsys: pytest.CaptureFixture[str]) -> None:
    worker = {**STATE["processes"][1], "status": "down", "age_s": 9.0}  # type: ignore[index]
    monitor.body = json.dumps({**STATE, "processes": [worker]}).encode()
    assert cli.main(["status", "--url", url(monitor)]) == 1
    out = capsys.readouterr().out
    assert "down: unified-0" in out and "silent 9 s" in out


def test_status_as_json(monitor: Monitor, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["status", "--json", "--url", url(monitor) + "/"]) == 0
    assert json.loads(capsys.readouterr().out) == STATE


def test_nothing_running_is_said_plainly(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["status", "--url", "http://127.0.0.1:1"]) == 1
    error = capsys.readouterr().err
    assert "no monitor answers at http://127.0.0.1:1" in error and "cohort serve" in error


@pytest.mark.parametrize(("status", "body"), [(404, b"{}"), (200, b"<html>"), (200, b"[]"), (200, b'{"a": 1}')])
def test_something_else_running_there_is_said_plainly(
    monitor: Monitor, capsys: pytest.CaptureFixture[str], status: int, body: bytes
) -> None:
    monitor.status, monitor.body = status, body
    assert cli.main(["status", "--url", url(monitor)]) == 1
    assert "monitor" in capsys.readouterr().err


def test_a_nonsense_address_is_no_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["status", "--url", "8001"]) == 1
    assert "8001" in capsys.readouterr().err
