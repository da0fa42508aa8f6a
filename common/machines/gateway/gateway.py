"""The gateway as a pure state machine: every request of one gateway, from its arrival to its last token.

    Offered ─▶ admission ─▶ ledger ─▶ prediction ─▶ Submit ─▶ manager
                              │ ▲                     TokenBatch ◀─ workers
    Deliver, Fail, Ended ◀────┘ └──── Placed, AttemptsLost, Refused ◀─ manager

Everything but HTTP, text and metrics is decided here. `ledger.py` holds the requests, their attempts and deadlines;
`peers.py` the conversation with predictor and manager.

Hosted by the live gateway (`services/gateway`) and by virtual clusters. A manager, predictor or worker that dies costs
a pause: a message that cannot be sent comes back as `Undelivered`, or the messages of the next second repair its loss.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import assert_never

import msgspec

from cohort.common.config import Config
from cohort.common.errors import busy
from cohort.common.machines.effects import (
    Admitted,
    Deliver,
    Ended,
    Fail,
    GatewayEffect,
    ManagerFound,
    Rejected,
    Send,
    Wake,
)
from cohort.common.machines.entry import Entry, State
from cohort.common.machines.events import (
    Closed,
    DrainEnded,
    DrainStarted,
    Estimated,
    GatewayEvent,
    Offered,
    PeerLost,
    Received,
    Tick,
    Undelivered,
)
from cohort.common.machines.gateway.ledger import Action, CancelAttempt, Ledger, SubmitAttempt, unavailable
from cohort.common.machines.gateway.peers import ManagerLink, PredictionClient
from cohort.common.machines.machine import own_stall_s
from cohort.common.machines.senders import may_send
from cohort.common.messages import (
    AttemptsLost,
    Cancel,
    ClusterLoad,
    GatewayHello,
    LengthFacts,
    ManagerHello,
    Message,
    ObserveLength,
    Outstanding,
    Placed,
    Predicted,
    PredictLength,
    Refused,
    RevisePrediction,
    Submit,
    ToGateway,
    TokenBatch,
)
from cohort.common.policies.interface import Admission, AdmissionLoad, Offer, Refuse
from cohort.common.types import Attempt, FinishReason, InstanceId, Request, RequestId, Slo, TrafficClass

BEAT_S = 1.0
"""Interval at which all deadlines are checked and everything outstanding is listed."""

_LATE_S = 0.25  # that a tick of a busy process may come: a part of `peers.LEAST_OVERDUE_S`
_STALL_TIMEOUT_S = 600.0
"""Timeout of a placed attempt without a token, whatever the queue on its worker: it is resubmitted."""

# Of JSON text around a prompt in English; only a first guess, the second question has the real number.
BYTES_PER_TOKEN = 4


@dataclass(frozen=True, slots=True)
class GatewaySettings:
    """`load_interval_s` is the manager's; its silence is measured by it. SLO defaults are for real-time requests."""

    request_timeout_s: float
    default_prediction_tokens: int
    rt_ttft_slo_s: float
    rt_tpot_slo_s: float
    load_interval_s: float
    drain_s: float
    stall_timeout_s: float = _STALL_TIMEOUT_S
    max_attempts: int = 8
    """Placements before a request fails with 503: if eight workers died under it, it is the cause."""
    predictor_wait_s: float = 0.005

    @classmethod
    def of(cls, config: Config) -> GatewaySettings:
        gateway = config.gateway
        return cls(
            request_timeout_s=gateway.request_timeout_s,
            default_prediction_tokens=gateway.default_prediction_tokens,
            rt_ttft_slo_s=gateway.rt_ttft_slo_s,
            rt_tpot_slo_s=gateway.rt_tpot_slo_s,
            load_interval_s=config.manager.load_interval_s,
            drain_s=config.drain_s,
        )


