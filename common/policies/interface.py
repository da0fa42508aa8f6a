"""The policy interfaces: every place in the pipeline where a system may decide differently.

    gateway                manager                                            worker
    ┌───────────┐   ┌──────────────┐   ┌───────────┐   ┌─────────────┐   ┌────────────────────┐   ┌─────────────┐
    │ Admission │──▶│ PrefillOrder │──▶│ Placement │   │ LateBinding │──▶│ IterationScheduler │──▶│ KvAllocator │
    └───────────┘   └──────────────┘   └───────────┘   └─────────────┘   └────────────────────┘   └─────────────┘
      may it come    which waiting       segments on     which parked KV    which rows run in       which blocks,
      in at all?     requests go next,   which           goes where, when   the next iteration      slots, copies?
                     as which batch?     instances?

How the five systems fill them (ids of the mechanism tables in docs/papers.md):

| interface    | BucketServe          | BROS                    | AlignedServe              | DynaServe               | EcoServe                  |
|--------------|----------------------|-------------------------|---------------------------|-------------------------|---------------------------|
| PrefillOrder | B4–B7 buckets, safe  | first come              | first come                | first come              | first come (PT queue is   |
|              | batches              |                         |                           |                         | the worker's, E1)         |
| Placement    | B8 P/D by load       | one segment             | [0,P) then late-bound     | D1–D4 split search      | one segment               |
| LateBinding  | –                    | –                       | A3–A9 quad-tree, buffers  | –                       | –                         |
| Iteration    | FCFS prefill,        | R1–R6, R11, R15 packing | A6 batch switch, eviction | D5 budget from profile  | E1, E3, E5, E6, E10       |
|              | continuous decode    |                         |                           |                         | groups; late predictions  |
| KvAllocator  | paged                | R7–R10 bidirectional    | paged                     | paged                   | E2, E7, E8 exact, nested  |

Every decision carries a `reason` and, where there is one, an estimated cost; both become metrics and log fields.
"""  # noqa: E501

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import msgspec

from cohort.common.policies.kv_interface import KvAllocator, KvCopy
from cohort.common.sequence import Row, Sequence
from cohort.common.types import (
    InstanceId,
    Prediction,
    QueueBucket,
    Request,
    RequestId,
    Role,
    Segment,
    Slo,
    StepTimes,
    TrafficClass,
    WorkerCapacity,
    WorkerStats,
)

# -- Admission (gateway) -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Offer:
    """Request at the door. Before tokenising `prompt_tokens` is an estimate from the body's size. `owner`: digest of
    its API key where several keys share the gateway, else ""."""

    prompt_tokens: int
    max_tokens: int
    predicted_tokens: float
    traffic_class: TrafficClass
    priority: int
    slo: Slo
    owner: str = ""


@dataclass(frozen=True, slots=True)
class AdmissionLoad:
    """Load that the gateway knows: its own queue and the manager's last message. `owner_requests`, `owner_tokens`:
    those of the offer's owner that wait at this gateway."""

    waiting_requests: int
    waiting_tokens: int
    running_requests: int
    drain_rate: float
    """Requests finished a second, moving average; 0 = unknown."""
    free_tokens: int
    total_tokens: int
    owner_requests: int = 0
    owner_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Admit:
    reason: str = "room"


MIN_RETRY_S, MAX_RETRY_S = 1.0, 120.0
"""Bounds of the time that a refused client is told to wait."""


@dataclass(frozen=True, slots=True)
class Refuse:
    """Refusal with 429 and Retry-After. An admission's `reason` is a text for the client; a placement's is one word, a
    label of metrics, and `forecast_s` is the TTFT it predicts, from the request's arrival at the manager (0 = none)."""

    reason: str
    retry_after_s: float
    forecast_s: float = 0.0


class Admission(ABC):
    @abstractmethod
    def decide(self, now_s: float, offer: Offer, load: AdmissionLoad) -> Admit | Refuse: ...


# -- The manager's view of the cluster ---------------------------------------------------------------------------


@dataclass(slots=True)
class InstanceView:
    """Registered worker. `assigned_*` count what was sent to it but is not in its last report yet."""

    instance: InstanceId
    capacity: WorkerCapacity
    stats: WorkerStats = field(default_factory=WorkerStats)
    report_age_s: float = 0.0
    draining: bool = False
    assigned_requests: int = 0
    assigned_prefill_tokens: int = 0
    assigned_context_tokens: int = 0
    assigned_adapters: frozenset[str] = frozenset()

    @property
    def role(self) -> Role:
        return self.capacity.role

    @property
    def queued_prefill_tokens(self) -> int:
        """Prompt tokens this worker still has to compute: reported, and assigned since."""
        return self.stats.queued_prefill_tokens + self.assigned_prefill_tokens

    def holds(self, adapter: str) -> bool:
        """Return whether a request of this LoRA adapter ("" = none) waits for no load here, or one that has begun."""
        return not adapter or adapter in self.stats.adapters or adapter in self.assigned_adapters

    @property
    def has_adapter_slot(self) -> bool:
        """Whether another LoRA adapter can be loaded without unloading one."""
        stats = self.stats
        return stats.free_adapter_slots > len(self.assigned_adapters.difference(stats.adapters))

    @property
    def free_blocks(self) -> int:
        return self.stats.free_blocks + self.stats.cached_blocks


