"""Section: KV between two processes on one GPU, over each link that can be opened; `--peer` is the receiving process.

Large runs one, four and as many at a time as a transfer has (`RUNS_AT_ONCE`), and a prompt's KV scattered over single
blocks. The metric is payload per second, against a copy of as many bytes on the device by the device itself.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import structlog
import torch
from torch import Tensor

from cohort.common.config.serving import TransferConfig
from cohort.common.engine.transfer.run_checksum import weighted
from cohort.common.errors import TransferError
from cohort.common.transport.kv_link import KvLink
from cohort.common.transport.open_links import open_links
from cohort.services.bench.gpu_check.frame import rates
from cohort.services.bench.gpu_check.frame.context import Check
from cohort.services.bench.gpu_check.frame.guard import NotThere
from cohort.services.bench.gpu_check.frame.predictions import Facts, expect

WANTED = 0.7
RUNS_AT_ONCE = TransferConfig().runs_at_once
_TIMEOUT_S = 20.0
_TOLD = {"UCX_PROTO_INFO": "y", "UCX_LOG_LEVEL": "info"}  # then UCX writes into the log which transports it takes


@dataclass(frozen=True, slots=True)
class Pattern:
    """`count` buffers of `size` bytes under way together, `stride` bytes apart."""

    name: str
    count: int
    size: int
    stride: int
    targeted: bool

    @property
    def span(self) -> int:
        return (self.count - 1) * self.stride + self.size

    def views(self, memory: Tensor) -> list[Tensor]:
        return [memory[index * self.stride : index * self.stride + self.size] for index in range(self.count)]


def patterns(real: bool) -> list[Pattern]:
    """Runs of 256 MiB, and 32 blocks of 2 MiB that do not lie side by side."""
    large, block = (256 << 20, 2 << 20) if real else (1 << 20, 1 << 14)
    return [
        *(Pattern(f"{count} x {large >> 20} MiB", count, large, large, True) for count in sorted({1, 4, RUNS_AT_ONCE})),
        Pattern(f"32 x {block >> 10} KiB, scattered", 32, block, 3 * block, False),
    ]


def run(check: Check) -> None:
    os.environ.update(_TOLD)
    payload = check.guard.item("copy on the device", lambda: _payload(check), 10)
    if payload is None:
        return
    for link in ("ucx", "zmq"):
        check.guard.item(link, partial(_link, check, link, payload), 30)


def _payload(check: Check) -> float:
    """Bytes a second that the device itself copies, of one large run."""
    return rates.copy_bytes_per_s(check.device, (256 << 20) if check.real else 1 << 20) / 2


def _link(check: Check, name: str, payload: float) -> None:
    asyncio.run(_measure(check, name, payload))


async def _measure(check: Check, name: str, payload: float) -> None:
    """Raises `NotThere` for a link that cannot be opened here."""
    make_current(check.device)
    try:
        link = _open(name)
    except (TransferError, ImportError, OSError, ValueError) as error:
        raise NotThere(str(error)) from None
    chosen = patterns(check.real)
    # Through the host a run takes long enough once.
    rounds = 12 if name == "ucx" or not check.real else 4
    peer = await _start_peer(check, name)
    try:
        address = bytes.fromhex((await _ask(peer, None))["address"])
        memory = rates.random_bytes(max(each.span for each in chosen), check.device)
        for at, pattern in enumerate(chosen):
            if name != "ucx" and pattern.count == RUNS_AT_ONCE and check.real:
                continue
            times = await _rounds(check, link, peer, address, pattern, at, memory, rounds)
            _tell(check, name, pattern, times, payload)
        if name == "ucx":
            log = check.logs / f"{check.found.section}.log"
            ways = transports(log.read_text(encoding="utf-8", errors="replace")) if log.is_file() else []
            check.found.said("ucx: large messages", "; ".join(ways) or "it named no transport")
    finally:
        await link.close()
        if peer.returncode is None:
            peer.kill()
        await peer.wait()


async def _start_peer(check: Check, name: str) -> asyncio.subprocess.Process:
    environment = {key: value for key, value in os.environ.items() if key not in _TOLD}
    command = [
        "-m",
        "cohort.services.bench.gpu_check.engine.kv_transfer",
        name,
        str(check.device),
        str(int(check.real)),
    ]
    return await asyncio.create_subprocess_exec(
        sys.executable, "-P", *command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
    )


async def _rounds(
    check: Check,
    link: KvLink,
    peer: asyncio.subprocess.Process,
    address: bytes,
    pattern: Pattern,
    at: int,
    memory: Tensor,
    rounds: int,
) -> list[float]:
    """Seconds of each round but the first two. Raises `TransferError` where something else arrives than was sent."""
    views = pattern.views(memory)
    sums = [weighted(view) for view in views]
    times = []
    for turn in range(rounds):
        await _ask(peer, {"turn": turn, "pattern": at})  # it waits for them now
        started = time.perf_counter()
        async with asyncio.TaskGroup() as sending:
            for index, view in enumerate(views):
                sending.create_task(link.send(address, _tag(turn, at, index), view, timeout_s=_TIMEOUT_S))
        times.append(time.perf_counter() - started)  # the receiver has taken everything
        answer = await _answer(peer)
        if answer["sums"] != sums:
            raise TransferError(f"{pattern.name}, round {turn}: what arrived is not what was sent")
    return times[2:]


def _tell(check: Check, name: str, pattern: Pattern, times: list[float], payload: float) -> None:
    moved = pattern.count * pattern.size
    rate = moved / median(times)
    ceilings = check.ceilings()
    check.found.measured(
        f"{name}: {pattern.name}",
        rate / payload,
        "of device copy",
        at_least=WANTED if check.real and name == "ucx" and pattern.targeted else None,
        expect=expect("transfer", Facts(ceilings, moved_bytes=moved, messages=pattern.count)),
        note=f"{rate / 1e9:.1f} of {payload / 1e9:.1f} GB/s, {median(times) * 1e3:.2f} ms; all sums right",
    )


def transports(log: str) -> list[str]:
    """How UCX moves large messages, as it says itself where `UCX_PROTO_INFO` asks for it: each way once, in order."""
    found = re.findall(r"\| +\S+\.\.inf \| (.+?) +\| ([^|]+?) +\|", log)
    return list(dict.fromkeys(f"{way.removeprefix('(?) ')} by {transport}" for way, transport in found))


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


def _tag(turn: int, pattern: int, index: int) -> int:
    return (turn << 16 | pattern << 8 | index) + 1


async def _ask(peer: asyncio.subprocess.Process, question: dict[str, Any] | None) -> dict[str, Any]:
    """One line there (none: it speaks first), one line back."""
    if question is not None and peer.stdin is not None:
        peer.stdin.write(json.dumps(question).encode() + b"\n")
        await peer.stdin.drain()
    return await _answer(peer)


async def _answer(peer: asyncio.subprocess.Process) -> dict[str, Any]:
    assert peer.stdout is not None
    line = await peer.stdout.readline()  # the item's own deadline bounds the wait
    if not line:
        raise TransferError("the receiving process has ended")
    answer: dict[str, Any] = json.loads(line)
    return answer


async def _serve(name: str, device: torch.device, real: bool) -> None:
    """The receiving process: post the receives, say so, and tell the sums of what came."""
    make_current(device)
    link = _open(name)
    chosen = patterns(real)
    memory = torch.zeros(max(each.span for each in chosen), dtype=torch.uint8, device=device)
    _say({"address": link.address().hex()})
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        asked = json.loads(line)
        views = chosen[asked["pattern"]].views(memory)
        memory.zero_()
        make_current(device)
        receiving = [
            loop.create_task(link.receive(_tag(asked["turn"], asked["pattern"], index), view, timeout_s=_TIMEOUT_S))
            for index, view in enumerate(views)
        ]
        await asyncio.sleep(0)
        _say({"ready": True})
        await asyncio.gather(*receiving)
        _say({"sums": [weighted(view) for view in views]})
    await link.close()


def _say(answer: dict[str, Any]) -> None:
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))  # what is said is answers alone
    asyncio.run(_serve(sys.argv[1], torch.device(sys.argv[2]), sys.argv[3] == "1"))
