"""Drafted tokens that stand: those that the sampler gives at their positions, and the first that it gives instead.

Called by the model runner and the device's steps for batches with drafts (`StepBatch.drafts`), after the forward.

    position    p        p+1      p+2      p+3
    computed    known    draft a  draft b  draft c
    sampled     a        b        x                  kept: a, b, x (c was wrong, and what follows it is not looked at)

A sampled token depends on its position's logits, its request's parameters, (seed, position) and the tokens before it
(penalties, grammar: `SamplingRow.ahead`). These are the drafts before it, known beforehand, and right wherever it is
looked at: greedy and sampled tokens alike are those of a step each, whether sampled in turn or all at once. Where a
mask was not ready (`StepOutput.late`) a row ends before that token.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from torch import Tensor

from cohort.common.engine.step.batch import SamplingRow, StepBatch, StepOutput, TokenLogprobs
from cohort.common.engine.step.grammar_masks import TokenMasks
from cohort.common.engine.step.sampler import sample

Masks = Callable[[tuple[SamplingRow, ...]], TokenMasks | None]


def sample_drafted(logits: Tensor, batch: StepBatch, masks: Masks) -> StepOutput:
    """Sample every sample row position after position, as far as its drafts are right: on a processor each one takes
    time. `logits` float32 [positions, vocabulary], `StepBatch.num_sampled` of them."""
    tokens: list[int] = []
    logprobs: list[TokenLogprobs | None] = []
    failures: dict[int, str] = {}
    counts, place = [], 0
    for drafted in _drafts_of(batch):
        start = len(tokens)
        for offset in range(len(drafted) + 1):
            row = batch.sampling[place + offset]
            sampled = sample(
                logits[place + offset : place + offset + 1], (row,), masks((row,)) if row.grammar is not None else None
            )
            if sampled.late:
                break
            if sampled.failures:
                failures[len(tokens)] = sampled.failures[0]
            tokens.append(int(sampled.tokens[0]))
            logprobs.append(sampled.logprobs[0])
            if sampled.failures or (offset < len(drafted) and tokens[-1] != drafted[offset]):
                break
        counts.append(len(tokens) - start)
        place += len(drafted) + 1
    return StepOutput(np.array(tokens, dtype=np.int64), tuple(logprobs), failures=failures, counts=tuple(counts))


def right_ones(output: StepOutput, batch: StepBatch) -> StepOutput:
    """Return the correct tokens of a batch whose tokens were all sampled at once."""
    accepted: list[int] = []
    failures: dict[int, str] = {}
    counts, place = [], 0
    sampled = output.tokens.tolist()
    for drafted in _drafts_of(batch):
        right = 0
        while (
            right < len(drafted) and place + right not in output.failures and sampled[place + right] == drafted[right]
        ) and place + right not in output.late:
            right += 1
        if failure := output.failures.get(place + right):
            failures[len(accepted) + right] = failure
        count = right + (place + right not in output.late)
        accepted.extend(range(place, place + count))
        counts.append(count)
        place += len(drafted) + 1
    tokens, logprobs = output.tokens[accepted], tuple([output.logprobs[index] for index in accepted])
    return StepOutput(tokens, logprobs, output.scores, output.pooled, failures, tuple(counts))


def joined(first: StepOutput, second: StepOutput) -> StepOutput:
    counts = None
    if first.counts is not None or second.counts is not None:
        counts = tuple([each for half in (first, second) for each in half.counts or (1,) * len(half.tokens)])
    return StepOutput(
        tokens=np.concatenate([first.tokens, second.tokens]),
        logprobs=first.logprobs + second.logprobs,
        scores=first.scores + second.scores,
        pooled=first.pooled + second.pooled,
        failures={**first.failures, **{len(first.tokens) + index: why for index, why in second.failures.items()}},
        counts=counts,
        late=frozenset() if counts else first.late | {len(first.tokens) + index for index in second.late},
    )


def _drafts_of(batch: StepBatch) -> list[list[int]]:
    assert batch.drafts is not None
    token_ids, ends, drafts = batch.token_ids, batch.query_start[1:].tolist(), batch.drafts.tolist()
    rows = batch.sample_rows.tolist()
    return [token_ids[ends[row] - drafts[row] : ends[row]].tolist() for row in rows]
