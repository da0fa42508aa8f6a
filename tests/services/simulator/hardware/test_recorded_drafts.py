"""Rates and times of drafts, read from what a worker wrote down."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from cohort.common.config import dump_config, load_config
from cohort.common.errors import ConfigError
from cohort.common.machines.events import Drafted, Received, Sampled, StepEnded
from cohort.common.machines.recorder import Recorded, WorkerHeader
from cohort.common.machines.worker.worker import WorkerMachine
from cohort.common.policies import compose
from cohort.common.types import Attempt, Role
from cohort.services.simulator.__main__ import main
from cohort.services.simulator.hardware.acceptance import recorded_drafts
from tests.common.machines.small_worker import setup, whole

R, S = Attempt("r", 1), Attempt("s", 1)


def _recorded(path: Path, *, drafts: bool = True) -> Path:
    """Two requests: of the first every token was expected and came, of the second half were, and none came."""
    config, made = load_config(), setup(Role.UNIFIED)
    capacity = made.capacity
    kv = compose.allocation(config, capacity.geometry, capacity.num_blocks, capacity.host_blocks)
    with path.open("wb") as file:
        machine = WorkerMachine(made, compose.iteration(config), kv, Random(5))
        recorded = Recorded(machine, WorkerHeader(made, 5, dump_config(config)), file.write)
        recorded.handle(0.0, Received("manager", whole("r", 40)), Received("manager", whole("s", 40)))
        for step in range(8):
            rows = [row.sequence.key for row in machine.plan_in_flight.rows]
            judged = [Drafted(key, 1, int(key == R), computed=False) for key in rows if key == R or step % 2]
            told = judged if drafts and step else []
            recorded.handle(step / 10, StepEnded([Sampled(key, 7) for key in rows], 0.1, drafts=told))
    return path


def test_each_request_has_its_rate_near_that_of_all_if_little_is_known(tmp_path: Path) -> None:
    found = recorded_drafts(_recorded(tmp_path / "worker.jsonl"))
    assert found.draft_s == 0.0
    first, second = found.rates
    assert first.expected == 7 / 8 and second.expected == 4 / 8
    common = 7 / 11
    assert first.right == pytest.approx((7 + 2 * common) / 9) and second.right == pytest.approx(2 * common / 6)


def test_what_is_no_recording_of_drafts_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="nothing was drafted"):
        recorded_drafts(_recorded(tmp_path / "none.jsonl", drafts=False))
    with pytest.raises(ConfigError, match="not a number, and not a recording"):
        recorded_drafts(tmp_path / "missing.jsonl")
    words = ["simulate", "--trace", "64x64", "--count", "4", "--cluster", "a100-80:1", "--model", "llama-2-13b"]
    words += ["--preset", "unified", "--set", "speculation.mode=model"]
    recorded = str(_recorded(tmp_path / "worker.jsonl"))
    assert main([*words, "--acceptance", recorded]) == 0
    assert "tokens drafted in" in capsys.readouterr().out
    assert main([*words, "--acceptance", "1.5"]) == 2
