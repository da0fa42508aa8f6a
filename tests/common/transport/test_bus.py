"""What both buses promise. `test_zmq_bus` has what only sockets can do wrong."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from cohort.common.errors import PeerUnreachable
from cohort.common.messages import AttemptsLost, Cancel, KvRenew, Registered
from cohort.common.transport.bus import Bus
from cohort.common.transport.memory_bus import MemoryNetwork
from cohort.common.transport.zmq_bus import ZmqBus
from cohort.common.types import Attempt

Open = Callable[[str], Bus]


@pytest.fixture(params=["memory", "ipc", "tcp"])
async def new_bus(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Open]:
    network = MemoryNetwork()
    opened: list[Bus] = []

    def make(identity: str) -> Bus:
        bus: Bus
        if request.param == "memory":
            bus = network.bus(identity)
        elif request.param == "ipc":
            bus = ZmqBus(identity, f"ipc://{tmp_path}/{identity}.sock")
        else:
            bus = ZmqBus(identity, "tcp://127.0.0.1:0")
        opened.append(bus)
        return bus

    yield make
    for bus in opened:
        await bus.close()


async def soon(bus: Bus, within_s: float = 5.0) -> tuple[str, object]:
    return await asyncio.wait_for(bus.receive(), within_s)


async def test_both_directions_and_names(new_bus: Open) -> None:
    manager, worker = new_bus("manager-7"), new_bus("prefill-0")
    worker.connect("manager", manager.endpoint)  # dialled under a name of the dialler's choice
    worker.send("manager", AttemptsLost([], "1"))
    assert await soon(manager) == ("prefill-0", AttemptsLost([], "1"))
    manager.send("prefill-0", Registered(3))
    assert await soon(worker) == ("manager", Registered(3))


async def test_order_holds(new_bus: Open) -> None:
    a, b = new_bus("a"), new_bus("b")
    a.connect("b", b.endpoint)
    for number in range(2000):
        a.send("b", Registered(number))
    received = [await soon(b) for _ in range(2000)]
    assert received == [("a", Registered(number)) for number in range(2000)]


async def test_messages_already_there_are_taken_without_waiting(new_bus: Open) -> None:
    a, b = new_bus("a"), new_bus("b")
    a.connect("b", b.endpoint)
    assert b.take() is None
    for number in range(200):
        a.send("b", Registered(number))
    received: list[tuple[str, object] | None] = []
    while len(received) < 200:
        received.append(await soon(b))
        while (arrived := b.take()) is not None:
            received.append(arrived)
    assert received == [("a", Registered(number)) for number in range(200)]
    await b.close()
    assert b.take() is None


async def test_many_senders_each_get_their_turn(new_bus: Open) -> None:
    hub = new_bus("hub")
    peers = [new_bus(f"w-{index}") for index in range(4)]
    for peer in peers:
        peer.connect("hub", hub.endpoint)
        for number in range(50):
            peer.send("hub", Registered(number))
    received = [await soon(hub) for _ in range(200)]
    for peer in peers:
        assert [message for name, message in received if name == peer.identity] == [Registered(n) for n in range(50)]


async def test_a_flood_does_not_starve_other_tasks(new_bus: Open) -> None:
    a, b = new_bus("a"), new_bus("b")
    a.connect("b", b.endpoint)
    for number in range(3000):
        a.send("b", Registered(number))
    await asyncio.sleep(0.3)
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(other())
    for _ in range(3000):
        await soon(b)
    task.cancel()
    assert turns >= 50


async def test_unknown_peer_is_unreachable(new_bus: Open) -> None:
    a = new_bus("a")
    with pytest.raises(PeerUnreachable, match="nobody"):
        a.send("nobody", AttemptsLost([], "1"))


async def test_disconnect_forgets(new_bus: Open) -> None:
    a, b = new_bus("a"), new_bus("b")
    a.connect("b", b.endpoint)
    a.send("b", AttemptsLost([], "1"))
    await soon(b)
    a.disconnect("b")
    a.disconnect("b")
    with pytest.raises(PeerUnreachable):
        a.send("b", AttemptsLost([], "1"))


async def test_messages_wait_for_a_dialled_peer(new_bus: Open, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    a = new_bus("a")
    first = new_bus("late")
    endpoint = first.endpoint
    if endpoint.startswith("tcp"):
        pytest.skip("the second bus would get another port")
    await first.close()
    a.connect("late", endpoint)
    a.send("late", AttemptsLost([], "2"))
    late = new_bus("late")
    assert await soon(late) == ("a", AttemptsLost([], "2"))


async def test_another_endpoint_replaces_the_connection(new_bus: Open) -> None:
    a, old, new = new_bus("a"), new_bus("old"), new_bus("new")
    a.connect("peer", old.endpoint)
    a.send("peer", AttemptsLost([], "1"))
    assert await soon(old) == ("a", AttemptsLost([], "1"))
    a.connect("peer", new.endpoint)
    a.connect("peer", new.endpoint)
    a.send("peer", AttemptsLost([], "2"))
    assert await soon(new) == ("a", AttemptsLost([], "2"))


async def test_answering_a_peer_that_left_is_unreachable(new_bus: Open) -> None:
    hub, peer = new_bus("hub"), new_bus("peer")
    peer.connect("hub", hub.endpoint)
    peer.send("hub", AttemptsLost([], "1"))
    await soon(hub)
    await peer.close()
    with pytest.raises(PeerUnreachable):
        async with asyncio.timeout(3.0):
            while True:
                hub.send("peer", Registered(1))
                await asyncio.sleep(0.01)


async def test_cancelled_receive_loses_nothing(new_bus: Open) -> None:
    a, b = new_bus("a"), new_bus("b")
    a.connect("b", b.endpoint)
    for _ in range(3):
        task = asyncio.create_task(b.receive())
        await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    a.send("b", Cancel([Attempt("r", 1)]))
    assert await soon(b) == ("a", Cancel([Attempt("r", 1)]))


async def test_close_ends_a_waiting_receive(new_bus: Open) -> None:
    a = new_bus("a")
    waiting = asyncio.create_task(a.receive())
    await asyncio.sleep(0.01)
    await a.close()
    with pytest.raises(PeerUnreachable):
        await asyncio.wait_for(waiting, 1.0)
    with pytest.raises(PeerUnreachable):
        a.send("b", KvRenew([1]))
    await a.close()


async def test_a_peer_that_is_gone_is_named_and_no_other(new_bus: Open) -> None:
    hub, stays, goes = new_bus("hub"), new_bus("stays"), new_bus("goes")
    lost: asyncio.Queue[str] = asyncio.Queue()
    hub.watch(lost.put_nowait)
    for number, peer in enumerate((stays, goes)):
        peer.connect("hub", hub.endpoint)
        peer.send("hub", Registered(number))
        await soon(hub)
    await goes.close()
    assert await asyncio.wait_for(lost.get(), 5) == "goes"
    hub.send("stays", Registered(7))
    assert await soon(stays) == ("hub", Registered(7))
    assert lost.empty()


async def test_who_comes_again_under_a_lost_name_is_watched_again(new_bus: Open) -> None:
    hub, first = new_bus("hub"), new_bus("w")
    lost: asyncio.Queue[str] = asyncio.Queue()
    hub.watch(lost.put_nowait)
    first.connect("hub", hub.endpoint)
    first.send("hub", Registered(1))
    await soon(hub)
    await first.close()
    assert await asyncio.wait_for(lost.get(), 5) == "w"
    second = new_bus("w")
    second.connect("hub", hub.endpoint)
    second.send("hub", Registered(2))
    assert await soon(hub) == ("w", Registered(2))
    await second.close()
    assert await asyncio.wait_for(lost.get(), 5) == "w"
