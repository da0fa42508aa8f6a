"""What only real sockets can do wrong: stale files, stolen endpoints, garbage, full queues, throughput."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from pathlib import Path

import pytest
import zmq

from cohort.common.errors import ConfigError, PeerUnreachable
from cohort.common.messages import Registered, TokenBatch, TokenUpdate
from cohort.common.transport.zmq_bus import ZmqBus
from cohort.common.types import Attempt


def ipc(tmp_path: Path, name: str = "inbox") -> str:
    return f"ipc://{tmp_path}/{name}.sock"


async def test_live_endpoint_is_not_stolen(tmp_path: Path) -> None:
    first = ZmqBus("first", ipc(tmp_path))
    with pytest.raises(ConfigError, match="another process listens"):
        ZmqBus("second", ipc(tmp_path))
    peer = ZmqBus("peer")
    peer.connect("first", ipc(tmp_path))
    peer.send("first", Registered(1))
    assert await asyncio.wait_for(first.receive(), 5) == ("peer", Registered(1))
    await first.close()
    await peer.close()
    assert os.listdir(tmp_path) == []


async def test_foreign_live_socket_is_not_stolen(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as foreign:
        foreign.bind(f"{tmp_path}/inbox.sock")
        foreign.listen()
        with pytest.raises(ConfigError, match="another process listens"):
            ZmqBus("a", ipc(tmp_path))


async def test_file_of_a_killed_process_is_replaced(tmp_path: Path) -> None:
    program = (
        "import asyncio, sys\n"
        "from cohort.common.transport.zmq_bus import ZmqBus\n"
        "async def main():\n"
        "    bus = ZmqBus('a', sys.argv[1]); print('up', flush=True); await bus.receive()\n"
        "asyncio.run(main())\n"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, ipc(tmp_path), stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    assert await asyncio.wait_for(process.stdout.readline(), 30) == b"up\n"
    with pytest.raises(ConfigError, match="another process listens"):
        ZmqBus("a", ipc(tmp_path))
    process.send_signal(signal.SIGKILL)
    await process.wait()
    assert (tmp_path / "inbox.sock").exists()
    bus = ZmqBus("a", ipc(tmp_path))
    await bus.close()


async def test_restarted_dialler_takes_its_name_over(tmp_path: Path) -> None:
    hub = ZmqBus("hub", ipc(tmp_path))
    old, new = ZmqBus("w"), ZmqBus("w")
    old.connect("hub", hub.endpoint)
    old.send("hub", Registered(1))
    assert (await asyncio.wait_for(hub.receive(), 5))[1] == Registered(1)
    new.connect("hub", hub.endpoint)  # the old connection is still there, as after a crash that TCP has not noticed
    new.send("hub", Registered(2))
    assert (await asyncio.wait_for(hub.receive(), 5))[1] == Registered(2)
    hub.send("w", Registered(3))
    assert await asyncio.wait_for(new.receive(), 5) == ("hub", Registered(3))
    for bus in (hub, old, new):
        await bus.close()


async def test_malformed_messages_are_counted_and_skipped(tmp_path: Path) -> None:
    bus = ZmqBus("hub", ipc(tmp_path))
    context = zmq.Context()
    try:
        dealer = context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.IDENTITY, b"stranger")
        dealer.connect(bus.endpoint)
        garbage = [
            [b""],
            [b"\xc1"],
            [b"{}"],
            [b"\x80"],
            [b"\x81\xa4type\xa3Foo"],
            [b"\x91" * 100_000],
            [b"a", b"b"],
            [b"\x82\xa4type\xaaRegistered\xabincarnation\xa1x"],
        ]
        for frames in garbage:
            dealer.send_multipart(frames)
        anonymous = context.socket(zmq.DEALER)  # libzmq gives it a binary name
        anonymous.connect(bus.endpoint)
        anonymous.send(b"\xff")
        first = asyncio.create_task(bus.receive())
        async with asyncio.timeout(5):
            while bus.counters.malformed < len(garbage) + 1:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        peer = ZmqBus("peer")
        peer.connect("hub", bus.endpoint)
        peer.send("hub", Registered(1))
        assert await asyncio.wait_for(first, 5) == ("peer", Registered(1))
        assert (bus.counters.malformed, bus.counters.received) == (len(garbage) + 1, 1)
    finally:
        context.destroy(linger=0)  # or a failure would hang at the end of the process
    await bus.close()
    await peer.close()


async def test_full_queue_is_unreachable_and_news_can_be_kept_few(tmp_path: Path) -> None:
    bus = ZmqBus("a")
    bus.connect("absent", ipc(tmp_path), high_water_messages=4)
    with pytest.raises(PeerUnreachable, match="full"):
        for number in range(10):
            bus.send("absent", Registered(number))
    assert bus.counters.sent == 4
    absent = ZmqBus("absent", ipc(tmp_path))
    assert [(await asyncio.wait_for(absent.receive(), 5))[1] for _ in range(4)] == [Registered(n) for n in range(4)]
    await bus.close()
    await absent.close()


async def test_port_zero_and_advertised_host() -> None:
    bus = ZmqBus("a", "tcp://127.0.0.1:0", advertise="tcp://localhost:0")
    host, _, port = bus.endpoint.removeprefix("tcp://").partition(":")
    assert host == "localhost"
    assert int(port) > 0
    with pytest.raises(ConfigError, match="cannot listen"):
        ZmqBus("b", f"tcp://127.0.0.1:{port}")
    await bus.close()


async def test_bad_endpoints_are_named() -> None:
    with pytest.raises(ConfigError, match="cannot listen on nonsense"):
        ZmqBus("a", "nonsense")
    with pytest.raises(ConfigError, match="107 bytes"):
        ZmqBus("a", "ipc:///tmp/" + "x" * 120)
    bus = ZmqBus("a")
    with pytest.raises(PeerUnreachable, match="nonsense"):
        bus.connect("b", "nonsense")
    await bus.close()


async def test_close_is_quick_with_an_absent_peer(tmp_path: Path) -> None:
    bus = ZmqBus("a")
    bus.connect("absent", ipc(tmp_path))
    bus.send("absent", Registered(1))
    async with asyncio.timeout(10):
        await bus.close()


async def test_no_descriptor_is_left(tmp_path: Path) -> None:
    async def once() -> None:
        a, b = ZmqBus("a", ipc(tmp_path, "a")), ZmqBus("b", "tcp://127.0.0.1:0")
        a.connect("b", b.endpoint)
        a.send("b", Registered(1))
        await asyncio.wait_for(b.receive(), 5)
        await a.close()
        await b.close()

    await once()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        await once()
    assert len(os.listdir("/proc/self/fd")) <= before


async def test_messages_wait_for_no_timer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One by one or thousands at once: what arrives is told by its socket, never found by a poll that sleeps."""
    a, b = ZmqBus("a", ipc(tmp_path, "a")), ZmqBus("b", ipc(tmp_path, "b"))
    a.connect("b", b.endpoint)
    message = TokenBatch("decode-0", [TokenUpdate(Attempt("req-1", 1), 100, [5])])
    loop, timers = asyncio.get_running_loop(), []
    call_at = loop.call_at
    async with asyncio.timeout(60):
        monkeypatch.setattr(loop, "call_at", lambda *given, **more: timers.append(given) or call_at(*given, **more))
        for together in (5000, *[1] * 200):
            for _ in range(together):
                a.send("b", message)
            for _ in range(together):
                assert await b.receive() == ("a", message)
        monkeypatch.undo()
    assert timers == []
    await a.close()
    await b.close()


async def test_peers_share_a_busy_process_by_bytes(tmp_path: Path) -> None:
    """A worker's tokens of a hundred sequences, one message each step, and a manager's words about each of them."""
    gateway, manager = ZmqBus("gateway", ipc(tmp_path, "g")), ZmqBus("manager", ipc(tmp_path, "m"))
    worker = ZmqBus("worker")
    worker.connect("gateway", gateway.endpoint)
    gateway.connect("manager", manager.endpoint)
    gateway.send("manager", Registered(0))
    async with asyncio.timeout(20):
        await manager.receive()
        step = TokenBatch("worker", [TokenUpdate(Attempt(f"request-{row:03}", 1), 100, [5]) for row in range(120)])
        for number in range(300):
            worker.send("gateway", step)
            manager.send("gateway", Registered(number))
        await asyncio.sleep(0.2)  # all of them are there
        senders = [(await gateway.receive())[0] for _ in range(600)]
    assert len([sender for sender in senders if sender == "worker"]) == 300
    last = max(index for index, sender in enumerate(senders) if sender == "manager")
    assert senders[:last].count("worker") < 30, "the manager's 300 do not wait for as many of the worker's"
    for bus in (worker, manager, gateway):
        await bus.close()
