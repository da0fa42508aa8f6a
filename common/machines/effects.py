"""What a machine asks its host to do. The host performs effects in order and reports back where a method says so."""

from __future__ import annotations

import msgspec

from cohort.common.messages import Message
from cohort.common.types import Attempt, InstanceId


class Dial(msgspec.Struct, frozen=True):
    """Connect to a peer's inbox (again, if the endpoint changed)."""

    peer: InstanceId
    endpoint: str


class Send(msgspec.Struct, frozen=True):
    """A control message. A peer that cannot be reached is reported to `peer_unreachable`, if the machine has it."""

    peer: InstanceId
    message: Message


class Run(msgspec.Struct, frozen=True):
    """`num_blocks` consecutive blocks, from `source` here to `target` there (or from there to `target` here)."""

    tag: int
    source: int
    target: int
    num_blocks: int
    checksum: int = 0


class SendRuns(msgspec.Struct, frozen=True):
    """Announce these runs to the peer (`KvChunk`, checksums filled in) and push their bytes over the link.

    The host answers with `run_sent(lease_id, error)` for every run, or for as many at a time as share their fate;
    until then their blocks are not freed.
    """

    peer: InstanceId
    attempt: Attempt
    lease_id: int
    round: int
    link: str
    address: bytes
    runs: tuple[Run, ...]
    from_host: bool = False
    """The runs' source blocks are host blocks (A9's direct path)."""


class ReceiveRuns(msgspec.Struct, frozen=True):
    """Post receives for these runs; the host answers each with `run_received(lease_id, round, error)` after checking
    the bytes, or as many at a time as share their fate. Until then the blocks are not freed."""

    lease_id: int
    round: int
    link: str
    runs: tuple[Run, ...]


class CancelRuns(msgspec.Struct, frozen=True):
    """Stop everything in flight for this lease. Every run is still answered, with an error."""

    lease_id: int


Effect = Dial | Send | SendRuns | ReceiveRuns | CancelRuns
