"""`cohort doctor` as a command: what it prints, its exit status, and a monitor that answers."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from cohort import __version__
from cohort.common.config import dump_config, load_config
from cohort.common.http.ports import free_port
from cohort.common.paths import run_dir
from cohort.services.cli import doctor
from cohort.services.cli.__main__ import main
from cohort.services.cli.checks.finding import fine, warning
from cohort.services.launcher.run_files import RunFiles
from tests.common.devices.test_fit import shard


class Monitor(HTTPServer):
    """A monitor of a pipeline with one worker, whose own metrics address is this server's, too."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.version = __version__
        self.waiting = [0.0] * 120

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def page(self, path: str) -> Any:
        match path.partition("?")[0]:
            case "/api/state":
                worker = {"instance": "decode-0", "role": "decode_worker", "status": "up", "ready": True}
                more = {"restarts": 0, "stats": {}, "warnings": [], "metrics_url": f"{self.url}/metrics"}
                return {"processes": [worker | more], "samples": {"requests_waiting": self.waiting}}
            case "/health":
                return {"status": "ok", "version": self.version}
            case "/metrics":
                return "cohort_bus_forged_total 0\n"
        return None


class _Handler(BaseHTTPRequestHandler):
    server: Monitor

    def do_GET(self) -> None:
        page = self.server.page(self.path)
        body = (page if isinstance(page, str) else json.dumps(page)).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def monitor() -> Iterator[Monitor]:
    with Monitor() as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_a_pipeline_that_is_well_and_one_that_is_mixed(monitor: Monitor, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--url", monitor.url]) == 0
    assert "nothing is wrong" in capsys.readouterr().out
    monitor.version = "0.0.1"
    assert main(["doctor", "--url", monitor.url, "--json"]) == 0, "a warning"
    found = {finding["check"]: finding for finding in json.loads(capsys.readouterr().out)}
    assert found["versions"]["status"] == "warning" and "0.0.1" in found["versions"]["says"]
    monitor.waiting = [0.0] * 60 + [50.0] * 60
    monitor.waiting[-1] = 60.0
    assert main(["doctor", "--url", monitor.url]) == 1
    printed = capsys.readouterr().out
    assert "1 problem, 1 warning" in printed and "→ more workers" in printed


def test_no_monitor_answers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--url", f"http://127.0.0.1:{free_port()}"]) == 1
    assert "no monitor answers" in capsys.readouterr().out


def test_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Every check runs on a real machine and none of them fails itself; a model that is not there is a problem."""
    monkeypatch.setenv("COHORT_CACHE_DIR", str(tmp_path))
    absent = tmp_path / "no-model"
    assert main(["doctor", "--port", str(free_port()), "--model", str(absent), "--json"]) == 1
    found = {finding["check"]: finding for finding in json.loads(capsys.readouterr().out)}
    assert {"model", "ports", "disk space", "threads", "GPU", "UCX", "clock", "certificate", "profiles"} <= set(found)
    assert [name for name, finding in found.items() if "the check itself failed" in finding["says"]] == []
    assert found["model"]["status"] == "problem" and "no such folder" in found["model"]["says"]
    assert found["memory"]["status"] == "skipped", "what weights it has is not known"
    assert found["pipeline"]["status"] == "skipped"


def test_a_named_model_is_looked_at_whatever_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COHORT_CACHE_DIR", str(tmp_path))
    port = free_port()
    files = RunFiles(run_dir(port))
    with files.claim():
        files.write_config(dump_config(load_config(overrides={"model": {"path": str(tmp_path / "served")}})))
        for named, model in (([], "served"), (["--model", str(tmp_path / "wanted")], "wanted")):
            main(["doctor", "--port", str(port), "--json", *named])
            found = {finding["check"]: finding for finding in json.loads(capsys.readouterr().out)}
            assert f"{tmp_path / model}: no such folder" in found["model"]["says"]
            assert found["ports"]["status"] == "skipped", "the pipeline that runs has them"


def test_a_check_that_fails_does_not_keep_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Any:
        raise KeyError("x")

    assert doctor._checked("disk", broken).says == "the check itself failed: KeyError: 'x'"
    assert doctor._checked("disk", lambda: fine("disk", "there")).status == "ok"
    assert doctor._checked("disk", lambda: warning("disk", "a", "b")).cure == "b"


def test_a_wrong_option_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--set", "kv.blok_size=3"]) == 2
    assert "did you mean block_size" in capsys.readouterr().err


def test_memory_counts_weights_as_the_device_keeps_them(tmp_path: Path) -> None:
    """gpt-oss: 4.25 bits a weight on a GPU, 16 or 32 on a processor."""
    layers = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
    quantization = {"quant_method": "mxfp4"}
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "gpt_oss", **layers, "quantization_config": quantization})
    )
    blocks, scales = [32, 5760, 90, 16], [32, 5760, 90]
    shard(tmp_path / "model.safetensors", {"e_blocks": ("U8", blocks), "e_scales": ("U8", scales)})
    gpu = load_config(overrides={"engine": {"device": "cuda"}})
    held = 32 * 5760 * 2880 * 4.25 / 8
    assert f"{held / (1 << 30):.1f} GiB for weights" in doctor.memory(gpu, tmp_path).says
    (least,) = re.findall(r"want about ([\d.]+) GiB", doctor.memory(load_config(), tmp_path).says)
    assert float(least) > 3 * held / (1 << 30)
