"""Another rank's end of KV transfers as rank 0 sees it: orders go out, answers come back, each order has one.

Two threads for each follower move the frames, so that neither the event loop nor the agent's threads wait for a socket.
Once the rank is lost every order fails: the process's end releases all its memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import queue
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar, assert_never

from cohort.common.engine.ranks.rank_messages import RankLost, receive_frame
from cohort.common.engine.ranks.rank_orders import (
    Answer,
    Cancel,
    Ended,
    Move,
    Moved,
    Opened,
    OpenLinks,
    Order,
    Outcome,
    Settled,
    Summed,
    Work,
    answer_of,
    framed,
)
from cohort.common.errors import BufferStranded, TransferError, TransferTimeout

_T = TypeVar("_T")

ANSWER_S = 30.0
"""Time to wait for a rank beyond what its order may take."""


class RemoteRank:
    def __init__(self, rank: int, peer: socket.socket) -> None:
        self.rank = rank
        self.addresses: dict[str, bytes] = {}
        """Addresses of its links, by name; filled by `open`."""
        self._peer = peer
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._waiting: dict[int, Future[Answer]] = {}
        self._stranded: dict[int, Future[None]] = {}
        self._lost: RankLost | None = None
        self._frames: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        for name, work in (("tell", self._write), ("hear", self._read)):
            threading.Thread(target=work, name=f"rank-{rank}-{name}", daemon=True).start()

    def number(self) -> int:
        return next(self._numbers)

    def post(self, order: Order) -> None:
        """Send an order that is not answered. Never blocks."""
        self._frames.put(framed(order))

    def begin(self, order: OpenLinks | Work | Move) -> Future[Answer]:
        """Send an order. Never blocks. The future raises `RankLost` once the rank is gone."""
        future: Future[Answer] = Future()
        with self._lock:
            lost = self._lost
            if lost is None:
                self._waiting[order.order] = future
        if lost is None:
            self.post(order)
        else:
            future.set_exception(lost)
        return future

    def sums(self, answer: Future[Answer]) -> tuple[tuple[int, ...], ...]:
        """Return the result of an order about memory. Blocks. Raises `TransferError`."""
        try:
            match answer.result(ANSWER_S):
                case Summed(sums=sums):
                    return sums
                case Ended(reason=reason):
                    raise TransferError(f"rank {self.rank}: {reason}")
                case other:
                    raise TransferError(f"rank {self.rank} answers {type(other).__name__}")
        except (RankLost, TimeoutError) as error:
            raise TransferError(f"rank {self.rank} does not answer: {error}") from error

    async def open(self, order: OpenLinks) -> None:
        """Open links. Raises `TransferError`."""
        try:
            async with asyncio.timeout(ANSWER_S):
                answer = await asyncio.wrap_future(self.begin(order))
        except (RankLost, TimeoutError) as error:
            raise TransferError(f"rank {self.rank} opens no links: {error}") from error
        if isinstance(answer, Opened):
            self.addresses = answer.addresses

    async def move(self, order: Move) -> None:
        """Move one part over that rank's link. Raises and promises what `KvLink` does, also when cancelled."""
        future = asyncio.wrap_future(self.begin(order))
        cancelled = False
        deadline_s = asyncio.get_running_loop().time() + order.timeout_s + ANSWER_S
        while not future.done():
            try:
                remaining_s = deadline_s - asyncio.get_running_loop().time()
                await asyncio.wait((future,), timeout=max(0.0, remaining_s))
                if not future.done():
                    raise BufferStranded(f"rank {self.rank} does not say what became of a part", _when_over(future))
            except asyncio.CancelledError:
                cancelled = True
                self.post(Cancel(order.order))
        try:
            answer = future.result()
        except RankLost as error:
            raise TransferError(str(error)) from error
        if cancelled and not (isinstance(answer, Ended) and answer.outcome is Outcome.STRANDED):
            raise asyncio.CancelledError
        self._check(order, answer)

    def close(self) -> None:
        self._frames.put(None)
        with contextlib.suppress(OSError):
            self._peer.shutdown(socket.SHUT_RDWR)

    def _check(self, order: Move, answer: Answer) -> None:
        if not isinstance(answer, Ended):
            raise TransferError(f"rank {self.rank} answers {type(answer).__name__}")
        match answer.outcome:
            case Outcome.DONE:
                return
            case Outcome.LATE:
                raise TransferTimeout(f"rank {self.rank}: {answer.reason}")
            case Outcome.FAILED | Outcome.CANCELLED:
                raise TransferError(f"rank {self.rank}: {answer.reason or answer.outcome}")
            case Outcome.STRANDED:
                raise BufferStranded(f"rank {self.rank}: {answer.reason}", self._settles(order.order))
            case _:
                assert_never(answer.outcome)

    def _settles(self, number: int) -> asyncio.Future[None]:
        """Return a future that is done when `Settled` has come, which may have been before this call."""
        with self._lock:
            held = self._stranded.pop(number, None)
            if held is not None and not held.done():
                self._stranded[number] = held
        if held is None:  # the rank is gone, and its memory with it
            held = Future()
            held.set_result(None)
        return asyncio.wrap_future(held)

    def _write(self) -> None:
        while (frame := self._frames.get()) is not None:
            try:
                self._peer.sendall(frame)
            except OSError as error:
                self._end(RankLost(f"rank {self.rank} takes no orders: {error}"))
                return

    def _read(self) -> None:
        try:
            while True:
                self._on_answer(answer_of(receive_frame(self._peer)))
        except RankLost as error:
            self._end(error)

    def _on_answer(self, answer: Answer) -> None:
        match answer:
            case Moved(addresses=addresses):
                self.addresses = addresses
            case Settled(order=number):
                self._settle(number)
            case Opened(order=number) | Summed(order=number) | Ended(order=number):
                if isinstance(answer, Ended) and answer.outcome is Outcome.STRANDED:
                    with self._lock:
                        self._stranded.setdefault(number, Future())
                with self._lock:
                    future = self._waiting.pop(number, None)
                _resolve(future, lambda waiting: waiting.set_result(answer))
            case _:
                assert_never(answer)

    def _settle(self, number: int) -> None:
        with self._lock:
            held = self._stranded.get(number)
        _resolve(held, lambda stranded: stranded.set_result(None))

    def _end(self, error: RankLost) -> None:
        with self._lock:
            self._lost = self._lost or error
            waiting, self._waiting = list(self._waiting.values()), {}
            stranded, self._stranded = list(self._stranded.values()), {}
        for future in waiting:
            _resolve(future, lambda each: each.set_exception(error))
        for held in stranded:
            _resolve(held, lambda each: each.set_result(None))


def _when_over(future: asyncio.Future[Answer]) -> asyncio.Future[None]:
    settled: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    future.add_done_callback(lambda _: settled.set_result(None))
    return settled


def _resolve(future: Future[_T] | None, how: Callable[[Future[_T]], None]) -> None:
    if future is not None and not future.done():
        with contextlib.suppress(Exception):
            how(future)
