"""Feeds a recording to a fresh machine with the same policies and compares every effect, plans among them."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any, assert_never

import msgspec

from cohort.common.config import Config, load_config
from cohort.common.errors import ConfigError
from cohort.common.machines.events import GatewayEvent, ManagerEvent, WorkerEvent
from cohort.common.machines.gateway.gateway import GatewayMachine
from cohort.common.machines.machine import Machine
from cohort.common.machines.manager.manager import ManagerMachine
from cohort.common.machines.recorder import (
    Call,
    GatewayHeader,
    Header,
    ManagerHeader,
    WorkerHeader,
    decoder_of_events,
    describe,
    describe_error,
)
from cohort.common.machines.worker.worker import WorkerMachine
from cohort.common.policies import compose

_ROW = re.compile(r"\[\d+, \d+\)$")


class Replayed(msgspec.Struct, frozen=True):
    """Result of a replay. `plans`: steps that a worker started; `rows`: theirs. `difference`: the first one, or ""."""

    instance: str
    calls: int
    plans: int
    rows: int
    effects: int
    difference: str
    machine: str = "worker"


class Step(msgspec.Struct, frozen=True):
    """Call of a recording, replayed. `line` counts from 1, the header's."""

    line: int
    call: Call
    replayed: Call

    @property
    def equal(self) -> bool:
        return self.replayed.effects == self.call.effects and self.replayed.raised == self.call.raised

    @property
    def difference(self) -> str:
        if self.equal:
            return ""
        recorded, replayed = (call.raised or str(call.effects) for call in (self.call, self.replayed))
        return f"line {self.line}: recorded {recorded}, replayed {replayed}"


class Replay:
    """Recorded run, and the machine that handles it again. Raises `ConfigError` for a file that is no recording."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            first, *self._lines = path.read_bytes().splitlines()
            header = msgspec.json.decode(first, type=Header)
            self.instance, self._machine, events_type = _build(header)
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            raise ConfigError(f"{path}: not a recording: {error}") from error
        self.machine = str(type(header).__struct_config__.tag)
        self._events = decoder_of_events(events_type)

    def steps(self) -> Iterator[Step]:
        """Yield every call in order, once. After the first difference the machine's state is not the recorded one."""
        calls = msgspec.json.Decoder(Call)
        for number, line in enumerate(self._lines, start=2):
            try:
                call = calls.decode(line)
                events = self._events.decode(call.events)
            except msgspec.MsgspecError as error:
                if number == len(self._lines) + 1:
                    return  # a killed process's last line may be half written
                raise ConfigError(f"{self._path}:{number}: not a call of a recording: {error}") from error
            yield Step(number, call, self._replayed_call(call, events))

    def _replayed_call(self, call: Call, events: list[Any]) -> Call:
        try:
            return Call(call.now_s, call.events, describe(self._machine.handle(call.now_s, *events)))
        except Exception as error:
            return Call(call.now_s, call.events, [], describe_error(error))


def replay(path: Path) -> Replayed:
    """Replay until the first difference. Raises `ConfigError` for a file that is no recording."""
    replayed = Replay(path)
    calls = plans = rows = effects = 0
    difference = ""
    for step in replayed.steps():
        calls += 1
        found = step.replayed.effects
        started = [effect for effect in found if effect.startswith("StartStep ")]
        plans, effects = plans + len(started), effects + len(found)
        rows += sum(_ROW.search(part) is not None for text in started for part in text.split("; "))
        if difference := step.difference:
            break
    return Replayed(replayed.instance, calls, plans, rows, effects, difference, replayed.machine)


def _build(header: Header) -> tuple[str, Machine[Any, Any], Any]:
    config = _config(header.config)
    match header:
        case WorkerHeader(setup=setup, seed=seed):
            capacity = setup.capacity
            kv = compose.allocation(config, capacity.geometry, capacity.num_blocks, capacity.host_blocks)
            scheduler = compose.iteration(config)
            machine = WorkerMachine(setup, scheduler, kv, Random(seed))
            if header.learned and machine.learned is not None:
                machine.learned.import_state(header.learned)
            return setup.instance, machine, WorkerEvent
        case ManagerHeader(instance=instance, incarnation=incarnation, settings=settings, now_s=now_s):
            policies = compose.prefill_order(config), compose.placement(config), compose.late_binding(config)
            return instance, ManagerMachine(instance, incarnation, settings, *policies, now_s), ManagerEvent
        case GatewayHeader(instance=instance):
            gateway = GatewayMachine(
                instance,
                header.incarnation,
                header.endpoint,
                header.settings,
                compose.admission(config),
                header.now_s,
                manager=header.manager,
                predictor=header.predictor,
                standbys=header.standbys,
            )
            return instance, gateway, GatewayEvent
        case _:
            assert_never(header)


def _config(text: str) -> Config:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.yaml"
        file.write_text(text, encoding="utf-8")
        return load_config([file])
