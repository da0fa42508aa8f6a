"""The seats: every place in the pipeline where a system may decide differently.

    gateway                manager                                            worker
    ┌───────────┐   ┌──────────────┐   ┌───────────┐   ┌─────────────┐   ┌────────────────────┐   ┌─────────────┐
    │ Admission │──▶│ PrefillOrder │──▶│ Placement │   │ LateBinding │──▶│ IterationScheduler │──▶│ KvAllocator │
    └───────────┘   └──────────────┘   └───────────┘   └─────────────┘   └────────────────────┘   └─────────────┘
      may it come    which waiting       segments on     which parked KV    which rows run in       which blocks,
      in at all?     requests go next,   which           goes where, when   the next iteration      slots, copies?
                     as which batch?     instances?

How the five systems sit in them (ids of the mechanism tables in docs/papers.md):

| seat         | BucketServe          | BROS                    | AlignedServe              | DynaServe               | EcoServe                  |
|--------------|----------------------|-------------------------|---------------------------|-------------------------|---------------------------|
| PrefillOrder | B4–B7 buckets, safe  | first come              | first come                | first come              | first come (PT queue is   |
|              | batches              |                         |                           |                         | the worker's, E1)         |
| Placement    | B8 P/D by load       | one segment             | [0,P) then late-bound     | D1–D4 split search      | one segment               |
| LateBinding  | –                    | –                       | A3–A9 quad-tree, buffers  | –                       | –                         |
| Iteration    | FCFS prefill,        | R1–R6, R11, R15 packing | A6 batch switch, eviction | D5 budget from profile  | E1, E3, E5, E6, E10       |
|              | continuous decode    |                         |                           |                         | groups; late predictions  |
| KvAllocator  | paged                | R7–R10 bidirectional    | paged                     | paged                   | E2, E7, E8 exact, nested  |

What each needed from the interfaces, and where it is: live memory and lengths (B7, B9: `ClusterView`); batches that
stay together (B5, A4: `Dispatch.batch_id`, `Sequence.batch_id`); deadlines per token group, times of the last token
(R2, R15: `Sequence`); measured iteration costs coming back (R3, D5: `IterationScheduler.observe`); copies between
device and host slots as part of a plan (R9–R12, E8: `IterationPlan.copies`); fill direction per block (R13:
`KvAllocator.directions`); KV that waits without running (R1 pending, E5 offload-free, A2 pool: a `Sequence` holds
blocks while in no plan); progress of every queued request (D4: `InstanceView.figures.queue`); revised predictions
(E4: `predicted`); hand-over at any position (D1, D7: `Segment`), also back from a decode worker (A6 eviction: a
`Bind` towards any instance).

Every decision carries a `reason` and, where there is one, an estimated cost; both become metrics and log fields.
"""  # noqa: E501

from __future__ import annotations

import enum
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Literal, Protocol, runtime_checkable

import msgspec

from cohort.common.types import (
    Attempt,
    InstanceId,
    KvGeometry,
    Prediction,
    Request,
    RequestId,
    Role,
    Segment,
    Slo,
    StepTimes,
    TrafficClass,
    WorkerCapacity,
    WorkerFigures,
)

# -- Admission (gateway) -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Offer:
    """A request at the door. Before tokenising `prompt_tokens` is an estimate from the body's size."""

    prompt_tokens: int
    max_tokens: int
    predicted_tokens: float
    traffic_class: TrafficClass
    priority: int
    slo: Slo


@dataclass(frozen=True, slots=True)
class AdmissionLoad:
    """What the gateway knows when it decides: its own queue and the manager's last word."""

    waiting_requests: int
    waiting_tokens: int
    running_requests: int
    drain_rate: float
    """Requests finished a second, moving average; 0 = unknown."""
    free_tokens: int
    total_tokens: int


@dataclass(frozen=True, slots=True)
class Admit:
    reason: str = "room"


@dataclass(frozen=True, slots=True)
class Refuse:
    """Answered with 429 and Retry-After."""

    reason: str
    retry_after_s: float


class Admission(Protocol):
    def decide(self, now_s: float, offer: Offer, load: AdmissionLoad) -> Admit | Refuse: ...


# -- The manager's view of the cluster ---------------------------------------------------------------------------


