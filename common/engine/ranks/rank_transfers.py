"""One rank's end of KV transfers: its links and its cache, following rank 0's orders.

    rank 0 ──order──▶ follower: buffers of its heads ══ its own links ══▶ the same rank of another worker
           ◀─answer──

Rank 0 calls `work` and `move` for its own part. A follower runs `serve` on a thread with an event loop of its own, so
that transfers go on while steps compute. Every order about bytes is answered exactly once, when nothing reads or writes
its buffer any more; if a link cannot promise that yet, the answer says so and `Settled` follows.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, assert_never

import structlog
import torch

from cohort.common.engine.cache.kv_tensors import KvTensors
from cohort.common.engine.ranks.kv_parts import Heads
from cohort.common.engine.ranks.rank_memory import RankMemory, filled
from cohort.common.engine.ranks.rank_messages import LENGTH, RankLost
from cohort.common.engine.ranks.rank_orders import (
    Answer,
    Cancel,
    Drop,
    Ended,
    Forget,
    Gather,
    Move,
    Moved,
    Opened,
    OpenLinks,
    Order,
    Outcome,
    Place,
    ReceivePart,
    SendPart,
    Settled,
    Sum,
    Summed,
    Work,
    framed,
    order_of,
)
from cohort.common.errors import BufferStranded, ConfigError, TransferError, TransferTimeout
from cohort.common.transport.kv_link import KvLink
from cohort.common.transport.open_links import open_links
from cohort.common.transport.security import load_keys
from cohort.common.transport.ucx_devices import UcxChoice

log = structlog.get_logger(__name__)

_THREADS = 2


def opened(order: OpenLinks) -> list[KvLink]:
    """Return the links that can be had here, best first. Raises `ConfigError`, `TransferError`."""
    return open_links(
        order.names,
        zmq_bind=order.zmq_bind,
        zmq_advertise=order.zmq_advertise,
        curve=load_keys(order.keys_file),
        plain_allowed=order.plain_allowed,
        one_machine=order.one_machine,
        ucx=UcxChoice(order.ucx_tls, order.ucx_net_devices),
    )


class RankTransfers:
    def __init__(self, memory: RankMemory, links: dict[str, KvLink]) -> None:
        self.memory, self.links = memory, links
        self.link_bytes = 0

    def work(self, order: Work) -> tuple[tuple[int, ...], ...]:
        """Follow an order about memory. Blocks; on any thread."""
        return filled(order, self.memory)

    async def move(self, order: Move) -> None:
        """Move one part over one link. Raises and promises what `KvLink` does."""
        link = self.links.get(order.link)
        if link is None:
            raise TransferError(f"no {order.link} link at this rank")
        buffer: Any = self.memory.buffer(order.keyed, order.heads)
        match order:
            case SendPart(address=address, tag=tag, timeout_s=timeout_s):
                await link.send(address, tag, buffer, timeout_s=timeout_s)
            case ReceivePart(tag=tag, timeout_s=timeout_s):
                await link.receive(tag, buffer, timeout_s=timeout_s)
            case _:
                assert_never(order)
        self.link_bytes += buffer.nbytes


async def serve(kv: KvTensors, heads: Heads, peer: socket.socket) -> None:
    """Serve a follower's transfers until rank 0 has gone, which raises `RankLost`. `heads` are in `kv`."""
    if kv.device.type == "cuda":  # UCX finds out what it can do on this thread
        torch.cuda.set_device(kv.device)
    reader, writer = await asyncio.open_connection(sock=peer)
    await _Server(kv, heads, writer).run(reader)


class _Server:
    def __init__(self, kv: KvTensors, heads: Heads, writer: asyncio.StreamWriter) -> None:
        self._kv, self._heads = kv, heads
        self._ends = RankTransfers(RankMemory(kv, heads, staged=False), {})  # staging memory comes with the links
        self._writer = writer
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="kv-blocks")
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._published_addresses: dict[str, bytes] = {}

    async def run(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                (size,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
                self._follow(order_of(await reader.readexactly(size)))
        except (asyncio.IncompleteReadError, OSError) as error:
            raise RankLost("rank 0 has ended") from error
        finally:
            for task in list(self._tasks.values()):
                task.cancel()
            if self._tasks:
                await asyncio.wait(list(self._tasks.values()), timeout=5.0)
            for link in self._ends.links.values():
                await link.close()
            self._threads.shutdown(wait=False)
            self._writer.close()

    def _follow(self, order: Order) -> None:
        match order:
            case OpenLinks():
                self._open(order)
            case Gather() | Sum() | Place():
                self._spawn(order.order, self._work(order))
            case SendPart() | ReceivePart():
                self._spawn(order.order, self._move(order))
            case Cancel(order=number):
                if (task := self._tasks.get(number)) is not None:
                    task.cancel()
            case Drop(key=key):
                self._ends.memory.drop(key)
            case Forget(link=name, address=address):
                if (link := self._ends.links.get(name)) is not None:
                    link.forget(address)
            case _:
                assert_never(order)

    def _spawn(self, number: int, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks[number] = task
        task.add_done_callback(partial(self._over, number))

    def _over(self, number: int, task: asyncio.Task[None]) -> None:
        """Answer for a task that raised, or was cancelled before its first turn."""
        self._tasks.pop(number, None)
        if task.cancelled():
            self._reply(Ended(number, Outcome.CANCELLED))
        elif (error := task.exception()) is not None:
            self._reply(_ended(number, error, self._settled(number)))
        if (now := self._addresses()) != self._published_addresses:  # a link that was rebuilt is reached elsewhere
            self._published_addresses = now
            self._reply(Moved(now))

    def _settled(self, number: int) -> Callable[[Any], None]:
        return lambda _: self._reply(Settled(number))

    async def _work(self, order: Work) -> None:
        loop = asyncio.get_running_loop()
        sums = await loop.run_in_executor(self._threads, self._ends.work, order)
        self._reply(Summed(order.order, sums))

    async def _move(self, order: Move) -> None:
        await self._ends.move(order)
        self._reply(Ended(order.order, Outcome.DONE))

    def _open(self, order: OpenLinks) -> None:
        try:
            links = opened(order)
        except (ConfigError, TransferError) as error:
            log.warning("this rank opens no KV link", reason=str(error))
            links = []
        self._ends = RankTransfers(RankMemory(self._kv, self._heads), {link.name: link for link in links})
        self._published_addresses = self._addresses()
        self._reply(Opened(order.order, self._published_addresses))

    def _addresses(self) -> dict[str, bytes]:
        return {name: link.address() for name, link in self._ends.links.items()}

    def _reply(self, answer: Answer) -> None:
        with contextlib.suppress(OSError):  # rank 0's end is noticed where orders are read
            self._writer.write(framed(answer))


def _ended(number: int, error: BaseException, settled: Callable[[Any], None]) -> Ended:
    match error:
        case BufferStranded():
            error.settled.add_done_callback(settled)
            return Ended(number, Outcome.STRANDED, str(error))
        case TransferTimeout():
            return Ended(number, Outcome.LATE, str(error))
        case TransferError():
            return Ended(number, Outcome.FAILED, str(error))
        case _:
            log.error("an order of rank 0 failed", exc_info=error)
            return Ended(number, Outcome.FAILED, f"{type(error).__name__}: {error}")
