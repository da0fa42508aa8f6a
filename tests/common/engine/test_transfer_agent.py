"""Runs side by side: what is sent, gathered, checked and reported, and what happens when something fails half way.

Two agents over a link that a test holds in its hand, and over real ZeroMQ links in one process.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client import CollectorRegistry

from cohort.common.engine import transfer_agent, transfer_memory
from cohort.common.engine.free_memory import FreeMemory
from cohort.common.engine.kv_tensors import KvTensors
from cohort.common.engine.run_checksum import JOINED
from cohort.common.engine.transfer_agent import TransferAgent
from cohort.common.engine.transfer_memory import CacheMemory, Message, Slots
from cohort.common.errors import BufferStranded, TransferError, TransferTimeout
from cohort.common.machines.effects import ReceiveRuns, Run, SendRuns
from cohort.common.messages import KvChunk
from cohort.common.metrics import MetricFactory, TransferMetrics
from cohort.common.transport.zmq_link import ZmqLink
from cohort.common.types import Attempt, KvGeometry

GEOMETRY = KvGeometry(num_layers=3, num_kv_heads=2, head_dim=4, dtype_bytes=4, block_size=8)
BLOCKS = 24
LEASE = 7
TIMEOUT_S = 0.3


class Clock:
    def now_s(self) -> float:
        return time.monotonic()


class HeldLink:
    """Sends meet receives by tag; the bytes move when the test lets them."""

    name = "held"

    def __init__(self, peers: dict[bytes, HeldLink], address: bytes) -> None:
        self._peers, self._address = peers, address
        peers[address] = self
        self.posted: dict[int, tuple[memoryview, asyncio.Future[None]]] = {}
        self.going: list[int] = []  # tags under way, in the order they began
        self.most = 0  # at once
        self._now = 0
        self.fails: dict[int, Exception] = {}
        self.gate = asyncio.Event()
        self.gate.set()
        self.flip = False

    def address(self) -> bytes:
        return self._address

    async def send(self, peer: bytes, tag: int, buffer: Any, *, timeout_s: float) -> None:
        self.going.append(tag)
        self._now += 1
        self.most = max(self.most, self._now)
        try:
            async with asyncio.timeout(timeout_s):
                await self.gate.wait()
                if tag in self.fails:
                    raise self.fails[tag]
                there = self._peers[peer]
                while tag not in there.posted:  # noqa: ASYNC110
                    await asyncio.sleep(0)
                target, done = there.posted.pop(tag)
                source = memoryview(buffer).cast("B")
                assert len(source) == len(target)
                target[:] = source
                if self.flip:
                    target[3] ^= 1
                done.set_result(None)
        except TimeoutError:
            raise TransferTimeout("not taken") from None
        finally:
            self._now -= 1

    async def receive(self, tag: int, buffer: Any, *, timeout_s: float) -> None:
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.posted[tag] = (memoryview(buffer).cast("B"), done)
        try:
            async with asyncio.timeout(timeout_s):
                await done
        except TimeoutError:
            raise TransferTimeout("did not arrive") from None
        finally:
            self.posted.pop(tag, None)

    def forget(self, peer: bytes) -> None:
        return None

    async def close(self) -> None:
        return None


class End:
    """One worker's agent, its cache and what it reported."""

    def __init__(self, link: Any, *, on_device: bool = False, runs_at_once: int = 16, checksums: bool = True) -> None:
        device = torch.device("cpu")
        self.kv = KvTensors(GEOMETRY, num_blocks=BLOCKS, host_blocks=4, dtype=torch.float32, device=device)
        self.kv.blocks.copy_(torch.randn_like(self.kv.blocks))
        self.memory = CacheMemory(self.kv)
        self.memory.on_device = on_device
        self.link = link
        self.sent: list[str | None] = []
        self.received: list[str | None] = []
        self.announced: list[KvChunk] = []
        self.other: End | None = None
        self.agent = TransferAgent(
            {link.name: link},
            self.memory,
            checksums=checksums,
            run_timeout_s=TIMEOUT_S,
            runs_at_once=runs_at_once,
            clock=Clock(),
            metrics=TransferMetrics(MetricFactory(CollectorRegistry(), model_name="m", instance="w")),
            announce=self._announce,
            on_sent=lambda lease, error: self.sent.append(error),
            on_received=lambda lease, round_, error: self.received.append(error),
        )

    def _announce(self, peer: str, chunk: KvChunk) -> None:
        self.announced.append(chunk)
        if self.other is not None:
            runs = tuple(Run(run.tag, 0, run.first_block, run.num_blocks, run.checksum) for run in chunk.runs)
            self.other.agent.receive(ReceiveRuns(chunk.lease_id, chunk.round, chunk.link, runs))

    def send_to(self, other: End, runs: Sequence[Run]) -> None:
        address = other.link.address()
        self.agent.send(SendRuns("there", Attempt("r", 0), LEASE, 0, self.link.name, address, tuple(runs)))

    @property
    def free_slots(self) -> int:
        return self.agent._send_slots.free + self.agent._receive_slots.free


