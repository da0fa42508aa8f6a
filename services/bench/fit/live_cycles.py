"""What the services take around a step, measured: a pipeline of one worker, asked by one, four and eight users; then
what workers take from each other: a pipeline of several, asked by users who come and go.

Every iteration of a worker is recorded, so the time from one plan to the next holds all that the engine's own
profile does not: scheduling, tokens on their way, the next plan. Beside it the processor time that gateway, manager,
the other services and the client take meanwhile. What is compared is measured in short turns, because a shared
machine's speed moves within seconds. Starts and stops the pipelines; fits nothing (`machine.py`).
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import tempfile
import time
import urllib.request
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, pairwise
from pathlib import Path
from random import Random
from typing import Any

import aiohttp

from cohort.common.http.ports import free_port
from cohort.common.policies.cost_model import StepWork, prefill_pairs
from cohort.services.bench.child import MeasurementFailed
from cohort.services.bench.live.pipelines import Served, pipeline

_ROW = re.compile(r"\[(\d+), (\d+)\)(?:;| \+|$)")
AT_ONCE_S = 0.005
"""No process waited for a plan that follows an iteration by less."""


@dataclass(frozen=True)
class Iteration:
    planned_s: float
    ended_s: float
    rows: tuple[tuple[int, int], ...]

    def work(self) -> StepWork:
        decodes = [start + 1 for start, end in self.rows if end - start == 1]
        prompts = [(start, end) for start, end in self.rows if end - start > 1]
        return StepWork(
            sum(end - start for start, end in self.rows),
            len(self.rows),
            len(self.rows),
            sum(prefill_pairs(start, end - start) for start, end in prompts),
            sum(end for _, end in prompts),
            len(decodes),
            sum(decodes),
            max(decodes, default=0),
        )


def iterations(path: Path) -> Iterator[Iteration]:
    """Yield recorded steps. One begun while another ran (`StartStep.ahead`) counts from the end of that one."""
    in_flight: deque[tuple[float, tuple[tuple[int, int], ...]]] = deque()
    free_s = 0.0
    with path.open(encoding="utf-8") as lines:
        next(lines)  # the recorded machine's parts
        for call in map(json.loads, lines):
            for event in call["events"]:
                if event["event"] == "StepEnded":
                    planned_s, rows = in_flight.popleft()
                    yield Iteration(max(planned_s, free_s), call["now_s"], rows)
                    free_s = call["now_s"]
                elif event["event"] == "StepFailed":
                    in_flight.clear()
            in_flight.extend((call["now_s"], rows) for rows in _started(call))


def _started(call: dict[str, Any]) -> Iterator[tuple[tuple[int, int], ...]]:
    for effect in call["effects"]:
        if effect.startswith("StartStep "):
            yield tuple((int(start), int(end)) for start, end in _ROW.findall(effect))


def overlap(iteration: Iteration, others: Sequence[Iteration], starts: Sequence[float]) -> float:
    """Return the share of the iteration during which another engine ran."""
    at = max(0, bisect_right(starts, iteration.planned_s) - 1)
    shared_s = 0.0
    while at < len(others) and others[at].planned_s < iteration.ended_s:
        other = others[at]
        shared_s += max(0.0, min(iteration.ended_s, other.ended_s) - max(iteration.planned_s, other.planned_s))
        at += 1
    return shared_s / (iteration.ended_s - iteration.planned_s)


USERS = (1, 4, 8)
WORKER = "unified-0"
TURNS = 3
"""Times that each number of users is measured."""
Span = tuple[int, float, float, float | None]
"""Users, begin, end, processor seconds of the services and the client."""
_PROMPT, _OUTPUT = 96, 48
_PROMPTS, _OUTPUTS = (32, 64, 96, 128, 256, 384), (16, 32, 48, 64, 96)
"""Lengths of users who come and go, each as likely."""
_LONGEST = max(_PROMPTS)
_SLICE_S = 2.5
_LONE = 0.05
"""Maximum share of an iteration's time during which another engine computed."""
_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Cycle:
    """An iteration, and the seconds from its plan to the next one, which nothing had to wait for."""

    iteration: Iteration
    seconds: float


@dataclass(frozen=True, slots=True)
class Phase:
    """Cycles under `users` users. `service_s`: processor time of all processes but the worker, per iteration; None
    where this system does not tell."""

    users: int
    cycles: tuple[Cycle, ...]
    service_s: float | None


@dataclass(frozen=True, slots=True)
class Slice:
    """A few seconds of several workers, of each by time: iterations without a concurrent one, and all."""

    alone: list[list[Iteration]]
    runs: list[list[Iteration]]


def measure_live(overlay: dict[str, Any], seconds_each: float, users: Sequence[int] = USERS * TURNS) -> list[Phase]:
    """Measure phases of `users` users, one after the other, of at least `seconds_each` each. `overlay`: configuration
    over the preset `unified`. Raises `MeasurementFailed`."""
    with tempfile.TemporaryDirectory() as folder:
        free = {"monitor": {"port": 0}, "metrics": {"base_port": 0}, "recording": {"folder": folder}}
        with pipeline("unified", {**overlay, **free}, free_port()) as served:
            spans = observe(served, seconds_each, users)
        (recording,) = Path(folder).glob(f"{WORKER}-*.jsonl")
        return phases(list(iterations(recording)), spans)


