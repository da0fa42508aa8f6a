"""A network that delays, loses, repeats and cuts; runs of KV that fail."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from random import Random
from typing import Literal

from cohort.common.codec import decode, encode
from cohort.common.messages import Message
from cohort.common.types import InstanceId
from cohort.common.virtual_cluster.plugins import Flight


@dataclass(frozen=True, slots=True)
class Weather:
    """What the network does to messages and runs. Rates are probabilities of one message, or one run."""

    message_delay_s: float = 0.01
    loss_rate: float = 0.0
    repeat_rate: float = 0.0
    run_failure_rate: float = 0.0


class FaultyNetwork:
    """Order per pair holds, as over a TCP connection. A repeated message comes again in its place in line."""

    whole_sends = False
    run_timeout_s = 1.0

    def __init__(self, random: Random, weather: Weather) -> None:
        self.weather = weather
        self.watch: Callable[[Literal["sent", "arrived"], Message], None] = lambda when, message: None
        """Called with every message, as it is sent and as it arrives."""
        self._random = random
        self._last_s: dict[tuple[InstanceId, InstanceId], float] = {}
        self._cut_until_s: dict[frozenset[InstanceId], float] = {}
        self._asked_s = 0.0
        """When the flight started that `breaks` is asked about."""

    def cut(self, one: InstanceId, other: InstanceId, until_s: float) -> None:
        """Neither hears the other before then: messages are lost, runs break."""
        pair = frozenset((one, other))
        self._cut_until_s[pair] = max(until_s, self._cut_until_s.get(pair, 0.0))

    def _is_cut(self, now_s: float, one: InstanceId, other: InstanceId) -> bool:
        return now_s < self._cut_until_s.get(frozenset((one, other)), 0.0)

    def arrivals(self, now_s: float, source: InstanceId, target: InstanceId, message: Message) -> Iterable[float]:
        weather, random = self.weather, self._random
        self.watch("sent", message)
        if self._is_cut(now_s, source, target):
            return
        if weather.loss_rate and random.random() < weather.loss_rate:
            return
        pair = (source, target)
        arrival_s = max(self._last_s.get(pair, 0.0), now_s + random.random() * weather.message_delay_s)
        self._last_s[pair] = arrival_s
        yield arrival_s
        if weather.repeat_rate and random.random() < weather.repeat_rate:
            self._last_s[pair] = arrival_s + random.random() * weather.message_delay_s
            yield self._last_s[pair]

    def decoded(self, message: Message) -> Message:
        self.watch("arrived", message)
        return decode(encode(message))

    def landing_s(self, now_s: float, flight: Flight) -> float:
        self._asked_s = now_s
        return now_s + self._random.random() * 0.05

    def breaks(self, flight: Flight) -> bool:
        if self._random.random() < self.weather.run_failure_rate:
            return True
        sender, receiver = flight.sender, flight.receiver
        if sender is None or receiver is None:
            return False
        return self._is_cut(self._asked_s, sender.name, receiver.name)

    def break_delay_s(self) -> float:
        return self._random.random() * 0.3
