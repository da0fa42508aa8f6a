"""The other processes that a gateway talks to: the length predictor and the bucketing managers.

Called by `gateway.py`. `PredictionClient` names the requests that have their prediction, `ManagerLink` says whether any
may be submitted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from cohort.common.machines.entry import Entry
from cohort.common.messages import (
    ClusterLoad,
    GatewayHello,
    LengthFacts,
    ManagerHello,
    ObserveLength,
    Predicted,
    PredictLength,
)
from cohort.common.types import FinishReason, InstanceId, Prediction, RequestId

MAX_TIMEOUTS = 8  # questions in a row without an answer in time
PROBE_INTERVAL_S = 1.0

# In units of manager.load_interval_s. After so long without a message the manager is greeted anew, and new requests
# wait until it answers: a manager that was started again takes nothing from a gateway that has not greeted it.
OVERDUE_LOADS = 3
LEAST_OVERDUE_S = 0.5
HELLO_INTERVAL_S = 0.2
# In the same units: after so long the gateway counts as not ready.
MISSED_LOADS = 10
LEAST_SILENCE_S = 2.0

STANDBY_HELLO_INTERVAL_S = 1.0
_LIVENESS_S = 1.5 * STANDBY_HELLO_INTERVAL_S
"""Time of silence after which a manager is not asked to lead: it would find the request when it is back."""


def default_prediction(tokens: int, max_tokens: int) -> Prediction:
    length = float(max(1, min(tokens, max_tokens)))
    return Prediction(mean=length, p50=length, p90=length, p99=length, source="default")


@dataclass(slots=True, eq=False)
class _PendingPrediction:
    """Prompt whose length was requested. `entries`: its choices that are not over."""

    entries: list[Entry]
    sent_s: float
    waiting: bool = True
    """Whether no request of it was submitted yet."""


class PredictionClient:
    """Gateway's side of length prediction: request one, wait a few milliseconds at most, go on with a default. A silent
    predictor never costs more than `wait_s`. After a few timeouts in a row it counts as away: then no request waits and
    only one question a second is sent, to notice its return."""

    def __init__(self, *, wait_s: float, default_tokens: int, exists: bool) -> None:
        """`exists`: whether a predictor exists at all."""
        self._wait_s = wait_s
        self._default_tokens = default_tokens
        self._has_predictor = exists
        self._pending: dict[RequestId, _PendingPrediction] = {}
        """Questions by the id of the prompt's first choice, open or, later, waiting for a correction."""
        self._due: deque[tuple[float, RequestId]] = deque()
        """Timeouts of questions, in the order in which they were sent, which is the order of time."""
        self._timeouts = 0
        self._probe_s = float("-inf")
        self.defaults_total = 0
        """Requests that were submitted with a default prediction, by us or by a predictor that has no model yet."""

    @property
    def away(self) -> bool:
        return self._timeouts >= MAX_TIMEOUTS

    def due_s(self) -> float:
        """Return when the oldest question times out; infinite if no request waits."""
        due = self._due
        while due and not ((question := self._pending.get(due[0][1])) and question.waiting):
            due.popleft()
        return due[0][0] if due else float("inf")

    def request_prediction(self, now_s: float, choices: Sequence[Entry], facts: LengthFacts) -> PredictLength | None:
        """Ask once for all choices of one prompt. Return the message to send, if there is one. Entries that have no
        prediction afterwards wait for `answered` or `overdue`."""
        for entry in choices:
            entry.facts = facts
        if choices[0].prediction is not None:
            return None
        name = choices[0].request_id
        if not self._may_send(now_s):
            self._silent(choices)
            return None
        question = self._pending[name] = _PendingPrediction(list(choices), now_s)
        for entry in choices:
            entry.prediction_id = name
        if self.away or self._wait_s <= 0:
            self._give_up(question)
        else:
            self._due.append((now_s + self._wait_s, name))
        return PredictLength(name, facts, choices[0].request.traceparent)

    def answered(self, now_s: float, message: Predicted) -> tuple[list[Entry], bool]:
        """Return the entries that the answer is about, and whether it is late: they have been submitted without it."""
        self._timeouts = 0
        question = self._pending.pop(message.request_id, None)
        if question is None:
            return [], False
        for entry in question.entries:
            entry.prediction = message.prediction
        if not question.waiting:
            return question.entries, True
        if message.prediction.source == "default":
            self.defaults_total += len(question.entries)
        self._resolve(now_s, question)
        return question.entries, False

    def unreachable(self, now_s: float, request_id: RequestId) -> list[Entry]:
        """Return the entries that go on without an answer, because the question could not be sent."""
        question = self._pending.pop(request_id, None)
        if question is None or not question.waiting:
            return []
        self._silent(question.entries)
        self._resolve(now_s, question)
        return question.entries

    def overdue(self, now_s: float) -> list[Entry]:
        """Return entries whose wait is over: they go on with a default."""
        ready: list[Entry] = []
        while self.due_s() <= now_s:
            question = self._pending[self._due.popleft()[1]]
            self._give_up(question)
            self._resolve(now_s, question)
            ready += question.entries
        return ready

    def observed(self, entry: Entry, finish: FinishReason) -> ObserveLength | None:
        """Return the observation of an ended request for the predictor. One that is away learns nothing."""
        question = self._pending.get(entry.prediction_id)
        if question is not None:
            question.entries = [other for other in question.entries if other is not entry]
            if not question.entries:
                del self._pending[entry.prediction_id]
        if finish not in (FinishReason.STOP, FinishReason.LENGTH) or not entry.output or entry.facts is None:
            return None
        if not self._has_predictor or self.away:
            return None
        return ObserveLength(
            entry.request_id, entry.facts, output_tokens=len(entry.output), truncated=finish is FinishReason.LENGTH
        )

    def observation_lost(self) -> None:
        self._timeouts += 1

    def _may_send(self, now_s: float) -> bool:
        if not self._has_predictor:
            return False
        if self.away:
            if now_s - self._probe_s < PROBE_INTERVAL_S:
                return False
            self._probe_s = now_s
        return True

    def _give_up(self, question: _PendingPrediction) -> None:
        assert question.waiting, "its requests have been submitted"
        question.waiting = False
        self._silent(question.entries)

    def _silent(self, entries: Sequence[Entry]) -> None:
        self._timeouts += 1
        for entry in entries:
            entry.prediction = default_prediction(self._default_tokens, entry.request.sampling.max_tokens)
        self.defaults_total += len(entries)

    def _resolve(self, now_s: float, question: _PendingPrediction) -> None:
        for entry in question.entries:
            entry.predict_s = now_s - question.sent_s


