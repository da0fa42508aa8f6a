"""A pipeline for a comparison: started as asked, examined through its monitor, stopped whatever happens.

The `cohort` command is replaced by one that notes how it was called and leaves the files the real one leaves.
"""

from __future__ import annotations

import json
import signal
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from cohort.common.config import dump_config, load_config
from cohort.common.paths import run_dir
from cohort.services.bench.live import pipelines as live

PORT = 8399


class Monitor(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        state = {"processes": [{"instance": "manager", "figures": {"splits_total": 3.0}}]}
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
                raise subprocess.CalledProcessError(1, given)
            run_dir(PORT).mkdir(parents=True)
            resolved = load_config(overrides={"monitor": {"port": monitor_port}})
            (run_dir(PORT) / "resolved.yaml").write_text(dump_config(resolved))
        if "--json" in given:
            Path(given.pop()).write_text(json.dumps({"runs": [{"overall": {"completed": 7}}]}))
        noted.append(tuple(given))

    monkeypatch.setenv("COHORT_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(live, "cohort", cohort)
    return noted


def test_started_loaded_examined_and_stopped(calls: list[tuple[str, ...]]) -> None:
    with live.pipeline("bros", {"kv": {"block_size": 8}}, PORT, ["kv.prefix_caching=false"]) as served:
        assert served.bench("--rate", "2") == {"overall": {"completed": 7}}
        assert served.figures() == {"manager": {"splits_total": 3.0}}
        assert served.metrics() == "asked for /metrics\n"
    assert calls == [
        (
            "serve",
            "--detach",
            "--preset",
            "bros",
            "--config",
            "{'kv': {'block_size': 8}}",
            "--port",
            "8399",
            "--set",
            "kv.prefix_caching=false",
        ),
        ("bench", "--url", "http://127.0.0.1:8399", "--rate", "2", "--quiet", "--json"),
        ("serve", "--stop", "--port", "8399"),
    ]


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


def test_what_did_not_start_is_not_stopped(calls: list[tuple[str, ...]]) -> None:
    """Its own launcher cleaned up; and on that port another pipeline may be running, which is why it did not start."""
    with pytest.raises(subprocess.CalledProcessError), live.pipeline("broken", {}, PORT):
        raise AssertionError("never reached")
    assert [call[1] for call in calls] == ["--detach"]
