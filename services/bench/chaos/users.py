"""The clients: each asks, reads in some manner or leaves, thinks a while, and asks again.

The mix is drawn from a seed for each client by itself; what comes in between (faults, load) moves times, not draws.
Every ending is booked (`accounts`). Called by `soak`, and by `kill_table` for clients that only ask.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from cohort.common.errors import CohortError
from cohort.services.bench.chaos import exchange
from cohort.services.bench.chaos.accounts import Accounts
from cohort.services.bench.chaos.answer_content import AnswerContent, Api, Reader
from cohort.services.bench.chaos.catalogue import Case, fresh, refusal
from cohort.services.bench.chaos.exchange import (
    Answered,
    Broken,
    Ending,
    Failed,
    Left,
    Manner,
    Refused,
    Replied,
    Silent,
    Stream,
)

AWAY_S = 0.3
"""Pause between two tries of a client whose gateway is away."""
RESUME_DEADLINE_S = 120.0
_MIX = {
    "read": 30,
    "whole": 18,
    "refusal": 10,
    "leave amid": 9,
    "fresh": 8,
    "leave before": 7,
    "resume": 7,
    "slow": 5,
    "look": 4,
    "chain": 3,
    "abandon": 2,
    "delete": 2,
    "stall": 1,
    "half a body": 1,
}


class NotDeterministic(CohortError):
    """The quiet run gives no reference: an answer failed, or differs from the one before."""


@dataclass(frozen=True, slots=True)
class Place:
    """Addresses and keys of the pipeline, and the clients' start (monotonic seconds)."""

    url: str
    monitor_url: str
    keys: Sequence[str]
    started_s: float

    def now_s(self) -> float:
        return time.monotonic() - self.started_s


async def references(place: Place, cases: Sequence[Case]) -> dict[str, AnswerContent]:
    """Return every case's answer, sent whole and as a stream while nothing is broken. Raises `NotDeterministic`."""
    known: dict[str, AnswerContent] = {}
    async with exchange.session(place.keys[0], keep_alive=True) as http:
        for case in cases:
            for stream in (False, True):
                if stream and "prompt_logprobs" in case.body:
                    continue
                ending = await exchange.generate(http, place.url, case.api, case.body, Manner(stream=stream))
                match ending:
                    case Answered(content) if known.setdefault(case.name, content) == content:
                        pass
                    case _:
                        how = "as a stream" if stream else "whole"
                        raise NotDeterministic(f"{case.name}, {how}: {ending}; before: {known.get(case.name)}")
    return known


