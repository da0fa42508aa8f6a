"""The training child: keeps the newest finished requests, refits the model, keeps both on disk.

Started by `trainer.py` as `python -m …trainer_process STATE PACE`; reads `Finished` frames from stdin, writes models
to stdout. Runs at low scheduling priority with one thread, so that serving on the same cores hardly feels it. Ends,
having saved, when stdin ends; where it is in the middle of a training then, or starved of processor time, the kernel
ends it `training_wire.SAVE_DEADLINE_S` later.

    stdin ─▶ reader thread ─▶ queue ─▶ main thread: add; train when due; save when due
      └────▶ watching thread: the parent is gone ─▶ alarm
"""

from __future__ import annotations

import contextlib
import os
import queue
import select
import signal
import sys
import threading
import time
from pathlib import Path
from typing import BinaryIO

import msgspec

from cohort.services.length_predictor import state, training_wire
from cohort.services.length_predictor.buffer import Observation, ObservationBuffer
from cohort.services.length_predictor.model import LengthModel

NICENESS = 19  # serving comes first; a box with nothing to spare still leaves us a hundredth of a core
_MAX_DUTY = 0.1  # training takes at most this share of one core, however fast requests finish
_GROWTH = 0.05  # of the requests that a model was fitted to; fewer new ones would teach it nothing
_QUEUED_ROWS = 10_000


class Trainer:
    """The child's state and its two decisions: is a training due, is a save due."""

    def __init__(self, path: Path, pace: training_wire.TrainingPace) -> None:
        self.buffer = ObservationBuffer(pace.buffer_size)
        self.model: LengthModel | None = None
        self._path = path
        self._pace = pace
        self._new_rows = 0
        self._unsaved = False
        self._not_before_s = float("-inf")
        self._last_save_s = float("-inf")

    def load(self) -> None:
        """Load the saved state. Raises `StateUnreadable`; then this starts afresh."""
        saved = state.load(self._path)
        if saved is not None:
            self.buffer.restore(saved.data)
            self.model = saved.model
            self._new_rows = len(self.buffer) - (saved.model.trained_on if saved.model else 0)

    def add(self, row: Observation) -> None:
        self.buffer.add(row)
        self._new_rows += 1
        self._unsaved = True

    def training_due(self, now_s: float) -> bool:
        return self._wants_training() and now_s >= self._not_before_s

    def _wants_training(self) -> bool:
        known = self.model.trained_on if self.model else 0
        wanted = max(self._pace.retrain_every, _GROWTH * known) if known else 1
        return len(self.buffer) >= self._pace.min_observations and self._new_rows >= wanted

    def train(self, now_s: float) -> tuple[LengthModel, float]:
        """Train; return the new model and the processor seconds it took."""
        # scikit-learn comes in with the first training: an idle pipeline need not carry it.
        from cohort.services.length_predictor.training import train

        self._new_rows = 0
        started_s = time.process_time()
        try:
            self.model = train(self.buffer.dataset(), (self.model.version if self.model else 0) + 1)
            self._unsaved = True
        finally:
            took_s = time.process_time() - started_s
            self._not_before_s = now_s + took_s / _MAX_DUTY
        return self.model, took_s

    def save_due(self, now_s: float) -> bool:
        return self._unsaved and now_s >= self._last_save_s + self._pace.save_every_s

    def save(self, now_s: float) -> None:
        """Save the state. Raises `OSError`; the next try is due only after another interval."""
        self._last_save_s = now_s
        if self._unsaved:
            state.save(self._path, state.State(self.buffer.dataset(), self.model))
            self._unsaved = False

    def next_due_s(self, now_s: float) -> float:
        """Return seconds until something may be due without further requests."""
        dues = [self._pace.save_every_s]
        if self._unsaved:
            dues.append(self._last_save_s + self._pace.save_every_s - now_s)
        if self._wants_training():
            dues.append(self._not_before_s - now_s)
        return max(0.05, min(dues))


def run(trainer: Trainer, incoming: BinaryIO, outgoing: BinaryIO) -> None:
    """Serve until `incoming` ends."""

    def send(message: training_wire.FromChild) -> None:
        outgoing.write(training_wire.frame(message))
        outgoing.flush()

    try:
        trainer.load()
    except state.StateUnreadable as error:
        send(training_wire.Trouble("predictor_state_unreadable", str(error)))
    model = trainer.model
    send(training_wire.Loaded(len(trainer.buffer), state.pack(model.to_arrays()) if model else b""))

    rows: queue.Queue[Observation | None] = queue.Queue(_QUEUED_ROWS)
    threading.Thread(target=_read_all, args=(incoming, rows), name="reader", daemon=True).start()
    reading = True
    while reading:
        with contextlib.suppress(queue.Empty):
            row = rows.get(timeout=trainer.next_due_s(time.monotonic()))
            while row is not None:
                trainer.add(row)
                row = rows.get_nowait()
            reading = False
        now_s = time.monotonic()
        if reading and trainer.training_due(now_s):
            try:
                model, took_s = trainer.train(now_s)
                send(training_wire.Learned(len(trainer.buffer), state.pack(model.to_arrays()), took_s))
            except (ValueError, ArithmeticError, MemoryError, ImportError) as error:
                send(training_wire.Trouble("predictor_training_failed", f"{type(error).__name__}: {error}"))
        if trainer.save_due(now_s) or not reading:
            try:
                trainer.save(now_s)
            except OSError as error:
                with contextlib.suppress(BrokenPipeError):
                    send(training_wire.Trouble("predictor_state_not_saved", str(error)))


def _read_all(incoming: BinaryIO, rows: queue.Queue[Observation | None]) -> None:
    try:
        while (finished := training_wire.read_finished(incoming)) is not None:
            rows.put(finished.observation())
    finally:
        rows.put(None)


def end_with_parent(fd: int) -> None:
    """Watch for the other end of stdin to be closed, as the kernel does for a killed process, in a thread: the reader
    stops reading while the queue is full. SIGALRM's own action ends the process: a handler would wait for the main
    thread, which is in the middle of a training."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)

    def watch() -> None:
        hang_up = select.poll()
        hang_up.register(fd, 0)  # a hang-up is always reported, also behind bytes that nobody has read
        hang_up.poll()
        signal.alarm(training_wire.SAVE_DEADLINE_S)

    threading.Thread(target=watch, name="parent watch", daemon=True).start()


def yield_to_serving() -> None:
    """Set the lowest priority, also where Linux groups processes by session (autogroup): a process's own niceness
    counts only inside its session, and a session's weight is set for the whole of it."""
    os.nice(NICENESS)
    with contextlib.suppress(OSError):  # a group leader already; or no such file: then niceness alone counts
        os.setsid()
        Path("/proc/self/autogroup").write_text(str(NICENESS), encoding="ascii")


def main() -> None:
    state_path, pace = sys.argv[1:]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C reaches us too; the parent decides
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    end_with_parent(sys.stdin.fileno())
    yield_to_serving()
    outgoing = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # nothing a library prints may corrupt the frames
    trainer = Trainer(Path(state_path), msgspec.json.decode(pace, type=training_wire.TrainingPace))
    with contextlib.suppress(BrokenPipeError):
        run(trainer, sys.stdin.buffer, outgoing)


if __name__ == "__main__":
    main()
