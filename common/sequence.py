"""A request on one worker: which tokens are known, how many positions are computed, where its KV is.

Shared by worker machine, policies and engine. `WorkerMachine` owns each; schedulers move its phase while they decide
(`cohort.common.policies.sequences`).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

import msgspec

from cohort.common.sampling_inputs import SamplingInputs
from cohort.common.types import Attempt, Request, RequestId


class Phase(enum.Enum):
    """State of a request on one worker.

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
    WAITING = "waiting"  # holds nothing computed; wants its first blocks
    RUNNING = "running"  # holds KV on the device; may be in the next plan or not
    SWAPPED = "swapped"  # its KV lies in host memory
    PARKED = "parked"  # segment computed, waits for late binding
    LEAVING = "leaving"  # segment computed, KV is being handed over


@dataclass(slots=True, eq=False)
class Sequence:
    """A request on one worker. `WorkerMachine` owns it; a scheduler changes phase and `computed` only through
    `cohort.common.policies.sequences` (start, preempt, resume). `tokens` are all known tokens, prompt first. Positions
    [0, computed) have KV here. The worker computes positions up to `end` (None: to the request's own end). All times
    are monotonic seconds of this worker."""

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
    """Time at which its last token left this worker; None before the first."""
    delivered: int = 0
    """Output tokens that left this worker."""
    cached_ahead: int = -1
    """Positions that the prefix cache would save a sequence that has not started, when it was last asked; -1 = it was
    not."""
    prefix_hashes: list[bytes] | None = None
    """Hashes of the full blocks of its prompt, kept while it has not started."""
    preemptions: int = 0
    repeat_from: int | None = None
    """Position at which the next update to the gateway starts: after a KV transfer it repeats tokens of the former
    worker, whose last updates may come later over their own connection, or never."""
    pinned: bool = False
    """Whether a transfer reads its blocks: it must not be preempted now."""
    scored_slice: int = 0
    """Tokens of a scored prompt that one iteration may compute; 0 = it is not scored."""
    drafts_judged: float = 0.0
    drafts_right: float = 0.0
    """Draft tokens that were verified, and those that were right; older ones count less
    (`common/policies/speculation.py`)."""
    transfer_s: float = 0.0
    """KV transfer time on the way here that nothing was computed in."""
    key: Attempt = field(init=False)
    """The attempt it computes; the allocator's owner id."""
    sampling_inputs: SamplingInputs | None = field(init=False)
    """Biases, penalties and grammar, if the request has any."""
    has_grammar: bool = field(init=False)

    def __post_init__(self) -> None:
        request = self.request
        self.key = request.attempt
        self.has_grammar = bool(request.sampling.grammar)
        self.sampling_inputs = SamplingInputs.of(request.sampling, request.tokens[: request.prompt_tokens])

    @property
    def request_id(self) -> RequestId:
        return self.key.request_id

    @property
    def known(self) -> int:
        """Number of known tokens, prompt and output."""
        return len(self.tokens)

    @property
    def scores_prompt(self) -> bool:
        """Whether its prompt's log-probabilities are still wanted: every position must be computed, none taken from a
        cache, because only a computed position has logits."""
        return self.request.sampling.prompt_logprobs >= 0 and self.output_tokens == 0

    @property
    def computes_all(self) -> bool:
        """Whether its prompt is not over yet, and every position of it must be computed."""
        return self.request.sampling.computes_all and self.output_tokens == 0

    @property
    def target(self) -> int:
        """Positions to compute with the tokens known now."""
        known, end = len(self.tokens), self.end
        return known if end is None or known < end else end

    @property
    def uncomputed(self) -> int:
        """Positions that the next iteration may compute: all that are left, of a scored prompt a slice."""
        # `target` written out, here as in `output_tokens`: every decision asks for every sequence.
        known, end = len(self.tokens), self.end
        remaining = (known if end is None or known < end else end) - self.computed
        if self.scored_slice and remaining > self.scored_slice and self.scores_prompt:
            return self.scored_slice
        return remaining

    @property
    def begins(self) -> int:
        """Position from which on it will be computed: behind what the prefix cache is expected to save."""
        return self.computed or max(0, self.cached_ahead)

    @property
    def to_compute(self) -> int:
        """`uncomputed`, less what the prefix cache is expected to save a sequence that has not started."""
        return self.uncomputed - (self.begins - self.computed)

    @property
    def output_tokens(self) -> int:
        return len(self.tokens) - self.request.prompt_tokens

    @property
    def max_positions(self) -> int:
        """Positions that can ever be computed here."""
        limit = self.request.max_positions
        return limit if self.end is None else min(limit, self.end)


class Row(msgspec.Struct, frozen=True, gc=False):
    """Positions [start, start + count) of a sequence, to compute in a step. `drafts`: positions behind a decode row
    that the engine may compute with it, for draft tokens (`common/policies/speculation.py`). Schedulers leave it 0: the
    machine sets it once the plan is made, and has blocks for these positions too."""

    sequence: Sequence
    start: int
    count: int
    drafts: int = 0
