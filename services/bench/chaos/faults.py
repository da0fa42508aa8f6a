"""What breaks the processes of a pipeline: kills, stops and requests to end of one of them, a restart of them all.

A soak's deck holds every instance twice to be killed, once to be stopped for some seconds, once to be told to end,
every helper process once to be killed, and one `cohort restart` where that is wanted. It is shuffled and dealt from,
again and again, so that all get all. The next fault waits until every process is ready again and the manager knows all
workers. Called by `soak` and `kill_table`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Sequence
from random import Random
from urllib.parse import urlsplit

import aiohttp

from cohort.services.bench.chaos.accounts import ALL, TOGETHER, Accounts, Fault, is_of
from cohort.services.bench.chaos.census import LAUNCHER, Census, Life
from cohort.services.bench.chaos.users import Place
from cohort.services.bench.live.pipelines import start_cohort

KILL, STOP, TERM, RESTART = "kill", "stop", "term", "restart"
_SIGNALS = {KILL: signal.SIGKILL, STOP: signal.SIGSTOP, TERM: signal.SIGTERM}
LONGEST_STOP_S = 6.0
_BACK_TIMEOUT_S = 120.0
_POLL_S = 0.2
_WORKER_STATS = "/api/state"


class Faults:
    def __init__(
        self, place: Place, census: Census, accounts: Accounts, workers: int, random: Random, log: Callable[[str], None]
    ) -> None:
        self._place = place
        self._census = census
        self._accounts = accounts
        self._workers = workers
        self._random = random
        self._log = log
        self._remaining: list[tuple[str, str]] = []
        self.victims: Sequence[str] | None = None
        """Names or kinds; None for every process."""
        self.restarts = False
        self.stop_s: float | None = None
        """Duration of every stop; None: drawn."""
        self.missing: list[str] = []
        """Processes that did not come back in time."""

    async def run(self, stopping: asyncio.Event, mean_pause_s: float) -> None:
        """Apply fault after fault from the deck until `stopping`; the last one is waited for."""
        while True:
            with contextlib.suppress(TimeoutError):
                pause_s = min(self._random.expovariate(1 / mean_pause_s), 3 * mean_pause_s)
                await asyncio.wait_for(stopping.wait(), max(1.0, pause_s))
            if stopping.is_set():
                return
            if (dealt := self._deal()) is not None:
                await self.strike(*dealt)

    def one_of(self, kind: str) -> str | None:
        """Return an instance of this kind that runs, or of each of several kinds; None where the pipeline has none."""
        living, chosen = sorted(self._census.living()), list[str]()
        for part in kind.split(TOGETHER):
            names = [name for name in living if is_of(name, part) and name not in chosen]
            if not names:
                return None
            chosen.append(self._random.choice(names))
        return TOGETHER.join(chosen)

    async def strike(self, name: str, action: str) -> None:
        """Apply one fault, until all is whole again."""
        living = {} if action == RESTART else self._census.living()
        lives = [living[each] for each in name.split(TOGETHER) if each in living]
        if not lives and action != RESTART:  # a helper that nothing has asked for since its process began
            return
        fault = Fault(name, action, self._place.now_s())
        self._accounts.faults.append(fault)
        self._log(f"{action} {name}" + "".join(f" ({life.pid})" for life in lives))
        if action == RESTART:
            await self._restart()
        else:
            await self._break(lives, action)
        if await self._whole_again([] if action == STOP else lives):
            fault.back_s = self._place.now_s()
        else:
            self.missing.append(f"{name} was not back {_BACK_TIMEOUT_S:.0f} s after {action} at {fault.at_s:.0f} s")

    async def _break(self, lives: Sequence[Life], action: str) -> None:
        for life in lives:
            _signal(life, _SIGNALS[action])
        if action == STOP:
            try:
                await asyncio.sleep(self.stop_s or self._random.uniform(0.5, LONGEST_STOP_S))
            finally:
                for life in lives:
                    _signal(life, signal.SIGCONT)

    async def _restart(self) -> None:
        process = start_cohort("restart", "--port", str(urlsplit(self._place.url).port))
        try:
            code = await asyncio.to_thread(process.wait)
        finally:
            process.kill()
        if code:
            self.missing.append(f"`cohort restart` ended with {code}")

    async def _whole_again(self, ended: Sequence[Life]) -> bool:
        """Wait until the broken lives have ended, every process is ready and the manager counts all workers."""
        deadline_s = self._place.now_s() + _BACK_TIMEOUT_S
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=3)) as http:
            while self._place.now_s() < deadline_s:
                living = self._census.living()
                if not set(ended) & set(living.values()) and await self._whole(http):
                    return True
                await asyncio.sleep(_POLL_S)
        return False

    async def _whole(self, http: aiohttp.ClientSession) -> bool:
        run = self._census.run_file()
        try:
            for url in run.ready_urls.values():
                async with http.get(url) as response:
                    if response.status != 200:
                        return False
            async with http.get(self._place.monitor_url + _WORKER_STATS) as response:
                state = await response.json()
        except (aiohttp.ClientError, OSError, TimeoutError):
            return False
        processes = {each["instance"]: each for each in state["processes"]}
        if any(name not in processes or processes[name]["status"] != "up" for name in run.processes):
            return False
        return bool(processes["manager"]["stats"].get("workers", 0) >= self._workers)

    def _deal(self) -> tuple[str, str] | None:
        """Return the next fault; None where no victim lives."""
        if not self._remaining:
            living = [name for name in self._census.living() if name != LAUNCHER]
            victims = living if self.victims is None else self.victims
            instances = set(self._census.run_file().processes)
            for name in sorted(name for name in living if any(is_of(name, victim) for victim in victims)):
                self._remaining += [
                    (name, action) for action in ((KILL, KILL, STOP, TERM) if name in instances else (KILL,))
                ]
            self._remaining += [(ALL, RESTART)] if self.restarts else []
            self._random.shuffle(self._remaining)
        return self._remaining.pop() if self._remaining else None


def _signal(life: Life, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(life.pid, number)
