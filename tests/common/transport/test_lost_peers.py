"""How a death is told from a broken connection, with real sockets and processes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from pathlib import Path

import pytest

from cohort.common.messages import Registered
from cohort.common.transport import lost_peers
from cohort.common.transport.zmq_bus import ZmqBus


class Line:
    """A TCP connection between two peers that can be cut and, or not, be made again."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._ends: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server
        self.endpoint = ""
        self.made = 0

    async def open(self, at: int = 0) -> None:
        self._server = await asyncio.start_server(self._join, "127.0.0.1", at)
        self.endpoint = f"tcp://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.made += 1
        there_reader, there_writer = await asyncio.open_connection("127.0.0.1", self._port)
        self._ends |= {writer, there_writer}
        await asyncio.gather(_copy(reader, there_writer), _copy(there_reader, writer))

    def cut(self) -> None:
        for end in self._ends:
            end.transport.abort()
        self._ends.clear()

    async def close(self) -> None:
        self._server.close()
        self.cut()


async def _copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await source.read(65_536):
            target.write(data)
            await target.drain()


async def next_of(bus: ZmqBus) -> tuple[str, object]:
    return await asyncio.wait_for(bus.receive(), 5)


async def first_of(lost: asyncio.Queue[str]) -> str:
    return await asyncio.wait_for(lost.get(), 10)


async def met(hub: ZmqBus, peer: ZmqBus, endpoint: str) -> None:
    peer.connect("hub", endpoint)
    peer.send("hub", Registered(1))
    assert (await next_of(hub))[1] == Registered(1)


async def test_a_dialler_learns_of_the_end_of_the_connections_that_it_watches() -> None:
    hub, other, peer = ZmqBus("hub", "tcp://127.0.0.1:0"), ZmqBus("other", "tcp://127.0.0.1:0"), ZmqBus("peer")
    ended: asyncio.Queue[str] = asyncio.Queue()
    peer.watch_dialled({"hub"}, ended.put_nowait)
    line, unwatched = (Line(int(bus.endpoint.rpartition(":")[2])) for bus in (hub, other))
    await line.open()
    await unwatched.open()
    peer.connect("other", unwatched.endpoint)
    await met(hub, peer, line.endpoint)
    unwatched.cut()
    assert ended.empty()
    line.cut()
    assert await first_of(ended) == "hub"
    peer.send("hub", Registered(2))  # the connection is made again
    assert (await next_of(hub))[1] == Registered(2)
    peer.redial("hub", unwatched.endpoint)
    assert await first_of(ended) == "hub" and ended.empty()
    for each in (line, unwatched, hub, other, peer):
        await each.close()


async def test_a_cut_between_living_peers_loses_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lost_peers, "RETURN_S", 1.0)  # however busy this machine is
    hub, peer = ZmqBus("hub", "tcp://127.0.0.1:0"), ZmqBus("peer")
    lost: asyncio.Queue[str] = asyncio.Queue()
    hub.watch(lost.put_nowait)
    line = Line(int(hub.endpoint.rpartition(":")[2]))
    await line.open()
    await met(hub, peer, line.endpoint)
    line.cut()
    await asyncio.sleep(1.3)
    assert (line.made, lost.empty()) == (2, True)
    hub.send("peer", Registered(2))  # the new connection bears the old name
    assert await next_of(peer) == ("hub", Registered(2))
    await line.close()
    await peer.close()
    await hub.close()


async def test_a_peer_that_needs_longer_to_come_back_is_lost_and_heard_again() -> None:
    hub, peer = ZmqBus("hub", "tcp://127.0.0.1:0"), ZmqBus("peer")
    lost: asyncio.Queue[str] = asyncio.Queue()
    hub.watch(lost.put_nowait)
    line = Line(int(hub.endpoint.rpartition(":")[2]))
    await line.open()
    at = int(line.endpoint.rpartition(":")[2])
    await met(hub, peer, line.endpoint)
    await line.close()
    with socket.socket() as kept:  # meanwhile the system gives the port to nobody
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        kept.bind(("127.0.0.1", at))
        assert await first_of(lost) == "peer"
        await line.open(at)
    peer.send("hub", Registered(2))
    assert await next_of(hub) == ("peer", Registered(2))
    assert lost.empty()
    await line.close()
    await peer.close()
    await hub.close()


async def test_kill_9_is_noticed(tmp_path: Path) -> None:
    program = (
        "import asyncio, sys\n"
        "from cohort.common.messages import Registered\n"
        "from cohort.common.transport.zmq_bus import ZmqBus\n"
        "async def main():\n"
        "    bus = ZmqBus('victim'); bus.connect('hub', sys.argv[1]); bus.send('hub', Registered(1))\n"
        "    await bus.receive()\n"
        "asyncio.run(main())\n"
    )
    hub = ZmqBus("hub", f"ipc://{tmp_path}/hub.sock")
    lost: asyncio.Queue[str] = asyncio.Queue()
    hub.watch(lost.put_nowait)
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", program, hub.endpoint)
    assert (await asyncio.wait_for(hub.receive(), 30))[0] == "victim"
    os.kill(process.pid, signal.SIGKILL)
    assert await first_of(lost) == "victim"
    await process.wait()
    await hub.close()


async def test_probes_reach_no_living_peer_as_messages() -> None:
    hub, peer, other = ZmqBus("hub", "tcp://127.0.0.1:0"), ZmqBus("peer"), ZmqBus("other")
    lost: asyncio.Queue[str] = asyncio.Queue()
    hub.watch(lost.put_nowait)
    await met(hub, peer, hub.endpoint)
    await met(hub, other, hub.endpoint)
    await other.close()
    assert await first_of(lost) == "other"
    hub.send("peer", Registered(3))
    assert await next_of(peer) == ("hub", Registered(3))
    assert (peer.counters.received, peer.counters.malformed) == (1, 0)
    await peer.close()
    await hub.close()
