"""What the services take around a step, measured: a pipeline of one worker, asked by one, four and eight users; then
what workers take from each other: a pipeline of several, asked so that one of them computes, and so that all do.

Every iteration of a worker is recorded, so the time from one plan to the next holds all that the engine's own
profile does not: scheduling, tokens on their way, the next plan. Beside it the processor time that gateway, manager,
the other services and the client take meanwhile. What is compared is measured in short turns, because a shared
machine's speed moves within seconds. Starts and stops the pipelines; fits nothing (`machine.py`).
"""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import aiohttp

from cohort.common.ports import free_port
from cohort.services.bench.child import MeasurementFailed
from cohort.services.bench.fit.shared_cores import AT_ONCE_S, Iteration, iterations
from cohort.services.bench.live.pipelines import Served, pipeline

USERS = (1, 4, 8)
WORKER = "unified-0"
TURNS = 3
"""Times that each number of users is asked."""
Span = tuple[int, float, float, float | None]
"""Users, begin, end, processor seconds of the services and the client."""
_PROMPT, _OUTPUT = 96, 48
_LONG, _LATER_S, _MEANWHILE = 384, 0.35, 64
"""A prompt that comes while others decode so many tokens: it begins after their prompts, and ends before they do."""
_REPORTED_S = 0.4
"""Two reports: after it placement knows that a worker has nothing left."""
_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Cycle:
    """An iteration, and the seconds from its plan to the next one, which nothing had to wait for."""

    iteration: Iteration
    seconds: float


@dataclass(frozen=True, slots=True)
class Phase:
    """So many users at a time. `service_s`: processor time of all processes but the worker, per iteration; None where
    this system does not tell."""

    users: int
    cycles: tuple[Cycle, ...]
    service_s: float | None


@dataclass(frozen=True, slots=True)
class Turn:
    """Iterations of the same workers, of each by time: while one had work, and right afterwards while all had."""

    alone: list[list[Iteration]]
    beside: list[list[Iteration]]


def measure_live(overlay: dict[str, Any], seconds_each: float, users: Sequence[int] = USERS * TURNS) -> list[Phase]:
    """`overlay`: configuration over the preset `unified`. `users`: one phase after the other, of so many seconds at
    least. Raises `MeasurementFailed`."""
    with tempfile.TemporaryDirectory() as folder:
        free = {"monitor": {"port": 0}, "metrics": {"base_port": 0}, "recording": {"folder": folder}}
        with pipeline("unified", {**overlay, **free}, free_port()) as served:
            spans = observe(served, seconds_each, users)
        (recording,) = Path(folder).glob(f"{WORKER}-*.jsonl")
        return phases(list(iterations(recording)), spans)


def measure_together(overlay: dict[str, Any], workers: int, turns: int) -> list[Turn]:
    """Of so many workers: a request and a long prompt alone, then two for each worker at once and a long prompt while
    they decode, and again. `overlay` as `measure_live` takes it. Raises `MeasurementFailed`."""
    with tempfile.TemporaryDirectory() as folder:
        free = {"monitor": {"port": 0}, "metrics": {"base_port": 0}, "recording": {"folder": folder}}
        shape = {"workers": [{"role": "unified", "count": workers}]}
        with pipeline("unified", {**overlay, **free, **shape}, free_port()) as served:
            numbers = count(1)
            asyncio.run(_ask(served.url, workers, 1.0, numbers))  # as `observe` does
            moments_s = [time.monotonic()]
            for _ in range(turns):
                for users in (1, 2 * workers):
                    asyncio.run(_once(served.url, users, numbers))
                    moments_s.append(time.monotonic())
        runs = [list(iterations(path)) for path in sorted(Path(folder).glob("unified-*.jsonl"))]
    starts = range(0, 2 * turns, 2)
    return [Turn(_within(runs, *moments_s[at : at + 2]), _within(runs, *moments_s[at + 1 : at + 3])) for at in starts]


def _within(runs: Iterable[Sequence[Iteration]], began_s: float, ended_s: float) -> list[list[Iteration]]:
    return [[each for each in run if began_s <= each.planned_s and each.ended_s <= ended_s] for run in runs]