class ClusterView(msgspec.Struct, frozen=True):
    """Workers alive and not draining, and the monitor's summary (`forecast_age_s` infinite when it is silent: B9)."""

    instances: Mapping[InstanceId, InstanceView]
    arrival_rate: float = 0.0
    arrival_rate_forecast: float = 0.0
    mean_prompt_tokens: float = 0.0
    mean_output_tokens: float = 0.0
    forecast_age_s: float = float("inf")


@dataclass(slots=True)
class WaitingRequest:
    """Request in the manager, not yet dispatched."""

    request: Request
    since_s: float
    prediction: Prediction | None

    @property
    def request_id(self) -> RequestId:
        return self.request.request_id

    @property
    def accepted(self) -> bool:
        """Whether it is an attempt after the first, or has output: it is served, neither refused nor demoted."""
        return self.request.attempt.number > 0 or self.request.output_known > 0

    def expected_output(self, default_tokens: float) -> float:
        """Return the predicted output, bounded by max_tokens."""
        mean = self.prediction.mean if self.prediction else default_tokens
        return max(1.0, min(mean, float(self.request.sampling.max_tokens)))


# -- PrefillOrder (manager) --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Requests to be placed now, as one batch. `instance` is a preference (None: placement chooses)."""

    request_ids: tuple[RequestId, ...]
    batch_id: int
    instance: InstanceId | None
    reason: str


class PrefillOrder(ABC):
    """Owner of the manager's waiting requests: in which order and in which company they are dispatched."""

    wants_step_times: ClassVar[bool] = False
    reads_queues: ClassVar[bool] = True
    """Flags with the meaning that they have in `Placement`."""

    @abstractmethod
    def add(self, now_s: float, waiting: WaitingRequest) -> None: ...

    @abstractmethod
    def remove(self, now_s: float, request_id: RequestId) -> None:
        """Remove a request: cancelled, or dispatched but impossible to place; unknown ids are ignored."""

    @abstractmethod
    def revise(self, now_s: float, request_id: RequestId, prediction: Prediction) -> None: ...

    @abstractmethod
    def decide(self, now_s: float, cluster: ClusterView) -> list[Dispatch]:
        """Take the requests that go next, no more than the cluster can use soon: these cannot be reordered."""

    def next_wake_s(self, now_s: float) -> float | None:
        """Return when `decide` is to be called although nothing happened; None = only on events."""
        return None

    @abstractmethod
    def __len__(self) -> int: ...

    @property
    @abstractmethod
    def waiting_tokens(self) -> int: ...

    def buckets(self) -> Seq[QueueBucket]:
        """Return the queue by prompt length, ascending; empty for an order without buckets. For monitoring."""
        return ()

    def metrics(self) -> dict[str, float]:
        """Return own metrics by name: bucket count, waste, …"""
        return {}


# -- Placement (manager) -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Placed:
    """Segments that meet exactly: the first starts at 0, the last is open-ended (end None). `best_effort`: demoted, its
    workers see a best-effort request; `forecast_s` as in `Refuse`."""

    segments: tuple[Segment, ...]
    reason: str
    estimated_s: float = 0.0
    best_effort: bool = False
    forecast_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Wait:
    """No instance can take it now; it returns to the queue's head."""

    reason: str


@dataclass(frozen=True, slots=True)
class Impossible:
    """No instance could ever hold it."""

    reason: str


