"""Sections that policies read: which ones run, and the options of each paper.

A section lists what a user decides. `ablation` holds the switches that take one part of a paper's mechanism away, to
measure what it is worth. Values that neither decides are constants beside their use in common/policies.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from cohort.common.config.kinds import Fraction, NotNegative, NotNegativeReal, Positive, Seconds, Section


class PolicyConfig(Section, frozen=True):
    """One policy per interface; `common/policies/compose.py` knows the names and what goes together. A policy of your
    own is named by its import path, `module:function` (docs/tutorials/your-own-scheduler.md)."""

    admission: str = "bounded"  # at the gateway: may a request come in
    placement: str = "least_ttft"  # at the manager: which worker computes which part of a request
    prefill_order: str = "pass_through"  # at the manager: which waiting request is dispatched next, in which batch
    iteration: str = "cohort_batching"  # at the worker: which rows the next iteration computes
    allocation: str = "paged"  # at the worker: how KV blocks are handed out
    waiting_kv: str = "none"  # at the manager: when parked KV is bound to a decoding worker


class BucketServeAblation(Section, frozen=True):
    """Parts of the mechanism that can be changed or taken away to measure them."""

    max_buckets: Positive = 64  # buckets at most; 1 = no bucketing
    splitter: Literal["bisection", "optimal"] = "bisection"  # of a crowded bucket: halves, or least expected waste
    staging_share: Fraction = 1.0  # of the prefill workers' caches, for computed prompts that wait for a decode worker


class BucketServeConfig(Section, frozen=True):
    """Buckets and safe batches of `policies.prefill_order: buckets` (docs/papers.md, B1-B11)."""

    max_batch: Positive = 256  # requests in one batch at most, whatever memory allows
    fill: Literal["oldest", "sjf", "ljf"] = "sjf"  # offline batches after their first: oldest, shortest, longest
    output_estimate: Literal["mean", "p50", "p90", "p99", "max"] = "mean"  # of the prediction, in a request's memory
    priority_step_s: Seconds = 10.0  # seconds of waiting that one level of priority is worth
    offline_delay_s: Seconds = 60.0  # seconds an offline request lets online ones pass before it counts like them
    activation_bytes: NotNegative = 65_536  # device memory beside the KV cache per token of a forward; 0 = not bounded
    ablation: BucketServeAblation = BucketServeAblation()


class DynaServeAblation(Section, frozen=True):
    """Parts of the mechanism that can be changed or taken away to measure them."""

    balance: Literal["work", "end"] = "work"  # what the search balances: seconds of work there, or predicted ends
    await_arrivals: bool = True  # of a split's gain only what no next request would fill counts; false = all (Alg. 1)


class DynaServeConfig(Section, frozen=True):
    """`policies.placement: split` and `policies.iteration: slo_batching` (docs/papers.md, D1-D9)."""

    tbt_slo_s: Seconds = 0.1  # between two tokens, for requests without an SLO of their own
    headroom: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.05  # share of that bound that iterations leave free
    search_tolerance: Fraction = 0.05  # the two ends may differ by this share; a split must gain more than it
    margin_tokens: NotNegative = 20  # added to every predicted length
    kv_transfer_s: NotNegativeReal = 0.005  # a split must bring the end forward by more than this
    least_segment: Positive = 32  # tokens; a shorter segment is not worth a KV transfer
    least_prefill: Positive = 16  # prompt tokens in every iteration that prompts wait for, whatever decodes take
    ablation: DynaServeAblation = DynaServeAblation()


class CohortAblation(Section, frozen=True):
    """Parts of the mechanism that can be taken away to measure them."""

    ordered: bool = True  # prompts in the order that keeps most SLOs; false = first come, first served
    bounded: bool = True  # prompts as the strictest TPOT leaves time; false = engine.prefill_chunk tokens an iteration
    victims: Literal["slack", "youngest"] = "slack"  # without blocks: missed first, then most slack; or the youngest
    yielding: bool = True  # best-effort work gives blocks, rows and time to real-time work; false = blocks, to decodes
    stretched: bool = True  # an iteration may last as long as mean TPOTs allow; false = the strictest TPOT each time


class CohortConfig(Section, frozen=True):
    """`policies.placement: least_ttft` and `policies.iteration: cohort_batching` (docs/cohort.md)."""

    # of prompts that can still keep their TTFT: as many as possible, the shortest of them first; or all by one rule
    prompt_order: Literal["most_in_time", "shortest", "earliest_due"] = "most_in_time"
    patience_s: Seconds = 60.0  # a request that waited so long goes first: its client is about to give up
    headroom: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.05  # of the strictest TPOT, left free
    # an iteration without real-time decodes; and what may be added to the wait of a newcomer for its first token
    longest_step_s: Seconds = 0.2
    least_prefill: Positive = 16  # prompt tokens in every iteration that prompts wait for, whatever decodes take
    refuse_late: Literal["named", "all", "none"] = "named"  # 429 where no worker keeps a TTFT: to those that named it
    ablation: CohortAblation = CohortAblation()


class AlignedServeAblation(Section, frozen=True):
    """Parts of the mechanism that can be changed or taken away to measure them."""

    prefetch: bool = True  # bring the next batch to the prefill device ahead; false = from the host when it is bound
    aligned: bool = True  # false = first come, first served out of the same pool
    fill_memory: bool = True  # matching requests join while memory lasts; false = up to B_max: shorter iterations


class AlignedServeConfig(Section, frozen=True):
    """`policies.placement: late_bound`, `policies.waiting_kv: aligned` and `policies.iteration: aligned_batching`
    (docs/papers.md, A1-A10). The KV pool is the prefill workers' host memory: kv.host_memory_bytes."""

    batch_share: Fraction = 0.4  # B_max: a batch's KV as a share of a decode worker's blocks
    least_requests: NotNegative = 0  # R_min: a smaller batch is widened; 0 = from engine.max_rows (36 of 256)
    leaf_tokens: Positive = 64  # width of a leaf of the quad-tree
    starvation_s: Seconds = 10.0  # a request that waited so long in the pool goes first
    ablation: AlignedServeAblation = AlignedServeAblation()


