"""Feeds a recording to a fresh machine with the same policies and compares every effect, plans among them."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from random import Random
from typing import Any, assert_never

import msgspec

from cohort.common.config import Config, load_config
from cohort.common.errors import ConfigError
from cohort.common.machines.events import WorkerEvent
from cohort.common.machines.machine import Machine
from cohort.common.machines.recorder import Call, Header, WorkerHeader, describe
from cohort.common.machines.worker import WorkerMachine
from cohort.common.policies import compose

_ROW = re.compile(r"\[\d+, \d+\)$")


class Replayed(msgspec.Struct, frozen=True):
    """`difference` is "" when everything was equal, else the first thing that was not."""

    instance: str
    calls: int
    plans: int
    rows: int
    effects: int
    difference: str


def replay(path: Path) -> Replayed:
    """Stops at the first difference. Raises `ConfigError` for a file that is no recording."""
    try:
        first, *lines = path.read_bytes().splitlines()
        instance, machine, events_type = _build(msgspec.json.decode(first, type=Header))
    except (OSError, ValueError, msgspec.MsgspecError) as error:
        raise ConfigError(f"{path}: not a recording: {error}") from error
    calls, events_of = msgspec.json.Decoder(Call), msgspec.json.Decoder(list[events_type])  # type: ignore[valid-type]
    told = plans = rows = effects = 0
    difference = ""
    for number, line in enumerate(lines, start=2):
        try:
            call = calls.decode(line)
            events = events_of.decode(call.events)
        except msgspec.MsgspecError as error:
            if number == len(lines) + 1:
                break  # a killed process's last line may be half written
            raise ConfigError(f"{path}:{number}: not a call of a recording: {error}") from error
        told += 1
        found = describe(machine.handle(call.now_s, *events))
        steps = [effect for effect in found if effect.startswith("StartStep ")]
        plans, rows, effects = plans + len(steps), rows + sum(_rows(step) for step in steps), effects + len(found)
        if found != call.effects:
            difference = f"line {number}: recorded {call.effects}, replayed {found}"
            break
    return Replayed(instance, told, plans, rows, effects, difference)


def _rows(step: str) -> int:
    return sum(_ROW.search(part) is not None for part in step.split("; "))


def _build(header: Header) -> tuple[str, Machine[Any, Any], Any]:
    """The instance's name, its machine made anew, and the type of its events."""
    match header:
        case WorkerHeader(setup=setup, seed=seed):
            config, capacity = _config(header.config), setup.capacity
            kv = compose.allocation(config, capacity.geometry, capacity.num_blocks, capacity.host_blocks)
            machine = WorkerMachine(setup, compose.iteration(config), kv, Random(seed))
            return setup.instance, machine, WorkerEvent
        case _:
            assert_never(header)


def _config(text: str) -> Config:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.yaml"
        file.write_text(text, encoding="utf-8")
        return load_config([file])
