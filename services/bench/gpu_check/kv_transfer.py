"""Section: KV between two processes on one GPU, over each link that can be opened; `--peer` is the receiving process.

The figure is payload per second, against a copy of as many bytes on the device by the device itself.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
import time
from statistics import median
from typing import Any

import torch

from cohort.common.engine.run_checksum import weighted
from cohort.common.errors import TransferError
from cohort.common.transport.kv_link import KvLink
from cohort.common.transport.links import open_links
from cohort.services.bench.gpu_check import rates
from cohort.services.bench.gpu_check.context import Check

WANTED = 0.7
_ROUNDS = 12
_AT_ONCE = 4  # as the transfer agent has them under way
_TIMEOUT_S = 20.0


def run(check: Check) -> None:
    size = (256 << 20) if check.real else 1 << 20
    payload = rates.copy_bytes_per_s(check.device, size) / 2
    for link in ("ucx", "zmq"):
        try:
            asyncio.run(_measure(check, link, size, payload))
        except (TransferError, OSError, RuntimeError, TimeoutError) as error:
            check.found.checked(f"{link}: {size >> 20} MiB", False, f"{type(error).__name__}: {error}")


async def _measure(check: Check, name: str, size: int, payload: float) -> None:
    make_current(check.device)
    link = _open(name)
    peer = await asyncio.create_subprocess_exec(
        sys.executable,
        "-P",
        "-m",
        "cohort.services.bench.gpu_check.kv_transfer",
        name,
        str(check.device),
        str(size),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        address = bytes.fromhex((await _ask(peer, None))["address"])
        buffers = [rates.random_bytes(size, check.device) for _ in range(_AT_ONCE)]
        sums = [weighted(buffer) for buffer in buffers]
        one: list[float] = []
        several: list[float] = []
        for turn in range(_ROUNDS):
            for count, times in ((1, one), (_AT_ONCE, several)):
                await _ask(peer, {"turn": turn, "count": count})  # it waits for them now
                started = time.perf_counter()
                async with asyncio.TaskGroup() as sending:
                    for index in range(count):
                        tag = _tag(turn, count, index)
                        sending.create_task(link.send(address, tag, buffers[index], timeout_s=_TIMEOUT_S))
                times.append(time.perf_counter() - started)  # the receiver has taken everything
                answer = await _answer(peer)
                if answer["sums"] != sums[:count]:
                    check.found.checked(f"{name}: what arrives is what was sent", False, f"turn {turn}")
                    return
        check.found.checked(f"{name}: what arrives is what was sent", True, f"{2 * _ROUNDS} rounds")
        wanted = WANTED if check.real and name == "ucx" else None
        for label, times, count in (("one at a time", one[2:], 1), (f"{_AT_ONCE} under way", several[2:], _AT_ONCE)):
            rate = count * size / median(times)
            check.found.measured(
                f"{name}: {size >> 20} MiB, {label}",
                rate / payload,
                "of device copy",
                at_least=wanted,
                note=f"{rate / 1e9:.1f} of {payload / 1e9:.1f} GB/s, {median(times) * 1e3:.2f} ms",
            )
    finally:
        await link.close()
        if peer.returncode is None:
            peer.kill()
        await peer.wait()


def make_current(device: torch.device) -> None:
    """As a worker does for the thread that drives its links."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.zeros(1, device=device)
        torch.cuda.synchronize(device)


def _open(name: str) -> KvLink:
    folder = tempfile.mkdtemp(prefix="cohort-kv-transfer-")
    (link,) = open_links([name], zmq_bind=f"ipc://{folder}/kv.sock")
    return link


def _tag(turn: int, count: int, index: int) -> int:
    return (turn << 16 | count << 8 | index) + 1


async def _ask(peer: asyncio.subprocess.Process, question: dict[str, Any] | None) -> dict[str, Any]:
    """One line there (none: it speaks first), one line back."""
    if question is not None and peer.stdin is not None:
        peer.stdin.write(json.dumps(question).encode() + b"\n")
        await peer.stdin.drain()
    return await _answer(peer)


async def _answer(peer: asyncio.subprocess.Process) -> dict[str, Any]:
    assert peer.stdout is not None
    async with asyncio.timeout(_TIMEOUT_S + 30):
        line = await peer.stdout.readline()
    if not line:
        raise TransferError("the receiving process has ended")
    answer: dict[str, Any] = json.loads(line)
    return answer


async def _serve(name: str, device: torch.device, size: int) -> None:
    """The receiving process: post the receives, say so, and tell the sums of what came."""
    make_current(device)
    link = _open(name)
    buffers = [torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(_AT_ONCE)]
    _say({"address": link.address().hex()})
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        asked = json.loads(line)
        count = asked["count"]
        for buffer in buffers[:count]:
            buffer.zero_()
        make_current(device)
        receiving = [
            loop.create_task(link.receive(_tag(asked["turn"], count, index), buffers[index], timeout_s=_TIMEOUT_S))
            for index in range(count)
        ]
        await asyncio.sleep(0)
        _say({"ready": True})
        await asyncio.gather(*receiving)
        _say({"sums": [weighted(buffer) for buffer in buffers[:count]]})
    await link.close()


def _say(answer: dict[str, Any]) -> None:
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    asyncio.run(_serve(sys.argv[1], torch.device(sys.argv[2]), int(sys.argv[3])))
