"""The nouns of Cohort: requests, segments, block geometry.

Plain immutable data that policies, machines, messages and services share. Nothing here does I/O or imports
anything of ours but `tokens`.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from functools import cache
from typing import Literal

import msgspec

from cohort.common.tokens import Tokens

RequestId = str
InstanceId = str
TrafficClass = Literal["rt", "be"]
"""Real-time (a person waits) or best-effort (a batch job)."""
IfLate = Literal["", "refuse", "best_effort", "serve"]
"""Client's preference where its TTFT SLO cannot be kept: an error at once, the answer as best-effort, or the answer
late. "" = the operator decides (`cohort.refuse_late`)."""

DraftSource = Literal["lookup", "model", "head"]
"""Source of a draft token: the sequence itself, a draft model, a head on the model's own states
(`docs/guide/speculation.md`)."""


class Attempt(msgspec.Struct, frozen=True, array_like=True, order=True, cache_hash=True):
    """One attempt at serving a request: the identity of work on every machine and in every message. The gateway owns a
    request and counts its attempts. An older attempt counts for nothing: its tokens, blocks and transfers are void."""

    request_id: RequestId
    number: int

    def __str__(self) -> str:
        return f"{self.request_id}#{self.number}"

    def next(self) -> Attempt:
        """Return the attempt that takes over when this one is lost."""
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
    """Reason why a request ended; the first two are OpenAI's words."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    FAILED = "failed"


class Outcome(enum.StrEnum):
    """End of a worker's segment of an attempt."""

    FINISHED = "finished"  # the request ended here
    HANDED_OVER = "handed_over"  # the next segment's worker accepted the KV
    PARKED = "parked"  # computed, KV kept for late binding
    CANCELLED = "cancelled"
    FAILED = "failed"  # the attempt is lost


class Slo(msgspec.Struct, frozen=True, omit_defaults=True):
    """The targets of a request. `ttft_s`: seconds from arrival to the first token. `tpot_s`: seconds between later
    tokens. `deadline_s`: seconds from arrival to the last token (E9 fills it when the client gives none). 0 = no
    SLO."""

    ttft_s: float = 0.0
    tpot_s: float = 0.0
    deadline_s: float = 0.0


class Prediction(msgspec.Struct, frozen=True, omit_defaults=True):
    """A predicted response length in tokens: mean, and quantiles at 50, 90 and 99 %. `source` names the predictor:
    "model", or "default" when the predictor was silent or too late."""

    mean: float
    p50: float
    p90: float
    p99: float
    source: str = "model"


Pooling = Literal["", "last", "mean"]


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """Sampling parameters of a request. Defaults are OpenAI's. `seed` is always set by the gateway: the random number
    of position t depends only on (seed, t), so a request that moves, is preempted or recovered continues exactly.
    `stop_token_ids` includes the model's end tokens unless the client set `ignore_eos`. Stop *strings* are handled by
    the gateway: workers see tokens only. `grammar`: the text that the answer is bound to, as `cohort.common.grammar`
    compiles it; "" = none. An answer that begins with the tokens `grammar_opens` (after a prompt that ends with what
    they say: none) reasons first, and is bound behind the first token `grammar_closes`; -1 = from its beginning.
    `logprobs`: -1 = none, k = the k likeliest besides the chosen one. `prompt_logprobs`: the
    same for every token of the prompt but the first, which nothing precedes. `pooling`: what is made of the prompt's
    final hidden states for an embedding, which comes with the first token; "" = there is none."""

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
    pooling: Pooling = ""
    grammar: str = ""
    grammar_opens: tuple[int, ...] = ()
    grammar_closes: int = -1

    @property
    def computes_all(self) -> bool:
        """Whether every position of the prompt must be computed, none taken from a cache."""
        return self.prompt_logprobs >= 0 or self.pooling == "mean"


class Segment(msgspec.Struct, frozen=True):
    """Positions [start, end) of a request, computed on one instance. Computing position p writes its KV; if p is the
    last known token it also yields the token at p + 1. `end` None: to the end of the request. `instance` None:
    late-bound, the worker is chosen once the segment before is done (A2, A6)."""

    start: int
    end: int | None
    instance: InstanceId | None


