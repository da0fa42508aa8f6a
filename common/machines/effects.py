"""Requests of a machine to its host. The host performs effects in their order and answers with events where an effect
requires it. Each machine has one union of effects, at the end of this file.
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
    """Control message to a peer. One that cannot be handed to the connection comes back as `Undelivered`."""

    peer: InstanceId
    message: Message


class Wake(msgspec.Struct, frozen=True):
    """Send a `Tick` at this time (seconds of the host's clock), or soon after it. Replaces an earlier `Wake`."""

    at_s: float


class StartStep(msgspec.Struct, frozen=True):
    """Start this iteration on the engine now. `StepEnded` or `StepFailed` answers it. At most one step is in flight,
    and one queued after it. `ahead`: queue it after the step in flight. All rows of both are decode rows. Those of this
    one are rows of the other, one position on, and take as their token what the other samples for them."""

    plan: IterationPlan
    ahead: bool = False


class Run(msgspec.Struct, frozen=True):
    """Move of `num_blocks` consecutive blocks from `source` to `target`, the block numbers of sender and receiver."""

    tag: int
    source: int
    target: int
    num_blocks: int
    checksum: int = 0


class SendRuns(msgspec.Struct, frozen=True):
    """Announce these runs to the peer (`KvChunk`, checksums filled in) and push their bytes over the link. `RunsSent`
    answers every run, or several at once that end alike. Their blocks are not freed before."""

    peer: InstanceId
    attempt: Attempt
    lease_id: int
    round: int
    link: str
    address: bytes
    runs: tuple[Run, ...]
    from_host: bool = False
    """Whether the runs' source blocks are host blocks (A9's direct path)."""


class ReceiveRuns(msgspec.Struct, frozen=True):
    """Post receives for these runs. `RunsReceived` answers each once its bytes are checked, or several at once that end
    alike. Their blocks are not freed before."""

    lease_id: int
    round: int
    link: str
    runs: tuple[Run, ...]
    peer: InstanceId = ""
    """Sender of the runs. None of them times out while anything arrives from it."""


class CancelRuns(msgspec.Struct, frozen=True):
    """Stop everything in flight for this lease. Every run is still answered, with an error."""

    lease_id: int


class LoadAdapter(msgspec.Struct, frozen=True):
    """Load this LoRA adapter while steps run, after unloading `instead_of` ("" = none), which no step names any more.
    `AdapterLoaded` or `AdapterFailed` answers it. `folder`: of one that was added since the start."""

    adapter: str
    instead_of: str = ""
    folder: str = ""


# -- Of a gateway, for its own process: their text (`repr`) has all that a recording needs ---------------------------


class Admitted(msgspec.Struct, frozen=True):
    """Admission of an offer. `entries`: its requests in the order of the offer, owned from now on."""

    offer_id: RequestId
    entries: list[Entry]


class Rejected(msgspec.Struct, frozen=True):
    """Refusal of an offer with all its choices: an HTTP error."""

    offer_id: RequestId
    error: RequestError


class Deliver(msgspec.Struct, frozen=True, gc=False):
    """Next tokens of the client's stream. `finish` ends it; the entry is forgotten by then."""

    entry: Entry
    tokens: list[int]
    logprobs: list[TokenLogprob]
    finish: FinishReason | None = None


class Fail(msgspec.Struct, frozen=True):
    """End of a request with this error; the entry is forgotten by then."""

    entry: Entry
    error: RequestError


class Ended(msgspec.Struct, frozen=True):
    """End of an admitted request, sent once after its last `Deliver` or its `Fail`."""

    entry: Entry
    finish: FinishReason
    reason: str


class ManagerFound(msgspec.Struct, frozen=True):
    """First reply of a manager incarnation, or its start to lead. `outstanding`: requests owned at that time."""

    incarnation: int
    outstanding: int
    manager: InstanceId = "manager"


WorkerEffect = Send | Dial | StartStep | SendRuns | ReceiveRuns | CancelRuns | LoadAdapter
ManagerEffect = Send | Wake
GatewayEffect = Send | Wake | Admitted | Rejected | Deliver | Fail | Ended | ManagerFound
