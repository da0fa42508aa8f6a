"""Host arrays to the device: through page-locked memory, many arrays in one copy, without waiting.

Called once or a few times per step, where a step's inputs are prepared. The page-locked memory of a step is written
again only after `restart`, which its owner calls when the step before is over.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_ALIGNMENT = 256
_FIRST_BYTES = 1 << 20


class Uploads:
    """Bump allocation in a page-locked buffer and its twin on the device; both grow when a step needs more."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._outgrown: list[tuple[Tensor, Tensor]] = []
        self._used = 0
        self._allocate(_FIRST_BYTES)

    def restart(self) -> None:
        """Free the memory: nothing that was put before is read any more."""
        self._used = 0
        self._outgrown.clear()

    def put(self, arrays: Sequence[npt.NDArray[np.generic]]) -> list[Tensor]:
        """Copy the arrays' contents to tensors on the device, in one copy; they hold until `restart`."""
        sizes = [-(-array.nbytes // _ALIGNMENT) * _ALIGNMENT for array in arrays]
        if self._used + sum(sizes) > len(self._host):
            # Earlier arrays are still being copied and read: they stay, and this goes into larger buffers.
            self._outgrown.append((self._host, self._device_buffer))
            self._allocate(2 * len(self._host) + sum(sizes))
        begin = end = self._used
        views = []
        for array, size in zip(arrays, sizes, strict=True):
            target = self._device_buffer[end : end + array.nbytes]
            if array.nbytes:
                self._host_bytes[end : end + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            dtype = torch.from_numpy(np.empty(0, dtype=array.dtype)).dtype
            views.append(target.view(dtype).view(array.shape))
            end += size
        if end > begin:
            self._device_buffer[begin:end].copy_(self._host[begin:end], non_blocking=True)
        self._used = end
        return views

    def _allocate(self, size: int) -> None:
        self._host = host_bytes(size, self._device)
        self._host_bytes: npt.NDArray[np.uint8] = self._host.numpy()
        self._device_buffer = torch.empty(size, dtype=torch.uint8, device=self._device)
        self._used = 0


def host_bytes(size: int, device: torch.device) -> Tensor:
    """Allocate `size` bytes of host memory that the device copies from and to without the processor's help."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
