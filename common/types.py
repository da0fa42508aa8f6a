"""The nouns of Cohort: requests, segments, block geometry.

Plain immutable data that policies, machines, messages and services share. Nothing here does I/O or imports
anything of ours.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from functools import cache
from typing import Literal

import msgspec

RequestId = str
InstanceId = str
TrafficClass = Literal["rt", "be"]
"""Real-time (a person waits) or best-effort (a batch job)."""
IfLate = Literal["", "refuse", "best_effort", "serve"]
"""What a client prefers where its TTFT SLO cannot be kept: an error at once, the answer as best-effort, or the answer
late. "" = the operator decides (`cohort.refuse_late`)."""

DraftSource = Literal["lookup", "recent", "model", "head"]
"""What expected a token: the sequence itself, recent responses, a draft model, a head on the model's own states
(`docs/guide/speculation.md`)."""


class Attempt(msgspec.Struct, frozen=True, array_like=True, order=True, cache_hash=True):
    """One attempt at serving a request: the identity of work on every machine and in every message.

    The gateway owns a request and counts its attempts. An older attempt counts for nothing: its tokens, blocks
    and transfers are void.
    """

    request_id: RequestId
    number: int

    def __str__(self) -> str:
        return f"{self.request_id}#{self.number}"

    def next(self) -> Attempt:
        """The attempt that takes over when this one is lost."""
        return Attempt(self.request_id, self.number + 1)


class Role(enum.StrEnum):
    """The work that an instance accepts."""

    PREFILL = "prefill"
    DECODE = "decode"
    UNIFIED = "unified"

    @property
    def prefills(self) -> bool:
        return self is not Role.DECODE

    @property
    def decodes(self) -> bool:
        return self is not Role.PREFILL


class FinishReason(enum.StrEnum):
    """Why a request ended; the first two are OpenAI's words."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    FAILED = "failed"


class Outcome(enum.StrEnum):
    """How a worker's segment of an attempt ended."""

    FINISHED = "finished"  # the request ended here
    HANDED_OVER = "handed_over"  # the next segment's worker accepted the KV
    PARKED = "parked"  # computed, KV kept for late binding
    CANCELLED = "cancelled"
    FAILED = "failed"  # the attempt is lost


class Slo(msgspec.Struct, frozen=True, omit_defaults=True):
    """The targets of a request.

    `ttft_s`: seconds from arrival to the first token. `tpot_s`: seconds between later tokens.
    `deadline_s`: seconds from arrival to the last token (E9 fills it when the client gives none). 0 = no SLO.
    """

    ttft_s: float = 0.0
    tpot_s: float = 0.0
    deadline_s: float = 0.0


class Prediction(msgspec.Struct, frozen=True, omit_defaults=True):
    """A predicted response length in tokens: mean, and quantiles at 50, 90 and 99 %.

    `source` names the predictor: "model", or "default" when the predictor was silent or too late.
    """

    mean: float
    p50: float
    p90: float
    p99: float
    source: str = "model"


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """How the next token is sampled. Defaults are OpenAI's.

    `seed` is always set by the gateway: the random number of position t depends only on (seed, t), so a request
    that moves, is preempted or recovered continues exactly. `stop_token_ids` includes the model's end tokens
    unless the client said `ignore_eos`. Stop *strings* are the gateway's business: workers see tokens only.
    `grammar`: the text that the answer is bound to, as `cohort.common.grammar` compiles it; "" = none. Its state
    depends only on it and the output tokens, so a request that moves continues exactly here too.
    `logprobs`: -1 = none, k = the k likeliest besides the chosen one. `prompt_logprobs`: the same for every token of
    the prompt but the first, which nothing precedes.
    """

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int = -1
    prompt_logprobs: int = -1
    grammar: str = ""


class Segment(msgspec.Struct, frozen=True):
    """Positions [start, end) of a request, computed on one instance.

    Computing position p writes its KV; if p is the last known token it also yields the token at p + 1.
    `end` None: to the end of the request, wherever that is. `instance` None: late-bound, some worker is chosen once
    the segment before it is done (A2, A6).
    """

    start: int
    end: int | None
    instance: InstanceId | None


