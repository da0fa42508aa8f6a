"""The kill table: all requests once undisturbed, then once for each fault, which strikes amid them.

Every client asks one request after the other; half of the texts are greedy, half seeded, so that a text is a fact and
not a chance. Every other client asks for streams that can be resumed, and resumes them as docs/guide/api.md says. A
seed draws when a process is killed, by the share of the requests that are done: never before the first answer or after
the last. A census has texts of all `KINDS_OF_TEXT`, clients that all resume, and a row for each process, and each two,
killed and stopped. Called by `command`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import combinations, cycle
from random import Random
from typing import Any

from cohort.services.bench.chaos import exchange
from cohort.services.bench.chaos.accounts import ALL, TOGETHER, Accounts, Verdict, is_of
from cohort.services.bench.chaos.answer_content import AnswerContent, Api
from cohort.services.bench.chaos.catalogue import Case, words
from cohort.services.bench.chaos.census import LAUNCHER, Census
from cohort.services.bench.chaos.exchange import Broken, Manner
from cohort.services.bench.chaos.faults import KILL, LONGEST_STOP_S, RESTART, STOP, Faults
from cohort.services.bench.chaos.report import RESTARTED, UNDISTURBED, Run
from cohort.services.bench.chaos.users import NotDeterministic, Place, User

EARLIEST, LATEST = 0.1, 0.6
"""Shares of the requests between which a process is killed."""
_POLL_S = 0.05
STOPPED = f"{STOP}:"
"""Prefix of a row whose processes are stopped and go on, instead of killed."""
KINDS_OF_TEXT = ("greedy", "seeded", "grammar", "choices", "adapter", "drafts")


@dataclass(frozen=True, slots=True)
class Load:
    """`requests` of each client; `output_tokens` are drawn between half and one and a half of it. `mixed`: of all
    `KINDS_OF_TEXT`; `adapter`: its name, "" = the base stands in for it."""

    clients: int
    requests: int
    output_tokens: int
    seed: int
    mixed: bool = False
    adapter: str = ""

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
        name = f"client {client}, request {index}"
        if self.mixed:
            kind = KINDS_OF_TEXT[(client + index) % len(KINDS_OF_TEXT)]
            name, body = f"{kind}: {name}", body | self._mixed(kind, random)
        return Case(name, Api.COMPLETIONS, body)

    def _mixed(self, kind: str, random: Random) -> dict[str, Any]:
        match kind:
            case "grammar":  # longer than the text
                return {
                    "temperature": 0.8,
                    "ignore_eos": False,
                    "guided_regex": f"([a-z]{{3,8}} ){{{self.output_tokens}}}",
                }
            case "choices":
                return {"temperature": 0.8, "n": 2}
            case "adapter":
                return {"temperature": 0, **({"model": self.adapter} if self.adapter else {})}
            case "drafts":  # what repeats is expected
                return {"temperature": 0, "prompt": f"{words(random, 5)} " * 6}
            case _:
                return {"temperature": 0.8 if kind == "seeded" else 0}


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

    def has(self, broken: str) -> bool:
        """Return whether all that this row breaks lives."""
        living = self._census.living()
        return all(any(is_of(name, part) for name in living) for part in broken.removeprefix(STOPPED).split(TOGETHER))

    def all_faults(self) -> list[str]:
        """Return the rows of a census. The death of the launcher is the end of the pipeline, and no fault of it."""
        living = sorted(self._census.living())
        instances = sorted(self._census.run_file().processes)
        pairs = [TOGETHER.join(pair) for pair in combinations(instances, 2)]
        killed = [*(name for name in living if name != LAUNCHER), *pairs]
        return [*killed, *(STOPPED + name for name in (*living, *pairs))]

    async def run(self, broken: str, kills: int = 0) -> Run | None:
        """Return one row: `broken` is what is killed or stopped so many times, `UNDISTURBED` or `RESTARTED`. None where
        it is a helper that lived at none of these times: some live for seconds. Raises `NotDeterministic` when the
        undisturbed run gives no references."""
        self._log(f"{self._preset}: {broken}")
        load, accounts, over = self._load, Accounts(), asyncio.Event()
        faults, started_s = self._faults(accounts), self._place.now_s()
        async with asyncio.TaskGroup() as tasks:
            for number in range(load.clients):
                user = AnswerCollector(self._place, accounts, load.cases(number), self._known, Random(number))
                user.resumes = load.mixed or number % 2 == 1
                tasks.create_task(user.run(over))
            await self._strike(faults, accounts, broken, kills)
            over.set()
        if broken == UNDISTURBED and accounts.requests != accounts.total(Verdict.RIGHT):
            raise NotDeterministic(f"requests failed while nothing was broken: {accounts.unaccounted[:2]}")
        if "/" in broken:
            if not accounts.faults:
                self._log(f"{self._preset}: {broken} is left out: it did not live when it was to be struck")
                return None
            kills = len(accounts.faults)
        found = [*faults.missing, *lost(accounts, 0 if load.mixed else load.clients, kills)]
        return Run.of(self._preset, broken, self._place.now_s() - started_s, accounts, found)

    async def _strike(self, faults: Faults, accounts: Accounts, broken: str, kills: int) -> None:
        total = self._load.clients * self._load.requests
        restarts = [EARLIEST] if broken == RESTARTED else []
        for share in restarts or sorted(self._random.uniform(EARLIEST, LATEST) for _ in range(kills)):
            while accounts.requests < share * total:  # noqa: ASYNC110 -- a count that the clients raise
                await asyncio.sleep(_POLL_S)
            if restarts:
                await faults.strike(ALL, RESTART)
            elif (name := faults.one_of(broken.removeprefix(STOPPED))) is not None:
                await faults.strike(name, STOP if broken.startswith(STOPPED) else KILL)

    def _faults(self, accounts: Accounts) -> Faults:
        faults = Faults(self._place, self._census, accounts, self._workers, self._random, self._log)
        faults.stop_s = LONGEST_STOP_S
        return faults


def lost(accounts: Accounts, clients: int, kills: int) -> Iterator[str]:
    """Yield what a row does not allow. Half of the `clients` are cut; one may meet a dying gateway twice. 0: all
    resume."""
    if refused := accounts.total(Verdict.REFUSED):
        yield f"{refused} requests were refused"
    if (cut := accounts.total(Verdict.CUT)) > clients * kills:
        yield f"{cut} requests were cut off, more than one a client and kill"
    if len(accounts.faults) < kills:
        yield f"{len(accounts.faults)} of {kills} kills found their process"
