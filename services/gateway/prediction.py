"""The gateway's side of length prediction: ask, wait a few milliseconds at most, go on with a default.

Called by `streams.py` before a request is submitted. A silent predictor never costs more than `wait_s`. After a few
silences in a row it counts as away: then nobody waits and only one question a second is sent, to notice its return
(and so that nothing piles up in front of a process that is not there). Answers that come late are handed to `late`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from cohort.common.clock import Clock
from cohort.common.errors import PeerUnreachable
from cohort.common.messages import Message, ObserveLength, Predicted, PredictLength
from cohort.common.types import Prediction, RequestId

PATIENCE = 8  # questions in a row without an answer in time
PROBE_INTERVAL_S = 1.0


def default_prediction(tokens: int, max_tokens: int) -> Prediction:
    length = float(max(1, min(tokens, max_tokens)))
    return Prediction(mean=length, p50=length, p90=length, p99=length, source="default")


class PredictorClient:
    def __init__(
        self,
        send: Callable[[Message], None],
        clock: Clock,
        *,
        wait_s: float,
        default_tokens: int,
        late: Callable[[RequestId, Prediction], None],
    ) -> None:
        """`send` hands a message to the predictor and may raise `PeerUnreachable`."""
        self._send = send
        self._clock = clock
        self._wait_s = wait_s
        self._default_tokens = default_tokens
        self._late = late
        self._asked: dict[RequestId, asyncio.Future[Prediction]] = {}
        self._unanswered: set[RequestId] = set()
        self._silences = 0
        self._probe_s = float("-inf")

    @property
    def away(self) -> bool:
        return self._silences >= PATIENCE

    async def predict(self, questions: Sequence[PredictLength]) -> list[Prediction]:
        """One prediction per question, after `wait_s` at the latest."""
        loop = asyncio.get_running_loop()
        futures: dict[RequestId, asyncio.Future[Prediction]] = {}
        for question in questions:
            if self._try_send(question):
                futures[question.request_id] = loop.create_future()
        self._asked.update(futures)
        try:
            if futures and not self.away:
                await asyncio.wait(futures.values(), timeout=self._wait_s)
        finally:
            for request_id in futures:
                self._asked.pop(request_id, None)
        return [self._answer(question, futures.get(question.request_id)) for question in questions]

    def on_predicted(self, message: Predicted) -> None:
        self._silences = 0
        future = self._asked.get(message.request_id)
        if future is not None:
            if not future.done():
                future.set_result(message.prediction)
        elif message.request_id in self._unanswered:
            self._unanswered.discard(message.request_id)
            self._late(message.request_id, message.prediction)

    def observe(self, message: ObserveLength) -> None:
        """A request finished; a predictor that is away learns nothing from it."""
        if not self.away:
            try:
                self._send(message)
            except PeerUnreachable:
                self._silences += 1

    def forget(self, request_id: RequestId) -> None:
        self._unanswered.discard(request_id)

    def _try_send(self, question: PredictLength) -> bool:
        if self.away:
            now_s = self._clock.now_s()
            if now_s - self._probe_s < PROBE_INTERVAL_S:
                return False
            self._probe_s = now_s
        try:
            self._send(question)
        except PeerUnreachable:
            return False
        return True

    def _answer(self, question: PredictLength, future: asyncio.Future[Prediction] | None) -> Prediction:
        if future is not None and future.done():
            return future.result()
        self._silences += 1
        if future is not None:
            self._unanswered.add(question.request_id)
        return default_prediction(self._default_tokens, question.facts.max_tokens)
