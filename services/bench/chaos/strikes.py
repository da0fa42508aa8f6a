"""One strike under load: a process killed at some moment, or all of them restarted one after the other.

Decides when, from a seed, by the share of the requests that are done: a strike never comes before the first answer or
after the last. What the launcher then does is the launcher's. Called by `command`.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from cohort.services.bench.chaos.accounts import Accounts
from cohort.services.bench.chaos.census import Census, Life
from cohort.services.bench.chaos.clients import Client, Counts, Load, NotDeterministic
from cohort.services.bench.chaos.faults import Faults
from cohort.services.bench.chaos.said import Said
from cohort.services.bench.chaos.users import Place
from cohort.services.bench.child import MeasurementFailed
from cohort.services.bench.live.pipelines import start_cohort

EARLIEST, LATEST = 0.1, 0.6
"""Shares of the requests between which a process is killed."""
_POLL_S = 0.02
_PROC = Path("/proc")
_LISTEN = "0A"
_UNACCEPTED = (("01", "0"), ("03", "0"))
"""States in `/proc/net/tcp` and inodes: established, or but for the handshake's last packet; of no process yet."""

Strike = Callable[[Sequence[Client], Counts], Coroutine[Any, Any, float]]
"""What happens while the clients ask; seconds until all was whole again."""


@dataclass(slots=True)
class Struck:
    """What one run of all requests has shown. `back_s`: from the (last) strike until all was whole again."""

    counts: Counts
    seconds: float
    back_s: float = 0.0


class Strikes:
    """Of one running pipeline."""

    def __init__(self, place: Place, census: Census, workers: int, load: Load, random: Random) -> None:
        self._place = place
        self._census = census
        self._load = load
        self._random = random
        self._faults = Faults(place, census, Accounts(), workers, random, lambda _: None)
        self._known: dict[tuple[int, int], Said] = {}

    def one_of(self, kind: str) -> str | None:
        """An instance of this kind that runs: `decode` names any `decode-N`; None where the pipeline has none."""
        names = [name for name in self._census.run_file().processes if name == kind or name.startswith(f"{kind}-")]
        return self._random.choice(sorted(names)) if names else None

    async def undisturbed(self, tell: Callable[[int], None]) -> Struck:
        """The references. Raises `NotDeterministic`."""
        found = await self._run(tell, None)
        if found.counts.failed:
            raise NotDeterministic(f"requests failed while nothing was broken: {found.counts.said[:2]}")
        return found

    async def kill(self, kind: str, kills: int, tell: Callable[[int], None]) -> Struck:
        """One process of the kind, so many times within one run of the requests."""
        shares = sorted(self._random.uniform(EARLIEST, LATEST) for _ in range(kills))

        async def strike(clients: Sequence[Client], counts: Counts) -> float:
            back_s = 0.0
            for share in shares:
                await _until(lambda share=share: counts.requests >= share * self._load.total)  # type: ignore[misc]
                if (name := self.one_of(kind)) is None:
                    raise MeasurementFailed(f"no process of the kind {kind} runs")
                back_s = await self._kill(self._census.living()[name], clients)
            return back_s

        return await self._run(tell, strike)

    async def restart(self, port: int, tell: Callable[[int], None]) -> Struck:
        """`cohort restart`; the clients go on until it is done."""

        async def strike(clients: Sequence[Client], counts: Counts) -> float:
            await _until(lambda: counts.requests >= EARLIEST * self._load.total)
            began_s = time.monotonic()
            process = start_cohort("restart", "--port", str(port))
            try:
                code = await asyncio.to_thread(process.wait)
            finally:
                process.kill()
            if code:
                raise MeasurementFailed(f"`cohort restart` ended with {code}")
            return time.monotonic() - began_s

        return await self._run(tell, strike)

    async def _run(self, tell: Callable[[int], None], strike: Strike | None) -> Struck:
        counts = Counts()
        clients = [Client(number, self._place.url, self._load, self._known) for number in range(self._load.clients)]
        began_s = time.monotonic()
        striking = None if strike is None else asyncio.create_task(strike(clients, counts))
        telling = asyncio.create_task(_tell(counts, tell))
        try:
            await asyncio.gather(*(each.run(counts, lambda: striking is None or striking.done()) for each in clients))
            seconds = time.monotonic() - began_s
            return Struck(counts, seconds, 0.0 if striking is None else await striking)
        finally:
            telling.cancel()
            if striking is not None:
                striking.cancel()

    async def _kill(self, victim: Life, clients: Sequence[Client]) -> float:
        """It stands still for the moment in which its connections are counted. Returns when all was whole again.

        The system takes connections for it until it is gone: milliseconds after the signal, more on a busy machine.
        """
        os.kill(victim.pid, signal.SIGSTOP)
        listening, held = sockets_of(victim.pid)
        for client in clients:
            client.struck = client.port in held
            client.dying = _PROC / str(victim.pid) if urlsplit(self._place.url).port in listening else None
        os.kill(victim.pid, signal.SIGKILL)
        began_s = time.monotonic()
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=3)) as http:
            if not await self._faults.whole_again(http, gone=victim):
                raise MeasurementFailed(f"{victim.name} did not come back")
        for client in clients:
            client.struck, client.dying = False, None
        return time.monotonic() - began_s


def sockets_of(pid: int) -> tuple[set[int], set[int]]:
    """The TCP ports on which a process of this machine listens, and the far ends' ports of the connections that it
    holds or has still to accept."""
    sockets = set()
    for link in (_PROC / str(pid) / "fd").iterdir():
        try:
            sockets.add(os.readlink(link))
        except OSError:  # closed meanwhile
            continue
    listening: set[int] = set()
    held: set[int] = set()
    waiting: list[tuple[int, int]] = []
    for table in ("tcp", "tcp6"):
        for line in (_PROC / str(pid) / "net" / table).read_text().splitlines()[1:]:
            _, ours, theirs, state, *_, inode = line.split()[:10]
            here, there = (int(address.rpartition(":")[2], 16) for address in (ours, theirs))
            if (state, inode) in _UNACCEPTED:
                waiting.append((here, there))
            elif f"socket:[{inode}]" in sockets:
                if state == _LISTEN:
                    listening.add(here)
                else:
                    held.add(there)
    return listening, held | {there for here, there in waiting if here in listening}


async def _until(reached: Callable[[], bool]) -> None:
    while not reached():  # noqa: ASYNC110 -- a count that others raise
        await asyncio.sleep(_POLL_S)


async def _tell(counts: Counts, tell: Callable[[int], None]) -> None:
    while True:
        tell(counts.requests)
        await asyncio.sleep(1.0)
