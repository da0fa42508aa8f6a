"""Caches and links of all ranks of a worker as the transfer agent sees them: one memory, one link a name.

    rank 0's cache ── its heads ══ rank 0's link ══▶ …
    rank 1's cache ── its heads ══ rank 1's link ══▶ …        what goes to whom: `kv_parts`
    rank n's cache ── its heads ══ rank n's link ══▶ …

Between two workers of one rank each it is the cache itself. A message in parts is gathered, summed and placed by every
rank for its own part, by rank 0's order; its sum is one over its parts' sums. No KV passes through rank 0 but its own.
What blocks here is called in the agent's threads.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from contextlib import suppress

from cohort.common.engine.ranks.kv_parts import Heads, KvPart, addresses_of, joint_address, part_tag, parts_between
from cohort.common.engine.ranks.rank_orders import (
    Drop,
    Forget,
    Gather,
    Keyed,
    Move,
    Place,
    ReceivePart,
    SendPart,
    Sum,
    Work,
)
from cohort.common.engine.ranks.rank_transfers import RankTransfers
from cohort.common.engine.ranks.remote_rank import RemoteRank
from cohort.common.engine.transfer import run_checksum
from cohort.common.engine.transfer.transfer_memory import Message
from cohort.common.errors import BufferStranded, TransferError
from cohort.common.transport.kv_link import KvLink
from cohort.common.types import KvGeometry


class GroupMemory:
    """See `RunMemory`."""

    def __init__(self, own: RankTransfers, others: Sequence[RemoteRank], whole: KvGeometry) -> None:
        """`own`: rank 0's end, `others`: the ends of ranks 1 to n. `whole`: of a block over all ranks."""
        self.own, self.others = own, tuple(others)
        self.ranks = 1 + len(self.others)
        self.on_device = bool(others) or own.memory.cache.on_device  # an answer is never waited for on the event loop
        self.block_bytes = whole.block_bytes
        self._kv_heads = whole.num_kv_heads
        self._keys: dict[int, int] = {}
        self._numbers = itertools.count(1)

    def ranks_at(self, address: bytes) -> int:
        try:
            return len(addresses_of(address))
        except TransferError:
            return 1

    def in_parts(self, message: Message) -> bool:
        return self.ranks > 1 or message.ranks > 1

    def buffer(self, message: Message) -> object:
        """Return the message's buffer; of a message in parts itself, which `GroupLink` takes."""
        return message if self.in_parts(message) else self.own.memory.cache.buffer(message)

    def outgoing(self, messages: Sequence[Message], *, summed: bool) -> list[int]:
        """Gather messages to one worker, and return their sums. Raises `TransferError`."""
        if not any(self.in_parts(message) for message in messages):
            return self.own.memory.cache.outgoing(messages, summed=summed)
        keyed = tuple(self.keyed(message) for message in messages)
        parts = self.parts_out(messages[0])
        wanted = {rank: _heads(parts, sender=rank) for rank in range(self.ranks)}
        found = self._everywhere(
            {rank: Gather(self.number(rank), keyed, heads, summed) for rank, heads in wanted.items() if heads}
        )
        if not summed:
            return []
        checksum = run_checksum.of_ranks(self.ranks)
        sums = []
        for index in range(len(messages)):
            each = [found[part.sender][index][wanted[part.sender].index(part.heads)] for part in parts]
            sums.append(run_checksum.joint(each) | checksum)
        return sums

    def sums(self, messages: Sequence[Message], likes: Sequence[int]) -> list[int]:
        return self.own.memory.cache.sums(messages, likes)

    def scatter(self, message: Message, checksum: int) -> bool:
        """Place a message's bytes; return whether their sum was right. Raises `TransferError`."""
        if not self.in_parts(message):
            return self.own.memory.cache.scatter(message, checksum)
        keyed, parts = self.keyed(message), self.parts_in(message)
        wanted = {rank: _heads(parts, receiver=rank) for rank in range(self.ranks)}
        if checksum:
            found = self._everywhere(
                {rank: Sum(self.number(rank), keyed, heads, checksum) for rank, heads in wanted.items()}
            )
            each = [found[part.receiver][0][part.place] for part in parts]
            if run_checksum.joint(each) != checksum:
                return False
        if message.slot is not None or any(len(heads) > 1 for heads in wanted.values()):
            self._everywhere({rank: Place(self.number(rank), keyed, heads) for rank, heads in wanted.items()})
        return True

    def release(self, message: Message) -> None:
        key = self._keys.pop(id(message), None)
        if key is None:
            return
        if message.ranks != self.ranks:  # else no rank has cut anything
            self.own.memory.drop(key)
            for other in self.others:
                other.post(Drop(key))

    def number(self, rank: int) -> int:
        return self.others[rank - 1].number() if rank else 0

    def keyed(self, message: Message) -> Keyed:
        """Return the message under its number, which it has from its first mention until `release`."""
        key = self._keys.get(id(message))
        if key is None:
            key = self._keys[id(message)] = next(self._numbers)
        return Keyed(key, message)

    def parts_out(self, message: Message) -> tuple[KvPart, ...]:
        return parts_between(self._kv_heads, self.ranks, message.ranks)

    def parts_in(self, message: Message) -> tuple[KvPart, ...]:
        return parts_between(self._kv_heads, message.ranks, self.ranks)

    def _everywhere(self, orders: dict[int, Work]) -> dict[int, tuple[tuple[int, ...], ...]]:
        """Run these orders on all ranks at the same time; return their results by rank."""
        started = [(rank, self.others[rank - 1].begin(order)) for rank, order in orders.items() if rank]
        found = {0: self.own.work(orders[0])} if 0 in orders else {}
        for rank, answer in started:
            found[rank] = self.others[rank - 1].sums(answer)
        return found


