"""One token per row of logits: the one entry for engine and tests.

Called by `common.engine.device_sampler`. Dispatches to Triton's kernel on a GPU, else to the torch reference below.
Which rules apply to a row is data on the device, so that a recorded step serves any mixture of rows: penalties, bias,
bans, then greedy, or temperature, top_k, top_p, min_p and a race in which every token left runs for an exponential time
divided by its weight. The random numbers of a row follow from its seed and position alone (SplitMix64).
"""

from __future__ import annotations

import torch
from torch import Tensor

from cohort.kernels.gpu import available as gpu
from cohort.kernels.types import EDIT_KINDS, SampledRows, SamplingTables

GOLDEN, MIX_1, MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
GREEDY_BELOW = 1e-5
NEGLIGIBLE = 2.0**-53 / 37.0


def sample_rows(logits: Tensor, tables: SamplingTables, out: SampledRows) -> None:
    """Sample one token per row of float32 logits [S, vocabulary], which are unchanged afterwards.

    Tokens are those of `common.engine.sampler`, up to the last bits of a logarithm. A row in which no token can run
    (all banned, or not numbers) gets its largest logit's; of equal ones the first, and NaN is larger than any number.
    """
    if (ops := gpu.ops_for(logits)) is not None:
        ops.sample_rows(logits, tables, out)
    else:
        sample_rows_reference(logits, tables, out)


def sample_rows_reference(logits: Tensor, tables: SamplingTables, out: SampledRows) -> None:
    """Compute `sample_rows` row by row in plain torch on any device."""
    starts = tables.edit_starts.tolist()
    for row in range(len(logits)):
        edited = _edited(logits[row], tables, starts[EDIT_KINDS * row : EDIT_KINDS * row + EDIT_KINDS + 1])
        token = edited.argmax()
        if float(tables.temperatures[row]) >= GREEDY_BELOW and bool(edited.amax().isfinite()):
            weights = _weights(edited, tables, row)
            key = sample_key(tables.seeds[row], tables.positions[row])
            token = race(weights, key)
        out.tokens[row] = token
        want = int(tables.wants[row])
        if want >= 0:
            logprobs = logits[row].log_softmax(dim=-1)
            out.logprobs[row] = logprobs[token]
            if want:
                values, ids = logprobs.topk(want)
                out.top_ids[row, :want], out.top_logprobs[row, :want] = ids, values


def _edited(logits: Tensor, tables: SamplingTables, starts: list[int]) -> Tensor:
    if starts[0] == starts[-1]:
        return logits
    logits = logits.clone()
    for kind in range(EDIT_KINDS):
        entries = slice(starts[kind], starts[kind + 1])
        ids, values = tables.edit_ids[entries].long(), tables.edit_values[entries]
        valid = (ids >= 0) & (ids < len(logits))
        ids, values = ids[valid], values[valid]
        old = logits[ids]
        repeated = torch.where(old > 0, old / values, old * values)
        logits[ids] = (repeated, old - values, old + values, torch.full_like(old, float("-inf")))[kind]
    return logits


def _weights(logits: Tensor, tables: SamplingTables, row: int) -> Tensor:
    """Return float32 weights, proportional to the probabilities, the largest 1; 0 for tokens that are out."""
    distance = logits.max() - logits
    weights = (distance / -tables.temperatures[row]).exp()
    nearest, order = distance.sort()
    top_k, top_p = int(tables.top_ks[row]), float(tables.top_ps[row])
    if 0 < top_k < len(logits):
        weights = torch.where(distance <= nearest[top_k - 1], weights, 0.0)
    if top_p < 1.0:
        within = weights[order].cumsum(0, dtype=torch.float64)
        crossing = int(torch.searchsorted(within, top_p * float(weights.sum(dtype=torch.float64))))
        weights = torch.where(distance <= nearest[min(crossing, len(nearest) - 1)], weights, 0.0)
    return torch.where(weights >= tables.min_ps[row], weights, 0.0)


def race(weights: Tensor, key: Tensor) -> Tensor:
    """Return the token whose exponential time, divided by its weight, is smallest; int64 []."""
    drawn = _shifted(_mixed(torch.arange(len(weights), dtype=torch.int64, device=weights.device) ^ key), 11)
    times = -((drawn.double() + 1.0) * 2.0**-53).log()
    wide = weights.double()
    return torch.where(wide > NEGLIGIBLE, times / wide, float("inf")).argmin()


def sample_key(seed: Tensor, position: Tensor) -> Tensor:
    """Return the start of all random numbers of one sample, the bits of an unsigned number in int64."""
    return _mixed(_mixed(seed) ^ position)


def _mixed(value: Tensor) -> Tensor:
    """Run SplitMix64 in 64-bit integers that wrap around; torch shifts arithmetically, so sign copies are cut off."""
    value = value + _signed(GOLDEN)
    value = (value ^ _shifted(value, 30)) * _signed(MIX_1)
    value = (value ^ _shifted(value, 27)) * _signed(MIX_2)
    return value ^ _shifted(value, 31)


def _shifted(value: Tensor, bits: int) -> Tensor:
    return (value >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value
