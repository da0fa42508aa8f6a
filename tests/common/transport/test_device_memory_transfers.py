"""What links do with memory that the processor does not see, tried on host memory declared to be a GPU's."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import pytest

from cohort.common.errors import TransferError
from cohort.common.transport import ucx_link
from cohort.common.transport.buffers import HostStaging, Region, region_of
from cohort.common.transport.kv_link import KvLink


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


def test_a_receive_buffer_is_not_copied_out() -> None:
    tensor = DeviceTensor(b"abcdefgh")
    staging = HostStaging(tensor, writable=True)
    staging.view[:] = b"12345678"
    assert (bytes(tensor.content), tensor.copied_out) == (b"abcdefgh", 0)
    staging.finish_receive()
    assert bytes(tensor.content) == b"12345678"


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
            look = link._look

            def counted(look: Any = look) -> None:
                nonlocal looks
                looks += 1
                look()

            monkeypatch.setattr(link, "_look", counted)
            sent, received = bytearray(b"x" * 4096), bytearray(4096)
            receiving = asyncio.create_task(link.receive(7, received, timeout_s=10.0))
            await asyncio.sleep(0.5)
            waiting = looks
            await link.send(link.address(), 7, sent, timeout_s=10.0)
            await receiving
            assert received == sent
            assert least <= waiting <= most
            monkeypatch.setattr(link, "_look", look)
    finally:
        await link.close()


def _ucx() -> Any:
    try:
        link: KvLink = ucx_link.UcxLink()
    except TransferError as error:
        pytest.skip(str(error))
    return link
