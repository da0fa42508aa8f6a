"""How much memory a worker's device has left, as its reports say.

Asked by the worker loop before each report. A GPU's driver may take milliseconds to answer, or wait for a lock that a
launch holds: it is asked in a thread. Decides nothing.
"""

from __future__ import annotations

import asyncio

import torch


class FreeMemory:
    """`bytes`: as of the last `refresh`; 0 before the first."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.bytes = 0

    async def refresh(self) -> None:
        if self._device.type == "cuda":
            self.bytes = await asyncio.to_thread(self._of_device)
        else:
            self.bytes = available_memory_bytes()

    def _of_device(self) -> int:
        return int(torch.cuda.mem_get_info(self._device)[0])


def available_memory_bytes() -> int:
    """MemAvailable of this host; 0 where /proc does not say."""
    try:
        with open("/proc/meminfo", encoding="ascii") as meminfo:
            for line in meminfo:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0
