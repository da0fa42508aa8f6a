"""The clients of a kill table: each asks one request after the other, streams the answer, and compares its text.

The requests are drawn from a seed; half of them greedy, half seeded, so that a text is a fact and not a chance. Every
other client asks for streams that can be resumed, and resumes them as docs/guide/api.md says; the others are plain, and
count a broken connection as a failed request. Called by `command`.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import aiohttp

from cohort.common.errors import CohortError
from cohort.services.bench.chaos import exchange
from cohort.services.bench.chaos.catalogue import words
from cohort.services.bench.chaos.exchange import Answered, Broken, Ending, Failed, Manner, Refused, Silent, Stream
from cohort.services.bench.chaos.said import Api, Reader, Said

AWAY_S = 0.1
"""Between two tries of a client whose gateway is away."""
DEADLINE_S = 120.0
"""A client gives a request up; that is a failure."""
_REFUSED = "ClientConnectorError"


class NotDeterministic(CohortError):
    """The undisturbed run is no reference: a request failed in it."""


@dataclass(frozen=True, slots=True)
class Load:
    """`requests` of each client; `output_tokens` are drawn between half and one and a half of it."""

    clients: int
    requests: int
    output_tokens: int
    seed: int

    @property
    def total(self) -> int:
        return self.clients * self.requests

    def body(self, client: int, index: int) -> dict[str, Any]:
        random = Random(f"{self.seed}/{client}/{index}")
        return {
            "prompt": words(random, random.randint(2, 40)),
            "max_tokens": random.randint(max(1, self.output_tokens // 2), self.output_tokens * 3 // 2),
            "temperature": 0.8 if index % 2 else 0,
            "seed": index,
            "ignore_eos": True,
        }


@dataclass(slots=True)
class Counts:
    """Of one run. `own`: failed on a connection that the killed process held, of a stream that nothing was to resume;
    `foreign`: all other failures."""

    requests: int = 0
    own: int = 0
    foreign: int = 0
    resumed: int = 0
    wrong: int = 0
    longest_pause_s: float = 0.0
    longest_ttft_s: float = 0.0
    said: list[str] = field(default_factory=list)
    """The first failures and wrong texts, in words."""

    @property
    def failed(self) -> int:
        return self.own + self.foreign


class Client:
    """One of them, with connections of its own."""

    def __init__(self, number: int, url: str, load: Load, known: dict[tuple[int, int], Said]) -> None:
        """`known`: the texts of the undisturbed run, by client and request; a request without one is asked to be its
        own reference."""
        self._number = number
        self._url = url
        self._load = load
        self._known = known
        self._socket: socket.socket | None = None
        self.struck = False
        """Its connection is held by the process that is killed now: one request of it may fail."""
        self.dying: Path | None = None
        """While this exists, a process that is killed now may still be given its connections."""

    @property
    def resumes(self) -> bool:
        return self._number % 2 == 1

    @property
    def port(self) -> int:
        """Of its latest connection, here; 0 where it has none."""
        try:
            return int(self._socket.getsockname()[1]) if self._socket is not None else 0
        except OSError:  # it is closed
            return 0

    async def run(self, counts: Counts, enough: Callable[[], bool]) -> None:
        """All its requests, and from the first on again until there are enough."""
        connector = aiohttp.TCPConnector(limit=1, socket_factory=self._connecting)
        timeout = aiohttp.ClientTimeout(total=DEADLINE_S)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as http:
            index = 0
            while index < self._load.requests or not enough():
                await self._ask(http, index % self._load.requests, counts)
                index += 1

    def _connecting(self, address: Any) -> socket.socket:
        family, kind, protocol, _, _ = address
        self._socket = socket.socket(family, kind, protocol)
        if self.dying is not None and self.dying.exists():
            self.struck = True
        return self._socket

    async def _ask(self, http: aiohttp.ClientSession, index: int, counts: Counts) -> None:
        stream = Stream(Reader(Api.COMPLETIONS), keep=self.resumes)
        began_s = time.monotonic()
        ending, breaks = await self._follow(http, index, stream, began_s)
        counts.requests += 1
        times = stream.times_s
        if times:
            counts.longest_ttft_s = max(counts.longest_ttft_s, times[0] - began_s)
        counts.longest_pause_s = max([counts.longest_pause_s, *(later - sooner for sooner, later in pairwise(times))])
        match ending:
            case Answered(said=said):
                counts.resumed += breaks > 0
                if self._known.setdefault((self._number, index), said) != said:
                    counts.wrong += 1
                    counts.said.append(f"client {self._number}, request {index}: {said.texts} is another text")
            case _:
                if self.struck and not self.resumes:
                    counts.own, self.struck = counts.own + 1, False
                else:
                    counts.foreign += 1
                    counts.said.append(f"client {self._number}, request {index}: {ending}")

    async def _follow(
        self, http: aiohttp.ClientSession, index: int, stream: Stream, began_s: float
    ) -> tuple[Ending, int]:
        """One request to its end, over as many connections as it takes; and how many of them broke."""
        first: tuple[str, dict[str, Any]] | None = (str(Api.COMPLETIONS), self._load.body(self._number, index))
        breaks = 0
        while True:
            ending = await exchange.follow_resumed(http, self._url, stream, Manner(), first)
            if time.monotonic() - began_s > DEADLINE_S:
                return Silent(), breaks
            match ending:
                case Broken(reason=reason) if reason.startswith(_REFUSED):  # it has reached no process: ask again
                    pass
                case Broken() | Failed() | Refused(429 | 503) if self.resumes:
                    breaks += 1
                case _:
                    return ending, breaks
            if stream.token:
                first = None
            await asyncio.sleep(AWAY_S)
