"""One request of an API key while it is open: its part of the key's limits, given back when it ends.

Made by `tenants.py` from a request's headers, and put beside the request, where `generator.py` finds it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from aiohttp import web

from cohort.common.clock import Clock
from cohort.common.errors import RequestError
from cohort.common.keys.key_usage import Amounts
from cohort.common.types import TrafficClass
from cohort.services.gateway.keys.key_budget import KeyBudget, KeyLimited

Used = Callable[[], tuple[int, int]]
"""Prompt and completion tokens that a request used so far."""


class Lease:
    def __init__(
        self, budget_of: Callable[[TrafficClass], KeyBudget], traffic_class: TrafficClass, clock: Clock
    ) -> None:
        """Raise `KeyLimited`."""
        self._budget_of = budget_of
        self._clock = clock
        self.traffic_class = traffic_class
        self.budget = budget_of(traffic_class)
        self.budget.admit(clock.now_s(), clock.wall_s())
        self._reserved = 0
        self._used: list[Used] = []
        self._ended = False
        self._kept_open = False
        self._then: Callable[[], None] = lambda: None
        self.on_slo_result: OnSloResult | None = None
        """Callback for the SLOs of its choices, also after the request ended."""

    def reserve(self, traffic_class: TrafficClass, prompt_tokens: int, completion_tokens: int) -> None:
        """Reserve what the request may use, under its final class. Raises `KeyLimited`, or a 400 `RequestError`."""
        now_s, wall_s = self._clock.now_s(), self._clock.wall_s()
        if traffic_class != self.traffic_class:
            budget = self._budget_of(traffic_class)
            budget.admit(now_s, wall_s)
            self.budget.leave(now_s, counts=False)
            self.budget, self.traffic_class = budget, traffic_class
        tokens = prompt_tokens + completion_tokens
        self.budget.reserve(now_s, wall_s, tokens)
        self._reserved += tokens

    def add_usage_source(self, used: Used) -> None:
        """Add a source of the tokens used. It is read when the lease ends, and later for what comes after."""
        self._used.append(used)

    def replace_usage_source(self, used: Used) -> None:
        """Replace the sources of the tokens used by this one."""
        self._used = [used]

    def keep_open(self) -> None:
        """Keep the request open beyond its handler, until `free`."""
        self._kept_open = True

    def on_release(self, then: Callable[[], None]) -> None:
        """Call `then` at once, or after `free` while the request is held."""
        if self._kept_open:
            self._then = then
        else:
            then()

    def free(self, *, charge: bool = True) -> None:
        """Release a held request. With `charge` False another gateway continues it, and charges for all of it."""
        if not charge:
            self._used = []
        self._kept_open = False
        then, self._then = self._then, lambda: None
        then()

    def end(self, error: BaseException | None = None) -> Amounts:
        """Give back what was not used and return what was. Only once; `error` is what kept it from being answered."""
        assert not self._ended
        self._ended = True
        now_s = self._clock.now_s()
        usages = [used() for used in self._used]
        prompt, completion = sum(each[0] for each in usages), sum(each[1] for each in usages)
        self.budget.settle(now_s, self._clock.wall_s(), self._reserved, prompt + completion)
        # One that the server could not serve, or that a limit refused, is not one of the minute's requests either.
        unserved = isinstance(error, RequestError) and (error.status == 429 or error.status >= 500)
        self.budget.leave(now_s, counts=not unserved)
        refused = isinstance(error, KeyLimited)
        return Amounts(int(bool(usages)), prompt, completion, int(refused))


OnSloResult = Callable[[TrafficClass, Mapping[str, bool]], None]
"""Callback for an ended choice: its class, and whether each objective was met."""
LEASE = web.RequestKey("lease", Lease)
