"""A soak from its first request to its last look: references, a quiet moment, traffic and faults, a quiet moment.

Decides when; what is done is `users`' and `faults`'. The end is compared with a quiet moment before the traffic: the
same threads, descriptors, tasks and helper processes, no request, block, lease or stream held. A process may have a few
descriptors more, which a pool of connections or a database opens when it first needs them (`SPARE`). Called by
`command`, which has started the pipeline, ends it, and then asks for the files that are left.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
import msgspec

from cohort.services.bench.chaos import exchange
from cohort.services.bench.chaos.accounts import Accounts, Verdict
from cohort.services.bench.chaos.catalogue import catalogue
from cohort.services.bench.chaos.census import Census, Sample
from cohort.services.bench.chaos.faults import Faults
from cohort.services.bench.chaos.report import MEGABYTE
from cohort.services.bench.chaos.users import Place, User, references

SPARE = {"socket": 2, "file": 2, "pipe": 0, "eventpoll": 0, "eventfd": 0}
SPARE_THREADS = 8
"""Pools of threads start them when they are first wanted, the event loop's own at most six on two cores."""
SPARE_TASKS = 2
HELD = {
    "worker": ("held_blocks", "leases", "running", "waiting", "awaiting_kv", "parked", "quarantined_blocks"),
    "manager": ("waiting", "live"),
    "gateway": ("requests_running", "requests_waiting", "open_streams"),
}
_LOGS = "logs"
_RUN_FILES = ("launcher.lock", "resolved.yaml", _LOGS)
_STATE_FILES = ("batches", "streams.sqlite3", "key-usage.sqlite3", "length_predictor", "learned", "overlay.yaml")
_BATCH_FILES = ("batches.sqlite", "responses.sqlite", "lock", "runner", "files")
_SQLITE = ("", "-wal", "-shm")


class Moment(msgspec.Struct, frozen=True):
    """All processes at one quiet time: their samples by name, and their own stats by instance."""

    samples: dict[str, Sample]
    stats: dict[str, dict[str, float]]


def held(stats: Mapping[str, Mapping[str, float]], workers: frozenset[str]) -> list[str]:
    """Return what any process holds for a request."""
    found = []
    for name, each in stats.items():
        for stat in HELD["worker" if name in workers else name] if name in workers or name in HELD else ():
            if each.get(stat, 0):
                found.append(f"{name}: {stat} = {each[stat]:g}")
    for name in sorted(workers - stats.keys()):
        found.append(f"{name}: is not there")
    for name in sorted(workers & stats.keys()):
        each = stats[name]
        if "total_blocks" in each and each["free_blocks"] + each.get("cached_blocks", 0.0) < each["total_blocks"]:
            free, cached = each["free_blocks"], each.get("cached_blocks", 0.0)
            found.append(f"{name}: {free:g} blocks free and {cached:g} cached of {each['total_blocks']:g}")
    return found


def grown(start: Moment, end: Moment) -> list[str]:
    """Return threads, descriptors, tasks and helpers beyond those of the start."""
    found = []
    for name, now in end.samples.items():
        before = start.samples.get(name)
        if before is None:
            found.append(f"{name}: a process that was not there at the start")
            continue
        if now.threads > before.threads + SPARE_THREADS:
            found.append(f"{name}: {now.threads} threads, {before.threads} at the start")
        for kind, count in now.descriptors.items():
            if count > before.descriptors.get(kind, 0) + SPARE.get(kind, 0):
                found.append(f"{name}: {count} descriptors ({kind}), {before.descriptors.get(kind, 0)} at the start")
    for name in start.samples.keys() - end.samples.keys():
        if "/" not in name:
            found.append(f"{name}: is gone")
    for name, stats in end.stats.items():
        tasks, former = stats.get("asyncio_tasks", 0.0), start.stats.get(name, {}).get("asyncio_tasks", 0.0)
        if tasks > former + SPARE_TASKS:
            found.append(f"{name}: {tasks:g} asyncio tasks, {former:g} at the start")
    return found


def unknown_files(run_folder: Path, state_folder: Path, temporary: Path) -> list[str]:
    """Return files that the pipeline left once it had ended, other than those that it keeps."""
    found = [str(path) for path in _unknown(run_folder, _RUN_FILES) if not path.name.endswith(".sock.lock")]
    found += [str(path) for path in (run_folder / _LOGS).glob("*") if not path.name.endswith((".log", ".log.1"))]
    found += map(str, _unknown(state_folder, _STATE_FILES))
    for batches in (state_folder / "batches").glob("*"):
        found += map(str, _unknown(batches, _BATCH_FILES))
        found += map(str, (batches / "files").glob("*"))
    found += map(str, temporary.iterdir())
    return found


def _unknown(folder: Path, known: tuple[str, ...]) -> Iterator[Path]:
    names = {name + end for name in known for end in _SQLITE}
    return (path for path in folder.iterdir() if path.name not in names)


def stats_of(state: Any) -> dict[str, dict[str, float]]:
    """Return the stats of the processes that the monitor reports, by instance."""
    return {each["instance"]: each["stats"] for each in state["processes"] if each["status"] == "up"}


_LOG_EVERY_S = 30.0
_MAPS_EVERY = 6  # samples
_PUBLISH_EVERY_S = 60.0
_WARM_S = 10.0
_SETTLE_S = 6.0
_LAST_ANSWER_S = 300.0
_COUNTERS = (
    "preemptions_total",
    "kv_transfers_in_total",
    "transfer_failures_total",
    "transfer_retries_total",
    "transfer_stalls_total",
    "expired_leases_total",
    "misnamed_total",
    "resubmitted_total",
    "cancelled_total",
    "finished_total",
    "failed_total",
    "prefix_hits_total",
)