@dataclass(slots=True)
class InstanceView:
    """One registered worker. `assigned_*` count what was sent to it but is not in its last report yet."""

    instance: InstanceId
    capacity: WorkerCapacity
    figures: WorkerFigures = field(default_factory=WorkerFigures)
    report_age_s: float = 0.0
    draining: bool = False
    assigned_requests: int = 0
    assigned_prefill_tokens: int = 0
    assigned_context_tokens: int = 0

    @property
    def role(self) -> Role:
        return self.capacity.role

    @property
    def queued_prefill_tokens(self) -> int:
        """Prompt tokens this worker still has to compute: reported, and assigned since."""
        return self.figures.queued_prefill_tokens + self.assigned_prefill_tokens

    @property
    def free_blocks(self) -> int:
        return self.figures.free_blocks + self.figures.cached_blocks


@dataclass(frozen=True, slots=True)
class ClusterView:
    """Living, non-draining workers, and the monitor's summary (`forecast_age_s` infinite when it is silent: B9)."""

    instances: Mapping[InstanceId, InstanceView]
    arrival_rate: float = 0.0
    arrival_rate_forecast: float = 0.0
    mean_prompt_tokens: float = 0.0
    mean_output_tokens: float = 0.0
    forecast_age_s: float = float("inf")


@dataclass(slots=True)
class WaitingRequest:
    """A request in the manager, not yet dispatched."""

    request: Request
    since_s: float
    prediction: Prediction | None

    @property
    def request_id(self) -> RequestId:
        return self.request.request_id

    def expected_output(self, default_tokens: float) -> float:
        """Predicted output, bounded by max_tokens."""
        mean = self.prediction.mean if self.prediction else default_tokens
        return max(1.0, min(mean, float(self.request.sampling.max_tokens)))


# -- PrefillOrder (manager) --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Send these waiting requests to placement now, as one batch. `instance` is a wish (None: placement chooses)."""

    request_ids: tuple[RequestId, ...]
    batch_id: int
    instance: InstanceId | None
    reason: str


class PrefillOrder(Protocol):
    """Owns the manager's waiting requests: in which order and in which company they are dispatched."""

    def add(self, now_s: float, waiting: WaitingRequest) -> None: ...

    def remove(self, now_s: float, request_id: RequestId) -> None:
        """Cancelled, or dispatched but impossible to place; unknown ids are ignored."""

    def revise(self, now_s: float, request_id: RequestId, prediction: Prediction) -> None: ...

    def decide(self, now_s: float, cluster: ClusterView) -> list[Dispatch]:
        """What goes next; dispatched requests leave the queue. Never more than the cluster can take soon: what is
        dispatched too early can no longer be reordered."""

    def next_wake_s(self, now_s: float) -> float | None:
        """When `decide` wants to be asked again although nothing happened; None = only on events."""

    def __len__(self) -> int: ...

    @property
    def waiting_tokens(self) -> int: ...

    def figures(self) -> dict[str, float]:
        """Own metrics: bucket count, waste, … by name."""


# -- Placement (manager) -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Placed:
    """Segments that meet exactly: the first starts at 0, the last is open-ended (end None)."""

    segments: tuple[Segment, ...]
    reason: str
    estimated_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Wait:
    """No instance can take it now; it returns to the queue's head."""

    reason: str


@dataclass(frozen=True, slots=True)
class Impossible:
    """No instance could ever hold it."""

    reason: str


class Placement(Protocol):
    def place(
        self, now_s: float, waiting: WaitingRequest, cluster: ClusterView, wish: InstanceId | None
    ) -> Placed | Wait | Impossible: ...

    def finished(self, now_s: float, request_id: RequestId) -> None:
        """The request is off all instances; forget it."""


@runtime_checkable
class JudgesItself(Protocol):
    """What a placement may add to its seat: to hear how its predictions came out, and to say so."""

    def completed(self, now_s: float, request_id: RequestId) -> None:
        """The request's last token was drawn; before `finished`, which also comes for cancelled and lost ones."""

    def figures(self) -> dict[str, float]: ...


# -- LateBinding (manager) ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ParkedKv:
    """A computed segment whose KV waits on `instance` (device or host pool) for the next segment's worker."""

    request: Request
    instance: InstanceId
    positions: int
    since_s: float


