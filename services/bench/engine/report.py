"""What `cohort bench engine` measures, as it crosses from the process that measures to the one that shows it.

Written as JSON by `inside/measuring.py`, read by `services/bench`. Plain data without torch;
decides and computes nothing. Times are seconds, and of every list of rounds the median unless a field says otherwise.
"""

from __future__ import annotations

from typing import Literal

import msgspec

Form = Literal["linear", "prepacked", "ours", "memory"]
"""References for a step: the model's matrix products by torch's `F.linear`; by torch over weights prepacked for
oneDNN, the fastest form PyTorch has on a CPU; in the engine's own form; and the time to read the weights once."""

Section = Literal["decode", "prefill", "shares", "attention"]
"""Parts of the measurement that can be had alone."""

StepPart = str
PARTS = {
    "products": "matrix products",
    "attention": "attention",
    "elementwise": "norm, rotation, KV write",
    "embedding": "embedding",
    "sampling": "sampling",
    "inputs": "inputs",
    "dispatch": "rest of execute",
    "plan": "scheduler",
    "build": "batch building",
    "completed": "bookkeeping",
    "glue": "loop",
}
"""Parts of a step's time. Kernels: products, attention, elementwise, embedding. The rest of `ModelRunner.execute`:
sampling, inputs (arrays to tensors), dispatch (Python between the kernels). Outside it: plan (the scheduler), build
(plan to arrays), completed (bookkeeping of the results), glue (effects and the loop itself)."""

KERNEL_PARTS: tuple[StepPart, ...] = ("products", "attention", "elementwise", "embedding")


class Timing(msgspec.Struct, frozen=True):
    """Median, fastest and slowest of some rounds."""

    median_s: float
    min_s: float
    max_s: float


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """Place and means of the measurement. `load_1m` is the load average before and after: above the number of threads
    used, others had the cores too. `omp_wait_policy` "" = unset: torch's threads spin while they wait."""

    processor: str
    features: list[str]
    cores: int
    threads: int
    dtype: str
    kernels: str
    cohort: str
    torch: str
    python: str
    omp_wait_policy: str
    load_1m: list[float]


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True):
    """`layer_parameters`: weights of the products of all layers; `product_bytes`: the vocabulary's with them.
    Both 0 where the engine does not know them (models that run through transformers)."""

    name: str
    family: str
    layers: int
    hidden: int
    vocabulary: int
    layer_parameters: int
    product_bytes: int
    block_size: int
    kv_blocks: int
    kv_token_bytes: int


class StepPoint(msgspec.Struct, frozen=True, kw_only=True):
    """One step of the real engine: `rows` rows of `tokens_per_row` new tokens, `context` positions each afterwards.

    `ratios`: step over each lower bound, median of the rounds' own ratios, so that a round's conditions count on both
    sides.
    """

    rows: int
    tokens_per_row: int
    context: int
    step: Timing
    ratios: dict[Form, float]


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """Rounds in which lower bounds and steps of as many tokens ran in turn.

    `tokens` go through the layers, `sampled` of them through the vocabulary. `lower_bounds` lacks a form that does not
    exist here. `lower_bound_layers` layers had weights of their own and were timed; the rest is taken to cost as much
    per layer. `bandwidth`: bytes a second read from memory.
    """

    kind: Literal["decode", "prefill"]
    tokens: int
    sampled: int
    rounds: int
    lower_bound_layers: int
    bandwidth: float
    lower_bounds: dict[Form, Timing]
    steps: list[StepPoint]


class StepShares(msgspec.Struct, frozen=True, kw_only=True):
    """A decode step of the whole worker (scheduler, batch, forward, bookkeeping) taken apart.

    `parts_s`: medians over the steps with clocks in place; `clocked_s` is such a step, `step_s` one without clocks, in
    turn with it: the difference is what the clocks cost. `outside_kernels`: the share of a clocked step that is not in
    `KERNEL_PARTS`; the operators' dispatch inside torch counts as theirs. `outside_execute`: the share outside
    `ModelRunner.execute`.
    """

    rows: int
    context: int
    steps: int
    step_s: float
    clocked_s: float
    parts_s: dict[StepPart, float]
    outside_kernels: float
    outside_execute: float


class AttentionPoint(msgspec.Struct, frozen=True, kw_only=True):
    """Decode attention alone: `rate`, bytes of keys and values a second, and its `share` of the memory's `bandwidth`;
    how many times as long it takes over blocks filled right to left (`reversed_ratio`)."""

    rows: int
    context: int
    layers: int
    read_bytes: int
    paged: Timing
    rate: float
    bandwidth: float
    share: float
    reversed_ratio: float


class EngineReport(msgspec.Struct, frozen=True, kw_only=True):
    """All results; empty where a section was not chosen. `notes`: measurements left out here, and why."""

    machine: Machine
    model: ModelFacts
    comparisons: list[Comparison]
    shares: list[StepShares]
    attention: list[AttentionPoint]
    notes: list[str]
