from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import pytest

from cohort.common.clock import VirtualClock
from cohort.common.errors import PeerUnreachable
from cohort.common.messages import LengthFacts, Message, ObserveLength, Predicted, PredictLength
from cohort.common.types import Prediction
from cohort.services.gateway.prediction import PATIENCE, PredictorClient, default_prediction

ANSWER = Prediction(9, 8, 12, 20)
WAIT_S = 0.02


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float | None]:
    """How long each wait for an answer may last, in order; the waits themselves are real."""
    allowed: list[float | None] = []
    wait = asyncio.wait

    async def noted(futures: Iterable[asyncio.Future[Any]], **options: float | None) -> Any:
        allowed.append(options["timeout"])
        return await wait(futures, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(asyncio, "wait", noted)
    return allowed


class Line:
    """A wire to a predictor that may be cut."""

    def __init__(self) -> None:
        self.sent: list[Message] = []
        self.cut = False
        self.late: list[tuple[str, Prediction]] = []
        self.clock = VirtualClock()
        self.client = PredictorClient(
            self.send, self.clock, wait_s=WAIT_S, default_tokens=100, late=lambda *late: self.late.append(late)
        )

    def send(self, message: Message) -> None:
        if self.cut:
            raise PeerUnreachable("cut")
        self.sent.append(message)


def question(request_id: str = "r", max_tokens: int = 50) -> PredictLength:
    return PredictLength(request_id, LengthFacts([1], False, max_tokens, 1.0, 0, 1))


async def test_an_answer_in_time_is_taken() -> None:
    line = Line()
    asking = asyncio.create_task(line.client.predict([question("a"), question("b")]))
    await asyncio.sleep(0)
    line.client.on_predicted(Predicted("b", ANSWER))
    line.client.on_predicted(Predicted("a", ANSWER))
    assert await asking == [ANSWER, ANSWER]


async def test_silence_costs_the_wait_and_gives_the_default(waits: list[float | None]) -> None:
    line = Line()
    assert await line.client.predict([question("a"), question("b")]) == [default_prediction(100, 50)] * 2
    assert waits == [WAIT_S]  # one for all questions of a request


async def test_a_late_answer_is_handed_on_once() -> None:
    line = Line()
    await line.client.predict([question()])
    line.client.on_predicted(Predicted("r", ANSWER))
    line.client.on_predicted(Predicted("r", ANSWER))
    assert line.late == [("r", ANSWER)]


async def test_nobody_hears_of_an_answer_after_the_request() -> None:
    line = Line()
    await line.client.predict([question()])
    line.client.forget("r")
    line.client.on_predicted(Predicted("r", ANSWER))
    assert line.late == []


async def test_a_predictor_that_is_away_is_asked_once_a_second_until_it_returns(waits: list[float | None]) -> None:
    line = Line()
    for _ in range(PATIENCE):
        await line.client.predict([question()])
    asked = len(line.sent)
    assert waits == [WAIT_S] * PATIENCE
    for _ in range(20):
        assert (await line.client.predict([question("later")]))[0].source == "default"
    assert len(waits) == PATIENCE  # nobody waits any more
    assert len(line.sent) == asked + 1
    line.client.observe(ObserveLength("r", LengthFacts([1], False, 5, 1.0, 0, 1), 3, False))
    assert len(line.sent) == asked + 1  # and nothing piles up
    line.clock.advance(1.5)
    await line.client.predict([question("probe")])
    assert len(line.sent) == asked + 2
    line.client.on_predicted(Predicted("probe", ANSWER))
    asking = asyncio.create_task(line.client.predict([question("again")]))
    await asyncio.sleep(0)
    line.client.on_predicted(Predicted("again", ANSWER))
    assert await asking == [ANSWER]


async def test_an_unreachable_predictor_costs_no_wait(waits: list[float | None]) -> None:
    line = Line()
    line.cut = True
    assert (await line.client.predict([question()]))[0].source == "default"
    assert waits == []


def test_the_default_is_bounded_by_max_tokens() -> None:
    assert default_prediction(100, 7) == Prediction(7, 7, 7, 7, "default")