@dataclass(frozen=True, slots=True)
class Bind:
    """Hand the parked KV to `instance` now, as part of `batch_id`; where it lies already it goes on there. With `parks`
    it waits on there too, and `parked` will say when it has arrived (A6 eviction)."""

    request_id: RequestId
    instance: InstanceId
    batch_id: int
    reason: str
    parks: bool = False


@dataclass(frozen=True, slots=True)
class Prefetch:
    """Bring the parked KV of these requests into the fast buffer where it waits (A5, A9)."""

    request_ids: tuple[RequestId, ...]
    buffer: Literal["batch", "requests"]


class LateBinding(Protocol):
    def parked(self, now_s: float, item: ParkedKv) -> None:
        """Its KV waits, in full, and nobody else holds any of it."""

    def moved(self, now_s: float, request_id: RequestId) -> None:
        """A hand-over of this request has arrived; also of requests that never were parked."""

    def removed(self, now_s: float, request_id: RequestId) -> None:
        """Ended or lost; also for requests that never were parked."""

    def decide(self, now_s: float, cluster: ClusterView) -> list[Bind | Prefetch]: ...

    def figures(self) -> dict[str, float]: ...


# -- The worker's view of a request ------------------------------------------------------------------------------

SequenceKey = Attempt


class Phase(enum.Enum):
    """Where a request stands on one worker.

    AWAITING_KV ──▶ WAITING ◀──────────┐ recompute
          │            │ first row     │
          └──────▶ RUNNING ────────────┤
                     │  │  ▲           │
                     │  │  └─ SWAPPED ◀┘ swap
                     │  ▼
                     │ LEAVING ──▶ (next segment's worker)
                     │ PARKED  ──▶ LEAVING
                     ▼
                   ended (forgotten)
    """

    AWAITING_KV = "awaiting_kv"  # its earlier segment is computed elsewhere; blocks may be granted already
    WAITING = "waiting"  # nothing computed here that is held; wants its first blocks
    RUNNING = "running"  # holds KV on the device; may be in the next plan or not
    SWAPPED = "swapped"  # its KV lies in host memory
    PARKED = "parked"  # segment computed, waits for late binding
    LEAVING = "leaving"  # segment computed, KV is being handed over


@dataclass(slots=True, eq=False)
class Sequence:
    """A request on one worker. `WorkerMachine` owns it; a scheduler changes phase and `computed` only through
    `cohort.common.policies.sequences` (start, preempt, resume).

    `tokens` are all known tokens, prompt first. Positions [0, computed) have KV here. The worker computes positions
    up to `end` (None: to the request's own end). All times are monotonic seconds of this worker.
    """

    request: Request
    tokens: list[int]
    end: int | None
    batch_id: int
    arrived_s: float
    phase: Phase = Phase.WAITING
    computed: int = 0
    cached_tokens: int = 0
    predicted: float = 0.0
    """Output tokens expected in total (mean prediction, or the default)."""
    first_scheduled_s: float | None = None
    prefill_done_s: float | None = None
    last_token_s: float | None = None
    """When its last token left this worker; None before the first."""
    delivered: int = 0
    """Output tokens that left this worker."""
    preemptions: int = 0
    repeat_from: int | None = None
    """The next update to the gateway starts at this position: after a hand-over it repeats what the former worker
    said, because that worker's last words may come later over their own connection, or never."""
    pinned: bool = False
    """Its blocks are being read by a transfer: it must not be preempted now."""
    transfer_s: float = 0.0
    """Hand-over time on the way here that nothing was computed in."""
    key: Attempt = field(init=False)
    """The attempt it computes; the allocator's owner id."""

    def __post_init__(self) -> None:
        self.key = self.request.attempt

    @property
    def request_id(self) -> RequestId:
        return self.key.request_id

    @property
    def known(self) -> int:
        """Number of known tokens, prompt and output."""
        return len(self.tokens)

    @property
    def scores_prompt(self) -> bool:
        """Its prompt's log-probabilities are still wanted: every position must be computed, none taken from a cache,
        because only a computed position has logits."""
        return self.request.sampling.prompt_logprobs >= 0 and self.output_tokens == 0

    @property
    def target(self) -> int:
        """Positions to compute with the tokens known now."""
        known, end = len(self.tokens), self.end
        return known if end is None or known < end else end

    @property
    def uncomputed(self) -> int:
        # `target` written out, here as in `output_tokens`: every decision asks for every sequence.
        known, end = len(self.tokens), self.end
        return (known if end is None or known < end else end) - self.computed

    @property
    def output_tokens(self) -> int:
        return len(self.tokens) - self.request.prompt_tokens

    @property
    def max_positions(self) -> int:
        """Positions that can ever be computed here."""
        limit = self.request.max_positions
        return limit if self.end is None else min(limit, self.end)


