"""Sampler of the next token of every sampled row from its logits.

Rows never influence each other, and a row's sample depends only on its own logits, its parameters and (seed, position):
the same whatever the batch, the worker or the attempt.

Order: grammar, penalties, bias, bans, temperature, top_k, top_p, min_p, then a race: every token left runs for an
exponential time divided by its weight, and the first one wins (the Gumbel-max trick in another form; it draws with
exactly the probabilities). A race rather than an inverse of the cumulative distribution, because a rounding difference
between two workers shifts all of that distribution's tens of thousands of borders and any of them may cross the number
drawn, while here it matters only when the two first runners are equal to the last few bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cohort.common.engine.step.batch import Int32Array, SamplingRow, StepOutput, TokenLogprobs
from cohort.common.engine.step.counter_random import exponentials, sample_key
from cohort.common.engine.step.grammar_masks import TokenMasks
from cohort.common.sampling_inputs import TokenHistory
from cohort.kernels.cpu import native

GREEDY_BELOW = 1e-5
"""Temperature under which sampling is greedy: dividing by it leaves nothing but the maximum in float32."""

NEGLIGIBLE = 2.0**-53 / 37.0
"""Weight under which a token loses any race against weight 1, which needs 36.8 at most; any token needs 2**-53."""


def sample(logits: Tensor, rows: Sequence[SamplingRow], masks: TokenMasks | None = None) -> StepOutput:
    """Return one token per row of float32 logits [S, vocabulary], which are not changed. `masks`: for grammars."""
    late = frozenset() if masks is None else frozenset(masks.late)
    adjusted = {
        index: _adjusted(logits[index] if masks is None else _allowed(logits[index], row, masks.bits[index]), row)
        for index, row in enumerate(rows)
        if not row.plain_greedy and index not in late
    }
    tokens = np.zeros(len(rows), dtype=np.int64) if len(adjusted) == len(rows) else _likeliest(logits)
    drawn = [index for index in adjusted if rows[index].temperature >= GREEDY_BELOW]
    for index, own in adjusted.items():
        if rows[index].temperature < GREEDY_BELOW:
            tokens[index] = _likeliest(own[None])[0]
    if drawn:
        tokens[drawn] = _draw([adjusted[index] for index in drawn], [rows[index] for index in drawn])
    return StepOutput(
        tokens=tokens,
        logprobs=tuple(
            _logprobs(logits[index], int(tokens[index]), row.logprobs) if row.logprobs >= 0 else None
            for index, row in enumerate(rows)
        ),
        failures={} if masks is None else masks.failures,
        late=late,
    )


def _likeliest(logits: Tensor) -> npt.NDArray[np.int64]:
    """Return each row's largest logit, the first of equals. On the CPU NumPy is as fast and allocates no tensor."""
    if logits.is_cpu:
        found: npt.NDArray[np.int64] = logits.numpy().argmax(axis=1)
        return found
    return logits.argmax(dim=-1).to(torch.int64).cpu().numpy()


def _allowed(logits: Tensor, row: SamplingRow, bits: Int32Array) -> Tensor:
    """Return logits [vocabulary] with those that the row's grammar does not allow at -inf; a copy if it has one."""
    if row.grammar is None:
        return logits
    allowed = np.unpackbits(bits.view(np.uint8), count=len(logits), bitorder="little").view(np.bool_)
    if logits.is_cpu:  # a third of what torch takes for it
        return torch.from_numpy(np.where(allowed, logits.numpy(), np.float32("-inf")))
    return torch.where(torch.from_numpy(allowed).to(logits.device), logits, float("-inf"))


def _adjusted(logits: Tensor, row: SamplingRow) -> Tensor:
    """Return logits [vocabulary] after penalties, bias and bans; a copy if anything changes."""
    if row.penalised or row.logit_bias is not None or row.banned:
        logits = logits.clone()
    if row.penalised and row.history is not None:
        _penalise(logits, row, row.history)
    # Ids beyond the vocabulary can never be drawn: biasing or banning them changes nothing and must not stop the batch.
    if row.logit_bias is not None:
        ids, values = row.logit_bias.within(len(logits))
        logits[torch.from_numpy(ids).to(logits.device)] += torch.from_numpy(values).to(logits)
    # A grammar's mask has the bans in it: it alone knows whether anything else could come.
    if row.grammar is None and (banned := [token for token in row.banned if 0 <= token < len(logits)]):
        logits[banned] = float("-inf")
    return logits


