"""Feeds a recorded live worker to a fresh machine with the same policies and compares every plan and every effect."""

from __future__ import annotations

import tempfile
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from random import Random

import msgspec

from cohort.common.codec import decode
from cohort.common.config import load_config
from cohort.common.errors import ConfigError
from cohort.common.machines.recording import Entry, Header, describe_effects, describe_plan
from cohort.common.machines.worker import Sampled, WorkerMachine
from cohort.common.policies import compose


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
        lines = path.read_bytes().splitlines()
        header = msgspec.json.decode(lines[0], type=Header)
        decoder = msgspec.json.Decoder(Entry)
        entries = []
        for number, line in enumerate(lines[1:], start=2):
            try:
                entries.append(decoder.decode(line))
            except msgspec.MsgspecError as error:
                if number == len(lines):
                    break  # a killed worker's last line may be half written
                raise ConfigError(f"{path}:{number}: not an entry of a recording: {error}") from error
    except (OSError, IndexError, msgspec.MsgspecError) as error:
        raise ConfigError(f"{path}: not a recording: {error}") from error
    return _replay(header, entries)


def _replay(header: Header, entries: list[Entry]) -> Replayed:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.yaml"
        file.write_text(header.config, encoding="utf-8")
        config = load_config([file])
    capacity = header.capacity
    links: deque[Mapping[str, bytes]] = deque(entry.links for entry in entries if entry.kind == "links")
    machine = WorkerMachine(
        header.instance,
        header.manager,
        capacity,
        header.settings,
        compose.iteration(config),
        compose.allocation(config, capacity.geometry, capacity.num_blocks, capacity.host_blocks),
        Random(header.seed),
        lambda: links.popleft(),
    )
    calls = plans = rows = effects = 0
    planned: list[str] = []

    def result(difference: str = "") -> Replayed:
        return Replayed(header.instance, calls, plans, rows, effects, difference)

    for number, entry in enumerate(entries, start=2):
        calls += entry.kind not in ("planned", "links", "effects")
        match entry.kind:
            case "message":
                machine.on_message(entry.now_s, entry.peer, decode(entry.message))
            case "peer_lost":
                machine.on_peer_lost(entry.now_s, entry.peer)
            case "tick":
                machine.tick(entry.now_s)
            case "plan":
                plan = machine.plan(entry.now_s)
                planned = describe_plan(plan)
                plans += 1
                rows += len(plan.rows) if plan is not None else 0
            case "planned":
                if planned != entry.answer:
                    return result(f"line {number}: live planned {entry.answer}, replayed {planned}")
            case "scored":
                scored = next(row.sequence for row in machine.plan_in_flight.rows if row.sequence.key == entry.sequence)
                machine.scored(scored, entry.position, entry.scores)
            case "completed":
                held = {row.sequence.key: row.sequence for row in machine.plan_in_flight.rows}
                drawn = [Sampled(held[draw.key], draw.token, draw.logprob) for draw in entry.draws]
                machine.completed(entry.now_s, drawn, entry.latency_s)
            case "failed":
                machine.step_failed(entry.now_s, entry.reason)
            case "sent":
                machine.run_sent(entry.now_s, entry.lease_id, entry.error, entry.runs)
            case "received":
                machine.run_received(entry.now_s, entry.lease_id, entry.round, entry.error, entry.runs)
            case "effects":
                answer = describe_effects(machine.take_effects())
                effects += len(answer)
                if answer != entry.answer:
                    return result(f"line {number}: live did {entry.answer}, replayed {answer}")
            case "links":
                pass
            case other:
                return result(f"line {number}: unknown kind {other!r}")
    return result()
