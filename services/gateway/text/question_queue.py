"""Questions that wait for a bounded process: grammars, chats. Bounded by key, in turn of the keys, small ones first.

    turn      the key whose questions have had the fewest bytes goes next (`FairQueue`); a key that is new goes at once
    rank      within a key by size, and by arrival: a large one is passed by a bounded number of later ones
    bound     questions that wait of one key, and the time that a request waits; beyond: 429 with Retry-After
    together  requests of a key with the same question have one place, which is free when all of them have gone

Owned by `grammar_process.py` and `template_process.py`, on the event loop.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from cohort.common.errors import RequestError
from cohort.common.policies.fair_queue import FairQueue
from cohort.common.types import RequestId
from cohort.services.gateway import bounds

_AGE_BYTES = 1024
"""Size by which a question must be smaller than another of its key, for each that arrived in between, to go first: one
of 64 KiB is passed by 64."""
_RETRY_AFTER_S = 1.0

Answer = tuple[bytes, bytes]


@dataclass(slots=True, eq=False)
class _Place:
    owner: str
    question: bytes
    name: RequestId
    answer: asyncio.Future[Answer]
    requests: int = 0


class QuestionQueue:
    def __init__(self, ask: Callable[[bytes], asyncio.Future[Answer]], what: str, most: Callable[[], int]) -> None:
        """`ask` begins one question; it is called again when that has ended. `what` the questions are, for messages;
        `most`: of one key that wait."""
        self._ask = ask
        self._what = what
        self._most = most
        self._fair = FairQueue()
        self._places: dict[tuple[str, bytes], _Place] = {}
        """Questions that wait, and the one under way."""
        self._waiting: dict[RequestId, _Place] = {}
        self._waiting_of: Counter[str] = Counter()
        self._arrived = 0
        self._is_busy = False

    def __len__(self) -> int:
        return len(self._waiting)

    async def ask(self, owner: str, question: bytes) -> Answer:
        """Return the answer in its turn. Raises a 429 `RequestError`, or what `ask` raised."""
        place = self._places.get((owner, question)) or self._add(owner, question)
        place.requests += 1
        try:
            async with asyncio.timeout(wait_s := bounds.BOUNDS.turn_wait_s):
                return await asyncio.shield(place.answer)
        except TimeoutError:
            raise self._busy(f"this request's had no answer within {wait_s:g} s") from None
        finally:
            place.requests -= 1
            if not place.requests and self._fair.remove(place.name):
                self._leave(place)
                del self._places[owner, question]

    def _add(self, owner: str, question: bytes) -> _Place:
        if (count := self._waiting_of[owner]) >= (most := self._most()):
            raise self._busy(f"{count} of this client's wait, and at most {most} may")
        self._arrived += 1
        name, size = str(self._arrived), max(1, len(question))
        place = _Place(owner, question, name, asyncio.get_running_loop().create_future())
        self._places[owner, question] = self._waiting[name] = place
        self._waiting_of[owner] += 1
        self._fair.add(owner, name, rank=size + self._arrived * _AGE_BYTES, cost=size)
        self._begin()
        return place

    def _leave(self, place: _Place) -> None:
        del self._waiting[place.name]
        self._waiting_of[place.owner] -= 1
        assert self._waiting_of[place.owner] >= 0, f"{self._waiting_of} {self._what} wait"
        if not self._waiting_of[place.owner]:
            del self._waiting_of[place.owner]

    def _begin(self) -> None:
        if self._is_busy or (name := self._fair.next()) is None:
            return
        place = self._waiting[name]
        self._leave(place)
        self._is_busy = True
        self._ask(place.question).add_done_callback(partial(self._end, place))

    def _end(self, place: _Place, asked: asyncio.Future[Answer]) -> None:
        assert self._is_busy and self._places[place.owner, place.question] is place, f"{place.name} ends twice"
        self._is_busy = False
        del self._places[place.owner, place.question]
        if asked.cancelled():
            place.answer.cancel()
        elif error := asked.exception():
            if place.requests:  # nobody else would take it
                place.answer.set_exception(error)
        else:
            place.answer.set_result(asked.result())
        self._begin()

    def _busy(self, why: str) -> RequestError:
        return RequestError(
            f"The server is busy with {self._what}: {why}. Please retry later.",
            status=429,
            type_="rate_limit_error",
            retry_after_s=_RETRY_AFTER_S,
        )
