"""What a request costs at least, whatever the scheduler: the least prices of an iteration's parts, and from them jobs.

An iteration is never faster than the sum of its rows at these prices: products at the best efficiency that was measured
at any number of tokens, weights read in the shadow of computing, no launch and no fixed time, attention at its best. A
prompt counts what no earlier request has in common with it, as if one cache without end held everything.

    prompt     its tokens and pairs of tokens, between arrival and the TTFT
    answer     every further token with the context it reads, from when the prompt can be done to TTFT + TPOT · (n − 1)
    memory     positions of the answer's steps, each for at least a step of one row alone

Left out, so the bound is the looser for it: reading weights again for small batches, iterations cut short by a strict
TPOT, transfers, memory that prompts hold, a cache that forgets, and that nobody knows a length before its end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from cohort.common.policies.cost_model import CostModel, StackShape, StepWork, prefill_pairs
from cohort.common.workloads.items import WorkItem
from cohort.services.simulator.bound.relaxation import Resource

_MANY = 1 << 22
"""Tokens of an iteration in which nothing but what grows with them counts."""


@dataclass(frozen=True, slots=True)
class Prices:
    """Seconds of an instance. `step_s`: of an iteration of one row."""

    token_s: float
    sample_s: float
    pair_s: float
    position_s: float
    step_s: float

    @classmethod
    def of(cls, cost: CostModel) -> Prices:
        device = cost.device
        if device.operators is not None:
            best = device.operators.best(by_size=not cost.model.experts)
            device = replace(device, operators=best)
        # Without what an iteration costs once; a step of one row alone has its weights to read.
        free = StackShape("", 0.0, 0.0, 0.0)
        bare = replace(device, layer_s=0.0, exchange_latency_s=0.0)
        least = CostModel(cost.model, bare, free, tensor_parallel=cost.tensor_parallel)
        none = least.step_s(StepWork(_MANY, 1, 0))
        pairs = prefill_pairs(0, _MANY)
        position_s = (least.step_s(StepWork(_MANY, 1, 0, 0, 0, 1, pairs)) - none) / pairs
        pair_s = (least.step_s(StepWork(_MANY, 1, 0, pairs)) - none) / pairs
        return cls(
            token_s=none / _MANY,
            sample_s=(least.step_s(StepWork(_MANY, 1, _MANY)) - none) / _MANY,
            pair_s=min(pair_s, position_s),  # a prompt computed token by token has rows of decodes
            position_s=position_s,
            step_s=least.step_s(StepWork(1, 1, 1, 0, 0, 1)),
        )

    def prompt_s(self, tokens: int, computed: int) -> float:
        """Return the least time of a prompt of which the last `computed` tokens are not cached."""
        pairs = prefill_pairs(tokens - computed, computed)
        return self.token_s * computed + self.pair_s * pairs + self.sample_s

    def answer_s(self, prompt: int, steps: int) -> float:
        """Return the least share of iterations that the decode steps behind a prompt have."""
        return steps * (self.token_s + self.sample_s) + self.position_s * _positions(prompt, steps)

    def slower(self, other: Prices) -> float:
        """Return how many times as long as on the `other` anything takes here at least."""
        parts = ("token_s", "sample_s", "pair_s", "position_s")
        return min(float(getattr(self, name) / getattr(other, name)) for name in parts)


def _positions(prompt: int, steps: int) -> float:
    """Return the positions that these decode steps read, one after the other."""
    return steps * prompt + steps * (steps + 1) / 2


@dataclass(frozen=True, slots=True)
class Instance:
    prices: Prices
    positions: int
    """Positions of its KV cache; 0: memory is not counted."""


def jobs(
    items: Sequence[WorkItem], new: Sequence[int], instances: Sequence[Instance], *, longest: int, horizon_s: float
) -> tuple[list[int], list[Resource]]:
    """Return which requests could be kept alone, and their jobs on computing time and on memory, numbered so.

    `new`: prompt tokens of each that no cache can hold (`new_tokens`). `longest`: positions of a sequence."""
    first = instances[0].prices
    computing = sum(1.0 / each.prices.slower(first) for each in instances)
    memory = float(sum(each.positions for each in instances)) if all(each.positions for each in instances) else 0.0
    step_s = min(each.prices.step_s for each in instances)
    able: list[int] = []
    work: list[tuple[int, float, float, float]] = []
    held: list[tuple[int, float, float, float]] = []
    for index, item in enumerate(items):
        prompt, computed = item.prompt_tokens, new[index]
        steps = min(item.output_tokens, longest - prompt) - 1
        alone_s = min(each.prices.prompt_s(prompt, computed) for each in instances)
        first_s, last_s = _due(item, steps, horizon_s)
        begin_s = item.arrival_s + alone_s
        if steps < 0 or begin_s > first_s or begin_s + steps * step_s > last_s:
            continue
        number = len(able)
        able.append(index)
        work.append((number, first.prompt_s(prompt, computed), item.arrival_s, first_s))
        if steps:
            work.append((number, first.answer_s(prompt, steps), begin_s, last_s))
            held.append((number, step_s * _positions(prompt if computed == prompt else 0, steps), begin_s, last_s))
    resources = [_resource(computing, work)]
    return able, [*resources, _resource(memory, held)] if memory else resources


def new_tokens(items: Sequence[WorkItem]) -> list[int]:
    """Return how many tokens of each prompt nobody had before, items in order of arrival; the last always counts.

    If the first with a prefix is kept, the prefix is computed in its own time: nobody before it knows it."""
    seen: set[int] = set()
    sessions: dict[str, int] = {}
    found = []
    for item in items:
        known = 0
        if item.hash_ids:
            fresh = next((at for at, block in enumerate(item.hash_ids) if block not in seen), len(item.hash_ids))
            known = fresh * item.hash_block
            seen.update(item.hash_ids)
        elif item.session:
            known = sessions.get(item.session, 0)
            sessions[item.session] = max(known, item.prompt_tokens)
        found.append(max(1, item.prompt_tokens - known))
    return found


def _due(item: WorkItem, steps: int, horizon_s: float) -> tuple[float, float]:
    """Return by when the first and the last token must have come."""
    slo = item.slo
    first_s = item.arrival_s + slo.ttft_s if slo.ttft_s else horizon_s
    last_s = first_s + slo.tpot_s * steps if slo.tpot_s else horizon_s
    whole_s = item.arrival_s + slo.deadline_s if slo.deadline_s else horizon_s
    last_s = min(last_s, whole_s, horizon_s)
    return min(first_s, last_s), last_s


def _resource(capacity: float, rows: list[tuple[int, float, float, float]]) -> Resource:
    owner, work, begin, end = zip(*rows, strict=True) if rows else ((), (), (), ())
    return Resource(capacity, np.array(owner, np.intp), *(np.array(each, float) for each in (work, begin, end)))
