"""Requests of a machine to its host. The host performs effects in their order and answers with events where an effect
says so. Each machine has one union of effects, at the end of this file.
"""

from __future__ import annotations

import msgspec

from cohort.common.errors import RequestError
from cohort.common.machines.entry import Entry
from cohort.common.messages import Message, TokenLogprob
from cohort.common.policies.interface import IterationPlan
from cohort.common.types import Attempt, FinishReason, InstanceId, RequestId


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
    """Run this iteration on the engine now; answered with `StepEnded` or `StepFailed`. One is in flight at most, and
    one behind it.

    `ahead`: begin it behind the step in flight. All rows of both are decode rows; those of this one are rows of the
    other, one position on, and take as their token what the other samples for them."""

    plan: IterationPlan
    ahead: bool = False


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
    peer: InstanceId = ""
    """The sender; as long as anything arrives from there, none of its runs is given up."""


class CancelRuns(msgspec.Struct, frozen=True):
    """Stop everything in flight for this lease. Every run is still answered, with an error."""

    lease_id: int


class LoadAdapter(msgspec.Struct, frozen=True):
    """Load this LoRA adapter beside the steps that run, after letting go of `instead_of` ("" = of none), which no step
    names any more. Answered with `AdapterLoaded` or `AdapterFailed`."""

    adapter: str
    instead_of: str = ""


# -- Of a gateway, for its own process: their text (`repr`) says all that a recording needs ---------------------------


class Admitted(msgspec.Struct, frozen=True):
    """This offer may come in. `entries`: its requests, owned from now on, in the order of the offer."""

    offer_id: RequestId
    entries: list[Entry]


class Rejected(msgspec.Struct, frozen=True):
    """This offer may not come in, none of its choices: an HTTP error."""

    offer_id: RequestId
    error: RequestError


class Deliver(msgspec.Struct, frozen=True, gc=False):
    """These tokens are next in the client's stream. `finish` ends it; the entry is already forgotten then."""

    entry: Entry
    tokens: list[int]
    logprobs: list[TokenLogprob]
    finish: FinishReason | None = None


class Fail(msgspec.Struct, frozen=True):
    """The request ends with this error; the entry is already forgotten."""

    entry: Entry
    error: RequestError


class Ended(msgspec.Struct, frozen=True):
    """An admitted request is over: said once of each, after its last `Deliver` or its `Fail`. `finish` says how."""

    entry: Entry
    finish: FinishReason
    reason: str


class ManagerFound(msgspec.Struct, frozen=True):
    """A manager of this incarnation answered for the first time, or begins to lead, while so many requests were
    owned."""

    incarnation: int
    outstanding: int
    manager: InstanceId = "manager"


WorkerEffect = Send | Dial | StartStep | SendRuns | ReceiveRuns | CancelRuns | LoadAdapter
ManagerEffect = Send | Wake
GatewayEffect = Send | Wake | Admitted | Rejected | Deliver | Fail | Ended | ManagerFound
