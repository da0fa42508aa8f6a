"""Rank 0's hold on the other ranks of a tensor-parallel worker: it starts them, tells them every step, ends with them.

    start ──▶ processes load their shares ──Loaded──▶ Connect ──▶ Step, Copies, Step … ──▶ Stop
                                 └─ Failed: the same error here        │
                                          a process ends ──────────────┴──▶ the whole worker ends

A follower dies with rank 0: the kernel kills it (parent-death signal), and its socket ends. Rank 0 ends as soon as a
follower has: the kernel tells of its end (a pidfd), and an exchange with it fails. The worker's supervisor starts the
group again as it starts any worker, and requests go on elsewhere as after the death of any worker.

Made by `worker_process` on the thread that lives as long as the process; `ModelRunner` calls the rest on the engine's.
Decides nothing about requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import structlog

from cohort.common.engine.batch import StepBatch
from cohort.common.engine.rank_messages import (
    Connect,
    Copied,
    Copies,
    Failed,
    Loaded,
    RankLost,
    Setup,
    Stop,
    encoded,
    receive_answer,
    send,
    step_of,
)
from cohort.common.engine.rank_orders import OpenLinks
from cohort.common.engine.ranks import EXCHANGE_TIMEOUT_S
from cohort.common.engine.remote_rank import RemoteRank
from cohort.common.errors import ConfigError, ModelError
from cohort.common.policies.kv_interface import KvCopy

log = structlog.get_logger(__name__)

STOP_S = 2.0
"""The longest that a follower may take to end when it is told to; then it is killed."""
EXIT_RANK_LOST = 1
_THREAD_NAMES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")


class _Follower:
    """One process and its two sockets; `end` is what rank 0 has of its KV transfers."""

    def __init__(self, rank: int, threads: int) -> None:
        self.rank = rank
        self.control, theirs = socket.socketpair()
        orders, their_orders = socket.socketpair()
        with theirs, their_orders:
            descriptors = (theirs.fileno(), their_orders.fileno())
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-P", "-m", "cohort.common.engine.follower_process"),
                    *(str(os.getpid()), *map(str, descriptors)),
                ],
                stdin=subprocess.DEVNULL,
                pass_fds=descriptors,
                env={**os.environ, **{name: str(threads) for name in _THREAD_NAMES}} if threads else None,
            )
        self._orders = orders
        self.end = RemoteRank(rank, orders)

    def close(self) -> None:
        self.control.close()
        self.end.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._orders.close()


class Followers:
    """Ranks 1 to degree - 1. A context manager for tests and tools; `watch` is the worker's."""

    def __init__(self, degree: int, *, threads: int = 0, folder: Path | None = None) -> None:
        """Starts the processes: on the main thread, with whose end they would be killed. `threads` of each rank.

        `folder`: private, for what the ranks find each other by; made anew, with what a killed predecessor left there.
        """
        self.degree = degree
        if folder is None:
            folder = Path(tempfile.mkdtemp(prefix="cohort-ranks-"))  # its owner's alone
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(mode=0o700)
        self._folder = folder
        self._followers = [_Follower(rank, threads) for rank in range(1, degree)]
        self._closing = False
        self._pidfds: list[int] = []

    def __enter__(self) -> Followers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def store(self) -> str:
        """Where the ranks find each other."""
        return str(self._folder / f"store-{os.getpid()}")

    @property
    def pids(self) -> list[int]:
        return [follower.process.pid for follower in self._followers]

    # -- the worker's life -----------------------------------------------------------------------------------------

    def set_up(self, setup: Callable[[int], Setup]) -> None:
        """Have every rank load its share; returns at once."""
        for follower in self._followers:
            send(follower.control, encoded(setup(follower.rank)))

    def meet(self) -> None:
        """Until every rank has loaded. However long that takes; a rank that ends meanwhile ends the wait.

        Raises `ConfigError` or `ModelError` as the rank did, or `RankLost`.
        """
        for follower in self._followers:
            match receive_answer(follower.control):
                case Loaded():
                    pass
                case Failed(reason=reason, configuration=configuration):
                    kind = ConfigError if configuration else ModelError
                    raise kind(f"rank {follower.rank}: {reason}")
                case Copied():
                    raise RankLost(f"rank {follower.rank} answers what was not asked")
        for follower in self._followers:
            send(follower.control, encoded(Connect()))
            follower.control.settimeout(EXCHANGE_TIMEOUT_S)

    def watch(self, loop: asyncio.AbstractEventLoop) -> None:
        """From now on the end of a follower is the end of this process."""
        for follower in self._followers:
            descriptor = os.pidfd_open(follower.process.pid)
            self._pidfds.append(descriptor)
            loop.add_reader(descriptor, self.end, f"rank {follower.rank} has ended")

    def end(self, reason: str) -> None:
        """End the group, this process with it, at once: a step that some ranks have begun can never be finished. On any
        thread."""
        if self._closing:
            return
        log.critical("a rank is lost: the worker ends", reason=reason, degree=self.degree)
        for follower in self._followers:
            follower.process.kill()
        shutil.rmtree(self._folder, ignore_errors=True)
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.flush()
        os._exit(EXIT_RANK_LOST)

    def close(self) -> None:
        """In order: when no step runs any more."""
        self._closing = True
        for descriptor in self._pidfds:
            with contextlib.suppress(RuntimeError):
                asyncio.get_running_loop().remove_reader(descriptor)
            os.close(descriptor)
        self._pidfds.clear()
        for follower in self._followers:
            with contextlib.suppress(RankLost):
                send(follower.control, encoded(Stop()))
        for follower in self._followers:
            with contextlib.suppress(subprocess.TimeoutExpired):
                follower.process.wait(STOP_S)
            follower.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    # -- steps -----------------------------------------------------------------------------------------------------

    def step(self, batch: StepBatch) -> None:
        """Have every rank run the forward of a batch. Raises `RankLost`."""
        frame = encoded(step_of(batch))
        for follower in self._followers:
            send(follower.control, frame)

    @contextlib.contextmanager
    def copies(self, copies: Sequence[KvCopy]) -> Iterator[None]:
        """Have every rank make a plan's copies, before the rows that are told within, while rank 0 makes its own. On
        exit all are made. Raises `RankLost`."""
        if copies:
            frame = encoded(Copies(list(copies)))
            for follower in self._followers:
                send(follower.control, frame)
        yield
        if copies:
            for follower in self._followers:
                if not isinstance(receive_answer(follower.control), Copied):
                    raise RankLost(f"rank {follower.rank} answers what was not asked")

    # -- KV transfers ----------------------------------------------------------------------------------------------

    @property
    def ends(self) -> list[RemoteRank]:
        """Of ranks 1 to degree - 1, in order."""
        return [follower.end for follower in self._followers]

    async def open_links(self, order: OpenLinks, *, on_network: bool) -> set[str]:
        """Have every rank open the KV links that rank 0 has opened. Returns those that all of them have. Unless it is
        the network that they listen on, they do in the group's own folder. Raises `TransferError`."""
        for end in self.ends:
            bind = order.zmq_bind if on_network else f"ipc://{self._folder}/kv-{end.rank}.sock"
            own = msgspec.structs.replace(order, order=end.number(), zmq_bind=bind)
            await end.open(own if on_network else msgspec.structs.replace(own, zmq_advertise=bind))
        return set(order.names).intersection(*(end.addresses for end in self.ends))
