"""What both KV links promise, between real processes. UCX runs over each of its host paths."""

from __future__ import annotations

import asyncio
import importlib.util
import signal
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
import pytest_asyncio

from tests.examples import another_of_its_kind

from .links import LinkProcess, crc_of

MB = 1 << 20
pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.pipeline]
needs_ucx = pytest.mark.skipif(importlib.util.find_spec("ucxx") is None, reason="ucxx is not installed")

KINDS = [
    pytest.param(("zmq", {}), id="zmq"),
    pytest.param(("ucx", {}), id="ucx", marks=needs_ucx),
    pytest.param(("ucx", {"UCX_TLS": "tcp,self"}), id="ucx-tcp", marks=needs_ucx),
    pytest.param(("ucx", {"UCX_TLS": "posix,self"}), id="ucx-no-cma", marks=[needs_ucx, another_of_its_kind()]),
]

Start = Callable[[], Awaitable[LinkProcess]]


class Pool:
    """Processes outlive a test unless it killed them; starting one costs more than most tests."""

    def __init__(self, kind: str, environment: dict[str, str]) -> None:
        self.kind = kind
        self.environment = environment
        self.idle: list[LinkProcess] = []
        self.used: list[LinkProcess] = []

    async def start(self) -> LinkProcess:
        fresh = self.idle.pop() if self.idle else await LinkProcess.start(self.kind, **self.environment)
        fresh.address = (await fresh.ask("address"))["address"]
        self.used.append(fresh)
        return fresh


@pytest_asyncio.fixture(params=KINDS, scope="module", loop_scope="module")
async def pool(request: pytest.FixtureRequest) -> AsyncIterator[Pool]:
    kind, environment = request.param
    pool = Pool(kind, environment)
    yield pool
    for peer in pool.idle:
        await peer.end()


@pytest_asyncio.fixture(loop_scope="module")
async def start(pool: Pool) -> AsyncIterator[Start]:
    yield pool.start
    for peer in pool.used:
        if peer.process.returncode is not None or peer.killed:
            await peer.end()
            continue
        stats = await peer.ask("stats")
        assert (stats["stranded"], stats["receiving"]) == (0, 0), stats
        pool.idle.append(peer)
    pool.used.clear()


async def transfer(sender: LinkProcess, receiver: LinkProcess, tag: int, nbytes: int) -> None:
    """One transfer that must succeed, with the receive posted first."""
    address = (await receiver.ask("address"))["address"]
    receive = await receiver.begun_receive(tag=tag, nbytes=nbytes)
    sent = await sender.ask("send", peer=address, tag=tag, seed=tag, nbytes=nbytes)
    received = await receive
    assert "error" not in sent, sent
    assert received.get("crc") == crc_of(tag, nbytes), received


async def test_sizes_orders_and_buffers(start: Start) -> None:
    a, b = await start(), await start()
    for tag, nbytes in enumerate((1, 8, 4096, 70_001, 3 * MB + 5)):
        await transfer(a, b, tag, nbytes)  # receive posted before the data
    for tag, nbytes in enumerate((1, 4096, 3 * MB + 5), start=100):  # and after
        _, sending = a.begin("send", peer=b.address, tag=tag, seed=tag, nbytes=nbytes)
        await asyncio.sleep(0.1)
        received = await b.ask("receive", tag=tag, nbytes=nbytes)
        assert received["crc"] == crc_of(tag, nbytes)
        assert "error" not in await sending
    sends = [a.begin("send", peer=b.address, tag=t, seed=t, nbytes=MB)[1] for t in range(300, 308)]
    receives = {t: b.begin("receive", tag=t, nbytes=MB)[1] for t in reversed(range(300, 308))}
    for tag, receive in receives.items():
        received = await receive
        assert received.get("crc") == crc_of(tag, MB), received
    assert [answer for answer in await asyncio.gather(*sends) if "error" in answer] == []


async def test_another_length_is_an_error(start: Start) -> None:
    a, b = await start(), await start()
    for tag, (sent, expected) in enumerate([(1000, 2000), (2000, 1000), (2 * MB, 3 * MB), (3 * MB, 2 * MB)]):
        receive = await b.begun_receive(tag=tag, nbytes=expected, timeout_s=3.0)
        a.begin("send", peer=b.address, tag=tag, seed=0, nbytes=sent, timeout_s=3.0)
        answer = await receive
        assert answer["error"] == "TransferError", answer
    await transfer(a, b, 99, MB)