def measure_together(overlay: dict[str, Any], workers: int, seconds: float) -> list[Slice]:
    """Measure `workers` workers under load: two users for each, who think for as long as they waited. `overlay` as
    `measure_live` takes it. Raises `MeasurementFailed`.

    Load, not turns of one worker and of all: on virtual processors concurrent engines are slow or fast for seconds (18
    and 12.6 ms a decode step where a lone one takes 10.7), depending on what ran before. After a pause they begin slow;
    under load they took a third more than alone where turns said two thirds.
    """
    with tempfile.TemporaryDirectory() as folder:
        free = {"monitor": {"port": 0}, "metrics": {"base_port": 0}, "recording": {"folder": folder}}
        shape = {"workers": [{"role": "unified", "count": workers}]}
        with pipeline("unified", {**overlay, **free, **shape}, free_port()) as served:
            numbers = count(1)
            asyncio.run(_load(served.url, workers, 1.0, numbers))  # as `observe` does
            began_s = time.monotonic()
            asyncio.run(_load(served.url, 2 * workers, seconds, numbers, thinking=True))
        runs = [list(iterations(path)) for path in sorted(Path(folder).glob("unified-*.jsonl"))]
    starts = [began_s + at * _SLICE_S for at in range(int(seconds / _SLICE_S))]
    return slices(_within(runs, start_s, start_s + _SLICE_S) for start_s in starts)


def slices(each: Iterable[list[list[Iteration]]]) -> list[Slice]:
    """Return slices of `each`, the iterations of each worker by time. A lone iteration ran without the others."""
    return [Slice([_lone(run, runs[:at] + runs[at + 1 :]) for at, run in enumerate(runs)], runs) for runs in each]


def _lone(run: Sequence[Iteration], others: Sequence[Sequence[Iteration]]) -> list[Iteration]:
    starts = [[each.planned_s for each in other] for other in others]
    pairs = list(zip(others, starts, strict=True))
    return [each for each in run if all(overlap(each, other, began) < _LONE for other, began in pairs)]


def _within(runs: Iterable[Sequence[Iteration]], began_s: float, ended_s: float) -> list[list[Iteration]]:
    return [[each for each in run if began_s <= each.planned_s and each.ended_s <= ended_s] for run in runs]


def observe(served: Served, seconds_each: float, users: Sequence[int]) -> list[Span]:
    """Load a running pipeline. Raises `MeasurementFailed`."""
    others = [pid for name, pid in _processes(served.monitor_url) if name != WORKER]
    numbers, spans = count(1), []
    asyncio.run(_load(served.url, 1, 1.0, numbers))  # caches and first allocations are no cycle's cost
    for at_once in users:
        before_s, own_s, began_s = _processor_s(others), time.process_time(), time.monotonic()
        asyncio.run(_load(served.url, at_once, seconds_each, numbers))
        ended_s, after_s, spent_s = time.monotonic(), _processor_s(others), None
        if before_s is not None and after_s is not None:
            spent_s = after_s - before_s + time.process_time() - own_s
        spans.append((at_once, began_s, ended_s, spent_s))
    return spans


def phases(ran: Sequence[Iteration], spans: Iterable[Span]) -> list[Phase]:
    """Raise `MeasurementFailed` for a span without iterations."""
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


async def _load(url: str, users: int, seconds: float, numbers: Iterable[int], *, thinking: bool = False) -> None:
    """Send one request at a time from each of `users` users until the time is over; running ones are read to the end.
    With `thinking` lengths vary, and users then think for about as long as they waited: some engines compute, at times
    none, at times all."""
    ends_s, following, random = time.monotonic() + seconds, iter(numbers), Random(0)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_TIMEOUT_S)) as session:

        async def user() -> None:
            while (sent_s := time.monotonic()) < ends_s:
                lengths = (random.choice(_PROMPTS), random.choice(_OUTPUTS)) if thinking else (_PROMPT, _OUTPUT)
                await _read(session, url, next(following), *lengths)
                if thinking:
                    thinks_s = random.expovariate(1.0) * (time.monotonic() - sent_s)
                    await asyncio.sleep(min(thinks_s, max(0.0, ends_s - time.monotonic())))

        await asyncio.gather(*(user() for _ in range(users)))


async def _read(session: aiohttp.ClientSession, url: str, number: int, prompt: int, output: int) -> None:
    body = {
        "prompt": [3 + (1000 + number * _LONGEST + 7 * at) % 40_000 for at in range(prompt)],  # none that is cached
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
    """Return the processor seconds of these processes so far."""
    total = 0
    for pid in pids:
        try:
            text = read(pid) if read is not None else Path(f"/proc/{pid}/stat").read_text(encoding="ascii")
        except OSError:
            return None
        user, system = text.rpartition(")")[2].split()[11:13]
        total += int(user) + int(system)
    return total / float(os.sysconf("SC_CLK_TCK"))
