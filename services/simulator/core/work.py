"""A plan in the cost model's numbers: what one iteration computes, draws and copies."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from cohort.common.policies.cost_model import StepWork, prefill_pairs
from cohort.common.policies.interface import IterationPlan
from cohort.common.policies.kv_interface import goes_beside
from cohort.common.sequence import Row
from cohort.common.types import KvGeometry


class PlanCost(msgspec.Struct, frozen=True):
    """`useful_tokens` without padding; `padded_tokens` are the ones computed for nothing (B2)."""

    work: StepWork
    useful_tokens: int
    padded_tokens: int
    copied_bytes: int
    """Before the rows."""
    beside_bytes: int = 0
    """While the rows are computed (R12)."""


def plan_cost(
    plan: IterationPlan,
    geometry: KvGeometry,
    *,
    device_stages: bool = False,
    proposed: Callable[[Row], int] | None = None,
) -> PlanCost:
    """`device_stages`: the engine's copies out leave the device beside the rows where they can, as a GPU's do.
    `proposed`: the drafts of a row, each of which costs what a row of its own would."""
    tokens = useful = pairs = prefill_context = decode_rows = decode_context = longest = sampled = 0
    padded_to = plan.padded_to
    for row in plan.rows:
        start, count = row.start, row.count
        useful += count
        if start + count == len(row.sequence.tokens):
            sampled += 1
        if count == 1:
            tokens += 1
            decode_rows += 1
            decode_context += start + 1
            if start >= longest:
                longest = start + 1
            if row.drafts and proposed is not None and (drafted := proposed(row)):
                tokens, sampled, decode_rows = tokens + drafted, sampled + drafted, decode_rows + drafted
                decode_context += drafted * (start + 1) + drafted * (drafted + 1) // 2
        else:
            computed = max(count, padded_to)
            tokens += computed
            pairs += prefill_pairs(start, computed)
            prefill_context += start + computed
    tokens += plan.ended_rows
    sampled += plan.ended_rows
    decode_rows += plan.ended_rows
    decode_context += plan.ended_context
    copied = beside = 0
    staged = device_stages and bool(plan.copies) and goes_beside(plan.copies, geometry)
    for copy in plan.copies:
        size = copy.bytes_of(geometry)
        if copy.beside or staged:
            beside += size
        else:
            copied += size
    work = StepWork(
        tokens, len(plan.rows) + plan.ended_rows, sampled, pairs, prefill_context, decode_rows, decode_context, longest
    )
    return PlanCost(work, useful, tokens - useful, copied, beside)
