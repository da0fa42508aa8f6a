"""A machine that is looked at while it works: its events and effects become spans.

`traced` is the line between a service and its machine, as `recording.recorded` is; both may be in it. With tracing off
it hands back what it was given, so nothing is called more than before. An observer that fails ends the tracing of this
process with an error in the log, never the machine's work.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

import structlog

from cohort.common.machines.machine import Effect, Event, Machine
from cohort.common.process.service import ServiceContext
from cohort.common.tracing.spans import Tracing

Seen = TypeVar("Seen", contravariant=True)
Done = TypeVar("Done", contravariant=True)


class Observer(Protocol[Seen, Done]):
    def handled(self, now_s: float, took_s: float, events: Sequence[Seen], effects: Sequence[Done]) -> None:
        """Observe a call of `handle`: its time and events, how long it took, and its effects."""


class Observed(Generic[Event, Effect]):
    """Machine that reports its calls to an observer."""

    def __init__(
        self,
        machine: Machine[Event, Effect],
        observer: Observer[Event, Effect],
        now_s: Callable[[], float],
        log: structlog.stdlib.BoundLogger,
    ) -> None:
        self._handle = machine.handle
        self.check = machine.check
        self._observer: Observer[Event, Effect] | None = observer
        self._now_s = now_s
        self._log = log

    def handle(self, now_s: float, *events: Event) -> list[Effect]:
        effects = self._handle(now_s, *events)
        if self._observer is not None:
            try:
                self._observer.handled(now_s, max(0.0, self._now_s() - now_s), events, effects)
            except Exception:
                self._observer = None
                self._log.exception("tracing failed; this process writes no spans of requests any more")
        return effects


def traced(
    context: ServiceContext, machine: Machine[Event, Effect], observer: Callable[[Tracing], Observer[Event, Effect]]
) -> Machine[Event, Effect]:
    """Return the machine, observed if tracing is on. Raises `ConfigError` if tracing is configured but impossible."""
    tracing = Tracing.opened(context)
    if tracing is None:
        return machine
    return Observed(machine, observer(tracing), context.clock.now_s, context.log)
