"""The buffers that links move: each one contiguous region of memory, wherever it lies.

Called by the links. Takes torch tensors (CPU or CUDA), NumPy arrays, anything with the buffer protocol or
`__cuda_array_interface__`. Never copies, except `HostStaging`, which is what a link without access to device memory
uses. Does not import torch.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np

from cohort.common.errors import TransferError
from cohort.common.transport.uninterrupted import in_thread


@dataclass(frozen=True, slots=True)
class Region:
    """One contiguous piece of memory. `owner` keeps it alive as long as the region exists."""

    pointer: int
    nbytes: int
    on_device: bool
    owner: object

    def host_view(self) -> memoryview:
        """Return host memory as writable bytes, without a copy."""
        if self.on_device:
            raise TransferError("device memory has no host view")
        return memoryview((ctypes.c_char * self.nbytes).from_address(self.pointer)).cast("B")


def region_of(buffer: Any, *, writable: bool) -> Region:
    """Return a buffer's memory. Raises `TransferError` for one that is not contiguous, or read-only but `writable`."""
    if hasattr(buffer, "data_ptr") and hasattr(buffer, "element_size"):  # a torch tensor
        if not buffer.is_contiguous():
            raise TransferError("a transfer needs a contiguous tensor")
        return Region(buffer.data_ptr(), buffer.numel() * buffer.element_size(), buffer.is_cuda, buffer)
    interface = getattr(buffer, "__cuda_array_interface__", None)
    if interface is not None:
        return _device_region(interface, buffer)
    try:
        view = memoryview(buffer)
    except TypeError as error:
        raise TransferError(f"a {type(buffer).__name__} is no buffer") from error
    if not view.c_contiguous:
        raise TransferError("a transfer needs a contiguous buffer")
    if writable and view.readonly:
        raise TransferError("a transfer cannot write into a read-only buffer")
    # NumPy takes read-only memory too, which ctypes' own `from_buffer` refuses.
    pointer = int(np.frombuffer(view, np.uint8).ctypes.data) if view.nbytes else 0
    return Region(pointer, view.nbytes, False, view)


def _device_region(interface: dict[str, Any], owner: object) -> Region:
    nbytes = int(interface["typestr"][2:])
    for extent in interface["shape"]:
        nbytes *= extent
    strides, expected = interface.get("strides"), int(interface["typestr"][2:])
    if strides is not None:
        for extent, stride in zip(reversed(interface["shape"]), reversed(strides), strict=True):
            if extent > 1 and stride != expected:
                raise TransferError("a transfer needs a contiguous device array")
            expected *= extent
    return Region(interface["data"][0], nbytes, True, owner)


class HostStaging:
    """A page-locked host copy of a region for links that cannot read device memory; on the host the region itself. Made
    by `of`, which copies in a thread: a copy of many blocks must not hold up the event loop."""

    def __init__(self, buffer: Any, *, writable: bool) -> None:
        """Copy device memory out, which blocks; not if `writable`, as it will be overwritten by what is received."""
        self._device_tensor: Any = None
        region = region_of(buffer, writable=writable)
        if region.on_device:
            if not hasattr(buffer, "new_empty"):
                raise TransferError("this link moves host memory and torch tensors only")
            self._device_tensor = buffer
            host = buffer.new_empty(buffer.shape, device="cpu", pin_memory=True)
            if not writable:
                host.copy_(buffer)
            region = region_of(host, writable=True)
        self.region = region
        self.view = region.host_view()

    @classmethod
    async def of(cls, buffer: Any, *, writable: bool) -> HostStaging:
        """Make one. On return or raise, also when cancelled, nothing reads the buffer; host memory is not copied."""
        if not region_of(buffer, writable=writable).on_device:
            return cls(buffer, writable=writable)
        return await in_thread(lambda: cls(buffer, writable=writable))

    async def finish_receive(self) -> None:
        """Copy received bytes to the device. On return, also when cancelled, nothing writes there any more."""
        if self._device_tensor is not None:
            await in_thread(lambda: self._device_tensor.copy_(self.region.owner))
