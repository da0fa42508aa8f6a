"""The gateway's side of length prediction: ask, wait a few milliseconds at most, go on with a default.

Called by `gateway.py` when requests come in, with every answer, on ticks and when requests end. A silent predictor
never costs more than `wait_s`. After a few silences in a row it counts as away: then no request waits and only one
question a second is sent, to notice its return (and so that nothing piles up in front of a process that is not there).
It never submits a request: it says which ones have their prediction now.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from cohort.common.machines.entry import Entry
from cohort.common.messages import LengthFacts, ObserveLength, Predicted, PredictLength
from cohort.common.types import FinishReason, Prediction, RequestId

PATIENCE = 8  # questions in a row without an answer in time
PROBE_INTERVAL_S = 1.0


def default_prediction(tokens: int, max_tokens: int) -> Prediction:
    length = float(max(1, min(tokens, max_tokens)))
    return Prediction(mean=length, p50=length, p90=length, p99=length, source="default")


@dataclass(slots=True, eq=False)
class _Question:
    """One prompt whose length was asked for. `entries`: its choices that are not over."""

    entries: list[Entry]
    asked_s: float
    waiting: bool = True
    """No request of it was submitted yet."""


class PredictionDesk:
    def __init__(self, *, wait_s: float, default_tokens: int, there: bool) -> None:
        """`there`: whether a predictor exists at all."""
        self._wait_s = wait_s
        self._default_tokens = default_tokens
        self._there = there
        self._questions: dict[RequestId, _Question] = {}
        """By the id of the prompt's first choice: waited for, or (later) welcome as a correction."""
        self._due: deque[tuple[float, RequestId]] = deque()
        """When to stop waiting for which; in the order they were asked, which is the order of time."""
        self._silences = 0
        self._probe_s = float("-inf")
        self.defaults_total = 0
        """Requests that were submitted with a default prediction, by us or by a predictor that has no model yet."""

    @property
    def away(self) -> bool:
        return self._silences >= PATIENCE

    def due_s(self) -> float:
        """When the oldest question has waited long enough; infinite when no request waits."""
        due = self._due
        while due and not self._waits(due[0][1]):
            due.popleft()
        return due[0][0] if due else float("inf")

    def ask(self, now_s: float, choices: Sequence[Entry], facts: LengthFacts) -> PredictLength | None:
        """All choices of one prompt share one question: the message to send, if there is one. Entries that have no
        prediction afterwards wait for `answered` or `overdue`."""
        for entry in choices:
            entry.facts = facts
        if choices[0].prediction is not None:
            return None
        name = choices[0].request_id
        if not self._asks(now_s):
            self._silent(choices)
            return None
        question = self._questions[name] = _Question(list(choices), now_s)
        for entry in choices:
            entry.asked_as = name
        if self.away or self._wait_s <= 0:
            self._give_up(question)
        else:
            self._due.append((now_s + self._wait_s, name))
        return PredictLength(name, facts, choices[0].request.traceparent)

    def answered(self, now_s: float, message: Predicted) -> tuple[list[Entry], bool]:
        """The entries that the answer is about, and whether it is late: they have been submitted without it."""
        self._silences = 0
        question = self._questions.pop(message.request_id, None)
        if question is None:
            return [], False
        self._set(question, message.prediction)
        if not question.waiting:
            return question.entries, True
        self._came(now_s, question)
        return question.entries, False

    def unreachable(self, now_s: float, request_id: RequestId) -> list[Entry]:
        """The question could not be sent: the entries that go on without an answer."""
        question = self._questions.pop(request_id, None)
        if question is None or not question.waiting:
            return []
        self._silent(question.entries)
        self._came(now_s, question)
        return question.entries

    def overdue(self, now_s: float) -> list[Entry]:
        """Entries that have waited long enough and go on with a default."""
        ready: list[Entry] = []
        while self.due_s() <= now_s:
            question = self._questions[self._due.popleft()[1]]
            self._give_up(question)
            self._came(now_s, question)
            ready += question.entries
        return ready

    def ended(self, entry: Entry, finish: FinishReason) -> ObserveLength | None:
        """A request is over: the lesson for the predictor. One that is away learns nothing."""
        question = self._questions.get(entry.asked_as)
        if question is not None:
            question.entries = [other for other in question.entries if other is not entry]
            if not question.entries:
                del self._questions[entry.asked_as]
        if finish not in (FinishReason.STOP, FinishReason.LENGTH) or not entry.output or entry.facts is None:
            return None
        if not self._there or self.away:
            return None
        return ObserveLength(
            entry.request_id, entry.facts, output_tokens=len(entry.output), truncated=finish is FinishReason.LENGTH
        )

    def observation_lost(self) -> None:
        """An observation could not be sent."""
        self._silences += 1

    # -- Within ----------------------------------------------------------------------------------------------------

    def _waits(self, name: RequestId) -> bool:
        question = self._questions.get(name)
        return question is not None and question.waiting

    def _asks(self, now_s: float) -> bool:
        if not self._there:
            return False
        if self.away:
            if now_s - self._probe_s < PROBE_INTERVAL_S:
                return False
            self._probe_s = now_s
        return True

    def _give_up(self, question: _Question) -> None:
        assert question.waiting, "its requests have been submitted"
        question.waiting = False
        self._silent(question.entries)

    def _silent(self, entries: Sequence[Entry]) -> None:
        self._silences += 1
        for entry in entries:
            entry.prediction = default_prediction(self._default_tokens, entry.request.sampling.max_tokens)
        self.defaults_total += len(entries)

    def _set(self, question: _Question, prediction: Prediction) -> None:
        for entry in question.entries:
            entry.prediction = prediction
        if question.waiting and prediction.source == "default":
            self.defaults_total += len(question.entries)

    def _came(self, now_s: float, question: _Question) -> None:
        for entry in question.entries:
            entry.predict_s = now_s - question.asked_s
