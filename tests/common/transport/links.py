"""Drives `link_peer` processes from a test."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .link_peer import pattern

ROOT = Path(__file__).resolve().parents[3]


def crc_of(seed: int, nbytes: int) -> int:
    return zlib.crc32(pattern(seed, nbytes).data)


class LinkProcess:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.address = ""
        self.killed = False
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._announced: dict[int, asyncio.Event] = {}
        self._last = 0
        self._reader: asyncio.Task[None] | None = None

    @staticmethod
    async def start(kind: str, *, loop: str = "asyncio", before: Sequence[str] = (), **environment: str) -> LinkProcess:
        """`before`: a command that runs the process, as `ip netns exec …`."""
        process = await asyncio.create_subprocess_exec(
            *before,
            sys.executable,
            "-m",
            f"{__package__}.link_peer",
            kind,
            loop,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        )
        self = LinkProcess(process)
        ready = self._answers[0] = asyncio.get_running_loop().create_future()
        self._reader = asyncio.create_task(self._read())
        await asyncio.wait_for(ready, 60.0)
        self.address = (await self.ask("address"))["address"]
        return self

    def begin(self, op: str, **arguments: Any) -> tuple[int, asyncio.Future[dict[str, Any]]]:
        self._last += 1
        answer = self._answers[self._last] = asyncio.get_running_loop().create_future()
        self._announced[self._last] = asyncio.Event()
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"op": op, "id": self._last, **arguments}).encode() + b"\n")
        return self._last, answer

    async def ask(self, op: str, *, within_s: float = 30.0, **arguments: Any) -> dict[str, Any]:
        return await asyncio.wait_for(self.begin(op, **arguments)[1], within_s)

    async def begun_receive(self, **arguments: Any) -> asyncio.Future[dict[str, Any]]:
        """A receive that is posted for sure."""
        return await self.begun("receive", **arguments)

    async def begun(self, op: str, **arguments: Any) -> asyncio.Future[dict[str, Any]]:
        """A receive or send that is posted for sure."""
        number, answer = self.begin(op, announce=True, **arguments)
        await asyncio.wait_for(self._announced[number].wait(), 10.0)
        await self.ask("address")  # one more turn of its loop
        return answer

    async def is_silent(self, tag: int) -> None:
        """Nothing was written into the buffer of the last receive of `tag` since that ended."""
        assert "error" not in (answer := await self.ask("silent", tag=tag)), answer

    def kill(self) -> None:
        self.killed = True
        self.process.send_signal(signal.SIGKILL)

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    async def end(self) -> None:
        if self.killed:
            await self.process.wait()
        elif self.process.returncode is None:
            self.process.send_signal(signal.SIGCONT)
            assert self.process.stdin is not None
            self.process.stdin.close()
            try:
                await asyncio.wait_for(self.process.wait(), 10.0)
            except TimeoutError:
                self.process.kill()
                await self.process.wait()
                raise
        if self._reader is not None:
            await self._reader

    async def _read(self) -> None:
        assert self.process.stdout is not None
        while line := await self.process.stdout.readline():
            message = json.loads(line)
            if message.get("announced"):
                self._announced[message["id"]].set()
            else:
                self._answers[message["id"]].set_result(message)
        for answer in self._answers.values():
            if not answer.done():
                answer.set_result({"error": "process ended"})