class Request(msgspec.Struct, frozen=True, omit_defaults=True):
    """One generation as the control plane and the workers see it. `tokens` are the prompt, of `prompt_tokens` tokens,
    and after a recovery the output known so far. `gateway` owns the request and gets its tokens. `arrival_s` is
    wall-clock seconds at the gateway (no decision about correctness depends on synchronised clocks). Lower `priority`
    is served first. `online` False marks batch work (B10). `waited_s`: seconds from a resubmitted request's arrival at
    the gateway until gateway or manager sent this attempt on, 0 for a first attempt; a duration, so that the request
    keeps its place in line on hosts whose monotonic clocks differ. Only requests of the same `prefix_salt` share cached
    prefixes. `owner`: the API key whose share of the cluster it takes, "" without several; `weight`: the size of that
    share beside the others'. `traceparent`: its place in a trace, "" if it is not traced (`common/tracing`). `adapter`:
    its LoRA adapter, "" = the base model alone; `adapter_folder`: of one that was added since the start, whose name has
    a stamp behind it. `choices`: generations that its client asked for with it, itself
    included."""

    attempt: Attempt
    gateway: InstanceId
    tokens: Tokens
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
    choices: int = 1
    adapter_folder: str = ""

    @property
    def adapter_name(self) -> str:
        """Name of its adapter to clients: one that was added carries a stamp behind it."""
        return self.adapter.rpartition("@")[0] if self.adapter_folder else self.adapter

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
        """Salt of its cached prefixes: KV of equal tokens differs from adapter to adapter."""
        return f"{self.adapter}\0{self.prefix_salt}" if self.adapter else self.prefix_salt

    def as_best_effort(self) -> Request:
        """Return the request demoted: without latency targets, but with its deadline."""
        slo = Slo(deadline_s=self.slo.deadline_s)
        return msgspec.structs.replace(self, traffic_class="be", slo=slo)


@dataclass(frozen=True, slots=True)
class KvGeometry:
    """Shape of a model's KV cache: the bytes of a token and a block.

    Formula of B1 per token: 2·L·H·D·B bytes (H after GQA).

    `window`: positions that a token attends to, its own included, in every layer; 0 = all. An allocator frees blocks
    that lie wholly behind the window of all tokens to come.

    `groups`: windows of groups of equally many layers, where layers have different windows; full attention (0) first. A
    block then belongs to one group, and a sequence has a block table for each group, all of one pool and block size.
    Empty: one group of all layers, with `window`.
    """

    num_layers: int
    """Layers of a token; with groups as many as these have room for, of which some may stay empty."""
    num_kv_heads: int
    head_dim: int
    dtype_bytes: int
    block_size: int
    window: int = 0
    groups: tuple[int, ...] = ()

    @property
    def windows(self) -> tuple[int, ...]:
        """Sliding window of each group; there is at least one group."""
        return self.groups or (self.window,)

    @property
    def num_groups(self) -> int:
        return len(self.groups) or 1

    @property
    def frees_behind_window(self) -> bool:
        """Whether a running sequence frees blocks behind a window."""
        return self.window > 0 or any(self.groups)

    @property
    def block_layers(self) -> int:
        """Layers whose KV is in one block."""
        return self.num_layers // self.num_groups

    @property
    def token_bytes(self) -> int:
        """Bytes of a token in all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype_bytes

    @property
    def block_bytes(self) -> int:
        return self.token_bytes // self.num_groups * self.block_size

    def positions(self, blocks: int) -> int:
        """Return the positions of one sequence that `blocks` blocks hold in all layers."""
        return blocks // self.num_groups * self.block_size

    def entries(self, tokens: int) -> int:
        """Return the length of each block table of a sequence with `tokens` positions."""
        return -(-tokens // self.block_size)

    def blocks_for(self, tokens: int) -> int:
        """Return the number of blocks that hold `tokens` positions in all layers."""
        return -(-tokens // self.block_size) * self.num_groups

    def blocks_before_window(self, computed: int, window: int) -> int:
        """Return the number of leading blocks, in the table of a group with this window, that no token after `computed`
        positions sees. It changes only where a block becomes full."""
        if not window:
            return 0
        return max(0, computed // self.block_size * self.block_size + 1 - window) // self.block_size

    def blocks_behind(self, computed: int) -> int:
        """Return the number of blocks behind the windows of all tables."""
        if not self.groups:
            return self.blocks_before_window(computed, self.window)
        return sum([self.blocks_before_window(computed, window) for window in self.groups])

    def blocks_held(self, tokens: int) -> int:
        """Return the number of blocks of a sequence with `tokens` computed positions, less those behind a window."""
        return self.blocks_for(tokens) - self.blocks_behind(tokens)

    def most_held(self, tokens: int) -> int:
        """Return the most positions in the blocks of a decoding sequence until it has `tokens`: for forecasts, and
        in all layers: a block of one of several groups counts as its share of them."""
        if self.groups:
            slack = 2 * self.block_size
            held = sum([min(tokens, window + slack) if window else tokens for window in self.groups])
            return -(-held // len(self.groups))
        return min(tokens, self.window + 2 * self.block_size) if self.window else tokens

    def growth(self, computed: int, prefill: int, decode: int) -> int:
        """Return the positions, as in `most_held`, for which a sequence with `computed` needs more blocks at the worst
        moment to come: it takes those of its prompt at once, and frees what lies behind a window."""
        if not self.frees_behind_window:
            return prefill + decode
        return max(prefill, self.most_held(computed + prefill + decode) - self.most_held(computed))


FP8_SCALE_BYTES = {"cpu": 1, "cuda": 4}
"""Bytes of the scale of one token's keys or values of one head in FP8, by the kind of device."""

