"""A machine whose own state contradicts itself is told nothing more, and its process ends.

The line between a service and its machine, as `recording.recorded` is. What a machine asserts holds whatever its peers
say, so a failed assertion is a defect, and what it would do next may be wrong: a wrong token, or KV of another request.
It is therefore as dead as a killed one, whoever called it, be it a task, a callback or an HTTP handler. Its
peers notice by its connections, as with a kill, and the launcher starts another one.
"""

from __future__ import annotations

from typing import Generic

from cohort.common.errors import InvariantViolated
from cohort.common.machines.machine import Effect, Event, Machine
from cohort.common.process.service import ServiceContext


class Guarded(Generic[Event, Effect]):
    """Machine whose failed assertion ends the process."""

    def __init__(self, machine: Machine[Event, Effect], context: ServiceContext) -> None:
        self._machine = machine
        self.check = machine.check
        self._context = context

    def handle(self, now_s: float, *events: Event) -> list[Effect]:
        """Call the machine. Raises what it asserted, once; later calls do nothing."""
        if self._context.failure is not None:
            return []
        try:
            return self._machine.handle(now_s, *events)
        except (AssertionError, InvariantViolated) as error:
            self._context.log.critical(
                "the machine contradicts itself, this process ends",
                assertion=str(error),
                events=[_named(event) for event in events],
                now_s=now_s,
                exc_info=error,
            )
            self._context.fail(error)
            raise


def guarded(context: ServiceContext, machine: Machine[Event, Effect]) -> Machine[Event, Effect]:
    return Guarded(machine, context)


def _named(event: object) -> str:
    """Name an event by its type and its message's: what users wrote stays out of the log."""
    message = getattr(event, "message", None)
    return type(event).__name__ if message is None else f"{type(event).__name__}({type(message).__name__})"
