"""Agreement of a worker's ranks about their steps on a device: they record the same ones, and replay the same one.

    start   rank 0 ── Compile, Record ──▶ followers      each: agree on memory and classes, then for every class
                                                         warm up (exchanging) · capture · agree on what that took
            rank 0 ◀──── Recorded ─────── followers      other classes than rank 0's: the worker does not start
    step    rank 0 chooses the class and sends it with the step; followers replay it, and wait for the one
            before: while a step runs, the next one is launched behind it, with the tokens that rank 0 samples

An exchange belongs to a recorded step as its kernels do: it is recorded on all ranks or on none, in the same order, and
a replay waits for the others' replays. Hence nothing here follows from one rank's own memory: they decide by the
minimum, or the maximum, of all ranks. Owned by the model runner, used by `device_steps`.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Protocol

import structlog
import torch
from torch import Tensor

from cohort.common.engine.config.model_config import ModelGeometry
from cohort.common.engine.config.rank_shares import RankShare
from cohort.common.engine.device.streams import Mark
from cohort.common.engine.ranks.followers import EXIT_RANK_LOST, Followers
from cohort.common.engine.ranks.rank_messages import RankLost
from cohort.common.engine.ranks.ranks import EXCHANGE_TIMEOUT_S, RankComm
from cohort.common.engine.step.batch import StepBatch
from cohort.common.engine.step.decode_classes import StepClass
from cohort.common.engine.step.recorded_steps import Recorded, Recorder, StepResult
from cohort.common.errors import InvariantViolated
from cohort.common.policies.kv_interface import KvCopy

log = structlog.get_logger(__name__)

_NO_MEMORY, _NOT_AT_ALL = 1 << 61, 1 << 62  # instead of a cost, which is less


class TwoPhases(Protocol):
    """Recorder whose exchanging part is apart from that which only this rank does."""

    def warm_up(self, step: Callable[[], StepResult]) -> None:
        """Run the step, on all ranks at once."""

    def capture(self, step: Callable[[], StepResult]) -> Recorded:
        """Make it repeatable; waits for no other rank."""


class AgreedRecorder:
    """Recorder by agreement: all ranks record a step or none, and its cost is that of the rank with the highest."""

    def __init__(self, own: TwoPhases, most: Callable[[int], int]) -> None:
        """`most`: the maximum over all ranks' values, called by all of them at once."""
        self._own, self._most = own, most

    def record(self, step: Callable[[], StepResult]) -> Recorded:
        """Record a step; see `recorded_steps.Recorder`. Raises the same on all ranks. Raises `RankLost` if this rank
        cannot run the step at all: the others wait within it, so there is no way on."""
        try:
            self._own.warm_up(step)
        except RuntimeError as error:
            raise RankLost(f"a step that all ranks record does not run on this one: {error}") from error
        reason = "on another rank"
        recorded: Recorded | None = None
        try:
            recorded = self._own.capture(step)
            reported = recorded.cost_bytes
        except torch.OutOfMemoryError as error:
            reported, reason = _NO_MEMORY, str(error)
        except RuntimeError as error:
            reported, reason = _NOT_AT_ALL, str(error)
        cost = self._most(reported)
        if cost >= _NOT_AT_ALL:
            raise RuntimeError(reason)
        if cost >= _NO_MEMORY or recorded is None:
            raise torch.OutOfMemoryError(reason)
        return Recorded(recorded.replay, cost)


def _wait(mark: Mark, over: Callable[[], None]) -> None:
    mark.wait()
    over()


