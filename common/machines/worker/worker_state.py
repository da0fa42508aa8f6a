"""State that the parts of a worker's machine share: records of sequences, settings, counters, effects so far."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from random import Random
from typing import Literal

import msgspec

from cohort.common.config import Config, SpeculationConfig
from cohort.common.machines.effects import WorkerEffect
from cohort.common.messages import PooledStates, StartSegment, TokenLogprob
from cohort.common.policies.interface import IterationPlan
from cohort.common.policies.kv_interface import KvAllocator
from cohort.common.policies.settings import TransferSettings, settings_of
from cohort.common.sequence import Sequence
from cohort.common.types import Attempt, DraftSource, InstanceId, TrafficClass, WorkerCapacity

REPORT_INTERVAL_S = 0.2
"""Interval of reports to the manager. Its deadlines and those of its policies (about a second) are several of these."""
_OFFER_TIMEOUT_S = 30.0
"""Maximum wait of a sender for blocks at the receiver: a cache that frees nothing for so long will not soon."""
_LEASE_S = 5.0
"""Time without renewal after which a receiver frees granted blocks: several renewals were lost, or the sender is."""
_STALL_TIMEOUT_S = 5.0
"""Time after which caches that wait for each other's blocks give a KV transfer back; a run takes far less."""

_PIECE_SHARE = 0.1
"""Share of a run's deadline."""


class WorkerSettings(msgspec.Struct, frozen=True):
    links: tuple[str, ...]
    """Transports this process can use, best first."""
    offer_timeout_s: float
    accept_timeout_s: float
    lease_s: float
    default_prediction: float
    stall_timeout_s: float = _STALL_TIMEOUT_S
    """Maximum time without progress while KV transfers are pending: then two caches wait for each other."""
    chunked_transfer: bool = True
    """Whether the blocks of a chunk are pushed while the next one computes (D6); else all at the segment's end."""
    scored_step_tokens: int = 64
    """Tokens of scored prompts in one iteration."""
    learns: bool = True
    """Whether iteration times are learned and reported even if the scheduler does not decide by them."""
    lists_queue: bool = True
    """Whether reports list the progress of every sequence (`WorkerStats.queue`)."""
    max_loras: int = 8
    speculation: SpeculationConfig = SpeculationConfig()
    piece_s: float = 0.5
    """Time that one run may take on its link, at the measured rate."""

    @staticmethod
    def of(config: Config, links: tuple[str, ...]) -> WorkerSettings:
        transfer = config.transfer
        return WorkerSettings(
            links=links,
            offer_timeout_s=_OFFER_TIMEOUT_S,
            accept_timeout_s=2 * transfer.run_timeout_s + _LEASE_S,
            lease_s=_LEASE_S,
            piece_s=_PIECE_SHARE * transfer.run_timeout_s,
            default_prediction=float(config.gateway.default_prediction_tokens),
            chunked_transfer=settings_of(config, TransferSettings).chunked,
            max_loras=config.engine.max_loras,
            speculation=config.speculation,
        )


class WorkerSetup(msgspec.Struct, frozen=True):
    """Data that a worker's machine is made of, beside its policies and its seed. `incarnation` and `endpoint` (the
    inbox for other workers) are this process's own; registrations carry them."""

    instance: InstanceId
    incarnation: int
    endpoint: str
    manager: InstanceId
    capacity: WorkerCapacity
    settings: WorkerSettings
    standbys: tuple[InstanceId, ...] = ()


@dataclass(slots=True, eq=False)
class Held:
    """Sequence, with everything this worker knows of it beyond what policies see."""

    sequence: Sequence
    segment: StartSegment
    """Message that started the sequence, as received: its segment, and the worker of the next one."""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    """Log-probabilities of this attempt's output tokens, if requested: they move with the request."""
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    states: PooledStates | None = None
    """Sum of computed positions' final states, for an embedding: it moves with the request."""
    aborting: bool = False
    """Whether it ended while its rows are computed: it is dropped when the step ends."""
    parked_s: float = 0.0
    pooled: bool = False
    """Whether it is parked, or leaving from there, with its KV in host memory."""
    moving: bool = False
    gateway: InstanceId = field(init=False)
    stop_ids: tuple[int, ...] = field(init=False)
    max_length: int = field(init=False)
    """Facts of the request that are needed for every token: gateway, stop tokens, greatest length."""
    prompt_known: int = field(init=False)
    """Tokens to prefill: the prompt, and the output of former attempts."""

    def __post_init__(self) -> None:
        request = self.sequence.request
        self.gateway, self.stop_ids = request.gateway, request.sampling.stop_token_ids
        self.max_length = request.prompt_tokens + request.sampling.max_tokens
        self.prompt_known = len(request.tokens)

    @staticmethod
    def of(message: StartSegment, now_s: float, default_prediction: float) -> Held:
        request = message.request
        sequence = Sequence(
            request=request,
            tokens=list(request.tokens),
            end=message.segments[message.index].end,
            batch_id=message.batch_id,
            arrived_s=now_s - request.waited_s,
            predicted=request.prediction.mean if request.prediction else default_prediction,
            delivered=request.output_known,
        )
        return Held(sequence, message)

    @property
    def next_instance(self) -> InstanceId | None:
        """Worker that takes over after this segment; None: none does, or it is not known yet."""
        following = self.segment.segments[self.segment.index + 1 : self.segment.index + 2]
        return following[0].instance if following else None