_geometry = cache(KvGeometry)
"""Cached constructor: every placement asks every instance for its geometry."""


class QueueBucket(msgspec.Struct, frozen=True, array_like=True):
    """Waiting requests with prompts of [low_tokens, high_tokens)."""

    low_tokens: int
    high_tokens: int
    requests: int


class QueuedWork(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Progress of one request on an instance, for an execution predictor to replay (D4). Tokens still to prefill there,
    KV positions it holds, output tokens still expected there: for an answer that has outlived its prediction, the
    tokens beyond it. `cached`: of `prefill_left`, what the prefix cache was found to hold; -1 = it was not asked."""

    request_id: RequestId
    prefill_left: int
    context: int
    decode_left: int
    cached: int = -1


class StepTimes(msgspec.Struct, frozen=True, array_like=True):
    """The time of an iteration on an instance, as learned there (D5), in seconds:

        step + row · rows + ((token · tokens)⁴ + floor⁴)^¼ + pair · prefill query-key pairs + position · decode context

    `floor_s`: the time to read the weights; few tokens cost no less. An iteration of prompt chunks and decodes takes
    1 + `mixed_share` times that. Before its rows, an iteration copies KV between device and host memory at `copy_s` a
    position. Call `step_times.step_cost` instead of computing with these.
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
    """The state of an instance with every report; policies decide on it (B9). Blocks are of the device's KV cache;
    `cached_blocks` hold reusable prefixes and count as free too. `memory_free_bytes` is the live figure of the device
    (B7). Times are moving averages of measured iterations."""

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
    """Learned times; None until there are enough samples, or where none are learned."""
    link_rates: dict[InstanceId, float] = {}
    """Measured bytes a second of KV to other workers; only those that it has sent enough to."""
    adapters: list[str] = []
    """LoRA adapters that it holds or loads."""
    free_adapter_slots: int = 0
    """Number of adapters that it could hold beside these."""
    adapter_load_s: float = 0.0
    """Time to load one, moving average; 0 = none was loaded yet."""


class EngineFacts(msgspec.Struct, frozen=True, omit_defaults=True):
    """Device and kernels of a worker, in words for people: /version, metrics and the live page."""

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
    """Host and device; workers that name the same one share it. "": not known to be shared."""
    engine: EngineFacts | None = None
    window: int = 0
    groups: tuple[int, ...] = ()
    """Windows, with `window`, as in `KvGeometry`."""

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
        """Positions that its blocks hold in all layers."""
        return self.num_blocks // self.num_groups * self.block_size
