"""One gateway's machine with a clock, told by hand; for tests that assert lists of effects."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, TypeVar

from cohort.common.config import Config, GatewayConfig
from cohort.common.machines.effects import Admitted, GatewayEffect, Send, Wake
from cohort.common.machines.entry import Entry
from cohort.common.machines.events import GatewayEvent, Offered, Received, Tick
from cohort.common.machines.gateway.gateway import GatewayMachine, GatewaySettings
from cohort.common.messages import ClusterLoad, ManagerHello, Message, Placed, Predicted, TokenBatch, TokenUpdate
from cohort.common.policies import compose
from cohort.common.types import Attempt, Prediction, Request, SamplingParams
from tests.common.test_tokens import read_again

LOAD = ClusterLoad(True, ["w"], 0, 0, 0, 10_000, 10_000, 0, 2.0)
ANSWER = Prediction(7, 6, 12, 20)
PROMPT = [5, 6, 7]
E = TypeVar("E")


class Gateway:
    """A machine and a clock; what it does is kept in `effects`."""

    def __init__(
        self,
        *,
        predictor: str = "predictor",
        greeted: bool = True,
        standbys: tuple[str, ...] = (),
        max_attempts: int = 8,
        drain_s: float = 30.0,
        **options: Any,
    ) -> None:
        config = Config(gateway=GatewayConfig(**options), drain_s=drain_s)
        admission = compose.admission(config)
        made = replace(
            GatewaySettings.of(config), stall_timeout_s=10.0, predictor_wait_s=0.02, max_attempts=max_attempts
        )
        self.machine = GatewayMachine(
            "gateway", 1, "inbox", made, admission, 0.0, predictor=predictor, standbys=standbys
        )
        self.now_s = 0.0
        self.effects: list[GatewayEffect] = []
        self.wake_s = float("inf")
        if greeted:
            self.tell(Tick())
            self.manager(ManagerHello(1), LOAD)
        self.effects.clear()

    def tell(self, *events: GatewayEvent) -> list[GatewayEffect]:
        for event in events:  # what happens can be written down and read again
            assert read_again(event, GatewayEvent) == event
        effects = self.machine.handle(self.now_s, *events)
        self.machine.check()
        self.effects += effects
        for wake in only(Wake, effects):
            self.wake_s = wake.at_s
        return effects

    def manager(self, *messages: Message) -> list[GatewayEffect]:
        return self.tell(*(Received("manager", message) for message in messages))

    def until(self, time_s: float) -> list[GatewayEffect]:
        """Time passes; ticks come exactly when they were asked for."""
        effects: list[GatewayEffect] = []
        while self.wake_s <= time_s:
            self.now_s, self.wake_s = max(self.now_s, self.wake_s), float("inf")
            effects += self.tell(Tick())
        self.now_s = time_s
        return effects

    def live(self, time_s: float) -> list[GatewayEffect]:
        """The same, with a manager that says how it is five times a second."""
        effects: list[GatewayEffect] = []
        while self.now_s < time_s:
            effects += self.until(min(time_s, self.now_s + 0.2))
            effects += self.manager(LOAD)
        return effects

    def offer(self, *names: str, choices_per_prompt: int = 1, **request_options: Any) -> list[GatewayEffect]:
        requests = [request(name, **request_options) for name in names]
        return self.tell(Offered("offer", requests, choices_per_prompt, text_bytes=9))

    def answer(self, name: str) -> list[GatewayEffect]:
        return self.tell(Received("predictor", Predicted(name, ANSWER)))

    def serve(self, name: str, **request_options: Any) -> Entry:
        """Offered, predicted, placed on worker w."""
        [admitted] = only(Admitted, self.offer(name, **request_options))
        self.answer(name)
        self.manager(Placed(Attempt(name, 0), ["w"], 0.1, "test"))
        self.effects.clear()
        return admitted.entries[0]

    def tokens(self, name: str, position: int, tokens: list[int], *, attempt: int = 0, **more: Any) -> None:
        update = TokenUpdate(Attempt(name, attempt), position, tokens, **more)
        self.tell(Received("w", TokenBatch("w", [update])))


def request(name: str, *, max_tokens: int = 5, **options: Any) -> Request:
    sampling = SamplingParams(max_tokens=max_tokens, stop_token_ids=(99,))
    return Request(Attempt(name, 0), "gateway", PROMPT, len(PROMPT), sampling, arrival_s=1.0, **options)


def only(kind: type[E], effects: Iterable[Any]) -> list[E]:
    return [effect for effect in effects if isinstance(effect, kind)]


def sent(kind: type[E], effects: Iterable[GatewayEffect], peer: str | None = None) -> list[E]:
    return [
        send.message
        for send in only(Send, effects)
        if isinstance(send.message, kind) and (peer is None or send.peer == peer)
    ]
