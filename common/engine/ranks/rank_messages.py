"""What rank 0 of a tensor-parallel worker and its followers say to each other, over a socket pair for each follower
(of another host: carried by `rank_wire`).

    rank 0 ──▶ follower   Setup, Connect, Compile, Record, Step, Copies, Stop
    follower ──▶ rank 0   Loaded, Failed, Compiled, Recorded, Copied

A frame is its length (8 bytes) and a MessagePack struct. Every wait has a deadline but a follower's wait for its next
command: that ends with the command, or with rank 0. Orders about KV transfers go over a second pair: `rank_orders`.
"""

from __future__ import annotations

import socket
import struct
from dataclasses import fields
from typing import Any

import msgspec
import numpy as np

from cohort.common.config import LoggingConfig
from cohort.common.engine.config.runner_options import RunnerOptions
from cohort.common.engine.step.batch import GREEDY, ScoringRow, StepBatch
from cohort.common.engine.step.decode_classes import RecordedClasses, StepClass
from cohort.common.errors import CohortError
from cohort.common.policies.kv_interface import KvCopy

LENGTH = struct.Struct("<Q")
_OF_RANK_ZERO = ("sampling", "grammars", "adapters", "numbers")
_ARRAYS = tuple(each.name for each in fields(StepBatch) if each.name not in (*_OF_RANK_ZERO, "scoring"))


class RankLost(CohortError):
    """Another rank of the group has ended, or did not say in time what it had to."""


class Setup(msgspec.Struct, frozen=True, tag=True):
    """All that a follower needs to load its share. `store`: a file, "" = rank 0 is asked; `interface` as of a
    `RankGroup`."""

    instance: str
    rank: int
    degree: int
    store: str
    model_dir: str
    options: RunnerOptions
    logging: LoggingConfig
    interface: str = ""


class Connect(msgspec.Struct, frozen=True, tag=True):
    """Every rank has loaded."""


class Compile(msgspec.Struct, frozen=True, tag=True):
    """Every kernel that a step can launch; answered by `Compiled`."""


class Record(msgspec.Struct, frozen=True, tag=True):
    """Begin to record steps, together with rank 0; answered by `Recorded`. `classes`: decode steps of these batch sizes
    only."""

    classes: tuple[int, ...] | None


class Named(msgspec.Struct, frozen=True, array_like=True):
    """An array of a `StepBatch`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: bytes


class Step(msgspec.Struct, frozen=True, tag=True):
    """A `StepBatch` as far as a forward needs it. `taken`: the recorded step that computes it. `awaited`: so many
    tokens were sampled by the step before, and rank 0 hands them out on the devices (`StepBatch.token_source`)."""

    arrays: tuple[Named, ...]
    scoring: tuple[ScoringRow, ...]
    taken: StepClass = None
    awaited: int = 0


class Copies(msgspec.Struct, frozen=True, tag=True):
    """To be made now, in their order; answered by `Copied`."""

    copies: list[KvCopy]


class Stop(msgspec.Struct, frozen=True, tag=True):
    """The worker ends."""


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """The weights are there; the follower waits for `Connect`."""


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The share cannot be loaded. `configuration`: because of what was asked for."""

    reason: str
    configuration: bool


class Compiled(msgspec.Struct, frozen=True, tag=True):
    """Nothing is left to compile."""


class Recorded(msgspec.Struct, frozen=True, tag=True):
    """What this rank replays from now on."""

    classes: RecordedClasses


class Copied(msgspec.Struct, frozen=True, tag=True):
    """All of the last `Copies` are made."""


Command = Setup | Connect | Compile | Record | Step | Copies | Stop
Answer = Loaded | Failed | Compiled | Recorded | Copied

_encoder = msgspec.msgpack.Encoder()
_commands: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
_answers: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


def encoded(message: Command | Answer) -> bytes:
    """With its length: for several followers it is encoded once."""
    return framed(_encoder.encode(message))


def framed(body: bytes) -> bytes:
    return LENGTH.pack(len(body)) + body


def send(peer: socket.socket, frame: bytes) -> None:
    """Raises `RankLost`."""
    try:
        peer.sendall(frame)
    except OSError as error:
        raise RankLost(f"a rank of this worker takes nothing any more: {error}") from error


def receive_command(peer: socket.socket) -> Command:
    return _commands.decode(receive_frame(peer))


def receive_answer(peer: socket.socket) -> Answer:
    return _answers.decode(receive_frame(peer))


def receive_exactly(peer: socket.socket, target: memoryview) -> None:
    """Raises `RankLost` where the other end closes, or stays silent beyond the socket's timeout."""
    done = 0
    while done < len(target):
        try:
            count = peer.recv_into(target[done:])
        except OSError as error:
            raise RankLost(f"a rank of this worker does not answer: {error}") from error
        if count == 0:
            raise RankLost("a rank of this worker has ended")
        done += count


def receive_frame(peer: socket.socket) -> bytearray:
    """A body that `framed` made. Raises `RankLost`."""
    head = bytearray(LENGTH.size)
    receive_exactly(peer, memoryview(head))
    body = bytearray(LENGTH.unpack(head)[0])
    receive_exactly(peer, memoryview(body))
    return body


def step_of(batch: StepBatch, taken: StepClass = None, awaited: int = 0) -> Step:
    arrays = tuple(
        Named(name, array.dtype.str, array.shape, array.tobytes())
        for name in _ARRAYS
        if (array := getattr(batch, name)) is not None
    )
    return Step(arrays, batch.scoring, taken, awaited)


def batch_of(step: Step) -> StepBatch:
    """The batch again; how its tokens are sampled is not in it."""
    found: dict[str, Any] = {
        each.name: np.frombuffer(bytearray(each.data), each.dtype).reshape(each.shape) for each in step.arrays
    }
    rows, drafts = found["sample_rows"], found.get("drafts")
    sampled = len(rows) + (0 if drafts is None else int(drafts[rows].sum()))
    return StepBatch(**{"directions": None, **found}, sampling=(GREEDY,) * sampled, scoring=step.scoring)