class Request(msgspec.Struct, frozen=True, omit_defaults=True):
    """One generation as the control plane and the workers see it.

    `tokens` are the prompt and, after a recovery, the output known so far: `prompt_tokens` says where the client's
    prompt ends. `gateway` owns the
    request and is where tokens go. `arrival_s` is wall-clock seconds at the gateway (hosts keep synchronised clocks
    to within what a latency figure needs; no decision about correctness depends on it). Lower `priority` is served
    first. `online` False marks batch work (B10). `waited_s`: of a resubmitted request, seconds from its arrival at the
    gateway until this attempt was sent on, by the gateway or by the manager; a first attempt says 0. A duration, so
    that the request keeps its place in line on hosts whose monotonic clocks differ. Only requests of the same
    `prefix_salt` share cached prefixes. `if_late`: see `IfLate`. `owner`: whose share of the cluster it takes where
    several API keys ask, "" otherwise; `weight`: how large that share is, beside the others'. `traceparent`: its place
    in a trace, "" where it is not traced (`common/tracing`). `adapter`: the LoRA adapter that answers it, "" = the base
    model alone.
    """

    attempt: Attempt
    gateway: InstanceId
    tokens: list[int]
    prompt_tokens: int
    sampling: SamplingParams
    arrival_s: float
    traffic_class: TrafficClass = "rt"
    online: bool = True
    priority: int = 0
    slo: Slo = Slo()
    prediction: Prediction | None = None
    waited_s: float = 0.0
    prefix_salt: str = ""
    if_late: IfLate = ""
    owner: str = ""
    weight: float = 1.0
    traceparent: str = ""
    adapter: str = ""

    @property
    def request_id(self) -> RequestId:
        return self.attempt.request_id

    @property
    def output_known(self) -> int:
        """Output tokens that exist already (0 for a first attempt)."""
        return len(self.tokens) - self.prompt_tokens

    @property
    def max_positions(self) -> int:
        """Positions whose KV can ever be needed: the last output token is never processed."""
        return self.prompt_tokens + self.sampling.max_tokens - 1

    @property
    def cache_salt(self) -> str:
        """What its cached prefixes are told apart by: KV of equal tokens differs from adapter to adapter."""
        return f"{self.adapter}\0{self.prefix_salt}" if self.adapter else self.prefix_salt

    def as_best_effort(self) -> Request:
        """The same request, demoted: nothing orders it by latency targets any more; a deadline of its own stays."""
        slo = Slo(deadline_s=self.slo.deadline_s)
        return msgspec.structs.replace(self, traffic_class="be", slo=slo)


