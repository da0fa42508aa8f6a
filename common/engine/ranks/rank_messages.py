"""Messages between rank 0 of a tensor-parallel worker and its followers, over a socket pair for each follower (of
another host: carried by `rank_wire`).

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
from cohort.common.engine.step.batch import GREEDY, PoolingRow, ScoringRow, StepBatch
from cohort.common.engine.step.decode_classes import RecordedClasses, StepClass
from cohort.common.errors import CohortError
from cohort.common.policies.kv_interface import KvCopy

LENGTH = struct.Struct("<Q")
_OF_RANK_ZERO = ("sampling", "grammars", "adapters", "numbers")
_ARRAYS = tuple(each.name for each in fields(StepBatch) if each.name not in (*_OF_RANK_ZERO, "scoring", "pooling"))


class RankLost(CohortError):
    """End of another rank of the group, or its failure to send in time."""


class Setup(msgspec.Struct, frozen=True, tag=True):
    """Data to load a follower's share. `store`: a file, "" = rank 0 has it; `interface`: as in `RankSettings`."""

    instance: str
    rank: int
    degree: int
    store: str
    model_dir: str
    options: RunnerOptions
    logging: LoggingConfig
    interface: str = ""


class Connect(msgspec.Struct, frozen=True, tag=True):
    """Notice that every rank has loaded."""


class Compile(msgspec.Struct, frozen=True, tag=True):
    """Command to compile every kernel that a step can launch; `Compiled` answers it."""


class Record(msgspec.Struct, frozen=True, tag=True):
    """Command to record steps, together with rank 0; `Recorded` answers it. `classes`: only these decode steps."""

    classes: tuple[int, ...] | None


class Named(msgspec.Struct, frozen=True, array_like=True):
    """Array of a `StepBatch`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: bytes


class Step(msgspec.Struct, frozen=True, tag=True):
    """Parts of a `StepBatch` that a forward needs. `taken`: the recorded step that computes it. `awaited`: number of
    tokens that the step before samples, and rank 0 hands out on the devices (`StepBatch.token_source`)."""

    arrays: tuple[Named, ...]
    scoring: tuple[ScoringRow, ...]
    pooling: tuple[PoolingRow, ...] = ()
    taken: StepClass = None
    awaited: int = 0


class Copies(msgspec.Struct, frozen=True, tag=True):
    """Copies to be made now, in their order; `Copied` answers it."""

    copies: list[KvCopy]


class Stop(msgspec.Struct, frozen=True, tag=True):
    """End of the worker."""


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """Notice that the weights are loaded; the follower waits for `Connect`."""


class Failed(msgspec.Struct, frozen=True, tag=True):
    """Failure to load the share. `configuration`: because of the request."""

    reason: str
    configuration: bool


class Compiled(msgspec.Struct, frozen=True, tag=True):
    """Notice that nothing is left to compile."""


class Recorded(msgspec.Struct, frozen=True, tag=True):
    """Classes that this rank replays from now on."""

    classes: RecordedClasses


class Copied(msgspec.Struct, frozen=True, tag=True):
    """Notice that all of the last `Copies` are made."""


Command = Setup | Connect | Compile | Record | Step | Copies | Stop
Answer = Loaded | Failed | Compiled | Recorded | Copied

_encoder = msgspec.msgpack.Encoder()
_commands: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
_answers: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


def encoded(message: Command | Answer) -> bytes:
    """Return the message with its length: for several followers it is encoded once."""
    return framed(_encoder.encode(message))


def framed(body: bytes) -> bytes:
    return LENGTH.pack(len(body)) + body


def send(peer: socket.socket, frame: bytes) -> None:
    """Send a frame. Raises `RankLost`."""
    try:
        peer.sendall(frame)
    except OSError as error:
        raise RankLost(f"a rank of this worker takes nothing any more: {error}") from error


def receive_command(peer: socket.socket) -> Command:
    return _commands.decode(receive_frame(peer))


def receive_answer(peer: socket.socket) -> Answer:
    return _answers.decode(receive_frame(peer))


def receive_exactly(peer: socket.socket, target: memoryview) -> None:
    """Fill `target`. Raises `RankLost` if the other end closes, or stays silent beyond the socket's timeout."""
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
    """Return a body that `framed` made. Raises `RankLost`."""
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
    return Step(arrays, batch.scoring, batch.pooling, taken, awaited)


def batch_of(step: Step) -> StepBatch:
    """Return the batch again, without how its tokens are sampled."""
    found: dict[str, Any] = {
        each.name: np.frombuffer(bytearray(each.data), each.dtype).reshape(each.shape) for each in step.arrays
    }
    rows, drafts = found["sample_rows"], found.get("drafts")
    sampled = len(rows) + (0 if drafts is None else int(drafts[rows].sum()))
    return StepBatch(
        **{"directions": None, **found}, sampling=(GREEDY,) * sampled, scoring=step.scoring, pooling=step.pooling
    )