class User:
    away_s = AWAY_S
    repeats = False
    """Flag: repeat a stream of which nothing came, not even its resume token."""

    def __init__(
        self, place: Place, accounts: Accounts, cases: Sequence[Case], known: dict[str, AnswerContent], random: Random
    ) -> None:
        self._place = place
        self._accounts = accounts
        self._cases = cases
        self._known = known
        self._random = random
        self._key = random.choice(place.keys)

    async def run(self, stopping: asyncio.Event, mean_pause_s: float) -> None:
        """Send requests until `stopping`; end those that have begun."""
        random = self._random
        sessions = {
            slow: exchange.session(self._key, keep_alive=random.random() < 0.6, small_buffers=slow)
            for slow in (False, True)
        }
        try:
            while not stopping.is_set():
                what = random.choices(list(_MIX), list(_MIX.values()))[0]
                await self._act(what, sessions[what in ("slow", "stall")])
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(stopping.wait(), random.expovariate(1 / mean_pause_s))
        finally:
            for each in sessions.values():
                await each.close()

    async def _act(self, what: str, http: aiohttp.ClientSession) -> None:
        random = self._random
        case = random.choice(self._cases)
        streams = "prompt_logprobs" not in case.body
        match what:
            case "read" | "whole":
                await self._generate(what, http, case, Manner(stream=streams and what == "read"))
            case "slow":
                await self._generate(what, http, case, Manner(stream=streams, pause_s=random.uniform(0.005, 0.05)))
            case "leave before":
                manner = Manner(stream=random.random() < 0.5 and streams, leave_after_events=0)
                manner.leave_s = random.choice([0.0, random.uniform(0, 0.03), random.uniform(0, 0.3)])
                await self._generate(what, http, case, manner)
            case "leave amid":
                await self._generate(what, http, case, Manner(stream=streams, leave_after_events=random.randint(1, 20)))
            case "stall":
                manner = Manner(stream=streams, stall_after_events=random.randint(1, 4), leave_s=random.uniform(1, 25))
                await self._generate(what, http, case, manner)
            case "resume" | "abandon" | "delete":
                case = random.choice([case for case in self._cases if case.resumable])
                await self._resumable(what, http, case, breaks=1 if what != "resume" else random.randint(0, 3))
            case "fresh":
                await self._fresh(http)
            case "chain":
                await self._chain(http)
            case "refusal":
                await self._refusal(http)
            case "look":
                await self._read_pages(http)
            case _:
                at = urlsplit(self._place.url)
                started_s = self._place.now_s()
                wait_s = random.uniform(0, 5)
                ending = await exchange.half_a_body(str(at.hostname), at.port or 80, self._key, wait_s)
                self._book(what, started_s, ending, None)

    def _book(self, what: str, started_s: float, ending: Ending, expected: AnswerContent | int | None) -> None:
        self._accounts.book(what, started_s, self._place.now_s(), ending, expected)

    def _book_case(self, what: str, started_s: float, ending: Ending, case: Case, *, timed: bool) -> None:
        """Record an answer, as the reference of a case that has none. `timed`: it was read as it came."""
        self._book(f"{what}: {case.name}", started_s, ending, self._known.get(case.name))
        if isinstance(ending, Answered):
            self._known.setdefault(case.name, ending.answer_content)
            if timed and ending.events_s:
                self._accounts.time(started_s, [at_s - self._place.started_s for at_s in ending.events_s])

    async def _generate(self, what: str, http: aiohttp.ClientSession, case: Case, manner: Manner) -> Ending:
        started_s = self._place.now_s()
        ending = await exchange.generate(http, self._place.url, case.api, case.body, manner)
        self._book_case(what, started_s, ending, case, timed=not manner.pause_s)
        return ending

    async def _fresh(self, http: aiohttp.ClientSession) -> None:
        """Send a new request twice: both answers must be equal."""
        case, first = fresh(self._random), None
        for stream in (True, False):
            started_s = self._place.now_s()
            ending = await exchange.generate(http, self._place.url, case.api, case.body, Manner(stream=stream))
            self._book(case.name, started_s, ending, first)
            if not isinstance(ending, Answered):
                return
            first = ending.answer_content

    async def _refusal(self, http: aiohttp.ClientSession) -> None:
        wrong, started_s = refusal(self._random, self._key), self._place.now_s()
        url = self._place.url + wrong.path
        headers = {"Authorization": "", **wrong.headers}
        if not headers["Authorization"]:  # the session's own key would be sent in its place
            async with aiohttp.ClientSession(timeout=http.timeout) as bare:
                ending = await exchange.send(bare, "POST", url, data=wrong.data, headers=wrong.headers)
        else:
            ending = await exchange.send(http, "POST", url, data=wrong.data, headers=headers)
        self._book(wrong.name, started_s, ending, wrong.status)

    async def _read_pages(self, http: aiohttp.ClientSession) -> None:
        """Read what people and programs read besides answers. The monitor's pages may be away with it."""
        own, monitor = self._place.url, self._place.monitor_url
        tokenize = {"json": {"prompt": f"{self._random.random()} words"}}
        method, url, how = self._random.choice(
            [
                ("GET", f"{own}/v1/models", {}),
                ("GET", f"{own}/metrics", {}),
                ("GET", f"{own}/health", {}),
                ("GET", f"{own}/v1/usage", {}),
                ("GET", f"{own}/openapi.json", {}),
                ("POST", f"{own}/tokenize", tokenize),
                ("GET", f"{monitor}/metrics", {}),
                ("GET", f"{monitor}/api/state", {}),
                ("GET", f"{monitor}/", {}),
            ]
        )
        started_s = self._place.now_s()
        ending = await exchange.send(http, method, url, **how)
        away = any(
            fault.hits("monitor") and fault.during(started_s, self._place.now_s()) for fault in self._accounts.faults
        )
        at_monitor = url.startswith(monitor)
        self._book("look: monitor" if at_monitor else "look", started_s, Left() if at_monitor and away else ending, 200)

    async def _chain(self, http: aiohttp.ClientSession) -> None:
        """Create a stored response and one that continues it, read both again and delete them."""
        url, ids = self._place.url + Api.RESPONSES, []
        body: dict[str, Any] = {"input": "clock river", "temperature": 0, "max_output_tokens": 8}
        for part in ("first", "second"):
            started_s = self._place.now_s()
            ending = await exchange.send(http, "POST", url, json=body)
            self._book(f"chain: {part}", started_s, ending, 200)
            if not isinstance(ending, Replied) or ending.status != 200:
                break
            ids.append(ending.body["id"])
            if not ending.body["store"]:
                break
            body = {**body, "input": "stone", "previous_response_id": ids[-1]}
        for method in ("GET", "DELETE"):
            for identity in ids:
                started_s = self._place.now_s()
                ending = await exchange.send(http, method, f"{url}/{identity}")
                self._book(f"chain: {method}", started_s, ending, 200)

    async def _resumable(self, what: str, http: aiohttp.ClientSession, case: Case, breaks: int) -> Ending:
        """Leave a stream and resume it, `breaks` times, across the gateway's end too; or leave it for good, or delete
        it."""
        random, place = self._random, self._place
        timed, broken = breaks == 0, False
        stream, started_s = Stream(Reader(case.api)), place.now_s()
        first: tuple[str, dict[str, Any]] | None = (str(case.api), case.body)
        ending: Ending = Silent()
        while place.now_s() - started_s < RESUME_DEADLINE_S:
            manner = Manner(leave_after_events=random.randint(1, 12) if breaks > 0 else None)
            ending = await exchange.follow_resumed(http, place.url, stream, manner, first)
            breaks -= 1
            first = None if stream.token else first
            match ending:
                case Left() if what == "resume":
                    await asyncio.sleep(random.choice([0.0, random.uniform(0, 2)]))
                case Broken() | Failed() | Refused(429 | 503) if stream.token or self.repeats:  # a shutdown ends it
                    broken = True
                    if isinstance(ending, Refused):
                        self._accounts.refuse(ending)
                    await asyncio.sleep(self.away_s)
                case _:
                    break
            ending = Silent()
        self._accounts.resumed += broken and isinstance(ending, Answered)
        self._book_case(what, started_s, ending, case, timed=timed)
        if what == "delete" and isinstance(ending, Left) and stream.token:
            started_s = place.now_s()
            reply = await exchange.send(http, "DELETE", f"{place.url}/v1/streams/{stream.token}")
            self._book("delete: its end", started_s, reply, None)
        return ending