ALL_SLOTS = 2 * transfer_memory.SLOTS


def held_ends(**options: Any) -> tuple[End, End]:
    peers: dict[bytes, HeldLink] = {}
    a, b = End(HeldLink(peers, b"a"), **options), End(HeldLink(peers, b"b"), **options)
    a.other = b
    return a, b


def scattered(count: int) -> list[Run]:
    """Single blocks, none beside another at either end."""
    return [Run(tag, 2 * tag, BLOCKS - 1 - 2 * tag, 1) for tag in range(count)]


def extents(count: int, blocks: int) -> list[Run]:
    return [Run(tag, tag * blocks, (count - 1 - tag) * blocks, blocks) for tag in range(count)]


async def until(holds: Callable[[], bool], within_s: float = 20.0) -> None:
    async with asyncio.timeout(within_s):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


def check_arrived(a: End, b: End, runs: Sequence[Run]) -> None:
    for run in runs:
        source = a.kv.blocks[run.source : run.source + run.num_blocks]
        assert torch.equal(b.kv.blocks[run.target : run.target + run.num_blocks], source)


def check_over(a: End, b: End, runs: int) -> None:
    """Every run reported once at both ends, nothing left in staging memory or under way."""
    assert (len(a.sent), len(b.received)) == (runs, runs)
    assert (a.free_slots, b.free_slots) == (ALL_SLOTS, ALL_SLOTS)
    assert not a.agent._tasks and not b.agent._tasks


# -- side by side ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("checksums", [True, False])
async def test_long_runs_go_side_by_side_up_to_the_bound(checksums: bool) -> None:
    a, b = held_ends(runs_at_once=3, checksums=checksums)
    runs = extents(6, 4)
    a.link.gate.clear()
    a.send_to(b, runs)
    await until(lambda: len(a.link.going) == 3)
    for _ in range(50):
        await asyncio.sleep(0)
    assert a.link.going == [0, 1, 2] and len(b.link.posted) == 3
    a.link.gate.set()
    await until(lambda: len(a.sent) == 6 and len(b.received) == 6 and not b.agent._tasks and not a.agent._tasks)
    assert a.link.most == 3 and a.sent == b.received == [None] * 6
    check_arrived(a, b, runs)
    check_over(a, b, 6)
    assert all(bool(run.checksum) == checksums for run in a.announced[0].runs)


async def test_all_sums_of_a_transfer_are_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = held_ends(on_device=True)
    calls: list[int] = []
    outgoing = a.memory.outgoing
    monkeypatch.setattr(
        a.memory, "outgoing", lambda ms, *, summed: calls.append(len(ms)) or outgoing(ms, summed=summed)
    )
    a.send_to(b, extents(6, 4))
    await until(lambda: len(b.received) == 6)
    assert calls == [6] and b.received == [None] * 6


