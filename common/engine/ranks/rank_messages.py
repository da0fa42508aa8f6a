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
from dataclasses import replace

import msgspec
import numpy as np

from cohort.common.config import LoggingConfig
from cohort.common.engine.config.runner_options import RunnerOptions
from cohort.common.engine.step.batch import GREEDY, ScoringRow, StepBatch
from cohort.common.engine.step.decode_classes import RecordedClasses, StepClass
from cohort.common.errors import CohortError
from cohort.common.policies.kv_interface import KvCopy

LENGTH = struct.Struct("<Q")


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


class Step(msgspec.Struct, frozen=True, tag=True):
    """A `StepBatch` as far as a forward needs it: arrays as bytes, of the dtypes that they have there. `taken`: the
    recorded step that computes it. `awaited`: so many tokens were sampled by the step before, and rank 0 hands them out
    on the devices (`StepBatch.token_source`)."""

    rows: int
    token_ids: bytes
    positions: bytes
    query_start: bytes
    context_lens: bytes
    block_tables: bytes
    directions: bytes | None
    slot_mapping: bytes
    sample_rows: bytes
    padding: bytes | None
    scoring: tuple[ScoringRow, ...]
    drafts: bytes | None = None
    more_tables: bytes | None = None
    more_slots: bytes | None = None
    taken: StepClass = None
    token_source: bytes | None = None
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
    return Step(
        rows=batch.num_rows,
        token_ids=batch.token_ids.tobytes(),
        positions=batch.positions.tobytes(),
        query_start=batch.query_start.tobytes(),
        context_lens=batch.context_lens.tobytes(),
        block_tables=batch.block_tables.tobytes(),
        directions=None if batch.directions is None else batch.directions.tobytes(),
        slot_mapping=batch.slot_mapping.tobytes(),
        sample_rows=batch.sample_rows.tobytes(),
        padding=None if batch.padding is None else batch.padding.tobytes(),
        scoring=batch.scoring,
        drafts=None if batch.drafts is None else batch.drafts.tobytes(),
        more_tables=None if batch.more_tables is None else batch.more_tables.tobytes(),
        more_slots=None if batch.more_slots is None else batch.more_slots.tobytes(),
        taken=taken,
        token_source=None if batch.token_source is None else batch.token_source.tobytes(),
        awaited=awaited,
    )


def batch_of(step: Step) -> StepBatch:
    """The batch again; how its tokens are sampled is not in it."""

    def whole(data: bytes) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        return np.frombuffer(bytearray(data), np.int64)

    def half(data: bytes) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
        return np.frombuffer(bytearray(data), np.int32)

    sample_rows = half(step.sample_rows)
    drafts = None if step.drafts is None else half(step.drafts)
    sampled = len(sample_rows) + (0 if drafts is None else int(drafts[sample_rows].sum()))
    tables, tokens = half(step.block_tables).reshape(step.rows, -1), whole(step.token_ids)
    batch = StepBatch(
        token_ids=tokens,
        positions=whole(step.positions),
        query_start=half(step.query_start),
        context_lens=half(step.context_lens),
        block_tables=tables,
        directions=None,
        slot_mapping=whole(step.slot_mapping),
        sample_rows=sample_rows,
        sampling=(GREEDY,) * sampled,
        padding=None if step.padding is None else half(step.padding),
        scoring=step.scoring,
        token_source=None if step.token_source is None else whole(step.token_source),
        drafts=drafts,
        more_tables=None if step.more_tables is None else half(step.more_tables).reshape(-1, *tables.shape),
        more_slots=None if step.more_slots is None else whole(step.more_slots).reshape(-1, len(tokens)),
    )
    if step.directions is None:
        return batch
    directions = np.frombuffer(bytearray(step.directions), np.uint8).reshape(step.rows, -1)
    return replace(batch, directions=directions)