def observe(served: Served, seconds_each: float, users: Sequence[int]) -> list[Span]:
    """Ask a running pipeline. Raises `MeasurementFailed`."""
    others = [pid for name, pid in _processes(served.monitor_url) if name != WORKER]
    numbers, spans = count(1), []
    asyncio.run(_ask(served.url, 1, 1.0, numbers))  # caches and first allocations are no cycle's cost
    for at_once in users:
        before_s, own_s, began_s = _processor_s(others), time.process_time(), time.monotonic()
        asyncio.run(_ask(served.url, at_once, seconds_each, numbers))
        ended_s, after_s, spent_s = time.monotonic(), _processor_s(others), None
        if before_s is not None and after_s is not None:
            spent_s = after_s - before_s + time.process_time() - own_s
        spans.append((at_once, began_s, ended_s, spent_s))
    return spans


def phases(ran: Sequence[Iteration], spans: Iterable[Span]) -> list[Phase]:
    """Raises `MeasurementFailed` for a span without iterations."""
    found = []
    for users, began_s, ended_s, spent_s in spans:
        within = [each for each in ran if began_s <= each.planned_s and each.ended_s <= ended_s and each.rows]
        cycles = tuple(
            Cycle(one, following.planned_s - one.planned_s)
            for one, following in pairwise(within)
            if following.planned_s - one.ended_s < AT_ONCE_S
        )
        if not cycles:
            raise MeasurementFailed(f"no iteration followed another while {users} users asked")
        found.append(Phase(users, cycles, None if spent_s is None else spent_s / len(within)))
    return found


async def _ask(url: str, users: int, seconds: float, numbers: Iterable[int]) -> None:
    """So many users, each with one request at a time, until the time is over: what runs then is read to its end."""
    ends_s, following = time.monotonic() + seconds, iter(numbers)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_TIMEOUT_S)) as session:

        async def user() -> None:
            while time.monotonic() < ends_s:
                await _read(session, url, next(following))

        await asyncio.gather(*(user() for _ in range(users)))


async def _once(url: str, users: int, numbers: Iterable[int]) -> None:
    """Each of so many users once, and a long prompt: while they decode, or after the one that was alone."""
    following = iter(numbers)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_TIMEOUT_S)) as session:
        if users == 1:
            await _read(session, url, next(following))
            await _read(session, url, next(following), _LONG, 1)
            await asyncio.sleep(_REPORTED_S)
            return

        async def later() -> None:
            await asyncio.sleep(_LATER_S)
            await _read(session, url, next(following), _LONG, 1)

        asked = [_read(session, url, next(following), output=_MEANWHILE) for _ in range(users)]
        await asyncio.gather(*asked, later())


async def _read(
    session: aiohttp.ClientSession, url: str, number: int, prompt: int = _PROMPT, output: int = _OUTPUT
) -> None:
    body = {
        "prompt": [3 + (1000 + number * _LONG + 7 * at) % 40_000 for at in range(prompt)],  # none that is cached
        "max_tokens": output,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    async with session.post(f"{url}/v1/completions", json=body) as response:
        if response.status != 200:
            raise MeasurementFailed(f"HTTP {response.status}: {(await response.text())[:200]}")
        async for _ in response.content.iter_any():
            pass


def _processes(monitor_url: str) -> list[tuple[str, int]]:
    with urllib.request.urlopen(f"{monitor_url}/api/state", timeout=10) as answer:
        return [(each["instance"], int(each["pid"])) for each in json.loads(answer.read())["processes"]]


def _processor_s(pids: Iterable[int], read: Callable[[int], str] | None = None) -> float | None:
    """Seconds that these processes have computed so far."""
    total = 0
    for pid in pids:
        try:
            text = read(pid) if read is not None else Path(f"/proc/{pid}/stat").read_text(encoding="ascii")
        except OSError:
            return None
        user, system = text.rpartition(")")[2].split()[11:13]
        total += int(user) + int(system)
    return total / float(os.sysconf("SC_CLK_TCK"))