class GroupSteps:
    """Steps of a worker of several ranks, on one rank's side."""

    def __init__(self, ranks: RankComm, followers: Followers | None, limit_s: float = EXCHANGE_TIMEOUT_S) -> None:
        """`followers`: rank 0's. `limit_s`: maximum time of a step on the device."""
        self._ranks, self._followers, self._limit_s = ranks, followers, limit_s
        self._deadlines = StepDeadlines(limit_s, self._late)
        self._waiter: ThreadPoolExecutor | None = None
        self._under_way: deque[Future[None]] = deque()

    @property
    def widest(self) -> ModelGeometry:
        """Geometry of rank 0, which computes the most if columns do not divide evenly: all ranks estimate by it."""
        share = self._ranks.share
        return RankShare(share.geometry, 0, share.degree).working

    def begin(self) -> Callable[[], None]:
        """Start a step's deadline. Return what to call when it is over on the device."""
        return self._deadlines.begin()

    def broadcast(self, batch: StepBatch, taken: StepClass, before: Tensor | None = None) -> None:
        """Let the others launch the step. `before`: tokens of the last step that it awaits. Raises `RankLost`."""
        if self._followers is not None:
            with self._in_step():
                self._followers.step(batch, taken, 0 if before is None else len(before))
        if before is not None:
            self._ranks.broadcast_tokens(before)

    def taken_over(self, awaited: int, device: torch.device) -> Tensor | None:
        """Return, on another rank, the `awaited` tokens that `broadcast` hands out; None if there are none."""
        if not awaited:
            return None
        tokens = torch.empty(awaited, dtype=torch.int64, device=device)
        self._ranks.broadcast_tokens(tokens)
        return tokens

    def wait_for_room(self) -> None:
        """Wait, on a follower, until at most one step is under way."""
        while len(self._under_way) > 1:
            self._under_way.popleft().result()

    def under_way(self, mark: Mark, over: Callable[[], None]) -> None:
        """Record, on a follower, a launched step, which ends with `mark`."""
        if self._waiter is None:
            self._waiter = ThreadPoolExecutor(1, thread_name_prefix="steps")
        self._under_way.append(self._waiter.submit(_wait, mark, over))

    @contextmanager
    def copies(self, copies: Sequence[KvCopy]) -> Iterator[None]:
        """Return a context in which rank 0 makes these copies, and the others do. Raises `RankLost`."""
        assert self._followers is not None, "only rank 0 is told of copies"
        with self._in_step(), self._followers.copies(copies):
            yield

    def out_of_step(self, error: Exception) -> None:
        """End the group: this rank has not done what the others do, so there is no way on."""
        share = self._ranks.share
        self._ranks.on_failure(f"rank {share.rank} of {share.degree}: {error}")

    @contextmanager
    def _in_step(self) -> Iterator[None]:
        try:
            yield
        except RankLost as error:
            self.out_of_step(error)
            raise

    def budget(self, own_bytes: int, wanted: object) -> int:
        """Return the device memory for recorded steps, the same on every rank: the minimum. `wanted`: the classes in
        their order; raises `InvariantViolated` on all ranks if those differ."""
        digest = zlib.crc32(repr(wanted).encode())
        if self._ranks.all_min(digest) != self._most(digest):
            raise InvariantViolated("the ranks of this worker would record different steps")
        return self._ranks.all_min(own_bytes)

    def recorder(self, own: TwoPhases) -> Recorder:
        return AgreedRecorder(own, self._most)

    def _most(self, value: int) -> int:
        return -self._ranks.all_min(-value)

    def _late(self) -> None:
        reason = f"a step is not over after {self._limit_s:.0f} s: another rank does not compute it"
        self._ranks.on_failure(reason)
        if self._followers is None:  # the main thread waits for the device
            log.critical("this rank ends", reason=reason)
            os._exit(EXIT_RANK_LOST)


class StepDeadlines:
    """Deadline of a step of several ranks on the device, whatever its ranks wait for there. A recorded exchange is a
    kernel that waits for the other ranks' kernels: where one of them is gone, the wait for the device never ends, and
    torch, which watches exchanges that are launched one by one, sees none of a replay. One thread for all steps, from
    the first one on; `late` decides about a step that is late."""

    def __init__(self, limit_s: float, late: Callable[[], None]) -> None:
        """`late` is called once, on that thread, which then ends."""
        self._limit_s, self._late = limit_s, late
        self._due: dict[int, float] = {}  # in the order of their beginning, and so of their ends
        self._numbers = itertools.count()
        self._changed = threading.Condition()
        self._idle = False
        self._thread: threading.Thread | None = None

    def begin(self) -> Callable[[], None]:
        """Start a step's deadline. Return what to call when it is over; a second call is harmless."""
        step = next(self._numbers)
        with self._changed:
            self._due[step] = time.monotonic() + self._limit_s
            if self._thread is None:
                self._thread = threading.Thread(target=self._watch, name="step-deadlines", daemon=True)
                self._thread.start()
            elif self._idle:
                self._changed.notify()

        def over() -> None:
            with self._changed:
                self._due.pop(step, None)

        return over

    def _watch(self) -> None:
        with self._changed:
            while True:
                first = next(iter(self._due.values()), None)
                if first is None:  # woken by the next step; while some run, only every `limit_s`
                    self._idle = True
                    self._changed.wait()
                    self._idle = False
                elif (remaining_s := first - time.monotonic()) > 0:
                    self._changed.wait(remaining_s)
                else:
                    break
        self._late()
