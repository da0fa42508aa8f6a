"""The kill table: all requests once undisturbed, then once for each kind of fault, which strikes amid them.

Every client asks one request after the other; half of the texts are greedy, half seeded, so that a text is a fact and
not a chance. Every other client asks for streams that can be resumed, and resumes them as docs/guide/api.md says. A
seed draws when a process is killed, by the share of the requests that are done: never before the first answer or after
the last. Called by `command`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import cycle
from random import Random

from cohort.services.bench.chaos import exchange
from cohort.services.bench.chaos.accounts import ALL, Accounts, Verdict, is_of
from cohort.services.bench.chaos.answer_content import AnswerContent, Api
from cohort.services.bench.chaos.catalogue import Case, words
from cohort.services.bench.chaos.census import Census
from cohort.services.bench.chaos.exchange import Broken, Manner
from cohort.services.bench.chaos.faults import KILL, RESTART, Faults
from cohort.services.bench.chaos.report import RESTARTED, UNDISTURBED, Run
from cohort.services.bench.chaos.users import NotDeterministic, Place, User

EARLIEST, LATEST = 0.1, 0.6
"""Shares of the requests between which a process is killed."""
_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class Load:
    """`requests` of each client; `output_tokens` are drawn between half and one and a half of it."""

    clients: int
    requests: int
    output_tokens: int
    seed: int

    def cases(self, client: int) -> list[Case]:
        return [self._case(client, index) for index in range(self.requests)]

    def _case(self, client: int, index: int) -> Case:
        random = Random(f"{self.seed}/{client}/{index}")
        body = {
            "prompt": words(random, random.randint(2, 40)),
            "max_tokens": random.randint(max(1, self.output_tokens // 2), self.output_tokens * 3 // 2),
            "temperature": 0.8 if index % 2 else 0,
            "seed": index,
            "ignore_eos": True,
        }
        return Case(f"client {client}, request {index}", Api.COMPLETIONS, body)


class AnswerCollector(User):
    """Streams the answers to all its cases, and from the first on again until it is told to stop."""

    away_s = 0.1
    repeats = True
    resumes = False

    async def run(self, stopping: asyncio.Event, mean_pause_s: float = 0.0) -> None:
        async with exchange.session(self._key, keep_alive=True) as http:
            for number, case in enumerate(cycle(self._cases)):
                if stopping.is_set() and number >= len(self._cases):
                    return
                if self.resumes:
                    ending = await self._resumable("resume", http, case, breaks=0)
                else:
                    ending = await self._generate("read", http, case, Manner())
                if isinstance(ending, Broken):  # the system takes connections for a killed process for milliseconds
                    await asyncio.sleep(self.away_s)


class KillTable:
    def __init__(
        self, preset: str, place: Place, census: Census, workers: int, load: Load, log: Callable[[str], None]
    ) -> None:
        self._preset = preset
        self._place = place
        self._census = census
        self._workers = workers
        self._load = load
        self._log = log
        self._random = Random(f"{load.seed}/{preset}")
        self._known: dict[str, AnswerContent] = {}

    def has(self, kind: str) -> bool:
        return any(is_of(name, kind) for name in self._census.run_file().processes)

    async def run(self, broken: str, kills: int = 0) -> Run:
        """Return one row: `broken` is a kind that is killed so many times, `UNDISTURBED` or `RESTARTED`. Raises
        `NotDeterministic` when the undisturbed run gives no references."""
        self._log(f"{self._preset}: {broken}")
        load, accounts, over = self._load, Accounts(), asyncio.Event()
        faults, started_s = self._faults(accounts), self._place.now_s()
        async with asyncio.TaskGroup() as tasks:
            for number in range(load.clients):
                user = AnswerCollector(self._place, accounts, load.cases(number), self._known, Random(number))
                user.resumes = number % 2 == 1
                tasks.create_task(user.run(over))
            await self._strike(faults, accounts, broken, kills)
            over.set()
        if broken == UNDISTURBED and accounts.requests != accounts.total(Verdict.RIGHT):
            raise NotDeterministic(f"requests failed while nothing was broken: {accounts.unaccounted[:2]}")
        found = [*faults.missing, *lost(accounts, load.clients, kills)]
        return Run.of(self._preset, broken, self._place.now_s() - started_s, accounts, found)

    async def _strike(self, faults: Faults, accounts: Accounts, broken: str, kills: int) -> None:
        total = self._load.clients * self._load.requests
        restarts = [EARLIEST] if broken == RESTARTED else []
        for share in restarts or sorted(self._random.uniform(EARLIEST, LATEST) for _ in range(kills)):
            while accounts.requests < share * total:  # noqa: ASYNC110 -- a count that the clients raise
                await asyncio.sleep(_POLL_S)
            if restarts:
                await faults.strike(ALL, RESTART)
            elif (name := faults.one_of(broken)) is not None:
                await faults.strike(name, KILL)

    def _faults(self, accounts: Accounts) -> Faults:
        return Faults(self._place, self._census, accounts, self._workers, self._random, self._log)


def lost(accounts: Accounts, clients: int, kills: int) -> Iterator[str]:
    """Yield what a row does not allow. Half of the clients are cut; one may meet a dying gateway twice."""
    if refused := accounts.total(Verdict.REFUSED):
        yield f"{refused} requests were refused"
    if (cut := accounts.total(Verdict.CUT)) > clients * kills:
        yield f"{cut} requests were cut off, more than one a client and kill"
    if len(accounts.faults) < kills:
        yield f"{len(accounts.faults)} of {kills} kills found their process"