class Placement(ABC):
    moves_kv: ClassVar[bool] = True
    """False: every request stays on one worker, so that workers need no KV links."""
    wants_step_times: ClassVar[bool] = False
    """Flag: it decides by `WorkerStats.step_times`. Live workers always learn them; a simulation only then."""
    reads_queues: ClassVar[bool] = True
    """Flag: it may look at `WorkerStats.queue`, which a simulation lists only then. A subclass that reads it, of a
    placement that does not, sets it."""

    @abstractmethod
    def place(
        self, now_s: float, waiting: WaitingRequest, cluster: ClusterView, preferred: InstanceId | None
    ) -> Placed | Wait | Impossible | Refuse:
        """Choose the segments. `Refuse`, and `Placed.best_effort`, only of a request that is not `accepted` yet: of
        another one the first means `Wait`, the second nothing."""

    def reported(self, now_s: float, view: InstanceView) -> None:
        """Read a worker's new report from its view, for placements that do so once, not at every decision."""
        return

    def completed(self, now_s: float, request_id: RequestId) -> None:
        """Learn that the last token was sampled (D4); `finished` also comes for cancelled and lost requests."""
        return

    def finished(self, now_s: float, request_id: RequestId) -> None:
        """Forget a request, which is off all instances."""
        return

    def metrics(self) -> dict[str, float]:
        return {}


# -- LateBinding (manager) ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ParkedKv:
    """Computed segment whose KV waits on `instance` (device or host pool) for the next segment's worker."""

    request: Request
    instance: InstanceId
    positions: int
    since_s: float


@dataclass(frozen=True, slots=True)
class Bind:
    """Parked KV to be handed to `instance` now, as part of `batch_id`; where it lies already it goes on there. With
    `parks` it waits on there too, and `parked` will say when it has arrived (A6 eviction)."""

    request_id: RequestId
    instance: InstanceId
    batch_id: int
    reason: str
    parks: bool = False


@dataclass(frozen=True, slots=True)
class Prefetch:
    """Parked KV to be brought into the fast buffer where it waits (A5, A9)."""

    request_ids: tuple[RequestId, ...]


class LateBinding(ABC):
    reads_queues: ClassVar[bool] = True
    """Flag with the meaning that it has in `Placement`."""

    @abstractmethod
    def parked(self, now_s: float, item: ParkedKv) -> None:
        """Add KV that waits, in full; no other instance holds any of it."""

    @abstractmethod
    def moved(self, now_s: float, request_id: RequestId) -> None:
        """Learn that a KV transfer of this request has arrived; also of requests that never were parked."""

    @abstractmethod
    def removed(self, now_s: float, request_id: RequestId) -> None:
        """Forget a request that ended or is lost; also one that never was parked."""

    @abstractmethod
    def decide(self, now_s: float, cluster: ClusterView) -> list[Bind | Prefetch]: ...

    def metrics(self) -> dict[str, float]:
        return {}


# -- IterationScheduler (worker) ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Preempt:
    """Sequence whose KV leaves the device; it runs again later, from host memory or by recomputing."""

    sequence: Sequence
    how: Literal["swap", "recompute"]


class IterationPlan(msgspec.Struct):
    """Rows of one forward: prefill rows first, then decode rows (R14). `padded_to`: on padded paths every prefill row
    counts as this many tokens (B2); 0 = variable length, no padding. `ended_rows`, `ended_context`: of a static batch
    the rows that have ended and go on as padding, and positions that rows attend to beside their own. The simulator
    counts their time; a live engine computes none of them."""

    rows: list[Row] = []
    preempted: list[Preempt] = []
    evicted: list[Sequence] = []
    """Sequences that leave the scheduler with their KV, to be parked for late binding (A6 eviction); in no row."""
    copies: list[KvCopy] = []
    padded_to: int = 0
    ended_rows: int = 0
    ended_context: int = 0
    estimated_s: float = 0.0
    reason: str = ""
    watched: bool = False
    """Flag: the engine is to report what it expects behind these rows, at a price: drafts may be worth it."""
    drafted: int = 0
    """Positions of drafted tokens that were computed beside the rows' own, in a plan that has run."""
    has_grammars: bool = False
    """Flag of a plan that starts: a row is bound to a grammar, whose masks, which any request can make costly, are part
    of the time. The machine sets it, once a step."""

    @property
    def tokens(self) -> int:
        return sum(row.count for row in self.rows)


class Ran(msgspec.Struct, frozen=True):
    """Plan that ran last. Live hosts ask for a decision after every iteration; a virtual-time host may have run several
    with one plan (`IterationScheduler.steady_for`): the plan's rows are then those of the last of them."""

    plan: IterationPlan
    ended_s: float
    times_s: tuple[float, ...]
    """Seconds of each of these iterations, oldest first; never empty."""

    @property
    def latency_s(self) -> float:
        """Seconds of the last iteration."""
        return self.times_s[-1]

    @property
    def iterations(self) -> int:
        return len(self.times_s)