class AdmissionControl:
    """Admission: asks the policy with what the gateway knows, all requests that wait and, if several API keys share the
    gateway, those of the same owner. Twice per HTTP request: with an estimate from the body's size before anything is
    read, and with the real numbers after tokenising."""

    def __init__(self, policy: Admission, ledger: Ledger, *, expected_output: float) -> None:
        self._policy = policy
        self._ledger = ledger
        self._expected_output = expected_output

    def estimate(
        self, now_s: float, body_bytes: int, traffic_class: TrafficClass, load: ClusterLoad | None, owner: str = ""
    ) -> Refuse | None:
        """Decide by the body's size. `owner`: as in `Offered`."""
        offer = Offer(
            prompt_tokens=body_bytes // BYTES_PER_TOKEN,
            max_tokens=0,
            predicted_tokens=self._expected_output,
            traffic_class=traffic_class,
            priority=0,
            slo=Slo(),
            owner=owner,
        )
        return self._decide(now_s, offer, load, ahead=0, ahead_tokens=0.0)

    def expected_output(self, request: Request, owner: str, *, max_tokens_named: bool) -> float:
        """Return the tokens that a request counts with while it waits: the default prediction, or all that it requests.
        An owner's share is counted by the requested number: a key could otherwise queue any length as if it were short.
        If nothing is shared out, the prediction is the better measure of the queue."""
        requested = float(request.sampling.max_tokens)
        return requested if owner and max_tokens_named else min(self._expected_output, requested)

    def decide(
        self,
        now_s: float,
        requests: Sequence[Request],
        load: ClusterLoad | None,
        owner: str = "",
        *,
        max_tokens_named: bool = False,
    ) -> Refuse | None:
        """Decide about all choices of one HTTP request together. `owner`, `max_tokens_named`: as in `Offered`."""
        ahead_tokens = 0.0
        for ahead, request in enumerate(requests):
            expected = self.expected_output(request, owner, max_tokens_named=max_tokens_named)
            offer = Offer(
                prompt_tokens=request.prompt_tokens,
                max_tokens=request.sampling.max_tokens,
                predicted_tokens=expected,
                traffic_class=request.traffic_class,
                priority=request.priority,
                slo=request.slo,
                owner=owner,
            )
            refusal = self._decide(now_s, offer, load, ahead=ahead, ahead_tokens=ahead_tokens)
            if refusal is not None:
                return refusal
            ahead_tokens += request.prompt_tokens + expected
        return None

    def _decide(
        self, now_s: float, offer: Offer, load: ClusterLoad | None, *, ahead: int, ahead_tokens: float
    ) -> Refuse | None:
        """Decide about one offer. `ahead`: choices of the same HTTP request that would wait before this one."""
        own = self._ledger
        # Other gateways' requests show only in the manager's load, our newest ones only in the ledger.
        waiting = max(own.waiting_requests, load.waiting if load else 0) + ahead
        tokens = max(own.waiting_tokens, float(load.waiting_tokens) if load else 0.0) + ahead_tokens
        theirs = own.waiting_of(offer.owner)
        decision = self._policy.decide(
            now_s,
            offer,
            AdmissionLoad(
                waiting_requests=waiting,
                waiting_tokens=int(tokens),
                running_requests=len(own) - own.waiting_requests,
                drain_rate=load.drain_rate if load else 0.0,
                free_tokens=load.free_tokens if load else 0,
                total_tokens=load.total_tokens if load else 0,
                owner_requests=theirs.requests + ahead,
                owner_tokens=int(theirs.tokens + ahead_tokens),
            ),
        )
        return decision if isinstance(decision, Refuse) else None


