"""A process with one KV link, told over its standard input what to do, one JSON object per line; answers likewise.

The tests run several of these, so that links meet across real process borders and can be killed.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
import zlib
from typing import Any

import numpy as np
import structlog

from cohort.common.transport.kv_link import KvLink
from tests.support.steady_loop import SteadyLoop


def pattern(seed: int, nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Bytes that differ by seed and position."""
    block = np.random.default_rng(seed).integers(0, 256, 65_537, dtype=np.uint8)
    return np.resize(block, nbytes)


def receives(link: Any) -> int:
    """Return the number of receives that callers wait for now: none may be left behind."""
    if link.name != "ucx":
        return len(link._receiving)
    from cohort.common.transport.ucx_link import _WITHDRAW_TAG

    operations = link._operations.values()
    return sum(1 for each in operations if each.peer is None and each.region and each.tag != _WITHDRAW_TAG)


class Peer:
    def __init__(self, kind: str) -> None:
        self.link: KvLink
        if kind == "ucx":
            from cohort.common.transport.ucx_devices import UcxChoice
            from cohort.common.transport.ucx_link import UcxLink

            self.link = UcxLink(UcxChoice(os.environ.get("LINK_TLS", ""), os.environ.get("LINK_DEVICES", "")))
        else:
            from cohort.common.transport.zmq_link import ZmqLink

            self.link = ZmqLink(f"tcp://{os.environ.get('LINK_HOST', '127.0.0.1')}:0")
        self.tasks: dict[int, asyncio.Task[None]] = {}
        self.stranded: asyncio.Future[None] | None = None
        self.received: dict[int, tuple[np.ndarray[Any, np.dtype[np.uint8]], int]] = {}

    async def perform(self, command: dict[str, Any]) -> dict[str, Any]:
        timeout_s = command.get("timeout_s", 5.0)
        match command["op"]:
            case "address":
                return {"address": self.link.address().hex()}
            case "send":
                data = pattern(command["seed"], command["nbytes"])
                if command.get("announce"):
                    answer({"id": command["id"], "announced": True})
                await self.link.send(bytes.fromhex(command["peer"]), command["tag"], data, timeout_s=timeout_s)
                return {}
            case "receive":
                data = np.zeros(command["nbytes"], np.uint8)
                if command.get("announce"):
                    answer({"id": command["id"], "announced": True})
                try:
                    await self.link.receive(command["tag"], data, timeout_s=timeout_s)
                finally:
                    crc = zlib.crc32(data.data)
                    self.received[command["tag"]] = (data, crc)
                return {"crc": crc}
            case "silent":
                data, crc = self.received[command["tag"]]
                assert zlib.crc32(data.data) == crc, "written after the receive had ended"
                return {}
            case "settled":
                if self.stranded is not None:
                    await asyncio.wait_for(asyncio.shield(self.stranded), timeout_s)
                return {}
            case "path":
                return {"path": self.link.path(bytes.fromhex(command["peer"]))}
            case "stats":
                return {
                    "rebuilt": getattr(self.link, "rebuilt", 0),
                    "stranded": getattr(self.link, "stranded", 0),
                    "receiving": receives(self.link),
                }
            case "cpu":
                start_s = time.process_time()
                await asyncio.sleep(command["for_s"])
                return {"cpu_s": time.process_time() - start_s}
            case "cancel":
                self.tasks[command["task"]].cancel()
                return {}
            case "close":
                await self.link.close()
                return {}
        raise ValueError(command["op"])

    async def run(self, command: dict[str, Any]) -> None:
        loop = asyncio.get_running_loop()
        start_s = loop.time()
        try:
            result = await self.perform(command)
        except asyncio.CancelledError:
            result = {"error": "CancelledError"}
        except Exception as error:
            self.stranded = getattr(error, "settled", self.stranded)
            kinds = [kind.__name__ for kind in type(error).__mro__]
            result = {"error": type(error).__name__, "kinds": kinds, "text": str(error)}
        answer({"id": command["id"], "took_s": loop.time() - start_s, **result})


def answer(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


async def main(kind: str) -> None:
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))  # standard output is for answers
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    peer = Peer(kind)
    answer({"id": 0})
    while line := await reader.readline():
        command = json.loads(line)
        peer.tasks[command["id"]] = asyncio.create_task(peer.run(command))
    await peer.link.close()


if __name__ == "__main__":
    if sys.argv[2] == "uvloop":
        import uvloop

        uvloop.run(main(sys.argv[1]))
    else:
        with asyncio.Runner(loop_factory=SteadyLoop) as runner:  # what it takes and waits for, not what a stall does
            runner.run(main(sys.argv[1]))