@dataclass(frozen=True, slots=True)
class Terms:
    """Parameters of the whole soak. `kill_every_s` 0: no faults; `kill`: names or kinds, None for every process;
    `rolling_restart`: restarts of all of them are in the deck."""

    seconds: float
    kills_for_s: float
    clients: int
    rate: float
    kill_every_s: float
    kill: Sequence[str] | None
    rolling_restart: bool
    sample_s: float
    quiet_s: float
    seed: int


class Soak:
    def __init__(
        self, place: Place, census: Census, terms: Terms, workers: frozenset[str], log: Callable[[str], None]
    ) -> None:
        self.place = place
        self.census = census
        self.accounts = Accounts()
        self.findings: list[str] = []
        self.counters: dict[str, float] = {}
        self._terms = terms
        self._workers = workers
        self._print = log

    async def run(self, publish: Callable[[], None]) -> None:
        """Run the soak; `publish` is called now and then. Raises `NotDeterministic` when the quiet run fails."""
        terms = self._terms
        cases = catalogue(terms.seed)
        known = await references(self.place, cases)
        self._log(f"{len(cases)} requests have known answers")
        sampling = asyncio.create_task(self._sample_and_publish(publish))
        try:
            users = [
                User(self.place, self.accounts, cases, known, self._random(f"client {number}"))
                for number in range(terms.clients)
            ]
            await self._traffic(users, _WARM_S)
            start = await self._moment(_SETTLE_S)
            self._log(
                "start " + ", ".join(f"{name} {sum(it.descriptors.values())}" for name, it in start.samples.items())
            )
            await self._soak(users)
            self._log("all clients are gone")
            end = await self._moment(terms.quiet_s)
        finally:
            sampling.cancel()
            await asyncio.gather(sampling, return_exceptions=True)
        self.findings += held(end.stats, self._workers) + grown(start, end)
        self.counters = {
            f"{name}.{stat}": stats[stat] for name, stats in end.stats.items() for stat in _COUNTERS if stat in stats
        }

    def _random(self, name: str) -> Random:
        return Random(f"{self._terms.seed}/{name}")

    async def _soak(self, users: list[User]) -> None:
        terms, over = self._terms, asyncio.Event()
        faults = Faults(self.place, self.census, self.accounts, len(self._workers), self._random("faults"), self._log)
        faults.victims, faults.restarts = terms.kill, terms.rolling_restart
        breaking = asyncio.create_task(faults.run(over, terms.kill_every_s)) if terms.kill_every_s else None
        ending = asyncio.get_running_loop().call_later(terms.kills_for_s, over.set)
        try:
            await self._traffic(users, terms.seconds)
        finally:
            ending.cancel()
            over.set()
            if breaking is not None:
                await breaking
        self.findings += faults.missing

    async def _traffic(self, users: list[User], seconds: float) -> None:
        """Raise whatever a client raises: that is a defect of the soak."""
        terms, stopping = self._terms, asyncio.Event()
        timer = asyncio.get_running_loop().call_later(seconds, stopping.set)
        pause_s = terms.clients / terms.rate
        try:
            async with asyncio.timeout(seconds + _LAST_ANSWER_S), asyncio.TaskGroup() as tasks:
                for user in users:
                    tasks.create_task(user.run(stopping, pause_s))
        except TimeoutError:
            self.findings.append(f"a client was not done {_LAST_ANSWER_S:.0f} s after the end")
        finally:
            timer.cancel()

    async def _moment(self, quiet_s: float) -> Moment:
        """Sample the processes after this time without any client."""
        await asyncio.sleep(quiet_s)
        async with exchange.session("", keep_alive=False) as http:
            state = await self._state(http)
        await asyncio.sleep(1.0)  # that connection is closed
        living = self.census.sample(self.place.now_s(), maps=True)
        samples = {name: self.census.series[life][-1] for name, life in living.items() if life in self.census.series}
        return Moment(samples, stats_of(state))

    async def _state(self, http: aiohttp.ClientSession) -> Any:
        async with http.get(f"{self.place.monitor_url}/api/state") as response:
            return msgspec.json.decode(await response.read())

    async def _sample_and_publish(self, publish: Callable[[], None]) -> None:
        """Sample, print progress and publish the document until cancelled."""
        place, number = self.place, 0
        logged_s = published_s = place.now_s()
        while True:
            number += 1
            with contextlib.suppress(OSError, msgspec.MsgspecError):  # the launcher writes its file
                self.census.sample(place.now_s(), maps=number % _MAPS_EVERY == 0)
            if place.now_s() - logged_s >= _LOG_EVERY_S:
                logged_s = place.now_s()
                self._progress()
            if place.now_s() - published_s >= _PUBLISH_EVERY_S:
                published_s = place.now_s()
                publish()
            await asyncio.sleep(self._terms.sample_s)

    def _progress(self) -> None:
        accounts, latest = self.accounts, {}
        for life, samples in self.census.series.items():
            latest[life.name] = samples[-1].rss_bytes
        verdicts = ", ".join(f"{verdict} {accounts.total(verdict)}" for verdict in Verdict)
        memory = ", ".join(f"{name} {size / MEGABYTE:.0f}" for name, size in latest.items())
        self._log(f"{accounts.requests} requests ({verdicts}), {len(accounts.faults)} faults; MB: {memory}")
        for bad in accounts.unaccounted[-1:]:
            if bad.to_s > self.place.now_s() - _LOG_EVERY_S:
                self._log(f"unaccounted: {bad.kind} at {bad.from_s:.1f} s: {bad.detail[:300]}; under {bad.under}")

    def _log(self, text: str) -> None:
        minutes, seconds = divmod(int(self.place.now_s()), 60)
        self._print(f"{minutes:3d}:{seconds:02d} {text}")
