"""The caches of all ranks of a worker as the transfer agent sees them: messages whose parts stay where they are.

    rank 0's cache ── its heads ══ rank 0's link ══▶ …
    rank 1's cache ── its heads ══ rank 1's link ══▶ …        what goes to whom: `kv_parts`
    rank n's cache ── its heads ══ rank n's link ══▶ …

Every worker has one; between two workers of one rank each it is the cache itself. A message in parts is gathered,
summed and placed by every rank for its own part, by rank 0's order. No KV passes through rank 0 but its own. The
message's sum is one over its parts' sums.

What blocks here is called in the agent's threads. Decides how memory is copied and summed, never what is sent.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from cohort.common.engine.ranks.kv_parts import Heads, KvPart, addresses_of, parts_between
from cohort.common.engine.ranks.rank_orders import Drop, Gather, Keyed, Place, Sum, Work
from cohort.common.engine.ranks.rank_transfers import RankTransfers
from cohort.common.engine.ranks.remote_rank import RemoteRank
from cohort.common.engine.transfer import run_checksum
from cohort.common.engine.transfer.transfer_memory import Message
from cohort.common.errors import TransferError
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
        """Of a message in parts: itself, which `GroupLink` knows what to do with."""
        return message if self.in_parts(message) else self.own.memory.cache.buffer(message)

    def outgoing(self, messages: Sequence[Message], *, summed: bool) -> list[int]:
        """Messages to one worker. Raises `TransferError`."""
        if not any(self.in_parts(message) for message in messages):
            return self.own.memory.cache.outgoing(messages, summed=summed)
        keyed = tuple(self.keyed(message) for message in messages)
        parts = self.parts_out(messages[0])
        wanted = {rank: _heads(parts, sender=rank) for rank in range(self.ranks)}
        found = self._everywhere(
            {rank: Gather(self._number(rank), keyed, heads, summed) for rank, heads in wanted.items() if heads}
        )
        if not summed:
            return []
        said = run_checksum.of_ranks(self.ranks)
        sums = []
        for index in range(len(messages)):
            each = [found[part.sender][index][wanted[part.sender].index(part.heads)] for part in parts]
            sums.append(run_checksum.joint(each) | said)
        return sums

    def sums(self, messages: Sequence[Message], likes: Sequence[int]) -> list[int]:
        return self.own.memory.cache.sums(messages, likes)

    def scatter(self, message: Message, checksum: int) -> bool:
        """Raises `TransferError`."""
        if not self.in_parts(message):
            return self.own.memory.cache.scatter(message, checksum)
        keyed, parts = self.keyed(message), self.parts_in(message)
        wanted = {rank: _heads(parts, receiver=rank) for rank in range(self.ranks)}
        if checksum:
            weighted = run_checksum.is_weighted(checksum)
            found = self._everywhere(
                {rank: Sum(self._number(rank), keyed, heads, weighted) for rank, heads in wanted.items()}
            )
            each = [found[part.receiver][0][part.place] for part in parts]
            if run_checksum.joint(each) != checksum:
                return False
        if message.slot is not None or any(len(heads) > 1 for heads in wanted.values()):
            self._everywhere({rank: Place(self._number(rank), keyed, heads) for rank, heads in wanted.items()})
        return True

    def release(self, message: Message) -> None:
        key = self._keys.pop(id(message), None)
        if key is None:
            return
        if message.ranks != self.ranks:  # else no rank has cut anything
            self.own.memory.drop(key)
            for other in self.others:
                other.tell(Drop(key))

    # -- what `GroupLink` asks ---------------------------------------------------------------------------------------

    def keyed(self, message: Message) -> Keyed:
        """Under its number, from its first mention until `release`."""
        key = self._keys.get(id(message))
        if key is None:
            key = self._keys[id(message)] = next(self._numbers)
        return Keyed(key, message)

    def parts_out(self, message: Message) -> tuple[KvPart, ...]:
        """Of a message from here."""
        return parts_between(self._kv_heads, self.ranks, message.ranks)

    def parts_in(self, message: Message) -> tuple[KvPart, ...]:
        """Of a message to here."""
        return parts_between(self._kv_heads, message.ranks, self.ranks)

    def _number(self, rank: int) -> int:
        return self.others[rank - 1].number() if rank else 0

    def _everywhere(self, orders: dict[int, Work]) -> dict[int, tuple[tuple[int, ...], ...]]:
        """What comes of these orders, by rank; all ranks are at work at the same time."""
        begun = [(rank, self.others[rank - 1].begin(order)) for rank, order in orders.items() if rank]
        found = {0: self.own.work(orders[0])} if 0 in orders else {}
        for rank, answer in begun:
            found[rank] = self.others[rank - 1].sums(answer)
        return found


def _heads(parts: Sequence[KvPart], *, sender: int = -1, receiver: int = -1) -> tuple[Heads, ...]:
    """What one rank sends or receives; what it sends to several ranks once."""
    return tuple(
        dict.fromkeys(part.heads for part in parts if sender in (-1, part.sender) and receiver in (-1, part.receiver))
    )
