"""What a test can do to a memory network: kill, cut, delay."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from cohort.common.errors import PeerUnreachable
from cohort.common.messages import Registered
from cohort.common.transport.memory_bus import MemoryBus, MemoryNetwork


async def nothing_arrives(bus: MemoryBus) -> bool:
    try:
        await asyncio.wait_for(bus.receive(), 0.02)
    except TimeoutError:
        return True
    return False


async def test_killed_peer_loses_its_queue_and_its_successor_starts_fresh() -> None:
    network = MemoryNetwork()
    a, b = network.bus("a"), network.bus("b")
    a.connect("b", b.endpoint)
    a.send("b", Registered(1))
    network.kill("b")
    assert await nothing_arrives(b)
    b.send("a", Registered(9))  # the dead say nothing
    assert await nothing_arrives(a)
    a.send("b", Registered(2))  # waits, as at a DEALER
    again = network.bus("b")
    assert await again.receive() == ("a", Registered(2))
    again.send("a", Registered(3))  # the reconnected dialler can be answered at once
    assert await a.receive() == ("b", Registered(3))


async def test_answer_to_killed_dialler_raises() -> None:
    network = MemoryNetwork()
    hub, peer = network.bus("hub"), network.bus("peer")
    peer.connect("hub", hub.endpoint)
    hub.send("peer", Registered(1))
    network.kill("peer")
    with pytest.raises(PeerUnreachable):
        hub.send("peer", Registered(2))


async def test_cut_loses_silently_until_healed() -> None:
    network = MemoryNetwork()
    a, b = network.bus("a"), network.bus("b")
    a.connect("b", b.endpoint)
    network.cut("a", "b")
    a.send("b", Registered(1))
    network.reconnect("b", "a")
    a.send("b", Registered(2))
    assert await b.receive() == ("a", Registered(2))


async def test_unequal_delays_do_not_reorder() -> None:
    timers: list[tuple[float, Callable[[], None]]] = []
    delays = iter([3.0, 1.0, 2.0])
    network = MemoryNetwork(
        delay_s=lambda _, __: next(delays), call_later=lambda delay_s, call: timers.append((delay_s, call))
    )
    a, b = network.bus("a"), network.bus("b")
    a.connect("b", b.endpoint)
    for number in range(3):
        a.send("b", Registered(number))
    assert await nothing_arrives(b)
    for _, call in sorted(timers, key=lambda timer: timer[0]):
        call()
    assert [await b.receive() for _ in range(3)] == [("a", Registered(number)) for number in range(3)]


async def test_message_under_way_dies_with_its_receiver() -> None:
    timers: list[Callable[[], None]] = []
    network = MemoryNetwork(delay_s=1.0, call_later=lambda _, call: timers.append(call))
    a, b = network.bus("a"), network.bus("b")
    a.connect("b", b.endpoint)
    a.send("b", Registered(1))
    again = network.bus("b")
    for call in timers:
        call()
    assert await nothing_arrives(again)
