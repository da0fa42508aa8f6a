"""Runs side by side: what is sent, gathered, checked and reported; over a held link and over real ZeroMQ links."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from cohort.common.engine.transfer import transfer_agent, transfer_memory
from cohort.common.engine.transfer.run_checksum import JOINED
from cohort.common.engine.transfer.transfer_memory import Message
from cohort.common.errors import TransferError
from cohort.common.machines.effects import ReceiveRuns, Run
from cohort.common.transport.ucx_link import UcxLink
from cohort.common.transport.zmq_link import ZmqLink
from tests.common.engine.transfer_ends import (
    BLOCKS,
    GEOMETRY,
    LARGE_BLOCKS,
    LEASE,
    End,
    check_arrived,
    check_over,
    extents,
    held_ends,
    scattered,
    until,
)
from tests.common.transport.links import LinkProcess
from tests.examples import another_of_its_kind

# -- side by side ------------------------------------------------------------------------------------------------


async def test_the_connection_to_a_former_address_of_a_peer_is_given_up() -> None:
    """The same worker, started again elsewhere: once, before the first run to its new address."""
    a, b = held_ends()
    a.link._peers[b"b before"] = b.link
    for address, so_far in ((b"b before", []), (b"b", [b"b before"]), (b"b", [b"b before"])):
        a.sent.clear()
        a.send_to(address, extents(1, 2))
        await until(lambda: len(a.sent) == 1 and not b.agent._tasks)
        assert (a.sent, a.link.forgotten) == ([None], so_far)


async def test_sends_of_a_lease_are_announced_in_their_order() -> None:
    """Also when the sums of the first are made in a thread and the second's are not: its receiver would take the first
    for a repetition, and the sender would wait for it in vain."""
    a, b = held_ends(geometry=LARGE_BLOCKS)
    runs = [Run(0, 0, 8, 4), Run(1, 4, 2, 1)]
    for run in runs:
        a.send_to(b, [run])
    await until(lambda: len(a.sent) == len(b.received) == 2 and not a.agent._tasks and not b.agent._tasks)
    assert [chunk.runs[0].tag for chunk in a.announced] == [0, 1]
    check_arrived(a, b, runs)
    check_over(a, b, 2)
    assert not a.agent._announcing


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
    await until(lambda: not (a.agent._tasks or b.agent._tasks))
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
        await until(lambda: len(b.received) == 8 and len(a.sent) == 8 and not (a.agent._tasks or b.agent._tasks))  # noqa: B023
        assert all(error and "differ" in error for error in b.received)
        assert torch.equal(b.kv.blocks, before)
        check_over(a, b, 8)


async def test_changed_bytes_of_a_run_as_it_lies_are_found() -> None:
    a, b = held_ends()
    a.link.flip = True
    a.send_to(b, extents(3, 4))
    await until(lambda: len(b.received) == 3)
    assert all(error and "differ" in error for error in b.received)


# -- over a real link --------------------------------------------------------------------------------------------


def open_link(kind: str, folder: Path, name: str) -> Any:
    if kind == "zmq":
        return ZmqLink(f"ipc://{folder}/{name}")
    try:
        return UcxLink(loopback_only=True)
    except TransferError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("kind", ["zmq", "ucx"])
async def test_over_a_real_link(kind: str, tmp_path: Path) -> None:
    a, b = End(open_link(kind, tmp_path, "a")), End(open_link(kind, tmp_path, "b"))
    a.other = b
    try:
        for runs in (scattered(8), extents(6, 4), [Run(40, 1, 2, 5), Run(41, 7, 20, 1), Run(42, 9, 10, 2)]):
            runs = [Run(run.tag + 100 * len(b.received), run.source, run.target, run.num_blocks) for run in runs]
            done = len(b.received) + len(runs)
            a.send_to(b, runs)
            await until(lambda: len(a.sent) == done and len(b.received) == done)  # noqa: B023
            assert not any(a.sent) and not any(b.received)
            check_arrived(a, b, runs)
        await until(lambda: not a.agent._tasks and not b.agent._tasks)
        check_over(a, b, len(b.received))
    finally:
        await a.agent.close()
        await b.agent.close()


@pytest.mark.pipeline
@pytest.mark.parametrize(
    ("kind", "make"),
    [
        pytest.param("zmq", lambda: scattered(8), id="zmq-gathered"),
        pytest.param("ucx", lambda: extents(6, 4), id="ucx-side by side"),
        pytest.param("zmq", lambda: extents(6, 4), id="zmq-side by side", marks=another_of_its_kind()),
        pytest.param("ucx", lambda: scattered(8), id="ucx-gathered", marks=another_of_its_kind()),
    ],
)
async def test_the_peer_dies_in_the_middle(
    kind: str, make: Callable[[], list[Run]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that takes nothing and is killed, with messages large enough to wait for it."""
    monkeypatch.setattr(transfer_agent, "_SCATTERED_BYTES", 1 << 30)
    a = End(open_link(kind, tmp_path, "a"), geometry=LARGE_BLOCKS)
    peer = await LinkProcess.start(kind)
    try:
        runs = make()
        a.send_to(bytes.fromhex(peer.address), runs)
        await until(lambda: bool(a.announced))
        await asyncio.sleep(0.05)
        assert a.sent == []
        peer.kill()
        await until(lambda: len(a.sent) == len(runs) and not a.agent._tasks)
        await until(lambda: a.agent._send_slots.free == transfer_memory.SLOTS)
        assert all(a.sent) and a.agent.quarantined_blocks == 0
    finally:
        await peer.end()
        await a.agent.close()
