"""What a machine asks its host to do. The host performs effects in their order and answers with events where an effect
says so. Each machine has one union of effects, at the end of this file.
"""

from __future__ import annotations

import msgspec

from cohort.common.messages import Message
from cohort.common.policies.interface import IterationPlan
from cohort.common.types import Attempt, InstanceId


class Dial(msgspec.Struct, frozen=True):
    """Connect to a peer's inbox (again, if the endpoint changed)."""

    peer: InstanceId
    endpoint: str


class Send(msgspec.Struct, frozen=True):
    """A control message. One that cannot be handed to the peer's connection comes back as `Undelivered`."""

    peer: InstanceId
    message: Message


class Wake(msgspec.Struct, frozen=True):
    """Send a `Tick` at this time (seconds of the host's clock), or as soon after it as can be. A later `Wake` replaces
    an earlier one."""

    at_s: float


class StartStep(msgspec.Struct, frozen=True):
    """Run this iteration on the engine now; answered with `StepEnded` or `StepFailed`. One is in flight at most."""

    plan: IterationPlan


class Run(msgspec.Struct, frozen=True):
    """`num_blocks` consecutive blocks, from `source` here to `target` there (or from there to `target` here)."""

    tag: int
    source: int
    target: int
    num_blocks: int
    checksum: int = 0


class SendRuns(msgspec.Struct, frozen=True):
    """Announce these runs to the peer (`KvChunk`, checksums filled in) and push their bytes over the link.

    Answered with `RunsSent` for every run, or for as many at a time as share their fate; until then their blocks are
    not freed.
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
    """Post receives for these runs. Answered with `RunsReceived` for each once its bytes are checked, or for as many at
    a time as share their fate; until then their blocks are not freed."""

    lease_id: int
    round: int
    link: str
    runs: tuple[Run, ...]


class CancelRuns(msgspec.Struct, frozen=True):
    """Stop everything in flight for this lease. Every run is still answered, with an error."""

    lease_id: int


WorkerEffect = Send | Dial | StartStep | SendRuns | ReceiveRuns | CancelRuns
ManagerEffect = Send | Wake
Effect = WorkerEffect
"""Until every host asks by name."""