NotAhead = Literal[
    "prompts", "ended", "request", "kv_transfer", "news", "policy", "memory", "shared", "drafts", "grammars"
]
"""Reason why the step after the one in flight is not planned ahead: a prompt goes on, and its next chunk is still to be
decided; no row goes on; a sequence does not run any more; KV is under way or copied; something waits for a decision;
the scheduler might choose other rows; blocks lack; a row's next slot is, or may become, another sequence's
(`KvAllocator.extend_ahead`); the engine expects several tokens of a sequence, which only a decided step can draft; a
row sat a step out, waiting for its grammar."""


@dataclass(slots=True)
class Averages:
    """Moving averages of measured iterations, for reports and cost estimates."""

    step_s: float = 0.0
    decode_step_s: float = 0.0
    prefill_tokens_per_s: float = 0.0

    def note(self, plan: IterationPlan, latency_s: float) -> None:
        self.step_s = mix(self.step_s, latency_s)
        prefill = sum([row.count for row in plan.rows if row.count > 1])
        if prefill == 0:
            self.decode_step_s = mix(self.decode_step_s, latency_s)
        else:
            self.prefill_tokens_per_s = mix(self.prefill_tokens_per_s, prefill / max(latency_s, 1e-9))

    def note_decodes(self, latencies_s: Iterable[float]) -> None:
        """Update the averages as by a `note` of each of these iterations without a prompt."""
        step_s, decode_step_s = self.step_s, self.decode_step_s
        for latency_s in latencies_s:  # `mix`, written out
            step_s = latency_s if step_s == 0.0 else 0.9 * step_s + 0.1 * latency_s
            decode_step_s = latency_s if decode_step_s == 0.0 else 0.9 * decode_step_s + 0.1 * latency_s
        self.step_s, self.decode_step_s = step_s, decode_step_s


def mix(old: float, new: float) -> float:
    """Return the moving average after one more measurement; 0 = none so far."""
    return new if old == 0.0 else 0.9 * old + 0.1 * new


@dataclass(slots=True)
class WorkerCounters:
    prefill_tokens: int = 0
    decode_tokens: int = 0
    steps: int = 0
    preemptions: int = 0
    transfers_out: int = 0
    transfers_in: int = 0
    transfer_failures: int = 0
    transfer_retries: int = 0
    exposed_transfer_s: float = 0.0
    """Time of incoming KV transfers from a segment's last row until the request could go on, hidden by no compute."""
    stalls: int = 0
    fenced: int = 0
    """Commands refused because another manager leads."""
    misnamed: int = 0
    """Messages dropped because only another peer than their sender may send them."""
    pooled: int = 0
    """Parked sequences moved to host memory (A2), prefetched back (A9), sent straight from there."""
    prefetched: int = 0
    from_host: int = 0
    planned_ahead: int = 0
    """Steps queued after the one in flight, and requests for one that had to be refused, by `NotAhead`."""
    not_ahead: dict[NotAhead, int] = field(default_factory=dict)
    wasted_rows: int = 0
    """Rows computed for sequences that had ended meanwhile."""
    late_rows: int = 0
    """Rows that sat a step out, because what their grammars allow was not known in time."""
    adapter_loads: int = 0
    adapter_failures: int = 0
    """LoRA adapters loaded, and those that could not be."""
    drafted_rows: dict[TrafficClass, int] = field(default_factory=lambda: {"rt": 0, "be": 0})
    drafted_tokens: dict[TrafficClass, int] = field(default_factory=lambda: {"rt": 0, "be": 0})
    accepted_tokens: dict[TrafficClass, int] = field(default_factory=lambda: {"rt": 0, "be": 0})
    """Decode rows that were computed with drafts, these drafts, and the accepted ones among them."""
    drafts_of: dict[DraftSource, int] = field(default_factory=dict)
    right_of: dict[DraftSource, int] = field(default_factory=dict)
    """Tokens drafted and accepted, by their source."""
    finished: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class WorkerState:
    """State shared by the parts of one machine. Only the machine changes `held`, `aborting`, `in_flight`, `ahead`."""

    setup: WorkerSetup
    kv: KvAllocator
    random: Random
    held: dict[Attempt, Held] = field(default_factory=dict)
    aborting: list[Held] = field(default_factory=list)
    """Sequences in `held` that are dropped once no step in flight computes a row of theirs."""
    in_flight: IterationPlan | None = None
    ahead: IterationPlan | None = None
    """Plan queued after the one in flight: decode rows of sequences that sample a token in that one."""
    effects: list[WorkerEffect] = field(default_factory=list)
    counters: WorkerCounters = field(default_factory=WorkerCounters)
    averages: Averages = field(default_factory=Averages)
    skipped_s: list[float] = field(default_factory=list)
    """Times of the iterations since the last decision that ended without another one: run as one with the plan in
    flight (virtual time), or with the next one planned ahead."""
    link_rates: dict[InstanceId, float] = field(default_factory=dict)
    """Measured bytes per second to other workers."""
    moved_s: float = 0.0
    """Time at which a plan was made or a KV transfer progressed last."""
    settings: WorkerSettings = field(init=False)
    block_size: int = field(init=False)

    def __post_init__(self) -> None:
        self.settings = self.setup.settings
        self.block_size = self.setup.capacity.block_size

    def holds(self, sequence: Sequence) -> bool:
        """Return whether the sequence is here and not over."""
        held = self.held.get(sequence.key)
        return held is not None and held.sequence is sequence and not held.aborting

    def computes(self, sequence: Sequence) -> bool:
        """Return whether a row of it is in the step in flight or the queued one: its blocks are read and written."""
        for plan in (self.in_flight, self.ahead):
            if plan is not None and any(row.sequence is sequence for row in plan.rows):
                return True
        return False
