"""Draws the next tokens of a whole batch on the device: `sampler`'s rules as operations over all rows at once.

Called by `device_steps`. Same order (penalties, bias, bans, temperature, top_k, top_p, min_p, the race), same random
numbers, so the same tokens as `sampler.sample` on the same logits, up to the last bits of a logarithm. Asks the device
for nothing: a row's parameters are known on the host, and the answer stays where the logits are until
`SampledOnDevice.download`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cohort.common.engine.batch import SamplingRow, StepOutput, TokenLogprobs
from cohort.common.engine.counter_random import GOLDEN, MIX_1, MIX_2, sample_key
from cohort.common.engine.device_memory import SAMPLER_BYTES
from cohort.common.engine.sampler import GREEDY_BELOW, NEGLIGIBLE
from cohort.common.engine.uploads import Uploads, host_bytes

_BYTES_PER_LOGIT = 64  # working copy, distance, weights, sorted weights, order, sums, random bits, times


@dataclass(slots=True)
class SampledOnDevice:
    """A batch's tokens, on their way to the host. `wait` what was launched before reading `output`."""

    rows: Sequence[SamplingRow]
    tokens: Tensor  # int64 [S], host
    scored: list[int]  # rows that want log-probabilities
    logprobs: Tensor | None  # float32 [scored], host
    top_ids: Tensor | None  # int64 [scored, most wanted], host
    top_logprobs: Tensor | None  # float32 [scored, most wanted], host
    on_device: Tensor | None = None  # `tokens` where they were sampled, for the step behind this one

    def output(self) -> StepOutput:
        """After the copies to the host are done."""
        logprobs: list[TokenLogprobs | None] = [None] * len(self.rows)
        if self.scored and self.logprobs is not None and self.top_ids is not None and self.top_logprobs is not None:
            answers = zip(
                self.scored, self.logprobs.tolist(), self.top_ids.tolist(), self.top_logprobs.tolist(), strict=True
            )
            for row, logprob, ids, values in answers:
                top = self.rows[row].logprobs
                logprobs[row] = TokenLogprobs(logprob, tuple(ids[:top]), tuple(values[:top]))
        return StepOutput(tokens=self.tokens.numpy().copy(), logprobs=tuple(logprobs))


