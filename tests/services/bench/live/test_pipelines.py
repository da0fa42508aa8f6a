"""A pipeline for a comparison: started as asked, examined through its monitor, stopped whatever happens.

The `cohort` command is replaced by one that notes how it was called and leaves the files the real one leaves.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from cohort.common.config import dump_config, load_config
from cohort.common.paths import run_dir
from cohort.services.bench.child import MeasurementFailed
from cohort.services.bench.live import pipelines as live
from cohort.services.bench.live.pipelines import ClientCommand

PORT = 8399


class Monitor(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        state = {"processes": [{"instance": "manager", "stats": {"splits_total": 3.0}}]}
        body = json.dumps(state) if self.path == "/api/state" else f"asked for {self.path}\n"
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, format: str, *arguments: Any) -> None:
        pass


@pytest.fixture
def monitor_port() -> Iterator[int]:
    server = HTTPServer(("127.0.0.1", 0), Monitor)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server.server_port
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, monitor_port: int) -> list[tuple[str, ...]]:
    noted: list[tuple[str, ...]] = []

    def cohort(*arguments: str) -> None:
        given = list(arguments)
        if "--config" in given:
            place = given.index("--config") + 1
            given[place] = repr(yaml.safe_load(Path(given[place]).read_text()))
        if "--detach" in given:
            if "broken" in given:
                noted.append(tuple(given))
                raise MeasurementFailed("broken")
            run_dir(PORT).mkdir(parents=True)
            resolved = load_config(overrides={"monitor": {"port": monitor_port}})
            (run_dir(PORT) / "resolved.yaml").write_text(dump_config(resolved))
        noted.append(tuple(given))

    monkeypatch.setenv("COHORT_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(live, "cohort", cohort)
    monkeypatch.setattr(live, "start_cohort", lambda *arguments: client(noted, *arguments))
    return noted


def client(noted: list[tuple[str, ...]], *arguments: str) -> subprocess.Popen[bytes]:
    """Notes how it was called but for the file, and writes it."""
    noted.append(arguments[:-1])
    if "--fails" in arguments:
        return subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])
    if "--lasts" in arguments:
        return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    Path(arguments[-1]).write_text(json.dumps({"runs": [{"overall": {"completed": 7}}]}))
    return subprocess.Popen([sys.executable, "-c", ""])


def test_started_loaded_examined_and_stopped(calls: list[tuple[str, ...]]) -> None:
    with live.pipeline("bros", {"kv": {"block_size": 8}}, PORT, ["kv.prefix_caching=false"]) as served:
        assert served.load([ClientCommand("client", ("--rate=2",), 0.0)]) == {"client": {"completed": 7}}
        assert served.stats() == {"manager": {"splits_total": 3.0}}
        assert served.metrics() == "asked for /metrics\n"
    assert calls == [
        (
            "serve",
            "--detach",
            "--preset",
            "bros",
            "--config",
            calls[0][5],
            "--port",
            "8399",
            "--set",
            "kv.prefix_caching=false",
        ),
        ("bench", "--url", "http://127.0.0.1:8399", "--rate=2", "--quiet", "--json"),
        ("serve", "--stop", "--port", "8399"),
    ]
    assert yaml.safe_load(calls[0][5])["kv"] == {"block_size": 8}


@pytest.mark.parametrize("given", [{}, {"state": {"folder": "mine"}}], ids=["its own", "as asked"])
def test_its_state_is_its_own(given: dict[str, Any], calls: list[tuple[str, ...]]) -> None:
    """It neither knows what the user's has learned nor teaches it made-up prompts."""
    with live.pipeline("bros", {"predictor": {"learns": False}, **given}, PORT):
        overlay = yaml.safe_load(calls[0][5])
    assert overlay["predictor"] == {"learns": False}
    state = Path(overlay["state"]["folder"])
    assert state == Path("mine") if given else not state.exists() and not state.parent.exists()


def test_it_is_stopped_when_the_comparison_fails(calls: list[tuple[str, ...]]) -> None:
    with pytest.raises(ZeroDivisionError), live.pipeline("bros", {}, PORT):
        raise ZeroDivisionError
    assert calls[-1] == ("serve", "--stop", "--port", "8399")


def test_it_is_stopped_when_the_comparison_is_terminated(calls: list[tuple[str, ...]]) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit), live.pipeline("bros", {}, PORT):
        signal.raise_signal(signal.SIGTERM)
    assert calls[-1] == ("serve", "--stop", "--port", "8399")
    assert signal.getsignal(signal.SIGTERM) is before


def test_it_is_stopped_when_terminated_while_it_starts(
    monkeypatch: pytest.MonkeyPatch, calls: list[tuple[str, ...]]
) -> None:
    begun = live.cohort

    def terminated(*arguments: str) -> None:
        if "--detach" in arguments:
            signal.raise_signal(signal.SIGTERM)
        begun(*arguments)

    monkeypatch.setattr(live, "cohort", terminated)
    with pytest.raises(SystemExit), live.pipeline("bros", {}, PORT):
        raise AssertionError("never reached")
    assert [call[1] for call in calls] == ["--detach", "--stop"]


def test_it_is_stopped_when_interrupted_while_it_starts(
    monkeypatch: pytest.MonkeyPatch, calls: list[tuple[str, ...]]
) -> None:
    begun = live.cohort

    def interrupted(*arguments: str) -> None:
        begun(*arguments)
        if "--detach" in arguments:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(live, "cohort", interrupted)
    ignored = signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background shells ignore it
    try:
        with pytest.raises(KeyboardInterrupt), live.pipeline("bros", {}, PORT):
            raise AssertionError("never reached")
    finally:
        signal.signal(signal.SIGINT, ignored)
    assert [call[1] for call in calls] == ["--detach", "--stop"]


def test_what_it_starts_is_not_of_its_group() -> None:
    """A signal to the whole group would end `serve --detach` half-way, and leave what that had started."""
    process = live.start_cohort("--version")
    assert os.getpgid(process.pid) == process.pid
    assert process.wait() == 0


def test_a_pipeline_that_did_not_start_is_not_stopped(calls: list[tuple[str, ...]]) -> None:
    """Its own launcher cleaned up; and on that port another pipeline may be running, which is why it did not start."""
    with pytest.raises(MeasurementFailed), live.pipeline("broken", {}, PORT):
        raise AssertionError("never reached")
    assert [call[1] for call in calls] == ["--detach"]


def test_a_client_that_fails_ends_the_others(calls: list[tuple[str, ...]]) -> None:
    lasting, failing = ClientCommand("be", ("--lasts",), 0.0), ClientCommand("rt", ("--fails",), 0.01)
    with pytest.raises(MeasurementFailed, match="the client rt ended with 3"):
        live.Served("http://127.0.0.1:1", "").load([failing, lasting])
    assert [call[3] for call in calls] == ["--lasts", "--fails"]


def test_a_command_that_fails_is_named() -> None:
    with pytest.raises(MeasurementFailed, match="`cohort bench nothing` ended with 2"):
        live.cohort("bench", "nothing")
