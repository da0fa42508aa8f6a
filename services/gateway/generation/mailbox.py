"""Between the host of the gateway machine and the handler that waits for tokens: one mailbox per HTTP request.

Filled by `streams.py`, emptied by `generator.py`. Its content is bounded by the request's own max_tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from cohort.common.errors import RequestError
from cohort.common.machines.entry import Entry
from cohort.common.messages import TokenLogprob
from cohort.common.types import FinishReason, RequestId
from cohort.services.gateway.generation.timing import GatewayTimes


@dataclass(slots=True)
class Delta:
    """Tokens, and perhaps the end, of one choice since its handler last looked."""

    index: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: FinishReason | None = None
    error: RequestError | None = None

    def merge(self, later: Delta) -> None:
        """This, then that."""
        self.tokens += later.tokens
        self.logprobs += later.logprobs
        self.finish = later.finish or self.finish
        self.error = later.error or self.error

    def singly(self) -> Iterator[Delta]:
        """Token by token, then its end."""
        for place, token in enumerate(self.tokens):
            yield Delta(self.index, [token], self.logprobs[place : place + 1])
        if self.finish is not None or self.error is not None:
            yield Delta(self.index, finish=self.finish, error=self.error)


class Mailbox:
    """Deltas of one HTTP request's choices, merged per choice until the handler takes them."""

    def __init__(self) -> None:
        self._ready: dict[int, Delta] = {}  # insertion order: the choice that waits longest first
        self._something = asyncio.Event()
        self._waiting = False
        """All that came so far is with the client, or on its way there."""
        self.direct: Callable[[int, Sequence[int]], bool] | None = None
        """Sends plain tokens of a choice past the handler, or refuses to (`direct_events.py`)."""

    def put_plain(self, index: int, tokens: Sequence[int]) -> None:
        """Tokens and nothing else."""
        if self._waiting and self.direct is not None and self.direct(index, tokens):
            return
        self.put(index, tokens=tokens)

    def put(
        self,
        index: int,
        *,
        tokens: Sequence[int] = (),
        logprobs: Sequence[TokenLogprob] = (),
        finish: FinishReason | None = None,
        error: RequestError | None = None,
    ) -> None:
        delta = self._ready.setdefault(index, Delta(index))
        delta.tokens += tokens
        delta.logprobs += logprobs
        delta.finish = finish or delta.finish
        delta.error = error or delta.error
        self._waiting = False
        self._something.set()

    async def next(self) -> Delta:
        """Waits without a deadline of its own: the ledger ends every request by its deadline at the latest."""
        while not self._ready:
            self._something.clear()
            self._waiting = True
            try:
                await self._something.wait()
            finally:
                self._waiting = False
        return self._ready.pop(next(iter(self._ready)))


@dataclass(slots=True)
class Generation:
    """All choices of one HTTP request. Without entries until it is admitted."""

    times: GatewayTimes
    mailbox: Mailbox = field(default_factory=Mailbox)
    entries: list[Entry] = field(default_factory=list)

    @property
    def request_ids(self) -> list[RequestId]:
        return [entry.request_id for entry in self.entries]
