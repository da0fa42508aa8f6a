"""Everything that crosses a process boundary, grouped by receiver.

Frozen, tagged msgspec structs; plain msgpack on the wire. KV bytes never ride in a message: only block ids,
lease ids, tags and checksums. Each group names its sender and the socket it travels on. All sockets are a ROUTER
inbox at the receiver and a DEALER at the sender; answers go back over the same pair.

Identity of work: `Attempt`. Positions count from the first prompt token.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from cohort.common.planning.traffic import TrafficRecord
from cohort.common.tokens import Tokens
from cohort.common.types import (
    Attempt,
    EngineFacts,
    FinishReason,
    InstanceId,
    Outcome,
    Prediction,
    QueueBucket,
    Request,
    RequestId,
    Segment,
    WorkerCapacity,
    WorkerStats,
)
from cohort.common.views import (
    BlockMap,
    Decision,
    DraftTally,
    Iteration,
    QueueClass,
    RequestBrief,
    RequestLife,
    Row,
    SloTally,
)


class _Base(msgspec.Struct, frozen=True, tag_field="type", tag=True, omit_defaults=True):
    """Base of every message: a map with its type's name under "type"."""


Quiet = Annotated[float, msgspec.Meta(ge=0.0, le=60.0)]
"""Seconds, beyond the usual interval, until the sender's next message of this kind, as it has no requests: its silence
counts from then on."""


# ---- To a gateway, from workers: the tokens. DEALER at the worker → gateway inbox. ----


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """Log-probability of the sampled token and of the likeliest ones, from the raw logits."""

    logprob: float
    top_ids: list[int] = []
    top_logprobs: list[float] = []


class PooledStates(msgspec.Struct, frozen=True, array_like=True):
    """Sum of the final hidden states of `count` prompt positions from `start` on: [hidden], as float32 in
    little-endian bytes."""

    start: int
    count: int
    state: bytes

    @property
    def end(self) -> int:
        return self.start + self.count


class StageTimes(msgspec.Struct, frozen=True, omit_defaults=True):
    """Times of a request on a worker, in seconds; the gateway adds its own part and exports the whole. `queue_s`: from
    arrival at the worker until first scheduled. `prefill_s`: from then until its segment's prompt part was computed.
    `transfer_s`: exposed KV transfer time (nothing computed for the request meanwhile)."""

    instance: InstanceId = ""
    queue_s: float = 0.0
    prefill_s: float = 0.0
    transfer_s: float = 0.0
    decode_s: float = 0.0
    preemptions: int = 0