def _heads(parts: Sequence[KvPart], *, sender: int = -1, receiver: int = -1) -> tuple[Heads, ...]:
    """Return the heads that one rank sends or receives; those that it sends to several ranks once."""
    return tuple(
        dict.fromkeys(part.heads for part in parts if sender in (-1, part.sender) and receiver in (-1, part.receiver))
    )


class GroupLink:
    """Link between all ranks of two workers, see `KvLink`; a buffer is what `GroupMemory.buffer` gives. A message in
    parts is as many concurrent sends or receives as it has parts, each on its rank's own link. The first that fails
    ends the others; the message is over when nothing reads or writes any part. Called on the agent's event loop."""

    def __init__(self, link: KvLink, memory: GroupMemory) -> None:
        """`link`: rank 0's own; the other ranks have one of the same name."""
        self.name = link.name
        self._link = link
        self._memory = memory
        self._of_ranks: list[bytes] = []
        self._joint = b""

    def address(self) -> bytes:
        """Return the address of all ranks, cached: it is read with every event."""
        of_ranks = [self._link.address(), *(other.addresses.get(self.name, b"") for other in self._memory.others)]
        if of_ranks != self._of_ranks:
            self._of_ranks, self._joint = of_ranks, joint_address(of_ranks)
        return self._joint

    async def send(self, peer: bytes, tag: int, buffer: object, *, timeout_s: float) -> None:
        addresses = addresses_of(peer)
        if not isinstance(buffer, Message):
            await self._link.send(addresses[0], tag, buffer, timeout_s=timeout_s)
            return
        keyed, moves = self._memory.keyed(buffer), []
        for part in self._memory.parts_out(buffer):
            address, own_tag = addresses[part.receiver], part_tag(tag, part)
            number = self._memory.number(part.sender)
            order = SendPart(number, keyed, part.heads, self.name, address, own_tag, timeout_s)
            moves.append((part.sender, order))
        await self._together(moves)

    async def receive(self, tag: int, buffer: object, *, timeout_s: float) -> None:
        if not isinstance(buffer, Message):
            await self._link.receive(tag, buffer, timeout_s=timeout_s)
            return
        keyed = self._memory.keyed(buffer)

        def order(part: KvPart) -> ReceivePart:
            number = self._memory.number(part.receiver)
            return ReceivePart(number, keyed, part.heads, self.name, part_tag(tag, part), timeout_s)

        await self._together([(part.receiver, order(part)) for part in self._memory.parts_in(buffer)])

    def path(self, peer: bytes) -> str:
        with suppress(TransferError):
            return self._link.path(addresses_of(peer)[0])
        return ""

    def forget(self, peer: bytes) -> None:
        with suppress(TransferError):
            for address in addresses_of(peer):
                self._link.forget(address)
                for other in self._memory.others:
                    other.post(Forget(self.name, address))

    async def close(self) -> None:
        """Close rank 0's link; the others close theirs when they end."""
        await self._link.close()

    async def _move(self, rank: int, order: Move) -> None:
        if rank == 0:
            await self._memory.own.move(order)
        else:
            await self._memory.others[rank - 1].move(order)

    async def _together(self, moves: Sequence[tuple[int, Move]]) -> None:
        """Make all moves, or until the first fails. On return or raise none goes on, but what is stranded."""
        tasks = [asyncio.create_task(self._move(rank, order)) for rank, order in moves]
        cancelled, going = False, set(tasks)
        while going:
            try:
                _, going = await asyncio.wait(going, return_when=asyncio.FIRST_EXCEPTION)
            except asyncio.CancelledError:
                cancelled = True
                going = {task for task in going if not task.done()}
            if going:
                for task in going:
                    task.cancel()
                _, going = await _all_ended(going)
        _raise_outcome(tasks, cancelled=cancelled)


async def _all_ended(tasks: set[asyncio.Task[None]]) -> tuple[set[asyncio.Task[None]], set[asyncio.Task[None]]]:
    """Wait for all, however often the caller is cancelled meanwhile: it is leaving already."""
    while any(not task.done() for task in tasks):
        with suppress(asyncio.CancelledError):
            await asyncio.wait(tasks)
    return tasks, set()


def _raise_outcome(tasks: Sequence[asyncio.Task[None]], *, cancelled: bool) -> None:
    failures = [error for task in tasks if not task.cancelled() and (error := task.exception()) is not None]
    stranded = [error for error in failures if isinstance(error, BufferStranded)]
    if stranded:
        settled: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        pending = [error.settled for error in stranded]

        def one_settled(_: object) -> None:
            if all(future.done() for future in pending) and not settled.done():
                settled.set_result(None)

        for future in pending:
            future.add_done_callback(one_settled)
        raise BufferStranded(str(stranded[0]), settled)
    if cancelled:
        raise asyncio.CancelledError
    if failures:
        raise failures[0]
