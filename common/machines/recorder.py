"""Recording of a machine's events and effects, so that a run can be replayed.

Live hosts use it if `recording.folder` is set; `replayer.py` feeds a recording to a fresh machine with the same
policies and demands the same effects. A recording is JSON lines: a header, then one `Call` per call, in order. `write`
is the host's: nothing here does I/O.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Generic

import msgspec

from cohort.common.config import Config, dump_config
from cohort.common.machines.effects import Admitted, Deliver, Ended, Fail, ManagerFound, Rejected, StartStep
from cohort.common.machines.gateway.gateway import GatewaySettings
from cohort.common.machines.machine import Effect, Event, Machine
from cohort.common.machines.manager.manager import ManagerSettings
from cohort.common.machines.worker.worker_state import WorkerSetup
from cohort.common.policies.interface import IterationPlan
from cohort.common.tokens import listed, unpacked
from cohort.common.types import InstanceId


class _Header(msgspec.Struct, frozen=True, tag_field="machine"):
    """Constructor arguments of a machine, as data. Policies are built from `config`, which is YAML (`config_text`)."""


class WorkerHeader(_Header, frozen=True, tag="worker"):
    setup: WorkerSetup
    seed: int
    config: str
    learned: bytes = b""
    """Scheduler's earlier knowledge of the machine (`Learned.import_state`)."""


class ManagerHeader(_Header, frozen=True, tag="manager"):
    instance: InstanceId
    incarnation: int
    settings: ManagerSettings
    now_s: float
    config: str


class GatewayHeader(_Header, frozen=True, tag="gateway"):
    instance: InstanceId
    incarnation: int
    endpoint: str
    settings: GatewaySettings
    now_s: float
    manager: InstanceId
    predictor: InstanceId
    config: str
    standbys: tuple[InstanceId, ...] = ()


Header = WorkerHeader | ManagerHeader | GatewayHeader
"""Header of any machine; `replayer.py` builds the machine from it."""


class Call(msgspec.Struct, frozen=True):
    """Call of `handle`: its events unchanged, its effects as text. `raised`: the error that ended it, if one did."""

    now_s: float
    events: msgspec.Raw
    effects: list[str]
    raised: str = ""


def decoder_of_events(of: Any) -> msgspec.json.Decoder[list[Any]]:
    """Return the decoder of `Call.events` of this type, a machine's union of events."""
    return msgspec.json.Decoder(list[of], dec_hook=unpacked)


def config_text(config: Config) -> str:
    """Return the configuration for a header. API keys do not belong in a file that is passed on. Whether there are
    several decides something in a machine, so two invented ones stand for them."""
    gateway = msgspec.structs.replace(config.gateway, api_keys=("one", "another") if config.shares_fairly else ())
    return dump_config(msgspec.structs.replace(config, gateway=gateway))


def describe_plan(plan: IterationPlan) -> list[str]:
    rows = [
        f"{row.sequence.key} [{row.start}, {row.start + row.count}){f' + {row.drafts}' if row.drafts else ''}"
        for row in plan.rows
    ]
    preempted = [f"{preempt.how} {preempt.sequence.key}" for preempt in plan.preempted]
    return [*rows, *preempted, *(str(copy) for copy in plan.copies), f"padded to {plan.padded_to}"]


def describe(effects: Iterable[object]) -> list[str]:
    """Return the effects as text. Call it before the machine handles anything else: entries of a gateway change."""
    return [_describe(effect) for effect in effects]


def _describe(effect: object) -> str:
    match effect:
        case StartStep(plan, ahead):
            return f"StartStep {'; '.join(describe_plan(plan))}{'; ahead' if ahead else ''}"
        case Admitted() | Rejected() | Deliver() | Fail() | Ended() | ManagerFound():
            return repr(effect)
        case _:
            return f"{type(effect).__name__} {msgspec.json.encode(effect, enc_hook=listed).decode()}"


def describe_error(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


class Recorded(Generic[Event, Effect]):
    """Recording machine in place of one. Made before its first event; only it calls the machine's own `handle`."""

    def __init__(self, machine: Machine[Event, Effect], header: Header, write: Callable[[bytes], object]) -> None:
        self._handle = machine.handle
        self.check = machine.check
        self._write = write
        write(msgspec.json.encode(header) + b"\n")

    def handle(self, now_s: float, *events: Event) -> list[Effect]:
        # Before they are handled: a machine keeps what it is given.
        encoded = msgspec.Raw(msgspec.json.encode(events, enc_hook=listed))
        try:
            effects = self._handle(now_s, *events)
        except Exception as error:
            self._note(Call(now_s, encoded, [], describe_error(error)))
            raise
        self._note(Call(now_s, encoded, describe(effects)))
        return effects

    def _note(self, call: Call) -> None:
        self._write(msgspec.json.encode(call) + b"\n")
