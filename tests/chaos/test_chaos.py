"""`cohort chaos`: the kill table and the rolling restart, short; the 800 requests of every kind nightly."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from cohort.common.engine.device import compiled_kernels
from cohort.common.http.ports import free_port
from cohort.kernels.cpu import native
from cohort.services.bench.chaos.report import RESTARTED, UNDISTURBED, Document
from tests.examples import nightly

pytestmark = [pytest.mark.pipeline, pytest.mark.slow]
on_many_requests = pytest.mark.skipif(not nightly(), reason="the whole table takes minutes: scripts/test --nightly")


def chaos(folder: Path, *words: str, timeout_s: float = 600.0) -> Document:
    document = folder / "chaos.json"
    command = [sys.executable, "-P", "-m", "cohort.services.cli", "chaos", "--port", str(free_port()), *words]
    done = subprocess.run([*command, "--json", str(document)], capture_output=True, text=True, timeout=timeout_s)
    assert done.returncode == 0, done.stdout + done.stderr
    found = msgspec.json.decode(document.read_bytes(), type=Document)
    assert done.stdout.count("\n") == 2 + len(found.runs)
    return found


def test_a_rolling_restart_and_a_killed_gateway_lose_nothing_that_another_process_holds(tmp_path: Path) -> None:
    """Two gateways: of the one that is killed only its own plain streams may fail. Then all processes in turn."""
    words = ("--kill", "gateway", "--rolling-restart", "--clients", "2", "--requests", "10")
    # A predictor that ends while it trains waits for that, for seconds.
    settings = ("gateway.processes=2", "predictor.learns=false")
    found = chaos(tmp_path, *words, *(word for each in settings for word in ("--set", each)))
    undisturbed, killed, restarted = found.runs
    assert [undisturbed.broken, killed.broken, restarted.broken] == [UNDISTURBED, "gateway", RESTARTED]
    assert killed.verdicts["cut"] <= 2 and killed.faults[0].back_s is not None
    assert restarted.verdicts["right"] == restarted.requests >= 20


@on_many_requests
@pytest.mark.parametrize("preset", ["cohort", "disaggregated"])
def test_the_whole_table(tmp_path: Path, preset: str) -> None:
    found = chaos(tmp_path, "--preset", preset, "--rolling-restart", timeout_s=1500.0)
    assert [run.broken for run in found.runs] == [
        *(UNDISTURBED, "gateway", "predictor", "manager", "monitor", "prefill", "decode", RESTARTED)
    ]
    assert all(run.requests == run.verdicts["right"] + run.verdicts["cut"] >= 800 for run in found.runs)
    assert all(not run.verdicts["cut"] for run in found.runs if run.broken != "gateway")


@on_many_requests
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_mixed_streams_that_all_resume_lose_nothing_of_a_census(tmp_path: Path, dtype: str) -> None:
    compiled_kernels.keep_in_cache()
    if dtype == "bfloat16" and ((ops := native.operators()) is None or not ops.panels_multiply_bf16()):
        pytest.skip("without products of bfloat16 torch multiplies: another text is no defect")
    broken = ("gateway", "decode-0+prefill-0", "stop:decode-0")
    words = ("--census", "--set", f"model.dtype={dtype}", "--clients", "24", "--requests", "2", "--kill", *broken)
    found = chaos(tmp_path, *words, timeout_s=900.0)
    assert [run.broken for run in found.runs] == [UNDISTURBED, *broken]
    assert all(run.requests == run.verdicts["right"] >= 48 for run in found.runs)