async def test_receive_without_sender_times_out_and_late_bytes_are_discarded(start: Start) -> None:
    a, b = await start(), await start()
    answer = await b.ask("receive", tag=1, nbytes=4 * MB, timeout_s=0.3)
    assert answer["error"] == "TransferTimeout"
    assert 0.25 < answer["took_s"] < 1.5
    late = await b.ask("receive", tag=2, nbytes=4 * MB, timeout_s=0.1)
    assert late["error"] == "TransferTimeout"
    await a.ask("send", peer=b.address, tag=2, seed=5, nbytes=4 * MB, timeout_s=0.5)
    await transfer(a, b, 3, MB)  # behind the word that the offer is withdrawn
    await b.is_silent(2)
    await transfer(a, b, 2, 4 * MB)  # the same tag works again


async def test_send_without_receiver_times_out_and_is_withdrawn(start: Start) -> None:
    a, b = await start(), await start()
    await transfer(a, b, 1, MB)
    answer = await a.ask("send", peer=b.address, tag=7, seed=7, nbytes=8 * MB, timeout_s=0.4)
    assert answer["error"] == "TransferTimeout", answer
    assert answer["took_s"] < 2.0
    answer = await b.ask("receive", tag=7, nbytes=8 * MB, timeout_s=0.4)
    assert "TransferError" in answer["kinds"], answer  # that offer is withdrawn
    await transfer(a, b, 8, 8 * MB)


async def test_cancelled_receive_is_silent(start: Start) -> None:
    a, b = await start(), await start()
    number, answer = b.begin("receive", tag=1, nbytes=8 * MB)
    await b.ask("cancel", task=number)
    assert (await answer)["error"] == "CancelledError"
    await a.ask("send", peer=b.address, tag=1, seed=1, nbytes=8 * MB, timeout_s=0.5)
    await b.is_silent(1)
    await transfer(a, b, 2, MB)


@pytest.mark.parametrize("after_s", [0.0, pytest.param(0.01, marks=another_of_its_kind())])
async def test_sender_killed_under_way(start: Start, after_s: float) -> None:
    a, b, c = await start(), await start(), await start()
    await transfer(a, b, 1, MB)
    receives = [await b.begun_receive(tag=tag, nbytes=64 * MB, timeout_s=0.8) for tag in (2, 3, 4)]
    for tag in (2, 3, 4):
        a.begin("send", peer=b.address, tag=tag, seed=tag, nbytes=64 * MB)
    await asyncio.sleep(0.15 + after_s)
    a.kill()
    for receive, tag in zip(receives, (2, 3, 4), strict=True):
        answer = await asyncio.wait_for(receive, 10.0)
        if "error" in answer:
            assert "TransferError" in answer["kinds"], answer
            assert answer["took_s"] < 5.0
        else:
            assert answer["crc"] == crc_of(tag, 64 * MB)  # it was through already
    await transfer(c, b, 10, 4 * MB)
    await transfer(b, c, 11, 4 * MB)
    for tag in (2, 3, 4):
        await b.is_silent(tag)


@pytest.mark.parametrize("after_s", [pytest.param(0.0, marks=another_of_its_kind()), 0.01])
async def test_receiver_killed_under_way(start: Start, after_s: float) -> None:
    a, b, c = await start(), await start(), await start()
    await transfer(a, b, 1, MB)
    for tag in (2, 3, 4):
        b.begin("receive", tag=tag, nbytes=64 * MB)
    sends = [a.begin("send", peer=b.address, tag=t, seed=t, nbytes=64 * MB, timeout_s=0.8)[1] for t in (2, 3, 4, 5)]
    await asyncio.sleep(0.15 + after_s)
    b.kill()
    answers = await asyncio.wait_for(asyncio.gather(*sends), 10.0)
    assert "error" in answers[-1], "nobody received that one"
    for answer in answers:
        if "error" in answer:
            assert "TransferError" in answer["kinds"], answer
            assert answer["took_s"] < 4.5
    await transfer(a, c, 10, 4 * MB)
    await transfer(c, a, 11, 4 * MB)
    assert (await a.ask("stats"))["stranded"] == 0


