"""What the worker loop has to know of the machine that computes: the processor that it runs on itself, or a GPU.

Made by `worker_process`, used by the worker loop and its engine threads. Decides nothing.
"""

from __future__ import annotations

import asyncio

import torch

from cohort.common.devices.inventory import HOST, meminfo_bytes
from cohort.common.engine.cache.kv_copies import KvCopier
from cohort.common.engine.cache.stream_copies import StreamCopier
from cohort.common.engine.device.streams import stream_for
from cohort.common.engine.runner.model_runner import ModelRunner


class CpuHost:
    overlaps = False
    """A step leaves the processor free: the results of the step before are told while it computes. On a processor that
    would only take the step's own time."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.free_bytes = 0
        """Of the device's memory, for the worker's reports: as of the last `count_free`."""

    @property
    def recorded_classes(self) -> int | None:
        return None

    def copier(self) -> KvCopier | StreamCopier:
        return KvCopier(self.runner.kv)

    def enter_loop(self) -> None:
        """On the event loop's thread, before the links are opened."""

    async def count_free(self) -> None:
        self.free_bytes = meminfo_bytes(HOST, "MemAvailable")


class GpuHost(CpuHost):
    overlaps = True

    @property
    def recorded_classes(self) -> int | None:
        return len(self.runner.recorded_classes)

    def copier(self) -> KvCopier | StreamCopier:
        return StreamCopier(self.runner.kv, self.runner.stream, stream_for(self.runner.device))

    def enter_loop(self) -> None:
        """UCX finds out what it can do, and moves bytes, on this thread: the device must be current there."""
        torch.cuda.set_device(self.runner.device)
        torch.cuda.synchronize(self.runner.device)

    async def count_free(self) -> None:
        """In a thread: the driver may take milliseconds to answer, or wait for a lock that a launch holds."""
        free, _ = await asyncio.to_thread(torch.cuda.mem_get_info, self.runner.device)
        self.free_bytes = int(free)


def host_of(runner: ModelRunner) -> CpuHost:
    return GpuHost(runner) if runner.device.type == "cuda" else CpuHost(runner)
