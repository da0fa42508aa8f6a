"""What happens to a transfer when something fails half way, and that the event loop turns meanwhile."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cohort.common.engine.transfer import transfer_memory
from cohort.common.engine.transfer.transfer_memory import Message, Slots
from cohort.common.engine.worker.engine_threads import CpuDevice, GpuDevice
from cohort.common.errors import BufferStranded, TransferError
from cohort.common.machines.effects import ReceiveRuns, Run
from tests.common.engine.transfer_ends import LEASE, check_arrived, check_over, extents, held_ends, scattered, until

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
    assert [error for error in b.received if error] == ["held: nothing arrived for 0.3 s"]
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
    host = GpuDevice(SimpleNamespace(device=torch.device("cuda", 0)))  # type: ignore[arg-type]
    asking = asyncio.create_task(host.update_free_bytes())
    assert await turns_while(free, began) == 100
    await asking
    assert host.free_bytes == 5


async def test_the_processors_memory_is_counted() -> None:
    host = CpuDevice(SimpleNamespace(device=torch.device("cpu")))  # type: ignore[arg-type]
    await host.update_free_bytes()
    assert host.free_bytes > 0


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