@dataclass(frozen=True, slots=True)
class KvGeometry:
    """Shape of a model's KV cache: the bytes of a token and a block.

    Formula of B1 per token: 2·L·H·D·B bytes (H after GQA).

    `window`: positions that a token sees back, its own included, if that bounds every layer; 0 = all. An allocator of
    such a geometry gives blocks back that lie wholly behind the window of all tokens to come.

    `groups`: where layers have different windows, they may be cut into groups of equally many layers, and a block is of
    one group: these are the groups' windows, those that see everything first. A sequence then has a table of blocks for
    each group, all of one pool and one size. Empty: one group of all layers, whose window is `window`.
    """

    num_layers: int
    """Of a token; with groups as many as they have room for together, of which some may stay empty."""
    num_kv_heads: int
    head_dim: int
    dtype_bytes: int
    block_size: int
    window: int = 0
    groups: tuple[int, ...] = ()

    @property
    def windows(self) -> tuple[int, ...]:
        """Of every group, of which there is at least one."""
        return self.groups or (self.window,)

    @property
    def num_groups(self) -> int:
        return len(self.groups) or 1

    @property
    def gives_back(self) -> bool:
        """Whether a sequence that runs gives blocks back."""
        return self.window > 0 or any(self.groups)

    @property
    def block_layers(self) -> int:
        """Layers whose KV is in one block."""
        return self.num_layers // self.num_groups

    @property
    def token_bytes(self) -> int:
        """Of all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype_bytes

    @property
    def block_bytes(self) -> int:
        return self.token_bytes // self.num_groups * self.block_size

    def positions(self, blocks: int) -> int:
        """Positions of one sequence that so many blocks hold in all layers."""
        return blocks // self.num_groups * self.block_size

    def entries(self, tokens: int) -> int:
        """Of each table of a sequence with `tokens` positions."""
        return -(-tokens // self.block_size)

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold `tokens` positions in all layers."""
        return -(-tokens // self.block_size) * self.num_groups

    def behind(self, computed: int, window: int) -> int:
        """Of the table of a group with this window, of a sequence with `computed` positions, leading blocks that no
        token to come sees. They change where a block becomes full, so that what a sequence holds changes there only."""
        if not window:
            return 0
        return max(0, computed // self.block_size * self.block_size + 1 - window) // self.block_size

    def blocks_behind(self, computed: int) -> int:
        """The same of all tables."""
        if not self.groups:
            return self.behind(computed, self.window)
        return sum([self.behind(computed, window) for window in self.groups])

    def blocks_held(self, tokens: int) -> int:
        """Blocks of a sequence that has computed `tokens` positions: all of them, less those behind a window."""
        return self.blocks_for(tokens) - self.blocks_behind(tokens)

    def most_held(self, tokens: int) -> int:
        """Positions in the blocks of a sequence that decodes, at most, until it has `tokens`: for forecasts. Positions
        in all layers: a block of one of several groups counts as its share of them."""
        if self.groups:
            slack = 2 * self.block_size
            held = sum([min(tokens, window + slack) if window else tokens for window in self.groups])
            return -(-held // len(self.groups))
        return min(tokens, self.window + 2 * self.block_size) if self.window else tokens

    def growth(self, computed: int, prefill: int, decode: int) -> int:
        """Positions for which a sequence with `computed` will need more blocks at the worst moment to come: it takes
        those of its prompt at once, and gives back what lies behind a window. Counted as `most_held` counts."""
        if not self.gives_back:
            return prefill + decode
        return max(prefill, self.most_held(computed + prefill + decode) - self.most_held(computed))


FP8_SCALE_BYTES = {"cpu": 1, "cuda": 4}
"""Of a row of keys or values in FP8, one token's of one head, by the kind of device."""

_geometry = cache(KvGeometry)
"""Equal ones are one: every placement asks every instance."""


class QueueBucket(msgspec.Struct, frozen=True, array_like=True):
    """Waiting requests with prompts of [low_tokens, high_tokens)."""

    low_tokens: int
    high_tokens: int
    requests: int


class QueuedWork(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Progress of one request on an instance, for an execution predictor to replay (D4).

    Tokens still to prefill there, KV positions it holds, output tokens still expected there: of an answer that has
    outlived its prediction as many as it is beyond it.
    """

    request_id: RequestId
    prefill_left: int
    context: int
    decode_left: int


class StepTimes(msgspec.Struct, frozen=True, array_like=True):
    """The time of an iteration on an instance, as learned there (D5), in seconds:

        step + row · rows + ((token · tokens)⁴ + floor⁴)^¼ + pair · prefill query-key pairs + position · decode context

    `floor_s` is what reading the weights takes: few tokens cost no less. Where prompt chunks and decodes share an
    iteration, it takes 1 + `mixed_share` times that: what mixing itself costs. Before its rows, an iteration copies KV
    between device and host memory at `copy_s` a position. Ask `step_times.step_cost`, not these.
    """

    step_s: float
    row_s: float
    token_s: float
    floor_s: float
    pair_s: float
    position_s: float
    mixed_share: float = 0.0
    copy_s: float = 0.0


class WorkerStats(msgspec.Struct, frozen=True, omit_defaults=True):
    """The state of an instance with every report; policies decide on it (B9).

    Blocks are of the device's KV cache; `cached_blocks` hold reusable prefixes and count as free too.
    `memory_free_bytes` is the live figure of the device (B7). Times are moving averages of measured iterations.
    """

    total_blocks: int = 0
    free_blocks: int = 0
    cached_blocks: int = 0
    host_blocks: int = 0
    host_free_blocks: int = 0
    memory_free_bytes: int = 0
    running: int = 0
    waiting: int = 0
    awaiting_kv: int = 0
    parked: int = 0
    queued_prefill_tokens: int = 0
    running_context_tokens: int = 0
    step_s: float = 0.0
    prefill_tokens_per_s: float = 0.0
    decode_step_s: float = 0.0
    preemptions: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    leases: int = 0
    expired_leases: int = 0
    queue: list[QueuedWork] = []
    step_times: StepTimes | None = None
    """None until enough was seen, or where none are learned."""
    link_rates: dict[InstanceId, float] = {}
    """Bytes a second of KV to other workers, as measured; only those that it has sent enough to."""
    adapters: list[str] = []
    """LoRA adapters that it holds, or is loading."""
    free_adapter_slots: int = 0
    """Adapters that it could hold beside these."""
    adapter_load_s: float = 0.0
    """What loading one took, moving average; 0 = none was loaded yet."""


class EngineFacts(msgspec.Struct, frozen=True, omit_defaults=True):
    """On what and with what a worker computes, in words for people: /version, metrics and the live page."""

    device: str  # "NVIDIA H200", or the processor's name; "2 x NVIDIA H200" of a worker of two ranks
    capability: str = ""  # CUDA compute capability, "9.0"
    dtype: str = ""
    kernels: str = ""  # native (C++), triton, reference (PyTorch)
    decode_attention: str = ""
    prefill_attention: str = ""


class WorkerCapacity(msgspec.Struct, frozen=True):
    """The capacity of an instance; fixed from its registration on."""

    role: Role
    model: str
    max_model_len: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype_bytes: int
    block_size: int
    num_blocks: int
    host_blocks: int
    max_rows: int
    max_step_tokens: int
    device: str = ""
    """Host and device that it computes on; workers that name the same one share it. "": not known to be shared."""
    engine: EngineFacts | None = None
    window: int = 0
    groups: tuple[int, ...] = ()
    """Both of `KvGeometry`."""

    @property
    def geometry(self) -> KvGeometry:
        return _geometry(
            self.num_layers,
            self.num_kv_heads,
            self.head_dim,
            self.dtype_bytes,
            self.block_size,
            self.window,
            self.groups,
        )

    @property
    def num_groups(self) -> int:
        return len(self.groups) or 1

    @property
    def positions(self) -> int:
        """That its blocks hold in all layers."""
        return self.num_blocks // self.num_groups * self.block_size
