"""What links do with memory that the processor does not see, tried on host memory declared to be a GPU's."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from pathlib import Path
from typing import Any

import pytest

from cohort.common.errors import TransferError
from cohort.common.transport import ucx_link
from cohort.common.transport.buffers import HostStaging, Region, region_of
from cohort.common.transport.kv_link import KvLink
from cohort.common.transport.zmq_link import ZmqLink


class DeviceTensor:
    """As much of a torch tensor on a GPU as a link touches."""

    is_cuda = True
    shape = (8,)

    def __init__(self, content: bytes) -> None:
        self.content = bytearray(content)
        self.copied_out = 0

    def is_contiguous(self) -> bool:
        return True

    def data_ptr(self) -> int:
        return 4096  # never to be read

    def numel(self) -> int:
        return len(self.content)

    def element_size(self) -> int:
        return 1

    def new_empty(self, shape: tuple[int, ...], *, device: str, pin_memory: bool) -> HostTensor:
        assert (shape, device, pin_memory) == ((8,), "cpu", True)
        return HostTensor(self)

    def copy_(self, source: HostTensor) -> None:
        self.content[:] = source.memory


class HostTensor:
    """Its page-locked copy; a buffer like any other to a link."""

    def __init__(self, origin: DeviceTensor) -> None:
        self.origin = origin
        self.memory = bytearray(8)

    def copy_(self, source: DeviceTensor) -> None:
        source.copied_out += 1
        self.memory[:] = source.content


@pytest.fixture(autouse=True)
def host_tensors_are_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    def region(buffer: Any, *, writable: bool) -> Region:
        if isinstance(buffer, HostTensor):
            return dataclasses.replace(region_of(buffer.memory, writable=writable), owner=buffer)
        return region_of(buffer, writable=writable)

    monkeypatch.setattr("cohort.common.transport.buffers.region_of", region)


def test_a_send_buffer_is_copied_out_once() -> None:
    tensor = DeviceTensor(b"abcdefgh")
    staging = HostStaging(tensor, writable=False)
    assert (bytes(staging.view), tensor.copied_out) == (b"abcdefgh", 1)


async def test_a_receive_buffer_is_not_copied_out() -> None:
    tensor = DeviceTensor(b"abcdefgh")
    staging = HostStaging(tensor, writable=True)
    staging.view[:] = b"12345678"
    assert (bytes(tensor.content), tensor.copied_out) == (b"abcdefgh", 0)
    await staging.finish_receive()
    assert bytes(tensor.content) == b"12345678"


class SlowTensor(DeviceTensor):
    """One kind of its copies ends when the test says so."""

    def __init__(self, content: bytes, held: str = "") -> None:
        super().__init__(content)
        self.held = held
        self.began, self.end = threading.Event(), threading.Event()

    def new_empty(self, shape: tuple[int, ...], *, device: str, pin_memory: bool) -> HostTensor:
        self._wait("out")
        return super().new_empty(shape, device=device, pin_memory=pin_memory)

    def copy_(self, source: HostTensor) -> None:
        self._wait("in")
        super().copy_(source)

    def _wait(self, kind: str) -> None:
        if kind == self.held:
            self.began.set()
            assert self.end.wait(20)


@pytest.mark.parametrize("cancelled", [False, True])
@pytest.mark.parametrize("outward", [True, False])
async def test_the_loop_turns_while_a_link_copies_between_device_and_host(
    tmp_path: Path, outward: bool, cancelled: bool
) -> None:
    """Over the link that has to; cancelled, it returns only once the copy is over."""
    link = ZmqLink(f"ipc://{tmp_path}/link")
    source, target = SlowTensor(b"abcdefgh", "out" * outward), SlowTensor(bytes(8), "in" * (not outward))
    try:
        receiving = asyncio.create_task(link.receive(1, target, timeout_s=10.0))
        sending = asyncio.create_task(link.send(link.address(), 1, source, timeout_s=10.0))
        slow, held = (source, sending) if outward else (target, receiving)
        while not slow.began.is_set():  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        if cancelled:
            held.cancel()
        for _ in range(100):
            await asyncio.sleep(0)
        assert not held.done()
        slow.end.set()
        if cancelled:
            await asyncio.wait([held])
            assert held.cancelled()
            receiving.cancel()
            await asyncio.wait([sending, receiving])
        else:
            await asyncio.gather(sending, receiving)
            assert bytes(target.content) == b"abcdefgh"
    finally:
        await link.close()


async def test_ucx_looks_by_itself_while_device_memory_is_on_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing wakes the link for half a second, and it is not asleep; on host memory it is."""
    real = ucx_link.region_of

    def on_device(buffer: Any, *, writable: bool) -> Region:
        return dataclasses.replace(real(buffer, writable=writable), on_device=True)

    link = _ucx()
    try:
        for region, least, most in ((real, 0, 40), (on_device, 100, 10**6)):
            monkeypatch.setattr(ucx_link, "region_of", region)
            looks = 0
            look = link._poll

            def counted(look: Any = look) -> None:
                nonlocal looks
                looks += 1
                look()

            monkeypatch.setattr(link, "_poll", counted)
            sent, received = bytearray(b"x" * 4096), bytearray(4096)
            receiving = asyncio.create_task(link.receive(7, received, timeout_s=10.0))
            await asyncio.sleep(0.5)
            waiting = looks
            await link.send(link.address(), 7, sent, timeout_s=10.0)
            await receiving
            assert received == sent
            assert least <= waiting <= most
            monkeypatch.setattr(link, "_poll", look)
    finally:
        await link.close()


def _ucx() -> Any:
    try:
        link: KvLink = ucx_link.UcxLink()
    except TransferError as error:
        pytest.skip(str(error))
    return link
