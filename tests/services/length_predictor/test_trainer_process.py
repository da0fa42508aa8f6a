"""The training child trains when that teaches it something, and ends with its parent, whatever it does then."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from cohort.services.length_predictor import state, training_wire
from cohort.services.length_predictor.trainer_process import Trainer
from cohort.services.length_predictor.training import train
from tests.examples import another_of_its_kind
from tests.services.length_predictor.conftest import World

_PACE = training_wire.TrainingPace(retrain_every=1, min_observations=2, save_every_s=3600, buffer_size=50)
PACE = msgspec.json.encode(_PACE).decode()
CHILD = """
import sys
from cohort.services.length_predictor import trainer_process, training, training_wire

def train(data, version):
    print("training", file=sys.stderr, flush=True)
    {body}

training.train = train
training_wire.SAVE_DEADLINE_S = {ends_s}
trainer_process._QUEUED_ROWS = 4
trainer_process.NICENESS = 0
trainer_process.main()
"""
PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", *sys.argv[1:]], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
print(child.pid, flush=True)
child.stdin.write(sys.stdin.buffer.read())
child.stdin.flush()
time.sleep(60)
"""


def frames(world: World, count: int) -> bytes:
    return b"".join(training_wire.frame(training_wire.Finished.of(world.observation())) for _ in range(count))


@pytest.mark.parametrize("rows", [40, pytest.param(3, marks=another_of_its_kind())], ids=["queue full", "it reads"])
def test_a_killed_parents_child_ends_in_the_middle_of_a_training(rows: int, world: World, tmp_path: Path) -> None:
    words = [
        sys.executable,
        "-c",
        PARENT,
        CHILD.format(body="while True: pass", ends_s=1),
        str(tmp_path / "state.npz"),
        PACE,
    ]
    pipe = subprocess.PIPE
    with subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=pipe) as parent:
        assert parent.stdin is not None and parent.stdout is not None and parent.stderr is not None
        pidfd = os.pidfd_open(int(parent.stdout.readline()))
        try:
            parent.stdin.write(frames(world, rows))
            parent.stdin.close()
            assert parent.stderr.readline() == b"training\n"
            parent.kill()
            # The far end of stderr is closed when the child has ended, and not before.
            assert select.select([parent.stderr], [], [], 60.0)[0] and parent.stderr.read() == b""
        finally:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            os.close(pidfd)


def test_a_child_that_is_told_in_time_saves(world: World, tmp_path: Path) -> None:
    file = tmp_path / "state.npz"
    words = [sys.executable, "-c", CHILD.format(body="raise ValueError", ends_s=60), str(file), PACE]
    subprocess.run(words, input=frames(world, 3), stdout=subprocess.DEVNULL, timeout=60, check=True)
    saved = state.load(file)
    assert saved is not None and len(saved.data) == 3


@pytest.mark.parametrize(("known", "wanted"), [(0, 6), (40, 8), (1000, 50)])
def test_the_more_it_knows_the_more_it_takes_to_train_again(
    known: int, wanted: int, world: World, tmp_path: Path
) -> None:
    """At least `retrain_every`; until then nothing is due before the next save."""
    pace = training_wire.TrainingPace(retrain_every=8, min_observations=6, save_every_s=3600.0, buffer_size=5000)
    trainer = Trainer(tmp_path / "state.npz", pace)
    if known:
        trainer.model = replace(train(world.dataset(20), 1), trained_on=known)
    for _ in range(wanted):
        trainer.save(0.0)
        assert not trainer.training_due(1.0) and trainer.next_due_s(1.0) == 3600.0
        trainer.add(world.observation())
    assert trainer.training_due(1.0) and trainer.next_due_s(1.0) < 1.0
