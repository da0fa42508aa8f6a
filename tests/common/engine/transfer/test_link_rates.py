"""What links carry, learned; and how many bytes may be under way."""

from __future__ import annotations

import asyncio

import pytest

from cohort.common.engine.transfer.transfer_agent import FIRST_WINDOW_BYTES, LinkRates
from tests.common.engine.transfer_ends import extents, held_ends, until

MB = 1 << 20


class Measured:
    def __init__(self, run_timeout_s: float = 4.0) -> None:
        self.now_s = 0.0
        self.told: list[tuple[str, str, float]] = []
        self.rates = LinkRates(run_timeout_s, lambda: self.now_s, lambda *told: self.told.append(told))

    async def move(self, nbytes: int, taken_s: float, peer: str = "there") -> None:
        await self.rates.begin(peer, "ucx", nbytes)
        self.now_s += taken_s
        self.rates.end(peer, "ucx", nbytes, arrived=True)


async def test_a_rate_is_bytes_over_the_time_in_use_and_follows_the_link() -> None:
    link = Measured()
    await link.move(MB, 0.1)
    link.now_s += 100.0  # idle
    await link.move(MB, 0.1)
    assert link.rates.rate("there", "ucx") == pytest.approx(10 * MB, rel=0.02)
    assert link.rates.rate("elsewhere", "ucx") == link.rates.rate("there", "zmq") == 0.0
    for _ in range(200):
        await link.move(MB, 1.0)
    assert link.rates.rate("there", "ucx") == pytest.approx(MB, rel=0.1)
    peers = {(peer, name) for peer, name, _ in link.told}
    assert peers == {("there", "ucx")} and 2 < len(link.told) < 40, "told when it differs, not each time"
    assert link.told[-1][2] == pytest.approx(MB, rel=0.2)


async def test_side_by_side_messages_share_the_time() -> None:
    link = Measured()
    for _ in range(4):
        await link.rates.begin("there", "ucx", MB)
    for _ in range(4):
        link.now_s += 0.25
        link.rates.end("there", "ucx", MB, arrived=True)
    assert link.rates.rate("there", "ucx") == pytest.approx(4 * MB, rel=0.02)


async def test_a_dead_peer_is_not_a_slow_link() -> None:
    link = Measured()
    await link.rates.begin("there", "ucx", MB)
    link.now_s += 4.0
    link.rates.end("there", "ucx", MB, arrived=False)
    assert link.told == []
    await link.move(MB, 0.1)
    assert link.rates.rate("there", "ucx") == pytest.approx(10 * MB, rel=0.02)


async def test_so_many_bytes_are_under_way_as_arrive_in_time_and_the_rest_waits_in_order() -> None:
    link, went = Measured(run_timeout_s=4.0), []

    async def one(number: int) -> None:
        await link.rates.begin("there", "ucx", 2 * MB)
        went.append(number)

    tasks = [asyncio.create_task(one(number)) for number in range(8)]
    await asyncio.sleep(0)
    assert went == list(range(FIRST_WINDOW_BYTES // (2 * MB)))
    tasks[5].cancel()
    link.now_s += 8.0  # 1 MB/s: in a quarter of the deadline half a message; one may always go
    for _ in range(3):
        link.rates.end("there", "ucx", 2 * MB, arrived=True)
    await asyncio.sleep(0)
    assert went == [0, 1, 2, 3]
    for expected in (4, 6, 7):
        link.rates.end("there", "ucx", 2 * MB, arrived=True)
        await asyncio.sleep(0.001)
        assert went[-1] == expected
    link.rates.end("there", "ucx", 2 * MB, arrived=True)
    await link.move(MB, 1.0)


async def test_runs_that_wait_their_turn_are_not_given_up_while_others_arrive() -> None:
    """Six runs, one every 0.1 s, and 0.3 s of patience: the last arrives after 0.6 s."""
    a, b = held_ends(runs_at_once=16)
    runs = extents(6, 4)
    held = b.link.receive
    b.link.gate.clear()

    async def in_turn(peer: bytes, tag: int, buffer: object, *, timeout_s: float) -> None:
        await asyncio.sleep(0.1 * (tag + 1))
        target, done = b.link.posted.pop(tag)
        target[:] = memoryview(buffer).cast("B")  # type: ignore[arg-type]
        done.set_result(None)

    a.link.send = in_turn  # type: ignore[method-assign]
    b.link.receive = lambda tag, buffer, *, timeout_s: held(tag, buffer, timeout_s=5.0)  # type: ignore[method-assign]
    a.send_to(b, runs)
    await until(lambda: len(b.received) == 6)
    assert b.received == [None] * 6 and a.sent == [None] * 6