class News(msgspec.Struct, frozen=True):
    """Events on the worker since the last decision."""

    ran: Ran | None = None
    """Iteration since; None when none ran: at first, where the last decision had nothing to run, or when it failed."""
    revised: Seq[Sequence] = ()
    """Sequences whose `predicted` has changed (E4); some may have been removed since."""
    arriving: int = 0
    """Requests that already decode and are on their way here: they wait for the iteration that is decided now between
    two of their tokens (D5). Counted only for schedulers with `wants_arriving`."""

    earlier: Seq[Ran] = ()
    """Iterations with prompts before `ran`, oldest first, each without a decision after it (`reads_runs`)."""

    @property
    def runs(self) -> tuple[Ran, ...]:
        """Iterations that ran, oldest first."""
        return (*self.earlier, self.ran) if self.ran is not None else tuple(self.earlier)

    @property
    def undecided(self) -> int:
        """Iterations that ran without a decision of their own."""
        return max(0, sum([ran.iterations for ran in self.runs]) - 1)


UNTIL_CHANGED = 1 << 30
"""Answer of `IterationScheduler.steady_for`: without end."""


class Learned(ABC):
    """Iteration times that a scheduler learns on its machine (R3, D5). The host keeps them over a restart. Whether a
    scheduler learns or not, its worker learns and reports `StepTimes` (D4, `step_times`)."""

    def step_times(self) -> StepTimes | None:
        """Return the times for placements; None until enough was seen, or where the model means nothing to them."""
        return None

    @abstractmethod
    def export_state(self) -> bytes:
        """Return the state for `import_state` on the same machine with the same model; empty if not worth keeping."""

    @abstractmethod
    def import_state(self, data: bytes) -> None:
        """Start from an exported state, or the file of `cohort profile`. Raises `ValueError`."""


class IterationScheduler(ABC):
    """Scheduler of one worker: picks the rows of the next iteration. Owns the order of the worker's sequences; changes
    their phase and their blocks while it decides and at no other time. Deterministic: no I/O, time comes as an
    argument. `decide` follows every iteration that ran, before `learned` and `metrics` are read."""

    wants_arriving = False
    """Flag: `News.arriving` is to be counted; KV transfers on their way here then disturb a steady plan."""
    reads_runs = False
    """Flag: `decide` takes in all `News.runs`, so that an iteration may begin behind one in which prompts end. Else a
    decision follows each of these."""

    @abstractmethod
    def add(self, now_s: float, sequence: Sequence) -> None:
        """Add a sequence (WAITING, SWAPPED, or RUNNING after a KV transfer)."""

    @abstractmethod
    def remove(self, now_s: float, sequence: Sequence) -> None:
        """Remove a sequence: finished, cancelled, handed over or parked; the machine frees its blocks."""

    @abstractmethod
    def decide(self, now_s: float, kv: KvAllocator, news: News) -> IterationPlan:
        """Return the next iteration; empty rows = nothing can run. Blocks for every row are reserved then."""

    def steady_for(self, plan: IterationPlan, kv: KvAllocator) -> int:
        """Return how many further iterations are certain to repeat this plan: the same rows, all decode, each one
        position on. 0 = ask for each. It holds as long as no sequence is added, removed, revised or at its end and
        every `extend` succeeds. Only virtual-time hosts ask, right after `decide`; they run these iterations as one and
        tell their times in the next `News.ran`, which must not lead to other decisions than one by one would."""
        return 0

    def chunks_ahead(self, prompts: Seq[Row], single: int) -> Seq[int] | None:
        """Return the tokens that `decide`, called after the iteration in flight, would give to each prompt that goes
        on, one at least. `prompts`: all that each of them has left then, two tokens or more; `single` rows of one token
        stand beside them. Asked before `continues`, which then holds the whole plan. None: that follows from what is
        not known yet, such as times, or one of them would get nothing."""
        return None

    def continues(self, plan: IterationPlan, kv: KvAllocator, leaving: int, undecided: int) -> bool:
        """Return whether `decide`, called after the iteration in flight, could only choose `plan`: a decode row, one
        position on, for every sequence that samples a token in that iteration, also of a prompt that ends with it; and
        of each prompt that goes on the chunk that `chunks_ahead` gave. The order of rows is free. The iteration in
        flight has rows of `leaving` sequences more, which end with it and are still to be removed; its time is not
        known yet. `undecided`: iterations begun since the last decision beside the one that it chose; their times come
        with the next `News.ran`. While prompts wait a scheduler may promise what it decides now instead. Blocks are not
        asked for here: see `KvAllocator.extend_ahead`. Live hosts ask at any moment while an iteration runs, sequences
        may have come since the last decision, and begin `plan` behind it."""
        return False

    @property
    def learned(self) -> Learned | None:
        """Times learned; None: it needs none. `LearnedTimes` of the package `step_times` are reported as well; beside
        anything else the worker learns such times itself."""
        return None

    def metrics(self) -> dict[str, float]:
        """Return own metrics by name; those that only grow end in `_total`."""
        return {}