async def test_sums_of_what_arrives_together_are_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the first is summed the others arrive."""
    a, b = held_ends(on_device=True)
    calls: list[int] = []
    first = threading.Event()
    sums = b.memory.sums

    def slow(messages: Sequence[Message], likes: Sequence[int]) -> list[int]:
        calls.append(len(messages))
        assert first.wait(20)
        return sums(messages, likes)

    monkeypatch.setattr(b.memory, "sums", slow)
    a.send_to(b, extents(6, 4))
    await until(lambda: len(a.sent) == 6 and len(b.agent._sums._wanted) + sum(calls) == 6)
    first.set()
    await until(lambda: len(b.received) == 6)
    assert sum(calls) == 6 and len(calls) <= 2 and b.received == [None] * 6


# -- gathered ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("checksums", [True, False])
@pytest.mark.parametrize("on_device", [True, False])
async def test_scattered_blocks_go_as_one_message(on_device: bool, checksums: bool) -> None:
    a, b = held_ends(on_device=on_device, checksums=checksums)
    before = b.kv.blocks.clone()
    runs = scattered(8)
    a.send_to(b, runs)
    await until(lambda: len(a.sent) == 8 and len(b.received) == 8 and not a.agent._tasks and not b.agent._tasks)
    assert a.link.going == [0] and a.sent == b.received == [None] * 8
    check_arrived(a, b, runs)
    untouched = sorted(set(range(BLOCKS)) - {run.target for run in runs})
    assert torch.equal(b.kv.blocks[untouched], before[untouched])
    check_over(a, b, 8)
    [chunk] = a.announced
    assert [run.checksum for run in chunk.runs[1:]] == [JOINED] * 7
    assert bool(chunk.runs[0].checksum) == checksums and not chunk.runs[0].checksum & JOINED


async def test_large_scattered_runs_in_host_memory_go_as_they_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    """There both copies would cost the processor more than as many messages do."""
    monkeypatch.setattr(transfer_agent, "_SCATTERED_BYTES", GEOMETRY.block_bytes)
    for on_device, messages in ((False, 8), (True, 1)):
        a, b = held_ends(on_device=on_device)
        a.send_to(b, scattered(8))
        await until(lambda: len(b.received) == 8 and len(a.sent) == 8)  # noqa: B023
        assert len(a.link.going) == messages and b.received == [None] * 8
        check_arrived(a, b, scattered(8))


async def test_what_staging_memory_cannot_hold_goes_as_it_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots of three blocks, four of them free: the rest is sent run by run, and nothing waits for a slot."""
    monkeypatch.setattr(transfer_agent, "SLOT_BYTES", 3 * GEOMETRY.block_bytes)
    a, b = held_ends(on_device=True)
    taken = [a.agent._send_slots.take_now() for _ in range(2)]
    runs = scattered(12)
    a.send_to(b, runs)
    await until(lambda: len(a.sent) == 12 and len(b.received) == 12 and not a.agent._tasks and not b.agent._tasks)
    assert sorted(a.link.going) == [0, 3, 6, 7, 8, 9, 10, 11]
    assert b.received == [None] * 12
    check_arrived(a, b, runs)
    for slot in taken:
        assert slot is not None
        a.agent._send_slots.give_back(slot)
    check_over(a, b, 12)


async def test_a_receiver_waits_for_a_slot_and_then_goes_on() -> None:
    a, b = held_ends(on_device=True)
    slots = [await b.agent._receive_slots.take() for _ in range(transfer_memory.SLOTS)]
    runs = scattered(8)
    a.send_to(b, runs)
    await until(lambda: a.link.going == [0])
    assert not b.link.posted
    for slot in slots:
        b.agent._receive_slots.give_back(slot)
    await until(lambda: len(b.received) == 8 and not b.agent._tasks and not a.agent._tasks)
    assert b.received == [None] * 8
    check_arrived(a, b, runs)
    check_over(a, b, 8)


