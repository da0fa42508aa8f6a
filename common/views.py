"""Parts of the views that processes send while a person looks at the live page: rows, blocks, queues, requests.

Plain bounded data inside `GatewayView`, `ManagerView` and `WorkerView` (`messages.py`). Every list has a bound here, so
that thousands of requests or blocks make no larger message. All times are ages: seconds before the view was made,
because clocks of processes differ.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from cohort.common.types import InstanceId, RequestId, TrafficClass

MOST_ROWS = 128
"""Greatest number of rows of a worker; the total beside them counts all sequences."""
MOST_CELLS = 4096
"""Greatest number of cells in a map of KV blocks; in a larger cache several blocks are one cell."""
MOST_DECISIONS = 96
MOST_REQUESTS = 60
MOST_CHOSEN = 16
MOST_BUCKETS = 128
MOST_MOMENTS = 32
MOST_ID = 256
"""Greatest length of a request's id, in characters."""

BlockState = Literal["free", "cached", "rt", "be", "lent", "settling"]
BLOCK_STATES: tuple[BlockState, ...] = ("free", "cached", "rt", "be", "lent", "settling")
"""`cached`: of no sequence, but reusable by its prefix. `rt`, `be`: of sequences of that class. `lent`: two sequences
use it at once. `settling`: of a sequence that is gone, while a transfer may still touch it."""

RowPhase = Literal["awaiting_kv", "waiting", "prefill", "decode", "swapped", "parked", "leaving"]
RequestState = Literal["open", "waiting", "placed", "running", "finished", "failed", "cancelled", "refused"]
DecisionKind = Literal["placed", "split", "refused", "demoted", "lost", "bound", "preempted", "evicted", "planned"]


class QueueClass(msgspec.Struct, frozen=True):
    """Waiting requests of one class. `oldest_s`: age of the oldest."""

    traffic_class: TrafficClass
    online: bool
    requests: int
    tokens: int
    oldest_s: float


class Decision(msgspec.Struct, frozen=True, omit_defaults=True):
    """A decision of a policy. `reason` is the policy's own word. `what`: its result, in words."""

    age_s: float
    kind: DecisionKind
    request_id: RequestId
    instances: list[InstanceId] = []
    reason: str = ""
    what: str = ""
    forecast_s: float = 0.0
    count: int = 1


class Row(msgspec.Struct, frozen=True):
    """A sequence on a worker. `scheduled`: its tokens in the iteration that runs; 0 = it has no row there.
    `context`: computed positions; `known`: prompt and output tokens; `predicted`: output tokens expected in all."""

    request_id: RequestId
    attempt: int
    traffic_class: TrafficClass
    phase: RowPhase
    age_s: float
    context: int
    known: int
    prompt_tokens: int
    max_tokens: int
    predicted: float
    blocks: int
    scheduled: int
    preemptions: int
    batch_id: int


class CellRun(msgspec.Struct, frozen=True, array_like=True):
    """Neighbouring cells of one state (an index of `BLOCK_STATES`). `row`: index of their owner in the view's rows; -1:
    none, or one that is not listed."""

    cells: int
    state: int
    row: int


class BlockMap(msgspec.Struct, frozen=True):
    """A worker's KV blocks by id. `counts` are of blocks and exact; a cell of several blocks shows what most are."""

    total: int
    block_size: int
    blocks_per_cell: int
    runs: list[CellRun]
    counts: dict[BlockState, int]
    host_total: int
    host_free: int


class Iteration(msgspec.Struct, frozen=True):
    """The iteration in flight: decode rows, prompt rows and their tokens."""

    decode_rows: int
    prefill_rows: int
    prefill_tokens: int


class DraftTally(msgspec.Struct, frozen=True):
    """Rows of a class that were computed with drafts since the worker's start, their drafts, and the right ones."""

    traffic_class: TrafficClass
    rows: int
    proposed: int
    accepted: int


class SloTally(msgspec.Struct, frozen=True):
    """Finished requests by objective (ttft, tpot, deadline), since the gateway's start. `key`: name of an API key; "" =
    all keys."""

    traffic_class: str
    objective: str
    met: int
    missed: int
    key: str = ""


class RequestBrief(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line of the list of requests. `ended_s`: seconds since its end, None while it is open."""

    request_id: RequestId
    traffic_class: TrafficClass
    state: RequestState
    age_s: float
    prompt_tokens: int
    output_tokens: int
    attempts: int
    instances: list[InstanceId]
    ended_s: float | None = None
    ttft_s: float | None = None
    missed: bool = False


class Moment(msgspec.Struct, frozen=True, array_like=True):
    """Event of a request, `at_s` seconds after its arrival."""

    at_s: float
    what: str
    where: str
    why: str


class WorkerTimes(msgspec.Struct, frozen=True):
    """Times of a request on one worker (`StageTimes`)."""

    instance: InstanceId
    queue_s: float
    prefill_s: float
    transfer_s: float
    decode_s: float
    preemptions: int


class RequestLife(msgspec.Struct, frozen=True):
    """A request from its arrival on; times but `age_s` are seconds after it. `stages`: parts of the TTFT, in order;
    empty before the first token. `outcomes`: SLO by objective, met or not, once it has ended."""

    request_id: RequestId
    traffic_class: TrafficClass
    state: RequestState
    age_s: float
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    max_tokens: int
    predicted: float
    attempts: int
    instances: list[InstanceId]
    stages: dict[str, float]
    moments: list[Moment]
    times: list[WorkerTimes]
    slo: dict[str, float]
    outcomes: dict[str, bool]
    first_token_s: float | None = None
    last_token_s: float | None = None
    ended_s: float | None = None
    placement: str = ""
    reason: str = ""
    best_effort: bool = False
    forecast_s: float = 0.0
