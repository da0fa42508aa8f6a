"""The control bus: every service's interface to a message transport.

Two implementations: `zmq_bus.ZmqBus` between processes and `memory_bus.MemoryNetwork` inside one, under a virtual
clock, for tests. A bus owns one inbox that others dial, and any number of outgoing connections.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from cohort.common.messages import Message
from cohort.common.types import InstanceId


class Bus(Protocol):
    """`identity` is this process's instance id; peers are named by theirs. Delivery: in order per peer, at most once; a
    message is lost only when a peer or a connection dies, and every protocol above repairs that (attempts, leases,
    periodic reconciliation)."""

    identity: InstanceId
    endpoint: str
    """Address at which others dial this inbox; "" if it has none."""

    def connect(self, peer: InstanceId, endpoint: str) -> None:
        """Dial a peer's inbox. Idempotent; another endpoint for a known peer replaces the connection."""

    def disconnect(self, peer: InstanceId) -> None:
        """Forget a peer that was dialled; unsent messages to it are dropped."""

    def send(self, peer: InstanceId, message: Message) -> None:
        """Queue a message for a peer that was dialled or has dialled us. Never blocks. Raises `PeerUnreachable` if the
        peer is unknown or its queue is full."""

    async def receive(self) -> tuple[InstanceId, Message]:
        """Return the next sender and message, from the inbox or any connection. Malformed ones are logged, counted and
        skipped."""

    def take(self) -> tuple[InstanceId, Message] | None:
        """Return the next sender and message if one is there already and it is not time to let other tasks run."""

    def watch(self, lost: Callable[[InstanceId], None]) -> None:
        """Call `lost` from now on with the name of each peer whose connection to this inbox ended and that did not dial
        again at once: its process has ended, or nothing reaches it. May be wrong: then its messages come again. Once
        per bus."""

    async def close(self) -> None:
        """Close all sockets, within a second."""
