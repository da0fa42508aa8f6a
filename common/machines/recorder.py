"""A machine that writes down everything it is told and everything it answers, so that a run can be replayed.

Live hosts use it when `engine.record_dir` is set; `replayer.py` feeds a recording to a fresh machine with the same
policies and demands the same effects. That is the proof that simulator and live system decide alike, and a way to look
at a decision again.

A recording is JSON lines: a header, then one `Call` per call, in order. `write` is the host's: nothing here does I/O.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Generic

import msgspec

from cohort.common.machines.effects import StartStep
from cohort.common.machines.machine import Effect, Event, Machine
from cohort.common.machines.worker_state import WorkerSetup
from cohort.common.policies.interface import IterationPlan


class WorkerHeader(msgspec.Struct, frozen=True, tag_field="machine", tag="worker"):
    """What a worker's machine is made of; `config` is the whole configuration as YAML."""

    setup: WorkerSetup
    seed: int
    config: str


Header = WorkerHeader
"""Of any machine; each has one, and a builder in `replayer.py`."""


class Call(msgspec.Struct, frozen=True):
    """One `handle`: its events as they were, its effects as text."""

    now_s: float
    events: msgspec.Raw
    effects: list[str]


def describe_plan(plan: IterationPlan) -> list[str]:
    """Everything a plan decides, as text."""
    rows = [f"{row.sequence.key} [{row.start}, {row.start + row.count})" for row in plan.rows]
    preempted = [f"{preempt.how} {preempt.sequence.key}" for preempt in plan.preempted]
    return [*rows, *preempted, *(str(copy) for copy in plan.copies), f"padded to {plan.padded_to}"]


def describe(effects: Iterable[object]) -> list[str]:
    return [
        f"StartStep {'; '.join(describe_plan(effect.plan))}"
        if isinstance(effect, StartStep)
        else f"{type(effect).__name__} {msgspec.json.encode(effect).decode()}"
        for effect in effects
    ]


class Recorded(Generic[Event, Effect]):
    """Stands in for a machine. Made before its first event; `handle` of the machine itself is called by it only."""

    def __init__(self, machine: Machine[Event, Effect], header: Header, write: Callable[[bytes], object]) -> None:
        self._handle = machine.handle
        self.check = machine.check
        self._write = write
        write(msgspec.json.encode(header) + b"\n")

    def handle(self, now_s: float, *events: Event) -> list[Effect]:
        told = msgspec.Raw(msgspec.json.encode(events))  # before they are handled: a machine keeps what it is given
        effects = self._handle(now_s, *events)
        self._write(msgspec.json.encode(Call(now_s, told, describe(effects))) + b"\n")
        return effects
