"""Rank 0's hold on the other ranks of a tensor-parallel worker: it starts them, sends them every step, ends with them.

    start ──▶ processes load their shares ──Loaded──▶ Connect ──▶ Compile, Record ──▶ Step, Copies, Step … ──▶ Stop
                                 └─ Failed: the same error here        │
                                          a process ends ──────────────┴──▶ the whole worker ends

A follower dies with rank 0: the kernel kills it (parent-death signal), and its socket ends. Rank 0 ends as soon as a
follower has: the kernel reports its end (a pidfd), and an exchange with it fails. Ranks of other hosts are no children
of this process: the end of their connection reports theirs (`rank_hosts`). The worker's supervisor starts the group
again as it starts any worker, and requests go on elsewhere.

Made by `worker_process` on the thread that lives as long as the process; `ModelRunner` calls the rest on the engine's.
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
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import structlog

from cohort.common.engine.ranks.rank_hosts import HashStore, RemoteRanks, answer
from cohort.common.engine.ranks.rank_messages import (
    Answer,
    Command,
    Compile,
    Compiled,
    Connect,
    Copied,
    Copies,
    Failed,
    Loaded,
    RankLost,
    Record,
    Recorded,
    Setup,
    Stop,
    encoded,
    receive_answer,
    send,
    step_of,
)
from cohort.common.engine.ranks.rank_orders import OpenLinks
from cohort.common.engine.ranks.ranks import EXCHANGE_TIMEOUT_S, Store
from cohort.common.engine.ranks.remote_rank import RemoteRank
from cohort.common.engine.step.batch import StepBatch
from cohort.common.engine.step.decode_classes import RecordedClasses, StepClass
from cohort.common.errors import ConfigError, InvariantViolated, ModelError
from cohort.common.policies.kv_interface import KvCopy

log = structlog.get_logger(__name__)

STOP_S = 2.0
"""Time that a follower may take to end when it is told to; then it is killed."""
COMPILE_S = 1800.0
"""Time that ranks wait for the slowest of them to compile its kernels."""
EXIT_RANK_LOST = 1
_THREAD_NAMES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")


class _Follower:
    """Rank and its streams; `end`: rank 0's side of its KV transfers. `process`: None on another host."""

    def __init__(self, rank: int, streams: Sequence[socket.socket], process: subprocess.Popen[bytes] | None) -> None:
        self.rank, self.process = rank, process
        self.control, self._orders, self.store = streams
        self.end = RemoteRank(rank, self._orders)

    def kill(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()

    def close(self) -> None:
        self.control.close()
        self.end.close()
        self.kill()
        if self.process is not None:
            self.process.wait()
        self._orders.close()
        with contextlib.suppress(OSError):
            self.store.shutdown(socket.SHUT_RDWR)  # a thread may read from it
        self.store.close()


def _started(rank: int, threads: int) -> _Follower:
    pairs = [socket.socketpair() for _ in range(3)]
    descriptors = [theirs.fileno() for _, theirs in pairs]
    process = start_rank([str(os.getpid()), *map(str, descriptors)], threads, descriptors)
    for _, theirs in pairs:
        theirs.close()
    return _Follower(rank, [ours for ours, _ in pairs], process)


def start_rank(arguments: Sequence[str], threads: int, descriptors: Sequence[int] = ()) -> subprocess.Popen[bytes]:
    """Start a process of `follower_process` with `threads` threads; 0: as torch likes."""
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "cohort.common.engine.worker.follower_process", *arguments],
        stdin=subprocess.DEVNULL,
        pass_fds=descriptors,
        env={**os.environ, **{name: str(threads) for name in _THREAD_NAMES}} if threads else None,
    )


def _unexpected_answer(rank: int) -> RankLost:
    return RankLost(f"rank {rank} answers what was not asked")


