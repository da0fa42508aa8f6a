from __future__ import annotations

import array
from typing import Any

import numpy as np
import pytest

from cohort.common.errors import TransferError
from cohort.common.transport.buffers import HostStaging, region_of


@pytest.mark.parametrize(
    "buffer",
    [
        bytearray(b"abcd"),
        memoryview(bytearray(b"abcd")),
        np.frombuffer(bytearray(b"abcd"), np.uint8).reshape(2, 2),
        array.array("I", [0x64636261]),
    ],
    ids=["bytearray", "memoryview", "numpy", "array"],
)
def test_region_is_the_memory_itself(buffer: Any) -> None:
    region = region_of(buffer, writable=True)
    assert (region.nbytes, region.on_device) == (4, False)
    assert bytes(region.host_view()) == b"abcd"
    region.host_view()[0] = ord("X")
    assert memoryview(buffer).tobytes() == b"Xbcd"


def test_read_only_memory_can_be_sent_only() -> None:
    assert bytes(region_of(b"abcd", writable=False).host_view()) == b"abcd"
    with pytest.raises(TransferError, match="read-only"):
        region_of(b"abcd", writable=True)


def test_unusable_buffers_are_refused() -> None:
    with pytest.raises(TransferError, match="contiguous"):
        region_of(np.zeros((4, 4))[:, 1], writable=False)
    with pytest.raises(TransferError, match="no buffer"):
        region_of(7, writable=False)


def test_empty() -> None:
    assert region_of(bytearray(), writable=True).nbytes == 0


def test_torch_tensors_of_every_type() -> None:
    torch = pytest.importorskip("torch")
    for dtype in (torch.uint8, torch.bfloat16, torch.float32):
        tensor = torch.arange(12).to(dtype).reshape(3, 4)
        region = region_of(tensor, writable=True)
        assert (region.pointer, region.nbytes) == (tensor.data_ptr(), 12 * tensor.element_size())
        assert bytes(region.host_view()) == tensor.view(torch.uint8).numpy().tobytes()
    blocks = torch.arange(24, dtype=torch.uint8).reshape(6, 4)
    assert bytes(region_of(blocks[2:4], writable=True).host_view()) == bytes(range(8, 16))
    with pytest.raises(TransferError, match="contiguous"):
        region_of(blocks[:, 1], writable=True)


class _DeviceArray:
    def __init__(self, shape: tuple[int, ...], strides: tuple[int, ...] | None) -> None:
        self.__cuda_array_interface__ = {
            "shape": shape,
            "typestr": "<f4",
            "data": (4096, False),
            "strides": strides,
            "version": 3,
        }


def test_device_arrays_are_described_not_touched() -> None:
    region = region_of(_DeviceArray((2, 3), None), writable=True)
    assert (region.pointer, region.nbytes, region.on_device) == (4096, 24, True)
    assert region_of(_DeviceArray((2, 3), (12, 4)), writable=True).nbytes == 24
    with pytest.raises(TransferError, match="contiguous"):
        region_of(_DeviceArray((2, 3), (16, 4)), writable=True)
    with pytest.raises(TransferError, match="host memory"):
        HostStaging(_DeviceArray((2, 3), None), writable=False)