# -- IterationScheduler (worker) ---------------------------------------------------------------------------------


class Row(msgspec.Struct, frozen=True):
    """Compute positions [start, start + count) of a sequence."""

    sequence: Sequence
    start: int
    count: int


@dataclass(frozen=True, slots=True)
class KvCopy:
    """Move whole blocks or single slots between device and host memory, in step with the plan.

    `unit` "block": ids are block ids. "slot": ids are block·block_size + slot. A plan's copies run in their order,
    all before its rows; those `beside` may run while the rows are computed, because no row touches what they move
    (R12).
    """

    direction: Literal["out", "in"]
    unit: Literal["block", "slot"]
    device: tuple[int, ...]
    host: tuple[int, ...]
    beside: bool = False


@dataclass(frozen=True, slots=True)
class Preempt:
    """Take this sequence's KV off the device; it runs again later, from host memory or by recomputing."""

    sequence: Sequence
    how: Literal["swap", "recompute"]


@dataclass(slots=True)
class IterationPlan:
    """One forward. `rows`: prefill rows first, then decode rows (R14).

    `padded_to`: on padded paths every prefill row counts as this many tokens (B2); 0 = variable length, no padding.
    """

    rows: list[Row] = field(default_factory=list)
    preempted: list[Preempt] = field(default_factory=list)
    set_aside: list[Sequence] = field(default_factory=list)
    """Sequences that leave the scheduler with their KV, to be parked for late binding (A6 eviction); in no row."""
    copies: list[KvCopy] = field(default_factory=list)
    padded_to: int = 0
    estimated_s: float = 0.0
    reason: str = ""

    @property
    def tokens(self) -> int:
        return sum(row.count for row in self.rows)


class IterationScheduler(Protocol):
    """Picks the rows of the next iteration. Owns the order of the worker's sequences, not their state."""

    def add(self, now_s: float, sequence: Sequence) -> None:
        """It may be scheduled from now on (WAITING, or RUNNING after a hand-over)."""

    def remove(self, now_s: float, sequence: Sequence) -> None:
        """Finished, cancelled, handed over or parked; its blocks are freed by the machine."""

    def decide(self, now_s: float, kv: KvAllocator) -> IterationPlan:
        """The next iteration; empty rows = nothing can run. Blocks for every row are reserved when this returns."""

    def observe(self, now_s: float, plan: IterationPlan, latency_s: float) -> None:
        """The plan ran and took this long (R3, D5)."""

    def figures(self) -> dict[str, float]: ...


@runtime_checkable
class LearnsStepTimes(Protocol):
    """What a scheduler may add to its seat: it learns what iterations cost here (R3, D5). The host keeps what was
    learned over a restart, and reports carry it to the manager (D4)."""

    def step_times(self) -> StepTimes | None:
        """None until enough was seen."""

    def export_state(self) -> bytes:
        """What was learned, for `import_state` of a later process on the same machine with the same model; nothing
        while that is not worth keeping."""

    def import_state(self, data: bytes) -> None:
        """Start from this: an exported state, or the file of `cohort profile`. Raises `ValueError`."""


@runtime_checkable
class ExpectsHandOvers(Protocol):
    """What a scheduler may add to its seat: to know before it decides how many requests that already draw tokens are
    on their way here. They wait for the iteration in flight between two of their tokens."""

    def expect(self, arriving: int) -> None: ...