class ManagerLink:
    """Conversation with the bucketing managers: greeting, liveness, readiness, and which of them this gateway follows.

        lost ──GatewayHello, several a second──▶ ManagerHello ──▶ known ──a few loads overdue──▶ lost
                                                     │ new incarnation, or another that leads: its predecessor's queue
                                                     │ is submitted anew and all that runs is named

    Of several managers it follows the one that leads, and greets the others now and then: they know it then, and it
    knows that they are there. While none leads it asks the first that lives, in the configured order, to lead.
    """

    def __init__(
        self, hello: GatewayHello, *, load_interval_s: float, managers: tuple[InstanceId, ...] = ("manager",)
    ) -> None:
        """`managers`: in the order in which they are asked to lead."""
        self._hello = hello
        self.managers = managers
        self.manager = managers[0]
        """Manager that is followed, or was last."""
        self._overdue_s = max(LEAST_OVERDUE_S, OVERDUE_LOADS * load_interval_s)
        self._silence_s = max(LEAST_SILENCE_S, MISSED_LOADS * load_interval_s)
        self._incarnation: int | None = None
        self._leads = False
        self._followed_epoch = 0
        self.epoch = 0
        self._last_message_s = float("-inf")
        self._hello_sent_s = float("-inf")
        self._standby_hello_sent_s = float("-inf")
        self._corrected_s = float("-inf")
        self._leaderless_s = float("inf")
        """Time since which no manager is known to lead, silence apart; infinite before the first greeting."""
        self._served_until_s = float("-inf")
        """Time until which a new manager may wait for its workers' registrations, if the one before it could serve."""
        self._last_message_s_of: dict[InstanceId, float] = {}
        self._on_standby: set[InstanceId] = set()
        """Managers that reported themselves as standby since none is known to lead."""
        self.load: ClusterLoad | None = None
        self._workers: list[InstanceId] = []
        """Workers of the last load of any incarnation: a new manager waits for their registrations."""

    def known(self, now_s: float) -> bool:
        """Return whether the manager has answered, and not long ago."""
        return self._leads and now_s - self._last_message_s < self._overdue_s

    def due_s(self) -> float:
        """Return when the next greeting is due."""
        spoken_s = self._last_message_s + self._overdue_s if self._leads else float("-inf")
        lost_s = max(spoken_s, self._hello_sent_s + HELLO_INTERVAL_S)
        return min(lost_s, self._standby_hello_sent_s + STANDBY_HELLO_INTERVAL_S) if len(self.managers) > 1 else lost_s

    def due_hellos(self, now_s: float) -> list[tuple[InstanceId, GatewayHello]]:
        if now_s < self.due_s():
            return []
        several = len(self.managers) > 1
        if several and now_s >= self._standby_hello_sent_s + STANDBY_HELLO_INTERVAL_S:
            self._standby_hello_sent_s = now_s
            if self.known(now_s):
                return [(name, self._build_hello(lead=False)) for name in self.managers if name != self.manager]
        if self._leaderless_s == float("inf"):
            self._leaderless_s = now_s
        promoted = self._manager_to_promote(now_s) if several else None
        self._hello_sent_s = now_s
        return [(name, self._build_hello(lead=name == promoted)) for name in self.managers]

    def hello(self, now_s: float) -> GatewayHello:
        """Return a greeting for the manager that is followed, whether it is due or not."""
        self._hello_sent_s = now_s
        return self._build_hello(lead=False)

    def correction(self, now_s: float) -> GatewayHello | None:
        """Return a hello for a manager that acts as if it were followed; None if it may have had one already."""
        if now_s - self._corrected_s < HELLO_INTERVAL_S:
            return None
        self._corrected_s = now_s
        return self._build_hello(lead=False)

    def expect_answer(self, now_s: float) -> None:
        """Count the manager's silence from now on at the latest: it has work, or its connection has ended."""
        self._last_message_s = min(self._last_message_s, now_s)

    def note_alive(self, now_s: float, manager: InstanceId) -> bool:
        """Record that the manager lives. Return whether it is the one that is followed."""
        self._last_message_s_of[manager] = now_s
        if manager != self.manager:
            return False
        self._last_message_s = now_s
        return True

    def excuse(self, stalled_s: float) -> None:
        """Count no silence for a time in which the gateway itself did not run: what arrived is read after it."""
        self._last_message_s += stalled_s
        for manager in self._last_message_s_of:
            self._last_message_s_of[manager] += stalled_s

    def on_hello(self, now_s: float, manager: InstanceId, message: ManagerHello) -> bool:
        """Return whether this manager is to be followed and does not know us: another one, or a new incarnation."""
        self._last_message_s_of[manager] = now_s
        stale = message.epoch < self.epoch
        self.epoch = max(self.epoch, message.epoch)
        if not message.leads:
            if manager == self.manager and self._leads:  # started again, or replaced
                self._leads, self._leaderless_s, self._on_standby = False, now_s, set()
                self._hello_sent_s = float("-inf")
            self._on_standby.add(manager)
            return False
        if stale:
            return False
        led = self._leads and manager == self.manager
        changed = not led or message.incarnation != self._incarnation or message.epoch != self._followed_epoch
        assert message.epoch == self.epoch, f"epoch {message.epoch} is followed, {self.epoch} was heard of"
        self._leads, self._last_message_s = True, now_s
        if changed:
            if self.load is not None and self.load.ready:
                self._served_until_s = now_s + self._silence_s
            self.manager, self._incarnation, self._followed_epoch = manager, message.incarnation, message.epoch
            self._on_standby = set()
            self.load = None  # the predecessor's view
        return changed

    def on_load(self, message: ClusterLoad) -> None:
        self.load = message
        self._last_message_s += message.quiet_s
        self._workers = message.instances

    def not_ready_because(self, now_s: float) -> str | None:
        """Return why no request could be served now; None if one could. A manager that takes over from one that could
        serve has as long to hear of its workers as a silent one has to answer: balancers do not learn of a takeover."""
        if self._incarnation is None:
            return "the bucketing manager has not answered yet"
        if now_s - self._last_message_s >= self._silence_s:
            return f"the bucketing manager has been silent for {now_s - self._last_message_s:.1f} s"
        if now_s < self._served_until_s:
            return None  # requests that come now wait here or there for the workers to register
        if self.load is None:
            return "the bucketing manager has not reported its workers yet"
        if not self.load.ready:
            return "no worker could take a request now"
        return None

    def _build_hello(self, *, lead: bool) -> GatewayHello:
        return msgspec.structs.replace(self._hello, workers=self._workers, epoch=self.epoch, lead=lead)

    def _manager_to_promote(self, now_s: float) -> InstanceId | None:
        """Return the manager to lead from now on; None while one may lead already that has not answered yet."""
        since_s = self._last_message_s + self._overdue_s if self._leads else self._leaderless_s + self._overdue_s
        if now_s < since_s and not self._on_standby.issuperset(self.managers):
            return None
        alive = [
            name for name in self.managers if now_s - self._last_message_s_of.get(name, float("-inf")) < _LIVENESS_S
        ]
        silent = self.manager if self._leads else ""
        return min(alive, key=lambda name: name == silent, default=None)
