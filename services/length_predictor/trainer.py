"""The serving side of training: starts the child, feeds it finished requests, hands over the models it learns.

Called by `service.py`. Never trains and never waits for the child: if it lags, observations are dropped and counted;
if it dies, it is started again and resumes from its state file, while serving goes on with the model at hand.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections import deque
from collections.abc import Callable
from pathlib import Path

import msgspec
from structlog.stdlib import BoundLogger

from cohort.services.length_predictor import state, training_wire
from cohort.services.length_predictor.buffer import Observation
from cohort.services.length_predictor.model import LengthModel
from cohort.services.length_predictor.training_wire import TrainingPace

_MAX_UNSENT_BYTES = 4 << 20
_MAX_WAITING_ROWS = 2048  # kept while no child runs
_RESTART_FIRST_S = 0.5
_RESTART_MAX_S = 30.0


USUAL = TrainingPace()
NEVER = TrainingPace(min_observations=1_000_000_000)
"""Observations are kept, and nothing is learned from them."""


class TrainingChild:
    """`run()` in a TaskGroup for as long as the service lives; `observe()` at any time."""

    def __init__(
        self, pace: TrainingPace, state_path: Path, log: BoundLogger, on_model: Callable[[LengthModel], None]
    ) -> None:
        self.remembered = 0
        """Observations the state file held when the child started first."""
        self.trainings = 0
        self.dropped = 0
        self.starts = 0
        self._pace = pace
        self._state_path = state_path
        self._log = log
        self._on_model = on_model
        self._process: asyncio.subprocess.Process | None = None
        self._waiting: deque[Observation] = deque()

    @property
    def pid(self) -> int | None:
        """The running child's process id."""
        return self._process.pid if self._process else None

    def observe(self, row: Observation) -> None:
        """Pass one finished request on; it waits while no child runs, and is dropped if the child is far behind."""
        stdin = self._process.stdin if self._process else None
        if stdin is None or stdin.is_closing():
            if len(self._waiting) == _MAX_WAITING_ROWS:
                self._waiting.popleft()
                self.dropped += 1
            self._waiting.append(row)
        elif stdin.transport.get_write_buffer_size() > _MAX_UNSENT_BYTES:
            self.dropped += 1
        else:
            stdin.write(training_wire.frame(training_wire.Finished.of(row)))

    async def run(self) -> None:
        """Keep a child running until cancelled; then let it save, within a deadline, and end it."""
        pause_s = _RESTART_FIRST_S
        while True:
            process = await self._start()
            self._process = process
            waiting, self._waiting = self._waiting, deque()
            for row in waiting:
                self.observe(row)
            try:
                if await self._listen(process):
                    pause_s = _RESTART_FIRST_S
            finally:
                self._process = None
                # Shielded: the cancellation that ends this task must not cut the child's last save short.
                code = await asyncio.shield(_end(process))
            self._log.warning("predictor_training_child_ended", exit_code=code, restart_in_s=pause_s)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _RESTART_MAX_S)

    async def _start(self) -> asyncio.subprocess.Process:
        self.starts += 1
        one_thread = {name: "1" for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")}
        return await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "cohort.services.length_predictor.trainer_process",
            str(self._state_path),
            msgspec.json.encode(self._pace).decode(),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, **one_thread},
        )

    async def _listen(self, process: asyncio.subprocess.Process) -> bool:
        """Take the child's messages until its pipe ends. True if it said anything at all."""
        assert process.stdout is not None
        spoke = False
        try:
            while True:
                prefix = await process.stdout.readexactly(training_wire.PREFIX_BYTES)
                body = await process.stdout.readexactly(training_wire.body_length(prefix))
                self._take(training_wire.FROM_CHILD.decode(body))
                spoke = True
        except asyncio.IncompleteReadError:
            return spoke
        except (ValueError, KeyError, msgspec.MsgspecError) as error:
            self._log.error("predictor_training_child_garbled", error=str(error))
            return False

    def _take(self, message: training_wire.FromChild) -> None:
        match message:
            case training_wire.Loaded(observations, model):
                if self.starts == 1:
                    self.remembered = observations
                self._log.info("predictor_state_loaded", observations=observations, model=bool(model))
                if model:
                    self._on_model(LengthModel.from_arrays(state.unpack(model)))
            case training_wire.Learned(observations, model, seconds):
                self.trainings += 1
                self._log.info("predictor_trained", observations=observations, seconds=round(seconds, 3))
                self._on_model(LengthModel.from_arrays(state.unpack(model)))
            case training_wire.Trouble(event, error):
                self._log.warning(event, error=error)


async def _end(process: asyncio.subprocess.Process) -> int:
    """Close the child's stdin, on which it saves and ends; kill it after a deadline. Its exit code."""
    if process.stdin is not None:
        process.stdin.close()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(training_wire.SAVE_DEADLINE_S):
            code = await process.wait()
            if process.stdin is not None:
                with contextlib.suppress(ConnectionError):
                    await process.stdin.wait_closed()
            return code
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    return await process.wait()