class GatewayMachine:
    def __init__(
        self,
        instance: InstanceId,
        incarnation: int,
        endpoint: str,
        settings: GatewaySettings,
        admission: Admission,
        now_s: float,
        *,
        manager: InstanceId = "manager",
        predictor: InstanceId = "predictor",
        standbys: tuple[InstanceId, ...] = (),
    ) -> None:
        """`endpoint`: this gateway's inbox, where workers send tokens. `predictor` "": there is none, and every request
        without a prediction takes the default. `standbys`: further managers, in the order of requests to lead."""
        self.instance = instance
        self.ledger = Ledger(
            stall_timeout_s=settings.stall_timeout_s,
            request_timeout_s=settings.request_timeout_s,
            max_attempts=settings.max_attempts,
        )
        self.link = ManagerLink(
            GatewayHello(instance, incarnation, endpoint),
            load_interval_s=settings.load_interval_s,
            managers=(manager, *standbys),
        )
        self.draining = False
        self.misnamed_total = 0
        """Messages dropped because only another peer than their sender may send them."""
        self.fenced_total = 0
        self._settings = settings
        self._predictor = predictor
        self._admission = AdmissionControl(admission, self.ledger, expected_output=settings.default_prediction_tokens)
        self._predictions = PredictionClient(
            wait_s=settings.predictor_wait_s, default_tokens=settings.default_prediction_tokens, exists=bool(predictor)
        )
        self._beat_s = now_s
        self._now_s = now_s
        self._wake_s = float("inf")
        self._held_back = False
        """Whether something may wait to be submitted until the manager answers."""
        self._effects: list[GatewayEffect] = []

    def handle(self, now_s: float, *events: GatewayEvent) -> list[GatewayEffect]:
        """See `Machine.handle`. If a defect raises in the middle, the effects so far come with the next call."""
        assert now_s >= self._now_s, f"it is {now_s} s, and was {self._now_s} s"
        if now_s - self._now_s > _LATE_S:
            self.link.excuse(own_stall_s(now_s, self._now_s, self._wake_s, _LATE_S))
        self._now_s = now_s
        for event in events:
            match event:
                case Received(sender, message):
                    if isinstance(message, ToGateway):
                        self._received(now_s, sender, message)
                case Undelivered(_, message):
                    self._undelivered(now_s, message)
                case PeerLost(peer=peer):
                    if peer == self.link.manager:
                        self.link.expect_answer(now_s)
                case Tick(quiet_s=quiet_s):
                    self._tick(now_s, quiet_s)
                case Offered():
                    self._offered(now_s, event)
                case Estimated():
                    self._estimated(now_s, event)
                case Closed(request_id, finish, reason):
                    self._closed(now_s, request_id, finish, reason)
                case DrainStarted():
                    self.draining = True
                case DrainEnded():
                    why = "This server shut down before the answer was complete."
                    self._act(now_s, self.ledger.fail_all(unavailable(why, retry_after_s=1.0)))
                case _:
                    assert_never(event)
        at_s = max(now_s, min(self._beat_s, self._predictions.due_s(), self.link.due_s()))
        if at_s < self._wake_s:
            self._wake_s = at_s
            self._effects.append(Wake(at_s))
        assert self._wake_s < float("inf"), "nothing would wake this gateway"
        effects, self._effects = self._effects, []
        return effects

    def check(self) -> None:
        self.ledger.check()

    @property
    def default_predictions_total(self) -> int:
        """Requests that were submitted with a default prediction."""
        return self._predictions.defaults_total

    def not_ready_because(self, now_s: float) -> str | None:
        """Return why no new request could be served now; None if one could."""
        return "this gateway is shutting down" if self.draining else self.link.not_ready_because(now_s)

    def _estimated(self, now_s: float, offer: Estimated) -> None:
        load = self.link.load
        refusal = self._admission.estimate(now_s, offer.body_bytes, offer.traffic_class, load, offer.owner)
        self._decided(offer.offer_id, refusal)

    def _decided(self, offer_id: RequestId, refusal: Refuse | None) -> list[Entry] | None:
        """Send the decision. Return the list for the entries of an admitted offer, or None for a rejected one."""
        if self.draining:
            error = unavailable("This server is shutting down.", self._settings.drain_s)
        elif refusal is not None:
            error = busy(f"The server is busy: {refusal.reason}. Please retry later.", refusal.retry_after_s)
        else:
            entries: list[Entry] = []
            self._effects.append(Admitted(offer_id, entries))
            return entries
        self._effects.append(Rejected(offer_id, error))
        return None

    def _offered(self, now_s: float, offer: Offered) -> None:
        requests = [self._with_slo(request) for request in offer.requests]
        owner, named = offer.owner, offer.max_tokens_named
        refusal = self._admission.decide(now_s, requests, self.link.load, owner, max_tokens_named=named)
        entries = self._decided(offer.offer_id, refusal)
        if entries is None:
            return
        self._beat_s = min(self._beat_s, now_s + BEAT_S)  # a quiet gateway's is later
        together = tuple(request.request_id for request in requests) if len(requests) > 1 else ()
        for request in requests:
            expected = self._admission.expected_output(request, owner, max_tokens_named=named)
            entry = self.ledger.open(now_s, request, expected_output=expected, owner=owner, together=together)
            entries.append(entry)
        assert len(entries) == len(requests) and len(entries) % offer.choices_per_prompt == 0, (
            f"{offer.offer_id}: {len(entries)} entries of {len(requests)} requests"
        )
        for first in range(0, len(entries), offer.choices_per_prompt):
            choices = entries[first : first + offer.choices_per_prompt]
            request = choices[0].request
            if request.sampling.pooling:  # nothing is to be predicted or learned
                assert request.prediction is not None, f"{request.attempt} is pooled and its length unknown"
                self._submit(now_s, choices)
                continue
            facts = LengthFacts(
                tokens=request.tokens,
                chat=offer.chat,
                max_tokens=request.sampling.max_tokens,
                temperature=request.sampling.temperature,
                stop_strings=offer.stop_strings,
                text_bytes=offer.text_bytes,
            )
            question = self._predictions.request_prediction(now_s, choices, facts)
            if question is not None:
                self._effects.append(Send(self._predictor, question))
            self._submit(now_s, (entry for entry in choices if entry.prediction is not None))

    def _with_slo(self, request: Request) -> Request:
        """Give a real-time request without an SLO the default one, unless the whole response has a deadline."""
        slo, settings = request.slo, self._settings
        if request.traffic_class != "rt" or (slo.ttft_s and slo.tpot_s) or slo.deadline_s:
            return request
        slo = msgspec.structs.replace(
            slo, ttft_s=slo.ttft_s or settings.rt_ttft_slo_s, tpot_s=slo.tpot_s or settings.rt_tpot_slo_s
        )
        return msgspec.structs.replace(request, slo=slo)

    def _submit(self, now_s: float, entries: Iterable[Entry]) -> None:
        for entry in entries:
            self._act(now_s, self.ledger.submit(entry.request_id))

    def _submit_unsent(self, now_s: float) -> None:
        """Submit requests that could not be handed to the manager before, except those that wait for a prediction."""
        self._held_back = False
        self._submit(now_s, (entry for entry in self.ledger.unsubmitted() if entry.prediction is not None))

    def _closed(self, now_s: float, request_id: RequestId, finish: FinishReason, reason: str) -> None:
        entry = self.ledger.get(request_id)
        if entry is not None:
            self._act(now_s, self.ledger.close(request_id, reason))
            self._end(entry, finish, reason)

    def _received(self, now_s: float, sender: InstanceId, message: ToGateway) -> None:
        if not may_send(sender, message, managers=self.link.managers, predictor=self._predictor):
            self.misnamed_total += 1
            return
        if (
            sender in self.link.managers
            and not self.link.note_alive(now_s, sender)
            and type(message) is not ManagerHello
        ):
            self.fenced_total += 1
            self._correct(now_s, sender)
            return
        match message:
            case TokenBatch(_, updates):
                ledger, deliver = self.ledger, self._effects.append
                for update in updates:
                    if (delivery := ledger.next_tokens(now_s, sender, update)) is not None:
                        deliver(delivery)
                    else:
                        self._act(now_s, ledger.tokens(now_s, sender, update))
            case Placed():
                self._act(now_s, self.ledger.placed(now_s, message))
            case AttemptsLost(attempts, reason, unheld=unheld):
                self._act(now_s, self.ledger.attempts_lost(now_s, attempts, reason, unheld=unheld))
            case Refused():
                self._act(now_s, self.ledger.refused(message))
            case Predicted():
                self._predicted(now_s, message)
            case ClusterLoad():
                self.link.on_load(message)
                if len(self.ledger):  # it crossed the request that ends the manager's quiet
                    self.link.expect_answer(now_s)
            case ManagerHello():
                self._manager_hello(now_s, sender, message)
            case _:
                assert_never(message)
        if self._held_back and self.link.known(now_s):
            self._submit_unsent(now_s)

    def _correct(self, now_s: float, manager: InstanceId) -> None:
        if (hello := self.link.correction(now_s)) is not None:
            self._effects.append(Send(manager, hello))

    def _manager_hello(self, now_s: float, sender: InstanceId, message: ManagerHello) -> None:
        if self.link.on_hello(now_s, sender, message):
            self._effects.append(ManagerFound(message.incarnation, len(self.ledger), sender))
            # This may answer a message to its predecessor: then it does not know us yet.
            self._effects.append(Send(sender, self.link.hello(now_s)))
            again = self.ledger.manager_replaced(now_s)
            held = self.ledger.outstanding()  # runs somewhere; waiting requests come anew
            self._act(now_s, again)
            self._name(held)
        elif message.leads and sender != self.link.manager:
            self._correct(now_s, sender)
        self._submit_unsent(now_s)

    def _predicted(self, now_s: float, message: Predicted) -> None:
        entries, late = self._predictions.answered(now_s, message)
        if not late:
            self._submit(now_s, entries)
            return
        for entry in entries:
            if entry.state is not State.OPEN:  # otherwise it rides along when the request is submitted
                self._effects.append(Send(self.link.manager, RevisePrediction(entry.request_id, message.prediction)))

    def _undelivered(self, now_s: float, message: Message) -> None:
        match message:
            case Submit(request):
                self.ledger.undelivered(request.attempt)
            case PredictLength(request_id):
                self._submit(now_s, self._predictions.unreachable(now_s, request_id))
            case ObserveLength():
                self._predictions.observation_lost()
            case _:
                pass  # greetings and outstanding requests are repeated; a cancel, at the next message of its attempt

    def _tick(self, now_s: float, quiet_s: float) -> None:
        self._wake_s = float("inf")
        self._submit(now_s, self._predictions.overdue(now_s))
        self._effects.extend(Send(manager, greeting) for manager, greeting in self.link.due_hellos(now_s))
        if now_s >= self._beat_s:
            self._beat_s = now_s + BEAT_S + quiet_s
            self._act(now_s, self.ledger.tick(now_s))
            self._submit_unsent(now_s)
            if self.link.known(now_s):
                self._name(self.ledger.outstanding())

    def _name(self, held: list[Attempt]) -> None:
        if held:
            self._effects.append(Send(self.link.manager, Outstanding(held)))

    def _act(self, now_s: float, actions: Iterable[Action]) -> None:
        effects = self._effects
        for action in actions:
            match action:
                case Deliver():
                    effects.append(action)
                    if action.finish is not None:
                        self._end(action.entry, action.finish, "")
                case Fail(entry, error):
                    effects.append(action)
                    self._end(entry, FinishReason.FAILED, error.message)
                case SubmitAttempt(entry):
                    assert entry.state is State.OPEN, f"{entry} is submitted a second time"
                    if self.link.known(now_s):
                        self.link.expect_answer(now_s)
                        self.ledger.submitted(now_s, entry.request_id)
                        effects.append(Send(self.link.manager, Submit(entry.current(now_s))))
                    else:
                        self._held_back = True
                case CancelAttempt(attempt, holders, reason):
                    cancel = Cancel([attempt], reason)
                    effects.append(Send(self.link.manager, cancel))
                    effects.extend(Send(holder, cancel) for holder in holders)
                case _:
                    assert_never(action)

    def _end(self, entry: Entry, finish: FinishReason, reason: str) -> None:
        assert self.ledger.get(entry.request_id) is not entry, f"{entry} has ended and is owned"
        observation = self._predictions.observed(entry, finish)
        if observation is not None:
            self._effects.append(Send(self._predictor, observation))
        self._effects.append(Ended(entry, finish, reason))