class TokenUpdate(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """New tokens of one request: `tokens[i]` belongs at position `position + i`. `finish` closes the request (with no
    token when it failed: then `error` says why, and `is_clients` that what the request asks for is the cause, such as a
    grammar beyond its limits). `cached_tokens` prompt positions came from the prefix cache. `times`
    comes with the first token of each worker and with `finish`. `prompt_logprobs` come with the first output token,
    where asked for: of the prompt's tokens from the second on. `pooled` does, too, for an embedding."""

    attempt: Attempt
    position: int
    tokens: list[int] = []
    logprobs: list[TokenLogprob] = []
    finish: FinishReason | None = None
    error: str = ""
    is_clients: bool = False
    cached_tokens: int = 0
    times: StageTimes | None = None
    prompt_logprobs: list[TokenLogprob] = []
    pooled: PooledStates | None = None


class TokenBatch(_Base, frozen=True):
    """All updates one iteration produced for one gateway."""

    instance: InstanceId
    updates: list[TokenUpdate]


# To a gateway, from the manager (answers on the gateway's own connection).


class ManagerHello(_Base, frozen=True):
    """First message of a manager to a peer that greets it. A new `incarnation` means that it knows nothing: register
    again, name what you hold, resubmit what is outstanding. `epoch`: of its leadership, or the highest that it knows
    while another leads (`leads` False); 0 where there is one manager."""

    incarnation: int
    epoch: int = 0
    leads: bool = True


class Placed(_Base, frozen=True):
    """Placement of an attempt and its reason; for the gateway's TTFT decomposition, logs and direct cancels.
    `best_effort`: it was demoted, as its TTFT was predicted to be `forecast_s`."""

    attempt: Attempt
    instances: list[InstanceId]
    queued_s: float
    reason: str
    best_effort: bool = False
    forecast_s: float = 0.0


class AttemptsLost(_Base, frozen=True):
    """Attempts that are lost (worker dead, transfer failed, unknown): resubmit with the tokens known so far. `unheld`:
    no worker has them, and none was lost with them; a gateway that their tokens still reach is behind, and waits for
    them. `counted`: the manager's sums contain them already, as lost or as finished."""

    attempts: list[Attempt]
    reason: str
    unheld: bool = False
    counted: bool = False


class Refused(_Base, frozen=True):
    """An attempt that is not served as it is (no worker could hold it, its TTFT cannot be kept): fail it with this
    status. `cause`: the reason in one word, for metrics. `forecast_s`: the predicted TTFT that it was refused for."""

    attempt: Attempt
    status: int
    reason: str
    cause: str = ""
    retry_after_s: float = 0.0
    forecast_s: float = 0.0


class ClusterLoad(_Base, frozen=True):
    """The manager's view for admission and readiness, several times a second. `ready`: a request could be placed now.
    `waiting` requests are not yet dispatched. `drain_rate`: requests finished a second (moving average), from which
    Retry-After is computed."""

    ready: bool
    instances: list[InstanceId]
    waiting: int
    waiting_tokens: int
    running: int
    free_tokens: int
    total_tokens: int
    max_model_len: int
    drain_rate: float
    engines: list[EngineFacts] = []
    """Devices and kernels of the workers, each kind once."""
    quiet_s: Quiet = 0.0


# To a gateway, from the length predictor.


class Predicted(_Base, frozen=True):
    request_id: RequestId
    prediction: Prediction


# ---- To the bucketing manager, from gateways. ----


class GatewayHello(_Base, frozen=True):
    """A gateway dials in (again); `endpoint` is its inbox, where workers send tokens. `workers`: those of the last
    `ClusterLoad`, so that a restarted manager knows whose registrations are still to come. `epoch`: the highest it
    knows. `lead`: it finds no manager that leads, and asks this one to."""

    instance: InstanceId
    incarnation: int
    endpoint: str
    workers: list[InstanceId] = []
    epoch: int = 0
    lead: bool = False


class Submit(_Base, frozen=True):
    """Serve this attempt. Repeating it is harmless."""

    request: Request


class Cancel(_Base, frozen=True):
    """Forget these attempts and free what they hold, wherever they are. Also understood by workers. `epoch`: the
    manager's, as in `StartSegment`."""

    attempts: list[Attempt]
    reason: str = "cancelled"
    epoch: int = 0


class RevisePrediction(_Base, frozen=True):
    """A prediction that came after its request was submitted (E4). The manager passes it on to workers."""

    request_id: RequestId
    prediction: Prediction


class Outstanding(_Base, frozen=True):
    """Attempts that a gateway believes are being served, once a second; the manager answers `AttemptsLost` for the
    unknown."""

    attempts: list[Attempt]


# To the bucketing manager, from workers.


class RegisterWorker(_Base, frozen=True):
    """A worker dials in. `endpoint` is its inbox for other workers. `held`: attempts that it has computed for, so that
    a restarted manager takes them over; `awaiting`: those whose KV it merely waits for: perhaps no worker sends it.
    `epoch`: of the manager that it follows."""

    instance: InstanceId
    incarnation: int
    endpoint: str
    capacity: WorkerCapacity
    held: list[Attempt]
    awaiting: list[Attempt] = []
    epoch: int = 0
    quiet_s: Quiet = 0.0


class WorkerReport(_Base, frozen=True):
    """A worker's heartbeat and stats, several times a second and whenever it turns idle. `epoch`: of the manager that
    it follows. One a second is whole; the others have what changed `since` an earlier report: in `held` what the worker
    has come to hold, also what awaits KV, and in `gone` what it holds no more. A manager that missed that report waits
    for the next whole one."""

    instance: InstanceId
    incarnation: int
    sequence: int
    stats: WorkerStats
    held: list[Attempt]
    awaiting: list[Attempt] = []
    draining: bool = False
    epoch: int = 0
    since: int = 0
    """Number of the report that this one continues; 0 = a whole one."""
    gone: list[Attempt] = []
    quiet_s: Quiet = 0.0


class SegmentEnded(_Base, frozen=True):
    """A worker is done with its segment of an attempt. `reason`: why it was cancelled or failed."""

    instance: InstanceId
    attempt: Attempt
    outcome: Outcome
    positions: int
    reason: str = ""


class Leaving(_Base, frozen=True):
    """An instance ends on purpose: place nothing there; requests it still holds are rescheduled."""

    instance: InstanceId
    incarnation: int


# To the bucketing manager, from the global monitor.


class ClusterStats(_Base, frozen=True):
    """The monitor's summary, pushed to the manager: arrival rate, its forecast, mean lengths (B9)."""

    arrival_rate: float
    arrival_rate_forecast: float
    mean_prompt_tokens: float
    mean_output_tokens: float
    quiet_s: Quiet = 0.0


# ---- To a worker, from the manager. ----


class Registered(_Base, frozen=True):
    """The manager knows this worker now. `epoch`, `leads`: as in `ManagerHello`."""

    incarnation: int
    epoch: int = 0
    leads: bool = True


class StartSegment(_Base, frozen=True):
    """Compute `segments[index]` of the request. `gateway_endpoint`: where its tokens go. `next_endpoint`: inbox of the
    next segment's worker ("" if none or late). Workers of later segments get the same message beforehand, so that they
    know what an offer is about. `batch_id` groups requests that the manager batched (B5, A4). The `waited_s` of a
    resubmitted request counts until this message was sent. `epoch`: of the manager's leadership; a worker obeys no
    lower one than it knows."""

    request: Request
    segments: list[Segment]
    index: int
    gateway_endpoint: str
    next_endpoint: str = ""
    batch_id: int = 0
    epoch: int = 0


class BindSegment(_Base, frozen=True):
    """A late-bound segment now has a worker: hand the parked KV over to it, or go on with it here (A6, A9)."""

    attempt: Attempt
    segment: Segment
    next_endpoint: str
    batch_id: int = 0
    epoch: int = 0


class PrefetchKv(_Base, frozen=True):
    """Copy this parked KV from host memory to the device, in this order, as far as there is room: it will be handed
    over soon (A5, A9)."""

    attempts: list[Attempt]
    epoch: int = 0


# ---- To a worker, from another worker: the KV transfer. DEALER at the sender → inbox of the receiver. ----
#
#   sender                                   receiver
#     │ KvOffer (positions, blocks)             │
#     ├────────────────────────────────────────▶│ allocates blocks, opens a lease
#     │                KvGrant (lease, blocks)  │
#     │◀────────────────────────────────────────┤
#     │ KvChunk (runs)  ═══ bytes over link ═══▶│ posts receives into the granted blocks, checks   (repeated
#     │                                         │                                     while computing)
#     │ KvHandoff (tokens, position)            │
#     ├────────────────────────────────────────▶│ all runs there? the request runs here
#     │                KvAccepted               │
#     │◀────────────────────────────────────────┤ sender frees its blocks
#
# KvAbort ends it from either side at any time; KvRenew keeps a lease alive while no other message is sent.


class KvOffer(_Base, frozen=True):
    """`positions` [0, positions) of the request will be handed over under this transfer id."""

    instance: InstanceId
    attempt: Attempt
    transfer_id: int
    positions: int


class KvGrant(_Base, frozen=True):
    """Blocks granted, by position: block i takes positions [i·block_size, …); groups of layers follow one another with
    equally many blocks. The first `cached_tokens` positions are there already (prefix cache) and must not be sent, nor
    what has no block (below zero): it lies behind a window. `links`: addresses by transport name, best first."""

    attempt: Attempt
    transfer_id: int
    lease_id: int
    lease_s: float
    blocks: list[int]
    cached_tokens: int
    links: dict[str, bytes]


class KvRun(msgspec.Struct, frozen=True, array_like=True):
    """`num_blocks` consecutive blocks of the receiver from `first_block` on, sent under `tag`. Checksum 0 = none."""

    tag: int
    first_block: int
    num_blocks: int
    checksum: int


class KvChunk(_Base, frozen=True):
    """Runs that are on their way over the named link. `round` counts whole retries of a transfer: runs of an older
    round are void."""

    attempt: Attempt
    lease_id: int
    round: int
    link: str
    runs: list[KvRun]


class KvHandoff(_Base, frozen=True):
    """All KV was sent: the request continues at `computed` with these tokens on the receiver, which starts when it has
    `total_runs` runs of this round."""

    attempt: Attempt
    lease_id: int
    round: int
    tokens: list[int]
    computed: int
    total_runs: int
    cached_tokens: int
    logprobs: list[TokenLogprob]
    """Log-probabilities of this attempt's output tokens so far; empty unless the request wants them."""
    exposed_s: float
    """Time for which the sender held the computed segment before it could send this message."""
    prompt_logprobs: list[TokenLogprob] = []
    """Log-probabilities of computed prompt tokens from the second on; empty unless the request wants them."""
    pooled: PooledStates | None = None
    """States of computed prompt positions, for an embedding by their mean."""


class KvAccepted(_Base, frozen=True):
    """The receiver runs the request; the sender may free."""

    attempt: Attempt
    lease_id: int


class KvAbort(_Base, frozen=True):
    """The transfer has failed; or, with `retry_link`, its bytes did not arrive: the receiver keeps its blocks and asks
    for all of them again as `round` over that link."""

    attempt: Attempt
    transfer_id: int
    reason: str
    retry_link: str = ""
    round: int = 0


class KvRenew(_Base, frozen=True):
    """Renewal. From the sender: extend these leases. From the receiver: these offers are queued until blocks are free,
    go on waiting."""

    lease_ids: list[int] = []
    transfer_ids: list[int] = []


# ---- To the length predictor, from gateways. ----


class LengthFacts(msgspec.Struct, frozen=True, array_like=True):
    """Facts known of a request before its first token. `text_bytes`: of the body it came in; `stop_strings`: how
    many there are."""

    tokens: Tokens
    chat: bool
    max_tokens: int
    temperature: float
    stop_strings: int
    text_bytes: int


class PredictLength(_Base, frozen=True):
    """Question for the length of an answer. Answered with `Predicted`. `traceparent`: the request's."""

    request_id: RequestId
    facts: LengthFacts
    traceparent: str = ""


class ObserveLength(_Base, frozen=True):
    """A request ended after `output_tokens`; learn from it. `truncated`: it hit max_tokens, so the true length is at
    least that (a censored observation)."""

    request_id: RequestId
    facts: LengthFacts
    output_tokens: int
    truncated: bool


# ---- To the global monitor, from every process. ----


class Heartbeat(_Base, frozen=True):
    """`stats` are the process's own numbers by metric name; `metrics_url` is where Prometheus text can be read.
    `facts`: fixed words about it (a worker's device); `warnings`: sentences for the live page. `metrics_token`: shown
    to the process, gets its series that name API keys. `counts`: growing counters behind the monitor's figures of the
    last minute (`global_monitor/window.py`), histograms by bucket."""

    instance: InstanceId
    role: str
    incarnation: int
    pid: int
    ready: bool
    metrics_url: str
    stats: dict[str, float]
    facts: dict[str, str] = {}
    warnings: list[str] = []
    metrics_token: str = ""
    counts: dict[str, list[float]] = {}
    quiet_s: Quiet = 0.0


class Farewell(_Base, frozen=True):
    """A process ends on purpose; its silence is no failure."""

    instance: InstanceId
    incarnation: int


class RequestTraffic(_Base, frozen=True):
    """Lengths and times of requests that were admitted or ended; from each gateway once a second, unless section
    `planner` is off."""

    instance: InstanceId
    incarnation: int
    records: list[TrafficRecord]


# While a person looks at the live page: one view for every `Look`, over the connection that it came by.


class GatewayView(_Base, frozen=True):
    """A gateway's requests. `requests`: open and ended ones, the latest first; `open` counts all open ones. `chosen`:
    the known ones among those that `Look` names."""

    instance: InstanceId
    requests: list[RequestBrief]
    open: int
    chosen: list[RequestLife]
    slo: list[SloTally]


class ManagerView(_Base, frozen=True):
    """The queue by class and, where its order has buckets, by length; the latest decisions, the last first."""

    instance: InstanceId
    order: str
    classes: list[QueueClass]
    buckets: list[QueueBucket]
    decisions: list[Decision]


class WorkerView(_Base, frozen=True):
    """A worker's sequences and blocks. `sequences` counts all, `rows` are the first of them: those that run first.
    KV bytes are totals since its start. `drafts`: of the classes that had any."""

    instance: InstanceId
    role: str
    sequences: int
    rows: list[Row]
    blocks: BlockMap
    decisions: list[Decision]
    iteration: Iteration | None = None
    kv_sent_bytes: float = 0.0
    kv_received_bytes: float = 0.0
    drafts: list[DraftTally] = []


# ---- To gateways, the manager and workers, from the global monitor. Answered by their hosts; no machine sees it. ----


class Look(_Base, frozen=True):
    """Request for one view, while a person looks at the live page. `cells`: cells of the map of blocks; `requests`:
    those wanted in full."""

    cells: int
    requests: list[RequestId] = []


# ---- Between every process and those that answer at a seed's address, over sockets of their own (`seeds.py`). ----


class Address(msgspec.Struct, frozen=True, array_like=True):
    """Endpoint of a process's inbox. Of two, that of the higher incarnation counts."""

    name: InstanceId
    endpoint: str
    incarnation: int


class Addresses(_Base, frozen=True):
    """All addresses that the sender knows; answered with those of the receiver."""

    known: list[Address]


# ---- Messages by receiver. A match over the messages of one receiver ends in `assert_never`. ----

ToGateway = TokenBatch | ManagerHello | Placed | AttemptsLost | Refused | ClusterLoad | Predicted
ToManager = (  # the most frequent first: a message is tried against them in this order
    WorkerReport
    | Submit
    | SegmentEnded
    | GatewayHello
    | Cancel
    | RevisePrediction
    | Outstanding
    | RegisterWorker
    | Leaving
    | ClusterStats
)
ToWorker = (
    ManagerHello
    | Registered
    | StartSegment
    | BindSegment
    | PrefetchKv
    | Cancel
    | RevisePrediction
    | KvOffer
    | KvGrant
    | KvChunk
    | KvHandoff
    | KvAccepted
    | KvAbort
    | KvRenew
)
ToPredictor = PredictLength | ObserveLength
View = GatewayView | ManagerView | WorkerView
ToMonitor = Heartbeat | Farewell | RequestTraffic | View
ToHosts = Look
ToSeeds = Addresses

Message = ToGateway | ToManager | ToWorker | ToPredictor | ToMonitor | ToHosts | ToSeeds
