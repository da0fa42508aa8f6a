"""A prompt as the length model sees it: a few named numbers, and hashed token n-grams.

Decides which facts about a request may inform a prediction. Called for every prediction and every observation, so
its cost is bounded: of a long prompt only the head and the tail are read. Never looks at the answer, keeps nothing.

To add a feature: append one `_Compact` entry to `COMPACT` (a name and a function of `LengthFacts`). State learned under
another list is recognised by `layout()` and started afresh.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cohort.common.messages import LengthFacts

HASH_DIMS = 2048
HEAD_TOKENS = 512  # read from the prompt's start: instructions and system prompts
TAIL_TOKENS = 512  # and from its end: the question, mostly
EDGE_TOKENS = 48  # the outermost tokens also count as n-grams of their own region

_BODY, _BIGRAM, _FIRST, _LAST = (np.uint64(s) for s in (0x9E3779B9, 0x85EBCA6B, 0xC2B2AE35, 0x27D4EB2F))
_MIX_A = np.uint64(0x9E3779B97F4A7C15)
_MIX_B = np.uint64(0xC2B2AE3D27D4EB4F)
_INT64_MAX = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class FeatureVector:
    """One request as numbers: dense `compact`, and a sparse bag of hashed n-grams (`buckets` with `counts`)."""

    compact: NDArray[np.float32]
    buckets: NDArray[np.uint16]
    counts: NDArray[np.uint8]


class _Compact(NamedTuple):
    name: str
    of: Callable[[LengthFacts, NDArray[np.int64]], float]


COMPACT: tuple[_Compact, ...] = (
    _Compact("log_prompt_tokens", lambda f, _: math.log1p(len(f.tokens))),
    _Compact("prompt_tokens", lambda f, _: float(len(f.tokens))),
    _Compact("chat", lambda f, _: float(f.chat)),
    _Compact("log_max_tokens", lambda f, _: math.log1p(max(0, f.max_tokens))),
    _Compact("temperature", lambda f, _: f.temperature),
    _Compact("stop_strings", lambda f, _: float(f.stop_strings)),
    _Compact("bytes_per_token", lambda f, _: f.text_bytes / max(1, len(f.tokens))),
    _Compact("distinct_share", lambda _, read: len(set(read.tolist())) / max(1, len(read))),
)
_LARGEST = 1e9  # keeps absurd input (a temperature of 1e300) finite in float32


def layout() -> str:
    """Return the feature set's name; state learned under another one cannot be read."""
    names = ",".join(feature.name for feature in COMPACT)
    return f"v1;{names};hash={HASH_DIMS};head={HEAD_TOKENS};tail={TAIL_TOKENS};edge={EDGE_TOKENS}"


def extract(facts: LengthFacts) -> FeatureVector:
    """Extract the features; finite for any input."""
    read = _read(facts.tokens)
    compact = np.fromiter((_finite(feature.of(facts, read)) for feature in COMPACT), np.float32, len(COMPACT))
    table = np.bincount(_hashed_ngrams(read), minlength=HASH_DIMS)
    buckets = np.flatnonzero(table)
    return FeatureVector(compact, buckets.astype(np.uint16), np.minimum(table[buckets], 255).astype(np.uint8))


def ngram_weights(counts: NDArray[np.uint8]) -> NDArray[np.float64]:
    """Return term weights of one bag: log-damped counts of unit length, so that long prompts do not dominate."""
    weights = np.log1p(counts.astype(np.float64))
    norm = math.sqrt(float(weights @ weights))
    return weights / norm if norm else weights


def _finite(value: float) -> float:
    return min(max(value, -_LARGEST), _LARGEST) if math.isfinite(value) else 0.0


def _read(tokens: Sequence[int]) -> NDArray[np.int64]:
    """Return head and tail of the prompt as an array; token ids may be any integers."""
    if len(tokens) > HEAD_TOKENS + TAIL_TOKENS:
        tokens = [*tokens[:HEAD_TOKENS], *tokens[-TAIL_TOKENS:]]
    try:
        return np.array(tokens, dtype=np.int64)
    except OverflowError:
        return np.array([token & _INT64_MAX for token in tokens], dtype=np.int64)


def _hashed_ngrams(read: NDArray[np.int64]) -> NDArray[np.int64]:
    ids = read.view(np.uint64)
    with np.errstate(over="ignore"):
        mixed = ids * _MIX_A
        keys = np.concatenate(
            [
                mixed + _BODY,
                mixed[:-1] + ids[1:] * _MIX_B + _BIGRAM,
                mixed[:EDGE_TOKENS] + _FIRST,
                mixed[-EDGE_TOKENS:] + _LAST,
            ]
        )
        keys ^= keys >> np.uint64(29)
        keys *= _MIX_B
    return (keys >> np.uint64(64 - (HASH_DIMS.bit_length() - 1))).astype(np.int64)
