"""Every preset in the virtual cluster under faults: all three machines, replayed, answer as they did.

In a process of its own too, where strings hash otherwise: the order of a set must decide nothing.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from random import Random

import pytest
from hypothesis import given

from cohort.common.machines.replayer import Replayed, replay
from tests.cluster.cases import LONGEST_OUTPUT, LONGEST_PROMPT, PRESETS, TRIED, Case, cases, every_third
from tests.common.machines.recorded_world import RecordedWorld
from tests.examples import nightly, of_worlds

ROOT = Path(__file__).parents[2]


def record(case: Case, folder: Path) -> list[Path]:
    world = case.live(RecordedWorld, recording=(case.config, folder))
    assert isinstance(world, RecordedWorld)
    return world.close()


def check(found: Replayed) -> None:
    assert found.difference == "", f"{found.machine} {found.instance}: {found.difference}"


@pytest.mark.parametrize("preset", every_third(0))
def test_whatever_breaks_every_machine_replays(preset: str) -> None:
    @of_worlds(0.03)
    @given(case=cases(preset))
    def replays(case: Case) -> None:
        with tempfile.TemporaryDirectory() as folder:
            for path in record(case, Path(folder)):
                check(replay(path))

    replays()


def broken(preset: str, seed: int) -> Case:
    """The manager and every worker are killed once and come back, one worker is cut off, one is thought dead, clients
    go away."""
    random = Random(seed)
    config = Case(preset=preset, arrivals=[]).config
    names = sorted(config.instance_roles)
    return Case(
        preset=preset,
        arrivals=[
            (
                random.uniform(0.0, 3.0),
                random.randint(1, LONGEST_PROMPT),
                random.random() < 0.5,
                random.randint(1, LONGEST_OUTPUT),
                random.choice(("rt", "be")),
                random.choice((0.0, 0.5, 1.0, 2.0)),
            )
            for _ in range(30)
        ],
        seed=seed,
        faults=[("manager", 1.0, 0.3), (f"cut {names[0]} gateway", 0.5, 0.4), ("cancel", 1.5, 0.0)]
        + [(f"crash {name}" if index % 2 else name, 2.0 + 0.5 * index, 0.6) for index, name in enumerate(names)]
        + [(f"alarm {names[-1]}", 1.8, 0.0)],
        blocks=30,
        failures=0.05,
    )


@pytest.mark.slow
def test_every_preset_replays_where_strings_hash_otherwise(tmp_path: Path) -> None:
    paths: list[str] = []
    for index, preset in enumerate(PRESETS if nightly() else TRIED[1::3]):
        folder = tmp_path / preset
        folder.mkdir()
        recorded = record(broken(preset, index), folder)
        assert len(recorded) >= 5, "the gateway, and twice the manager and each worker"
        paths += map(str, recorded)
    another = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    done = subprocess.run(
        [sys.executable, "-m", "cohort.services.simulator", "replay", *paths],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": another},
    )
    different = [line[:2000] for line in done.stdout.splitlines() if not line.endswith(": all equal")]
    assert (done.returncode, different, done.stderr) == (0, [], "")
    assert len(done.stdout.splitlines()) == len(paths)
