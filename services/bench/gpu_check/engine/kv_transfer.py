"""Section: KV between two processes on one GPU, over each link that can be opened; `--sender` is the other process.

As `cohort bench links` measures, from the device's memory to the device's memory: large runs and blocks, as many at a
time as a transfer has. The metric is payload per second, against a copy on the device by the device itself.
"""

from __future__ import annotations

import asyncio
import os
import re
import sys
from functools import partial
from statistics import median

import torch
from torch import Tensor

from cohort.common.errors import TransferError
from cohort.services.bench.gpu_check.frame import rates
from cohort.services.bench.gpu_check.frame.context import Check
from cohort.services.bench.gpu_check.frame.guard import NotInstalled
from cohort.services.bench.links import MB, PIPELINED, Ends, LinkPair, Memory, open_link, run_sender

WANTED = 0.7
_MODULE = "cohort.services.bench.gpu_check.engine.kv_transfer"


class DeviceMemory(Memory):
    """Ready before a link, which knows no stream, reads it."""

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)
        if self._device.type == "cuda":  # as a worker does for the thread that drives its links
            torch.cuda.set_device(self._device)

    def make(self, size: int, value: int) -> Tensor:
        memory = torch.empty(size, dtype=torch.uint8, device=self._device)
        self.fill(memory, value)
        return memory

    def fill(self, memory: Tensor, value: int) -> None:
        memory.fill_(value)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def run(check: Check) -> None:
    # UCX then writes which transports it takes; not to where the other process says its address.
    os.environ |= {"UCX_PROTO_INFO": "y", "UCX_LOG_LEVEL": "info", "UCX_LOG_FILE": str(check.logs / "ucx-%p.log")}
    size = (256 << 20) if check.real else 1 << 20
    payload = check.guard.item("copy on the device", lambda: rates.copy_bytes_per_s(check.device, size) / 2, 10)
    if payload is not None:
        for link in ("ucx", "zmq"):
            check.guard.item(link, partial(_link, check, link, payload), 30)


def _link(check: Check, name: str, payload: float) -> None:
    asyncio.run(_measure(check, name, payload))


async def _measure(check: Check, name: str, payload: float) -> None:
    """Raise `NotInstalled` for a link that cannot be opened here."""
    ends = Ends(memory=DeviceMemory(str(check.device)), sender=(_MODULE, str(check.device)))
    try:
        link = open_link(name, ends)
    except (TransferError, ImportError, OSError, ValueError) as error:
        raise NotInstalled(str(error)) from None
    pair = await LinkPair.open(name, ends, link)
    rounds = 12 if name == "ucx" or not check.real else 4  # through the host a run takes long enough once
    try:
        for size_mb, count in ((256, 2 * PIPELINED), (2, 16 * PIPELINED)) if check.real else ((1, PIPELINED),):
            rate = median([await pair.rate(size_mb, count) for _ in range(rounds)][2:])
            check.found.measured(
                f"{name}: {count} x {size_mb} MiB, {PIPELINED} at a time",
                rate / payload,
                "of device copy",
                at_least=WANTED if check.real and name == "ucx" and size_mb == 256 else None,
                note=f"{rate / 1e9:.1f} of {payload / 1e9:.1f} GB/s, {count * size_mb * MB / rate * 1e3:.2f} ms; all "
                "bytes right",
            )
    finally:
        await pair.close()
    if name == "ucx":
        text = "".join(log.read_text(encoding="utf-8", errors="replace") for log in check.logs.glob("ucx-*.log"))
        check.found.add_note("ucx: large messages", "; ".join(transports(text)) or "it named no transport")


def transports(log: str) -> list[str]:
    """Return how UCX moves large messages, from its own log under `UCX_PROTO_INFO`: each way once, in order."""
    found = re.findall(r"\| +\S+\.\.inf \| (.+?) +\| ([^|]+?) +\|", log)
    return list(dict.fromkeys(f"{way.removeprefix('(?) ')} by {transport}" for way, transport in found))


if __name__ == "__main__":
    device, link, address = sys.argv[1], sys.argv[3], sys.argv[4]  # behind --sender; keys and UCX's devices follow
    asyncio.run(run_sender(link, bytes.fromhex(address), Ends(memory=DeviceMemory(device))))