def sample_on_device(
    logits: Tensor, likeliest: Tensor, rows: Sequence[SamplingRow], uploads: Uploads
) -> SampledOnDevice:
    """One token per row of float32 logits [S, vocabulary], whose largest are `likeliest` [S]; copies to the host are
    launched, not awaited."""
    tokens = likeliest
    stochastic = [index for index, row in enumerate(rows) if not row.plain_greedy]
    if stochastic:
        tokens = tokens.clone()
        at_once = max(1, SAMPLER_BYTES // (_BYTES_PER_LOGIT * logits.shape[1]))
        for start in range(0, len(stochastic), at_once):
            part = stochastic[start : start + at_once]
            (index,) = uploads.put([np.array(part, dtype=np.int64)])
            tokens[index] = _sample(logits.index_select(0, index), [rows[each] for each in part], uploads)
    scored = [index for index, row in enumerate(rows) if row.logprobs >= 0]
    sampled = SampledOnDevice(rows, _to_host(tokens), scored, None, None, None, on_device=tokens)
    if scored:
        (index,) = uploads.put([np.array(scored, dtype=np.int64)])
        chosen, ids, values = _score(logits, tokens, index, max(rows[each].logprobs for each in scored))
        sampled.logprobs, sampled.top_ids, sampled.top_logprobs = _to_host(chosen), _to_host(ids), _to_host(values)
    return sampled


def _score(logits: Tensor, tokens: Tensor, index: Tensor, top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of the rows `index`: the sampled token's log-probability, and the `top` likeliest ids with theirs."""
    logprobs = logits.index_select(0, index).log_softmax(dim=-1)
    values, ids = logprobs.topk(min(top, logprobs.shape[1]), dim=-1)
    return logprobs.gather(1, tokens.index_select(0, index)[:, None])[:, 0], ids, values


def _to_host(tensor: Tensor) -> Tensor:
    host = host_bytes(tensor.nbytes, tensor.device).view(tensor.dtype).view(tensor.shape)
    return host.copy_(tensor, non_blocking=True)


def _sample(logits: Tensor, rows: Sequence[SamplingRow], uploads: Uploads) -> Tensor:
    """int64 [n] for logits [n, vocabulary], which are ours to change."""
    vocab = logits.shape[1]
    _adjust(logits, rows, uploads)
    numbers = np.array([(max(row.temperature, GREEDY_BELOW), row.min_p) for row in rows], dtype=np.float32).reshape(
        len(rows), 2
    )
    keys = np.array([sample_key(row.seed, row.position) for row in rows], dtype=np.uint64).view(np.int64)
    hot = np.array([row.temperature >= GREEDY_BELOW for row in rows])
    device_numbers, device_keys, device_hot = uploads.put([numbers, keys, hot])
    temperature, min_p = device_numbers[:, :1], device_numbers[:, 1:]

    distance = logits.amax(dim=-1, keepdim=True) - logits
    weights = (distance / -temperature).exp_()
    weights = _nearest(distance, weights, rows, uploads)
    if any(row.min_p > 0.0 for row in rows):
        weights = torch.where(weights >= min_p, weights, 0.0)
    raced = _race(weights, device_keys)
    # Below a certain temperature only the maximum is left; also where the race would find none (all are banned).
    greedy = logits.argmax(dim=-1)
    if hot.all():
        return raced
    return torch.where(device_hot, raced, greedy) if vocab else greedy


def _adjust(logits: Tensor, rows: Sequence[SamplingRow], uploads: Uploads) -> None:
    """Penalties, then bias, then bans, as `sampler` applies them."""
    vocab = logits.shape[1]
    seen = _Entries()
    said = _Entries()
    biased = _Entries()
    banned = _Entries()
    for index, row in enumerate(rows):
        if row.penalised and row.history is not None:
            if row.repetition_penalty != 1.0:
                ids = row.history.seen
                seen.add(index, ids, np.full(len(ids), row.repetition_penalty))
            if row.history.output_tokens and (row.presence_penalty != 0.0 or row.frequency_penalty != 0.0):
                unique, counts = row.history.said
                said.add(index, unique, row.presence_penalty + row.frequency_penalty * counts)
        if row.logit_bias is not None:
            biased.add(index, *row.logit_bias.within(vocab))
        if row.banned:
            ids = np.unique([token for token in row.banned if 0 <= token < vocab]).astype(np.int64)
            banned.add(index, ids, np.zeros(len(ids)))
    flat = logits.view(-1)
    if seen:
        where, penalty = uploads.put(seen.arrays(vocab))
        values = flat[where]
        flat[where] = torch.where(values > 0, values / penalty, values * penalty)
    if said:
        where, penalty = uploads.put(said.arrays(vocab))
        flat[where] -= penalty
    if biased:
        where, bias = uploads.put(biased.arrays(vocab))
        flat[where] += bias
    if banned:
        (where,) = uploads.put(banned.arrays(vocab)[:1])
        flat[where] = float("-inf")


class _Entries:
    """(row, id, value) triples; a pair of row and id occurs once."""

    def __init__(self) -> None:
        self._parts: list[tuple[int, npt.NDArray[np.int64], npt.NDArray[np.floating]]] = []

    def __bool__(self) -> bool:
        return bool(self._parts)

    def add(self, row: int, ids: npt.NDArray[np.int64], values: npt.NDArray[np.floating]) -> None:
        if len(ids):
            self._parts.append((row, ids, values))

    def arrays(self, vocab: int) -> list[npt.NDArray[np.generic]]:
        """Flat indices into [rows, vocab], and float32 values."""
        where = np.concatenate([row * vocab + ids for row, ids, _ in self._parts])
        return [where, np.concatenate([values for _, _, values in self._parts]).astype(np.float32)]


def _nearest(distance: Tensor, weights: Tensor, rows: Sequence[SamplingRow], uploads: Uploads) -> Tensor:
    """`weights` without the tokens that top_k, then top_p leave out; everything at the last distance stays."""
    vocab = distance.shape[1]
    limited = [i for i, row in enumerate(rows) if 0 < row.top_k < vocab or row.top_p < 1.0]
    if not limited:
        return weights
    counts = [rows[i].top_k if 0 < rows[i].top_k < vocab else vocab for i in limited]
    index, last, share = uploads.put(
        [
            np.array(limited, dtype=np.int64),
            np.array(counts, dtype=np.int64)[:, None] - 1,
            np.array([rows[i].top_p for i in limited], dtype=np.float64)[:, None],
        ]
    )
    distance, kept = distance.index_select(0, index), weights.index_select(0, index)
    nearest, order = distance.sort(dim=-1)
    kept = torch.where(distance <= nearest.gather(1, last), kept, 0.0)
    if any(rows[i].top_p < 1.0 for i in limited):
        within = kept.gather(1, order).cumsum(dim=-1, dtype=torch.float64)
        crossing = torch.searchsorted(within, share * kept.sum(dim=-1, keepdim=True, dtype=torch.float64))
        reach = nearest.gather(1, crossing.clamp_(max=vocab - 1))
        # top_p 1 keeps everything, whatever the sums round to
        kept = torch.where((distance <= reach) | (share >= 1.0), kept, 0.0)
    return weights.index_copy(0, index, kept)


def _race(weights: Tensor, keys: Tensor) -> Tensor:
    """int64 [n]: per row the token whose exponential time, divided by its weight, is smallest."""
    value = torch.arange(weights.shape[1], dtype=torch.int64, device=weights.device)[None, :] ^ keys[:, None]
    # SplitMix64 in 64-bit integers that wrap around; torch shifts them arithmetically, so the sign's copies are cut off
    value.add_(_signed(GOLDEN))
    value.bitwise_xor_(_shifted(value, 30)).mul_(_signed(MIX_1))
    value.bitwise_xor_(_shifted(value, 27)).mul_(_signed(MIX_2))
    value.bitwise_xor_(_shifted(value, 31))
    times = _shifted(value, 11).double().add_(1.0).mul_(2.0**-53).log_().neg_()
    wide = weights.double()
    return torch.where(wide > NEGLIGIBLE, times / wide, float("inf")).argmin(dim=-1)


def _shifted(value: Tensor, bits: int) -> Tensor:
    return (value >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value