async def test_restarted_peer_has_a_new_address(start: Start) -> None:
    a, b = await start(), await start()
    await transfer(a, b, 1, MB)
    b.kill()
    await b.process.wait()
    again = await start()
    assert again.address != b.address
    await transfer(a, again, 1, MB)
    answer = await a.ask("send", peer=b.address, tag=2, seed=0, nbytes=MB, timeout_s=0.5)
    assert "TransferError" in answer["kinds"]


async def test_idle_and_waiting_cost_nothing(start: Start) -> None:
    a, b = await start(), await start()
    await transfer(a, b, 1, MB)
    await transfer(b, a, 2, MB)
    number, waiting = b.begin("receive", tag=3, nbytes=MB)
    for used in await asyncio.gather(*(each.ask("cpu", for_s=0.5) for each in (a, b))):
        assert used["cpu_s"] < 0.025
    await b.ask("cancel", task=number)
    assert (await waiting)["error"] == "CancelledError"


async def test_stopped_receiver_strands_a_send_until_it_answers(start: Start) -> None:
    a, b = await start(), await start()
    await transfer(a, b, 1, MB)
    b.signal(signal.SIGSTOP)
    answer = await a.ask("send", peer=b.address, tag=2, seed=2, nbytes=16 * MB, timeout_s=0.5)
    assert "TransferTimeout" in answer["kinds"], answer
    assert answer["took_s"] < 4.0
    b.signal(signal.SIGCONT)
    assert "error" not in await a.ask("settled", timeout_s=5.0)
    assert (await a.ask("stats"))["stranded"] == 0
    await transfer(a, b, 3, MB)


async def test_stalled_sender_is_silenced(start: Start, pool: Pool) -> None:
    """A sender that stops in the middle and goes on later finds nobody to write to. UCX cannot recall bytes under way
    over TCP: the receiver tears its worker down and has a new address."""
    a, b = await start(), await start()
    await transfer(a, b, 1, MB)
    rebuilt = (await b.ask("stats"))["rebuilt"]
    receive = await b.begun_receive(tag=2, nbytes=256 * MB, timeout_s=0.3)
    other = await b.begun_receive(tag=3, nbytes=MB, timeout_s=20.0)
    send = await a.begun("send", peer=b.address, tag=2, seed=2, nbytes=256 * MB, timeout_s=0.5)
    await asyncio.sleep(0.05)
    a.signal(signal.SIGSTOP)
    answer = await asyncio.wait_for(receive, 15.0)
    a.signal(signal.SIGCONT)
    if "error" in answer:
        assert answer["error"] == "TransferTimeout", answer
    else:
        assert answer["crc"] == crc_of(2, 256 * MB)  # through before the stop, or pulled by the receiver regardless
    await asyncio.wait_for(send, 15.0)
    if (await b.ask("stats"))["rebuilt"] > rebuilt:
        assert (await other)["error"] == "TransferError"
        assert (await b.ask("address"))["address"] != b.address
    else:
        await a.ask("send", peer=b.address, tag=3, seed=3, nbytes=MB)
        assert "error" not in await other
    await transfer(a, b, 4, 4 * MB)
    await transfer(b, a, 5, 4 * MB)
    await b.is_silent(2)


async def test_a_link_is_closed_while_bytes_arrive(start: Start) -> None:
    """Neither process dies of it. UCX aborts one that tears a worker down while it reads a peer's memory."""
    a, b = await start(), await start()
    await transfer(a, b, 1, MB)
    send = await a.begun("send", peer=b.address, tag=2, seed=2, nbytes=256 * MB, timeout_s=0.1)
    receive = await b.begun_receive(tag=2, nbytes=256 * MB)
    assert "error" not in await b.ask("close")
    await asyncio.wait_for(asyncio.gather(send, receive), 15.0)  # through before, or not
    await b.end()
    assert b.process.returncode == 0


@needs_ucx
async def test_ucx_runs_under_uvloop() -> None:
    a, b = await asyncio.gather(*(LinkProcess.start("ucx", loop="uvloop") for _ in range(2)))
    try:
        await transfer(a, b, 1, 16 * MB)
        assert (await a.ask("cpu", for_s=0.5))["cpu_s"] < 0.025
    finally:
        await a.end()
        await b.end()