async def test_no_slot_in_time_is_a_failed_transfer() -> None:
    a, b = held_ends(on_device=True)
    slots = [await b.agent._receive_slots.take() for _ in range(transfer_memory.SLOTS)]
    a.send_to(b, scattered(8))
    await until(lambda: len(a.sent) == 8 and len(b.received) == 8)
    assert all(error and "staging" in error for error in b.received) and all(a.sent)
    for slot in slots:
        b.agent._receive_slots.give_back(slot)
    await until(lambda: not b.agent._tasks)
    check_over(a, b, 8)


async def test_a_gathered_message_too_large_for_this_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    _, b = held_ends()
    monkeypatch.setattr(transfer_agent, "SLOT_BYTES", GEOMETRY.block_bytes)
    b.agent.receive(ReceiveRuns(LEASE, 0, "held", (Run(1, 0, 3, 1, 5), Run(2, 0, 9, 1, JOINED))))
    await until(lambda: len(b.received) == 2)
    assert all(error and "more than staging" in error for error in b.received)


async def test_changed_bytes_are_found_before_they_are_scattered() -> None:
    for on_device in (True, False):
        a, b = held_ends(on_device=on_device)
        a.link.flip = True
        before = b.kv.blocks.clone()
        a.send_to(b, scattered(8))
        await until(lambda: len(b.received) == 8 and len(a.sent) == 8 and not b.agent._tasks)  # noqa: B023
        assert all(error and "differ" in error for error in b.received)
        assert torch.equal(b.kv.blocks, before)
        check_over(a, b, 8)


async def test_changed_bytes_of_a_run_as_it_lies_are_found() -> None:
    a, b = held_ends()
    a.link.flip = True
    a.send_to(b, extents(3, 4))
    await until(lambda: len(b.received) == 3)
    assert all(error and "differ" in error for error in b.received)


# -- failures ----------------------------------------------------------------------------------------------------


async def test_after_the_first_failure_none_begins_any_more() -> None:
    """Six runs, two at once, to a peer that takes nothing: one deadline, not three."""
    a, _ = held_ends(runs_at_once=2)
    a.link.gate.clear()
    a.other = None
    a.send_to(a, extents(6, 4))
    await until(lambda: len(a.sent) == 6 and not a.agent._tasks)
    assert a.link.going == [0, 1] and all(a.sent)


async def test_a_failed_run_fails_alone_what_is_under_way_arrives() -> None:
    a, b = held_ends()
    a.link.fails[1] = TransferError("broken")
    a.link.gate.clear()
    runs = extents(3, 4)
    a.send_to(b, runs)
    await until(lambda: len(a.link.going) == 3)
    a.link.gate.set()
    await until(lambda: len(a.sent) == 3 and len(b.received) == 3)
    assert sorted(map(str, a.sent)) == ["None", "None", "broken"]
    assert [error for error in b.received if error] == ["did not arrive"]
    check_arrived(a, b, [runs[0], runs[2]])


@pytest.mark.parametrize("make", [lambda: scattered(8), lambda: extents(6, 4)], ids=["gathered", "side by side"])
@pytest.mark.parametrize("cancelled", ["sender", "receiver", "both"])
async def test_cancelled_in_the_middle(make: Callable[[], list[Run]], cancelled: str) -> None:
    a, b = held_ends(on_device=True)
    before = b.kv.blocks.clone()
    runs = make()
    a.link.gate.clear()
    a.send_to(b, runs)
    await until(lambda: bool(a.link.going) and bool(b.link.posted))
    if cancelled != "receiver":
        a.agent.cancel(LEASE)
    if cancelled != "sender":
        b.agent.cancel(LEASE)
    await until(lambda: not a.agent._tasks and not b.agent._tasks)
    check_over(a, b, len(runs))
    assert all(a.sent) and all(b.received)
    assert torch.equal(b.kv.blocks, before)  # and nothing arrives later
    a.link.gate.set()
    await asyncio.sleep(0.01)
    assert torch.equal(b.kv.blocks, before)