def _penalise(logits: Tensor, row: SamplingRow, history: TokenHistory) -> None:
    """Apply penalties: repetition to prompt and output (as transformers), the others to output (as OpenAI)."""
    if row.repetition_penalty != 1.0:
        ids = torch.from_numpy(history.seen_with(row.ahead)).to(logits.device)
        values = logits[ids]
        logits[ids] = torch.where(values > 0, values / row.repetition_penalty, values * row.repetition_penalty)
    if row.presence_penalty != 0.0 or row.frequency_penalty != 0.0:
        tokens, counts = history.output_counts_with(row.ahead)
        penalty = row.presence_penalty + row.frequency_penalty * counts
        logits[torch.from_numpy(tokens).to(logits.device)] -= torch.from_numpy(penalty).to(logits)


def _draw(logits: Sequence[Tensor], rows: Sequence[SamplingRow]) -> npt.NDArray[np.int64]:
    """Return a token of each of the logits [vocabulary]: by the compiled kernel, where there is one."""
    if (ops := native.ops_for(logits[0])) is None:
        return np.array([draw(own, row) for own, row in zip(logits, rows, strict=True)])
    rules = torch.tensor([(row.temperature, row.top_k, row.top_p, row.min_p) for row in rows], dtype=torch.float64)
    keys = np.array([sample_key(row.seed, row.position) for row in rows], dtype=np.uint64)
    tokens = torch.empty(len(rows), dtype=torch.int64)
    ops.sample_tokens(logits, rules, torch.from_numpy(keys.view(np.int64)), tokens)
    return tokens.numpy()


def draw(logits: Tensor, row: SamplingRow) -> int:
    """Return one token of logits [vocabulary] at a temperature. Compiled: `kernels/csrc/sampling.cpp`."""
    # How far below the largest logit: never negative, so that no temperature overflows, and 0 for the likeliest.
    distance = logits.max() - logits
    reach = math.inf  # tokens further away are out
    if 0 < row.top_k < len(distance):
        reach = _reach(distance, torch.ones_like(distance), row.top_k)
    weights = (distance / -row.temperature).exp()  # proportional to the probabilities; the largest is 1
    if reach < math.inf:
        weights = torch.where(distance <= reach, weights, 0.0)
    if row.top_p < 1.0:
        reach = _reach(distance, weights, row.top_p * float(weights.sum(dtype=torch.float64)))
        weights = torch.where(distance <= reach, weights, 0.0)
    if row.min_p > 0.0:
        weights = torch.where(weights >= row.min_p, weights, 0.0)
    return _race(weights, row)


def _reach(distance: Tensor, mass: Tensor, wanted: float) -> float:
    """Return the distance of the last token in the smallest set of nearest tokens whose mass is `wanted`. Everything at
    exactly that distance belongs to the set: no sort guarantees which of equals comes first. Sorting a whole vocabulary
    for every row would cost more than the forward's share of a row. The bits of floats that are not negative order like
    the floats, so their upper half sorts tokens into buckets in one pass, and only the bucket in which the mass is
    reached is sorted. (On a GPU sorting is cheap, and summing into buckets would add in no fixed order.)"""
    before = 0.0
    if distance.is_cpu:
        buckets = (distance.view(torch.int32) >> 16).clamp_(min=0)
        totals = torch.bincount(buckets, weights=mass.double()).cumsum(0)
        crossing = min(int(torch.searchsorted(totals, wanted)), len(totals) - 1)
        before = float(totals[crossing - 1]) if crossing else 0.0
        inside = buckets == crossing
        distance, mass = distance[inside], mass[inside]
    nearest, order = distance.sort()
    within = mass[order].cumsum(0, dtype=torch.float64) + before
    # Rounding may leave the last sum a trifle under what is wanted; then the whole bucket is in.
    return float(nearest[min(int(torch.searchsorted(within, wanted)), len(nearest) - 1)])


def _race(weights: Tensor, row: SamplingRow) -> int:
    """Return the index whose exponential time, divided by its weight, is smallest."""
    every = weights.double().cpu().numpy()
    runners = np.flatnonzero(every > NEGLIGIBLE)
    return int(runners[np.argmin(exponentials(row.seed, row.position, runners) / every[runners])])


def _logprobs(logits: Tensor, token: int, top: int) -> TokenLogprobs:
    logprobs = logits.log_softmax(dim=-1)
    values, ids = logprobs.topk(min(top, len(logprobs)))
    return TokenLogprobs(
        logprob=float(logprobs[token]), top_ids=tuple(ids.tolist()), top_logprobs=tuple(values.tolist())
    )
