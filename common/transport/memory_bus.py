"""The control bus inside one process: several services, or a test, exchange real encoded messages without sockets.

Called by tests. Same behaviour as `zmq_bus`: a dialled peer that is not there yet gets its messages when it comes, an
answer to a peer that is gone raises, order per pair holds, death loses messages under way. Every message passes through
the codec, so an unencodable message fails here too. Messages arrive at once, or after `delay_s` by `call_later` (the
event loop's, or a virtual clock's).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from cohort.common.codec import decode, encode
from cohort.common.errors import PeerUnreachable
from cohort.common.messages import Message
from cohort.common.types import InstanceId

HIGH_WATER_MESSAGES = 8192

CallLater = Callable[[float, Callable[[], None]], object]


class MemoryNetwork:
    """The open buses and the messages on their way. One per test or per hosted pipeline."""

    def __init__(
        self, *, delay_s: float | Callable[[InstanceId, InstanceId], float] = 0.0, call_later: CallLater | None = None
    ) -> None:
        self._delay_s = delay_s
        self._call_later = call_later
        self._alive: dict[InstanceId, MemoryBus] = {}
        self._waiting: dict[InstanceId, deque[tuple[InstanceId, bytes]]] = {}
        self._on_the_way: dict[tuple[InstanceId, InstanceId], deque[tuple[MemoryBus | None, bytes]]] = {}
        self._cut: set[frozenset[InstanceId]] = set()

    def bus(self, identity: InstanceId) -> MemoryBus:
        """Open a bus. A second one of the same name replaces the first, as a restarted process does."""
        self._end(identity)
        bus = MemoryBus(self, identity)
        self._alive[identity] = bus
        bus.dialled_by.update(name for name, other in self._alive.items() if other.has_dialled(identity))
        for sender, data in self._waiting.pop(identity, ()):
            self.carry(sender, identity, data)
        return bus

    def kill(self, identity: InstanceId) -> None:
        """End a bus as kill -9 would: its queue is lost, its receive never returns, its peers find it gone."""
        for watching in self._end(identity):
            watching.lost(identity)

    def _end(self, identity: InstanceId) -> list[MemoryBus]:
        """End a bus. Return the buses that it had dialled."""
        bus = self._alive.pop(identity, None)
        if bus is not None:
            bus.crash()
        dialled = [other for other in self._alive.values() if identity in other.dialled_by]
        for other in dialled:
            other.dialled_by.discard(identity)
        return dialled

    def cut(self, one: InstanceId, other: InstanceId) -> None:
        """Lose everything between two peers, silently, until `reconnect`."""
        self._cut.add(frozenset((one, other)))

    def reconnect(self, one: InstanceId, other: InstanceId) -> None:
        self._cut.discard(frozenset((one, other)))

    def is_alive(self, identity: InstanceId) -> bool:
        return identity in self._alive

    def allow_replies(self, dialler: InstanceId, identity: InstanceId) -> None:
        """Let `identity`, if it is there, answer `dialler` from now on."""
        bus = self._alive.get(identity)
        if bus is not None:
            bus.dialled_by.add(dialler)

    def park(self, sender: InstanceId, receiver: InstanceId, data: bytes) -> None:
        """Keep a message for a dialled peer that is not there."""
        waiting = self._waiting.setdefault(receiver, deque())
        if sum(1 for name, _ in waiting if name == sender) >= HIGH_WATER_MESSAGES:
            raise PeerUnreachable(f"{receiver}: its queue is full")
        waiting.append((sender, data))

    def carry(self, sender: InstanceId, receiver: InstanceId, data: bytes) -> None:
        """Deliver one message after the delay, to the bus that bears the name now."""
        if frozenset((sender, receiver)) in self._cut:
            return
        pair = (sender, receiver)
        under_way = self._on_the_way.setdefault(pair, deque())
        delay_s = self._delay_s(sender, receiver) if callable(self._delay_s) else self._delay_s
        under_way.append((self._alive.get(receiver), data))
        if delay_s <= 0 and len(under_way) == 1:
            self._arrive(pair)
        else:
            call_later = self._call_later or asyncio.get_running_loop().call_later
            call_later(delay_s, lambda: self._arrive(pair))

    def _arrive(self, pair: tuple[InstanceId, InstanceId]) -> None:
        # Each timer delivers the oldest message of its pair, so unequal delays cannot reorder them.
        receiver, data = self._on_the_way[pair].popleft()
        if receiver is not None and receiver is self._alive.get(pair[1]):
            receiver.dialled_by.add(pair[0])
            receiver.deliver(pair[0], data)


class MemoryBus:
    """See `bus.Bus`. Endpoints are memory://identity; made by `MemoryNetwork.bus`."""

    def __init__(self, network: MemoryNetwork, identity: InstanceId) -> None:
        self.identity = identity
        self.endpoint = f"memory://{identity}"
        self.dialled_by: set[InstanceId] = set()
        self.lost: Callable[[InstanceId], None] = lambda peer: None
        self._network = network
        self._dialled: dict[InstanceId, InstanceId] = {}
        self._inbox: deque[tuple[InstanceId, bytes]] = deque()
        self._readable = asyncio.Event()
        self._crashed = False
        self._closed = False

    def connect(self, peer: InstanceId, endpoint: str) -> None:
        scheme, _, name = endpoint.partition("://")
        if scheme != "memory" or not name:
            raise PeerUnreachable(f"{peer}: {endpoint!r} cannot be dialled from a memory bus")
        self._dialled[peer] = name
        if not self._crashed:
            self._network.allow_replies(self.identity, name)

    def disconnect(self, peer: InstanceId) -> None:
        self._dialled.pop(peer, None)

    def watch(self, lost: Callable[[InstanceId], None]) -> None:
        self.lost = lost

    def send(self, peer: InstanceId, message: Message) -> None:
        data = encode(message)
        if self._crashed:
            return  # the process no longer exists; its code merely has not noticed
        if self._closed:
            raise PeerUnreachable(f"{self.identity}: the bus is closed")
        if peer in self._dialled:
            name = self._dialled[peer]
            if self._network.is_alive(name):
                self._network.carry(self.identity, name, data)
            else:
                self._network.park(self.identity, name, data)
        elif peer in self.dialled_by:
            self._network.carry(self.identity, peer, data)
        else:
            raise PeerUnreachable(f"{peer}: is not connected")

    async def receive(self) -> tuple[InstanceId, Message]:
        if self._inbox:
            await asyncio.sleep(0)  # a receiver that never waits would starve every other task of the loop
        while self._crashed or not self._inbox:
            if self._closed:
                raise PeerUnreachable(f"{self.identity}: the bus is closed")
            self._readable.clear()
            await self._readable.wait()
        return self._pop()

    def take(self) -> tuple[InstanceId, Message] | None:
        return self._pop() if self._inbox and not self._crashed else None

    def _pop(self) -> tuple[InstanceId, Message]:
        sender, data = self._inbox.popleft()
        return self._name_of(sender), decode(data)

    async def close(self) -> None:
        if not self._closed:
            self._closed = True
            if self._network.is_alive(self.identity) and not self._crashed:
                self._network.kill(self.identity)
            self._crashed = False  # closed on purpose: a waiting receive ends with an error instead of never
            self._inbox.clear()
            self._readable.set()

    def has_dialled(self, identity: InstanceId) -> bool:
        return identity in self._dialled.values()

    def deliver(self, sender: InstanceId, data: bytes) -> None:
        self._inbox.append((sender, data))
        self._readable.set()

    def crash(self) -> None:
        self._crashed = True
        self._inbox.clear()

    def _name_of(self, sender: InstanceId) -> InstanceId:
        """Return the name under which a sender was dialled, else its own."""
        if sender in self._dialled:
            return sender
        return next((peer for peer, name in self._dialled.items() if name == sender), sender)
