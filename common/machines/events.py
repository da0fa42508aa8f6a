"""Events of a machine: everything that a host may feed it. Data only, so that a recording can hold it.

Each machine has one union of events, at the end of this file, and matches them all.
"""

from __future__ import annotations

import msgspec

from cohort.common.messages import Message, PooledStates, TokenLogprob
from cohort.common.types import Attempt, DraftSource, FinishReason, InstanceId, Request, RequestId, TrafficClass


class _Event(msgspec.Struct, frozen=True, tag_field="event", tag=True, omit_defaults=True):
    """Every event: a map with its type's name under "event"."""


# -- To every machine ------------------------------------------------------------------------------------------------


class Received(_Event, frozen=True):
    """Message from a peer. `sender` is the identity of the connection over which it came."""

    sender: InstanceId
    message: Message


class Undelivered(_Event, frozen=True):
    """Message that could not be handed to its peer's connection and is lost."""

    peer: InstanceId
    message: Message


class Tick(_Event, frozen=True):
    """Passing of time: deadlines. Comes at regular intervals, and at the time that a `Wake` effect requested.
    `quiet_s`: there are no requests, and what is sent regularly may be late by so much (`process/activity.py`)."""

    quiet_s: float = 0.0


# -- To managers and gateways ----------------------------------------------------------------------------------------


class PeerLost(_Event, frozen=True):
    """End of a peer's connection: the peer died or is unreachable. May be wrong: a peer that sends again lives."""

    peer: InstanceId


# -- To a worker -----------------------------------------------------------------------------------------------------


class LinkAddresses(_Event, frozen=True):
    """Addresses of this worker's KV links from now on, by transport name."""

    addresses: dict[str, bytes]


class ReportDue(_Event, frozen=True):
    """Time to register with the manager, or to report to it. `memory_free_bytes`: free memory of the device (B7).
    `quiet_s`: as in `Tick`."""

    memory_free_bytes: int
    quiet_s: float = 0.0


class DrainStarted(_Event, frozen=True):
    """Start of this worker's drain: reports show it from now on, and new requests go to other workers."""


class DrainEnded(_Event, frozen=True):
    """End of the drain, by completion or timeout: send `Leaving` to the manager."""


class Sampled(msgspec.Struct, frozen=True, array_like=True):
    """Token that the forward pass sampled for one sequence. `failure`: why there is none and never will be."""

    attempt: Attempt
    token: int
    logprob: TokenLogprob | None = None
    failure: str = ""


class Drafted(msgspec.Struct, frozen=True, array_like=True):
    """Drafts for a decode row: `proposed` tokens, of which the first `right` were sampled. `computed` False: the row
    was computed without them, and only the first is judged."""

    attempt: Attempt
    proposed: int
    right: int
    computed: bool = True
    source: DraftSource = "lookup"


class PromptScores(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities of the prompt tokens after `position`, one each, from the positions just computed."""

    attempt: Attempt
    position: int
    scores: list[TokenLogprob]


class Pooled(msgspec.Struct, frozen=True, array_like=True):
    """Final hidden states of prompt positions just computed, summed."""

    attempt: Attempt
    states: PooledStates


class StepEnded(_Event, frozen=True):
    """End of the step in flight. `sampled`: one entry per row that reached its sequence's last known token, in the
    order of the rows; of a row with drafts one for each correct draft and for the token after them. `latency_s`: from
    its start until its tokens arrived. `drafting_s`: time before it for a draft model's proposals. `late`: sequences
    whose rows gave no token, since what their grammars allow was not known in time: the last position of these rows is
    computed once more."""

    sampled: list[Sampled]
    latency_s: float
    scores: list[PromptScores] = []
    drafts: list[Drafted] = []
    drafting_s: float = 0.0
    late: list[Attempt] = []
    pooled: list[Pooled] = []


class StepFailed(_Event, frozen=True):
    """Failure of the forward pass and of a step queued after it (`StartStep.ahead`): nothing of them counts."""

    reason: str


class PlanAhead(_Event, frozen=True):
    """Chance to queue the next step after the one in flight: a `StartStep` that is `ahead` answers it, or nothing.
    Hosts send it as late as they can, since what arrives later waits for one more step; and not for a step that
    computes drafts, because how many tokens its rows yield is unknown before it ends. `expected`: sequences of which
    the engine expects several tokens from here on, which only a decided step can draft."""

    expected: list[Attempt] = []


class RunsSent(_Event, frozen=True):
    """End of `runs` runs of a `SendRuns`: they were sent, or all failed, and the receiver or a deadline decides."""

    lease_id: int
    error: str | None = None
    runs: int = 1


class LinkMeasured(_Event, frozen=True):
    """Recent rate to this peer over the link that transfers take."""

    peer: InstanceId
    bytes_per_s: float


class RunsReceived(_Event, frozen=True):
    """End of `runs` runs of a `ReceiveRuns`: their bytes are checked and in the blocks, or all failed with `error`."""

    lease_id: int
    round: int
    error: str | None = None
    runs: int = 1


class AdapterLoaded(_Event, frozen=True):
    """Answer to a `LoadAdapter`: steps may name this adapter."""

    adapter: str


class AdapterFailed(_Event, frozen=True):
    """Answer to a `LoadAdapter`: the adapter cannot be loaded, and why."""

    adapter: str
    reason: str


# -- To a gateway ----------------------------------------------------------------------------------------------------
# `DrainStarted`: the gateway is to end and takes nothing new. `DrainEnded`: requests left fail.


class Estimated(_Event, frozen=True):
    """Announcement of a request of this size. `Admitted` (without entries) or `Rejected` answers it, so that a busy
    server need not read it. `owner`: as in `Offered`."""

    offer_id: RequestId
    body_bytes: int
    traffic_class: TrafficClass
    owner: str = ""


class Offered(_Event, frozen=True):
    """Client's request, parsed and tokenised: one `Request` per choice, `choices_per_prompt` in a row of the same
    prompt. `Admitted` or `Rejected` answers it. An SLO of 0 takes the gateway's default for its class; a request with a
    prediction is not sent to the predictor. `text_bytes`: size of the body. `owner`: digest of the client's API key,
    whose share of the queue the request takes; "" if nothing is shared out. `max_tokens_named`: whether the client
    named a number of tokens, instead of as many as fit."""

    offer_id: RequestId
    requests: list[Request]
    choices_per_prompt: int = 1
    chat: bool = False
    text_bytes: int = 0
    stop_strings: int = 0
    owner: str = ""
    max_tokens_named: bool = False


class Closed(_Event, frozen=True):
    """End of a request by its client's side: a stop string (`finish` stop) or a disconnect. Harmless after its end."""

    request_id: RequestId
    finish: FinishReason
    reason: str


_OfSteps = StepEnded | StepFailed | PlanAhead | AdapterLoaded | AdapterFailed
_OfTransfers = LinkAddresses | LinkMeasured | RunsSent | RunsReceived
WorkerEvent = Received | Undelivered | Tick | ReportDue | DrainStarted | DrainEnded | _OfSteps | _OfTransfers
ManagerEvent = Received | Undelivered | PeerLost | Tick
GatewayEvent = Received | Undelivered | PeerLost | Tick | Estimated | Offered | Closed | DrainStarted | DrainEnded
