"""A `WorkerMachine` that writes down everything it is told and everything it answers, so that a run can be replayed.

Live workers use it when `engine.record_dir` is set; `services/simulator/replay.py` feeds a recording to a fresh machine
with the same policies and demands the same plans and effects. That is the proof that simulator and live system decide
alike, and a way to look at a decision again.

A recording is JSON lines: a header, then one entry per call, in order. `write` is the host's: nothing here does I/O.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from random import Random

import msgspec

from cohort.common.codec import encode
from cohort.common.machines.effects import Effect
from cohort.common.machines.worker import Sampled, WorkerMachine, WorkerSettings
from cohort.common.messages import Message, TokenLogprob
from cohort.common.policies.interface import IterationPlan, IterationScheduler
from cohort.common.policies.kv_interface import KvAllocator
from cohort.common.sequence import Sequence
from cohort.common.types import Attempt, InstanceId, WorkerCapacity


class Header(msgspec.Struct, frozen=True):
    """What a machine is made of; `config` is the whole configuration as YAML."""

    instance: InstanceId
    manager: InstanceId
    capacity: WorkerCapacity
    settings: WorkerSettings
    seed: int
    config: str


class Draw(msgspec.Struct, frozen=True, array_like=True):
    key: Attempt
    token: int
    logprob: TokenLogprob | None = None


class Entry(msgspec.Struct, frozen=True, omit_defaults=True):
    """One call (`message`, `peer_lost`, `tick`, `plan`, `completed`, `failed`, `sent`, `received`,
    `scored`) or one answer (`planned`, `links`, `effects`). Only the fields of its kind are set."""

    kind: str
    now_s: float = 0.0
    peer: str = ""
    message: bytes = b""
    reason: str = ""
    runs: int = 1
    draws: list[Draw] = []
    latency_s: float = 0.0
    lease_id: int = 0
    round: int = 0
    error: str | None = None
    links: dict[str, bytes] = {}
    answer: list[str] = []
    sequence: Attempt | None = None
    position: int = 0
    scores: list[TokenLogprob] = []


def describe_plan(plan: IterationPlan | None) -> list[str]:
    """Everything a plan decides, as text."""
    if plan is None:
        return ["nothing"]
    rows = [f"{row.sequence.key} [{row.start}, {row.start + row.count})" for row in plan.rows]
    preempted = [f"{preempt.how} {preempt.sequence.key}" for preempt in plan.preempted]
    return [*rows, *preempted, *(str(copy) for copy in plan.copies), f"padded to {plan.padded_to}"]


def describe_effects(effects: Iterable[Effect]) -> list[str]:
    return [f"{type(effect).__name__} {msgspec.json.encode(effect).decode()}" for effect in effects]


class RecordedWorkerMachine(WorkerMachine):
    def __init__(
        self,
        instance: InstanceId,
        manager: InstanceId,
        capacity: WorkerCapacity,
        settings: WorkerSettings,
        scheduler: IterationScheduler,
        kv: KvAllocator,
        seed: int,
        link_addresses: Callable[[], Mapping[str, bytes]],
        config: str,
        write: Callable[[bytes], object],
    ) -> None:
        self._write = write
        write(msgspec.json.encode(Header(instance, manager, capacity, settings, seed, config)) + b"\n")
        super().__init__(
            instance, manager, capacity, settings, scheduler, kv, Random(seed), lambda: self._asked(link_addresses())
        )

    def on_message(self, now_s: float, sender: InstanceId, message: Message) -> bool:
        self._note(Entry("message", now_s, sender, encode(message)))
        return super().on_message(now_s, sender, message)

    def on_peer_lost(self, now_s: float, peer: InstanceId) -> None:
        self._note(Entry("peer_lost", now_s, peer))
        super().on_peer_lost(now_s, peer)

    def tick(self, now_s: float) -> None:
        self._note(Entry("tick", now_s))
        super().tick(now_s)

    def plan(self, now_s: float) -> IterationPlan | None:
        self._note(Entry("plan", now_s))
        plan = super().plan(now_s)
        self._note(Entry("planned", answer=describe_plan(plan)))
        return plan

    def scored(self, sequence: Sequence, position: int, scores: list[TokenLogprob]) -> None:
        self._note(Entry("scored", sequence=sequence.key, position=position, scores=scores))
        super().scored(sequence, position, scores)

    def completed(self, now_s: float, sampled: Iterable[Sampled], latency_s: float) -> None:
        drawn = list(sampled)
        draws = [Draw(draw.sequence.key, draw.token, draw.logprob) for draw in drawn]
        self._note(Entry("completed", now_s, draws=draws, latency_s=latency_s))
        super().completed(now_s, drawn, latency_s)

    def step_failed(self, now_s: float, reason: str) -> None:
        self._note(Entry("failed", now_s, reason=reason))
        super().step_failed(now_s, reason)

    def run_sent(self, now_s: float, lease_id: int, error: str | None, runs: int = 1) -> None:
        self._note(Entry("sent", now_s, lease_id=lease_id, error=error, runs=runs))
        super().run_sent(now_s, lease_id, error, runs)

    def run_received(self, now_s: float, lease_id: int, round_: int, error: str | None, runs: int = 1) -> None:
        self._note(Entry("received", now_s, lease_id=lease_id, round=round_, error=error, runs=runs))
        super().run_received(now_s, lease_id, round_, error, runs)

    def take_effects(self) -> list[Effect]:
        effects = super().take_effects()
        if effects:
            self._note(Entry("effects", answer=describe_effects(effects)))
        return effects

    def _asked(self, links: Mapping[str, bytes]) -> Mapping[str, bytes]:
        self._note(Entry("links", links=dict(links)))
        return links

    def _note(self, entry: Entry) -> None:
        self._write(msgspec.json.encode(entry) + b"\n")