@pytest.mark.parametrize("closing", [False, True])
async def test_cancelled_before_the_first_turn(closing: bool) -> None:
    """The machine may ask for both in one breath."""
    a, b = held_ends()
    a.other = None
    a.link.gate.clear()
    a.send_to(b, extents(6, 4))
    b.agent.receive(ReceiveRuns(LEASE, 0, "held", tuple(extents(6, 4))))
    for end in (a, b):
        await end.agent.close() if closing else end.agent.cancel(LEASE)
    await until(lambda: not a.agent._tasks and not b.agent._tasks)
    assert len(a.sent) == len(b.received) == 6
    assert all(a.sent) and all(b.received)


async def test_cancelled_while_a_thread_reads_the_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The report, after which the blocks are freed, waits for the thread."""
    a, b = held_ends(on_device=True)
    began, end = threading.Event(), threading.Event()
    outgoing = a.memory.outgoing

    def slow(messages: Sequence[Message], *, summed: bool) -> list[int]:
        began.set()
        assert end.wait(20)
        return outgoing(messages, summed=summed)

    monkeypatch.setattr(a.memory, "outgoing", slow)
    a.send_to(b, scattered(8))
    await until(began.is_set)
    a.agent.cancel(LEASE)
    for _ in range(200):
        await asyncio.sleep(0)
    assert a.sent == [] and a.agent._send_slots.free < transfer_memory.SLOTS
    end.set()
    await until(lambda: len(a.sent) == 8)
    assert a.sent == ["aborted"] * 8 and a.announced == []
    assert a.agent._send_slots.free == transfer_memory.SLOTS


async def test_a_stranded_slot_stays_out_of_use_and_its_blocks_do_not() -> None:
    a, b = held_ends(on_device=True)
    a.other = None
    settled: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    a.link.fails[0] = BufferStranded("the peer neither takes nor lets go", settled)
    a.send_to(b, scattered(8))
    await until(lambda: len(a.sent) == 8)
    assert a.agent.quarantined_blocks == 0 and a.agent._send_slots.free == transfer_memory.SLOTS - 1
    settled.set_result(None)
    await until(lambda: a.agent._send_slots.free == transfer_memory.SLOTS)


async def test_stranded_blocks_are_reported_once_the_link_lets_go() -> None:
    a, b = held_ends()
    a.other = None
    settled: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    a.link.fails[0] = BufferStranded("the peer neither takes nor lets go", settled)
    a.send_to(b, extents(1, 8))
    await until(lambda: a.agent.quarantined_blocks == 8)
    a.agent.cancel(LEASE)
    for _ in range(50):
        await asyncio.sleep(0)
    assert a.sent == []
    settled.set_result(None)
    await until(lambda: len(a.sent) == 1 and a.agent.quarantined_blocks == 0)


async def test_a_device_that_fails_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """At either end: a run that is not reported keeps its blocks for ever."""

    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("CUDA error")

    for name, runs in (("sums", extents(3, 4)), ("scatter", scattered(8))):
        a, b = held_ends(on_device=True)
        monkeypatch.setattr(b.memory, name, broken)
        a.send_to(b, runs)
        await until(lambda: not a.agent._tasks and not b.agent._tasks and bool(b.received))  # noqa: B023
        assert all(b.received)
        check_over(a, b, len(runs))
    a, b = held_ends(on_device=True)
    monkeypatch.setattr(a.memory, "outgoing", broken)
    a.send_to(b, scattered(8))
    await until(lambda: len(a.sent) == 8)
    assert all(a.sent) and a.agent._send_slots.free == transfer_memory.SLOTS


# -- over a real link --------------------------------------------------------------------------------------------


@pytest.fixture
async def zmq_ends(tmp_path: Path) -> AsyncIterator[tuple[End, End]]:
    a, b = End(ZmqLink(f"ipc://{tmp_path}/a")), End(ZmqLink(f"ipc://{tmp_path}/b"))
    a.other = b
    yield a, b
    await a.agent.close()
    await b.agent.close()


async def test_over_zmq(zmq_ends: tuple[End, End]) -> None:
    a, b = zmq_ends
    for runs in (scattered(8), extents(6, 4), [Run(40, 1, 2, 5), Run(41, 7, 20, 1), Run(42, 9, 10, 2)]):
        runs = [Run(run.tag + 100 * len(b.received), run.source, run.target, run.num_blocks) for run in runs]
        done = len(b.received) + len(runs)
        a.send_to(b, runs)
        await until(lambda: len(a.sent) == done and len(b.received) == done)  # noqa: B023
        assert not any(a.sent) and not any(b.received)
        check_arrived(a, b, runs)
    await until(lambda: not a.agent._tasks and not b.agent._tasks)
    check_over(a, b, len(b.received))


async def test_the_peers_end_in_the_middle_over_zmq(zmq_ends: tuple[End, End]) -> None:
    a, b = zmq_ends
    a.other = None  # b does not post: then it is gone
    a.send_to(b, scattered(8))
    await until(lambda: bool(a.announced))
    await b.agent.close()
    await until(lambda: len(a.sent) == 8)
    assert all(a.sent) and a.agent._send_slots.free == transfer_memory.SLOTS


# -- the event loop ----------------------------------------------------------------------------------------------


async def turns_while(blocked: threading.Event, began: threading.Event) -> int:
    """How often the event loop turns while a copy is held up."""
    await until(began.is_set)
    turns = 0
    while turns < 100:
        await asyncio.sleep(0)
        turns += 1
    blocked.set()
    return turns


async def test_the_loop_turns_while_the_device_gathers_sums_and_scatters(monkeypatch: pytest.MonkeyPatch) -> None:
    for end, name in ((0, "outgoing"), (1, "scatter"), (1, "sums")):
        ends = held_ends(on_device=True)
        began, free = threading.Event(), threading.Event()
        real = getattr(ends[end].memory, name)

        def slow(*given: Any, real: Any = real, began: Any = began, free: Any = free, **named: Any) -> Any:
            began.set()
            assert free.wait(20)  # as a copy that the device has not finished; the test frees it between turns
            return real(*given, **named)

        monkeypatch.setattr(ends[end].memory, name, slow)
        if name == "sums":
            ends[0].send_to(ends[1], extents(3, 4))
        else:
            ends[0].send_to(ends[1], scattered(8))
        assert await turns_while(free, began) == 100
        await until(lambda: bool(ends[1].received) and not ends[1].agent._tasks)  # noqa: B023
        assert not any(ends[1].received)


async def test_the_loop_turns_while_the_driver_counts_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    began, free = threading.Event(), threading.Event()

    def slow(device: torch.device) -> tuple[int, int]:
        began.set()
        assert free.wait(20)
        return 5, 9

    monkeypatch.setattr(torch.cuda, "mem_get_info", slow)
    memory = FreeMemory(torch.device("cuda", 0))
    asking = asyncio.create_task(memory.refresh())
    assert await turns_while(free, began) == 100
    await asking
    assert memory.bytes == 5


async def test_the_processors_memory_is_counted() -> None:
    memory = FreeMemory(torch.device("cpu"))
    await memory.refresh()
    assert memory.bytes > 0


async def test_slots_are_handed_on_and_never_lost() -> None:
    slots = Slots([1])
    assert await slots.take() == 1 and slots.take_now() is None
    first, second = asyncio.create_task(slots.take()), asyncio.create_task(slots.take())
    await asyncio.sleep(0)
    slots.give_back(1)
    first.cancel()  # after it was handed the slot
    await asyncio.wait([first])
    assert await second == 1
    slots.give_back(1)
    assert slots.free == 1
