"""Attack: a thousand of the largest requests that are accepted, all open at once and grown to their last token."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.examples import another_of_its_kind
from tests.security.request_memory import CONTEXT, REQUESTS, SCENARIOS
from tests.services.gateway.tiny_model import write_model

LIMIT_BYTES = 512 << 20


@pytest.fixture(scope="module")
def wide_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "wide", context=CONTEXT)


BY_DEFAULT = ("plain", "log-probabilities")


@pytest.mark.parametrize(
    "scenario", [name if name in BY_DEFAULT else pytest.param(name, marks=another_of_its_kind()) for name in SCENARIOS]
)
def test_a_thousand_of_the_worst(wide_model: Path, scenario: str) -> None:
    """All plain ones come in; the others until they hold what they may, then they are told to come later."""
    command = [sys.executable, "-m", "tests.security.request_memory", scenario, str(wide_model)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["open"] == REQUESTS
    assert found["worst"] and set(found["refused"]) <= {"429"}
    assert found["held_bytes"] < LIMIT_BYTES, f"{found['held_bytes'] >> 20} MiB"
