"""Which rank of a sender sends which KV heads of a message to which rank of its receiver.

    2 ranks ──▶ 4 ranks             4 ranks ──▶ 2 ranks             4 ranks of 2 KV heads ──▶ 2 ranks
    0 ─ heads 0,1 ─▶ 0              0 ─ heads 0,1 ─▶ 0              0 ─ head 0 ─▶ 0
      └ heads 2,3 ─▶ 1              1 ─ heads 2,3 ─▶ 0              (1 has the same and sends nothing)
    1 ─ heads 4,5 ─▶ 2 …            2 ─ heads 4,5 ─▶ 1 …            2 ─ head 1 ─▶ 1

Both ends know both degrees (the receiver's is in its address, the sender's in the sums it announces) and compute the
same list. Called by `group_memory`. No torch; never reads a byte of KV.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, lru_cache

import msgspec

from cohort.common.engine.config.rank_shares import MOST_RANKS, kv_heads_of
from cohort.common.errors import TransferError

Heads = tuple[int, int]
"""Heads of the whole model, [first, end)."""

_PLACE_SHIFT = 18
_PLACES = MOST_RANKS - 1 << _PLACE_SHIFT
"""Bits of a tag that tell a message's parts for one rank apart: the highest of its run's number."""


@dataclass(frozen=True, slots=True)
class KvPart:
    """Part of a message: these heads of every block; `place` among the parts that `receiver` gets."""

    sender: int
    receiver: int
    heads: Heads
    place: int


@cache
def parts_between(kv_heads: int, senders: int, receivers: int) -> tuple[KvPart, ...]:
    """Return the parts of a message between workers of these degrees, by receiver and head: every rank of the receiver
    gets each of its heads once, from the sender whose place in its group is nearest to the receiver's in its own."""
    owned = [kv_heads_of(kv_heads, rank, senders) for rank in range(senders)]
    found = []
    for receiver in range(receivers):
        head, end = kv_heads_of(kv_heads, receiver, receivers)
        nearest, place = receiver * senders // receivers, 0
        while head < end:
            able = [rank for rank, (first, stop) in enumerate(owned) if first <= head < stop]
            sender = min(able, key=lambda rank: abs(rank - nearest))
            stop = min(end, owned[sender][1])
            found.append(KvPart(sender, receiver, (head, stop), place))
            head, place = stop, place + 1
    return tuple(found)


def part_tag(tag: int, part: KvPart) -> int:
    """Return the tag of a part of the message under `tag`. Raises `TransferError` beyond 2^18 runs of a lease."""
    if part.place and tag & _PLACES:
        raise TransferError(f"tag {tag:#x} leaves no room for {part.place + 1} parts of its message")
    return tag | part.place << _PLACE_SHIFT


def joint_address(addresses: list[bytes]) -> bytes:
    """Return the address of a worker: its ranks' in order."""
    return msgspec.msgpack.encode(addresses)


@lru_cache(maxsize=1024)
def addresses_of(address: bytes) -> tuple[bytes, ...]:
    """Return the ranks' addresses in a `joint_address`. Raises `TransferError` for what is none."""
    try:
        found = msgspec.msgpack.decode(address, type=tuple[bytes, ...])
    except msgspec.DecodeError as error:
        raise TransferError(f"not the address of a worker's ranks: {error}") from None
    if not 1 <= len(found) <= MOST_RANKS:
        raise TransferError(f"a worker of {len(found)} ranks")
    return found
