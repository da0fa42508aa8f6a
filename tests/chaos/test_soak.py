"""A short soak: mixed traffic while processes are killed, everything accounted for, nothing left. An hour of it is a
command: `cohort chaos --minutes 60`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from cohort.common.http.ports import free_port
from cohort.services.bench.chaos.report import read_document
from tests.examples import nightly

pytestmark = [
    pytest.mark.pipeline,
    pytest.mark.slow,
    pytest.mark.skipif(not nightly(), reason="a soak takes a minute and more: scripts/test --nightly"),
]


def test_every_request_is_accounted_for_and_nothing_is_left(tmp_path: Path) -> None:
    document = tmp_path / "soak.json"
    options = {
        "preset": "disaggregated",
        "clients": 12,
        "minutes": 0.25,
        "kill-every-s": 3,
        "kills-for": 0.6,
        "quiet-s": 12,
        "sample-s": 2,
        "port": free_port(),
    }
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "cohort.services.cli", "chaos", *words, "--json", str(document)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    found = read_document(document)
    (soak,) = found.runs
    assert found.finished and found.findings == [] and soak.unaccounted == []
    assert soak.requests > 30 and soak.verdicts["right"] > 20, "too little was asked to say anything"
    assert soak.faults and all(fault.back_s is not None for fault in soak.faults)
