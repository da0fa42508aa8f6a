"""A machine that contradicts itself: told nothing more, and its process asked to end."""

from __future__ import annotations

from typing import Any

import pytest

from cohort.common.errors import InvariantViolated
from cohort.common.machines.events import Received, Tick
from cohort.common.messages import Outstanding
from cohort.common.process.guard import Guarded


class Context:
    def __init__(self) -> None:
        self.failure: Exception | None = None
        self.said: list[dict[str, Any]] = []
        self.log = self

    def fail(self, error: Exception) -> None:
        self.failure = error

    def critical(self, _: str, **facts: Any) -> None:
        self.said.append(facts)


class Machine:
    def __init__(self, error: Exception | None) -> None:
        self.error = error
        self.told = 0

    def handle(self, now_s: float, *events: Any) -> list[str]:
        self.told += 1
        if self.error is not None:
            raise self.error
        return [str(len(events))]

    def check(self) -> None:
        pass


@pytest.mark.parametrize("error", [AssertionError("block 3 is freed twice"), InvariantViolated("no plan is in flight")])
def test_it_says_so_once_and_is_told_nothing_more(error: Exception) -> None:
    context, machine = Context(), Machine(error)
    guarded = Guarded(machine, context)  # type: ignore[arg-type, var-annotated]
    with pytest.raises(type(error)):
        guarded.handle(2.0, Received("gateway", Outstanding([])), Tick())
    assert context.failure is error
    assert guarded.handle(3.0, Tick()) == []
    assert machine.told == 1
    (said,) = context.said
    assert said == {
        "assertion": str(error),
        "events": ["Received(Outstanding)", "Tick"],
        "now_s": 2.0,
        "exc_info": error,
    }


def test_other_errors_are_its_hosts() -> None:
    context, machine = Context(), Machine(ValueError("a text no grammar reads"))
    guarded = Guarded(machine, context)  # type: ignore[arg-type, var-annotated]
    for _ in range(2):
        with pytest.raises(ValueError, match="grammar"):
            guarded.handle(0.0, Tick())
    assert context.failure is None and not context.said
    machine.error = None
    assert guarded.handle(0.0, Tick()) == ["1"]
