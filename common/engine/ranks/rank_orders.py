"""Orders of rank 0 to the other ranks for KV transfers, and their answers, over a socket pair for each follower.

    rank 0 ──▶ follower   OpenLinks; Gather, Sum, Place (the cache's memory); SendPart, ReceivePart (its links);
                          Cancel, Drop, Forget (without an answer)
    follower ──▶ rank 0   Opened, Summed, Ended, Settled; Moved, whenever a link's address has changed

Rank 0 follows the same orders by itself (`rank_transfers`). No bytes of KV go this way. Frames as in `rank_messages`.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum

import msgspec

from cohort.common.engine.ranks import rank_messages
from cohort.common.engine.ranks.kv_parts import Heads
from cohort.common.engine.transfer.transfer_memory import Message


class OpenLinks(msgspec.Struct, frozen=True, tag=True):
    """Command to open the configured links; fields as `open_links` takes them, the keys by their file."""

    order: int
    names: tuple[str, ...]
    zmq_bind: str
    zmq_advertise: str
    keys_file: str
    plain_allowed: bool
    one_machine: bool
    ucx_tls: str = ""
    ucx_net_devices: str = ""


class Keyed(msgspec.Struct, frozen=True):
    """Message under the number that it has in all orders."""

    key: int
    message: Message


class Gather(msgspec.Struct, frozen=True, tag=True):
    """Order to make buffers of these heads of every message, and to sum each."""

    order: int
    messages: tuple[Keyed, ...]
    heads: tuple[Heads, ...]
    summed: bool


class Sum(msgspec.Struct, frozen=True, tag=True):
    """Order to sum a message's filled buffers, in the form that the sum `like` has."""

    order: int
    keyed: Keyed
    heads: tuple[Heads, ...]
    like: int


class Place(msgspec.Struct, frozen=True, tag=True):
    """Order to copy these buffers to the message's blocks."""

    order: int
    keyed: Keyed
    heads: tuple[Heads, ...]


class SendPart(msgspec.Struct, frozen=True, tag=True):
    order: int
    keyed: Keyed
    heads: Heads
    link: str
    address: bytes
    tag: int
    timeout_s: float


class ReceivePart(msgspec.Struct, frozen=True, tag=True):
    order: int
    keyed: Keyed
    heads: Heads
    link: str
    tag: int
    timeout_s: float


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """Order to end another one, which is answered all the same."""

    order: int


class Drop(msgspec.Struct, frozen=True, tag=True):
    """Order to drop the buffers of this message, which nothing reads or writes any more."""

    key: int


class Forget(msgspec.Struct, frozen=True, tag=True):
    """Notice that the process with this address is gone."""

    link: str
    address: bytes


class Opened(msgspec.Struct, frozen=True, tag=True):
    """Addresses by the name of the link; those that could not be opened are missing."""

    order: int
    addresses: dict[str, bytes]


class Summed(msgspec.Struct, frozen=True, tag=True):
    """Sums by message, then by heads; empty if none were requested."""

    order: int
    sums: tuple[tuple[int, ...], ...]


class Outcome(StrEnum):
    DONE = "done"
    FAILED = "failed"
    LATE = "late"
    CANCELLED = "cancelled"
    STRANDED = "stranded"
    """`Settled` follows once the buffer is released."""


class Ended(msgspec.Struct, frozen=True, tag=True):
    order: int
    outcome: Outcome
    reason: str = ""


class Settled(msgspec.Struct, frozen=True, tag=True):
    order: int


class Moved(msgspec.Struct, frozen=True, tag=True):
    addresses: dict[str, bytes]


Work = Gather | Sum | Place
Move = SendPart | ReceivePart
Order = OpenLinks | Work | Move | Cancel | Drop | Forget
Answer = Opened | Summed | Ended | Settled | Moved

order_of: Callable[[bytes], Order] = msgspec.msgpack.Decoder(Order).decode
answer_of: Callable[[bytes | bytearray], Answer] = msgspec.msgpack.Decoder(Answer).decode


def framed(message: Order | Answer) -> bytes:
    return rank_messages.framed(msgspec.msgpack.encode(message))
