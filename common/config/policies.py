"""Sections that policies read: which ones run, and the options of each system.

A section lists what an operator decides. What only measurements change is a setting: common/policies/settings.py. Other
values are constants beside their use in common/policies.
"""

from __future__ import annotations

from typing import Literal

from cohort.common.config.kinds import Fraction, NotNegativeReal, Positive, Seconds, Section


class PolicyConfig(Section, frozen=True):
    """One policy per interface; `common/policies/compose.py` knows the names and what goes together. A policy of your
    own is named by its import path, `module:function` (docs/tutorials/your-own-scheduler.md)."""

    admission: str = "bounded"  # at the gateway: may a request come in
    placement: str = "least_ttft"  # at the manager: which worker computes which part of a request
    prefill_order: str = "pass_through"  # at the manager: which waiting request is dispatched next, in which batch
    iteration: str = "cohort_batching"  # at the worker: which rows the next iteration computes
    allocation: str = "paged"  # at the worker: how KV blocks are handed out
    waiting_kv: str = "none"  # at the manager: when parked KV is bound to a decoding worker


class BucketServeConfig(Section, frozen=True):
    """Buckets and safe batches of `policies.prefill_order: buckets` (docs/papers.md, B1-B11)."""

    fill: Literal["oldest", "sjf", "ljf"] = "sjf"  # offline batches after their first: oldest, shortest, longest
    offline_delay_s: Seconds = 60.0  # seconds an offline request lets online ones pass before it counts like them


class DynaServeConfig(Section, frozen=True):
    """`policies.placement: split` and `policies.iteration: slo_batching` (docs/papers.md, D1-D9)."""

    tbt_slo_s: Seconds = 0.1  # between two tokens, for requests without an SLO of their own


class CohortConfig(Section, frozen=True):
    """`policies.placement: least_ttft` and `policies.iteration: cohort_batching` (docs/cohort.md)."""

    # of prompts that can still keep their TTFT: as many as possible, the shortest of them first; or all by one rule
    prompt_order: Literal["most_in_time", "shortest", "earliest_due"] = "most_in_time"
    patience_s: Seconds = 60.0  # what waited so long, of whatever class, has a share of the time for prompts
    patience_share: Fraction = 0.1  # this share of all time; what came first is computed first
    # an iteration without real-time decodes; and what may be added to the wait of a newcomer for its first token
    longest_step_s: Seconds = 0.2
    refuse_late: Literal["named", "all", "none"] = "named"  # 429 where no worker keeps a TTFT: to those that named it


class AlignedServeConfig(Section, frozen=True):
    """`policies.placement: late_bound`, `policies.waiting_kv: aligned` and `policies.iteration: aligned_batching`
    (docs/papers.md, A1-A10). The KV pool is the prefill workers' host memory: kv.host_memory_bytes."""

    starvation_s: Seconds = 10.0  # a request that waited so long in the pool goes first


class BaselinesConfig(Section, frozen=True):
    """Options of the baseline policies (docs/papers.md, Baselines); each says which policy reads it."""

    batch_size: Positive = 8  # orca, mlfq, srtf: requests in one iteration, as EcoServe §2.1 gives ORCA and FastServe
    padded: bool = False  # predicted_batches: prompts of an iteration are computed as long as the longest


class EcoServeConfig(Section, frozen=True):
    """Groups of `policies.iteration: time_synced`, best with `policies.allocation: nested` (docs/papers.md, E1-E11)."""

    padding: NotNegativeReal = 0.15  # share added to predicted lengths, at the start
    lending: Literal["halves", "forecast"] = "halves"  # the second half of one to one; or all of it to all, by forecast


class BrosConfig(Section, frozen=True):
    """Packing of `policies.iteration: slack_packing`, best with `policies.allocation: bidirectional` (docs/papers.md,
    R1-R15). Targets are the request's own (gateway.rt_ttft_slo_s, rt_tpot_slo_s when it names none)."""

    rt_starvation_s: Seconds = 5.0  # a real-time request that got nothing for so long goes first
    be_starvation_s: Seconds = 60.0  # likewise a best-effort one
    best_effort_share: Fraction = 0.2  # of cache and rows, that the oldest best-effort requests keep whatever waits
