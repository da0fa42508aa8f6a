"""Measures the KV links between two processes of this host: `python -m cohort.common.transport.bench_links`.

For a person deciding on `transfer.links`, or looking for a link that fell back to TCP. Prints gigabytes per second by
message size for each link, and beside them what UCX's own `ucx_perftest` reaches in the same minute, if the libucx
wheel brought it. Never imported by a service.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from cohort.common.errors import TransferError
from cohort.common.transport.kv_link import KvLink

MB = 1 << 20
SIZES_MB = (1, 16, 64)
PIPELINED = 4  # transfers under way at once, as the transfer agent has them
TIMEOUT_S = 60.0


async def _measure_here(name: str, total_mb: int) -> None:
    """The receiving side and the clock; the sender is a child process."""
    link = _open(name)
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "cohort.common.transport.bench_links", "--sender", name, link.address().hex(),
        "--total-mb", str(total_mb), stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert child.stdout is not None
    try:
        sender = bytes.fromhex((await asyncio.wait_for(child.stdout.readline(), TIMEOUT_S)).decode())
        tag = 0
        for size_mb in SIZES_MB:
            buffers = [np.zeros(size_mb * MB, np.uint8) for _ in range(PIPELINED)]
            rates = []
            for _ in range(3):
                count = _count(size_mb, total_mb)
                await link.send(sender, tag, np.zeros(8, np.uint8), timeout_s=TIMEOUT_S)  # go
                begun_s = time.perf_counter()
                await _pipelined(
                    [link.receive(tag + 1 + i, buffers[i % PIPELINED], timeout_s=TIMEOUT_S) for i in range(count)]
                )
                rates.append(count * size_mb * MB / (time.perf_counter() - begun_s) / 1e9)
                tag += count + 1
            if any(buffer.min() != 1 for buffer in buffers):
                raise TransferError(f"{name}: wrong bytes arrived")
            print(f"{name:<14}{size_mb:>5} MB  {max(rates):6.2f} GB/s best of 3  ({min(rates):.2f} worst)", flush=True)
        await asyncio.wait_for(child.wait(), TIMEOUT_S)
    finally:
        if child.returncode is None:
            child.kill()
        await link.close()


async def _send_there(name: str, receiver: bytes, total_mb: int) -> None:
    link = _open(name)
    print(link.address().hex(), flush=True)
    tag = 0
    for size_mb in SIZES_MB:
        buffer = np.ones(size_mb * MB, np.uint8)
        for _ in range(3):
            count = _count(size_mb, total_mb)
            await link.receive(tag, np.zeros(8, np.uint8), timeout_s=TIMEOUT_S)
            await _pipelined([link.send(receiver, tag + 1 + i, buffer, timeout_s=TIMEOUT_S) for i in range(count)])
            tag += count + 1
    await link.close()


async def _pipelined(transfers: Sequence[object]) -> None:
    """Run them in order, a few at a time."""
    waiting = iter(transfers)

    async def lane() -> None:
        for transfer in waiting:
            await transfer  # type: ignore[misc]

    async with asyncio.TaskGroup() as tasks:
        for _ in range(PIPELINED):
            tasks.create_task(lane())


def _count(size_mb: int, total_mb: int) -> int:
    return max(PIPELINED, total_mb // size_mb)


def _open(name: str) -> KvLink:
    if name == "ucx":
        from cohort.common.transport.ucx_link import UcxLink

        return UcxLink()
    from cohort.common.transport.zmq_link import ZmqLink

    return ZmqLink("tcp://127.0.0.1:0")


def _perftest(total_mb: int) -> None:
    """UCX's own tool, tag matching as we use it."""
    package = importlib.util.find_spec("libucx")
    folder = Path(package.origin).parent if package is not None and package.origin else None
    tool = folder / "bin" / "ucx_perftest" if folder else None
    if folder is None or tool is None or not os.access(tool, os.X_OK):
        print("ucx_perftest is not in this installation")
        return
    environment = {**os.environ, "LD_LIBRARY_PATH": str(folder / "lib"), "UCX_WARN_UNUSED_ENV_VARS": "n"}
    port = 20_000 + os.getpid() % 20_000
    for size_mb in SIZES_MB:
        command = [str(tool), "-p", str(port), "-t", "tag_bw", "-s", str(size_mb * MB), "-n",
                   str(_count(size_mb, total_mb)), "-w", "2"]  # fmt: skip
        server = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            time.sleep(0.5)  # the tool says nothing when it listens
            shown = subprocess.run(
                [*command, "127.0.0.1"], env=environment, capture_output=True, text=True, timeout=TIMEOUT_S
            )
        finally:
            server.kill()
            server.wait()
        final = re.search(r"^Final:\s+(.*)$", shown.stdout, re.MULTILINE)
        if shown.returncode != 0 or final is None:
            print(f"ucx_perftest failed: {(shown.stderr or shown.stdout).strip().splitlines()[-1:]}")
            return
        # columns: iterations, three latencies, bandwidth average and overall (MB/s), two message rates
        megabytes_per_s = float(final.group(1).split()[5])
        print(f"{'ucx_perftest':<14}{size_mb:>5} MB  {megabytes_per_s * MB / 1e9:6.2f} GB/s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m cohort.common.transport.bench_links", description="Measure the KV links on this host."
    )
    parser.add_argument("--links", nargs="+", choices=("ucx", "zmq"), default=["ucx", "zmq"])
    parser.add_argument("--total-mb", type=int, default=512, help="megabytes per measurement (default: 512)")
    parser.add_argument("--sender", nargs=2, metavar=("LINK", "ADDRESS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.sender:
        asyncio.run(_send_there(options.sender[0], bytes.fromhex(options.sender[1]), options.total_mb))
        return
    for name in options.links:
        try:
            asyncio.run(_measure_here(name, options.total_mb))
        except TransferError as error:
            print(f"{name}: {error}")
    _perftest(options.total_mb)


if __name__ == "__main__":
    main()
