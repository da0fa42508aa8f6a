from __future__ import annotations

import asyncio
import dataclasses
import sys

import pytest

from cohort.common.errors import TransferError
from cohort.common.transport.peer_process import ProcessIdentity, ProcessWatch


async def a_process() -> tuple[asyncio.subprocess.Process, ProcessIdentity]:
    program = (
        "import sys, time\n"
        "from cohort.common.transport.peer_process import ProcessIdentity\n"
        "sys.stdout.write(ProcessIdentity.own().pack().hex() + '\\n'); sys.stdout.flush(); time.sleep(60)\n"
    )
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", program, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    line = await asyncio.wait_for(process.stdout.readline(), 30)
    return process, ProcessIdentity.unpack(bytes.fromhex(line.decode()))


async def test_death_is_told_once_and_at_once() -> None:
    process, identity = await a_process()
    died = asyncio.Event()
    calls: list[int] = []

    def on_death() -> None:
        calls.append(1)
        died.set()

    assert identity.is_near()
    assert ProcessWatch(identity, asyncio.get_running_loop(), on_death).fd >= 0
    await asyncio.sleep(0.05)
    assert not died.is_set()
    process.kill()
    await asyncio.wait_for(died.wait(), 2)
    await process.wait()
    again = asyncio.Event()
    ProcessWatch(identity, asyncio.get_running_loop(), again.set)  # whoever asks later learns it too
    await asyncio.wait_for(again.wait(), 2)
    assert calls == [1]


async def test_stopped_watch_is_silent() -> None:
    process, identity = await a_process()
    calls: list[int] = []
    watching = ProcessWatch(identity, asyncio.get_running_loop(), lambda: calls.append(1))
    assert watching.fd >= 0
    watching.stop()
    watching.stop()
    process.kill()
    await process.wait()
    await asyncio.sleep(0.05)
    assert calls == []


async def test_reused_pid_counts_as_dead() -> None:
    earlier = dataclasses.replace(ProcessIdentity.own(), start_ticks=1)
    died = asyncio.Event()
    ProcessWatch(earlier, asyncio.get_running_loop(), died.set)
    await asyncio.wait_for(died.wait(), 2)


async def test_elsewhere_is_not_watched() -> None:
    own = ProcessIdentity.own()
    for elsewhere in (dataclasses.replace(own, boot=bytes(8)), dataclasses.replace(own, pid_namespace=1)):
        assert not elsewhere.is_near()
        assert ProcessWatch(elsewhere, asyncio.get_running_loop(), lambda: None).fd == -1


def test_addresses() -> None:
    own = ProcessIdentity.own()
    assert ProcessIdentity.unpack(own.pack() + b"more") == own
    assert ProcessIdentity.own() != own
    for wrong in (b"", b"x" * ProcessIdentity.SIZE):
        with pytest.raises(TransferError, match="not a link address"):
            ProcessIdentity.unpack(wrong)
