"""Messages between the serving process and its training child: length-prefixed msgpack over the child's pipes.

    parent ── Finished ──▶ child         parent ◀── Loaded, Learned, Trouble ── child

Private to this service. Length prefix: four bytes, big-endian. The end of the parent's pipe makes the child save
and end, for which it has `SAVE_DEADLINE_S`, so no child outlives its parent for longer.
"""

from __future__ import annotations

import struct
from typing import BinaryIO

import msgspec
import numpy as np

from cohort.services.length_predictor.buffer import Observation
from cohort.services.length_predictor.features import FeatureVector

MAX_FRAME_BYTES = 64 << 20
SAVE_DEADLINE_S = 5
"""Time from the end of the parent's pipe to the end of the process."""
_LENGTH = struct.Struct(">I")
PREFIX_BYTES = _LENGTH.size


class TrainingPace(msgspec.Struct, frozen=True):
    """Pace of trainings, each after `retrain_every` finished requests, or more where the child knows thousands."""

    retrain_every: int = 64
    min_observations: int = 32
    save_every_s: float = 30.0
    buffer_size: int = 20_000


class Finished(msgspec.Struct, frozen=True, tag=True):
    """Finished request, features only; arrays as their little-endian bytes."""

    compact: bytes
    buckets: bytes
    counts: bytes
    output_tokens: int
    max_tokens: int
    truncated: bool

    @classmethod
    def of(cls, row: Observation) -> Finished:
        vector = row.vector
        return cls(
            vector.compact.tobytes(),
            vector.buckets.tobytes(),
            vector.counts.tobytes(),
            row.output_tokens,
            row.max_tokens,
            row.truncated,
        )

    def observation(self) -> Observation:
        vector = FeatureVector(
            np.frombuffer(self.compact, np.float32),
            np.frombuffer(self.buckets, np.uint16),
            np.frombuffer(self.counts, np.uint8),
        )
        return Observation(vector, self.output_tokens, self.max_tokens, self.truncated)


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """First word of the child: how many requests the state file remembered, and the model in it (b"" if none)."""

    observations: int
    model: bytes


class Learned(msgspec.Struct, frozen=True, tag=True):
    """End of a training."""

    observations: int
    model: bytes
    seconds: float


class Trouble(msgspec.Struct, frozen=True, tag=True):
    """Failure that the operator should read of; the child goes on."""

    event: str
    error: str


FromChild = Loaded | Learned | Trouble

_encoder = msgspec.msgpack.Encoder()
FROM_CHILD: msgspec.msgpack.Decoder[FromChild] = msgspec.msgpack.Decoder(FromChild)
_to_child = msgspec.msgpack.Decoder(Finished)


def frame(message: Finished | FromChild) -> bytes:
    body = _encoder.encode(message)
    return _LENGTH.pack(len(body)) + body


def body_length(prefix: bytes) -> int:
    """Return the length of a body. Raises `ValueError` for one that cannot be ours."""
    length: int = _LENGTH.unpack(prefix)[0]
    if length > MAX_FRAME_BYTES:
        raise ValueError(f"frame of {length} bytes")
    return length


def read_finished(stream: BinaryIO) -> Finished | None:
    """Return the next request from a blocking stream; None at its end."""
    prefix = stream.read(PREFIX_BYTES)
    if len(prefix) < PREFIX_BYTES:
        return None
    length = body_length(prefix)
    body = stream.read(length)
    return _to_child.decode(body) if len(body) == length else None