class Followers:
    """Ranks 1 to degree - 1. A context manager for tests and tools; `watch` is the worker's."""

    def __init__(
        self, degree: int, *, threads: int = 0, folder: Path | None = None, remote: RemoteRanks | None = None
    ) -> None:
        """Start the processes, on the main thread: they are killed when the thread that started them ends. `threads` of
        each rank. `remote`: the last ranks, which come from other hosts; closed by this object. `folder`: private,
        for the file by which the ranks meet; made anew, with what a killed predecessor left there."""
        self.degree = degree
        if folder is None:
            folder = Path(tempfile.mkdtemp(prefix="cohort-ranks-"))  # its owner's alone
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(mode=0o700)
        self._folder = folder
        self.remote = remote
        away = {} if remote is None else remote.streams
        self._followers = [
            _Follower(rank, away[rank], None) if rank in away else _started(rank, threads) for rank in range(1, degree)
        ]
        self._store = None if remote is None else self._serve_store()
        self._closing = False
        self._pidfds: list[int] = []

    def __enter__(self) -> Followers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def store(self) -> str:
        """File by which the ranks meet; "" = they call rank 0."""
        return str(self._folder / f"store-{os.getpid()}") if self._store is None else ""

    @property
    def place(self) -> str | Store:
        """Store by which rank 0 meets the others."""
        return self.store if self._store is None else self._store

    @property
    def pids(self) -> list[int]:
        return [follower.process.pid for follower in self._followers if follower.process is not None]

    def _serve_store(self) -> Store:
        store: Store = HashStore()
        for follower in self._followers:
            name = f"rank-{follower.rank}-store"
            threading.Thread(target=answer, args=(follower.store, store), name=name, daemon=True).start()
        return store

    def set_up(self, setup: Callable[[int], Setup]) -> None:
        for follower in self._followers:
            send(follower.control, encoded(setup(follower.rank)))

    def meet(self) -> None:
        """Wait until every rank has loaded, however long that takes; a rank that ends meanwhile ends the wait. Raises
        `ConfigError` or `ModelError` as the rank did, or `RankLost`."""
        for follower in self._followers:
            match self._answer_of(follower):
                case Loaded():
                    pass
                case Failed(reason=reason, configuration=configuration):
                    kind = ConfigError if configuration else ModelError
                    raise kind(f"rank {follower.rank}: {reason}")
                case _:
                    raise _unexpected_answer(follower.rank)
        for follower in self._followers:
            send(follower.control, encoded(Connect()))
            follower.control.settimeout(EXCHANGE_TIMEOUT_S)

    def _answer_of(self, follower: _Follower) -> Answer:
        try:
            return receive_answer(follower.control)
        except RankLost as error:
            why = "" if self.remote is None else self.remote.why_lost(follower.rank)
            if not why:
                raise
            log.critical("a rank of another host is not there", rank=follower.rank, reason=why)
            raise RankLost(f"rank {follower.rank}: {why}") from error

    def watch(self, loop: asyncio.AbstractEventLoop) -> None:
        """Watch the followers: from now on the end of one is the end of this process."""
        if self.remote is not None:
            self.remote.watch(lambda rank, reason: self.end(f"rank {rank}: {reason}"))
        for follower in self._followers:
            if follower.process is None:
                continue
            descriptor = os.pidfd_open(follower.process.pid)
            self._pidfds.append(descriptor)
            loop.add_reader(descriptor, self.end, f"rank {follower.rank} has ended")

    def end(self, reason: str) -> None:
        """End the group and this process at once: a step that some ranks have begun can never be finished."""
        if self._closing:
            return
        log.critical("a rank is lost: the worker ends", reason=reason, degree=self.degree)
        for follower in self._followers:
            follower.kill()
        shutil.rmtree(self._folder, ignore_errors=True)
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.flush()
        os._exit(EXIT_RANK_LOST)

    def close(self) -> None:
        """Close in order, when no step runs any more."""
        self._closing = True
        for descriptor in self._pidfds:
            with contextlib.suppress(RuntimeError):
                asyncio.get_running_loop().remove_reader(descriptor)
            os.close(descriptor)
        self._pidfds.clear()
        for follower in self._followers:
            with contextlib.suppress(RankLost):
                send(follower.control, encoded(Stop()))
        if self.remote is not None:
            self.remote.wait_disconnected(STOP_S)
        for follower in self._followers:
            with contextlib.suppress(subprocess.TimeoutExpired):
                if follower.process is not None:
                    follower.process.wait(STOP_S)
            follower.close()
        if self.remote is not None:
            self.remote.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def ready_steps(
        self, compile_own: Callable[[], None], record_own: Callable[[], RecordedClasses], classes: Sequence[int] | None
    ) -> None:
        """Let every rank compile what steps launch, then record the steps together. Raises `RankLost`, and
        `InvariantViolated` if a rank has recorded others than rank 0."""
        self._broadcast(Compile())
        compile_own()
        for follower in self._followers:
            follower.control.settimeout(COMPILE_S)
            if not isinstance(self._answer_of(follower), Compiled):
                raise _unexpected_answer(follower.rank)
            follower.control.settimeout(EXCHANGE_TIMEOUT_S)
        self._broadcast(Record(None if classes is None else tuple(classes)))
        own = record_own()
        for follower in self._followers:
            answer = self._answer_of(follower)
            if not isinstance(answer, Recorded):
                raise _unexpected_answer(follower.rank)
            if answer.classes != own:
                raise InvariantViolated(f"rank {follower.rank} has recorded {answer.classes}, and rank 0 {own}")

    def step(self, batch: StepBatch, taken: StepClass = None, awaited: int = 0) -> None:
        """Let every rank run the forward of a batch; the rest as in `Step`. Raises `RankLost`."""
        self._broadcast(step_of(batch, taken, awaited))

    def _broadcast(self, command: Command) -> None:
        frame = encoded(command)
        for follower in self._followers:
            send(follower.control, frame)

    @contextlib.contextmanager
    def copies(self, copies: Sequence[KvCopy]) -> Iterator[None]:
        """Let every rank make a plan's copies while rank 0 makes its own; on exit all are made. Raises `RankLost`."""
        if copies:
            self._broadcast(Copies(list(copies)))
        yield
        if copies:
            for follower in self._followers:
                if not isinstance(receive_answer(follower.control), Copied):
                    raise _unexpected_answer(follower.rank)

    @property
    def remote_ranks(self) -> list[RemoteRank]:
        return [follower.end for follower in self._followers]

    async def open_links(self, order: OpenLinks, *, on_network: bool) -> set[str]:
        """Let every rank open the KV links that rank 0 has opened. Return those that all of them have. Unless they
        listen on the network, they do in the group's own folder. Raises `TransferError`."""
        for end in self.remote_ranks:
            if self.remote is not None and end.rank in self.remote.streams:
                await end.open(self.remote.own_order(end.rank, order, end.number()))
                continue
            bind = order.zmq_bind if on_network else f"ipc://{self._folder}/kv-{end.rank}.sock"
            own = msgspec.structs.replace(order, order=end.number(), zmq_bind=bind)
            await end.open(own if on_network else msgspec.structs.replace(own, zmq_advertise=bind))
        return set(order.names).intersection(*(end.addresses for end in self.remote_ranks))