@runtime_checkable
class ForeseesDecisions(Protocol):
    """What a scheduler may add to its seat: to know when it has nothing to decide for a while.

    A virtual-time host then runs many iterations as one (`WorkerMachine.repeat`). Live hosts never ask. A scheduler
    without this is asked for every iteration.
    """

    def repeats(self, plan: IterationPlan, kv: KvAllocator) -> bool:
        """Whether the next decisions are certain: this all-decode plan, each row one position on, nothing else, and
        `observe` on them changes nothing. To hold for as long as no sequence is added, removed or at its end and
        every `extend` succeeds."""


@runtime_checkable
class LimitsForesight(ForeseesDecisions, Protocol):
    """Foresight with an end of its own."""

    def repetitions(self) -> int:
        """How many iterations after the one in flight `repeats` speaks for."""


@runtime_checkable
class TakesRevisions(Protocol):
    """What a scheduler may add to its seat: to hear of predictions that change while a sequence is here (E4)."""

    def revised(self, now_s: float, sequence: Sequence) -> None:
        """`sequence.predicted` has changed."""


@runtime_checkable
class GrowsByBlock(Protocol):
    """What an allocator may add to its seat, for the same purpose: `extend` changes nothing but at the first position
    of a block, `committed` nothing but when one is full, and `extend` succeeds while blocks are free or cached."""

    grows_by_block: bool


@runtime_checkable
class NamesHostBlocks(Protocol):
    """What an allocator may add to its seat, so that parked KV can move to host memory and be handed over from there
    (A2, A9): without it parked KV stays on the device."""

    def host_table(self, key: SequenceKey) -> Seq[int]:
        """Host blocks by position, like `blocks`; empty unless the sequence's KV lies in host memory."""


@runtime_checkable
class ConsolidatesCopies(Protocol):
    """What an allocator may add to its seat: `admit`, `extend`, `swap_out` and `swap_in` make copies that it collects
    instead of returning them (R12). Its `swap_out` and `swap_in` answer with an empty copy."""

    def take_copies(self) -> list[KvCopy]:
        """All copies since the last time, in their order. The host asks once after every decision; until then nobody
        who was served loses anything."""


# -- KvAllocator (worker) ----------------------------------------------------------------------------------------


class KvAllocator(Protocol):
    """Block bookkeeping of one worker's cache; no tensors. Position p of a request lies in
    `blocks(key)[p // block_size]`."""

    geometry: KvGeometry

    def admit(self, sequence: Sequence) -> int | None:
        """A WAITING sequence gets its first blocks, including what its policy reserves. Returns the positions whose KV
        the prefix cache already holds, or None when there is no room."""

    def reserve(self, key: SequenceKey, tokens: Seq[int], positions: int) -> int | None:
        """Blocks for KV that will arrive from elsewhere: like `admit`, for `positions` positions."""

    def extend(self, sequence: Sequence, positions: int) -> bool:
        """Blocks for positions [0, positions); False and no change when there is no room."""

    def committed(self, sequence: Sequence) -> None:
        """`sequence.computed` moved: full blocks may enter the prefix cache."""

    def release(self, key: SequenceKey) -> None:
        """Free everything it holds on the device and in host memory; unknown ids are ignored."""

    def swap_out(self, sequence: Sequence) -> KvCopy | None:
        """Free its device blocks for host blocks; None when the host pool has no room."""

    def swap_in(self, sequence: Sequence) -> KvCopy | None:
        """The way back; None when the device has no room."""

    def blocks(self, key: SequenceKey) -> Seq[int]: ...

    def directions(self, key: SequenceKey) -> Seq[int] | None:
        """Per block 0 = filled left to right, 1 = right to left; None = all 0 (R13)."""

    @property
    def total_blocks(self) -> int: ...

    @property
    def free_blocks(self) -> int:
        """Free and not in the prefix cache."""

    @property
    def cached_blocks(self) -> int:
        """Unowned but reusable; they can be taken like free ones."""

    @property
    def host_blocks(self) -> int: ...

    @property
    def host_free_blocks(self) -> int: ...

    def owners(self) -> Mapping[SequenceKey, int]:
        """Blocks held per sequence; empty when nothing is left over."""

    def figures(self) -> dict[str, float]: ...

    def check(self) -> None:
        """Raise `InvariantViolated` unless allocated + free = total and no block has an owner it does not know."""
