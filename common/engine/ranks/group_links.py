"""A worker's KV links as the transfer agent sees them: one link a name, over which messages go from rank to rank.

Every worker's links are these; between two workers of one rank each a link is what it holds. A message in parts is as
many sends or receives as it has parts, side by side, each on its rank's own link. The first that fails ends the others;
the message is over when nothing reads or writes any part.

Made by `worker_loop`, called by the transfer agent on its event loop. Decides nothing: which link is the agent's
business, which heads `kv_parts`'.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress

from cohort.common.engine.ranks.group_memory import GroupMemory
from cohort.common.engine.ranks.kv_parts import KvPart, addresses_of, joint_address, part_tag
from cohort.common.engine.ranks.rank_orders import Forget, Move, ReceivePart, SendPart
from cohort.common.engine.transfer.transfer_memory import Message
from cohort.common.errors import BufferStranded, TransferError
from cohort.common.transport.kv_link import KvLink


class GroupLink:
    """See `KvLink`; a buffer is what `GroupMemory.buffer` gives."""

    def __init__(self, link: KvLink, memory: GroupMemory) -> None:
        """`link`: rank 0's own; the other ranks have one of the same name."""
        self.name = link.name
        self._link = link
        self._memory = memory
        self._of_ranks: list[bytes] = []
        self._joint = b""

    def address(self) -> bytes:
        """Of all ranks. Asked for with every event, hence kept."""
        of_ranks = [self._link.address(), *(other.addresses.get(self.name, b"") for other in self._memory.others)]
        if of_ranks != self._of_ranks:
            self._of_ranks, self._joint = of_ranks, joint_address(of_ranks)
        return self._joint

    def register(self, memory: object) -> None:
        """Every rank has registered its own (`RankTransfers`)."""

    async def send(self, peer: bytes, tag: int, buffer: object, *, timeout_s: float) -> None:
        addresses = addresses_of(peer)
        if not isinstance(buffer, Message):
            await self._link.send(addresses[0], tag, buffer, timeout_s=timeout_s)
            return
        keyed, moves = self._memory.keyed(buffer), []
        for part in self._memory.parts_out(buffer):
            address, own_tag = addresses[part.receiver], part_tag(tag, part)
            number = self._number(part.sender)
            order = SendPart(number, keyed, part.heads, self.name, address, own_tag, timeout_s)
            moves.append((part.sender, order))
        await self._together(moves)

    async def receive(self, tag: int, buffer: object, *, timeout_s: float) -> None:
        if not isinstance(buffer, Message):
            await self._link.receive(tag, buffer, timeout_s=timeout_s)
            return
        keyed = self._memory.keyed(buffer)

        def order(part: KvPart) -> ReceivePart:
            number = self._number(part.receiver)
            return ReceivePart(number, keyed, part.heads, self.name, part_tag(tag, part), timeout_s)

        await self._together([(part.receiver, order(part)) for part in self._memory.parts_in(buffer)])

    def path(self, peer: bytes) -> str:
        """Rank 0's own, to the first rank there."""
        with suppress(TransferError):
            return self._link.path(addresses_of(peer)[0])
        return ""

    def forget(self, peer: bytes) -> None:
        with suppress(TransferError):
            for address in addresses_of(peer):
                self._link.forget(address)
                for other in self._memory.others:
                    other.tell(Forget(self.name, address))

    async def close(self) -> None:
        """Rank 0's; the others close theirs when they end."""
        await self._link.close()

    def _number(self, rank: int) -> int:
        return self._memory.others[rank - 1].number() if rank else 0

    async def _move(self, rank: int, order: Move) -> None:
        if rank == 0:
            await self._memory.own.move(order)
        else:
            await self._memory.others[rank - 1].move(order)

    async def _together(self, moves: Sequence[tuple[int, Move]]) -> None:
        """All of them, or until the first fails. On return or raise none goes on, but what is stranded."""
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
    """However often the caller is cancelled meanwhile: it is leaving already."""
    while any(not task.done() for task in tasks):
        with suppress(asyncio.CancelledError):
            await asyncio.wait(tasks)
    return tasks, set()


def _raise_outcome(tasks: Sequence[asyncio.Task[None]], *, cancelled: bool) -> None:
    failures = [error for task in tasks if not task.cancelled() and (error := task.exception()) is not None]
    stranded = [error for error in failures if isinstance(error, BufferStranded)]
    if stranded:
        settled: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        left = [error.settled for error in stranded]

        def one_settled(_: object) -> None:
            if all(future.done() for future in left) and not settled.done():
                settled.set_result(None)

        for future in left:
            future.add_done_callback(one_settled)
        raise BufferStranded(str(stranded[0]), settled)
    if cancelled:
        raise asyncio.CancelledError
    if failures:
        raise failures[0]