class BaselinesAblation(Section, frozen=True):
    """Readings of the compared systems that their papers leave open."""

    rectangular_kv: bool = False  # predicted_batches: memory of a batch is rows times longest prompt and output
    static_batches: bool = False  # predicted_batches: ended rows compute on until the batch ends; simulated time only
    headroom: bool = True  # vllm, chunked_prefill: newcomers leave blocks free; false = they may take the last one


class BaselinesConfig(Section, frozen=True):
    """Options of the baseline policies (docs/papers.md, Baselines); each says which policy reads it."""

    batch_size: Positive = 8  # orca, mlfq, srtf: requests in one iteration, as EcoServe §2.1 gives ORCA and FastServe
    prediction_padding: NotNegativeReal = 0.15  # allocation predicted: share added to the predicted output
    queue_starvation_s: Seconds = 60.0  # mlfq: a request that got nothing for so long moves to the first queue
    padded: bool = False  # predicted_batches: prompts of an iteration are computed as long as the longest
    ablation: BaselinesAblation = BaselinesAblation()


class EcoServeAblation(Section, frozen=True):
    """Parts of the mechanism that can be taken away to measure them."""

    decoupled: bool = True  # prompts and answers are admitted apart; false = a prompt takes its answer's KV with it
    synced: bool = True  # the batch of answers is formed when a group ends; false = in every iteration
    ordered: bool = True  # by deadline, KV held and length; false = first come, first served
    pipelined: bool = True  # KV that is allocated and unused is lent
    tune_padding: bool = True  # padding follows what answers turn out to need; false = it stays as given


class EcoServeConfig(Section, frozen=True):
    """Groups of `policies.iteration: time_synced`, best with `policies.allocation: nested` (docs/papers.md, E1-E11)."""

    reserve: Fraction = 0.03  # share of the cache that answers leave to prompts and to answers beyond their prediction
    waiting_share: Fraction = 0.1  # share of the cache that answers may hold which wait to run, before prompts wait
    padding: NotNegativeReal = 0.15  # share added to predicted lengths, at the start
    group_tokens: Positive = 8  # predicted lengths are rounded up to this; equal ones form a group
    buffer: NotNegativeReal = 0.15  # a borrower must be done by its predicted length and this share more
    patience_s: NotNegativeReal = 30.0  # a request that is overdue by more is not overtaken
    lending: Literal["halves", "forecast"] = "halves"  # the second half of one to one; or all of it to all, by forecast
    ablation: EcoServeAblation = EcoServeAblation()


class BrosConfig(Section, frozen=True):
    """Packing of `policies.iteration: slack_packing`, best with `policies.allocation: bidirectional` (docs/papers.md,
    R1-R15). Targets are the request's own (gateway.rt_ttft_slo_s, rt_tpot_slo_s when it names none)."""

    rt_starvation_s: Seconds = 5.0  # a real-time request that got nothing for so long goes first
    be_starvation_s: Seconds = 60.0  # likewise a best-effort one
    best_effort_share: Fraction = 0.2  # of cache and rows, that the oldest best-effort requests keep whatever waits
